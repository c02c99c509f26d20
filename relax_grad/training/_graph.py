"""CUDA graphs of compiled steps: captured once, and launched while nothing has moved.

A graph has the addresses of all memory that its kernels use. The compiled function returns the
memory that it takes, which is kept with the graph. Parameters, states and the state of the
optimizer are written in place, and their addresses are compared before each launch. All other
arguments are copied to memory of the graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from ..gpu.graphs import GRAPH

#: The capture does not forbid other calls of CUDA: TVM's allocator may need memory.
_RELAXED = 2


class Driver:
    """Graphs of CUDA's driver.

    Parameters
    ----------
    library : str
        The path of its library, which TVM has loaded.
    """

    def __init__(self, library: str = "libcuda.so.1"):
        self._library = ctypes.CDLL(library)

    def begin(self, stream: int) -> None:
        """Begin to capture the kernels of a stream."""
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), _RELAXED)

    def end(self, stream: int) -> int:
        """End the capture, and return an executable graph."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            flags = ctypes.c_ulonglong(0)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, flags)
        finally:
            self._call("cuGraphDestroy", graph)
        assert made.value is not None
        return made.value

    def launches(self, graph: int) -> Iterator[int]:
        """Return an iterator that launches a graph in the default stream and yields CUDA's code.

        No bytecode of Python runs in it.
        """
        launch = self._library["cuGraphLaunch"]
        return map(launch, [ctypes.c_void_p(graph)], [ctypes.c_void_p(0)])

    def destroy(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._library[name](*arguments)
        if code:
            raise RuntimeError(f"{name} of CUDA returned the error {code}")


class Graphs:
    """The graphs of the functions of a virtual machine.

    Parameters
    ----------
    machine : relax.VirtualMachine
        The machine.
    device : tvm.Device
        Its device.
    """

    def __init__(self, machine: relax.VirtualMachine, device: tvm.runtime.Device):
        self._machine, self._device, self._driver = machine, device, Driver()
        self._stream = device.create_raw_stream()
        weakref.finalize(self, device.free_raw_stream, self._stream)
        self._called: set[str] = set()
        self._graphs: dict[str, _Graph] = {}

    def launch(self, name: str, arguments: Sequence) -> Callable[[], Sequence] | None:
        """Return a function that launches a graph for these arguments and returns its results.

        The results are in the same memory each time. For the first call of a function, which loads
        its kernels, return None.
        """
        if name not in self._called:
            self._called.add(name)
            return None
        graph = self._graphs.get(name)
        if graph is None or not graph.fits(arguments):
            self._graphs.pop(name, None)  # frees its memory
            graph = _Graph(self._driver, self._device, arguments)
            graph.capture(self._machine[name + GRAPH], self._stream)
            self._graphs[name] = graph
        return graph.launch(arguments)


class _Graph:
    """A captured function.

    Parameters
    ----------
    driver : Driver
        The driver.
    device : tvm.Device
        The device.
    arguments : Sequence
        Tensors, which are copied to memory of the graph, and lists of tensors of the device, which
        the graph reads and writes where they are.
    """

    def __init__(self, driver: Driver, device: tvm.runtime.Device, arguments: Sequence):
        self._driver, self._device = driver, device
        # The tensors in place are kept: nothing else gets their addresses.
        self._arguments = [
            tvm.runtime.empty(each.shape, each.dtype, device) if _is_tensor(each) else list(each)
            for each in arguments
        ]
        self._results: Sequence = ()
        self._memory: object = None
        self._graph: int | None = None

    def capture(self, function: Callable, stream: int) -> None:
        """Capture a function, which computes nothing yet."""
        self._driver.begin(stream)
        try:
            with tvm_ffi.use_raw_stream(self._device, stream):
                *results, self._memory = function(*self._arguments)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._driver.destroy(self._driver.end(stream))
            raise
        graph = self._driver.end(stream)
        weakref.finalize(self, self._driver.destroy, graph)
        own = {each.data_ptr() for group in self._groups() for each in group}
        moved = [
            tensor for group in results[3:6] for tensor in group if tensor.data_ptr() not in own
        ]
        if moved:
            raise ValueError(
                f"a CUDA graph cannot have a step that does not write {len(moved)} of its tensors "
                "in place; leave graph out"
            )
        self._results, self._graph = results, graph

    def _groups(self) -> list[list]:
        return [each for each in self._arguments if not _is_tensor(each)]

    def fits(self, arguments: Sequence) -> bool:
        """Tell whether all tensors in place are where they were, and the others have the shapes."""
        if len(arguments) != len(self._arguments):
            return False
        return all(
            _is_tensor(own) == _is_tensor(each)
            and (_is_like(own, each) if _is_tensor(own) else _are_there(own, each))
            for own, each in zip(self._arguments, arguments, strict=True)
        )

    def launch(self, arguments: Sequence) -> Callable[[], Sequence]:
        """Copy arguments to the memory of the graph, and return the function that launches it,
        which no interrupt divides."""
        for own, each in zip(self._arguments, arguments, strict=True):
            if _is_tensor(own):
                each.copyto(own)
        assert self._graph is not None
        results = _Results({0: self._results})
        codes = self._driver.launches(self._graph)
        return functools.partial(next, map(results.__getitem__, codes))


class _Results(dict):
    """The results by CUDA's code for success."""

    def __missing__(self, code: int) -> None:
        raise RuntimeError(f"cuGraphLaunch of CUDA returned the error {code}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, tvm.runtime.Tensor)


def _is_like(one: tvm.runtime.Tensor, other: tvm.runtime.Tensor) -> bool:
    return one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)


def _are_there(own: Sequence, tensors: Sequence) -> bool:
    return len(own) == len(tensors) and all(
        one.data_ptr() == other.data_ptr() and _is_like(one, other)
        for one, other in zip(own, tensors, strict=True)
    )
