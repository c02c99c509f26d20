"""Layout inference for operators of TVM that lack it and are frequent in the gradients of networks.

Without it, ``relax.transform.ConvertLayout`` restores the order of the axes around each of these
operators: the ``where`` of every ``relu``, and the sum of every bias. Wrong layout inferences of
TVM are corrected here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.ir import Op

from ..ir.compat import infer_layout_output, layout_decision
from ..registry import register_infer_layout
from ._layout import (
    Converted,
    first,
    follow_axis,
    follow_elementwise,
    layout_rule,
    moved_shape,
    trailing,
)
from .pad import moved_widths

follow_elementwise(
    "relax.clip",
    "relax.collapse_sum_like",
    "relax.full_like",
    "relax.nn.leakyrelu",
    "relax.nn.softplus",
    "relax.ones_like",
    "relax.where",
    "relax.zeros_like",
)
follow_axis("relax.nn.log_softmax")


@layout_rule("relax.nn.pad")
def pad(call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]) -> Converted:
    """Pad the axes in the order of the layout."""
    layout = layouts[0]
    return Converted([layout], layout, moved_widths(call, layout))


@layout_rule("relax.collapse_sum_to")
def collapse_sum_to(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    """Sum over the axes in the order of the layout; the removed axes must be the first."""
    layout = layouts[0]
    output = trailing(layout, call.ty.ndim)
    shape = None if output is None else moved_shape(call, 1, output)
    return None if shape is None else Converted([layout, None], output, args=shape)


@layout_rule("relax.broadcast_to")
def broadcast_to(
    call: relax.Call, layouts: list, desired: Mapping[str, Sequence[str]]
) -> Converted | None:
    """Broadcast along the axes in the order of the layout; new axes come first."""
    layout, ndim = layouts[0], call.ty.ndim
    outer = ndim - len(layout)
    output = first(outer) + "".join(chr(ord(axis) + outer) for axis in layout)
    shape = moved_shape(call, 1, output)
    return None if shape is None else Converted([layout, None], output, args=shape)


def _correct_scalar(op_name: str) -> None:
    """Correct TVM's layout inference for a result without axes."""
    stock = Op.get(op_name).get_attr("FRelaxInferLayout")

    @register_infer_layout(
        op_name,
        corrects=(
            "infers the wrong layout for a scalar result, so that a permute_dims follows, on "
            "which the Gradient pass fails"
        ),
    )
    def infer(call: relax.Call, desired_layouts: Mapping, var_layout_map: Mapping) -> Any:
        output = stock(call, desired_layouts, var_layout_map)
        if call.ty.ndim != 0:
            return output
        return infer_layout_output(
            output.input_layouts, [layout_decision("")], output.new_attrs, {}
        )


for _name in ("max", "mean", "min", "prod", "squeeze", "std", "sum", "variance"):
    _correct_scalar(f"relax.{_name}")
