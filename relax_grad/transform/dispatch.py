"""Kernels in the place of operators."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Op

from ..dispatch import Site, find_kernel
from ..target import CPU


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchKernels")
class DispatchKernels:
    """Replace calls of operators by calls of the kernels in ``relax_grad.kernel``, where there is one.

    What is left is for ``LegalizeOps``. Calls of the same shapes and attributes share a kernel.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What the module will be compiled for; by default the target that is current. A target that LLVM does not
        compile for leaves the module as it is.
    """

    def __init__(self, target: tvm.target.Target | str | dict | None = None):
        self._target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current() if self._target is None else self._target
        cpu = None if target is None else CPU.of(target)
        return mod if cpu is None else _Dispatch(mod, cpu).module()


@relax.expr_functor.mutator
class _Dispatch(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, cpu: CPU):
        super().__init__(mod)
        self._cpu = cpu

    def module(self) -> tvm.IRModule:
        mod = self.builder_.get()
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                updated = relax.analysis.remove_all_unused(self.visit_expr(function))
                self.builder_.update_func(variable, updated)
        return self.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not isinstance(call.op, Op):
            return call
        site = Site(self.builder_.normalize(call), self._cpu, self.lookup_binding)
        kernel = find_kernel(call.op.name, site)
        if kernel is None:
            return call
        name = call.op.name.removeprefix("relax.").replace(".", "_")
        function = self.builder_.add_func(kernel.function, f"{name}_kernel")
        kind = site.call.ty
        results = list(kind.fields) if isinstance(kind, relax.TupleType) else kind
        return relax.call_tir(function, relax.Tuple(list(kernel.arguments)), results)
