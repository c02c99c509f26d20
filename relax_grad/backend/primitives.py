"""The calls that a library of operators computes one to one: their operands and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from ..ir.compat import dtype_of
from ..op.rank import RANKS
from .call import BackwardCall

__all__ = ["PRIMITIVES", "Primitive"]


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
    """

    operands: tuple[str, ...]
    numbers: Callable[[BackwardCall], tuple[int | float, ...]]
    refusal: Callable[[BackwardCall], str | None]

    def refuses(self, call: BackwardCall) -> str | None:
        """Return the reason why the function does not compute a call, or None if it does."""
        return _unknown(call, self.operands) or _mixed(call, self.operands) or self.refusal(call)


#: The dtypes of the functions.
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def _tensors(call: BackwardCall, operands: tuple[str, ...]) -> list[str]:
    return [name for name in operands if name in call.arguments]


def _results(call: BackwardCall) -> list[relax.Type]:
    kind = call.type
    return list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]


def _unknown(call: BackwardCall, operands: tuple[str, ...]) -> str | None:
    """Return the reason if a rank is not known, or an extent is 0."""
    shapes = [call.shape(name) for name in _tensors(call, operands)]
    shapes += [None if kind.shape is None else kind.shape.values for kind in _results(call)]
    for shape in shapes:
        if shape is None:
            return "the shape of a tensor is not known"
        if any(isinstance(e, (int, tirx.IntImm)) and int(e) == 0 for e in shape):
            return "a tensor has no elements"
    return None


def _mixed(call: BackwardCall, operands: tuple[str, ...]) -> str | None:
    """Return the reason if the dtypes differ, or are no floating-point dtypes."""
    dtypes = {call.dtype(name) for name in _tensors(call, operands)}
    dtypes |= {dtype_of(kind) for kind in _results(call)}
    if len(dtypes) > 1:
        return f"the dtypes of the tensors differ: {', '.join(sorted(dtypes))}"
    (dtype,) = dtypes
    return None if dtype in _DTYPES else f"tensors of {dtype}"


def _shape(call: BackwardCall, name: str) -> tuple[int | tirx.PrimExpr, ...]:
    """Return the extents of a tensor, which are known."""
    shape = call.shape(name)
    assert shape is not None
    return shape


def _are_equal(a: int | tirx.PrimExpr, b: int | tirx.PrimExpr) -> bool:
    """Tell whether two extents are the same number or the same expression."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


# Convolutions.


def _conv_numbers(call: BackwardCall) -> tuple[int, ...]:
    """Return strides, padding, dilation, the padding of the output, and the groups."""
    attrs: Mapping[str, Any] = call.attrs
    rank = len(attrs["strides"])
    output = attrs.get("output_padding") or (0,) * rank
    before = attrs["padding"][:rank]
    return (*attrs["strides"], *before, *attrs["dilation"], *output, attrs["groups"])


def _conv_refusal(call: BackwardCall) -> str | None:
    attrs: Mapping[str, Any] = call.attrs
    spatial = "DHW"[3 - len(attrs["strides"]) :]
    kernel = "IO" if "transpose" in call.op_name else "OI"
    layouts = attrs["data_layout"], attrs["kernel_layout"], attrs["out_layout"]
    plain = f"NC{spatial}", f"{kernel}{spatial}", f"NC{spatial}"
    if (*layouts[:2], layouts[2] or layouts[0]) != plain:
        return f"layouts other than {', '.join(plain)}: {', '.join(layouts)}"
    before, after = (
        attrs["padding"][: len(spatial)],
        attrs["padding"][len(spatial) :],
    )
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


def _attention_numbers(call: BackwardCall) -> tuple[int | float, ...]:
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


#: The functions by operator.
PRIMITIVES: dict[str, Primitive] = {
    "relax.matmul": Primitive(("x1", "x2"), lambda call: (), _product_refusal),
    "relax.nn.attention": Primitive(_ATTENTION[:3], _attention_numbers, _attention_refusal),
    "relax.nn.attention_bias": Primitive(_ATTENTION, _attention_numbers, _attention_refusal),
    "relax.grad.attention_backward": Primitive(
        ("output_grad", *_ATTENTION), _attention_numbers, _attention_refusal
    ),
}
for _rank in RANKS:
    for _name, _operands in {
        f"relax.nn.conv{_rank}d": ("data", "weight"),
        f"relax.nn.conv{_rank}d_transpose": ("data", "weight"),
        f"relax.grad.conv{_rank}d_backward_data": ("output_grad", "weight"),
        f"relax.grad.conv{_rank}d_backward_weight": ("output_grad", "data"),
    }.items():
        PRIMITIVES[_name] = Primitive(_operands, _conv_numbers, _conv_refusal)
