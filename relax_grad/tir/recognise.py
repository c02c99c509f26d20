"""Tensor functions that compute an operator of Relax: their calls become calls of the operator,
which has kernels.

A function is taken for an operator in one of two cases: it is the legalization of the operator on
the same arguments, up to the names of its variables, blocks and buffers; or it consists of the
loops of one contraction of two tensors, which becomes a matrix product. :mod:`._candidates` reads
the attributes of operators from the blocks of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op
from tvm.relax.transform.legalize_ops import nn as stock

from ..ir.bindings import with_value
from ..ir.compat import SBlockRealize, loaded_buffer
from ..ir.expressions import loads
from ..ir.module import is_buffer, normalized, tuple_fields, with_changed_functions
from ._candidates import candidates
from ._contraction import contraction

_CALL_TIR = Op.get("relax.call_tir")

#: TVM's legalizations of operators that other functions than relax_grad's compute too, but for NaN.
_STOCK = {f"relax.nn.max_pool{rank}d": getattr(stock, f"_nn_max_pool{rank}d") for rank in (1, 2, 3)}

#: Emits an operator call in place of a tensor function: from the arguments and a function that
#: emits an operand.
Recipe = Callable[[Sequence[relax.Expr], Callable[[relax.Expr], relax.Var]], relax.Expr]


def with_operators(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose calls of tensor functions are calls of operators, where the functions
    compute these.

    Bound variables stay the same. Functions are left where no call refers to them any more.

    Parameters
    ----------
    mod : tvm.IRModule
        The module. ``call_tir_with_grad`` and ``call_tir_inplace`` stay as they are.
    """
    functions = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and _has_reduction(function)
    }
    if not functions:
        return mod
    return with_changed_functions(mod, relax.Function, _Rewriter(functions).function)


class _Rewriter:
    """Replaces calls in functions of Relax.

    Parameters
    ----------
    functions : dict[GlobalVar, tirx.PrimFunc]
        The tensor functions that may compute an operator.
    """

    def __init__(self, functions: dict[GlobalVar, tirx.PrimFunc]):
        self._functions = functions
        self._recipes: dict[GlobalVar, list[Recipe]] = {}
        self._bb = relax.BlockBuilder()

    def function(self, function: relax.Function) -> relax.Function:
        """Return a function with other calls; the same function if none is replaced."""
        body = self._sequence(function.body)
        if body.same_as(function.body):
            return function
        body = normalized(function.params, body)
        return relax.Function(function.params, body, is_pure=function.is_pure, attrs=function.attrs)

    def _sequence(self, body: relax.SeqExpr) -> relax.SeqExpr:
        blocks, is_same = [], True
        for block in body.blocks[:]:
            bindings = []
            for binding in block.bindings[:]:
                new = self._binding(binding, isinstance(block, relax.DataflowBlock))
                is_same = is_same and new[-1] is binding
                bindings += new
            blocks.append(type(block)(bindings))
        return body if is_same else relax.SeqExpr(blocks, body.body)

    def _binding(self, binding: relax.Binding, is_dataflow: bool) -> list[relax.Binding]:
        value = binding.value
        if isinstance(value, relax.If):
            branches = value.true_branch, value.false_branch
            new = [self._sequence(branch) for branch in branches]
            if all(changed.same_as(other) for changed, other in zip(new, branches, strict=True)):
                return [binding]
            return [with_value(binding, relax.If(value.cond, *new, value.span))]
        if isinstance(value, relax.Call) and value.op == _CALL_TIR and len(value.args) == 2:
            return self._operator(binding, value, is_dataflow) or [binding]
        return [binding]

    def _operator(
        self, binding: relax.Binding, call: relax.Call, is_dataflow: bool
    ) -> list[relax.Binding]:
        """Return the bindings of an operator in place of a call; none if the function computes no
        operator."""
        callee, arguments = call.args[0], tuple_fields(call.args[1])
        function = self._functions.get(callee)
        types = [argument.ty for argument in arguments]
        if function is None or not all(map(_has_shape, [*types, call.ty])):
            return []
        if callee not in self._recipes:
            self._recipes[callee] = list(_recipes(function, types))
        variable = relax.DataflowVar if is_dataflow else relax.Var
        for recipe in self._recipes[callee]:
            bindings: list[relax.Binding] = []

            def emit(value: relax.Expr, bindings: list[relax.Binding] = bindings) -> relax.Var:
                value = self._bb.normalize(value)
                name = f"{binding.var.name}_operand{len(bindings)}"
                bindings.append(relax.VarBinding(variable(name, value.ty), value))
                return bindings[-1].var

            value = self._bb.normalize(recipe(arguments, emit))
            if tvm_ffi.structural_equal(value.ty, call.ty):
                return [*bindings, with_value(binding, value)]
        return []


