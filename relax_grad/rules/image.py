"""Gradients of image operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..op.grid_sample import grid_sample_attrs
from ..op.image import resize_attrs
from ..registry import register_gradient
from ._util import dtype_of, no_grad, shape_arg


@register_gradient("relax.image.resize2d")
def resize2d(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of resize2d.

    Forward form: ``y = resize2d(x, size)``, which is linear except for the extrapolation value.

    Backward form: ``[resize2d_backward_data(y_grad, x.shape, size), no_grad]``.
    """
    return _resize(backward.resize2d_backward_data, orig_call, output_grad)


@register_gradient("relax.image.resize3d")
def resize3d(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of resize3d.

    Forward form: ``y = resize3d(x, size)``, which is linear except for the extrapolation value.

    Backward form: ``[resize3d_backward_data(y_grad, x.shape, size), no_grad]``.
    """
    return _resize(backward.resize3d_backward_data, orig_call, output_grad)


@register_gradient("relax.image.affine_grid")
def affine_grid(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of affine_grid.

    Forward form: ``grid = affine_grid(theta, size)``, which is linear in theta.

    Backward form: ``[affine_grid_backward_data(grid_grad), no_grad]``.
    """
    return [
        backward.affine_grid_backward_data(output_grad, orig_call.attrs.align_corners),
        no_grad(orig_call.args[1]),
    ]


@register_gradient("relax.image.grid_sample")
def grid_sample(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of grid_sample.

    Forward form: ``y = grid_sample(x, grid)``.

    Backward form: ``[grid_sample_backward_data(y_grad, x.shape, grid),
    grid_sample_backward_grid(y_grad, x, grid)]``; the method ``nearest`` has no gradient with
    respect to the grid.
    """
    data, grid = orig_call.args
    attrs = grid_sample_attrs(orig_call)
    return [
        backward.grid_sample_backward_data(output_grad, shape_arg(data), grid, **attrs),
        no_grad(grid)
        if attrs["method"] == "nearest"
        else backward.grid_sample_backward_grid(output_grad, data, grid, **attrs),
    ]


def _resize(
    builder: Callable[..., relax.Expr], call: relax.Call, output_grad: relax.Expr
) -> list[relax.Expr]:
    data, size = call.args
    attrs = resize_attrs(call)
    if len(attrs["layout"]) != data.ty.ndim or "c" in attrs["layout"]:
        raise GradientError(
            f"the layout must be a permutation of NCHW or NCDHW, but it is {attrs['layout']!r}; "
            "a layout with packed channels must be unpacked before the operator"
        )
    return [
        builder(output_grad, shape_arg(data), size, **attrs, out_dtype=dtype_of(data)),
        no_grad(size),
    ]
