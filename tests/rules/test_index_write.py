"""Gradients of operators that read and write at indices, and their forward results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from calls import build, params_of, value_of
from hypothesis import given, settings
from hypothesis import strategies as st
from indices import (
    elements,
    gather_pairs,
    point_pairs,
    points,
    points_of,
    tensors,
    write_with_torch,
)
from sweep import TARGET, at_length, batches
from tvm import relax, tirx

from relax_grad import GradientError
from relax_grad.testing import (
    TorchCase,
    _program,
    check_against_torch,
    check_gradients,
    check_many_against_torch,
)

few = settings(max_examples=8, deadline=None, derandomize=True)
REDUCE = {"add": "sum", "mul": "prod", "mean": "mean", "max": "amax", "min": "amin"}
REDUCTIONS = ["update", *REDUCE]
#: The reductions of scatter_nd.
ND_REDUCTIONS = [reduction for reduction in REDUCTIONS if reduction != "mean"]
#: Indices just outside an axis of 5, and at the limits of int64.
OUTSIDE = [5, -6, np.iinfo("int64").min, np.iinfo("int64").max]


def gradients(function, *inputs, weights=None):
    """Return the gradients of ``sum(weights * function(inputs))`` for every floating-point
    input."""
    params = params_of(inputs)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            y = bb.emit(function(*params))
            if weights is not None:
                y = bb.emit(relax.op.multiply(y, relax.const(weights, weights.dtype.name)))
            loss = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(loss)
    wrt = [p for p, value in zip(params, inputs, strict=True) if value.dtype.kind == "f"]
    module = relax.transform.Gradient("main", wrt)(bb.get())
    return _program.compile_module(module, TARGET)("main_adjoint", inputs)[1]


def scatter(reduction, axis=0):
    return lambda d, i, u: relax.op.scatter_elements(d, i, u, axis, reduction)


def scatter_nd(reduction):
    return lambda d, i, u: relax.op.scatter_nd(d, i, u, reduction)


@st.composite
def scatters(draw):
    """Draw scatters with indices that PyTorch accepts, distinct ones where it leaves repetitions
    undefined."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    reduction = draw(st.sampled_from(REDUCTIONS))
    index_shape = [draw(st.integers(1, size)) for size in shape]
    size = shape[axis]
    different = reduction in ("update", "mean")
    if not different:
        index_shape[axis] = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    indices = rng.integers(0, size, index_shape)
    if different:
        indices = np.argsort(
            rng.random([*index_shape[:axis], size, *index_shape[axis + 1 :]]), axis
        )
        indices = indices.take(range(index_shape[axis]), axis)
    return shape, indices, axis - len(shape) * draw(st.integers(0, 1)), reduction


def halves(*shapes):
    """Return values with ties and zeros."""
    rng = np.random.default_rng(0)
    return [rng.integers(-2, 3, shape) * 0.5 for shape in shapes]


@few
@given(scatters())
def test_scatter_elements(torch, case):
    """The result is that of PyTorch's own operator, for the cases that it accepts."""
    shape, indices, axis, reduction = case

    def reference(torch, data, index, updates):
        if reduction == "update":
            return data.scatter(axis, index, updates)
        return data.scatter_reduce(axis, index, updates, REDUCE[reduction])

    data, updates = halves(shape, indices.shape)
    inputs = [data, indices, updates]
    check_against_torch("relax.scatter_elements", inputs, reference, axis=axis, reduction=reduction)


def scatter_elements_case(case, reduction):
    shape, indices, axis = case
    data, updates = halves(shape, indices.shape)
    pairs = gather_pairs(shape, indices, axis % len(shape))
    return TorchCase(
        "relax.scatter_elements",
        [data, indices, updates],
        write_with_torch(pairs, reduction),
        {"axis": axis, "reduction": reduction},
    )


