"""Gradients of linear algebra."""

from __future__ import annotations

import math
import string

from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as backward

from ..errors import GradientError
from ..ir.compat import Analyzer
from ..ir.module import tuple_fields
from ..op.linear_algebra import einsum_labels
from ..registry import register_gradient
from ._util import (
    broadcast_shape,
    cast_like,
    dtype_of,
    is_const,
    is_float,
    is_one,
    is_static,
    no_grad,
    shape_arg,
    shape_of,
)


@register_gradient(
    "relax.matmul",
    corrects=(
        "refuses out_dtype, accumulates half precision in half precision, stores all products of "
        "a batch before it sums them, and fails at order 2 for a symbolic batch"
    ),
)
def matmul(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of matmul.

    Forward form: ``c = matmul(a, b, out_dtype)``.

    Backward form: ``[matmul(c_grad, b^T), matmul(a^T, c_grad)]``, summed over the batch axes along
    which the argument was broadcast. If a whole batch meets one matrix, this is a single matrix
    product. Otherwise it is an einsum, so that the products of the batch are not stored. A vector's
    missing axis is left out. Half precision is accumulated in float32.
    """
    a, b = orig_call.args
    if not is_float(orig_var):
        return [no_grad(a), no_grad(b)]
    partials = (_matmul_first, _matmul_second)
    return [
        partial(ctx, output_grad, a, b) if is_float(argument) else no_grad(argument)
        for partial, argument in zip(partials, (a, b), strict=True)
    ]


def _matmul_first(
    ctx: relax.BlockBuilder, grad: relax.Expr, a: relax.Expr, b: relax.Expr
) -> relax.Expr:
    if b.ty.ndim == 1 and a.ty.ndim == 1:
        return _times(ctx, grad, b, a)
    if b.ty.ndim == 1:
        return _times(ctx, op.expand_dims(grad, -1), b, a)
    if a.ty.ndim == 1 and b.ty.ndim == 2:
        return _product(ctx, b, grad, a)
    if a.ty.ndim > 1 and not _is_broadcast(a, grad):
        return _product(ctx, grad, _transpose(b), a)
    return _summed_product(ctx, grad, a, b, 0)


def _matmul_second(
    ctx: relax.BlockBuilder, grad: relax.Expr, a: relax.Expr, b: relax.Expr
) -> relax.Expr:
    if b.ty.ndim == 1 and a.ty.ndim == 1:
        return _times(ctx, grad, a, b)
    if a.ty.ndim == 1:
        return _times(ctx, op.expand_dims(a, 1), op.expand_dims(grad, -2), b)
    if b.ty.ndim == 1 and a.ty.ndim == 2:
        return _product(ctx, grad, a, b)
    if b.ty.ndim > 1 and not _is_broadcast(b, grad):
        return _product(ctx, _transpose(a), grad, b)
    if b.ty.ndim == 2 and is_static(a) and is_static(grad) and not _is_broadcast(a, grad):
        # One matrix for the whole batch, as in a linear layer.
        *batch, k = map(int, shape_of(a))
        rows = math.prod(batch)
        columns = int(shape_of(grad)[-1])
        if rows > 0 and k > 0 and columns > 0:
            a = op.permute_dims(op.reshape(a, (rows, k)))
            return _product(ctx, a, op.reshape(grad, (rows, columns)), b)
    return _summed_product(ctx, grad, a, b, 1)


def _is_broadcast(x: relax.Expr, grad: relax.Expr) -> bool:
    """Tell whether matmul has broadcast an argument of two or more axes to the batch of its
    result."""
    full, batch = broadcast_shape(grad, x)[:-2], shape_of(x)[:-2]
    return len(batch) != len(full) or any(
        is_one(extent) and not is_one(whole) for extent, whole in zip(batch, full, strict=True)
    )


def _summed_product(
    ctx: relax.BlockBuilder, grad: relax.Expr, a: relax.Expr, b: relax.Expr, position: int
) -> relax.Expr:
    """Return matmul's partial as an einsum that also sums over the argument's batch axes of extent
    1."""
    like, factor = (a, b) if position == 0 else (b, a)
    if _is_empty(grad) or _is_empty(like):  # einsum infers the extent 1 for 0 and 1
        return op.zeros_like(like)
    batch = string.ascii_uppercase[: max(a.ty.ndim, b.ty.ndim, 2) - 2]
    labels = []
    for x, matrix, vector in ((a, "ik", "k"), (b, "kj", "k")):
        axes = x.ty.ndim - 2
        labels.append(vector if x.ty.ndim == 1 else batch[len(batch) - axes :] + matrix)
    rows, columns = "i" * (a.ty.ndim > 1), "j" * (b.ty.ndim > 1)
    extents = dict(zip(batch + rows + columns, shape_of(grad), strict=True))
    own, other = labels[position], labels[1 - position]
    lost = [
        axis
        for axis, (letter, extent) in enumerate(zip(own, shape_of(like), strict=True))
        if letter in batch and is_one(extent) and not is_one(extents[letter])
    ]
    target = "".join(letter for axis, letter in enumerate(own) if axis not in lost)
    grad, factor = _of_one_dtype(grad, factor)
    total = op.einsum((grad, factor), f"{batch}{rows}{columns},{other}->{target}")
    if lost:
        total = op.expand_dims(total, lost)
    return cast_like(ctx, total, like)


@register_gradient("relax.outer")
def outer(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of outer.

    Forward form: ``y[i, j] = x1[i] * x2[j]``.

    Backward form: ``[matmul(y_grad, x2), matmul(x1, y_grad)]``.
    """
    x1, x2 = orig_call.args
    if not is_float(orig_var):
        return [no_grad(x1), no_grad(x2)]
    return [_product(ctx, output_grad, x2, x1), _product(ctx, x1, output_grad, x2)]


@register_gradient("relax.einsum")
def einsum(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Var, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of einsum.

    Forward form: ``y = einsum((x1, x2, ...), subscripts)``.

    Backward form: for each operand the einsum of ``y_grad`` and the other operands with the
    operand's subscripts as output. ``einsum_backward_operand`` scatters it to the diagonal of
    repeated subscripts, and broadcasts it along subscripts that only the operand has.
    """
    (operands,) = orig_call.args
    if not is_float(orig_var):
        return [no_grad(operands)]
    fields = tuple_fields(operands)
    labels, output = einsum_labels(
        str(orig_call.attrs.subscripts), [len(shape_of(field)) for field in fields]
    )
    terms = list(zip(fields, labels, strict=True))
    _check_extents(terms)
    return [
        relax.Tuple(
            [
                _einsum_operand(operand, own, [(output_grad, output), *terms[:i], *terms[i + 1 :]])
                for i, (operand, own) in enumerate(terms)
            ]
        )
    ]


def _einsum_operand(
    operand: relax.Expr, own: str, others: list[tuple[relax.Expr, str]]
) -> relax.Expr:
    """Return the partial of one operand of einsum, given the gradient and the other operands."""
    spread = {
        letter
        for other, letters in others
        for letter, extent in zip(letters, shape_of(other), strict=True)
        if not is_one(extent)
    }
    present = set("".join(letters for _, letters in others))
    # Subscripts that only this operand has, or has with a different extent, are summed, then
    # broadcast.
    target = "".join(
        letter
        for letter, extent in dict(zip(own, shape_of(operand), strict=True)).items()
        if letter in present and is_one(extent) == (letter not in spread)
    )
    if [letters for _, letters in others] == [target]:
        contracted = others[0][0]
    else:
        subscripts = ",".join(letters for _, letters in others)
        contracted = op.einsum(tuple(other for other, _ in others), f"{subscripts}->{target}")
    if target == own:
        return contracted
    return backward.einsum_backward_operand(contracted, shape_arg(operand), f"{own}->{target}")


def _check_extents(terms: list[tuple[relax.Expr, str]]) -> None:
    """Check that the extents of each subscript are 1 or known to be equal."""
    analyzer = Analyzer()
    extents: dict[str, tirx.PrimExpr] = {}
    for operand, letters in terms:
        for letter, extent in zip(letters, shape_of(operand), strict=True):
            if is_one(extent):
                continue
            if not analyzer.can_prove_equal(extents.setdefault(letter, extent), extent):
                raise GradientError(
                    f"the extents {extents[letter]} and {extent} of one subscript must be known "
                    "to be equal; give them the same symbolic variable with relax.match_cast"
                )


def _product(
    ctx: relax.BlockBuilder, x1: relax.Expr, x2: relax.Expr, like: relax.Expr
) -> relax.Expr:
    """Return a matmul that accumulates in float32 at least, in the dtype of ``like``."""
    x1, x2 = ctx.normalize(x1), ctx.normalize(x2)
    dtypes = {dtype_of(x1), dtype_of(x2)}
    wide = "float64" if "float64" in dtypes else "float32"
    product = op.matmul(x1, x2, out_dtype=None if dtypes == {wide} else wide)
    return cast_like(ctx, product, like)


def _times(ctx: relax.BlockBuilder, x1: relax.Expr, x2: relax.Expr, like: relax.Expr) -> relax.Expr:
    """Return an element-wise product in the dtype of ``like``."""
    x1, x2 = _of_one_dtype(ctx.normalize(x1), ctx.normalize(x2))
    return cast_like(ctx, op.multiply(x1, x2), like)


def _of_one_dtype(x1: relax.Expr, x2: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """Cast two tensors of different dtypes to one that is wide enough for both."""
    dtypes = {dtype_of(x1), dtype_of(x2)}
    if len(dtypes) == 1:
        return x1, x2
    wide = "float64" if "float64" in dtypes else "float32"
    x1, x2 = (x if dtype_of(x) == wide else op.astype(x, wide) for x in (x1, x2))
    return x1, x2


def _transpose(x: relax.Expr) -> relax.Expr:
    """Swap the last two axes."""
    *batch, row, column = range(x.ty.ndim)
    return op.permute_dims(x, [*batch, column, row])


def _is_empty(x: relax.Expr) -> bool:
    """Tell whether a tensor is known to have no elements."""
    return any(is_const(extent) and int(extent) == 0 for extent in shape_of(x))
