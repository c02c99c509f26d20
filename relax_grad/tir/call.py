"""Gradients of calls of tensor functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ..errors import GradientError
from ..ir.compat import dtype_of
from ..ir.module import tuple_fields
from .reverse import Adjoint, adjoint
from .statements import is_float

_CALL_TIR, _INPLACE = map(Op.get, ("relax.call_tir", "relax.call_tir_inplace"))


def is_call(value: relax.Expr) -> bool:
    """Tell whether a value is a call of a tensor function, which may overwrite its arguments."""
    return isinstance(value, relax.Call) and value.op in (_CALL_TIR, _INPLACE)


#: The remedies for a tensor function without a gradient. Importers emit Relax operators, so that
#: LegalizeOps made most of these functions.
_REMEDY = (
    "differentiate before relax.transform.LegalizeOps turns operators into tensor functions, or "
    "give this function a gradient with relax.op.call_tir_with_grad"
)


class TensorFunctions:
    """The adjoints of the tensor functions of a module, each computed once.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    """

    def __init__(self, mod: tvm.IRModule):
        self._mod = mod
        self._found: dict[tuple, Adjoint | GradientError] = {}

    def adjoint(
        self, call: relax.Call, wrt: Sequence[int], cotangents: Sequence[int] | None = None
    ) -> Adjoint:
        """Return the adjoint of the function of a call.

        Parameters
        ----------
        call : relax.Call
            A call for which :func:`is_call` holds.
        wrt : Sequence[int]
            The indices of the arguments to differentiate with respect to.
        cotangents : Sequence[int], optional
            The indices of the results that have a cotangent; by default all of floating-point
            numbers.

        Raises
        ------
        GradientError
            If the function has no derivative; the message says why.
        """
        inplace = _inplace(call)
        if cotangents is None:
            cotangents = _floats(_results(call))
        wanted = tuple(cotangents)
        key = call.args[0], len(_results(call)), inplace, tuple(wrt), wanted
        if key not in self._found:
            try:
                function = self._function(call.args[0])
                self._found[key] = adjoint(
                    function, wrt, len(_results(call)), wanted, inplace=inplace
                )
            except GradientError as error:
                self._found[key] = GradientError(f"{error}; {_REMEDY}")
        known = self._found[key]
        if isinstance(known, GradientError):
            raise known
        return known

    def _function(self, callee: relax.Expr) -> tirx.PrimFunc:
        known = isinstance(callee, GlobalVar) and callee in self._mod.functions
        function = self._mod[callee] if known else None
        if not isinstance(function, tirx.PrimFunc):
            raise GradientError(f"{callee} is no tensor function of the module")
        return function


def partials(
    functions: TensorFunctions,
    bb: relax.BlockBuilder,
    variable: relax.Expr,
    call: relax.Call,
    cotangents: Mapping[int, relax.Expr],
    wrt: Collection[int],
) -> dict[int, relax.Expr]:
    """Emit the call of an adjoint, and return the gradients by the index of the argument.

    Parameters
    ----------
    functions : TensorFunctions
        The functions of the module.
    bb : relax.BlockBuilder
        The builder to emit into; the adjoint is added to its module.
    variable : relax.Expr
        The result of the call.
    call : relax.Call
        The call.
    cotangents : Mapping[int, relax.Expr]
        The cotangent of each result that has one, by its index.
    wrt : Collection[int]
        The indices of the arguments whose gradients are wanted.

    Raises
    ------
    GradientError
        If the function has no derivative.
    """
    wrt, places = sorted(wrt), sorted(cotangents)
    backward = functions.adjoint(call, wrt, places)
    arguments = tuple_fields(call.args[1])
    results = [variable]
    if isinstance(call.ty, relax.TupleType):
        results = [relax.TupleGetItem(variable, i) for i in range(len(call.ty.fields))]
    table: dict[str, Mapping | Sequence] = {
        "input": arguments,
        "output": results,
        "cotangent": cotangents,
    }
    taken = [table[kind][i] for kind, i in backward.takes]
    taken = [bb.emit(value) if isinstance(value, relax.TupleGetItem) else value for value in taken]
    callee = bb.add_func(backward.function, f"{call.args[0].name_hint}_grad")
    types = [arguments[i].ty for i in wrt]
    kind = types if len(types) > 1 else types[0]
    gradients = bb.emit(relax.op.call_tir(callee, relax.Tuple(taken), kind))
    if len(wrt) == 1:
        return {wrt[0]: gradients}
    return {index: bb.emit(relax.TupleGetItem(gradients, i)) for i, index in enumerate(wrt)}


def float_arguments(call: relax.Call) -> list[int]:
    """Return the indices of the arguments that are tensors of floating-point numbers."""
    return _floats([argument.ty for argument in tuple_fields(call.args[1])])


def _floats(types: Sequence[relax.Type]) -> list[int]:
    return [
        i
        for i, kind in enumerate(types)
        if isinstance(kind, relax.TensorType) and is_float(dtype_of(kind))
    ]


def _results(call: relax.Call) -> list[relax.Type]:
    """Return the types of the results of a call."""
    kind = call.ty_args[0]
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _inplace(call: relax.Call) -> tuple[int, ...] | None:
    if call.op != _INPLACE:
        return None
    return tuple(map(int, call.attrs.inplace_indices))


__all__ = [
    "TensorFunctions",
    "float_arguments",
    "is_call",
    "partials",
]