def scatter_nd_case(case, reduction):
    shape, points, _ = case
    data, updates = halves(shape, (*points.shape[:-1], *shape[points.shape[-1] :]))
    return TorchCase(
        "relax.scatter_nd",
        [data, points, updates],
        write_with_torch(point_pairs(shape, points), reduction),
        {"reduction": reduction},
    )


@st.composite
def puts(draw):
    """Draw indices of all axes, and values whose shape broadcasts to that of the indices."""
    shape, indices = draw(tensors(all_axes=True, min_rank=1))  # TVM refuses a rank of 0
    common = np.broadcast_shapes(*(index.shape for index in indices))
    own = common[draw(st.integers(0, len(common))) :]
    own = [1 if draw(st.booleans()) else extent for extent in own]
    return shape, indices, own, draw(st.booleans())


def index_put_case(case):
    shape, indices, own, accumulate = case
    data, values = halves(shape, own)
    points = points_of(indices)
    write = write_with_torch(point_pairs(shape, points), "add" if accumulate else "update")
    return TorchCase(
        "relax.index_put",
        [data, tuple(indices), values],
        lambda torch, x, _, v: write(torch, x, v.expand(points.shape[:-1])),
        {"accumulate": accumulate},
    )


@st.composite
def slices(draw):
    """Draw a slice of one axis with bounds inside and outside. TVM does not count them from the
    end."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    start, end = sorted([draw(st.integers(-4, 8)), draw(st.integers(-4, 8))])
    return shape, axis, start, end, draw(st.integers(1, 4))


def slice_scatter_case(case):
    shape, axis, start, end, step = case
    places = range(start, end, step)
    source = list(shape)
    source[axis] = len(places)
    indices = np.array(places).reshape(
        [-1 if a == axis % len(shape) else 1 for a in range(len(shape))]
    )
    indices = np.broadcast_to(indices, source)
    pairs = [
        (at, where if indices[at] >= 0 else None)
        for at, where in gather_pairs(shape, indices, axis % len(shape))
    ]
    return TorchCase(
        lambda x, s: relax.op.slice_scatter(x, s, start, end, step, axis),
        halves(shape, source),
        write_with_torch(pairs, "update"),
    )


@pytest.mark.slow
@at_length(800)
@given(batches(st.tuples(elements(), st.sampled_from(REDUCTIONS))))
def test_scatter_elements_at_length(torch, batch):
    check_many_against_torch([scatter_elements_case(*case) for case in batch], target=TARGET)


@pytest.mark.slow
@at_length(500)
@given(batches(st.tuples(points(), st.sampled_from(ND_REDUCTIONS))))
def test_scatter_nd_at_length(torch, batch):
    check_many_against_torch([scatter_nd_case(*case) for case in batch], target=TARGET)


@pytest.mark.slow
@at_length(400)
@given(batches(puts()))
def test_index_put_at_length(torch, batch):
    check_many_against_torch(list(map(index_put_case, batch)), target=TARGET)


@pytest.mark.slow
@at_length(300)
@given(batches(slices()))
def test_slice_scatter_at_length(torch, batch):
    check_many_against_torch(list(map(slice_scatter_case, batch)), target=TARGET)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    batches(st.tuples(elements(), points(), puts(), slices(), st.sampled_from(ND_REDUCTIONS)), 4)
)
def test_writes(torch, batch):
    """The test runs a few cases of each of the four strategies above."""
    cases = (
        (
            scatter_elements_case(element, reduction),
            scatter_nd_case(point, reduction),
            index_put_case(put),
            slice_scatter_case(cut),
        )
        for element, point, put, cut, reduction in batch
    )
    check_many_against_torch(list(itertools.chain.from_iterable(cases)))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_last_update_gets_the_gradient(dtype):
    """Each operator gives the gradient to the last update of an element. Overwritten values get
    none."""
    data, updates = np.zeros((3, 2), dtype), np.arange(1, 5).astype(dtype)
    weights = np.array([[1, 2], [3, 4], [5, 6]], dtype)
    rows, columns = np.array([2, 0, 2, -1]), np.array([1, 1, 1, 1])
    points = np.stack([rows, columns], -1)
    kept, written = [[1, 0], [3, 4], [5, 0]], [0, 2, 0, 6]
    for function, inputs in (
        (scatter_nd("update"), [data, points, updates]),
        (lambda d, i, j, u: relax.op.index_put(d, (i, j), u), [data, rows, columns, updates]),
    ):
        np.testing.assert_array_equal(value_of(function, *inputs), [[0, 2], [0, 0], [0, 4]])
        slopes = gradients(function, *inputs, weights=weights)
        np.testing.assert_array_equal(slopes[0], kept)
        np.testing.assert_array_equal(slopes[1], written)
    inputs = [data[:, :1], rows.reshape(4, 1), updates.reshape(4, 1)]
    np.testing.assert_array_equal(value_of(scatter("update"), *inputs), [[2], [0], [4]])
    slopes = gradients(scatter("update"), *inputs, weights=weights[:, 1:].copy())
    np.testing.assert_array_equal(slopes[0], [[0], [4], [0]])
    np.testing.assert_array_equal(slopes[1], [[0], [2], [0], [6]])


def test_mean_halves_update_by_update():
    """TVM's mean takes the mean of the present value and each update, one after the other."""
    data, updates = np.array([8.0, 1.0]), np.array([4.0, 2.0, 1.0])
    indices = np.array([0, 0, 0])
    value = value_of(scatter("mean"), data, indices, updates)
    np.testing.assert_array_equal(value, [((8 + 4) / 2 + 2) / 4 + 1 / 2, 1])
    kept, written = gradients(scatter("mean"), data, indices, updates)
    np.testing.assert_array_equal(kept, [1 / 8, 1])
    np.testing.assert_array_equal(written, [1 / 8, 1 / 4, 1 / 2])


