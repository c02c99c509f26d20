"""A stand-in for CUDA graphs: launches of emulated kernels that are noted, and repeated with the
same addresses.

Between launches, memory that TVM's allocator has free is full of NaN, and is looked at afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tvm
import tvm_ffi
from compile_cuda import TARGET, Emulation, compile_for_cuda
from tvm import relax

from relax_grad.gpu import devices
from relax_grad.training import _graph

#: The pages of 4096 bytes of the tensors that take free memory, and the tensors of each size.
_PAGES, _COPIES = range(1, 5), 60

#: A device of the CPU whose tensors compiled functions do not take for the host's.
_DEVICE = tvm.cpu(1)

#: The arguments of a trainer on the stand-in.
OPTIONS = {"device": "cuda", "target": TARGET}


class Driver:
    """The driver.

    Attributes
    ----------
    captures, launched : int
        The numbers of captures and of launches of graphs.
    names : set[str]
        The names of the captured kernels.
    graphs : list
        The kernels of each graph with their arguments; None for a destroyed one.
    """

    def __init__(self):
        self.captures = self.launched = 0
        self.names: set[str] = set()
        self.graphs: list[list[tuple] | None] = [None]
        self._kernels: list[tuple] | None = None
        self._poison = _poison()

    def begin(self, stream: int) -> None:
        assert self._kernels is None
        self._kernels = []

    def end(self, stream: int) -> int:
        self.graphs.append(self._kernels)
        self._kernels = None
        self.captures += 1
        return len(self.graphs) - 1

    def destroy(self, graph: int) -> None:
        self.graphs[graph] = None

    def launches(self, graph: int) -> Iterator[int]:
        yield self._launch(graph)

    def _launch(self, graph: int) -> int:
        poisoned = list(self._poison())
        assert all(np.isnan(each.numpy()).all() for each in poisoned)
        for emulation, kernel, arguments in self.graphs[graph]:
            _launch(emulation, kernel, *arguments)
        self.launched += 1
        assert all(np.isnan(each.numpy()).all() for each in poisoned), "others' memory is written"
        return 0

    def kernel(self, emulation: Emulation, kernel: str, *arguments) -> None:
        """Note a kernel during a capture, or run it."""
        if self._kernels is None:
            _launch(emulation, kernel, *arguments)
        else:
            self._kernels.append((emulation, kernel, arguments))
            self.names.add(kernel)


_launch = Emulation.launch


def _poison() -> Callable:
    """Return a function that returns tensors full of NaN in memory of TVM's allocator."""
    nan = relax.Var("nan", relax.TensorType((1,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [nan]):
        shapes = [(1024 * pages,) for pages in _PAGES for _ in range(_COPIES)]
        tensors = [bb.emit(relax.op.broadcast_to(nan, shape)) for shape in shapes]
        bb.emit_func_output(relax.Tuple(tensors))
    function = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), _DEVICE)["main"]
    return lambda: function(tvm.runtime.tensor(np.array([np.nan], "float32"), _DEVICE))


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Let trainers call the functions themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_graph.Graphs, "launch", lambda *_: None)
        yield


@contextlib.contextmanager
def emulated_graphs() -> Iterator[Driver]:
    """Let ``device="cuda"`` be the emulator of kernels, and yield its driver.

    The trainers in it have steps of one module: kernels are found by their names.
    """
    driver = Driver()
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        known: list = []

        def compiled(module, _target, options, *_):
            for other, executable in known:
                if tvm_ffi.structural_equal(module, other):
                    return executable
            made = compile_for_cuda(module, options["relax_pipeline"])
            assert made.on_host == []
            stack.enter_context(made.emulate())
            known.append((module, made.executable))
            return made.executable

        patch.setattr(devices, "present", lambda *_: _DEVICE)
        patch.setattr(devices, "compiled", compiled)
        patch.setattr(_graph, "Driver", lambda: driver)
        patch.setattr(Emulation, "launch", lambda *arguments: driver.kernel(*arguments))
        yield driver
