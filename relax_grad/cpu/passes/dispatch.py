"""Kernels in the place of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op, PrimType

from ...ir.aliases import Memory, writing_functions
from ...ir.bindings import without_unused
from ..dispatch import Calls, Kernel, Saving, Site, Use, declaration, find_kernel, find_saving
from ..kernel.winograd import TRANSFORMS
from ..target import CPU
from ._target import TargetPass


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchKernels")
class DispatchKernels(TargetPass):
    """Replace calls of operators by calls of the kernels in ``relax_grad.cpu.kernel``, where there is one.

    What is left is for ``LegalizeOps``. Calls of the same shapes and attributes share a kernel. Where later calls of a
    dataflow block compute again what a kernel has at hand, such as the statistics of a normalization, the
    kernel returns it.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What the module will be compiled for; by default the target that is current. A target that LLVM does not
        compile for leaves the module as it is.
    winograd_tile : int or None
        The side of the squares of results that convolutions with 3x3 kernels are computed in by Winograd's
        minimal filtering. 2 is about as accurate as a direct sum, 4 is faster and less accurate, as measured in
        docs/cpu.md, and 0 or None means to compute all of them directly.

    Raises
    ------
    ValueError
        Where there is no such square.
    """

    def __init__(
        self,
        target: tvm.target.Target | str | dict | None = None,
        winograd_tile: int | None = 2,
    ):
        super().__init__(target)
        self._winograd_tile = checked_tile(winograd_tile)

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return _Dispatch(mod, cpu, self._winograd_tile, _generated).module()


def checked_tile(winograd_tile: int | None) -> int:
    """Return the side of the squares of Winograd's convolutions, 0 for none; refuse what is none."""
    is_size = winograd_tile is None or type(winograd_tile) is int
    if not is_size or winograd_tile not in (None, 0, *TRANSFORMS):
        sizes = ", ".join(map(str, TRANSFORMS))
        raise ValueError(
            f"winograd_tile must be one of {sizes}, or 0 for none, but it is {winograd_tile!r}"
        )
    return winograd_tile or 0


#: Returns the function in the module of a kernel that is called with tensors of the types, the results last.
_Define = Callable[[Kernel, Sequence[relax.Type]], tirx.PrimFunc]


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchKernels")
class DeclareKernels(TargetPass):
    """Do what :class:`DispatchKernels` does, with declarations where something else generates the kernels later.

    Parameters
    ----------
    target : tvm.target.Target
        What the module will be compiled for.
    winograd_tile : int
        As for :class:`DispatchKernels`, with 0 for none.
    declare : Callable
        Takes a function with the parameters and attributes of a kernel, what generates the kernel, and its
        :attr:`Kernel.identity`; returns the declaration.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        winograd_tile: int,
        declare: Callable[[tirx.PrimFunc, Callable[[], tirx.PrimFunc], str], tirx.PrimFunc],
    ):
        super().__init__(target)
        self._winograd_tile, self._declare = winograd_tile, declare

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return _Dispatch(mod, cpu, self._winograd_tile, self._declared).module()

    def _declared(self, kernel: Kernel, types: Sequence[relax.Type]) -> tirx.PrimFunc:
        identity, function = kernel.identity, declaration(types, kernel.shapes)
        if identity is None or function is None:
            return _generated(kernel, types)
        return self._declare(function, kernel.generator, identity)


def _generated(kernel: Kernel, _types: Sequence[relax.Type]) -> tirx.PrimFunc:
    # Its name in the module is its only one: kernels of one generator have one symbol.
    return kernel.generator().without_attr("global_symbol")


@relax.expr_functor.mutator
class _Dispatch(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, cpu: CPU, winograd_tile: int, define: _Define):
        super().__init__(mod)
        self._cpu, self._winograd_tile, self._define = cpu, winograd_tile, define
        self._calls: Calls | None = None
        self._memory: Memory | None = None
        self._var: relax.Var | None = None
        self._uses: dict[relax.Var, tuple[Use, Sequence[relax.Var]]] = {}
        self._functions: dict[tuple, GlobalVar] = {}

    def module(self) -> tvm.IRModule:
        mod = self.builder_.get()
        writers = writing_functions(mod)
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                self._memory = Memory(function, writers)
                updated = without_unused(self.visit_expr(function))
                self.builder_.update_func(variable, updated)
        return self.builder_.get()

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        self._calls = Calls(block, self._memory)
        block = super().visit_dataflow_block_(block)
        self._calls = None
        return block

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._var = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        var = self._var
        call = self.visit_expr_post_order(call)
        # The condition of an extent, as in the type of x[:n - 1], is a call too, and is visited with the type.
        if not isinstance(call.op, Op) or isinstance(call.ty, PrimType):
            return call
        call = self.builder_.normalize(call)
        if self._calls is not None and var in self._uses:
            use, saved = self._uses[var]
            found = use(call, saved)
            return self._called(found, call, [])[0] if isinstance(found, Kernel) else found
        site = Site(call, self._cpu, partial(self._lookup, var), self._winograd_tile)
        if self._calls is not None:
            saving = find_saving(call.op.name, site, var, self._calls)
            if saving is not None:
                return self._saving(saving, call)
        kernel = find_kernel(call.op.name, site)
        return call if kernel is None else self._called(kernel, call, [])[0]

    def _lookup(self, at: relax.Var, variable: relax.Var) -> relax.Expr | None:
        """Return the value of a variable if it and its operands are unchanged at the binding of another."""
        value = self.lookup_binding(variable)
        is_same = value is not None and self._memory.holds(variable, value, at)
        return value if is_same else None

    def _function(self, kernel: Kernel, op_name: str, results: Sequence[relax.Type]) -> GlobalVar:
        """Return the function of a kernel, which is defined once for each key."""
        key = kernel.key
        if key not in self._functions:
            name = (kernel.name or op_name).removeprefix("relax.").replace(".", "_")
            function = self._define(kernel, [*(each.ty for each in kernel.arguments), *results])
            self._functions[key] = self.builder_.add_func(function, f"{name}_kernel")
        return self._functions[key]

    def _called(self, kernel: Kernel, call: relax.Call, more: Sequence[relax.TensorType]) -> tuple:
        """Return the call of a kernel in the place of a call, and how many results that has."""
        is_tuple = isinstance(call.ty, relax.TupleType)
        results = [*(call.ty.fields if is_tuple else [call.ty]), *more]
        function = self._function(kernel, call.op.name, results)
        types = results if is_tuple or more else call.ty
        arguments = relax.Tuple(list(kernel.arguments))
        return relax.call_tir(function, arguments, types), len(results) - len(more)

    def _saving(self, saving: Saving, call: relax.Call) -> relax.Expr:
        """Emit the call of a kernel that saves something, and return the results of the call."""
        called, number = self._called(saving.kernel, call, saving.types)
        if not saving.types:
            return called
        both = self.builder_.emit(called)
        end = number + len(saving.types)
        saved = [self.builder_.emit(relax.TupleGetItem(both, i)) for i in range(number, end)]
        self._uses.update({var: (use, saved) for var, use in saving.uses.items()})
        results = [relax.TupleGetItem(both, i) for i in range(number)]
        if isinstance(call.ty, relax.TupleType):
            return relax.Tuple([self.builder_.emit(result) for result in results])
        return results[0]
