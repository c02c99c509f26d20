"""Sums and arithmetic of half precision in float32."""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from ..ir.bindings import bindings_of
from ..ir.compat import dtype_of
from ..ir.dtypes import HALVES
from ..ir.float32 import in_float32
from ..ir.module import IS_SCHEDULED, with_changed_functions

#: The operators that TVM dispatches to kernels with accumulators in the dtype of the result.
_SCANS = {"relax.cumsum": relax.op.cumsum, "relax.cumprod": relax.op.cumprod}


@tvm.transform.module_pass(opt_level=0, name="relax_grad.gpu.WidenHalves")
def widen_halves(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Let the functions that TVM's rules will schedule compute half precision in float32.

    A function of fused operators rounds its result once. The legalization has widened the functions
    that it schedules.
    """
    return with_changed_functions(mod, tirx.PrimFunc, _widened)


def _widened(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return function if (function.attrs or {}).get(IS_SCHEDULED, False) else in_float32(function)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.gpu.WidenScans")
def widen_scans(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Compute cumulative sums and products of half precision in float32.

    TVM's kernels for them are not tensor expressions.
    """
    return with_changed_functions(mod, relax.Function, _with_wide_scans)


def _with_wide_scans(function: relax.Function) -> relax.Function:
    if not any(_is_half_scan(binding.value) for binding in bindings_of(function.body)):
        return function
    return _Scans().visit_expr(function)


def _is_half_scan(value: relax.Expr) -> bool:
    is_scan = isinstance(value, relax.Call) and getattr(value.op, "name", None) in _SCANS
    return is_scan and dtype_of(value.ty) in HALVES


@relax.expr_functor.mutator
class _Scans(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not _is_half_scan(call):
            return super().visit_call_(call)
        attrs = call.attrs
        scan = _SCANS[call.op.name](
            self.visit_expr(call.args[0]), attrs.axis, "float32", bool(attrs.exclusive)
        )
        return relax.op.astype(self.builder_.emit(scan), dtype_of(call.ty))
