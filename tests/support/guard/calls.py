"""Calls of kernels between guard pages, with the values of the program and with other values."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import tvm
from tvm import tirx

from relax_grad.ir.compat import Analyzer, dtype_of
from relax_grad.testing import _program

from .memory import Place, Workspaces
from .programs import FLOAT_DTYPES, Kernel

#: A place for each buffer of a kernel and each placement, so that its pages stay open between runs.
_places: dict[tuple[int, bool], Place] = defaultdict(Place)


def _bytes(tensor) -> bytes:
    return tensor.numpy().tobytes()


def _without_bits_of_nan(data: bytes, dtype: str) -> bytes:
    """Replace every NaN by the same one: its bits depend on which operand of an instruction is in
    memory."""
    numbers = np.frombuffer(data, _program.numpy_dtype(dtype))
    if dtype not in FLOAT_DTYPES:
        return data
    return np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers).tobytes()


class Call:
    """A call of a kernel: its arguments are input tensors, output tensors, and integers for
    extents."""

    def __init__(self, kernel: Kernel, function, args, allocating: Workspaces | None):
        self.kernel, self.function, self.args = kernel, function, args
        self.allocating = allocating
        self.tensors = [arg for arg in args if isinstance(arg, tvm.runtime.Tensor)]

    @property
    def key(self) -> str:
        return f"{self.kernel.hash} {self.kernel.ours} {self.title.partition('(')[2]}"

    @property
    def title(self) -> str:
        """The name of the kernel and its arguments."""
        types = [
            f"{arg.dtype}{list(arg.shape)}" if isinstance(arg, tvm.runtime.Tensor) else str(arg)
            for arg in self.args
        ]
        return f"{self.kernel.name}({', '.join(types)})"

    @property
    def inputs(self) -> list[bytes]:
        return [_bytes(tensor) for tensor in self.tensors[: -self.kernel.outputs]]

    def outputs(self) -> list:
        return self.tensors[-self.kernel.outputs :]

    def results(self) -> list[bytes]:
        """Return the contents of the outputs in the form of :meth:`replay`."""
        return [
            _without_bits_of_nan(_bytes(output), str(output.dtype)) for output in self.outputs()
        ]

    @functools.cached_property
    def workspaces(self) -> list[tuple]:
        """The shape and dtype of each buffer that the kernel allocates."""
        if not self.kernel.workspaces:
            return []
        analyzer, known = Analyzer(), set()
        for parameter, arg in zip(self.kernel.parameters, self.args, strict=True):
            if isinstance(arg, tvm.runtime.Tensor):
                pairs = zip(parameter.ty.shape, arg.shape, strict=True)
            else:
                pairs = [(parameter, arg)]
            for dim, extent in pairs:
                if isinstance(dim, tirx.Var) and dim not in known:
                    known.add(dim)
                    analyzer.bind(dim, tirx.const(extent, str(dim.ty.dtype)))
        return [
            (tuple(int(analyzer.simplify(d)) for d in buffer.ty.shape), dtype_of(buffer.ty))
            for buffer in self.kernel.workspaces
        ]

    def replay(self, inputs: Sequence[bytes], at_end: bool, fill: int) -> tuple:
        """Run the kernel between guard pages; return its results (None after an error) and the
        faults."""
        buffers = []

        def hold(shape, dtype, content=None):
            size = math.prod(shape) * _program.numpy_dtype(dtype).itemsize
            content = bytes([fill]) * size if content is None else content
            place = _places[len(buffers), at_end]
            buffers.append(place.hold(content, shape, dtype, at_end, fill))
            return buffers[-1].tensor

        contents = itertools.chain(inputs, itertools.repeat(None))
        args = [
            hold(arg.shape, str(arg.dtype), next(contents))
            if isinstance(arg, tvm.runtime.Tensor)
            else arg
            for arg in self.args
        ]
        args += [hold(shape, dtype) for shape, dtype in self.workspaces]
        raised = False
        if self.allocating:
            self.allocating.at_end, self.allocating.fill = at_end, fill
        try:
            (self.kernel.guarded or self.function)(*args)
        except Exception:  # an error is not an out-of-bounds access
            raised = True
        faults = []
        if not all(buffer.is_clean() for buffer in buffers):
            faults.append("bytes next to a buffer were overwritten")
        if [buffer.data() for buffer in buffers[: len(inputs)]] != list(inputs):
            faults.append("an input was overwritten")
        if self.allocating:
            faults += self.allocating.faults
            self.allocating.faults = []
        results = [
            _without_bits_of_nan(buffer.data(), str(tensor.dtype))
            for buffer, tensor in zip(
                buffers[len(inputs) : len(self.tensors)], self.outputs(), strict=True
            )
        ]
        return None if raised else results, faults


#: The values that replace floats.
_FLOATS = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3e9, -3e9, 1e4, -1e4, 0.3]


def variations(call: Call) -> Iterator[tuple[str, list[bytes]]]:
    """Yield other contents for the inputs of a kernel, each with a description."""
    dtypes = [_program.numpy_dtype(str(tensor.dtype)) for tensor in call.tensors]
    own = [np.frombuffer(d, dtype) for d, dtype in zip(call.inputs, dtypes, strict=False)]
    extents = {extent for tensor in call.tensors for extent in tensor.shape}
    integers = [i for i, array in enumerate(own) if array.dtype.kind in "iu" and array.size]
    floats = [i for i, array in enumerate(own) if array.dtype.name in FLOAT_DTYPES and array.size]
    rng = np.random.default_rng(zlib.crc32(call.key.encode()))
    pools = {i: _extremes(extents, own[i].dtype) for i in integers}
    pools.update({i: np.array(_FLOATS).astype(own[i].dtype) for i in floats})

    def constant(which, value):
        return [np.full_like(a, value(i)) if i in which else a for i, a in enumerate(own)]

    def mixed(which, share):
        return [
            np.where(rng.random(a.size) < share, rng.choice(pools[i], a.size), a)
            if i in which
            else a
            for i, a in enumerate(own)
        ]

    def contents():
        for value in _extremes(extents, np.dtype("int64")) if integers else ():
            fitting = [i for i in integers if value in pools[i]]
            if fitting:
                yield f"integers {value}", constant(fitting, lambda _, value=value: value)
        for k, value in enumerate(_FLOATS if floats else ()):
            yield f"floats {value}", constant(floats, lambda i, k=k: pools[i][k])
        kinds = [("integers", integers), ("floats", floats), ("numbers", integers + floats)]
        for kind, which in kinds:
            for share in (0.1, 0.3, 1.0) if which else ():
                for n in range(8 if integers and kind != "floats" else 2):
                    yield f"{kind} {share} mixed {n}", mixed(which, share)
        for i in integers if len(integers) > 1 else ():
            for n in range(6):
                yield f"integers of input {i} mixed {n}", mixed([i], 1.0)

    with np.errstate(all="ignore"):
        for what, arrays in contents():
            yield what, [array.tobytes() for array in arrays]


def _extremes(extents: set[int], dtype: np.dtype) -> np.ndarray:
    """Return integers at and beyond the limits of axes and dtypes that the dtype can represent."""
    around = (
        v for extent in extents for v in (extent - 1, extent, extent + 1, -extent, -extent - 1)
    )
    powers = (
        sign * 2**power + offset
        for power in (31, 32, 61, 63)
        for sign in (1, -1)
        for offset in (-1, 0, 1)
    )
    info = np.iinfo(dtype)
    values = {0, 1, 2, -1, -2, 10**6, -(10**6), info.min, info.max, *around, *powers}
    return np.array(sorted(v for v in values if info.min <= v <= info.max), dtype)
