"""Checkpoints compared with TVM's: equal values from equally many operators."""

from __future__ import annotations

import numpy as np
import pytest
from programs import bindings_in, build, is_sound, run, tensor
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.transform import Gradient

start, end = op.grad.start_checkpoint, op.grad.end_checkpoint
X = np.array([[0.1, -0.3, 0.5, 0.05], [0.25, -0.2, 0.03, 0.75]])


def nested(bb, x):
    outer = bb.emit(op.exp(bb.emit(start(x))))
    inner = bb.emit(op.tanh(bb.emit(op.sin(bb.emit(start(outer))))))
    y = bb.emit(end(op.sin(bb.emit(end(inner)))))
    return op.sum(bb.emit(op.multiply(y, y)))


def overlapping(bb, x):
    b = bb.emit(op.exp(bb.emit(start(x))))
    c = bb.emit(start(op.sin(b)))
    b = bb.emit(end(b))
    y = bb.emit(end(op.multiply(bb.emit(op.tanh(c)), b)))
    return op.sum(bb.emit(op.multiply(y, y)))


def in_a_row(bb, x):
    for _ in range(3):
        x = bb.emit(end(op.sin(bb.emit(op.exp(bb.emit(start(x)))))))
    return op.sum(x)


def without_an_end(bb, x):
    return op.sum(bb.emit(op.tanh(bb.emit(op.sin(bb.emit(op.exp(bb.emit(start(x)))))))))


def through_a_tuple(bb, x):
    y = bb.emit(op.exp(bb.emit(start(x))))
    parts = bb.emit(op.split(y, 2, axis=1))
    first, second = (bb.emit(relax.TupleGetItem(parts, i)) for i in range(2))
    first, second = bb.emit(end(op.sin(first))), bb.emit(end(op.tanh(second)))
    return op.sum(bb.emit(op.multiply(first, second)))


def to_the_target(bb, x):
    return end(op.sum(bb.emit(op.exp(bb.emit(op.sin(bb.emit(start(x))))))))


@pytest.mark.parametrize(
    "body", [nested, overlapping, in_a_row, without_an_end, through_a_tuple, to_the_target]
)
def test_values_and_counts_beside_tvm(body):
    module = build([tensor("x", (2, 4))], body)
    ours, stock = (
        transform("main")(module)["main_adjoint"]
        for transform in (Gradient, relax.transform.Gradient)
    )
    for name in ("exp", "sin", "cos", "tanh"):
        assert ours.script().count(f"R.{name}(") == stock.script().count(f"R.{name}(")
    both = relax.BlockBuilder().get()
    both["ours"] = ours.with_attr("global_symbol", "ours")
    both["stock"] = stock.with_attr("global_symbol", "stock")
    (grad,), (wanted,) = (run(both, name, X)[1] for name in ("ours", "stock"))
    np.testing.assert_allclose(grad, wanted, rtol=1e-12)


def test_checkpoints_are_computed_again():
    from relax_grad.op import checkpoint

    def plain(bb, x):
        y = bb.emit(op.exp(x))
        return op.sum(bb.emit(op.multiply(y, bb.emit(op.tanh(y)))))

    def marked(bb, x):
        def stretch(x):
            y = bb.emit(op.exp(x))
            return bb.emit(op.multiply(y, bb.emit(op.tanh(y))))

        return op.sum(bb.emit(checkpoint(stretch, x)))

    x = tensor("x", (2, 4))
    module = build([x], marked)
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    assert adjoint["main_adjoint"].script().count("R.exp") == 2
    stock = relax.transform.Gradient("main")(module)
    assert bindings_in(adjoint["main_adjoint"]) <= bindings_in(stock["main_adjoint"])
    results, wanted = (
        run(mod, "main_adjoint", X) for mod in (adjoint, Gradient("main")(build([x], plain)))
    )
    np.testing.assert_allclose(results[1][0], wanted[1][0], rtol=1e-14)


def test_a_cast_is_computed_again_as_a_cast():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=2))

    def body(bb, x):
        x = bb.match_cast(bb.emit(start(x)), relax.TensorType((n, 4), "float64"))
        y = bb.match_cast(bb.emit(op.exp(x)), relax.TensorType((n, 4), "float64"))
        y = bb.emit(end(op.multiply(y, op.reshape(y, (n, 4)))))
        return op.sum(bb.emit(op.sin(y)))

    adjoint = Gradient("main")(build([x], body))["main_adjoint"]
    assert relax.analysis.check_well_formed(adjoint)
    module = relax.BlockBuilder().get()
    module["main_adjoint"] = adjoint
    _, (grad,) = run(module, "main_adjoint", X)
    np.testing.assert_allclose(grad, 2 * np.exp(2 * X) * np.cos(np.exp(2 * X)))
