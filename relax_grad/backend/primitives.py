"""The calls that a library of operators computes one to one: their operands and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from ..ir.compat import dtype_of
from ..op.rank import RANKS
from .call import BackwardCall, shape_of

__all__ = ["PRIMITIVES", "Primitive"]

#: A number of a function.
Number = int | float


@dataclass(frozen=True)
class Primitive:
    """A function of a library.

    Attributes
    ----------
    operands : tuple[str, ...]
        The arguments of the operator that the function takes, in its order. An optional argument
        that a call omits is not passed.
    numbers : Callable[[BackwardCall], tuple[int | float, ...]]
        The numbers that follow the operands.
    refusal : Callable[[BackwardCall], str | None]
        The reason why the function does not compute a call, or None if it does.
    is_mixed : bool
        Whether the tensors may have several dtypes, such as statistics of half precision.
    integers : tuple[str, ...]
        The operands that are integers.
    alone : str or None
        The reason why no function computes a call of the operator alone, or None if one does.
    """

    operands: tuple[str, ...]
    numbers: Callable[[BackwardCall], tuple[Number, ...]]
    refusal: Callable[[BackwardCall], str | None]
    is_mixed: bool = False
    integers: tuple[str, ...] = ()
    alone: str | None = None

    def refuses(self, call: BackwardCall) -> str | None:
        """Return the reason why the function does not compute a call, or None if it does."""
        floats = [name for name in self.operands if name not in self.integers]
        return (
            _unknown(call, self.operands)
            or _dtypes(call, floats, self.is_mixed)
            or self.refusal(call)
        )


#: The dtypes of the functions.
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _tensors(call: BackwardCall, operands: Sequence[str]) -> list[str]:
    return [name for name in operands if name in call.arguments]


def results_of(kind: relax.Type) -> list[relax.Type]:
    """Return the types of the tensors that a call returns."""
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _unknown(call: BackwardCall, operands: tuple[str, ...]) -> str | None:
    """Return the reason if a rank is not known, or an extent is 0."""
    shapes = [call.shape(name) for name in _tensors(call, operands)]
    shapes += map(shape_of, results_of(call.type))
    for shape in shapes:
        if shape is None:
            return "the shape of a tensor is not known"
        if any(isinstance(extent, int) and extent == 0 for extent in shape):
            return "a tensor has no elements"
    return None


def _dtypes(call: BackwardCall, operands: Sequence[str], is_mixed: bool) -> str | None:
    """Return the reason if the dtypes differ, or are no floating-point dtypes."""
    dtypes = {call.dtype(name) for name in _tensors(call, operands)}
    dtypes |= {dtype_of(kind) for kind in results_of(call.type)}
    if len(dtypes) > 1 and not is_mixed:
        return f"the dtypes of the tensors differ: {', '.join(sorted(dtypes))}"
    others = sorted(dtypes.difference(_DTYPES))
    return f"tensors of {', '.join(others)}" if others else None


def _shape(call: BackwardCall, name: str) -> tuple[int | tirx.PrimExpr, ...]:
    """Return the extents of a tensor, which are known."""
    shape = call.shape(name)
    assert shape is not None
    return shape


def _are_equal(a: int | tirx.PrimExpr, b: int | tirx.PrimExpr) -> bool:
    """Tell whether two extents are the same number or the same expression."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _never(call: BackwardCall) -> None:
    """Refuse no call."""


# Convolutions.


def _conv_layouts(call: BackwardCall) -> list[tuple[str, str]]:
    """Return the layouts of data, kernel and result, each with the layout of the library."""
    attrs: Mapping[str, Any] = call.attrs
    spatial = "DHW"[3 - len(attrs["strides"]) :]
    kernel = "IO" if "transpose" in call.op_name else "OI"
    layouts = [str(attrs[f"{name}_layout"] or "") for name in ("data", "kernel", "out")]
    plain = [f"{axes}{spatial}" for axes in ("NC", kernel, "NC")]
    return list(zip([*layouts[:2], layouts[2] or layouts[0]], plain, strict=True))


def _conv_numbers(call: BackwardCall) -> tuple[int, ...]:
    """Return strides, padding, dilation, the padding of the output, the groups, and the axes of
    data, kernel and result in the order of the library."""
    attrs: Mapping[str, Any] = call.attrs
    rank = len(attrs["strides"])
    output = attrs.get("output_padding") or (0,) * rank
    before = attrs["padding"][:rank]
    settings = (*attrs["strides"], *before, *attrs["dilation"], *output, attrs["groups"])
    orders = (layout.index(axis) for layout, plain in _conv_layouts(call) for axis in plain)
    return (*settings, *orders)


