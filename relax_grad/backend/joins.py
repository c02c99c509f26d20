"""Calls of several operators that one function of a library computes.

A forward function also returns the statistics of a normalisation, or the logarithm of the sums of
exponentials of attention, which the gradient would compute again. A backward function returns the
gradients of all operands. A product takes a bias, and transposed operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from tvm import relax, tirx

from ..ir.compat import constant_value, dtype_of
from .call import BackwardCall, shape_of
from .library_call import Calls, Join, LibraryCall, Place, is_call, same
from .primitives import (
    attention_numbers,
    batch_norm_numbers,
    group_norm_numbers,
    results_of,
    row_norm_numbers,
)

__all__ = ["JOINS"]


# Statistics of the forward pass.


def _with_statistics(
    function: str,
    operator: str,
    attrs: tuple[str, ...],
    calls: Calls,
    var: relax.Var,
    call: BackwardCall,
) -> LibraryCall | None:
    """Let a normalisation return the statistics that a later call of ``operator`` computes."""
    data = call.arguments["data"]
    if call.attrs.get("training") is False:
        return None
    wanted = calls.similar(operator, [data], call.attrs, *attrs)
    if wanted is None or calls.place(wanted) < calls.place(var):
        return None
    results, statistics = results_of(call.type), results_of(wanted.ty)
    own = tuple(range(len(results))) if isinstance(call.type, relax.TupleType) else 0
    saved = tuple(range(len(results), len(results) + len(statistics)))
    is_tuple = isinstance(wanted.ty, relax.TupleType)
    return LibraryCall(
        function,
        list(call.arguments.values()),
        _norm_numbers(call),
        [*results, *statistics],
        {var: own, wanted: saved if is_tuple else saved[0]},
    )


def _norm_numbers(call: BackwardCall) -> tuple[int | float, ...]:
    name = call.op_name
    if "batch_norm" in name:
        return batch_norm_numbers(call)
    if "group_norm" in name or "instance_norm" in name:
        return group_norm_numbers(call)
    return row_norm_numbers(call)


# Gradients of normalisations.


def _is_sum(call: relax.Call, of: relax.Expr, kept: set[int], keepdims: bool) -> bool:
    """Tell whether a call sums a tensor over all axes except ``kept``."""
    if not is_call(call, "relax.sum"):
        return False
    rank = of.ty.ndim
    axes = range(rank) if call.attrs.axis is None else [int(axis) for axis in call.attrs.axis]
    summed = {axis % rank for axis in axes}
    return summed == set(range(rank)) - kept and bool(call.attrs.keepdims) == keepdims


def _sums_of(
    calls: Calls, of: relax.Expr, kept: set[int], keepdims: bool = False
) -> Iterator[relax.Var]:
    """Yield the variables of sums of a tensor, or of the tensor in a wider dtype, over all axes
    except ``kept``, unless another call of the library computes them."""
    wide = [var for var, _ in calls.users(of, "relax.astype")]
    for source in (of, *wide):
        for var, call in calls.users(source, "relax.sum"):
            if var not in calls.joined and _is_sum(call, source, kept, keepdims):
                yield var


#: A coefficient, and how often each variable is a factor.
_Product = tuple[float, Counter]


def _product(calls: Calls, expr: relax.Expr, leaves: tuple[relax.Expr, ...]) -> _Product | None:
    """Return a product of scalars and of these variables, or None if it has other terms.

    Casts and new axes of extent 1 do not count.
    """
    if isinstance(expr, relax.Var) and any(expr.same_as(leaf) for leaf in leaves):
        return 1.0, Counter([expr])
    value = calls.value(expr)
    constant = constant_value(value)
    if constant is not None:
        return (float(constant), Counter()) if constant.ndim == 0 else None
    if is_call(value, "relax.zeros", "relax.zeros_like"):
        return 0.0, Counter()
    if is_call(value, "relax.astype", "relax.negative"):
        inner = _product(calls, value.args[0], leaves)
        sign = -1 if value.op.name == "relax.negative" else 1
        return None if inner is None else (sign * inner[0], inner[1])
    if is_call(value, "relax.expand_dims"):
        axes = sorted(int(axis) % value.ty.ndim for axis in value.attrs.axis)
        is_channel = axes == [axis for axis in range(value.ty.ndim) if axis != 1]
        return _product(calls, value.args[0], leaves) if is_channel else None
    if not is_call(value, "relax.multiply", "relax.add"):
        return None
    first, second = (_product(calls, argument, leaves) for argument in value.args)
    if first is None or second is None:
        return None
    if value.op.name == "relax.multiply":
        return first[0] * second[0], first[1] + second[1]
    if first[0] == 0 or second[0] == 0:
        return second if first[0] == 0 else first
    return None


def _are_own(
    calls: Calls,
    call: BackwardCall,
    grads: tuple[relax.Expr, relax.Expr],
    sums: tuple[relax.Var, relax.Var],
) -> bool:
    """Tell whether the gradients of mean and variance come from the normalized data alone: they are
    ``-gamma * rstd * t`` and ``-gamma * rstd**2 * u / 2`` for the sums ``t`` and ``u``."""
    gamma, rstd = call.arguments["gamma"], call.arguments["rstd"]
    factors = [gamma] if call.attrs["scale"] else []
    leaves = (gamma, rstd, *sums)
    total, twist = sums
    return _product(calls, grads[0], leaves) == (-1.0, Counter([*factors, rstd, total])) and (
        _product(calls, grads[1], leaves) == (-0.5, Counter([*factors, rstd, rstd, twist]))
    )


def _gradients(
    function: str,
    call: BackwardCall,
    var: relax.Var,
    numbers: tuple[int | float, ...],
    gamma: relax.Var | None,
    beta: relax.Var | None,
    names: tuple[str, ...] = ("output_grad", "data", "gamma", "mean", "rstd"),
) -> LibraryCall:
    """Return the call for the gradients of data, of factors and of offsets.

    A function returns all three, so that a missing one gets a result that is not used.
    """
    operands = [call.arguments[name] for name in names]
    factors = operands[2].ty
    results = [call.type, *(factors if each is None else each.ty for each in (gamma, beta))]
    values: dict[relax.Var, Place] = {var: 0}
    values.update({each: place for place, each in ((1, gamma), (2, beta)) if each is not None})
    mask = (int(gamma is not None), int(beta is not None))
    return LibraryCall(function, operands, (*numbers, *mask), results, values)


def _batch_norm(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    grad, data, _, mean, rstd, *grads = call.arguments.values()
    numbers = batch_norm_numbers(call)
    gamma = calls.similar("relax.grad.batch_norm_backward_gamma", [grad, data, mean, rstd], {})
    for beta in _sums_of(calls, grad, {int(numbers[0])}):
        if gamma is not None and _are_own(calls, call, tuple(grads), (beta, gamma)):
            return _gradients("batch_norm_gradients", call, var, numbers, gamma, beta=beta)
    return None


def _layer_norm(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    grad, data, _, mean, rstd = call.arguments.values()
    numbers, rank = row_norm_numbers(call), data.ty.ndim
    gamma = calls.similar("relax.grad.layer_norm_backward_gamma", [grad, data, mean, rstd], {})
    beta = next(_sums_of(calls, grad, set(range(rank - int(numbers[0]), rank))), None)
    if gamma is None and beta is None:
        return None
    return _gradients("layer_norm_gradients", call, var, numbers, gamma, beta=beta)


def _rms_norm(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    grad, data, weight, rstd = call.arguments.values()
    wanted = calls.similar("relax.grad.rms_norm_backward_weight", [grad, data, rstd], {})
    if wanted is None:
        return None
    return LibraryCall(
        "rms_norm_gradients",
        [grad, data, weight, rstd],
        row_norm_numbers(call),
        [call.type, wanted.ty],
        {var: 0, wanted: 1},
    )


def _group_norm(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    grad, data, _, mean, rstd, *grads = call.arguments.values()
    channels = data.ty.shape.values[1]
    statistics = _statistics_of(calls, mean, rstd, data)
    if statistics is None:
        return None
    numbers = group_norm_numbers(BackwardCall.of(statistics))
    groups = int(numbers[0])
    twists = calls.similar("relax.grad.instance_norm_backward_gamma", [grad, data, mean, rstd], {})
    if twists is None or data.ty.ndim < 3:
        return None
    if groups:
        if not isinstance(channels, tirx.IntImm):
            return None
        size = int(channels) // groups
        grads = [_before_average(calls, each, size) for each in grads]
    if any(each is None for each in grads):
        return None
    for totals in _sums_of(calls, grad, {0, 1}, keepdims=True):
        if _are_own(calls, call, tuple(grads), (totals, twists)):
            gamma, beta = (next(_sums_of(calls, each, {1}), None) for each in (twists, totals))
            scale = int(bool(call.attrs["scale"]))
            return _gradients("group_norm_gradients", call, var, (groups, scale), gamma, beta=beta)
    return None


def _statistics_of(
    calls: Calls, mean: relax.Expr, rstd: relax.Expr, data: relax.Expr
) -> relax.Call | None:
    """Return the call that the statistics of groups or instances are results of, or None."""
    values = calls.value(mean), calls.value(rstd)
    if not all(isinstance(value, relax.TupleGetItem) for value in values):
        return None
    sources = [
        calls.call_of(
            value.tuple_value,
            "relax.grad.group_norm_statistics",
            "relax.grad.instance_norm_statistics",
        )
        for value in values
    ]
    first, second = sources
    if first is None or second is None or [value.index for value in values] != [0, 1]:
        return None
    return first if first.same_as(second) and first.args[0].same_as(data) else None


def _before_average(calls: Calls, expr: relax.Expr, size: int) -> relax.Expr | None:
    """Return the tensor whose average over groups of ``size`` channels an expression repeats, or
    None."""
    if size == 1:
        return expr
    divided = calls.call_of(expr, "relax.divide")
    if divided is None:
        return None
    count = constant_value(calls.value(divided.args[1]))
    repeated = calls.call_of(divided.args[0], "relax.repeat")
    if repeated is None or not _repeats(repeated, size):
        return None
    if count is None or count.tolist() != size:
        return None
    sums = calls.call_of(repeated.args[0], "relax.grad.repeat_backward_data", "relax.sum")
    if sums is None:
        return None
    if sums.op.name == "relax.sum":
        is_whole = _is_sum(sums, sums.args[0], set(range(sums.ty.ndim)) - {1}, True)
        return sums.args[0] if is_whole else None
    return sums.args[0] if _repeats(sums, size) else None


def _repeats(call: relax.Call, size: int) -> bool:
    """Tell whether a call repeats each channel, or adds repeated channels."""
    if call.attrs.axis is None:
        return False
    return int(call.attrs.repeats) == size and int(call.attrs.axis) == 1


# Attention.

_WITH_SUMS = "attention_and_log_sum_exp"


def _attention(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    """Let attention return the log-sum-exp of its scores, if its gradient is computed."""
    operands = list(call.arguments.values())
    if not _has_gradient(calls, var, call):
        return None
    dtype = "float64" if call.dtype("query") == "float64" else "float32"
    batch, length, heads, _ = operands[0].ty.shape.values
    # Efficient attention on a GPU pads the rows to a multiple of 32.
    rows = tirx.floordiv(length + 31, 32) * 32
    saved = relax.TensorType([batch, heads, rows], dtype)
    numbers = (*attention_numbers(call), int(len(operands) == 4))
    return LibraryCall(_WITH_SUMS, operands, numbers, [call.type, saved], {var: 0})


def _has_gradient(calls: Calls, var: relax.Var, call: BackwardCall) -> bool:
    """Tell whether a call computes the gradient of an attention from its result."""
    operands = list(call.arguments.values())
    return any(
        other.args[1].same_as(var) and same(other.args[2:], operands)
        for _, other in calls.users(var, "relax.grad.attention_backward")
    )


def _attention_backward(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall | None:
    grad, output, *operands = call.arguments.values()
    forward = calls.joined.get(output)
    if forward is None or forward.function != _WITH_SUMS:
        return None
    if not same(forward.operands, operands):
        return None
    numbers = (*attention_numbers(call), int(len(operands) == 4))
    if numbers != forward.numbers:
        return None
    saved = relax.TupleGetItem(forward.variable, 1)
    return LibraryCall(
        "attention_gradients",
        [grad, output, saved, *operands],
        numbers,
        results_of(call.type),
        {var: (0, 1, 2)},
    )


# Products.


def _matmul(calls: Calls, var: relax.Var, call: BackwardCall) -> LibraryCall:
    """Pass operands whose last two axes are exchanged as they are in memory."""
    biased = _bias(calls, var, call)
    result, bias = (var, []) if biased is None else biased
    operands, flags = [], []
    for expr in call.arguments.values():
        source = _before_transpose(calls, expr)
        operands.append(expr if source is None else source)
        flags.append(int(source is not None))
    function = "matmul" if biased is None else "matmul_bias"
    return LibraryCall(function, [*operands, *bias], tuple(flags), [call.type], {result: 0})


def _before_transpose(calls: Calls, expr: relax.Expr) -> relax.Expr | None:
    """Return the tensor whose last two axes are exchanged, or None."""
    call = calls.call_of(expr, "relax.permute_dims")
    if call is None or not calls.is_settled(call.args[0], expr):
        return None
    rank = call.ty.ndim
    axes = call.attrs.axes
    order = list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]
    is_swap = order == [*range(rank - 2), rank - 1, rank - 2]
    return call.args[0] if is_swap else None


def _bias(
    calls: Calls, var: relax.Var, call: BackwardCall
) -> tuple[relax.Var, list[relax.Expr]] | None:
    """Return the sum of a product with a bias of its columns, if the product has no other use, and
    the bias."""
    if len(call.shape("x2") or ()) != 2 or calls.uses(var) != 1:
        return None
    for user, add in calls.users(var, "relax.add"):
        product, bias = add.args if add.args[0].same_as(var) else reversed(add.args)
        is_row = isinstance(bias, relax.Var) and bias.ty.ndim == 1
        # A bias of one element could be repeated, and a product of one column could be.
        if is_row and product.same_as(var) and _fits(bias.ty, call, add.ty):
            return user, [bias]
    return None


def _fits(bias: relax.TensorType, call: BackwardCall, result: relax.TensorType) -> bool:
    """Tell whether a bias has an element for each column, and the dtype of the product."""
    columns = (call.shape() or ())[-1]
    extents = shape_of(bias)
    dtypes = {dtype_of(bias), dtype_of(call.type), dtype_of(result)}
    return isinstance(columns, int) and extents == (columns,) and len(dtypes) == 1


#: The functions that join calls, by the operator that they begin with.
JOINS: dict[str, Join] = {
    "relax.nn.batch_norm": partial(
        _with_statistics,
        "batch_norm_and_statistics",
        "relax.grad.batch_norm_statistics",
        ("axis", "epsilon"),
    ),
    "relax.nn.layer_norm": partial(
        _with_statistics,
        "layer_norm_and_statistics",
        "relax.grad.layer_norm_statistics",
        ("axes", "epsilon"),
    ),
    "relax.nn.rms_norm": partial(
        _with_statistics,
        "rms_norm_and_statistics",
        "relax.grad.rms_norm_statistics",
        ("axes", "epsilon"),
    ),
    "relax.nn.group_norm": partial(
        _with_statistics,
        "group_norm_and_statistics",
        "relax.grad.group_norm_statistics",
        ("num_groups", "channel_axis", "axes", "epsilon"),
    ),
    "relax.nn.instance_norm": partial(
        _with_statistics,
        "group_norm_and_statistics",
        "relax.grad.instance_norm_statistics",
        ("channel_axis", "axes", "epsilon"),
    ),
    "relax.grad.batch_norm_backward_data": _batch_norm,
    "relax.grad.layer_norm_backward_data": _layer_norm,
    "relax.grad.rms_norm_backward_data": _rms_norm,
    "relax.grad.instance_norm_backward_data": _group_norm,
    "relax.nn.attention": _attention,
    "relax.nn.attention_bias": _attention,
    "relax.grad.attention_backward": _attention_backward,
    "relax.matmul": _matmul,
}
