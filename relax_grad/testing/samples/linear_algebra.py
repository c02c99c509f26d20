"""Samples of linear algebra."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.op import grad as backward

from ._sample import DTYPES, Sample, register_samples


@register_samples("relax.matmul")
def matmul(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape1, shape2, symbolic in (
        ("matrices", (2, 3), (3, 4), {0: {0: "n", 1: "k"}, 1: {0: "k", 1: "m"}}),
        ("vectors", (3,), (3,), {0: {0: "n"}, 1: {0: "n"}}),
        ("a vector and a matrix", (3,), (3, 2), {0: {0: "k"}, 1: {0: "k", 1: "m"}}),
        ("a matrix and a vector", (2, 3), (3,), {0: {0: "n", 1: "k"}, 1: {0: "k"}}),
        ("a vector and a batch", (3,), (2, 3, 2), {1: {0: "b"}}),
        ("a batch and a vector", (2, 2, 3), (3,), {0: {0: "b"}}),
        ("batches", (2, 3, 2), (2, 2, 3), {0: {0: "b", 1: "n"}, 1: {0: "b"}}),
        ("a batch and a matrix", (2, 3, 2), (2, 4), {0: {0: "b", 1: "n"}}),
        ("a matrix and a batch", (3, 2), (2, 2, 4), {1: {0: "b", 2: "n"}}),
        ("batches broadcast", (2, 1, 2, 3), (1, 2, 3, 2), {0: {0: "b"}, 1: {1: "c"}}),
        ("extents of 1", (1, 1, 3), (3, 1), {0: {1: "n"}}),
        ("empty batch", (0, 2, 3), (3, 2), None),
        ("nothing to sum", (2, 0), (0, 3), None),
    ):
        yield Sample(
            [rng.normal(size=shape1), rng.normal(size=shape2)],
            symbolic=symbolic,
            torch=lambda torch, x1, x2: x1 @ x2,
            dtypes=DTYPES if note in ("matrices", "batches") else ("float16",),
            note=note,
        )

    def wide(x1: relax.Expr, x2: relax.Expr) -> relax.Expr:
        return relax.op.matmul(x1, x2, out_dtype="float64")

    for shape1, shape2 in (((2, 3), (3, 2)), ((2, 2, 3), (3, 2)), ((3,), (2, 3, 2))):
        yield Sample(
            [rng.normal(size=shape1), rng.normal(size=shape2)],
            function=wide,
            dtypes=("float32",),  # the result does not depend on rounding to half precision
            note="out_dtype",
        )


@register_samples("relax.outer")
def outer(rng: np.random.Generator) -> Iterator[Sample]:
    for note, n, m in (("plain", 3, 2), ("extents of 1", 1, 1), ("empty", 0, 2)):
        yield Sample(
            [rng.normal(size=(n,)), rng.normal(size=(m,))],
            symbolic={0: {0: "n"}, 1: {0: "m"}} if note == "plain" else None,
            torch=lambda torch, x1, x2: torch.outer(x1, x2),
            note=note,
        )


@register_samples("relax.einsum")
def einsum(rng: np.random.Generator) -> Iterator[Sample]:
    for subscripts, shapes, symbolic in (
        ("ij,jk->ik", ((2, 3), (3, 2)), {0: {0: "n", 1: "k"}, 1: {0: "k", 1: "m"}}),
        (" bA, Aa ", ((2, 3), (3, 2)), None),
        ("i,i->", ((3,), (3,)), {0: {0: "n"}, 1: {0: "n"}}),
        ("ij->", ((2, 3),), {0: {0: "n"}}),
        ("ij->ji", ((2, 3),), {0: {0: "n"}}),
        ("ii", ((3, 3),), {0: {0: "n", 1: "n"}}),
        ("iij,jk->ki", ((2, 2, 3), (3, 2)), {0: {0: "n", 1: "n"}, 1: {1: "m"}}),
        ("ij,kl->jl", ((2, 3), (2, 2)), {0: {0: "n"}}),
        ("ij,ij->ij", ((2, 3), (2, 1)), {0: {0: "n"}, 1: {0: "n"}}),
        ("ij,j->i", ((2, 3), (1,)), {0: {0: "n"}}),
        ("...ij,...jk->...ik", ((2, 1, 2, 3), (3, 3, 1)), {0: {0: "n"}}),
        ("...j,j...", ((2, 3), (3, 2)), None),
        ("i,j,k->kij", ((2,), (3,), (2,)), {0: {0: "n"}}),
        (",i->i", ((), (3,)), {1: {0: "n"}}),
        ("ij,jk->ik", ((2, 0), (0, 3)), None),
        ("ij,jk->ik", ((0, 3), (3, 2)), None),
    ):
        operands = [np.asarray(rng.normal(size=shape)) for shape in shapes]
        if symbolic is None:
            yield Sample(
                [tuple(operands)],
                {"subscripts": subscripts},
                torch=lambda torch, operands, subscripts=subscripts: torch.einsum(
                    subscripts, *operands
                ),
                dtypes=("float16",),
                note=subscripts,
            )
        else:
            yield Sample(
                operands,
                {"subscripts": subscripts},
                function=_of_parameters,
                symbolic=symbolic,
                torch=lambda torch, *operands, subscripts=subscripts: torch.einsum(
                    subscripts, *operands
                ),
                dtypes=DTYPES if subscripts == "ij,jk->ik" else ("float16",),
                note=subscripts,
            )


def _of_parameters(*operands: relax.Expr, subscripts: Any) -> relax.Expr:
    return relax.op.einsum(operands, subscripts)


@register_samples("relax.grad.einsum_backward_operand")
def einsum_backward_operand(rng: np.random.Generator) -> Iterator[Sample]:
    for note, shape, subscripts, grad_shape in (
        ("diagonal", (2, 2, 3), "iij->ji", (3, 2)),
        ("summed", (2, 3), "ij->", ()),
    ):

        def function(
            output_grad: relax.Expr, shape: Sequence[int] = shape, subscripts: Any = subscripts
        ) -> relax.Expr:
            return backward.einsum_backward_operand(output_grad, shape, subscripts)

        yield Sample([np.asarray(rng.normal(size=grad_shape))], function=function, note=note)
