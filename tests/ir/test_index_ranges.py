"""The ranges of integers that reach indices."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.ir.index_ranges import IndexRange, index_ranges

ROWS, CLASSES = 20, 12


def found_of(data, index_type, body):
    """Return the ranges of the index ``i`` of a function of ``x`` and ``i``."""
    x = relax.Var("x", data)
    i = relax.Var("i", index_type)
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, i]):
        with bb.dataflow():
            result = bb.emit_output(body(bb, x, i))
        bb.emit_func_output(result)
    return index_ranges(bb.get(), "loss", ["x", "i"])


def number(value, dtype="int64"):
    return relax.const(value, dtype)


N = tirx.Var("n", "int64")
TABLE = relax.TensorType((ROWS, 3), "float32")


@pytest.mark.parametrize(
    ("index", "body", "wanted"),
    [
        (((4,), "int32"), lambda bb, x, i: op.take(x, i, 0), [{"from_end": True}]),
        (((4,), "int64"), lambda bb, x, i: op.take(x, i, 1, "nan"), [{"extent": 3}]),
        (((4,), "int64"), lambda bb, x, i: op.take(x, i, 0, "clip"), []),
        # Targets that count from 1: the function subtracts 1.
        (
            ((4,), "int64"),
            lambda bb, x, i: op.take(x, bb.emit(op.subtract(i, number(1))), 0, "nan"),
            [{"shift": -1}],
        ),
        # A mask, another computation, and bounded values are no indices themselves.
        (((4,), "int64"), lambda bb, x, i: op.take(x, bb.emit(op.multiply(i, i)), 0), []),
        (((4,), "int64"), lambda bb, x, i: op.take(x, bb.emit(op.clip(i, 0, 9)), 0), []),
        (
            ((4,), "int64"),
            lambda bb, x, i: op.take(
                x, bb.emit(op.where(bb.emit(op.less(i, number(7))), i, number(0))), 0
            ),
            [],
        ),
        # Every second element behind the first, of a parameter that a padding follows.
        (
            ((2, N), "int64"),
            lambda bb, x, i: op.take(
                x,
                bb.emit(
                    op.reshape(
                        bb.emit(
                            op.strided_slice(
                                bb.emit(op.nn.pad(i, [0, 0, 0, 1], "constant", -1)),
                                [1],
                                [1],
                                [N + 1],
                            )
                        ),
                        (2 * N,),
                    )
                ),
                0,
                "nan",
            ),
            [{"slices": ((0, 0, 1), (1, 0, 1))}],
        ),
        (
            ((9,), "int64"),
            lambda bb, x, i: op.take(x, bb.emit(op.strided_slice(i, [0], [1], [8], [3])), 0, "nan"),
            [{"slices": ((1, 1, 3),)}],
        ),
        (
            ((2, 1), "int64"),
            lambda bb, x, i: op.gather_elements(x, bb.emit(op.astype(i, "int64")), 0),
            [{"from_end": True}],
        ),
    ],
)
def test_ways_of_an_index(index, body, wanted):
    ranges = found_of(TABLE, relax.TensorType(*index), body)
    assert ranges == tuple(
        IndexRange(**{"input": "i", "extent": ROWS, **fields}) for fields in wanted
    )


def test_symbolic_extents_and_calls():
    """The extent of a table may be symbolic, and the index may be used in another function."""
    table = relax.TensorType((N, 3), "float32")
    (index_range,) = found_of(
        table, relax.TensorType((4,), "int64"), lambda bb, x, i: op.take(x, i, 0)
    )
    assert index_range == IndexRange("i", "n", True)
    with pytest.raises(IndexError, match=r"^i\[2\] is -6, but it selects one of 5 elements, and "):
        index_range.check(np.array([0, -5, -6, 4]), {"n": 5})
    index_range.check(np.array([0, -5, 4]), {"n": 5})
    x, i = relax.Var("x", TABLE), relax.Var("i", relax.TensorType((4,), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("inner", [x, i], private=True):
        bb.emit_func_output(bb.emit(op.take(x, i, 0)))
    inner = bb.get().get_global_var("inner")
    y, j = relax.Var("y", TABLE), relax.Var("j", relax.TensorType((4,), "int64"))
    with bb.function("loss", [y, j]):
        bb.emit_func_output(bb.emit(op.sum(bb.emit(relax.Call(inner, [y, j])))))
    assert index_ranges(bb.get(), "loss", ["j"]) == (IndexRange("j", ROWS, True),)
    assert index_ranges(bb.get(), "loss", ["y"]) == ()


def test_targets_of_a_loss_of_relax():
    kind = relax.TensorType((4, CLASSES), "float32")
    (index_range,) = found_of(
        kind,
        relax.TensorType((4,), "int64"),
        lambda bb, x, i: op.nn.nll_loss(x, i, ignore_index=-1),
    )
    assert index_range == IndexRange("i", CLASSES, ignored=(-1,))
