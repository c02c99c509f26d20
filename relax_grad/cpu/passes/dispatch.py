"""The replacement of operators by kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op, PrimType

from ...ir.aliases import Memory, writing_functions
from ...ir.bindings import bindings_of, without_unused
from ...ir.compat import remap_variable
from ...ir.module import IN_PLACE, PRODUCT
from ..dispatch import CallSite, Kernel
from ..dispatch.biases import AddedBiases, with_bias
from ..dispatch.casts import (
    NarrowedResults,
    before_casts,
    type_of_narrowed,
    widened,
    without_casts,
)
from ..dispatch.declare import declaration
from ..dispatch.exchanges import (
    ExchangedResults,
    before_both,
    with_exchanges,
)
from ..dispatch.rectified import Rectified
from ..dispatch.registry import find_kernel, is_decomposed, takes_halves, takes_uncast
from ..dispatch.residuals import BlockCalls, Replacement, ResidualKernel, find_residuals
from ..dispatch.unread import UnreadResults
from ..kernel.conv.plan import SQUARES
from ..kernel.matmul.matmul import Matmul
from ..target import CPU
from ._target import TargetPass


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchKernels")
class DispatchKernels(TargetPass):
    """Replace calls of operators by calls of the kernels in ``relax_grad.cpu.kernel``, where a
    kernel supports them.

    ``LegalizeOps`` handles the remaining calls. Calls with the same shapes and attributes share a
    kernel. If later calls of a dataflow block recompute an intermediate result of a kernel, such as
    the statistics of a normalisation, the kernel returns this result.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        The target of the compilation; by default the current target. If LLVM does not compile for
        the target, the pass leaves the module unchanged.
    winograd_tile : int or None
        The side of the output tiles in Winograd's minimal filtering, which computes convolutions
        with kernels of 3 and 5. 2 is about as accurate as a direct sum. 4, for kernels of 3, is
        faster and less accurate, as measured in docs/cpu.md. 0 or None means that all convolutions
        are computed directly.

    Raises
    ------
    ValueError
        If tiles of this size are not supported.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import target, transform
    >>> x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit_output(relax.op.nn.softmax(x))
    ...     _ = bb.emit_func_output(y)
    >>> module = transform.DispatchKernels(target.x86_64("v3", 2))(bb.get())
    >>> sorted(variable.name_hint for variable in module.functions)
    ['main', 'nn_softmax_kernel']
    """

    def __init__(
        self,
        target: tvm.target.Target | str | dict | None = None,
        winograd_tile: int | None = 2,
    ):
        super().__init__(target)
        self._winograd_tile = checked_tile(winograd_tile)

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return _dispatched(mod, cpu, self._winograd_tile, _generated)


def checked_tile(winograd_tile: int | None) -> int:
    """Return the side of the output tiles of Winograd's convolutions, 0 for none; reject
    unsupported values."""
    is_size = winograd_tile is None or type(winograd_tile) is int
    if not is_size or winograd_tile not in (None, 0, *SQUARES):
        sizes = ", ".join(map(str, SQUARES))
        raise ValueError(
            f"winograd_tile must be one of {sizes}, or 0 for none, but it is {winograd_tile!r}"
        )
    return winograd_tile or 0


#: Returns the function that the module gets for a kernel, given the types of its arguments and then
#: of its results.
_Define = Callable[[Kernel, Sequence[relax.Type]], tirx.PrimFunc]


@tvm.transform.module_pass(opt_level=0, name="relax_grad.DispatchKernels")
class DeclareKernels(TargetPass):
    """A variant of :class:`DispatchKernels` that inserts declarations of kernels, which are
    generated later.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    winograd_tile : int
        As for :class:`DispatchKernels`, with 0 for none.
    declare : Callable
        Takes a function with the parameters and attributes of a kernel, the generator of the
        kernel, and its :attr:`Kernel.identity`; returns the declaration.
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
        return _dispatched(mod, cpu, self._winograd_tile, self._declared)

    def _declared(self, kernel: Kernel, types: Sequence[relax.Type]) -> tirx.PrimFunc:
        identity, function = kernel.identity, declaration(types, kernel.shapes)
        if identity is None or function is None:
            return _generated(kernel, types)
        return self._declare(function, kernel.generator, identity)


