"""The building blocks of kernels: vectors, their parts, transposes and folds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import tvm
from machines import Run, each_target, run_kernels
from tvm import tirx

from relax_grad.cpu.codegen import lower
from relax_grad.cpu.kernel.conv.direct import conv2d
from relax_grad.cpu.kernel.conv.geometry import Conv2d
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.builder import Accumulators, Vectors
from relax_grad.cpu.kernel.language.row_sums import Sums
from relax_grad.cpu.kernel.matmul._ways import product_tile
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.kernel.matmul.tile import multiply_add
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import AVX2, ICE_LAKE, ZEN4

LANES = 4


def run(body, inputs, output, target="llvm", symbolic=()):
    """Return the output of a function of flat buffers; ``symbolic`` names extents of the first
    input."""
    (result,) = run_together([(body, inputs, output, symbolic)], target)
    return result


def run_together(functions, target="llvm"):
    """Return the outputs of several functions, compiled together."""
    runs = []
    for body, inputs, output, symbolic in functions:
        shapes = [array.shape for array in inputs]
        if symbolic:
            shapes[0] = symbolic
        params = [
            (f"x{i}", shape, array.dtype.name)
            for i, (shape, array) in enumerate(zip(shapes, inputs, strict=True))
        ]
        function = b.prim_func("function", [*params, ("y", output, "float32")], body)
        runs.append(Run(function, inputs, [output]))
    return [result for (result,) in run_kernels(runs, tvm.target.Target(target))]


def lowered(function):
    """Return the script of a kernel as LLVM's code generator takes it."""
    target = lower.optimizing(tvm.target.Target({"kind": "llvm", "mcpu": "haswell"}))
    mod = tvm.IRModule.from_expr(function.with_attr("global_symbol", "function"))
    return lower._lowered(mod, True, ["function"], target).script()


def numbers(*shape):
    return np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape)


@each_target
def test_transpose(target):
    lanes = CPU.of(target).lanes
    vectors, x = Vectors(lanes), numbers(lanes, lanes)

    def body(x, y):
        for i, column in enumerate(
            vectors.transpose([vectors.load(x, b.const(i * lanes)) for i in range(lanes)])
        ):
            vectors.store(y, b.const(i * lanes), column)

    assert np.array_equal(run(body, [x], x.shape, target), x.T)


@pytest.mark.parametrize("number", range(LANES + 1))
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_vectors(number, dynamic):
    """A partial load sets the other lanes to 0, and a partial store leaves them unchanged."""
    if number == 0 and not dynamic:
        return
    vectors = Vectors(LANES)

    def body(x, count, y):
        part = b.bind(count[0]) if dynamic else number
        vectors.store(y, b.const(0), vectors.load(x, b.const(0), part))
        vectors.store(y, b.const(LANES), vectors.splat(7.0))
        vectors.store(y, b.const(LANES), vectors.load(x, b.const(0)), part)
        vectors.store(y, b.const(2 * LANES), vectors.only(vectors.load(x, b.const(0)), part, -1.0))

    x = numbers(LANES)
    result = run(body, [x, np.array([number], "int32")], (3 * LANES,))
    exists = np.arange(LANES) < number
    wanted = [np.where(exists, x, other) for other in (0, 7, -1)]
    assert np.array_equal(result, np.concatenate(wanted))


@each_target
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_is_loaded_as_a_part(target, dynamic):
    """TVM assumes the condition of a Select within its value, which must not remove the mask of a
    load."""
    vectors = Vectors(CPU.of(target).lanes)

    def body(x, count, y):
        part = b.bind(count[0]) if dynamic else 3
        vectors.store(y, b.const(0), vectors.load(x, b.const(0), part))

    params = [("x", (64,), "float32"), ("n", (1,), "int32"), ("y", (64,), "float32")]
    function = b.prim_func("function", params, body).with_attr("global_symbol", "function")
    plain = {**dict(target.export()), "opt-level": 0}
    for settings in (plain, target):
        module = tvm.compile(tvm.IRModule({"function": function}), tvm.target.Target(settings))
        code = module.mod.inspect_source("ll")
        assert "splat (i1 true)" not in code
        assert "unmaskedload" not in code


