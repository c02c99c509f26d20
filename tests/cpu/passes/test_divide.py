"""Slices of a tensor that become parts of a split, against NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import tvm
from dispatched import HOST
from in_place import add_to
from programs import build, is_sound, run, tensor, to_numpy
from sums import names_in
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.transform import DivideSlices

RNG = np.random.default_rng(0)


def divided(module, name="main"):
    """Return a function after the pass."""
    result = DivideSlices()(module)
    is_sound(result)
    return result[name]


def is_left(module) -> None:
    tvm.ir.assert_structural_equal(DivideSlices()(module), module)


def slices(bounds, shape=(20, 3), axis=0, stride=1):
    """Return the module of a function that returns slices of a tensor."""

    def body(bb, x):
        return relax.Tuple(
            [bb.emit(op.strided_slice(x, [axis], [a], [b], [stride])) for a, b in bounds]
        )

    return build([tensor("x", shape, "float32")], body)


ROWS = [(i, i + 1) for i in range(20)]


def test_slices_of_an_axis_are_divided():
    assert names_in(divided(slices(ROWS))) == ["split"]
    assert names_in(divided(slices(ROWS[2:19]))) == ["split"]
    assert names_in(divided(slices([(2 * i, 2 * i + 2) for i in range(16)], (32, 3)))) == ["split"]


def test_unsupported_slices_are_left():
    """Few slices, coverage below three quarters of the axis, overlaps, strides, and symbolic shapes
    or indices."""
    is_left(slices(ROWS[:15], (15, 3)))
    is_left(slices(ROWS[:16], (22, 3)))
    is_left(slices([*ROWS, (0, 1)]))
    is_left(slices([(i, i + 3) for i in range(0, 40, 2)], (48, 3), stride=2))
    n = tirx.Var("n", "int64")
    is_left(slices(ROWS, (20, n)))
    is_left(slices(ROWS, (n, 3)))
    x, index = tensor("x", (16, 3), "float32"), tensor("i", (), "int64")

    def taken(bb, x, i):
        return relax.Tuple([bb.emit(op.take(x, i, 0)) for _ in range(20)])

    is_left(build([x, index], taken))


def random_module(rng):
    """Return a module that reads parts of a tensor in any order, its input, and the expected
    results."""
    rank = int(rng.integers(1, 4))
    axis = int(rng.integers(rank))
    shape = rng.integers(1, 4, rank).tolist()
    shape[axis] = extent = int(rng.integers(30, 40))
    x = rng.integers(-9, 9, shape).astype(str(rng.choice(["float32", "int8", "float64"])))
    bounds = np.unique([0, extent, *rng.permutation(np.arange(1, extent))[:22]]).tolist()
    parts = list(pairwise(bounds))
    rng.shuffle(parts)
    wanted, indices = [], []

    def body(bb, x):
        results = []
        for (start, stop), is_taken in zip(parts, indices, strict=True):
            if is_taken and stop - start == 1:
                place = relax.const(start - extent * (start % 2), "int64")
                results.append(bb.emit(op.take(x, place, axis, "fast")))
            elif is_taken:
                places = relax.const(np.arange(start, stop))
                results.append(bb.emit(op.take(x, places, axis)))
            else:
                results.append(bb.emit(op.strided_slice(x, [axis], [start], [stop])))
        return relax.Tuple(results)

    for start, stop in parts:
        indices.append(rng.random() < 0.5)
        part = x[(slice(None),) * axis + (slice(start, stop),)]
        is_row = indices[-1] and stop - start == 1
        wanted.append(part.squeeze(axis) if is_row else part)
    return build([tensor("x", x.shape, x.dtype.name)], body), x, wanted


def test_random_slices():
    cases = [random_module(np.random.default_rng(seed)) for seed in range(14)]
    functions = {}
    for i, (module, _, _) in enumerate(cases):
        function = divided(module)
        assert {"take", "strided_slice"}.isdisjoint(names_in(function))
        functions[tvm.ir.GlobalVar(f"case{i}")] = function.with_attr("global_symbol", f"case{i}")
    machine = relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), TARGET), tvm.cpu())
    for i, (_, x, wanted) in enumerate(cases):
        results = to_numpy(machine[f"case{i}"](tvm.runtime.tensor(x)))
        for a, b in zip(results, wanted, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("write_to", ["source", "slice", "other"])
def test_an_overwritten_source_is_not_divided(write_to):
    """A tensor that is overwritten between two slices is not divided. A slice may be
    overwritten."""
    kind = relax.TensorType((4, 4), "float32")
    bb = relax.BlockBuilder()
    callee = bb.add_func(add_to, "add_to")
    x, y = (relax.Var(name, kind) for name in "xy")
    with bb.function("main", [x, y]):
        with bb.dataflow():
            source = bb.emit(op.concat([x] * 16, 0))
            square = bb.emit(op.reshape(source, (16, 4, 4)))
            parts = [bb.emit(op.take(square, relax.const(i), 0)) for i in range(8)]
            written = {"source": None, "slice": parts[1], "other": bb.emit(op.negative(x))}[
                write_to
            ]
            if written is None:
                whole = relax.TensorType((64, 4), "float32")
                written = bb.emit(
                    op.call_tir_inplace(
                        bb.add_func(_filling(), "fill"), relax.Tuple([source]), [0], whole
                    )
                )
            else:
                written = bb.emit(op.call_tir_inplace(callee, relax.Tuple([written, y]), [0], kind))
            parts += [bb.emit(op.take(square, relax.const(i), 0)) for i in range(8, 16)]
            rest = [part for i, part in enumerate(parts) if write_to != "slice" or i != 1]
            result = bb.emit_output(relax.Tuple([written, *rest]))
        bb.emit_func_output(result)
    module = bb.get()
    assert names_in(DivideSlices()(module)["main"]).count("split") == (write_to != "source")
    if write_to == "source":
        return
    values = [RNG.normal(size=(4, 4)).astype("float32") for _ in "xy"]
    results = run(module, "main", *values, target=HOST, pipeline="relax_grad")
    start = values[0] if write_to == "slice" else -values[0]
    np.testing.assert_allclose(results[0], start + values[1], rtol=1e-6)
    for part in results[1:]:
        np.testing.assert_array_equal(part, values[0])


def _filling():
    """Return a function that overwrites a tensor."""
    x = tvm.te.placeholder((64, 4), name="x")
    zero = tvm.te.compute((64, 4), lambda *_: tirx.const(0, "float32"), name="zero")
    function = tvm.te.create_prim_func([x, zero])
    (target,) = function.params[1:]
    return tirx.PrimFunc([target], function.body).with_attr("tirx.noalias", True)


def test_second_slices_of_a_step_are_parts_too():
    """Slices along two axes of one tensor become two splits."""

    def body(bb, x):
        rows = [bb.emit(op.strided_slice(x, [0], [i], [i + 1])) for i in range(16)]
        columns = [bb.emit(op.take(x, relax.const(i), 1)) for i in range(17)]
        return relax.Tuple([*rows, *columns])

    module = build([tensor("x", (16, 17), "float32")], body)
    assert sorted(names_in(divided(module))) == ["split", "split", *["squeeze"] * 17]
    x = RNG.normal(size=(16, 17)).astype("float32")
    result = run(module, "main", x, target=HOST, pipeline="relax_grad")
    for part, wanted in zip(result, [*np.split(x, 16), *x.T], strict=True):
        np.testing.assert_array_equal(part, wanted)