def _conv_refusal(call: BackwardCall) -> str | None:
    layouts = _conv_layouts(call)
    if any(sorted(layout) != sorted(plain) for layout, plain in layouts):
        return f"layouts with blocks: {', '.join(layout for layout, _ in layouts)}"
    padding: Sequence[int] = call.attrs["padding"]  # type: ignore[assignment]
    rank = len(padding) // 2
    before, after = padding[:rank], padding[rank:]
    if tuple(before) != tuple(after):
        return f"padding that differs before and after an axis: {before} and {after}"
    return None


# Products.


def _product_refusal(call: BackwardCall) -> str | None:
    ranks = len(_shape(call, "x1")), len(_shape(call, "x2"))
    return None if min(ranks) >= 2 else f"a product of tensors of rank {ranks[0]} and {ranks[1]}"


# Attention.

#: The operands of the gradient.
_ATTENTION = ("query", "key", "value", "bias")


def attention_numbers(call: BackwardCall) -> tuple[Number, ...]:
    """Return the scale and whether scores are masked by causality."""
    attrs: Mapping[str, Any] = call.attrs
    scale, default = attrs.get("scale"), int(_shape(call, "query")[-1]) ** -0.5
    return default if scale is None else float(scale), int(_mask(call) is not None)


def _mask(call: BackwardCall) -> str | None:
    mask = call.attrs.get("causal_mask")
    return str(mask) if mask else None


def _attention_refusal(call: BackwardCall) -> str | None:
    shapes = {name: _shape(call, name) for name in _ATTENTION[:3]}
    if any(len(shape) != 4 for shape in shapes.values()):
        return "operands that are not of shape (batch, length, heads, channels)"
    if not isinstance(shapes["query"][-1], int):
        return "a symbolic number of channels"
    if call.attrs.get("window_size") is not None:
        return "a window"
    lengths = shapes["query"][1], shapes["key"][1]
    square = _are_equal(*lengths)
    mask = _mask(call)
    if mask not in (None, "TopLeft") and not square:
        return f"the mask {mask} for lengths that may differ"
    if mask is not None and "bias" in call.arguments:
        return "a causal mask together with a bias"
    if not _are_equal(shapes["query"][2], shapes["key"][2]):
        return "fewer heads of keys than of queries"
    return None


# Normalisations.

#: The operands of a gradient of a normalisation.
_GRADIENT = ("output_grad", "data", "gamma", "mean", "rstd")


def _axes(call: BackwardCall) -> tuple[int, ...]:
    """Return the axes of a normalisation, not negative, in the order given."""
    rank = len(_shape(call, "data"))
    axes: Sequence[int] = call.attrs["axes"]  # type: ignore[assignment]
    return tuple(int(axis) % rank for axis in axes)


def _channel(call: BackwardCall, name: str) -> int:
    """Return the axis of the channels, not negative."""
    return int(call.attrs[name]) % len(_shape(call, "data"))  # type: ignore[call-overload]


def _flags(call: BackwardCall, *names: str) -> tuple[Number, ...]:
    """Return attributes that are numbers or truth values."""
    attrs: Mapping[str, Any] = call.attrs
    return tuple(
        float(attrs[name]) if name in ("epsilon", "momentum") else int(attrs[name])
        for name in names
    )


def batch_norm_numbers(call: BackwardCall) -> tuple[Number, ...]:
    """Return the axis of the channels, the flags and the numbers of ``batch_norm``."""
    return (
        _channel(call, "axis"),
        *_flags(call, "training", "scale", "center", "epsilon", "momentum"),
    )


def _batch_norm_refusal(call: BackwardCall) -> str | None:
    return None if len(_shape(call, "data")) > 1 else "data without an axis besides the channels"


def row_norm_numbers(call: BackwardCall) -> tuple[Number, ...]:
    """Return the number of normalised axes, whether there are factors and offsets, and the epsilon
    of a normalisation of the last axes."""
    flags = (int(bool(call.attrs.get(name, True))) for name in ("scale", "center"))
    return len(_axes(call)), *flags, *_flags(call, "epsilon")


def _row_norm_refusal(call: BackwardCall) -> str | None:
    axes, rank = _axes(call), len(_shape(call, "data"))
    if not axes or axes != tuple(range(rank - len(axes), rank)):
        return f"axes other than the last ones, in their order: {axes} of {rank}"
    return None


def group_norm_numbers(call: BackwardCall) -> tuple[Number, ...]:
    """Return the groups (0 for one group for each channel), the flags and the epsilon of
    ``group_norm`` or ``instance_norm``."""
    groups: Any = call.attrs.get("num_groups", 0)
    return int(groups), *_flags(call, "scale", "center", "epsilon")


def _group_norm_refusal(call: BackwardCall) -> str | None:
    axes, rank = _axes(call), len(_shape(call, "data"))
    if _channel(call, "channel_axis") != 1 or sorted(axes) != list(range(2, rank)):
        return "channels that are not axis 1, or axes other than all after it"
    return None


# Softmax and losses.


def _softmax_numbers(call: BackwardCall) -> tuple[int]:
    axis: Any = call.attrs["axis"]
    return (int(axis),)