@each_target
def test_each(target):
    """``Vectors.each`` visits every element once."""
    vectors = Vectors(CPU.of(target).lanes)

    def case(extent, unroll, symbolic):
        n = tirx.Var("n", "int32") if symbolic else extent

        def body(x, y):
            def double(offset, part, *_):
                vectors.store(y, offset, vectors.load(x, offset, part) * vectors.splat(2), part)

            vectors.each(n, double, unroll)

        return body, [numbers(extent)], (extent,), (n,)

    cases = list(itertools.product((1, 16, 37, 65, 150), (1, 4), (False, True)))
    for (extent, *_), result in zip(
        cases, run_together([case(*sizes) for sizes in cases], target), strict=True
    ):
        assert np.array_equal(result, 2 * numbers(extent))


@each_target
def test_copy_transposed(target):
    lanes = CPU.of(target).lanes
    vectors = Vectors(lanes)

    def case(rows, columns, symbolic):
        n = tirx.Var("n", "int32") if symbolic else columns
        height = max(lanes if rows is None else rows, 1)

        def body(x, y):
            left = None if rows is None else b.const(rows)
            vectors.copy_transposed((x, b.const(0), n), left, n, y, lambda k: k * lanes)

        return body, [numbers(height, columns)], (columns, lanes), (height, n)

    cases = list(itertools.product((None, 3), (7, 16, 35), (False,)))
    cases += [(None, 35, True), (0, 7, True), (1, 1, False)]
    for (rows, columns, _), result in zip(
        cases, run_together([case(*sizes) for sizes in cases], target), strict=True
    ):
        height = lanes if rows is None else rows
        wanted = np.zeros((columns, lanes), "float32")
        wanted[:, :height] = numbers(max(height, 1), columns)[:height].T
        assert np.array_equal(result, wanted)


@each_target
def test_evens_and_odds(target):
    lanes = CPU.of(target).lanes
    vectors, x = Vectors(lanes), numbers(2 * lanes)

    def body(x, y):
        halves = vectors.deinterleave([vectors.load(x, b.const(i * lanes)) for i in range(2)])
        for i, half in enumerate([*halves, *vectors.interleave(halves)]):
            vectors.store(y, b.const(i * lanes), half)

    result = run(body, [x], (4 * lanes,), target)
    assert np.array_equal(result, np.concatenate([x[::2], x[1::2], x]))


@each_target
def test_fold(target):
    lanes = CPU.of(target).lanes
    vectors, x = Vectors(lanes), np.roll(numbers(lanes), 3)

    def body(x, y):
        b.store(y, b.const(0), vectors.sum(vectors.load(x, b.const(0))))
        b.store(y, b.const(1), vectors.fold(vectors.load(x, b.const(0)), tirx.max))

    assert run(body, [x], (2,), target).tolist() == [lanes * (lanes + 1) / 2, lanes]


@pytest.mark.parametrize("extent", [1, 4, 18, 19])
def test_sums(extent):
    vectors, x = Vectors(LANES), numbers(extent) - 5

    def body(x, y):
        sums = Sums(vectors, 2)
        sums.add_row(
            extent, lambda o, n: [vectors.load(x, o, n), vectors.load(x, o, n) * vectors.splat(2)]
        )
        largest = Sums(vectors, start=float("-inf"), combine=tirx.max)
        largest.add_row(
            extent, lambda o, n: [vectors.only(vectors.load(x, o, n), n, float("-inf"))]
        )
        for i, total in enumerate([*sums.totals(), *largest.totals()]):
            b.store(y, b.const(i), total)

    assert run(body, [x], (3,)).tolist() == [x.sum(), 2 * x.sum(), x.max()]


def test_accumulators_beyond_one_buffer():
    vectors, size = Vectors(16), 40

    def body(x, y):
        every = Accumulators(vectors, size)
        for i in range(size):
            every[i] = vectors.load(x, b.const(16 * i))
        for i in range(size):
            vectors.store(y, b.const(16 * i), every[size - 1 - i] + every[i])

    x = numbers(size, 16)
    assert np.array_equal(run(body, [x], x.shape), x + x[::-1])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("part", [None, 3])
