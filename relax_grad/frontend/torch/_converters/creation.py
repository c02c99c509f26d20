"""Converters of operators that make tensors or change their dtype."""

from __future__ import annotations

import torch
from tvm import relax, tirx

from ._call import Call, axis_of, converts, dtype, extents_of, static
from ._support import Converter, Refused

CREATION: dict[str, Converter] = {}

_op = relax.op


def _constant(call: Call, value: float | relax.Expr) -> relax.Expr:
    """Return a number, or a tensor of one element, in the shape and dtype of the result."""
    value = call.tensor(value, call.dtype)
    return _op.broadcast_to(value, call.shape) if call.shape else value


@converts(
    CREATION, "full.default", "full_like.default", "new_full.default", "fill.Scalar", "fill.Tensor"
)
def _full(
    call: Call, fill_value: float | None = None, value: relax.Expr | None = None, **_: object
) -> relax.Expr:
    return _constant(call, value if fill_value is None else fill_value)


@converts(CREATION, "scalar_tensor.default")
def _scalar_tensor(call: Call, s: float, **_: object) -> relax.Expr:
    return _constant(call, s)


@converts(
    CREATION,
    *("zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format"),
    *("empty_like.default", "new_empty.default", "empty_strided.default", "zero.default"),
    *("new_empty_strided.default", "empty_permuted.default"),
)
def _zeros(call: Call, **_: object) -> relax.Expr:
    """Return zeros, also for tensors that PyTorch leaves uninitialised."""
    return _op.zeros(call.shape, call.dtype)


@converts(CREATION, "ones.default", "ones_like.default", "new_ones.default")
def _ones(call: Call, **_: object) -> relax.Expr:
    return _op.ones(call.shape, call.dtype)


@converts(CREATION, "eye.default", "eye.m")
def _eye(call: Call, n: int, m: int | tirx.Expr | None = None, **_: object) -> relax.Expr:
    return _op.eye(*call.shape, 0, call.dtype)


@converts(CREATION, "tril_indices.default", "triu_indices.default")
def _triangle(
    call: Call, row: int | tirx.Expr, col: int | tirx.Expr, offset: int | tirx.Expr, **_: object
) -> relax.Expr:
    function = torch.tril_indices if "tril" in call.node.target.__name__ else torch.triu_indices
    return relax.const(function(*static([row, col]), offset).numpy(), call.dtype)


@converts(CREATION, "arange.default", "arange.start", "arange.start_step")
def _arange(
    call: Call, end: int | tirx.Expr, start: int | tirx.Expr = 0, step: int = 1, **_: object
) -> relax.Expr:
    """The places are whole numbers, and the values multiples of the step."""
    kind = call.dtype
    whole = "int" in kind
    places = call.emit(_op.arange(0, call.shape[0], 1, "int64"))
    inner = "int64" if whole else ("float64" if kind == "float64" else "float32")
    places = call.cast(places, inner)
    if step != 1:
        places = call.emit(_op.multiply(places, call.tensor(step, inner)))
    if not isinstance(start, (int, float)) or start != 0:
        places = call.emit(_op.add(places, call.tensor(start, inner)))
    return call.cast(places, kind)


@converts(CREATION, "linspace.default")
def _linspace(
    call: Call, start: int | tirx.Expr, end: int | tirx.Expr, steps: int | tirx.Expr, **_: object
) -> relax.Expr:
    if not all(isinstance(number, (int, float)) for number in (start, end, steps)):
        raise Refused("its bounds are computed at run time")
    return relax.const(torch.linspace(start, end, steps, dtype=torch.float64).numpy(), call.dtype)


@converts(
    CREATION,
    *("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "type_as.default"),
    *("clone.default", "lift_fresh_copy.default", "contiguous.default", "copy.default"),
    *("alias.default", "lift_fresh.default", "positive.default"),
)
def _to_copy(call: Call, data: relax.Expr, **others: object) -> relax.Expr:
    """A copy has the values of its source, in the dtype of the result."""
    if call.node.target.__name__ == "copy.default":
        data = others["src"]
        if extents_of(data) != call.shape:
            data = call.emit(_op.broadcast_to(data, call.shape))
    return call.cast(data, call.dtype)


@converts(CREATION, "one_hot.default")
def _one_hot(call: Call, data: relax.Expr, num_classes: int | tirx.Expr) -> relax.Expr:
    classes = call.emit(_op.arange(0, call.shape[-1], 1, dtype(data)))
    return call.cast(call.emit(_op.equal(_op.expand_dims(data, data.ty.ndim), classes)), "int64")


@converts(CREATION, "glu.default")
def _glu(call: Call, data: relax.Expr, dim: int) -> relax.Expr:
    whole = call.emit(_op.split(data, 2, axis_of(dim, data.ty.ndim)))
    first, second = (call.item(whole, i) for i in range(2))
    return _op.multiply(first, _op.sigmoid(second))
