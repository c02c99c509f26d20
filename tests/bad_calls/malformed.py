"""Relax functions that are not well-formed."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax import op

X = relax.Var("x", relax.TensorType((3,), "float32"))


def _function(body: relax.Expr, result: relax.Type = X.ty, *values: relax.Expr) -> relax.Function:
    """Return a public function that binds one variable to each value, and returns ``body`` or that
    variable."""
    bindings = []
    for value in values:
        y = bindings[0].var if bindings else relax.Var("y", value.ty)
        bindings.append(relax.VarBinding(y, value))
    blocks = [relax.BindingBlock(bindings)] if bindings else []
    body = relax.SeqExpr(blocks, bindings[0].var if body is None else body)
    return relax.Function([X], body, result).with_attr("global_symbol", "main")


def _typed(call: relax.Call) -> relax.Call:
    return relax.BlockBuilder().normalize(call)


def _free_variable() -> relax.Function:
    return _function(relax.Var("q", X.ty))


def _bound_twice() -> relax.Function:
    return _function(None, X.ty, _typed(op.exp(X)), _typed(op.sin(X)))


def _twice_a_parameter() -> relax.Function:
    call = _typed(op.exp(X))
    bound = relax.BindingBlock([relax.VarBinding(y := relax.Var("y", X.ty), call)])
    return relax.Function([X, X], relax.SeqExpr([bound], y), X.ty)


def _parameter_bound_again() -> relax.Function:
    bound = relax.BindingBlock([relax.VarBinding(X, _typed(op.exp(X)))])
    return relax.Function([X], relax.SeqExpr([bound], X), X.ty)


def _missing_callee() -> relax.Function:
    call = relax.Call(tvm.ir.GlobalVar("nowhere"), [X], ty_args=[X.ty])
    relax.expr._update_type(call, X.ty)
    return _function(None, X.ty, call)


def _unknown_extent() -> relax.Function:
    """Return a function whose body uses an extent that no parameter defines."""
    zeros = op.zeros(relax.ShapeExpr([tirx.Var("m", "int64")]), "float32")
    return _function(None, relax.TensorType(None, "float32", ndim=1), _typed(zeros))


#: Functions that are not well formed.
MALFORMED = {
    "a free variable": _free_variable,
    "a variable bound twice": _bound_twice,
    "a parameter twice": _twice_a_parameter,
    "a parameter bound again": _parameter_bound_again,
    "a call of a function that is missing": _missing_callee,
    "an extent that no parameter gives": _unknown_extent,
}