@pytest.mark.parametrize("nd", [False, True])
def test_ties_share_evenly(nd):
    data, indices, updates = np.array([1.0, 2.0]), np.array([0, 0, 1, -2]), np.array([1.0, 0, 5, 1])
    for reduction, sign in (("max", 1), ("min", -1)):
        function = scatter_nd(reduction) if nd else scatter(reduction)
        where = indices.reshape(4, 1) if nd else indices
        kept, written = gradients(
            function, sign * data, where, sign * updates, weights=np.array([6.0, 5.0])
        )
        np.testing.assert_allclose(kept, [2, 0], 1e-15)
        np.testing.assert_allclose(written, [2, 0, 5, 2], 1e-15)


def test_product_of_a_thousand_factors_in_half_precision():
    """The product of the first or the last hundred factors leaves the range of float16, the whole
    product does not."""
    factors = np.tile(np.array([2.0, 0.5], "float16"), 100)
    factors = np.concatenate([factors[::2], factors[1::2]])
    data, indices = np.ones(1, "float16"), np.zeros(200, "int64")
    kept, written = gradients(scatter("mul"), data, indices, factors)
    np.testing.assert_array_equal(kept, [1])
    np.testing.assert_array_equal(written, 1 / factors)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_updates_outside_are_not_written(reduction):
    data, updates = np.array([1.0, 2.0, 0.0, 4.0, 5.0]), np.arange(4.0)
    for nd in (False, True):
        if nd and reduction == "mean":
            continue
        indices = np.array(OUTSIDE)
        function = scatter_nd(reduction) if nd else scatter(reduction)
        where = indices.reshape(4, 1) if nd else indices
        np.testing.assert_array_equal(value_of(function, data, where, updates), data)
        kept, written = gradients(function, data, where, updates)
        np.testing.assert_array_equal(kept, np.ones(5))
        np.testing.assert_array_equal(written, np.zeros(4))


