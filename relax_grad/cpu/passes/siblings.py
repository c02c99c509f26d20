"""Horizontal fusion of element-wise functions that read the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm_ffi import structural_equal

from ...ir.aliases import may_write, writing_functions
from ...ir.compat import dtype_of
from ...ir.divisions import with_checked_divisions
from ...ir.module import IS_SCHEDULED, PRODUCT, SCHEDULED_ATTRS, referred_to, with_functions
from ...ir.shapes import known_extents
from ...ir.shared_values import with_shared_arguments
from ..kernel.matmul.matmul import Matmul
from ..schedule import (
    Merged,
    Part,
    Pointwise,
    merge,
    pointwise,
    schedule_consumer,
    schedule_merged,
)
from ..target import CPU
from ._consumer_order import Item, is_call, with_products
from ._target import TargetPass

#: The most calls that a call is moved across. Its operands or results stay live over this distance.
_FAR = 8

#: The most bindings that a call is moved across, calls or not: bindings of tuple elements may stand
#: between two calls.
_FAR_IN_ALL = 64


@tvm.transform.module_pass(opt_level=0, name="relax_grad.FuseSiblings")
class FuseSiblings(TargetPass):
    """Fuse element-wise functions that share inputs into one loop with several results (horizontal
    fusion).

    FuseOps makes one function of a chain that ends in one tensor. An optimizer's update ends in
    several tensors: the moments are returned, and the parameter is computed from them. Much of a
    backward pass also ends in several tensors, for example where two factors share the gradient of
    their product. Here such calls become one call, which reads the shared tensors once.

    If a result is returned, and a kernel of a matrix product has no other use, such as the
    gradient of a weight that only an update reads, the call also computes the product, which is
    then never stored.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        The target of the compilation; by default the current target. If LLVM does not compile for
        the target, the pass leaves the module unchanged.

    Examples
    --------
    >>> import tvm
    >>> from tvm import relax
    >>> from relax_grad import target, transform
    >>> x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         both = [bb.emit_output(each(x)) for each in (relax.op.exp, relax.op.sin)]
    ...     _ = bb.emit_func_output(relax.Tuple(both))
    >>> passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    >>> passes += [relax.transform.FuseOps(), relax.transform.FuseTIR()]
    >>> passes += [transform.FuseSiblings(target.x86_64("v3", 2))]
    >>> module = tvm.transform.Sequential(passes)(bb.get())
    >>> sorted(variable.name_hint for variable in module.functions)
    ['main', 'merged_tir_exp_tir_sin']
    """

    def _transformed(self, mod: tvm.IRModule, cpu: CPU) -> tvm.IRModule:
        return fused_siblings(mod, _OnCPU(cpu))


class Schedules(Protocol):
    """The schedules of merged functions on a processor."""

    @property
    def widens(self) -> bool:
        """Whether functions of half precision are changed to compute in float32."""

    def accepts(self, function: Pointwise) -> bool:
        """Tell whether a function may be merged with others."""

    def merged(
        self, merged: Merged, inputs: Sequence[int], results: Sequence[int]
    ) -> tirx.PrimFunc:
        """Return a function that takes and stores some tensors of merged functions."""

    def consumer(
        self,
        merged: Merged,
        inputs: Sequence[int],
        results: Sequence[int],
        source: int,
        product: Matmul,
    ) -> tirx.PrimFunc | None:
        """Return a function that also computes the tensor ``source``, a product; None if there is
        no such function."""


class _OnCPU(NamedTuple):
    """The schedules for a CPU."""

    cpu: CPU
    widens: bool = True

    def accepts(self, _function: Pointwise) -> bool:
        return True

    def merged(
        self, merged: Merged, inputs: Sequence[int], results: Sequence[int]
    ) -> tirx.PrimFunc:
        return with_shared_arguments(schedule_merged(merged, inputs, results, self.cpu))

    def consumer(
        self,
        merged: Merged,
        inputs: Sequence[int],
        results: Sequence[int],
        source: int,
        product: Matmul,
    ) -> tirx.PrimFunc | None:
        return schedule_consumer(merged, inputs, results, source, product, self.cpu)


def fused_siblings(mod: tvm.IRModule, schedules: Schedules) -> tvm.IRModule:
    """Return a module with merged element-wise functions, as :class:`FuseSiblings` does."""
    return _Merger(mod, schedules).module()


class _Function(NamedTuple):
    """The function of a group: the numbers of the tensors that it takes, and of the results that it
    stores."""

    inputs: list[int]
    results: list[int]
    variable: GlobalVar


@relax.expr_functor.mutator
class _Merger(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, schedules: Schedules):
        super().__init__(mod)
        self._mod, self._schedules = mod, schedules
        self._writers = writing_functions(mod)
        self._pointwise: dict[GlobalVar, Pointwise | None] = {}
        self._merged: dict = {}
        self._functions: dict = {}
        self._replaced: set[GlobalVar] = set()

    def module(self) -> tvm.IRModule:
        for variable, function in self._mod.functions_items():
            if isinstance(function, relax.Function):
                self.builder_.update_func(variable, self.visit_expr(function))
        mod = self.builder_.get()
        unused = self._replaced - referred_to(mod.functions.values())
        return with_functions(mod, {}, [variable.name_hint for variable in unused])

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        # A call that reads a tensor must not move across a call that writes to it.
        if any(may_write(binding.value, self._writers) for binding in block.bindings[:]):
            return block
        items = self._items(block.bindings[:])
        needed = self._needed(items)
        read = {var for item in items if item.calls_anything for var in item.uses}
        items = with_products(
            items,
            lambda binding: self._product(binding) is not None,
            lambda item: self._may_consume(item, needed, read),
        )
        self.builder_._begin_dataflow_block()
        for item in items:
            if len(item.bindings) > 1 or item.product is not None:
                self._emit(item, needed)
            else:
                self.visit_binding(item.bindings[0])
        return self.builder_._end_block()

    def _items(self, bindings: Sequence[relax.Binding]) -> list[Item]:
        """Return the bindings in groups, in an order in which merged calls are adjacent."""
        items: list[Item] = []
        for binding in bindings:
            item = Item([binding], is_open=self._is_pointwise(binding))
            if not (item.is_open and self._join(item, items)):
                items.append(item)
        return items

    def _join(self, item: Item, items: list[Item]) -> bool:
        """Merge a call with an earlier group that shares a tensor with it; tell whether there is
        one."""
        calls = 0
        for i in range(len(items) - 1, max(-1, len(items) - 1 - _FAR_IN_ALL), -1):
            other = items[i]
            if isinstance(other.bindings[0], relax.MatchCast) or calls > _FAR:
                return False
            calls += other.has_call
            if not other.is_open or not self._share(other, item):
                continue
            between = items[i + 1 :]
            both = other.with_call(item)
            made = {result for middle in between for result in middle.results}
            if not item.uses & made:
                items[i] = both
            elif not any(middle.uses & set(other.results) for middle in between):
                del items[i]
                items.append(both)
            else:
                continue
            return True
        return False

    def _share(self, item: Item, other: Item) -> bool:
        """Tell whether a call and a group can be merged, because the call reads a tensor of the
        size of its result that the group reads or computes."""
        kind = other.bindings[0].var.ty
        if not structural_equal(item.bindings[0].var.ty.shape, kind.shape):
            return False
        known = {*item.uses, *item.results} & other.uses
        if not any(_is_as_large(tensor.ty, kind) for tensor in known):
            return False
        bindings = [*item.bindings, *other.bindings]
        return self._merge(_Call(bindings)) is not None

    def _merge(self, call: _Call) -> Merged | None:
        if call.key not in self._merged:
            parts = [
                # Each call of a group is pointwise.
                Part(cast(Pointwise, self._pointwise[name]), tensors, shapes)
                for name, tensors, shapes in zip(call.names, call.tensors, call.shapes, strict=True)
            ]
            self._merged[call.key] = merge(parts)
        return self._merged[call.key]

    def _is_pointwise(self, binding: relax.Binding) -> bool:
        """Tell whether the value of a binding is a call that may be merged."""
        call = binding.value
        if not is_call(call) or len(call.args) != 2 or not isinstance(call.args[1], relax.Tuple):
            return False
        tensors = [call.ty, *(argument.ty for argument in call.args[1].fields[:])]
        if any(known_extents(kind) is None for kind in tensors):
            return False
        name = call.args[0]
        if name not in self._pointwise:
            function = self._mod[name]
            is_free = isinstance(function, tirx.PrimFunc) and not (function.attrs or {}).get(
                IS_SCHEDULED
            )
            made = pointwise(function, self._schedules.widens) if is_free else None
            is_kept = made is not None and self._schedules.accepts(made)
            self._pointwise[name] = made if is_kept else None
        return self._pointwise[name] is not None

    def _needed(self, items: Sequence[Item]) -> set[relax.Var]:
        """Return the results that are used outside their group."""
        needed = set()
        for item in items:
            needed |= item.uses - set(item.results)
            needed |= {
                result for result in item.results if not isinstance(result, relax.DataflowVar)
            }
        return needed

    def _may_consume(self, item: Item, needed: set[relax.Var], read: set[relax.Var]) -> bool:
        """Tell whether one function computes a group and its product.

        One of its results must be returned, and not be in ``read``, the operands of calls: the new
        weight. Other products stay separate calls, which the backward pass may repeat. The
        factors live until the last read of the weight, and must not be larger than the product that
        is not stored.
        """
        product = None if item.product is None else self._product(item.product)
        if product is None or product.depth > min(product.rows, product.columns):
            return False
        results = needed.intersection(item.results)
        if all(isinstance(var, relax.DataflowVar) and var in read for var in results):
            return False
        return self._function(item, needed) is not None

    def _product(self, binding: relax.Binding) -> Matmul | None:
        """Return the product that a binding calls the kernel of, or None."""
        if not is_call(binding.value):
            return None
        attributes = self._mod[binding.value.args[0]].attrs
        if attributes is None or PRODUCT not in attributes:
            return None
        rows, columns, depth, *transposed = map(int, attributes[PRODUCT])
        return Matmul(rows, columns, depth, *map(bool, transposed))

    def _function(self, item: Item, needed: set[relax.Var]) -> _Function | None:
        """Return the function of a group; None if it cannot compute the product of the group."""
        call, product = _Call(item.bindings), item.product
        results = [i for i, var in enumerate(item.results) if var in needed]
        source = None if product is None else call.number(product.var)
        described = None if product is None else self._product(product)
        key = (call.key, tuple(results), source, described)
        if key not in self._functions:
            taken = {*call.results, source}
            inputs = [name for name in range(len(call.arguments)) if name not in taken]
            function = self._scheduled(call, inputs, results, source, described)
            if function is not None:
                function = _Function(inputs, results, function)
            self._functions[key] = function
        return self._functions[key]

    def _scheduled(
        self,
        call: _Call,
        inputs: Sequence[int],
        results: Sequence[int],
        source: int | None,
        product: Matmul | None,
    ) -> GlobalVar | None:
        """Return the new function of merged calls, which takes and stores some of their tensors. It
        may compute the tensor ``source``, a product."""
        merged, stored = self._merge(call), [call.results[i] for i in results]
        if merged is None:
            return None
        if product is None or source is None:
            function = self._schedules.merged(merged, inputs, stored)
        else:
            function = self._schedules.consumer(merged, inputs, stored, source, product)
        if function is None:
            return None
        kind = "merged" if product is None else "matmul"
        name = "_".join([kind, *(name.name_hint for name in call.names)])[:80]
        function = with_checked_divisions(function, name)
        return self.builder_.add_func(function.with_attrs(SCHEDULED_ATTRS), name)

    def _emit(self, item: Item, needed: set[relax.Var]) -> None:
        call, product = _Call(item.bindings), item.product
        inputs, results, function = cast(_Function, self._function(item, needed))
        self._replaced |= set(call.names)
        operands = [call.arguments[i] for i in inputs]
        if product is not None:
            self._replaced.add(product.value.args[0])
            operands = [*product.value.args[1].fields[:], *operands]
        arguments = relax.Tuple([self.visit_expr(operand) for operand in operands])
        types = [item.results[i].ty for i in results]
        if len(types) == 1:
            values = [relax.call_tir(function, arguments, types[0])]
        else:
            made = self.builder_.emit(relax.call_tir(function, arguments, types))
            values = [relax.TupleGetItem(made, i) for i in range(len(types))]
        for i, value in zip(results, values, strict=True):
            self.visit_binding(relax.VarBinding(item.results[i], value))


class _Call:
    """The description of merged calls.

    Attributes
    ----------
    names : list[GlobalVar]
        The functions.
    arguments : list[relax.Expr]
        All tensors, each once; ``results`` are the numbers of the computed ones.
    tensors : list[list[int]]
        The number of each argument of each function, and of its result.
    shapes : list[list[list[tirx.PrimExpr]]]
        The extents of these tensors. Each distinct symbolic extent becomes one variable.
    key : tuple
        Equal for merged calls that one function computes.
    """

    def __init__(self, bindings: Sequence[relax.VarBinding]):
        self.names = [binding.value.args[0] for binding in bindings]
        self.arguments: list[relax.Expr] = []
        self._extents: list[tuple[tirx.PrimExpr, tirx.Var]] = []
        self.tensors = [
            [self.number(argument) for argument in (*binding.value.args[1].fields, binding.var)]
            for binding in bindings
        ]
        self.results = [tensors[-1] for tensors in self.tensors]
        shapes = [
            [self._extent(n) for n in argument.ty.shape.values] for argument in self.arguments
        ]
        self.shapes = [[shapes[i] for i in tensors] for tensors in self.tensors]
        self.key = (
            tuple(self.names),
            tuple(map(tuple, self.tensors)),
            tuple(dtype_of(argument.ty) for argument in self.arguments),
            tuple(tuple(map(self._identity, shape)) for shape in shapes),
        )

    def number(self, expr: relax.Expr) -> int:
        """Return the number of a tensor."""
        for i, known in enumerate(self.arguments):
            if known.same_as(expr):
                return i
        self.arguments.append(expr)
        return len(self.arguments) - 1

    def _extent(self, extent: tirx.PrimExpr) -> tirx.PrimExpr:
        if isinstance(extent, tirx.IntImm):
            return extent
        for known, variable in self._extents:
            if structural_equal(known, extent):
                return variable
        variable = tirx.Var(f"n{len(self._extents)}", "int64")
        self._extents.append((extent, variable))
        return variable

    def _identity(self, extent: tirx.PrimExpr) -> tuple:
        if isinstance(extent, tirx.IntImm):
            return ("is", int(extent))
        return ("named", [variable.same_as(extent) for _, variable in self._extents].index(True))


def _is_as_large(kind: relax.Type, other: relax.TensorType) -> bool:
    return isinstance(kind, relax.TensorType) and structural_equal(kind.shape, other.shape)
