"""Hand-written functions whose loops keep the order that their dependences require."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from machines import each_target
from tvm import te, tirx
from tvm.script import tirx as T

from relax_grad.cpu.schedule import _elements, _reduce, schedule
from relax_grad.cpu.schedule._dependence import are_disjoint
from relax_grad.cpu.schedule._nest import Axis, nests_of
from relax_grad.cpu.target import CPU


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Make loops over few elements parallel too."""
    monkeypatch.setattr(_elements, "SMALL", 2)
    monkeypatch.setattr(_reduce, "_PIECE", 2)
    monkeypatch.setattr(_elements, "LINE", 4)


@T.prim_func(private=True, s_tir=True)
def padded(A: T.Buffer((40,), "float32"), D: T.Buffer((60,), "float32")):
    C = T.sblock_alloc_buffer((60,), "float32")
    for i in range(60):
        with T.sblock("zero"):
            vi = T.axis.spatial(60, i)
            C[vi] = T.float32(0)
    for i in range(40):
        with T.sblock("copy"):
            vi = T.axis.spatial(40, i)
            C[vi + 10] = A[vi]
    for i in range(60):
        with T.sblock("out"):
            vi = T.axis.spatial(60, i)
            D[vi] = C[vi] * T.float32(2)


@T.prim_func(private=True, s_tir=True)
def concatenated(A: T.Buffer((40,), "float32"), D: T.Buffer((80,), "float32")):
    C = T.sblock_alloc_buffer((80,), "float32")
    for i in range(40):
        with T.sblock("first"):
            vi = T.axis.spatial(40, i)
            C[vi] = A[vi]
    for i in range(40):
        with T.sblock("second"):
            vi = T.axis.spatial(40, i)
            C[vi + 40] = -A[vi]
    for i in range(80):
        with T.sblock("out"):
            vi = T.axis.spatial(80, i)
            D[vi] = C[vi] * T.float32(2)


@T.prim_func(private=True, s_tir=True)
def accumulated(A: T.Buffer((40, 9), "float32"), D: T.Buffer((40,), "float32")):
    C = T.sblock_alloc_buffer((40,), "float32")
    for i in range(40):
        with T.sblock("zero"):
            vi = T.axis.spatial(40, i)
            C[vi] = T.float32(1)
    for i, k in T.grid(40, 9):
        with T.sblock("add"):
            vi, vk = T.axis.remap("SR", [i, k])
            C[vi] = C[vi] + A[vi, vk]
    for i in range(40):
        with T.sblock("again"):
            vi = T.axis.spatial(40, i)
            C[vi] = C[vi] * T.float32(3) + A[vi, 2]
    for i in range(40):
        with T.sblock("out"):
            vi = T.axis.spatial(40, i)
            D[vi] = C[vi] - C[39 - vi]