def _recipes(
    function: tirx.PrimFunc, types: Sequence[relax.TensorType]
) -> Iterator[Callable[..., relax.Expr]]:
    """Yield the way to compute a function by operators, if there is one."""
    params = function.params
    if len(params) != len(types) + 1 or not all(map(is_buffer, params)):
        return
    recipe = contraction(function)
    if recipe is not None:
        yield recipe
        return
    own = _without_attributes(function)
    for candidate, is_stock in product(candidates(function), (False, True)):
        legal = legalized(candidate, types, is_stock=is_stock)
        if legal is not None and _are_equal(own, _without_attributes(legal)):
            yield lambda arguments, emit, candidate=candidate: candidate(*arguments)
            return


def legalized(
    operator: Callable, types: Sequence[relax.Type], *, is_stock: bool = False
) -> tirx.PrimFunc | None:
    """Return the tensor function of an operator on arguments of given types.

    Parameters
    ----------
    operator : Callable
        Makes the call of the operator from its arguments.
    types : Sequence[relax.Type]
        The types of its arguments.
    is_stock : bool
        Whether the function is TVM's own, for the operators of :data:`_STOCK`.

    Returns
    -------
    function : tirx.PrimFunc or None
        The function; None if the operator rejects the types, or consists of more than a function of
        the arguments. With ``is_stock``, also None for other operators.
    """
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    rejects = (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
    )  # TVM's errors for attributes and types
    try:
        call = relax.BlockBuilder().normalize(operator(*params))
    except rejects:
        return None
    if is_stock and getattr(call.op, "name", None) not in _STOCK:
        return None
    result = relax.Var("result", call.ty)
    block = relax.BindingBlock([relax.VarBinding(result, call)])
    main = relax.Function(params, relax.SeqExpr([block], result), call.ty)
    try:
        module = tvm.IRModule({"main": main.with_attr("global_symbol", "main")})
        module = relax.transform.LegalizeOps(_STOCK if is_stock else {})(module)
    except rejects:
        return None
    bindings = [binding for block in module["main"].body.blocks for binding in block.bindings]
    value = bindings[0].value if len(bindings) == 1 else None
    if not (isinstance(value, relax.Call) and value.op == _CALL_TIR and len(value.args) == 2):
        return None
    arguments = tuple_fields(value.args[1])
    if len(arguments) != len(params) or not all(
        map(relax.Var.same_as, arguments, module["main"].params)
    ):
        return None
    return module[value.args[0]]


def _without_attributes(function: tirx.PrimFunc) -> tirx.PrimFunc:
    for name in dict(function.attrs or {}):
        function = function.without_attr(name)
    return function


def _are_equal(own: tirx.PrimFunc, other: tirx.PrimFunc) -> bool:
    """Tell whether two functions differ in names only; TVM 0.26 ignores the buffers of loads."""
    if not tvm_ffi.structural_equal(own, other):
        return False
    pairs = list(zip(_buffers(own), _buffers(other), strict=True))
    return all(a.same_as(c) == b.same_as(d) for i, (a, b) in enumerate(pairs) for c, d in pairs[:i])


def _buffers(function: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the parameters, and the buffer of each load and of each store."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
    return [
        *function.params,
        *(loaded_buffer(load) for load in loads(function.body)),
        *(store.buffer for store in stores),
    ]


def _has_reduction(function: tirx.PrimFunc) -> bool:
    """Tell whether a block of a function reduces: other functions gain nothing by an operator."""
    blocks = []

    def visit(block: SBlockRealize) -> None:
        if block.block.init is not None:
            blocks.append(block)

    tvm_ffi.structural_walk(function.body, (SBlockRealize, visit))
    return bool(blocks)


def _has_shape(kind: relax.Type) -> bool:
    return isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr)


__all__ = ["legalized", "with_operators"]