_REDUCTIONS = ("none", "sum", "mean")


def _nll_numbers(call: BackwardCall) -> tuple[int, ...]:
    """Return the place of the reduction, the ignored class, and whether there are weights."""
    attrs: Mapping[str, Any] = call.attrs
    reduction = _REDUCTIONS.index(str(attrs["reduction"]))
    return reduction, int(attrs["ignore_index"]), int("weights" in call.arguments)


def _row_norm(*operands: str) -> Primitive:
    return Primitive(operands, row_norm_numbers, _row_norm_refusal, is_mixed=True)


def _group_norm(*operands: str, alone: str | None = None) -> Primitive:
    return Primitive(operands, group_norm_numbers, _group_norm_refusal, True, alone=alone)


def _batch_norm(*operands: str, alone: str | None = None) -> Primitive:
    return Primitive(operands, batch_norm_numbers, _batch_norm_refusal, True, alone=alone)


_STATISTICS_GRADIENT = (*_GRADIENT, "mean_grad", "variance_grad")
#: Reasons why a gradient of a normalisation is not computed alone.
_NOT_OWN = "gradients of mean and variance with terms besides the normalized data's"
_OF_INSTANCES = "sums for each instance, without the gradient of the data"
_OF_FACTORS = ("output_grad", "data", "mean", "rstd")
_NLL = ("predictions", "targets", "weights")

#: The functions by operator.
PRIMITIVES: dict[str, Primitive] = {
    "relax.matmul": Primitive(("x1", "x2"), lambda call: (), _product_refusal),
    "relax.nn.attention": Primitive(_ATTENTION[:3], attention_numbers, _attention_refusal),
    "relax.nn.attention_bias": Primitive(_ATTENTION, attention_numbers, _attention_refusal),
    "relax.grad.attention_backward": Primitive(
        ("output_grad", *_ATTENTION), attention_numbers, _attention_refusal
    ),
    "relax.nn.softmax": Primitive(("data",), _softmax_numbers, _never),
    "relax.nn.log_softmax": Primitive(("data",), _softmax_numbers, _never),
    "relax.grad.softmax_backward": Primitive(
        ("output_grad", "output"), _softmax_numbers, _never, is_mixed=True
    ),
    "relax.grad.log_softmax_backward": Primitive(
        ("output_grad", "output"), _softmax_numbers, _never, is_mixed=True
    ),
    "relax.nn.nll_loss": Primitive(_NLL, _nll_numbers, _never, integers=("targets",)),
    "relax.grad.nll_loss_backward": Primitive(
        ("output_grad", *_NLL), _nll_numbers, _never, integers=("targets",)
    ),
    "relax.nn.batch_norm": _batch_norm("data", "gamma", "beta", "moving_mean", "moving_var"),
    "relax.grad.batch_norm_statistics": _batch_norm("data"),
    "relax.grad.batch_norm_backward_data": _batch_norm(*_STATISTICS_GRADIENT, alone=_NOT_OWN),
    "relax.grad.batch_norm_backward_gamma": _batch_norm(*_OF_FACTORS),
    "relax.nn.layer_norm": _row_norm("data", "gamma", "beta"),
    "relax.grad.layer_norm_statistics": _row_norm("data"),
    "relax.grad.layer_norm_backward_data": _row_norm(*_GRADIENT),
    "relax.grad.layer_norm_backward_gamma": _row_norm(*_OF_FACTORS),
    "relax.nn.rms_norm": _row_norm("data", "weight"),
    "relax.grad.rms_norm_statistics": _row_norm("data"),
    "relax.grad.rms_norm_backward_data": _row_norm("output_grad", "data", "weight", "rstd"),
    "relax.grad.rms_norm_backward_weight": _row_norm("output_grad", "data", "rstd"),
    "relax.nn.group_norm": _group_norm("data", "gamma", "beta"),
    "relax.nn.instance_norm": _group_norm("data", "gamma", "beta"),
    "relax.grad.group_norm_statistics": _group_norm("data"),
    "relax.grad.instance_norm_statistics": _group_norm("data"),
    "relax.grad.instance_norm_backward_data": _group_norm(*_STATISTICS_GRADIENT, alone=_NOT_OWN),
    "relax.grad.instance_norm_backward_gamma": _group_norm(*_OF_FACTORS, alone=_OF_INSTANCES),
}
for _rank in RANKS:
    for _name, _operands in {
        f"relax.nn.conv{_rank}d": ("data", "weight"),
        f"relax.nn.conv{_rank}d_transpose": ("data", "weight"),
        f"relax.grad.conv{_rank}d_backward_data": ("output_grad", "weight"),
        f"relax.grad.conv{_rank}d_backward_weight": ("output_grad", "data"),
    }.items():
        PRIMITIVES[_name] = Primitive(_operands, _conv_numbers, _conv_refusal)
