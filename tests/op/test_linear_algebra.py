"""The subscripts of einsum, and the errors of its backward operator."""

from __future__ import annotations

import pytest
from tvm import relax
from tvm.relax.op import grad as backward

from relax_grad.op.linear_algebra import einsum_labels


@pytest.mark.parametrize(
    ("subscripts", "ndims", "labels", "output"),
    [
        ("ij,jk->ik", [2, 2], ["ij", "jk"], "ik"),
        (" bA, Aa ", [2, 2], ["bA", "Aa"], "ab"),
        ("ba", [2], ["ba"], "ab"),
        ("Ab", [2], ["Ab"], "Ab"),
        ("ii", [2], ["ii"], ""),
        (",i->i", [0, 1], ["", "i"], "i"),
        ("", [0], [""], ""),
        ("...a,a...->a...", [3, 2], ["bca", "ac"], "abc"),
        ("...a,a...", [3, 2], ["bca", "ac"], "bc"),
        ("...->...", [0], [""], ""),
        ("a...->a", [2], ["ab"], "a"),
        ("ab->...ab", [2], ["ab"], "ab"),
    ],
)
def test_einsum_labels(subscripts, ndims, labels, output):
    assert einsum_labels(subscripts, ndims) == (labels, output)


@pytest.mark.parametrize(
    ("subscripts", "ndims", "message"),
    [
        ("i,j", [1], "takes 2 operands, but there are 1"),
        ("ij->i", [1], r"does not match operands of \[1\] dimensions"),
        ("ij...->i", [1], r"does not match operands of \[1\] dimensions"),
        ("ij->iij", [2], "only once in the result"),
        ("ij->ik", [2], "must occur in the operands"),
    ],
)
def test_einsum_labels_refuses(subscripts, ndims, message):
    with pytest.raises(ValueError, match=message):
        einsum_labels(subscripts, ndims)


def test_einsum_backward_operand_refuses_mismatched_arguments():
    bb = relax.BlockBuilder()
    grad = relax.Var("g", relax.TensorType((2,), "float32"))
    for shape, subscripts, message in (
        ((3, 3), "ii->i", r"output_grad must have the shape \(3\)"),
        ((2, 3), "ij->", "output_grad must have 0 dimensions"),
        ((2, 3), "ij->ik", "must occur in the operands"),
        ((2, 3), "i->i", "does not match"),
    ):
        with pytest.raises(ValueError, match=rf"einsum_backward_operand: .*{message}"):
            bb.normalize(backward.einsum_backward_operand(grad, shape, subscripts))
    with pytest.raises(TypeError, match="operand_shape must be a shape"):
        bb.normalize(backward.einsum_backward_operand(grad, grad, "i->i"))


def test_einsum_backward_operand_of_an_unknown_shape():
    grad = relax.Var("g", relax.TensorType((2,), "float32"))
    shape = relax.Var("s", relax.ShapeType(ndim=2))
    call = relax.BlockBuilder().normalize(backward.einsum_backward_operand(grad, shape, "ij->i"))
    assert call.ty.ndim == 2
    assert call.ty.shape is None
