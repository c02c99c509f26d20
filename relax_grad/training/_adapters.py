"""The uses of weights in functions of Relax, the calls of their adapters, and products with
quantised weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.op import grad as backward

from ..ir.bindings import bindings_of
from ..ir.compat import dtype_of

_CONVOLUTIONS = {f"relax.nn.conv{n}d": n for n in (1, 2, 3)}


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


def _operator(value: relax.Expr) -> str:
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return value.op.name if is_call else type(value).__name__


def _swaps_last_axes(call: relax.Call) -> bool:
    axes = call.attrs.axes
    return call.args[0].ty.ndim == 2 and (axes is None or [int(axis) for axis in axes] == [1, 0])


def uses_of(function: relax.Function, weights: Mapping[relax.Var, str]):
    """Yield each use of weights, and of their casts and transposes: the binding, the name and the
    kind, or no kind."""
    for binding, name, kind in _reads(function, weights):
        if kind not in ("alias", "turn"):
            yield binding, name, kind


def _reads(function: relax.Function, weights: Mapping[relax.Var, str]):
    """Yield what :func:`uses_of` does, and casts and transposes too: their kinds are ``"alias"``
    and ``"turn"``."""
    known = {variable: (name, False) for variable, name in weights.items()}
    for binding in bindings_of(function.body):
        value = binding.value
        read = [var for var in relax.analysis.free_vars(value) if var in known]
        for variable in read:
            name, is_turned = known[variable]
            kind = _kind(value, variable, is_turned)
            if kind in ("alias", "turn"):
                known[binding.var] = name, is_turned ^ (kind == "turn")
            yield binding, name, kind
    for variable in relax.analysis.free_vars(function.body.body):
        if variable in known:
            yield None, known[variable][0], None


def _kind(value: relax.Expr, variable: relax.Var, is_turned: bool) -> str | None:
    """Return the kind of a use of a weight, which may be transposed, or None."""
    name = _operator(value)
    if isinstance(value, relax.Var) or (name == "relax.astype"):
        return "alias"
    if name == "relax.permute_dims" and _swaps_last_axes(value):
        return "turn"
    places = [
        i for i, argument in enumerate(getattr(value, "args", [])) if argument.same_as(variable)
    ]
    if variable.ty.ndim == 2 and name == "relax.matmul" and places == [1]:
        return "linear" if is_turned else "transposed"
    if name == "relax.take" and places == [0] and not is_turned and variable.ty.ndim == 2:
        axis = value.attrs.axis
        return "embedding" if axis is not None and int(axis) == 0 else None
    if name in _CONVOLUTIONS and places == [1]:
        letters = "WHD"[: _CONVOLUTIONS[name]][::-1]
        is_usual = str(value.attrs.kernel_layout) == f"OI{letters}" and int(value.attrs.groups) == 1
        return "conv" if is_usual and str(value.attrs.data_layout) == f"NC{letters}" else None
    return None


def kinds_of(module, functions, chosen: Sequence[str]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for function_name, weights in functions.items():
        wanted = {weights[name]: name for name in chosen}
        for binding, name, kind in uses_of(module[function_name], wanted):
            reader = (
                "the result" if binding is None else _operator(binding.value).removeprefix("relax.")
            )
            if kind is None:
                raise ValueError(
                    f"targets: {name} is read by {reader} in {function_name}; an adapter needs a "
                    "weight of matmul, of take of rows, or of a convolution with one group"
                )
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(
                    f"targets: {name} is read in two ways, as a weight of {kinds[name]} and of "
                    f"{kind} layers; leave it out"
                )
    for name in chosen:
        if name not in kinds:
            raise ValueError(f"targets: no function reads {name}")
    return kinds


def adapted(function, weights, adapters, params, scale, model, base, quantized) -> relax.Function:
    """Return a function with the parameters of the adapters, in front of the weights of an import.

    Numbers and scales, of the types of their values in ``base``, take the places of quantised
    weights.
    """
    variables = {name: _variable(name, value) for name, value in params.items()}
    old = list(function.params)
    stored = {
        weights[weight.weight]: [
            _variable(name, base[name]) for name in (weight.numbers, weight.scale)
        ]
        for weight in quantized
    }
    new = [stored_param for param in old for stored_param in stored.get(param, [param])]
    if isinstance(model, tvm.IRModule):
        new = [*new, *variables.values()]
    else:
        first = len(old) - len(model.params) - len(model.frozen) - len(model.states)
        new = [*new[:first], *variables.values(), *new[first:]]
    by_name = {adapter.weight: adapter for adapter in adapters}
    products = {weight.weight: stored[weights[weight.weight]] for weight in quantized}
    targets = {weights[name]: name for name in {**by_name, **products}}
    calls, dropped = [], []
    for binding, name, kind in _reads(function, targets):
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
    """Adds the outputs of adapters to those of calls, and lets products read quantised weights."""

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
        adapter, stored = next(
            (rest for known_call, *rest in self._calls if known_call.same_as(call)), (None, None)
        )
        if adapter is None and stored is None:
            return super().visit_call_(call)
        if stored is not None:
            data = self.visit_expr(call.args[0])
            new = self._product(data, stored, dtype_of(call.ty))
        else:
            new = super().visit_call_(call)
            data = new.args[1 if adapter.kind == "embedding" else 0]
        if adapter is None:
            return new
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
            make = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[_CONVOLUTIONS[call.op.name]]
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
