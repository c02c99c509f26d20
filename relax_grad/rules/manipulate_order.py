"""Gradients of the operators that permute elements, or drop some of them."""

from __future__ import annotations

from tvm import relax
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..op.rank import named
from ..registry import GradientRule, register_gradient
from ._util import no_grad, shape_arg


@register_gradient("relax.flip")
def flip(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of flip.

    Forward form: ``y = flip(x, axis)``.

    Backward form: ``[flip(y_grad, axis)]``.
    """
    return [relax.op.flip(output_grad, int(orig_call.attrs.axis))]


@register_gradient("relax.reverse_sequence")
def reverse_sequence(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of reverse_sequence.

    Forward form: ``y = reverse_sequence(x, seq_lengths, seq_axis, batch_axis)``, which reverses the
    first ``seq_lengths[b]`` elements of each sequence ``b``.

    Backward form: ``[reverse_sequence(y_grad, seq_lengths, seq_axis, batch_axis), no_grad]``: the
    operator is its own inverse.
    """
    x, seq_lengths = orig_call.args
    ndim = x.ty.ndim
    seq_axis, batch_axis = int(orig_call.attrs.seq_axis), int(orig_call.attrs.batch_axis)
    if ndim < 0 or seq_axis % ndim == batch_axis % ndim:
        raise GradientError(
            "seq_axis and batch_axis must be two axes of a tensor of known rank, but they are "
            f"{seq_axis} and {batch_axis} of {x.ty}; with one axis for both, elements are lost "
            "and repeated"
        )
    return [
        relax.op.reverse_sequence(output_grad, seq_lengths, seq_axis, batch_axis),
        no_grad(seq_lengths),
    ]


@register_gradient("relax.layout_transform")
def layout_transform(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of layout_transform.

    Forward form: ``y[index_map(i)] = x[i]``, and ``pad_value`` elsewhere.

    Backward form: ``[layout_transform_backward_x(y_grad, x.shape, index_map)]``: ``x_grad[i] =
    y_grad[index_map(i)]``, which drops the gradient of the padding.
    """
    (x,) = orig_call.args
    return [
        backward.layout_transform_backward_x(output_grad, shape_arg(x), orig_call.attrs.index_map)
    ]


@register_gradient("relax.nn.pixel_shuffle")
def pixel_shuffle(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of pixel_shuffle.

    Forward form: ``y[.., c, h * r + i, w * r + j] = x[.., c * r * r + i * r + j, h, w]`` with
    ``r = upscale_factor``.

    Backward form: ``[pixel_shuffle_backward_data(y_grad, x.shape, upscale_factor)]``, the inverse.
    """
    (x,) = orig_call.args
    return [
        backward.pixel_shuffle_backward_data(
            output_grad, shape_arg(x), int(orig_call.attrs.upscale_factor)
        )
    ]


def _triangle(name: str) -> GradientRule:
    """Return the gradient rule of an operator that keeps one triangle."""
    builder = getattr(relax.op, name)

    def rule(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        """Gradient of {forward}.

        Forward form: ``y = {forward}(x, k)``, one triangle of each matrix.

        Backward form: ``[{forward}(y_grad, k), no_grad]``, the same triangle of the gradient.
        """
        _, k = orig_call.args
        return [builder(output_grad, k), no_grad(k)]

    return named(rule, name, forward=name)


register_gradient("relax.tril")(_triangle("tril"))
register_gradient(
    "relax.triu", corrects="refuses every call: it returns one partial for two arguments"
)(_triangle("triu"))
