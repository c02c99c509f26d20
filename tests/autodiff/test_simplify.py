"""The broadcasts and masks that remain after differentiation."""

from __future__ import annotations

import numpy as np
from programs import build, check, is_sound, tensor
from tvm import relax
from tvm.relax import op

from relax_grad.transform import Gradient

RNG = np.random.default_rng(0)


def text_of(module):
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    return adjoint["main_adjoint"].script()


def test_products_make_their_broadcasts_themselves():
    def body(bb, x, w):
        transposed = bb.emit(op.permute_dims(w, [1, 0]))
        stack = bb.emit(op.broadcast_to(transposed, (3, 4, 5)))
        return op.sum(bb.emit(op.tanh(bb.emit(op.matmul(x, stack)))))

    module = build([tensor("x", (3, 2, 4)), tensor("w", (5, 4))], body)
    text = text_of(module)
    assert "R.shape([3, 4, 5])" not in text
    check(module, RNG.normal(size=(3, 2, 4)), RNG.normal(size=(5, 4)), at=(0, 1))


def test_masked_softmax_keeps_one_of_two():
    def body(bb, x):
        weights = bb.emit(op.nn.softmax(x, -1))
        mask = bb.emit(
            op.greater(bb.emit(op.max(x, [-1], keepdims=True)), relax.const(1.0, "float64"))
        )
        masked = bb.emit(op.where(mask, relax.const(0.0, "float64"), weights))
        return op.sum(bb.emit(op.multiply(masked, masked)))

    module = build([tensor("x", (4, 3))], body)
    (line,) = [text for text in text_of(module).splitlines() if "softmax_backward" in text]
    (kept,) = [text for text in text_of(module).splitlines() if "R.where(" in text][:1]
    assert kept.split(":")[0].strip() in line
    check(module, RNG.normal(size=(4, 3)))
