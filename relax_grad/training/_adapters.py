"""The calls of adapters, and products with quantised weights, in functions of Relax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ..ir.compat import dtype_of
from ._quantized import QuantizedWeight
from ._readers import CONVOLUTIONS, Reader, reads


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight.

    Attributes
    ----------
    weight : str
        The name of the weight.
    kind : str
        ``"linear"`` for a weight of shape (outputs, inputs), ``"transposed"`` for one of shape
        (inputs, outputs), ``"embedding"`` for a table of rows, and ``"conv"``.
    a, b : str
        The names of the parameters A, of shape (rank, inputs, ...), and B, of shape (outputs,
        rank, ...). The inputs of a table are its rows.
    """

    weight: str
    kind: str
    a: str
    b: str


def adapted(
    reader: Reader,
    adapters: Sequence[Adapter],
    params: Mapping[str, tvm.runtime.Tensor],
    scale: float,
    base: Mapping[str, tvm.runtime.Tensor],
    quantized: Sequence[QuantizedWeight],
) -> relax.Function:
    """Return a function with the parameters of the adapters.

    Numbers and scales, of the types of their values in ``base``, take the places of quantised
    weights.
    """
    function, weights = reader.function, reader.weights
    variables = {name: _variable(name, value) for name, value in params.items()}
    stored = {
        weights[weight.weight]: [
            _variable(name, base[name]) for name in (weight.numbers, weight.scale)
        ]
        for weight in quantized
    }

    def widened(params: Sequence[relax.Var]) -> list[relax.Var]:
        return [variable for param in params for variable in stored.get(param, [param])]

    old = list(function.params)
    new = [*widened(old[: reader.place]), *variables.values(), *widened(old[reader.place :])]
    by_name = {adapter.weight: adapter for adapter in adapters}
    products = {weight.weight: stored[weights[weight.weight]] for weight in quantized}
    targets = {weights[name]: name for name in {**by_name, **products}}
    calls, dropped = [], []
    for binding, name, kind in reads(function, targets):
        if binding is not None and kind not in ("alias", "turn"):
            calls.append((binding.value, by_name.get(name), products.get(name)))
        elif binding is not None and name in products:
            dropped.append(binding.var)
    whole = relax.Function(new, function.body, function.ret_ty, function.is_pure, function.attrs)
    return _Adapting(calls, dropped, variables, scale).visit_expr(whole)


def _variable(name: str, value: tvm.runtime.Tensor) -> relax.Var:
    shape = [int(extent) for extent in value.shape]
    return relax.Var(name, relax.TensorType(shape, str(value.dtype)))


@relax.expr_functor.mutator
class _Adapting(relax.PyExprMutator):
    """Adds the outputs of adapters to calls, and lets products read quantised weights."""

    def __init__(
        self,
        calls: Sequence[tuple[relax.Call, Adapter | None, Sequence[relax.Var] | None]],
        dropped: Sequence[relax.Var],
        variables: Mapping[str, relax.Var],
        scale: float,
    ):
        super().__init__()
        self._calls, self._dropped = calls, set(dropped)
        self._variables, self._scale = variables, scale

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self._dropped:
            super().visit_var_binding_(binding)

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        if binding.var not in self._dropped:
            super().visit_match_cast_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        _, adapter, stored = next(
            (known for known in self._calls if known[0].same_as(call)), (call, None, None)
        )
        if stored is not None:
            data = self.visit_expr(call.args[0])
            new = self._product(data, stored, dtype_of(call.ty))
        else:
            new = super().visit_call_(call)
        if adapter is None:
            return new
        if stored is None:
            data = new.args[1 if adapter.kind == "embedding" else 0]
        whole = self.builder_.emit(new)
        return op.add(whole, self._change(adapter, whole, call, data))

    def _product(self, data: relax.Expr, stored: Sequence[relax.Var], dtype: str) -> relax.Expr:
        """Return the product of data and a quantised weight, of the dtype of the product that it
        replaces."""
        if dtype_of(data.ty) != dtype:
            data = self.builder_.emit(op.astype(data, dtype))
        return backward.quantized_matmul(data, *stored)

    def _change(
        self, adapter: Adapter, whole: relax.Var, call: relax.Call, data: relax.Expr
    ) -> relax.Expr:
        emit = self.builder_.emit
        dtype = dtype_of(whole.ty)
        a, b = (self._variables[name] for name in (adapter.a, adapter.b))
        if dtype_of(a.ty) != dtype:
            a, b = (emit(op.astype(matrix, dtype)) for matrix in (a, b))
        if adapter.kind == "conv":
            attrs = call.attrs
            make = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[CONVOLUTIONS[call.op.name]]
            numbers = (attrs.strides, attrs.padding, attrs.dilation)
            inner = emit(make(data, a, *([int(extent) for extent in number] for number in numbers)))
            change = make(inner, b)
        elif adapter.kind == "embedding":
            inner = emit(op.take(emit(op.permute_dims(a)), data, 0, str(call.attrs.mode)))
            change = op.matmul(inner, emit(op.permute_dims(b)))
        else:
            inner = emit(op.matmul(data, emit(op.permute_dims(a))))
            change = op.matmul(inner, emit(op.permute_dims(b)))
        change = emit(change)
        return (
            change
            if self._scale == 1
            else emit(op.multiply(change, relax.const(self._scale, dtype)))
        )
