"""Run differentiated programs with every buffer between pages that must not be touched.

``python guard.py`` reads a pickled list of :class:`Case` from standard input and runs them one after the
other; a read or write out of bounds ends the process with a signal. The few bytes between a buffer's end
and the next page are filled with NaN, which shows up in what reads them, and are compared afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_PAGE = mmap.PAGESIZE
_GUARD = 4096 * _PAGE  # 16 MiB on each side: an index has to be far off to jump over it
_PROT_NONE = 0
_FILL = 0xFF  # a NaN in every floating-point dtype


@dataclass(frozen=True)
class Case:
    """One call of an operator; with ``differentiate``, its gradient runs as well.

    ``nan`` says that NaN is what the operator returns for these inputs.
    """

    name: str
    op: str
    inputs: Sequence
    attrs: Mapping = field(default_factory=dict)
    differentiate: bool = True
    nan: bool = False


class Guarded:
    """An array in memory of its own, with inaccessible pages before and after."""

    def __init__(self, value: np.ndarray):
        size = max(1, -(-value.nbytes // _PAGE)) * _PAGE
        self._map = mmap.mmap(-1, size + 2 * _GUARD, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Kernels rely on an alignment of 64 bytes, so up to 63 lie between the buffer and the guard.
        start = (size - value.nbytes) // 64 * 64
        self._inside = slice(start, start + value.nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8, size, _GUARD)
        self._bytes[:] = _FILL
        self.array = np.frombuffer(self._map, value.dtype, value.size, _GUARD + start)
        self.array = self.array.reshape(value.shape)
        self.array[...] = value
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in (0, _GUARD + size):
            if libc.mprotect(ctypes.c_void_p(base + offset), _GUARD, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def check(self) -> None:
        assert np.all(np.delete(self._bytes, self._inside) == _FILL), (
            "bytes next to a buffer were overwritten"
        )


def check_out_of_bounds(cases: Sequence[Case]) -> None:
    """Run cases in a process of their own and fail with the name of the one that ended it."""
    result = subprocess.run(
        [sys.executable, __file__], input=pickle.dumps(cases), capture_output=True, check=False
    )
    log = result.stdout.decode().splitlines()
    assert result.returncode == 0, (
        f"{log[-1] if log else 'nothing'} was running when the process ended with "
        f"{result.returncode}: {result.stderr.decode()[-2000:]}"
    )
    assert log == [case.name for case in cases]


def _run(case: Case) -> None:
    """Compile each function of the legalized program, and run them in order between guard pages."""
    import tvm
    from tvm import relax

    from relax_grad.testing import _program, check

    arguments = _program.make_arguments(case.inputs, None, {})
    _, function = check.resolve(case.op)
    program = _program.first_order(function, arguments, case.attrs, np.random.default_rng(0))
    if case.differentiate:
        wrt = check.select_wrt(program.arguments, None)
        module, name = _program.differentiate(program, wrt), "main_adjoint"
    else:
        module, name = program.module, "main"
    module = relax.transform.LegalizeOps()(module)
    main = module[name]
    values = dict(zip(main.params, map(Guarded, program.values()), strict=True))

    def value_of(expr):
        if isinstance(expr, relax.Var):
            return values[expr]
        if isinstance(expr, relax.Tuple):
            return [value_of(item) for item in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return value_of(expr.tuple_value)[expr.index]
        if isinstance(expr, type(relax.const(0))):
            return Guarded((expr.data if hasattr(expr, "data") else expr.value).numpy())
        assert expr.op.name == "relax.call_tir", expr
        inputs = [value_of(argument) for argument in expr.args[1].fields]
        many = isinstance(expr.ty, relax.TupleType)
        outputs = [
            Guarded(np.zeros([int(dim) for dim in leaf.shape.values], _program.dtype_of(leaf)))
            for leaf in (expr.ty.fields if many else [expr.ty])
        ]
        kernel = tvm.compile(
            module[expr.args[0]].with_attr("global_symbol", "kernel"), target="llvm"
        )
        kernel["kernel"](*(tvm.runtime.from_dlpack(buffer.array) for buffer in (*inputs, *outputs)))
        for buffer in (*inputs, *outputs):
            buffer.check()
        return outputs if many else outputs[0]

    for block in main.body.blocks:
        for binding in block.bindings:
            values[binding.var] = value_of(binding.value)
    result = value_of(main.body.body)
    finite = not any(np.isnan(buffer.array).any() for buffer in _flatten(result))
    assert finite or case.nan, f"{case.name}: NaN was read next to a buffer"


def _flatten(value):
    return (
        [leaf for item in value for leaf in _flatten(item)] if isinstance(value, list) else [value]
    )


if __name__ == "__main__":
    import relax_grad  # noqa: F401  (registers what the cases differentiate)

    # The cases were pickled by a module that imports this one under its name.
    sys.modules["guard"] = sys.modules["__main__"]
    for case in pickle.load(sys.stdin.buffer):
        print(case.name, flush=True)
        _run(case)
