"""Run one backward operator with every buffer between pages that must not be touched.

``python guard.py`` reads a pickled list of cases from standard input and runs them one after the other; a read
or write out of bounds ends the process with a signal. The few bytes between a buffer's end and the next page are
filled with a pattern: a NaN for what reads them, and a check afterwards for what writes them.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import subprocess
import sys

import numpy as np

_PAGE = mmap.PAGESIZE
_GUARD_PAGES = 4096  # 16 MiB on each side: an index has to be far off to jump over it
_FILL = 0xFF  # a NaN in every floating-point dtype


class Guarded:
    """An array in memory of its own, with inaccessible pages before and after."""

    def __init__(self, value: np.ndarray):
        pages = max(1, -(-value.nbytes // _PAGE))
        total = (pages + 2 * _GUARD_PAGES) * _PAGE
        self._map = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Kernels rely on 64 byte alignment, so the buffer ends up to 63 bytes before the guard.
        start = _GUARD_PAGES * _PAGE + (pages * _PAGE - value.nbytes) // 64 * 64
        self._slack = np.frombuffer(self._map, np.uint8, pages * _PAGE, _GUARD_PAGES * _PAGE)
        self._slack[:] = _FILL
        self.array = np.frombuffer(self._map, value.dtype, value.size, start).reshape(value.shape)
        self.array[...] = value
        self._inside = slice(
            start - _GUARD_PAGES * _PAGE, start - _GUARD_PAGES * _PAGE + value.nbytes
        )
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in (0, (_GUARD_PAGES + pages) * _PAGE):
            if libc.mprotect(
                ctypes.c_void_p(base + offset),
                _GUARD_PAGES * _PAGE,
                mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0,
            ):
                raise OSError(ctypes.get_errno(), "mprotect")

    def check(self) -> None:
        outside = np.delete(self._slack, self._inside)
        assert np.all(outside == _FILL), "bytes next to the buffer were overwritten"


def run_case(name: str, op: str, inputs: list, attrs: dict) -> None:
    """Legalize one call, compile each of its functions, and run them between guard pages."""
    import tvm
    from tvm import relax

    from relax_grad.testing import check

    _, builder = check.resolve(op)
    params, values = [], []

    def to_expr(value):
        if isinstance(value, np.ndarray):
            params.append(
                relax.Var(f"x{len(params)}", relax.TensorType(value.shape, value.dtype.name))
            )
            values.append(value)
            return params[-1]
        return value

    args = [to_expr(value) for value in inputs]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(builder(*args, **attrs))
        bb.emit_func_output(result)
    module = relax.transform.LegalizeOps()(bb.get())
    primfuncs = [gv for gv, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    (primfunc,) = primfuncs
    shape = [int(dim) for dim in result.ty.shape.values]
    dtype = str(getattr(result.ty.dtype, "dtype", result.ty.dtype))
    kernel = tvm.compile(module[primfunc].with_attr("global_symbol", "kernel"), target="llvm")
    call = module["main"].body.blocks[0].bindings[0].value
    order = [params.index(arg) for arg in call.args[1].fields]
    guarded = [Guarded(values[i]) for i in order]
    output = Guarded(np.zeros(shape, dtype))
    tensors = [tvm.runtime.from_dlpack(g.array) for g in (*guarded, output)]
    kernel["kernel"](*tensors)
    for item in (*guarded, output):
        item.check()
    assert not np.isnan(output.array).any(), f"{name}: a value was read next to a buffer"


def check_out_of_bounds(cases: list[tuple[str, str, list, dict]]) -> None:
    """Run cases in a process of their own and fail with the name of the one that ended it."""
    result = subprocess.run(
        [sys.executable, __file__], input=pickle.dumps(cases), capture_output=True, check=False
    )
    log = result.stdout.decode().splitlines()
    assert result.returncode == 0, (
        f"{log[-1] if log else 'nothing'} was running when the process ended with "
        f"{result.returncode}: {result.stderr.decode()[-2000:]}"
    )
    assert log == [case[0] for case in cases]


if __name__ == "__main__":
    import relax_grad  # noqa: F401  (adds the operators)

    for case in pickle.load(sys.stdin.buffer):
        print(case[0], flush=True)
        run_case(*case)
