"""Batch normalisation with the statistics of all workers."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.relax import op

from ...ir.bindings import bindings_of
from ...ir.compat import constant_value, dtype_of
from ...ir.module import normalized
from ._emitter import Emitter


def training_norms(function: relax.Function) -> list[relax.Binding]:
    """Return the batch normalisations of a function that use the statistics of the batch."""
    kind = tvm.ir.Op.get("relax.nn.batch_norm")
    return [
        binding
        for binding in bindings_of(function.body)
        if isinstance(binding.value, relax.Call)
        and binding.value.op == kind
        and binding.value.attrs.training
    ]


def synchronized(
    function: relax.Function, weight: relax.Var | None, ratio: relax.Var
) -> relax.Function:
    """Return a function whose batch normalisations use the mean and the variance over all workers.

    Forward form, for worker r of W with the weight ``w_r`` (the share of its examples, times W):
    the mean is ``allreduce(w_r * mean(x), "avg")``, and the variance
    ``allreduce(w_r * mean((x - mean) ** 2), "avg")``. The rules of the collectives give the
    gradient, which equals the gradient of one worker with all examples.

    Parameters
    ----------
    weight : relax.Var or None
        The weight, of float32 without axes; None if all workers have the same number of examples.
    ratio : relax.Var
        The number of all examples, divided by the worker's own, of float32 without axes. The
        unbiased variance of an imported PyTorch model counts all examples.

    Raises
    ------
    ValueError
        If a normalisation is in a branch.
    """
    whole = {binding.var for binding in training_norms(function)}
    plain = relax.transform.ToNonDataflow()(tvm.IRModule({"f": function}))["f"]
    emit = Emitter()
    results: dict[relax.Var, tuple] = {}
    variances: dict[relax.Var, relax.Call] = {}
    factors = _Factors()
    for block in plain.body.blocks[:]:
        for binding in block.bindings[:]:
            value = binding.value
            factors.note(binding)
            is_norm = isinstance(value, relax.Call) and value.op == tvm.ir.Op.get(
                "relax.nn.batch_norm"
            )
            if is_norm and value.attrs.training:
                results[binding.var] = _normalized(emit, value, weight)
                fields = relax.Tuple(results[binding.var])
                emit.bindings.append(relax.VarBinding(binding.var, fields))
                continue
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in results:
                if value.index == 2:
                    variances[binding.var] = binding.value
                field = results[value.tuple_value][value.index]
                emit.bindings.append(relax.VarBinding(binding.var, field))
                continue
            if factor := factors.of_variance(value, variances):
                value = _unbiased(emit, *factor, ratio)
                emit.bindings.append(relax.VarBinding(binding.var, value))
                continue
            emit.bindings.append(binding)
    if len(results) < len(whole):
        raise ValueError(
            "batch_norm: a batch normalisation in a branch cannot be synchronized; use "
            'batch_norm="local"'
        )
    body = relax.SeqExpr([relax.BindingBlock(emit.bindings)], plain.body.body)
    params = [*plain.params, *([] if weight is None else [weight]), ratio]
    return relax.Function(params, normalized(params, body), None, plain.is_pure, plain.attrs)


def _normalized(
    emit: Emitter, call: relax.Call, weight: relax.Expr | None
) -> tuple[relax.Expr, relax.Expr, relax.Expr]:
    data, gamma, beta, moving_mean, moving_variance = call.args
    attrs = call.attrs
    dtype, ndim = dtype_of(data.ty), data.ty.ndim
    axis = int(attrs.axis) % ndim
    axes = [i for i in range(ndim) if i != axis]
    along = [data.ty.shape.values[axis] if i == axis else 1 for i in range(ndim)]

    def mean(value: relax.Expr) -> relax.Expr:
        own = emit(op.mean(value, axes))
        if weight is not None:
            own = emit(op.multiply(own, _cast(emit, weight, dtype)))
        return emit(op.ccl.allreduce(own, "avg", False))

    def spread(vector: relax.Expr) -> relax.Expr:
        return emit(op.reshape(vector, along))

    average = mean(data)
    centred = emit(op.subtract(data, spread(average)))
    variance = mean(emit(op.multiply(centred, centred)))
    shifted = emit(op.add(variance, relax.const(float(attrs.epsilon), dtype)))
    scale = emit(op.divide(relax.const(1.0, dtype), emit(op.sqrt(shifted))))
    if attrs.scale:
        scale = emit(op.multiply(scale, gamma))
    result = emit(op.multiply(centred, spread(scale)))
    if attrs.center:
        result = emit(op.add(result, spread(beta)))
    momentum = float(attrs.momentum)

    def moved(old: relax.Expr, new: relax.Expr) -> relax.Expr:
        if momentum == 1.0:
            return new
        kept = emit(op.multiply(old, relax.const(1.0 - momentum, dtype)))
        return emit(op.add(kept, emit(op.multiply(new, relax.const(momentum, dtype)))))

    return result, moved(moving_mean, average), moved(moving_variance, variance)


class _Factors:
    """The factors ``n / (n - 1)`` by which the import of PyTorch models multiplies variances."""

    def __init__(self) -> None:
        self._values: dict[relax.Var, relax.Expr] = {}

    def note(self, binding: relax.Binding) -> None:
        self._values[binding.var] = binding.value

    def of_variance(
        self, value: relax.Expr, variances: Mapping
    ) -> tuple[relax.Expr, relax.Expr] | None:
        """Return the variance and the number of elements, if the value is the unbiased variance of
        a normalisation."""
        if not isinstance(value, relax.Call) or value.op != tvm.ir.Op.get("relax.multiply"):
            return None
        variance, factor = value.args
        if variance not in variances:
            return None
        known = constant_value(factor)
        if known is not None and known.ndim == 0 and known > 1:
            return variance, relax.const(round(float(known / (known - 1))), dtype_of(variance.ty))
        division = self._values.get(factor)
        if (
            isinstance(division, relax.Call)
            and division.op == tvm.ir.Op.get("relax.divide")
            and self._is_less_one(division.args[1], division.args[0])
        ):
            return variance, division.args[0]
        return None

    def _is_less_one(self, value: relax.Expr, count: relax.Expr) -> bool:
        definition = self._values.get(value)
        return (
            isinstance(definition, relax.Call)
            and definition.op == tvm.ir.Op.get("relax.subtract")
            and definition.args[0].same_as(count)
            and constant_value(definition.args[1]) == 1
        )


def _unbiased(
    emit: Emitter, variance: relax.Expr, count: relax.Expr, ratio: relax.Expr
) -> relax.Expr:
    """Return the variance with Bessel's correction for the elements of all workers."""
    dtype = dtype_of(variance.ty)
    total = emit(op.multiply(count, _cast(emit, ratio, dtype)))
    less = emit(op.subtract(total, relax.const(1.0, dtype)))
    return op.multiply(variance, emit(op.divide(total, less)))


def _cast(emit: Emitter, value: relax.Expr, dtype: str) -> relax.Expr:
    return value if dtype_of(value.ty) == dtype else emit(op.astype(value, dtype))