def test_indices_outside_read_nan_and_pass_no_gradient():
    data, indices = np.arange(5.0), np.array([1, -5, *OUTSIDE])
    for function in (
        lambda x, i: relax.op.index_tensor(x, [i]),
        lambda x, i: relax.op.gather_nd(x, relax.op.expand_dims(i, 1)),
    ):
        value = value_of(function, data, indices)
        np.testing.assert_array_equal(value, [1, 0, *[np.nan] * 4])
        (slope,) = gradients(function, data, indices)
        np.testing.assert_array_equal(slope, [1, 1, 0, 0, 0])


def test_outside_index_put_and_slice_scatter():
    data, indices = np.arange(5.0), np.array([1, -5, *OUTSIDE])
    for accumulate in (False, True):
        value = value_of(
            lambda x, i, v, a=accumulate: relax.op.index_put(x, (i,), v, a),
            data,
            indices,
            np.full(6, 7.0),
        )
        expected = data.copy()
        expected[[0, 1]] = data[[0, 1]] * accumulate + 7
        np.testing.assert_array_equal(value, expected)
    value = value_of(
        lambda x, s: relax.op.slice_scatter(x, s, -2, 8, 2), data, np.arange(10.0, 15.0)
    )
    np.testing.assert_array_equal(value, [11, 1, 12, 3, 13])


def test_smaller_indices_along_other_axes():
    """TVM mistakes the extents of the indices for the data's."""
    rng = np.random.default_rng(0)
    data, indices = rng.normal(size=(2, 3, 4)), rng.integers(0, 3, (2, 3, 2))
    updates = rng.normal(size=(2, 3, 2))
    expected = data.copy()
    np.put_along_axis(expected[:, :, :2], indices, updates, 1)
    np.testing.assert_array_equal(value_of(scatter("update", 1), data, indices, updates), expected)


def test_larger_indices_along_other_axes():
    """Elements outside of the data are not written."""
    rng = np.random.default_rng(0)
    data, indices, updates = (
        rng.normal(size=(2, 3)),
        np.zeros((1, 5), "int64"),
        rng.normal(size=(1, 5)),
    )
    expected = data.copy()
    expected[0] = updates[0, :3]
    np.testing.assert_array_equal(value_of(scatter("update"), data, indices, updates), expected)
    check_gradients("relax.scatter_elements", [data, indices, updates], reduction="mul", order=2)