def _generated(kernel: Kernel, _types: Sequence[relax.Type]) -> tirx.PrimFunc:
    # The function is known only by its name in the module, because kernels of one generator have
    # the same symbol.
    return kernel.generator().without_attr("global_symbol")


def _described(function: tirx.PrimFunc, product: Matmul | None) -> tirx.PrimFunc:
    """Return the function of a kernel with its product as an attribute, if it is one of matrices
    of static extents."""
    if product is None:
        return function
    numbers = (product.batch, product.rows, product.columns, product.depth)
    if not all(isinstance(number, int) for number in numbers) or product.batch != 1:
        return function
    transposed = int(product.transpose_a), int(product.transpose_b)
    return function.with_attr(PRODUCT, [*numbers[1:], *transposed])


def _dispatched(mod: tvm.IRModule, cpu: CPU, winograd_tile: int, define: _Define) -> tvm.IRModule:
    return _Dispatch(_Decompose(mod, cpu).module(), cpu, winograd_tile, define).module()


@relax.expr_functor.mutator
class _Decompose(relax.PyExprMutator):
    """Replaces calls without kernels by the operators of their legalization, which may have
    kernels."""

    def __init__(self, mod: tvm.IRModule, cpu: CPU):
        super().__init__(mod)
        self._cpu = cpu

    def module(self) -> tvm.IRModule:
        mod = self.builder_.get()
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function) and self._has_decomposed(function):
                self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def _has_decomposed(self, function: relax.Function) -> bool:
        return any(self._is_decomposed(binding.value) for binding in bindings_of(function.body))

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not self._is_decomposed(call):
            return call
        return call.op.get_attr("FLegalize")(self.builder_, self.builder_.normalize(call))

    def _is_decomposed(self, value: relax.Expr) -> bool:
        if not isinstance(value, relax.Call) or not isinstance(value.op, Op):
            return False
        return is_decomposed(value.op.name, CallSite(value, self._cpu))


