"""Gradients of the operators that return their argument, or a copy on another device."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ..errors import GradientError
from ..registry import register_gradient


@register_gradient("relax.builtin.stop_lift_params")
def stop_lift_params(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of stop_lift_params.

    Forward form: ``y = stop_lift_params(x)``, which is ``x``.

    Backward form: ``[y_grad]``.
    """
    return [output_grad]


@register_gradient("relax.to_vdevice")
def to_vdevice(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of to_vdevice.

    Forward form: ``y = to_vdevice(x, dst_vdevice)``, a copy of ``x``.

    Backward form: ``[to_vdevice(y_grad, vdevice of x)]``.

    Raises
    ------
    GradientError
        If the type of ``x`` names no device.
    """
    (x,) = orig_call.args
    if x.ty.vdevice is None:
        raise GradientError(
            f"the gradient must be copied to the device of {x}, but its type {x.ty} names no "
            "device; give the parameters of the function a vdevice, or run "
            "relax.transform.RealizeVDevice first"
        )
    return [relax.op.to_vdevice(output_grad, x.ty.vdevice)]


@register_gradient("relax.hint_on_device")
def hint_on_device(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of hint_on_device.

    Forward form: ``y = hint_on_device(x, dst_vdevice)``, which is ``x``, copied to another device
    if necessary.

    Backward form: ``[to_vdevice(y_grad, vdevice of x)]``, or ``[y_grad]`` if ``x`` is on the device
    already. If the type of ``x`` names no device, the hint places it on the given one.
    """
    (x,) = orig_call.args
    source = x.ty.vdevice
    if source is None or _is_hinted(source, orig_call.attrs):
        return [output_grad]
    return [relax.op.to_vdevice(output_grad, source)]


def _is_hinted(vdevice: Any, hint: relax.op.op_attrs.Attrs) -> bool:
    """Tell whether a virtual device is the one that ``hint_on_device`` names."""
    device = (
        vdevice.target.get_target_device_type(),
        int(vdevice.vdevice_id),
        str(vdevice.memory_scope),
    )
    return device == (int(hint.device_type), int(hint.index), str(hint.memory_scope))
