"""Conditions that contain selections are stored, so that TVM simplifies them once."""

from __future__ import annotations

from functools import partial

import numpy as np
from programs import build, run, tensor
from tvm import relax, tirx

from relax_grad.ir.compat import SBlock, structural_walk
from relax_grad.ir.conditions import with_named_conditions, with_stored_conditions
from relax_grad.ir.expressions import substitute

#: The tensors: of short extents, of ones that fill no vector, and one for two threads.
TENSORS = [((5, 4), "float32"), ((3, 67), "float64"), ((300, 400), "float32")]

#: A level repeats the tensor five times: without stores, two take minutes to compile.
LEVELS = 2


def _levels(op, x, number):
    """Return nested selections by the operators of Relax or NumPy."""
    zero, step = number(0), number(0.3)
    for _ in range(LEVELS):
        size = op.where(op.greater(x, zero), x, op.negative(x))
        low = op.where(op.less(x, op.negative(step)), op.add(x, step), x)
        inner = op.where(op.less(low, zero), op.subtract(x, step), op.add(x, step))
        x = op.where(op.greater(size, step), op.multiply(x, number(0.9)), inner)
    return x


def _nested(x):
    """Return a selection by a selection by a selection, of a load."""

    def chosen(condition):
        return tirx.Select(condition, x, x + tirx.const(1.0, "float32"))

    return chosen(chosen(chosen(x > 0) > 0) > 0)


def test_values():
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(dtype) for shape, dtype in TENSORS]
    inputs[0].flat[:4] = [np.nan, np.inf, -np.inf, 0]

    def body(bb, *tensors):
        found = [
            _levels(relax.op, x, partial(relax.const, dtype=dtype))
            for x, (_, dtype) in zip(tensors, TENSORS, strict=True)
        ]
        return bb.emit(relax.Tuple([bb.emit(value) for value in found]))

    params = [tensor(f"x{i}", *kind) for i, kind in enumerate(TENSORS)]
    found = run(build(params, body), "main", *inputs, pipeline="relax_grad")
    for array, value in zip(inputs, found, strict=True):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(value, _levels(np, array, array.dtype.type))


def test_conditions_have_no_selections():
    source = tirx.decl_buffer((8,), "float32", "source", layout=None)
    target = tirx.decl_buffer((8,), "float32", "target", layout=None)
    store = tirx.BufferStore(target, _nested(source[3]), [tirx.const(0, "int32")])
    changed = with_stored_conditions(SBlock([], [], [], "block", store))
    assert len(changed.alloc_buffers) == 2
    selections: list[tirx.Select] = []
    structural_walk(changed.body, (tirx.Select, selections.append))
    assert len(selections) == 3
    for selection in selections:
        within: list[tirx.Select] = []
        structural_walk(selection.condition, (tirx.Select, within.append))
        assert not within


def test_named_conditions_are_the_expression():
    x = tirx.Var("x", "float32")
    expr, named = with_named_conditions(_nested(x))
    assert len(named) == 2
    for variable, condition in reversed(named):
        expr = substitute(expr, {variable: condition})
    assert str(expr) == str(_nested(x))


def test_loads_of_branches_stay():
    """A load that a branch guards may be out of bounds."""
    source = tirx.decl_buffer((8,), "float32", "source", layout=None)
    i = tirx.Var("i", "int32")
    guarded = tirx.if_then_else(i < 8, _nested(source[i]), tirx.const(0.0, "float32"))
    store = tirx.BufferStore(source, guarded, [tirx.const(0, "int32")])
    block = SBlock([], [], [], "block", store)
    assert not with_stored_conditions(block).alloc_buffers


def test_statements_without_a_block_stay():
    source = tirx.decl_buffer((8,), "float32", "source", layout=None)
    store = tirx.BufferStore(source, _nested(source[1]), [tirx.const(0, "int32")])
    assert with_stored_conditions(store).same_as(store)