@relax.expr_functor.mutator
class _Dispatch(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, cpu: CPU, winograd_tile: int, define: _Define):
        super().__init__(mod)
        self._cpu, self._winograd_tile, self._define = cpu, winograd_tile, define
        self._calls: BlockCalls | None = None
        self._exchanged: ExchangedResults | None = None
        self._narrowed: NarrowedResults | None = None
        self._biases: AddedBiases | None = None
        self._rectified: Rectified | None = None
        self._unread: UnreadResults | None = None
        self._memory: Memory  # of the function that is visited
        self._var: relax.Var | None = None
        self._uses: dict[relax.Var, tuple[Replacement, Sequence[relax.Var]]] = {}
        self._functions: dict[tuple, GlobalVar] = {}
        self._packed: dict[tuple, relax.Expr] | None = None

    def module(self) -> tvm.IRModule:
        mod = self.builder_.get()
        writers = writing_functions(mod)
        memories = {
            variable: Memory(function, writers)
            for variable, function in mod.functions_items()
            if isinstance(function, relax.Function)
        }
        if not any(memory.is_written for memory in memories.values()):
            self._packed = {}
        for variable, memory in memories.items():
            self._memory = memory
            updated = without_unused(self.visit_expr(mod[variable]))
            self.builder_.update_func(variable, updated)
        return self.builder_.get()

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        self._calls, self._unread = BlockCalls(block, self._memory), UnreadResults(block)
        # Where a call may write to its arguments, a tensor before a permutation or a cast may have
        # changed.
        is_written = self._memory.is_written
        self._exchanged = None if is_written else ExchangedResults(block)
        self._narrowed = None if is_written else NarrowedResults(block)
        self._biases = None if is_written else AddedBiases(block)
        self._rectified = None if is_written else Rectified(block)
        block = super().visit_dataflow_block_(block)
        self._calls = self._exchanged = self._narrowed = self._biases = self._rectified = None
        self._unread = None
        return block

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._var = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        var, original = self._var, call
        call = self.visit_expr_post_order(call)
        # The condition of an extent, as in the type of x[:n - 1], is also a call, and is visited
        # with the type.
        if not isinstance(call.op, Op) or isinstance(call.ty, PrimType):
            return call
        call = self.builder_.normalize(call)
        if self._calls is not None and var in self._uses:
            use, saved = self._uses[var]
            value = use(call, saved)
            return self._result(value, call, var) if isinstance(value, Kernel) else value
        lookup = partial(self._lookup, var)
        if (source := before_both(call, lookup)) is not None:
            return source
        if self._narrowed is not None and (source := before_casts(call, lookup)) is not None:
            return source
        if self._rectified is not None and self._rectified.has(var, original):
            return call.args[-1]
        unread = () if self._unread is None else self._unread.of(var)
        site = self._site(call, lookup, unread)
        biased = self._with_bias(call, var, lookup)
        if biased is not None:
            return biased
        if self._calls is not None:
            residuals = find_residuals(call.op.name, site, var, self._calls)
            if residuals is not None:
                return self._with_residuals(residuals, call, var, self._calls)
        kernel = find_kernel(call.op.name, site)
        if kernel is None or (self._biases is not None and self._biases.has(var)):
            return call  # the product is computed where its bias is added
        return self._result(kernel, call, var)

    def _site(self, call: relax.Call, lookup: Callable, unread: Sequence[int] = ()) -> CallSite:
        return CallSite(
            call,
            self._cpu,
            lookup,
            winograd_tile=self._winograd_tile,
            packed=self._packed,
            unread=unread,
        )

    def _with_bias(self, call: relax.Call, var: relax.Var, lookup: Callable) -> relax.Expr | None:
        """Return the result of the kernel of a product that adds the bias too, if a call adds a
        bias to a product; None for other calls."""
        operands = None if self._biases is None else self._biases.operands(var, call)
        if operands is None:
            return None
        product, bias = lookup(operands[0]), operands[1]
        site = self._site(product, lookup)
        kernel = find_kernel(product.op.name, site)
        rectifies = self._rectified is not None and self._rectified.takes(var)
        kernel = None if kernel is None else with_bias(kernel, site, bias, rectifies=rectifies)
        if kernel is None:
            return None
        if self._rectified is not None and rectifies:
            self._rectified.mark(var)
        return self._result(kernel, call, var)

    def _lookup(self, at: relax.Var, variable: relax.Var) -> relax.Expr | None:
        """Return the value of a variable if it and its operands are unchanged at a later binding,
        else None."""
        value = self.lookup_binding(variable)
        is_same = value is not None and self._memory.holds(variable, value, at)
        return value if is_same else None

    def _function(self, kernel: Kernel, op_name: str, results: Sequence[relax.Type]) -> GlobalVar:
        """Return the function of a kernel. It is defined once for each key."""
        types = [*(argument.ty for argument in kernel.arguments), *results]
        kernel = kernel.stored_as(types, len(results))
        key = kernel.key
        if key not in self._functions:
            name = (kernel.name or op_name).removeprefix("relax.").replace(".", "_")
            function = _described(self._define(kernel, types), kernel.product)
            if kernel.in_place:
                function = function.with_attr(IN_PLACE, list(map(list, kernel.in_place)))
            self._functions[key] = self.builder_.add_func(function, f"{name}_kernel")
        return self._functions[key]

    def _called(
        self,
        kernel: Kernel,
        call: relax.Call,
        var: relax.Var | None,
        more: Sequence[relax.TensorType],
    ) -> tuple[relax.Call, dict[int, Callable[[relax.Expr], relax.Expr]]]:
        """Return the call of a kernel that replaces a call, and what restores some of its results,
        by their indices: those whose axes it exchanges or that it rounds.

        ``var`` is the variable that the replaced call is bound to, and ``more`` are the types of
        further results.
        """
        is_tuple = isinstance(call.ty, relax.TupleType)
        results = list(call.ty.fields) if is_tuple else [call.ty]
        narrowed: dict[int, str] = {}
        if self._narrowed is not None and takes_halves(call.op.name):
            dtypes = ((i, self._narrowed.dtype(var, i)) for i in range(len(results)))
            narrowed = {i: dtype for i, dtype in dtypes if dtype is not None}
        changed: dict[int, list[Callable[[relax.Expr], relax.Expr]]] = {}
        lookup = partial(self._lookup, var)
        kernel = self._with_relu(kernel, var)
        takes_sources = self._narrowed is not None and takes_uncast(call.op.name)
        if takes_sources:
            kernel = without_casts(kernel, lookup)
        if self._exchanged is not None:
            kernel, orders = with_exchanges(kernel, var, self._exchanged, lookup, narrowed)
            for i, order in orders.items():
                results[i] = order.type_of(results[i])
                changed.setdefault(i, []).append(order.restored)
        if takes_sources:
            kernel = without_casts(kernel, lookup)  # casts before the exchanges
        for i, dtype in narrowed.items():
            results[i] = type_of_narrowed(results[i], dtype)
            changed.setdefault(i, []).append(widened)
        results.extend(more)
        function = self._function(kernel, call.op.name, results)
        types = results if is_tuple or more else results[0]
        arguments = relax.Tuple(list(kernel.arguments))
        changes: dict[int, Callable[[relax.Expr], relax.Expr]] = {
            i: partial(self._restored, steps) for i, steps in changed.items()
        }
        return relax.call_tir(function, arguments, types), changes

    def _with_relu(self, kernel: Kernel, var: relax.Var | None) -> Kernel:
        """Return a kernel that applies ReLU to its first result, if the following calls do."""
        rectified = self._rectified
        if not kernel.rectifiable or var is None or rectified is None or not rectified.takes(var):
            return kernel
        rectified.mark(var)
        return replace(kernel, generator=partial(kernel.generator, rectifies=True))

    def _restored(
        self, steps: Sequence[Callable[[relax.Expr], relax.Expr]], expr: relax.Expr
    ) -> relax.Expr:
        """Return the last of several changes of a tensor, after the others are emitted."""
        *others, last = steps
        for step in others:
            expr = self.builder_.emit(step(expr))
        return last(expr)

    def _result(self, kernel: Kernel, call: relax.Call, var: relax.Var | None) -> relax.Expr:
        """Return the result of a kernel that replaces a call."""
        called, changes = self._called(kernel, call, var, [])
        if not changes:
            return called
        result = self.builder_.emit(called)
        if not isinstance(call.ty, relax.TupleType):
            return changes[0](result)
        return self._results(result, call, changes)

    def _results(
        self,
        result: relax.Var,
        call: relax.Call,
        changes: Mapping[int, Callable[[relax.Expr], relax.Expr]],
    ) -> relax.Expr:
        """Return the results of a call, which are the first elements of a tuple, in the order of
        its axes and in its dtypes."""
        is_tuple = isinstance(call.ty, relax.TupleType)
        elements: list[relax.Expr] = []
        for i in range(len(call.ty.fields) if is_tuple else 1):
            element: relax.Expr = relax.TupleGetItem(result, i)
            if i in changes:
                element = changes[i](self.builder_.emit(element))
            elements.append(element)
        if not is_tuple:
            return elements[0]
        return relax.Tuple([self.builder_.emit(element) for element in elements])

    def _with_residuals(
        self,
        residuals: ResidualKernel,
        call: relax.Call,
        replaced: relax.Var,
        calls: BlockCalls,
    ) -> relax.Expr:
        """Emit the call of a kernel with saved results, and return the results of the replaced
        call.

        ``replaced`` is the variable that the call is bound to, and ``calls`` are the calls of
        the block.
        """
        if not residuals.types:
            return self._result(residuals.kernel, call, replaced)
        called, changes = self._called(residuals.kernel, call, replaced, residuals.types)
        both = self.builder_.emit(called)
        end = len(both.ty.fields)
        saved = [
            self.builder_.emit(relax.TupleGetItem(both, i))
            for i in range(end - len(residuals.types), end)
        ]
        for var, use in residuals.uses.items():
            if calls.precedes(var, replaced):
                # The binding before is left without a use, and is removed with the unused ones.
                remap_variable(self, var, use(calls.original(var), saved))
            else:
                self._uses[var] = use, saved
        return self._results(both, call, changes)