@T.prim_func(private=True, s_tir=True)
def ping_pong(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    B = T.sblock_alloc_buffer((40,), "float32")
    C = T.sblock_alloc_buffer((40,), "float32")
    for i in range(40):
        with T.sblock("b"):
            vi = T.axis.spatial(40, i)
            B[vi] = A[vi] + T.float32(1)
    for i in range(40):
        with T.sblock("c"):
            vi = T.axis.spatial(40, i)
            C[vi] = B[39 - vi] * T.float32(2)
    for i in range(40):
        with T.sblock("b_again"):
            vi = T.axis.spatial(40, i)
            B[vi] = C[vi] + A[vi]
    for i in range(40):
        with T.sblock("out"):
            vi = T.axis.spatial(40, i)
            D[vi] = B[vi] + C[vi]


@T.prim_func(private=True, s_tir=True)
def partly_covered(A: T.Buffer((16, 8), "float32"), D: T.Buffer((16, 8), "float32")):
    for i, j in T.grid(16, 8):
        with T.sblock("all"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = T.float32(7)
    for i, j in T.grid(8, 5):
        with T.sblock("part"):
            vi = T.axis.spatial(16, i)
            vj = T.axis.spatial(8, j)
            D[vi, vj] = A[vi, vj] + D[vi, vj]


@T.prim_func(private=True, s_tir=True)
def shorter_reduction(A: T.Buffer((16, 8), "float32"), D: T.Buffer((16,), "float32")):
    for i, k in T.grid(16, 5):
        with T.sblock("sum"):
            vi = T.axis.spatial(16, i)
            vk = T.axis.reduce(8, k)
            with T.init():
                D[vi] = T.float32(0)
            D[vi] = D[vi] + A[vi, vk]


@T.prim_func(private=True, s_tir=True)
def falsely_spatial(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    for i in range(40):
        with T.sblock("copy"):
            vi = T.axis.spatial(40, i)
            D[vi] = A[vi]
    for i in range(39):
        with T.sblock("scan"):
            vi = T.axis.spatial(39, i)
            D[vi + 1] = D[vi + 1] + D[vi]


@T.prim_func(private=True, s_tir=True)
def last_one_wins(A: T.Buffer((20, 30), "float32"), D: T.Buffer((20,), "float32")):
    for j, i in T.grid(30, 20):
        with T.sblock("copy"):
            vj, vi = T.axis.remap("SS", [j, i])
            D[vi] = A[vi, vj]


@T.prim_func(private=True, s_tir=True)
def turned_in_place(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    B = T.sblock_alloc_buffer((40,), "float32")
    for i in range(40):
        with T.sblock("copy"):
            vi = T.axis.spatial(40, i)
            D[vi] = A[vi]
    for i in range(40):
        with T.sblock("keep"):
            vi = T.axis.spatial(40, i)
            B[vi] = D[vi] + T.float32(1)
    for i in range(40):
        with T.sblock("turn"):
            vi = T.axis.spatial(40, i)
            D[vi] = B[39 - vi]


@T.prim_func(private=True, s_tir=True)
def read_before_written(A: T.Buffer((40,), "float32"), D: T.Buffer((41,), "float32")):
    X = T.sblock_alloc_buffer((40,), "float32")
    for i in range(40):
        with T.sblock("x"):
            vi = T.axis.spatial(40, i)
            X[vi] = A[vi]
    for k in range(40):
        with T.sblock("sum"):
            vk = T.axis.reduce(40, k)
            with T.init():
                D[40] = T.float32(0)
            D[40] = D[40] + X[vk]
    for i in range(40):
        with T.sblock("change"):
            vi = T.axis.spatial(40, i)
            X[vi] = X[vi] + A[vi]
    for i in range(40):
        with T.sblock("out"):
            vi = T.axis.spatial(40, i)
            D[vi] = X[vi]


@T.prim_func(private=True, s_tir=True)
def named_values(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    B = T.sblock_alloc_buffer((40,), "float32")
    x = T.float32()
    for i in range(40):
        with T.sblock("b"):
            vi = T.axis.spatial(40, i)
            B[vi] = T.Let(x * x + x, where={x: A[vi] + T.float32(1)})
    for i in range(40):
        with T.sblock("out"):
            vi = T.axis.spatial(40, i)
            D[vi] = B[vi] + B[39 - vi]


@T.prim_func(private=True, s_tir=True)
def scattered(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    P = T.sblock_alloc_buffer((40,), "int32")
    for i in range(40):
        with T.sblock("places"):
            vi = T.axis.spatial(40, i)
            P[vi] = T.floormod(vi * 7, 5)
    for i in range(40):
        with T.sblock("zero"):
            vi = T.axis.spatial(40, i)
            D[vi] = T.float32(0)
    for i in range(40):
        with T.sblock("add"):
            vi = T.axis.spatial(40, i)
            D[P[vi]] = D[P[vi]] + A[vi]


@T.prim_func(private=True, s_tir=True)
def two_in_a_block(A: T.Buffer((40, 9), "float32"), D: T.Buffer((40,), "float32")):
    C = T.sblock_alloc_buffer((40,), "float32")
    for i, k in T.grid(40, 9):
        with T.sblock("most"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(-100)
                D[vi] = T.float32(-1)
            if A[vi, vk] > C[vi]:
                D[vi] = T.Cast("float32", vk)
                C[vi] = A[vi, vk]


@T.prim_func(private=True, s_tir=True)
def loops_of_its_own(A: T.Buffer((40, 9), "float32"), D: T.Buffer((40, 9), "float32")):
    for i in range(40):
        with T.sblock("rows"):
            vi = T.axis.spatial(40, i)
            D[vi, 0] = A[vi, 0]
            for k in range(8):
                D[vi, k + 1] = D[vi, k] + A[vi, k + 1]


@T.prim_func(private=True, s_tir=True)
def gathered_beside_a_constant(A: T.Buffer((4,), "float32"), D: T.Buffer((20,), "float32")):
    """TVM's schedules cannot analyse the region that the second block reads."""
    B = T.sblock_alloc_buffer((4, 5), "float32")
    P = T.sblock_alloc_buffer((4,), "int32")
    for i in range(5):
        with T.sblock("b"):
            vi = T.axis.spatial(5, i)
            B[0, vi] = A[0]
    for i, j in T.grid(3, 5):
        with T.sblock("rest"):
            vi = T.axis.spatial(3, i)
            vj = T.axis.spatial(5, j)
            B[vi + 1, vj] = A[vi + 1]
    for i in range(4):
        with T.sblock("p"):
            vi = T.axis.spatial(4, i)
            P[vi] = T.floormod(vi * 3, 4)
    for i in range(20):
        with T.sblock("read"):
            vi = T.axis.spatial(4, T.floordiv(i, 5))
            vj = T.axis.spatial(5, T.floormod(i, 5))
            D[vi * 5 + vj] = T.if_then_else(vi < 1, B[0, 0], B[P[vj % 4], 0])


@T.prim_func(private=True, s_tir=True)
def constants_out_of_range(A: T.Buffer((40,), "float32"), D: T.Buffer((40,), "float32")):
    """TVM refuses to fold a cast of a constant that is out of range for the target dtype."""
    B = T.sblock_alloc_buffer((40,), "int64")
    C = T.sblock_alloc_buffer((40,), "int32")
    for i in range(40):
        with T.sblock("b"):
            vi = T.axis.spatial(40, i)
            B[vi] = T.int64(-3)
    for i in range(40):
        with T.sblock("c"):
            vi = T.axis.spatial(40, i)
            C[vi] = 300
    for i in range(40):
        with T.sblock("out"):
            vi = T.axis.spatial(40, i)
            D[vi] = (
                A[vi]
                + T.Cast("float32", T.Cast("uint8", B[vi]))
                + T.Cast("float32", T.Cast("int8", C[vi]) + T.Cast("int8", T.Cast("bool", C[vi])))
            )


FUNCTIONS = [
    constants_out_of_range,
    gathered_beside_a_constant,
    padded,
    concatenated,
    accumulated,
    ping_pong,
    partly_covered,
    shorter_reduction,
    falsely_spatial,
    last_one_wins,
    turned_in_place,
    read_before_written,
    named_values,
    scattered,
    two_in_a_block,
    loops_of_its_own,
]


@each_target
def test_results_are_those_of_the_loops_as_written(target):
    functions = {}
    for function in FUNCTIONS:
        name = function.__name__
        functions[f"{name}_plain"] = function
        functions[f"{name}_scheduled"] = schedule(function, CPU.of(target))
    compiled = tvm.compile(
        tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()}),
        target,
    )
    rng = np.random.default_rng(0)
    for function in FUNCTIONS:
        shapes = [[int(extent) for extent in param.shape] for param in function.params]
        # Sums of small integers are exact in any order.
        taken = rng.integers(-9, 10, shapes[0]).astype("float32")
        results = []
        for kind in ("plain", "scheduled"):
            results.append(tvm.runtime.tensor(np.full(shapes[1], -5, "float32")))
            compiled[f"{function.__name__}_{kind}"](tvm.runtime.tensor(taken), results[-1])
        plain, scheduled = (result.numpy() for result in results)
        np.testing.assert_array_equal(scheduled, plain, function.__name__)


def kinds(function):
    loops = []
    tvm_ffi.structural_walk(function.body, (tirx.For, lambda loop: loops.append(loop.kind)))
    return [tirx.ForKind(kind).name for kind in loops]


@pytest.mark.parametrize("function", [padded, concatenated, partly_covered])
def test_independent_iterations_are_parallel(function):
    assert "PARALLEL" in kinds(schedule(function, CPU(4, 16, 2)))


@pytest.mark.parametrize("function", [last_one_wins])
def test_dependent_iterations_are_serial(function):
    assert "PARALLEL" not in kinds(schedule(function, CPU(4, 16, 2)))


def test_axes_that_are_only_named_spatial_make_no_nest():
    for function in (falsely_spatial, last_one_wins, scattered):
        assert nests_of(function) is None
    for function in (padded, concatenated, ping_pong, partly_covered, shorter_reduction):
        assert nests_of(function) is not None


def test_constants_go_into_casts():
    """The function becomes one loop without buffers of constants, and TVM folds the casts."""
    assert nests_of(constants_out_of_range) is not None
    scheduled = schedule(constants_out_of_range, CPU(4, 16, 2))
    assert not scheduled.body.block.alloc_buffers
    constants = []
    tvm_ffi.structural_walk(
        scheduled.body, (tirx.FloatImm, lambda node: constants.append(node.value))
    )
    assert sorted(constants) == [45, 253]


ROW, COLUMN, OTHER = (tirx.Var(name, "int64") for name in "ijk")


@pytest.mark.parametrize(
    ("accesses", "expected"),
    [
        ([[ROW, COLUMN]], True),
        ([[COLUMN + 3, ROW * -2]], True),
        ([[ROW * 5 + COLUMN]], True),
        ([[COLUMN * 4 + ROW]], True),
        ([[ROW * 4 + COLUMN]], False),
        ([[ROW + COLUMN]], False),
        ([[ROW]], False),
        ([[ROW, ROW + COLUMN]], True),
        ([[ROW // 2, COLUMN]], False),
        ([[ROW, COLUMN * 0]], False),
        ([[ROW * COLUMN, COLUMN]], False),
        ([[ROW, COLUMN], [ROW, COLUMN]], True),
        ([[ROW, COLUMN], [ROW, COLUMN + 1]], False),
        ([[ROW, COLUMN, 0], [ROW, COLUMN, 1]], True),
        ([[ROW + OTHER, COLUMN]], False),
    ],
)
def test_disjoint_iterations(accesses, expected):
    axes = [Axis(ROW, tirx.IntImm("int64", 4)), Axis(COLUMN, tirx.IntImm("int64", 5))]
    assert are_disjoint(accesses, axes) is expected


def test_axes_of_symbolic_extent_are_disjoint_in_dimensions_of_their_own():
    n = tirx.Var("n", "int64")
    axes = [Axis(ROW, n), Axis(COLUMN, tirx.IntImm("int64", 5))]
    assert are_disjoint([[ROW, COLUMN]], axes)
    assert are_disjoint([[ROW * 5 + COLUMN]], axes)
    assert not are_disjoint([[ROW + COLUMN * n]], axes)
    assert not are_disjoint([[ROW + COLUMN * 9]], axes)


@each_target
def test_sums_of_operands_that_repeat_with_a_power_of_two(target):
    """LLVM vectorizes such sums side by side with loads past the period, which may be out of
    bounds."""
    periods, dtypes = (2, 3, 4, 8, 16, 32), ("float32", "int64", "int8")

    def sums(dtype, period):
        x, r = te.placeholder((64, period), dtype, name="x"), te.reduce_axis((0, 64), "r")
        y = te.compute((256,), lambda i: te.sum(x[r, i % period].astype("float32"), r))
        return te.create_prim_func([x, y])

    functions = {f"{dtype}_{n}": sums(dtype, n) for n in periods for dtype in dtypes}
    scheduled = {
        name: schedule(function, CPU.of(target)).with_attr("global_symbol", name)
        for name, function in functions.items()
    }
    compiled = tvm.compile(tvm.IRModule(scheduled), target)
    rng = np.random.default_rng(0)
    for period in periods:
        for dtype in dtypes:
            taken = rng.integers(-9, 10, (64, period)).astype(dtype)
            result = tvm.runtime.empty((256,), "float32")
            compiled[f"{dtype}_{period}"](tvm.runtime.tensor(taken), result)
            wanted = taken.astype("float32").sum(0)[np.arange(256) % period]
            np.testing.assert_array_equal(result.numpy(), wanted, f"{dtype} {period}")
