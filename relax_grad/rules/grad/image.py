"""Gradients of the backward operators of image operators."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax
from tvm.relax.op import grad as backward

from ...ir.module import tuple_fields
from ...op.grid_sample import grid_sample_attrs
from ...op.image import resize_attrs
from ...registry import register_gradient
from .._linear import register_linear
from .._util import dtype_of, no_grad, shape_arg


def _register_resize(forward: Callable[..., relax.Expr]) -> None:
    """Register the gradient of the backward operator of a resize operator, given by its builder."""
    name = forward.__name__

    def transpose(grad: relax.Expr, call: relax.Call) -> relax.Expr:
        dy, _, size = call.args
        attrs = {**resize_attrs(call), "extrapolation_value": 0.0}
        return forward(grad, size, **attrs, out_dtype=dtype_of(dy))

    register_linear(
        f"{name}_backward_data",
        f"dx = {name}_backward_data(dy, x.shape, size)",
        f"{name}(dx_grad, size)",
        transpose,
        note="The extrapolation value is 0.",
    )


_register_resize(relax.op.image.resize2d)
_register_resize(relax.op.image.resize3d)
register_linear(
    "affine_grid_backward_data",
    "dtheta = affine_grid_backward_data(dgrid)",
    "affine_grid(dtheta_grad, size)",
    lambda grad, call: relax.op.image.affine_grid(
        grad, list(call.args[0].ty.shape.values[2:]), call.attrs.align_corners
    ),
)


@register_gradient("relax.grad.grid_sample_jvp")
def grid_sample_jvp(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of grid_sample_jvp.

    Forward form: ``y' = grid_sample_jvp(x, grid, ks)`` with directions ``ks`` of the grid.

    Backward form: ``[grid_sample_backward_data(y'_grad, x.shape, grid, ks),
    grid_sample_backward_grid(y'_grad, x, grid, ks), [grid_sample_backward_grid(y'_grad, x, grid, ks
    without k) for k in ks]]``.
    """
    data, grid, *_ = orig_call.args
    directions, attrs = _directions(orig_call, 2), grid_sample_attrs(orig_call)
    partials = [
        backward.grid_sample_backward_data(output_grad, shape_arg(data), grid, directions, **attrs),
        backward.grid_sample_backward_grid(output_grad, data, grid, directions, **attrs),
    ]
    return partials + _of_directions(
        directions,
        lambda others: backward.grid_sample_backward_grid(output_grad, data, grid, others, **attrs),
    )


@register_gradient("relax.grad.grid_sample_backward_data")
def grid_sample_backward_data(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of grid_sample_backward_data.

    Forward form: ``dx = grid_sample_backward_data(dy, x.shape, grid, ks)``, which is linear in
    ``dy``: ``<dx, h> = <dy, grid_sample_jvp(h, grid, ks)>``.

    Backward form: with ``h = dx_grad``, ``[grid_sample_jvp(h, grid, ks), no_grad,
    grid_sample_backward_grid(dy, h, grid, ks), [grid_sample_backward_grid(dy, h, grid, ks without
    k) for k in ks]]``. Without directions, the first is grid_sample.
    """
    dy, data_shape, grid, *_ = orig_call.args
    directions, attrs = _directions(orig_call, 3), grid_sample_attrs(orig_call)

    def of_grid(directions: list[relax.Expr]) -> relax.Expr:
        return backward.grid_sample_backward_grid(dy, output_grad, grid, directions, **attrs)

    partials = [
        backward.grid_sample_jvp(output_grad, grid, directions, **attrs)
        if directions
        else relax.op.image.grid_sample(output_grad, grid, **attrs),
        no_grad(data_shape),
        no_grad(grid) if attrs["method"] == "nearest" else of_grid(directions),
    ]
    return partials + _of_directions(directions, of_grid)


@register_gradient("relax.grad.grid_sample_backward_grid")
def grid_sample_backward_grid(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of grid_sample_backward_grid.

    Forward form: ``dgrid = grid_sample_backward_grid(dy, x, grid, ks)``, with ``<dgrid, k> = <dy,
    grid_sample_jvp(x, grid, ks + [k])>``.

    Backward form: with ``k = dgrid_grad``, ``[grid_sample_jvp(x, grid, ks + [k]),
    grid_sample_backward_data(dy, x.shape, grid, ks + [k]), grid_sample_backward_grid(dy, x, grid,
    ks + [k]), [grid_sample_backward_grid(dy, x, grid, ks + [k] without k') for k' in ks]]``.
    """
    dy, data, grid, *_ = orig_call.args
    directions, attrs = _directions(orig_call, 3), grid_sample_attrs(orig_call)
    more = [*directions, output_grad]
    partials = [
        backward.grid_sample_jvp(data, grid, more, **attrs),
        backward.grid_sample_backward_data(dy, shape_arg(data), grid, more, **attrs),
        backward.grid_sample_backward_grid(dy, data, grid, more, **attrs),
    ]
    return partials + _of_directions(
        directions,
        lambda others: backward.grid_sample_backward_grid(
            dy, data, grid, [*others, output_grad], **attrs
        ),
    )


def _directions(call: relax.Call, index: int) -> list[relax.Expr]:
    """Return the directions of a call: the fields of the tuple at argument ``index``, if it is
    present."""
    return tuple_fields(call.args[index]) if len(call.args) > index else []


def _of_directions(
    directions: list[relax.Expr], partial_without: Callable[[list[relax.Expr]], relax.Expr]
) -> list[relax.Expr]:
    """Return the partial of the argument that holds the directions, if there is one.

    The derivative is linear in each direction. The partial of a direction takes the other
    directions.
    """
    if not directions:
        return []
    return [
        relax.Tuple(
            [partial_without(directions[:i] + directions[i + 1 :]) for i in range(len(directions))]
        )
    ]
