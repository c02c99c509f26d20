"""Scheduled functions compute the same values as the original loops, in parallel and in vectors."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from machines import each_target
from tvm import te, tirx, topi
from tvm.script import tirx as T

from relax_grad.cpu.schedule import _elements, _reduce, _stream, schedule
from relax_grad.cpu.target import CPU
from relax_grad.ir.compat import BufferLoad, loaded_buffer
from relax_grad.ir.expressions import variables
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
        monkeypatch.setattr(_elements, "SMALL", 2)
        monkeypatch.setattr(_reduce, "_PIECE", 2)
        monkeypatch.setattr(_elements, "LINE", 4)
        monkeypatch.setattr(_stream, "LARGE", 2)


def extents(*shape):
    return [tirx.IntImm("int64", n) if isinstance(n, int) else n for n in shape]


def tensor(*shape, dtype="float32", name="x"):
    return te.placeholder(extents(*shape), dtype, name)


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
    """Yield nested element-wise functions: TVM would inline each of them into the next at every
    use."""

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


def enlargements(factor, columns):
    x, y = tensor(6, -(-columns // factor)), tensor(6, columns)
    zero = tirx.const(0, "float32")

    def dilated(i, j):
        return tirx.if_then_else(j % factor == factor - 1, x[i, j // factor], zero)

    def chosen(i, j):
        is_other = tirx.all(i // 2 * 2 == i, y[i, j] > 0)
        return tirx.if_then_else(is_other, x[i, j // factor] + y[i, j], y[i, j])

    yield [x], te.compute(extents(6, columns), lambda i, j: x[i, j // factor] * 2.0)
    yield [x], te.compute(extents(6, columns), dilated)
    yield [x, y], te.compute(extents(6, columns), chosen)
    yield [x], te.compute(extents(6, columns), lambda i, j: tirx.exp(x[i, j // factor]))


def number(dtype):
    x = tensor(3, 50, dtype=dtype)
    return [x], te.compute(extents(3, 100), lambda i, j: x[i, j // 2] + x[i, (j + 1) // 2 % 50])


def enlarged():
    """Yield functions whose innermost index is a quotient: enlarged, dilated and interleaved
    tensors."""
    for factor, columns in ((2, 100), (2, 33), (3, 101), (4, 140), (8, 300), (9, 300)):
        yield from enlargements(factor, columns)
    for dtype in ("float64", "float16", "int32", "int8"):
        yield number(dtype)
    x = tensor(2, 3, 40)
    yield [x], te.compute(extents(2, 3, 80), lambda n, i, j: x[n, i, tirx.min((j + 1) // 2, 39)])
    yield [x], te.compute((3, 80), lambda i, j: x[j % 2, i, j // 2])
    x, y = tensor(6, 64), tensor(6, 64)
    mask = te.compute(extents(6, 64), lambda i, j: (x[i, j] == y[i, j]).astype("float32"))
    yield [x, y], topi.add(topi.multiply(mask, x), mask)
    yield rotated(16)
    yield rotated(50)
    y = tensor(5, 64)
    yield [y], te.compute(extents(5, 64), lambda i, j: y[i, j // 16 * 16 + (j % 16 + 8) % 16])
    # A divisor of 0 where the branch is not taken.
    z = tensor(3, 40, dtype="int32")
    safe = te.compute((3, 80), lambda i, j: tirx.if_then_else(
        z[i, j // 2] != 0, tirx.truncdiv(7, z[i, j // 2]), 1))  # fmt: skip
    yield [z], safe


def scanned():
    """Yield functions of scans, along the last axis or another one, beside element-wise
    functions."""
    x = tensor(37, 41)
    yield [x], topi.cumsum(x, 1)
    yield [x], topi.cumsum(x, 0)
    yield [x], topi.exp(topi.cumsum(topi.multiply(x, x), 1) * -0.1)
    yield [x], topi.cumprod(topi.tanh(x), 1)
    yield [x], topi.cumsum(x)
    for dtype in ("float64", "int32", "int64"):
        x = tensor(5, 30, dtype=dtype)
        yield [x], topi.cumsum(x, 1)


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
    x, across = tensor(N, 40), te.reduce_axis((0, 40))
    yield [x], te.compute((), lambda: te.sum(x[along, across], [across, along]))


def random(rng, shape, dtype):
    if dtype == "bool":
        return rng.random(shape) < 0.97
    if dtype.startswith("int"):
        return rng.integers(-4, 5, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def check(cases, target, cpu=None, *sizes):
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
        for n in sizes or (0,):
            shapes = [
                [int(e) if isinstance(e, tirx.IntImm) else n for e in buffer.shape]
                for buffer in (*inputs, output)
            ]
            dtypes = [str(buffer.dtype) for buffer in (*inputs, output)]
            arrays = [random(rng, s, d) for s, d in zip(shapes[:-1], dtypes[:-1], strict=True)]
            arrays = list(map(tvm.runtime.tensor, arrays))
            plain, scheduled = (
                tvm.runtime.tensor(np.ones(shapes[-1], dtypes[-1])) for _ in range(2)
            )
            compiled[f"plain{i}"](*arrays, plain)
            compiled[f"scheduled{i}"](*arrays, scheduled)
            if sizes and not n:  # a reduction over no elements: the loops do not even store 0
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
@pytest.mark.parametrize("cases", [elements, enlarged, functions, moves, scanned, sums])
def test_same_results(cases, target):
    check(cases(), target)


@each_target
@pytest.mark.usefixtures("sizes")
def test_symbolic_extents(target):
    check(symbolic(), target, None, 0, 1, 3, 37)


def test_sums_do_not_depend_on_the_number_of_cores():
    x = tensor(50, 1300)
    function = te.create_prim_func([x, topi.sum(x)])
    results = []
    value = tvm.runtime.tensor(random(np.random.default_rng(0), (50, 1300), "float32"))
    for cores in (1, 2, 7):
        compiled = tvm.compile(schedule(function, CPU(4, 16, cores)), "llvm")
        result = tvm.runtime.tensor(np.zeros((), "float32"))
        compiled["main"](value, result)
        results.append(result.numpy().tobytes())
    assert len(set(results)) == 1


def loops(function):
    """Return the kinds and extents of the loops of a function, from the outside in."""
    all_loops = []
    tvm_ffi.structural_walk(
        function.body,
        (tirx.For, lambda loop: all_loops.append((loop.kind, loop.extent))),
        order="pre",
    )
    return [
        (tirx.ForKind(kind).name, int(n) if isinstance(n, tirx.IntImm) else None)
        for kind, n in all_loops
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
    nest = loops(schedule(te.create_prim_func([x, y, chain]), CPU(16, 32, 2)))
    assert nest == [("PARALLEL", 64), ("SERIAL", 100), ("SERIAL", 49)]


def test_little_work_is_serial():
    x = tensor(10, 20)
    for output in (topi.exp(x), topi.sum(x, 1), topi.sum(x), topi.transpose(x)):
        nest = loops(schedule(te.create_prim_func([x, output]), CPU(16, 32, 2)))
        assert "PARALLEL" not in [kind for kind, _ in nest]


@pytest.mark.parametrize("axes", [None, 0, (0, 2)])
def test_a_sum_of_much_is_parallel(axes):
    x = tensor(64, 100, 49)
    nest = loops(schedule(te.create_prim_func([x, topi.sum(x, axes)]), CPU(16, 32, 2)))
    kinds = [kind for kind, _ in nest]
    assert "PARALLEL" in kinds
    assert "VECTORIZED" in kinds


@pytest.mark.parametrize("rows", [40000, N], ids=["static", "symbolic"])
def test_operands_of_selections_are_loaded_first(rows):
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


def test_guarded_loads_stay_in_their_selection():
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
    rows, *nests = loops(schedule(function, CPU(16, 32, 2)))
    assert rows == ("PARALLEL", 64)
    assert nests == [("SERIAL", extent) for extent in extents]


def test_an_enlarged_image_is_stored_in_vectors():
    x = tensor(64, 56, 28)
    image = te.compute(extents(64, 56, 56), lambda n, i, j: x[n, i, j // 2])
    function = schedule(te.create_prim_func([x, image]), CPU(16, 32, 2))
    stores = []
    tvm_ffi.structural_walk(function.body, (tirx.Shuffle, stores.append))
    assert sorted(len(store.indices) for store in stores) == [24, 32]


def rotated(columns):
    """Return the gradient of a rotary embedding: halves of 4 elements change places."""
    x = tensor(8, columns)
    zero = tirx.const(0, "float32")

    def moved(i, j):
        first = tirx.if_then_else(j % 4 < 2, x[i, j // 4 * 4 + j % 4 + 2], zero)
        return first - tirx.if_then_else(j % 4 >= 2, x[i, j // 4 * 4 + j % 4 - 2], zero)

    return [x], te.compute(extents(8, columns), moved)


@pytest.mark.parametrize("columns", [16, 18, 4000, N], ids=str)
def test_no_loop_divides_its_innermost_index(columns):
    """LLVM's vectors read other elements where the remainder of the index by a few lanes is taken
    (znver4, level 2)."""
    if columns is N:
        inputs = [tensor(8, N)]
        shape = extents(8, N)
        output = te.compute(shape, lambda i, j: inputs[0][i, j // 4 * 4 + tirx.min(j % 4, 1)])
    else:
        inputs, output = rotated(columns)
    function = schedule(te.create_prim_func([*inputs, output]), CPU(16, 32, 2))
    divided = []

    def visit(loop) -> None:
        inner, divisions = [], []
        tvm_ffi.structural_walk(loop.body, (tirx.For, inner.append))
        if inner:
            return
        tvm_ffi.structural_walk(
            loop.body, ((tirx.FloorDiv, tirx.FloorMod), divisions.append), order="pre"
        )
        divided.extend(division for division in divisions if loop.loop_var in variables(division))

    tvm_ffi.structural_walk(function.body, (tirx.For, visit), order="pre")
    assert not divided


def reversed_scan():
    """Return the adjoint of a cumulative sum: each iteration adds to the element that the next one
    reads."""

    @T.prim_func(s_tir=True)
    def function(g: T.Buffer((300, 200), "float32"), x: T.Buffer((300, 200), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i in range(300):
            with T.sblock("scan"):
                row = T.axis.spatial(300, i)
                for k in range(199):
                    here: T.let[T.float32] = g[row, 199 - k]
                    g[row, 199 - k] = 0.0
                    g[row, 198 - k] = g[row, 198 - k] + here
                    x[row, 199 - k] = x[row, 199 - k] + here

    return function


def test_a_scan_is_parallel_and_carries_its_value():
    function = schedule(reversed_scan(), CPU(16, 32, 2))
    assert loops(function) == [("PARALLEL", 300), ("SERIAL", 199)]
    loads = []
    tvm_ffi.structural_walk(
        function.body, (BufferLoad, lambda load: loads.append(loaded_buffer(load).name))
    )
    assert loads.count("carry") == 1
    rng = np.random.default_rng(0)
    g, x = (rng.normal(size=(300, 200)).astype("float32") for _ in range(2))
    expected = x.copy()
    expected[:, 1:] += np.cumsum(g[:, ::-1], 1)[:, ::-1][:, 1:]
    tensors = [tvm.runtime.tensor(array) for array in (g, x)]
    tvm.compile(function, "llvm")["function"](*tensors)
    np.testing.assert_allclose(tensors[1].numpy(), expected, 1e-4, 1e-4)
    np.testing.assert_allclose(tensors[0].numpy()[:, 1:], 0)
    np.testing.assert_allclose(tensors[0].numpy()[:, 0], g.sum(1), 1e-4, 1e-4)


@pytest.mark.parametrize("factor", [-3, -1, 1, 2])
@pytest.mark.parametrize("compare", [np.less, np.less_equal])
def test_where_an_inequality_changes(factor, compare):
    x = np.arange(-60, 60)
    for rest in range(-20, 20):
        holds = compare(factor * x + rest, 0)
        turn = _elements._turn(factor, rest, compare is np.less_equal)
        assert turn == x[np.flatnonzero(holds != holds[0])[0]]
