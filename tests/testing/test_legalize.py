"""Legalization that converts equal calls once gives the module of TVM's pass."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import build, tensor
from sweep import TARGET, share
from tvm import relax
from tvm.relax import op
from tvm_ffi import structural_equal

from relax_grad.testing import _legalize, _program
from relax_grad.testing._program import compile_module
from relax_grad.testing.samples import sampled_operators, samples


def expected(module: tvm.IRModule) -> tvm.IRModule:
    """Return the module after the passes of TVM's pipeline."""
    with TARGET:
        passes = [*_legalize.BEFORE, relax.transform.LegalizeOps]
        return tvm.transform.Sequential([each() for each in passes])(module)


def calls_of(module: tvm.IRModule) -> int:
    """Return the number of calls of tensor functions."""
    return module.script(show_meta=True).count("call_tir(")


@pytest.fixture
def made(monkeypatch) -> list:
    """Return the list of the tensor functions that legalizations make from now on."""
    made, call_te = [], relax.BlockBuilder.call_te

    def record(bb, function, *args, **settings):
        made.append(function)
        return call_te(bb, function, *args, **settings)

    monkeypatch.setattr(relax.BlockBuilder, "call_te", record)
    return made


def static(bb, x, y):
    """Return the terms: calls that are equal, and calls that differ in one attribute, type, shape or value."""
    terms = [op.exp(x), op.exp(y), op.sum(x, axis=[0]), op.sum(y, axis=[0]), op.sum(x, axis=[1])]
    terms += [op.subtract(x, x), op.subtract(x, y), op.subtract(y, x), op.subtract(y, y)]
    terms += [op.where(op.greater(x, y), x, y), op.where(op.greater(x, y), x, x)]
    terms += [op.exp(op.sum(x, axis=[0])), op.exp(op.astype(x, "float32"))]
    terms += [op.add(x, relax.const(number, "float64")) for number in (1.0, 2.0, 1.0)]
    terms += [op.multiply(x, relax.const([[value]], "float64")) for value in (1.0, 2.0, 1.0)]
    terms += [op.concat([x, y], axis=axis) for axis in (0, 1, 0)]
    terms += [op.concat([y, y]), op.stack([x, y]), op.stack([y, x])]
    terms += [op.reshape(x, shape) for shape in ((9,), (1, 9), (9,))]
    terms += [op.broadcast_to(x, (2, 3, 3)), op.broadcast_to(y, (2, 3, 3))]
    terms += [op.full((2,), relax.const(number, "float64"), "float64") for number in (3.0, 4.0)]
    terms += [op.zeros((2, 3), dtype) for dtype in ("float32", "float64", "float64")]
    terms += [op.sort(x), op.sort(y), op.nn.leakyrelu(x, 0.1), op.nn.leakyrelu(x, 0.1000001)]
    terms += [op.split(x, 3, axis=1)[1], op.split(y, 3, axis=1)[2], op.split(x, [1, 2], axis=1)[1]]
    terms += [op.nn.softmax(x), op.nn.softmax(y), op.nn.softmax(x, axis=0), op.variance(y, axis=0)]
    return terms


def symbolic(bb, x, y):
    terms = [op.exp(x), op.exp(y), op.subtract(x, y), op.subtract(x, x), op.sum(y, axis=[0])]
    return [*terms, op.exp(op.sum(x, axis=[0])), op.exp(op.sum(y, axis=[0]))]


def slices(bb, x, y):
    """Return slices of static tensors, whose extents are computed when the program runs."""
    begin = relax.const([0, 1], "int64")
    limits = [bb.emit(op.astype(op.sum(each, axis=[0]), "int64")) for each in (x, y)]
    first, last = (bb.emit(op.strided_slice(each, [0], [0], [2])) for each in limits)
    steps = bb.emit(op.ones((2,), "int64"))
    begin = bb.emit(op.zeros((2,), "int64"))
    return [op.dynamic_strided_slice(x, begin, end, steps) for end in (first, last, first)]


def summed(make):
    """Return the function of a program that combines the sums of terms, each with another weight."""

    def body(bb, x, y):
        total = None
        for term in make(bb, x, y):
            term = bb.emit(op.astype(bb.emit(term), "float64"))
            if term.ty.shape is None:  # computed when the program runs
                extents = [tvm.tirx.Var(name, "int64") for name in ("a", "b")]
                term = bb.match_cast(term, relax.TensorType(extents, "float64"))
            term = bb.emit(op.sum(term))
            total = term if total is None else bb.emit(op.add(total, op.multiply(total, term)))
        return total

    return body


@pytest.mark.parametrize(
    ("make", "rows"), [(static, 3), (symbolic, "n"), (symbolic, 3), (slices, 3)]
)
def test_the_module_is_that_of_tvm(make, rows, made):
    extent = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    module = build([tensor("x", (extent, 3)), tensor("y", (extent, 3))], summed(make))
    wanted = expected(module)
    of_tvm = len(made)
    found = _legalize.legalized(module, TARGET)
    assert structural_equal(found, wanted, map_free_vars=True)
    assert len(made) - of_tvm < of_tvm, "functions of equal calls were made again"


def test_tensors_that_are_passed_twice():
    def difference(bb, x, y):
        zero = bb.emit(op.subtract(x, x))
        one, other = bb.emit(op.subtract(x, y)), bb.emit(op.subtract(y, x))
        return op.add(bb.emit(op.multiply(one, other)), zero)

    module = build([tensor("x", (3, 3)), tensor("y", (3, 3))], difference)
    x, y = np.random.default_rng(0).normal(size=(2, 3, 3))
    found = compile_module(module, TARGET)("main", [x, y])
    np.testing.assert_allclose(found, (x - y) * (y - x), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", share(sampled_operators()))
def test_programs_of_samples(name, monkeypatch):
    """The programs that the checks of every operator compile.

    With symbolic shapes, TVM's pass orders the symbols that it adds to the parameters differently each time.
    """
    seen = []

    def compared(module, target):
        found = legalized(module, target)
        assert structural_equal(found, expected(module), map_free_vars=True)
        seen.append(module)
        raise Compared

    legalized = _legalize.legalized
    monkeypatch.setattr(_program, "legalized", compared)
    for sample in samples(name):
        with pytest.raises(Compared):
            sample.check(order=2, target=TARGET)
    assert seen


class Compared(Exception):
    """The end of a check before its compilation."""
