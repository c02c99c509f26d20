"""Run tensor expressions on arrays, and compare the results with expected ones.

Every array lies between two fences in memory, which must be intact afterwards. Expressions for the
threads of a GPU run as serial loops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from sweep import TARGET
from threads import without_threads
from tvm import te, tirx

from relax_grad.topi.util import on_gpu


@dataclass(frozen=True)
class Kernel:
    """A tensor expression with its inputs and its result.

    Attributes
    ----------
    expression : Callable
        A function of a placeholder for each input; it gets None for a None.
    inputs : Sequence[np.ndarray or None]
        The input arrays.
    expected : np.ndarray
        The expected result.
    dtype : str
        The dtype of the expected result.
    tolerance : float
        The accepted absolute and relative error; 0 requires equality of every element.
    symbolic : bool
        Whether the extents of the inputs are variables, one for each distinct size.
    static : Collection[int]
        The indices of inputs whose extents stay static.
    """

    expression: Callable
    inputs: Sequence[np.ndarray | None]
    expected: np.ndarray
    dtype: str = "float64"
    tolerance: float = 0.0
    symbolic: bool = False
    static: Collection[int] = ()


def check_kernels(kernels: Iterable[Kernel], target=TARGET) -> None:
    """Run kernels, compiled in one module, and compare the results with the expected ones."""
    kernels = list(kernels)
    for kernel, result in zip(kernels, run_kernels(kernels, target), strict=True):
        tolerance = kernel.tolerance
        np.testing.assert_allclose(result, kernel.expected, tolerance, tolerance, err_msg=kernel)


def run_kernels(kernels: Sequence[Kernel], target=TARGET) -> list[np.ndarray]:
    """Run kernels, compiled in one module; only the shapes of the expected results are used."""
    module = tvm.IRModule(
        {
            f"kernel_{i}": _prim_func(kernel).with_attr("global_symbol", f"kernel_{i}")
            for i, kernel in enumerate(kernels)
        }
    )
    # LLVM would take long to optimize the loops that stand for GPU threads.
    executable = tvm.compile(module, target=TARGET if on_gpu() else target)
    return [_run(executable[f"kernel_{i}"], kernel) for i, kernel in enumerate(kernels)]


def run(expression, inputs, shape, dtype, symbolic=False) -> np.ndarray:
    """Compile one tensor expression and run it."""
    (result,) = run_kernels([Kernel(expression, inputs, np.empty(shape), dtype, symbolic=symbolic)])
    return result


def int64(size: int) -> tirx.IntImm:
    """Return an extent as in Relax: TVM simplifies int32 indices differently."""
    return tirx.IntImm("int64", size)


class Fenced:
    """An array between two fences of NaN, or of the largest integer, in the same allocation."""

    FENCE = 4096

    def __init__(self, array):
        line = 64 // array.itemsize  # TVM requires 64-byte alignment
        is_float = np.issubdtype(array.dtype, np.floating)
        self._fill = np.nan if is_float else np.iinfo(array.dtype).max
        memory = np.full(2 * self.FENCE + array.size + line, self._fill, array.dtype)
        skip = -memory.ctypes.data % 64 // array.itemsize + self.FENCE
        self.array = memory[skip : skip + array.size].reshape(array.shape)
        self.array[...] = array
        self._outside = memory[:skip], memory[skip + array.size :]

    def tensor(self):
        if not self.array.size:  # NumPy gives an empty view any address, TVM requires alignment
            return tvm.runtime.tensor(self.array)
        return tvm.runtime.from_dlpack(self.array)

    def intact(self) -> bool:
        return all(np.array_equal(p, np.full_like(p, self._fill), True) for p in self._outside)


def _prim_func(kernel: Kernel) -> tirx.PrimFunc:
    sizes = {}

    def placeholder(i, array):
        def extent(size):
            if not kernel.symbolic or i in kernel.static:
                return int64(size)
            return sizes.setdefault(size, tirx.Var(f"n{size}", "int64"))

        return te.placeholder(list(map(extent, array.shape)), array.dtype.name, name=f"x{i}")

    arguments = [
        None if array is None else placeholder(i, array) for i, array in enumerate(kernel.inputs)
    ]
    result = kernel.expression(*arguments)
    assert result.dtype == kernel.dtype
    assert len(result.shape) == kernel.expected.ndim
    function = te.create_prim_func([*(a for a in arguments if a is not None), result])
    return without_threads(function)


def _run(function, kernel: Kernel) -> np.ndarray:
    inputs = [array for array in kernel.inputs if array is not None]
    fenced = [Fenced(array) for array in (*inputs, np.full(kernel.expected.shape, 7, kernel.dtype))]
    function(*(item.tensor() for item in fenced))
    assert all(item.intact() for item in fenced), kernel
    for item, array in zip(fenced, inputs, strict=False):
        np.testing.assert_array_equal(item.array, array, err_msg=kernel)
    return fenced[-1].array