def test_variables_and_single_tensors_of_indices():
    """A tuple of indices may be a variable, and index_put takes a tensor for a tuple of one."""
    x = relax.Var("x", relax.TensorType((3, 2), "float64"))
    i = relax.Var("i", relax.TupleType([relax.TensorType((4,), "int64")] * 2))
    v = relax.Var("v", relax.TensorType((4,), "float64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, i, v]):
        with bb.dataflow():
            y = bb.emit(relax.op.index_put(x, i, v, True))
            taken = bb.emit(relax.op.index_tensor(y, i))
            loss = bb.emit_output(relax.op.sum(taken))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [x, v])(bb.get())
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    indices = [np.array([0, 1, 0, 2]), np.array([1, 1, 1, 0])]
    arguments = [
        tvm.runtime.tensor(np.zeros((3, 2))),
        tuple(map(tvm.runtime.tensor, indices)),
        tvm.runtime.tensor(np.arange(4.0)),
    ]
    loss, (kept, written) = machine["main_adjoint"](*arguments)
    assert loss.numpy() == 2 + 1 + 2 + 3
    np.testing.assert_array_equal(kept.numpy(), [[0, 2], [0, 1], [1, 0]])
    np.testing.assert_array_equal(written.numpy(), [2, 1, 2, 1])


@pytest.mark.parametrize("reduction", ["update", "mean", "mul", "max"])
def test_third_order(reduction):
    rng = np.random.default_rng(0)
    data, updates = rng.normal(size=(3,)), rng.normal(size=(4,))
    indices = np.array([0, 2, 0, -3])

    def cube(data, indices, updates):
        y = relax.op.scatter_elements(data, indices, updates, 0, reduction)
        return relax.op.multiply(y, relax.op.multiply(y, y))

    check_gradients(cube, [data, indices, updates], order=3, symbolic={0: {0: "n"}})


def test_third_order_of_points():
    rng = np.random.default_rng(0)
    data, updates, points = (
        rng.normal(size=(3, 2)),
        rng.normal(size=(3, 2)),
        np.array([[0], [2], [-3]]),
    )

    def cube(data, indices, updates):
        y = relax.op.scatter_nd(data, indices, updates, "mul")
        taken = relax.op.gather_nd(y, indices)
        return relax.op.multiply(taken, relax.op.multiply(taken, taken))

    check_gradients(
        cube, [data, points, updates], order=3, symbolic={0: {0: "n", 1: "m"}, 2: {1: "m"}}
    )


def test_symbolic_bounds_of_a_slice():
    """One slice begins at the value of a parameter, and one has a symbolic extent."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n,), "float64"))
    s = relax.Var("s", relax.TensorType((2,), "float64"))
    for start, end, expected in (
        (1, 3, [1, 0, 0, 1, 1]),
        (n - 2, n, [1, 1, 1, 0, 0]),
    ):
        bb = relax.BlockBuilder()
        with bb.function("main", [x, s]):
            with bb.dataflow():
                y = bb.emit(relax.op.slice_scatter(x, s, start, end, 1))
                loss = bb.emit_output(relax.op.sum(y))
            bb.emit_func_output(loss)
        values = [np.arange(5.0), np.array([7.0, 8.0])]
        run = _program.compile_module(bb.get(), TARGET)
        assert run("main", values) == np.dot(expected, values[0]) + 15
        if isinstance(start, int):
            module = relax.transform.Gradient("main", [x, s])(bb.get())
            _, (kept, written) = _program.compile_module(module, TARGET)("main_adjoint", values)
            np.testing.assert_array_equal(kept, expected)
            np.testing.assert_array_equal(written, [1, 1])


@pytest.mark.parametrize(
    ("op", "reduction"),
    [("scatter_nd", "mean"), ("scatter_nd", "sub"), ("scatter_elements", "sub")],
)
def test_reductions_that_tvm_does_not_have(op, reduction):
    data, indices, updates = np.zeros((3, 1)), np.zeros((2, 1), "int64"), np.zeros((2, 1))

    def forward(d, i, u):
        return getattr(relax.op, op)(d, i, u, reduction=reduction)

    with pytest.raises(GradientError, match=f"relax.{op}.*reduction must be one of .*{reduction}"):
        check_gradients(forward, [data, indices, updates])
    with pytest.raises(RuntimeError, match="not in"):
        value_of(forward, data, indices, updates)


def test_values_that_do_not_fit():
    data, indices = np.zeros((3, 4)), (np.array([[0], [1]]), np.array([0, 1, 2]))
    message = r"relax.index_put.*values must be broadcastable to the shape .*2, 3.* of the indices"
    for shape in ((2,), (4,), (2, 3, 1, 2)):
        with pytest.raises(GradientError, match=message):
            check_gradients("relax.index_put", [data, indices, np.zeros(shape)])


def test_indices_that_cannot_be_matched():
    n, m = (tirx.Var(name, "int64") for name in "nm")
    x = relax.Var("x", relax.TensorType((3, 3), "float32"))
    i, j = (relax.Var(k, relax.TensorType((v,), "int64")) for k, v in (("i", n), ("j", m)))
    v = relax.Var("v", relax.TensorType((n,), "float32"))
    module = build([x, i, j, v], lambda x, i, j, v: relax.op.sum(relax.op.index_put(x, (i, j), v)))
    with pytest.raises(GradientError, match=r"relax.index_put.*must be known.*match_cast"):
        relax.transform.Gradient("main", [module["main"].params[0]])(module)