def test_a_tile(add, part):
    height, depth, width = 3, 5, 2 * LANES
    vectors = Vectors(LANES)

    def body(p, q, y):
        for i in range(0, height * width, LANES):
            vectors.store(y, b.const(i), vectors.splat(100.0))
        multiply_add(
            vectors,
            (height, 2),
            depth,
            lambda i, k: p[i * depth + k],
            lambda k, v: vectors.load(q, k * width + v * LANES),
            lambda i, v: (y, b.const(i * width + v * LANES), part if v == 1 else None),
            add=add,
        )

    p, q = numbers(height, depth), numbers(depth, width)
    wanted = p @ q + 100 * add
    if part:
        wanted[:, LANES + part :] = 100
    assert np.array_equal(run(body, [p, q], (height, width)), wanted)


@pytest.mark.parametrize(
    ("columns", "tile"),
    [
        *((16, (12, 1)), (17, (8, 2)), (32, (8, 2)), (33, (9, 3)), (64, (6, 4)), (96, (9, 3))),
        *(
            (768, (9, 3)),
            (448, (6, 4)),
            (512, (9, 3)),
            (1000, (9, 3)),
            (tirx.Var("n", "int32"), (8, 2)),
        ),
    ],
)
def test_tiles_of_intel(columns, tile):
    """Tiles are wide, if the product is, and wider if it has few steps for each store."""
    product, shallow = Matmul(256, columns, 256), Matmul(256, columns, 16)
    assert product_tile(product, ICE_LAKE) == tile
    writes_rows = isinstance(columns, int) and columns > 64
    assert product_tile(shallow, ICE_LAKE) == ((6, 4) if writes_rows else tile)
    assert product_tile(shallow, ICE_LAKE, by_rows=False) == tile
    if writes_rows:
        is_whole = columns % 16 == 0
        assert product_tile(replace(shallow, depth=8), ICE_LAKE) == ((8, 2) if is_whole else (6, 4))
    assert product_tile(product, ZEN4) == (8, 2)
    assert product_tile(product, AVX2) == (6, 2)


def test_ceil_div_and_floats():
    assert [b.ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert b.count(()) == 1
    assert b.floats("ab", [(1,), (2, 3)]) == [("a", (1,), "float32"), ("b", (2, 3), "float32")]
    assert b.as_float(3).value == 3.0


@pytest.mark.parametrize(("size", "is_parallel"), [(2000, False), (4000, True), ("n", True)])
def test_small_kernels_run_in_one_thread(size, is_parallel):
    """Waking a thread takes longer than a few thousand elements; a symbolic size may be large."""
    size = tirx.Var(size, "int32") if isinstance(size, str) else size

    def body(x, y):
        with b.parallel(0, size) as i:
            b.store(y, i, x[i])

    function = b.prim_func("copy", b.floats("xy", [[size], [size]]), body)
    assert ("T.parallel" in function.script()) == is_parallel


def test_lowering_does_not_repeat_vectors():
    """A vector in several steps is computed once, not once for each use."""
    vectors = Vectors(8)

    def body(x, y):
        columns = vectors.transpose([vectors.load(x, b.const(i * 8)) for i in range(8)])
        for i, column in enumerate(columns):
            vectors.store(y, b.const(i * 8), column)

    function = b.prim_func("function", b.floats("xy", [[8, 8], [8, 8]]), body)
    assert function.script().count("Shuffle(") == lowered(function).count("Shuffle(") == 3 * 8


def test_whole_stretches_have_no_rest():
    """A stretch of k that divides k is copied in whole vectors."""
    function = matmul(Matmul(8192, 384, 384, transpose_b=True), CPU(16, 32, 2))
    assert "masked_load" not in function.script()


def test_images_that_share_tiles_have_no_empty_loops():
    conv = Conv2d(4, 16, 16, (7, 7), (3, 3), padding=(1, 1, 1, 1))
    assert "range(0)" not in lowered(conv2d(conv, CPU(16, 32, 1)))
