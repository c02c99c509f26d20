"""Scheduled functions compute the same values as the original loops, in parallel and in vectors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from machines import each_target
from tvm import te, tirx, topi

from relax_grad.cpu.schedule import _emit, _reduce, _stream, schedule
from relax_grad.cpu.target import CPU
from relax_grad.testing._program import without_assertions

N = tirx.Var("n", "int64")


@pytest.fixture(
    params=[
        pytest.param(False, id="as they are", marks=pytest.mark.slow),
        pytest.param(True, id="as if they were large"),
    ]
)
def sizes(request, monkeypatch):
    """Optionally apply the optimizations for large tensors to small ones too."""
    if request.param:
        monkeypatch.setattr(_emit, "SMALL", 2)
        monkeypatch.setattr(_reduce, "_PIECE", 2)
        monkeypatch.setattr(_emit, "LINE", 4)
        monkeypatch.setattr(_stream, "LARGE", 2)


def tensor(*shape, dtype="float32", name="x"):
    extents = [tirx.IntImm("int64", n) if isinstance(n, int) else n for n in shape]
    return te.placeholder(extents, dtype, name)


def elements():
    x, y = tensor(3, 5, 7, 9), tensor(5, 1, 1)
    yield [x, y], topi.nn.relu(topi.add(x, y))
    x, y, z = tensor(3, 5, 77), tensor(3, 5, 77), tensor()
    yield [x, y, z], topi.sqrt(topi.add(topi.multiply(x, x), topi.divide(y, z)))
    yield [x, y], topi.nn.relu(topi.subtract(x, y))
    x, y = tensor(70, 33), tensor(33)
    yield [x, y], topi.exp(topi.multiply(x, y))
    x, y = tensor(7, 300), tensor(7, 300)
    magnitude = topi.add(topi.abs(x), tirx.const(0.1, "float32"))
    yield [x], topi.tanh(topi.log(magnitude))
    yield [x, y], topi.power(magnitude, y)
    yield (
        [x],
        topi.add(
            topi.power(x, tirx.const(2.0, "float32")), topi.power(x, tirx.const(3.0, "float32"))
        ),
    )
    yield [x, y], topi.where(topi.greater(x, y), topi.log(magnitude), y)
    x = tensor(3, 10, 17, 1)
    yield [x], topi.tanh(topi.add(x, x))
    x = tensor(1000, dtype="float64")
    yield [x], topi.sqrt(topi.abs(x))
    x = tensor(300, 3, dtype="int8")
    yield [x], topi.cast(topi.greater(x, tirx.const(1, "int8")), "float32")
    x = tensor(40, 30, dtype="float16")
    yield [x], topi.sigmoid(x)
    x = tensor()
    yield [x], topi.add(x, x)
    x, y = tensor(9, 20), tensor(4, dtype="int64")
    yield [x, y], topi.take(x, y, axis=0, mode="clip")


def moves():
    for shape, axes in [
        ((40, 50), (1, 0)),
        ((2, 33, 7, 5), (0, 2, 3, 1)),
        ((2, 7, 5, 33), (0, 3, 1, 2)),
        ((4, 5, 6, 16), (0, 2, 1, 3)),
        ((32, 32, 3), (2, 0, 1)),
    ]:
        x, y = tensor(*shape), tensor(*(shape[i] for i in axes))
        yield [x], topi.transpose(x, axes)
        yield [x, y], topi.add(topi.transpose(x, axes), y)
    x, y = tensor(30, 17), tensor(30, 40)
    yield [x, y], topi.concatenate([x, y], 1)
    many = [tensor(30, extent) for extent in (1, 17, 2, 40, 3, 9, 30)]
    yield many, topi.concatenate(many, 1)
    yield [y], topi.nn.pad(y, (1, 2), (3, 4))
    yield [y], topi.strided_slice(y, [2, 1], [28, 39], [1, 3])
    yield [y], topi.split(y, 4, 1)[1]
    yield [y], topi.reshape(y, (15, 80))
    yield [y], topi.flip(y, 1)


def sums():
    for shape, axes in [
        ((30, 70), 1),
        ((30, 70), 0),
        ((6, 19, 5, 7), (0, 2, 3)),
        ((6, 19, 5, 7), (1,)),
        ((6, 19, 5, 7), (3,)),
        ((50, 130), (0, 1)),
        ((2, 700), None),
        ((1000, 3), 0),
        ((3, 1000), 0),
        ((90, 1, 40), 2),
    ]:
        for dtype in ("float32", "float16", "int32"):
            x = tensor(*shape, dtype=dtype)
            yield [x], topi.sum(x, axes)
        x = tensor(*shape)
        yield [x], topi.max(x, axes)
        yield [x], topi.sqrt(topi.sum(topi.multiply(x, x), axes))
    x = tensor(20, 33, dtype="bool")
    yield [x], topi.all(x, 1)
    x = tensor(20, 33)
    yield [x], topi.argmax(x, 1)
    yield [x], topi.nn.softmax(x)
    yield [x], topi.sum(topi.log(topi.exp(x)), 1)
    yield [x], topi.sum(topi.log(topi.exp(x)), 0)
    x, y = tensor(20, 33), tensor(33, 40)
    yield [x, y], topi.matmul(x, y)
    x, y = tensor(20, 33), tensor(40, 33)
    yield [x, y], topi.matmul(x, y, False, True)
    x = tensor(2, 5, 17, 19)
    yield [x], topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max")
    yield [x], topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "avg")


def functions():
    """Yield nested element-wise functions: TVM would inline each of them into the next at every use."""

    def chain(x, times):
        for _ in range(times):
            x = topi.tanh(topi.exp(topi.sigmoid(x)))
        return x

    x = tensor(7, 19)
    yield [x], chain(x, 3)
    yield [x], topi.log(chain(x, 1) + 1.0)
    first = chain(x, 1)
    second = chain(first * 0.5, 2)
    yield [x], topi.exp(first - second) * second + first
    yield (
        [x],
        te.compute((7, 19), lambda i, j: tirx.Select(x[i, j] > 0, chain(x, 1)[i, j], x[i, j])),
    )
    yield [x], topi.sum(chain(x, 2), 0)
    yield [x], topi.exp(chain(topi.sum(topi.exp(chain(x, 1)), 1), 1))


def symbolic():
    x, y = tensor(N, 12, 5), tensor(12, 1)
    yield [x, y], topi.nn.relu(topi.add(x, y))
    yield [x], topi.exp(x)
    empty = tensor(N, 0)
    yield [empty], topi.sum(empty, 0)
    for axes in (0, 1, 2, (1, 2), (0, 2), None):
        yield [x], topi.sum(x, axes)
    x = tensor(12, N)
    yield [x], topi.transpose(x)
    yield [x], topi.sum(x, 1)
    yield [x], topi.sum(x, 0)
    yield [x], topi.nn.softmax(x)
    x, places = tensor(N, 8), tensor(N, dtype="int64")
    along = te.reduce_axis((0, N))
    chosen = x[along, tirx.floormod(places[along], 8)]
    yield [x, places], te.compute((), lambda: te.sum(chosen, along))


def random(rng, shape, dtype):
    if dtype == "bool":
        return rng.random(shape) < 0.97
    if dtype.startswith("int"):
        return rng.integers(-4, 5, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def check(cases, target, cpu=None, *extents):
    """Compare functions with and without schedules, all compiled together."""
    cases, cpu, functions = list(cases), cpu or CPU.of(target), {}
    rng = np.random.default_rng(0)  # the same numbers in any order of tests
    for i, (inputs, output) in enumerate(cases):
        function = te.create_prim_func([*inputs, output])
        functions[f"plain{i}"] = function
        functions[f"scheduled{i}"] = schedule(function, cpu)
    module = tvm.IRModule(
        {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    # Argument assertions are half of a function's code.
    with without_assertions():
        compiled = tvm.compile(module, target)
    for i, (inputs, output) in enumerate(cases):
        for n in extents or (0,):
            shapes = [
                [int(e) if isinstance(e, tirx.IntImm) else n for e in each.shape]
                for each in (*inputs, output)
            ]
            dtypes = [str(each.dtype) for each in (*inputs, output)]
            arrays = [random(rng, s, d) for s, d in zip(shapes[:-1], dtypes[:-1], strict=True)]
            arrays = list(map(tvm.runtime.tensor, arrays))
            plain, scheduled = (
                tvm.runtime.tensor(np.ones(shapes[-1], dtypes[-1])) for _ in range(2)
            )
            compiled[f"plain{i}"](*arrays, plain)
            compiled[f"scheduled{i}"](*arrays, scheduled)
            if extents and not n:  # a reduction over no elements: the loops do not even store 0
                continue
            # Sums in half precision depend on the order of the terms.
            tolerance = 0.2 if "float16" in dtypes else 1e-4
            np.testing.assert_allclose(
                scheduled.numpy().astype("float64"),
                plain.numpy().astype("float64"),
                tolerance,
                tolerance,
                err_msg=f"{output} {shapes}",
            )


@each_target
@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("cases", [elements, functions, moves, sums])
def test_same_results(cases, target):
    check(cases(), target)


@each_target
@pytest.mark.usefixtures("sizes")
def test_symbolic_extents(target):
    check(symbolic(), target, None, 0, 1, 3, 37)


def test_sums_do_not_depend_on_the_number_of_cores():
    x = tensor(50, 1300)
    function = te.create_prim_func([x, topi.sum(x)])
    found = []
    value = tvm.runtime.tensor(random(np.random.default_rng(0), (50, 1300), "float32"))
    for cores in (1, 2, 7):
        compiled = tvm.compile(schedule(function, CPU(4, 16, cores)), "llvm")
        result = tvm.runtime.tensor(np.zeros((), "float32"))
        compiled["main"](value, result)
        found.append(result.numpy().tobytes())
    assert len(set(found)) == 1


def loops(function):
    """Return the kinds and extents of the loops of a function, from the outside in."""
    found = []
    tvm_ffi.structural_walk(
        function.body, (tirx.For, lambda loop: found.append((loop.kind, loop.extent))), order="pre"
    )
    return [
        (tirx.ForKind(kind).name, int(n) if isinstance(n, tirx.IntImm) else None)
        for kind, n in found
    ]


def test_axes_that_lie_in_a_row_are_one():
    x, y = tensor(64, 100, 7, 7), tensor(64, 100, 7, 7)
    function = te.create_prim_func([x, y, topi.add(x, y)])
    pieces, piece = loops(schedule(function, CPU(16, 32, 2)))
    assert pieces == ("PARALLEL", 2)
    assert piece == ("SERIAL", 64 * 100 * 49 // 2)


def test_a_chain_is_one_loop():
    x, y = tensor(64, 100, 7, 7), tensor(1, 100, 1, 1)
    chain = topi.nn.relu(topi.multiply(topi.add(x, y), y))
    found = loops(schedule(te.create_prim_func([x, y, chain]), CPU(16, 32, 2)))
    assert found == [("PARALLEL", 64), ("SERIAL", 100), ("SERIAL", 49)]


def test_little_work_is_serial():
    x = tensor(10, 20)
    for output in (topi.exp(x), topi.sum(x, 1), topi.sum(x), topi.transpose(x)):
        found = loops(schedule(te.create_prim_func([x, output]), CPU(16, 32, 2)))
        assert "PARALLEL" not in [kind for kind, _ in found]


@pytest.mark.parametrize("axes", [None, 0, (0, 2)])
def test_a_sum_of_much_is_parallel(axes):
    x = tensor(64, 100, 49)
    found = loops(schedule(te.create_prim_func([x, topi.sum(x, axes)]), CPU(16, 32, 2)))
    kinds = [kind for kind, _ in found]
    assert "PARALLEL" in kinds
    assert "VECTORIZED" in kinds


@pytest.mark.parametrize("rows", [40000, N], ids=["static", "symbolic"])
def test_selections_are_made_of_what_has_been_loaded(rows):
    """LLVM compiles a load within a selection to a gather, which is several times slower."""
    x, y, z = (tensor(rows, 5, name=name) for name in "xyz")
    where = topi.where(topi.greater(x, tirx.const(0, "float32")), y, z)
    function = schedule(te.create_prim_func([x, y, z, where]), CPU(16, 32, 2))
    selections = []
    tvm_ffi.structural_walk(function.body, (tirx.Select, selections.append))
    assert selections
    for select in selections:
        assert isinstance(select.true_value, tirx.Var)
        assert isinstance(select.false_value, tirx.Var)


def test_what_may_lie_outside_is_loaded_where_it_is_selected():
    x = tensor(40000)
    guarded = te.compute(
        (40000,),
        lambda i: tirx.Select(i >= 5, x[i - 5], tirx.const(0, "float32")),
    )
    function = schedule(te.create_prim_func([x, guarded]), CPU(16, 32, 2))
    selections = []
    tvm_ffi.structural_walk(function.body, (tirx.Select, selections.append))
    assert all(not isinstance(select.true_value, tirx.Var) for select in selections)


def test_a_concatenation_has_one_loop_for_each_operand():
    extents = (128, 64, 128, 64, 128, 32, 5)
    operands = [tensor(64, extent) for extent in extents]
    function = te.create_prim_func([*operands, topi.concatenate(operands, 1)])
    rows, *found = loops(schedule(function, CPU(16, 32, 2)))
    assert rows == ("PARALLEL", 64)
    assert found == [("SERIAL", extent) for extent in extents]


@pytest.mark.parametrize("factor", [-3, -1, 1, 2])
@pytest.mark.parametrize("compare", [np.less, np.less_equal])
def test_where_an_inequality_changes(factor, compare):
    x = np.arange(-60, 60)
    for rest in range(-20, 20):
        holds = compare(factor * x + rest, 0)
        turn = _emit._turn(factor, rest, compare is np.less_equal)
        assert turn == x[np.flatnonzero(holds != holds[0])[0]]
