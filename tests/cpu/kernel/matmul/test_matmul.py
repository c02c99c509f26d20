"""Matrix products against NumPy in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Run, at, each_target, largest_error, makers, run_kernels
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.matmul._ways import in_place_tile, most_rows_in_place, reading_of_a
from relax_grad.cpu.kernel.matmul.matmul import WAYS, Matmul, matmul
from relax_grad.cpu.kernel.matmul.plan import in_place_plan, packed_plan
from relax_grad.cpu.kernel.matmul.tile import equal_height
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import AVX2, EARLY_AVX2, EARLY_AVX512, ICE_LAKE, ZEN4

RNG = np.random.default_rng(0)


def transposed(matrix, is_transposed):
    return np.swapaxes(matrix, -1, -2) if is_transposed else matrix


def with_own_extents(product):
    """Return a product with symbolic extents of its own: TVM 0.26 fails on two functions that share
    them."""
    own = {
        name: tirx.Var(extent.name, "int32")
        for name in ("rows", "columns", "depth", "batch")
        if isinstance(extent := getattr(product, name), tirx.Var)
    }
    return replace(product, **own)


def check(products, target, *extents, way=None, adds_bias=False, **properties):
    """Compare products, compiled together, with NumPy's in float64, for given values of the
    symbolic extents. The makers of the processor take turns."""
    runs, checked = [], []
    cpus = makers(replace(CPU.of(target), **properties))
    for i, product in enumerate(products):
        turn = i + 2 * product.transpose_a + product.transpose_b
        cpu = cpus[turn % len(cpus)]
        function = matmul(with_own_extents(product), cpu, way=way, adds_bias=adds_bias)
        for values in extents or [{}]:
            *inputs, output = (at(shape, values) for shape in product.shapes())
            if adds_bias:
                inputs.append(output[-1:])
            arrays = [RNG.normal(size=shape).astype("float32") for shape in inputs]
            runs.append(Run(function, arrays, [output]))
            checked.append((product, values))
    results = run_kernels(runs, target)
    for case, run, (result,) in zip(checked, runs, results, strict=True):
        product, _ = case
        a, b, *bias = (array.astype("float64") for array in run.inputs)
        wanted = transposed(a, product.transpose_a) @ transposed(b, product.transpose_b)
        wanted = wanted + bias[0] if adds_bias else wanted
        assert largest_error(result, wanted) < 2e-6, case


@each_target
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sizes_around_the_tile(target, transpose_a, transpose_b):
    sizes = [(1, 1, 1), (10, 32, 16), (33, 45, 70), (3, 70, 600), (60, 16, 512)]
    check([Matmul(*size, transpose_a, transpose_b) for size in sizes], target)


@each_target
@pytest.mark.parametrize("transpose_b", [False, True])
def test_copies_of_a_by_tasks(target, transpose_b):
    """Copies of A: rows that map to few cache sets, and a transposed A, across tasks, stretches and
    batches."""
    rows, batch = (tirx.Var(name, "int32") for name in ("rows", "batch"))
    products = [
        Matmul(93, 70, 512, False, transpose_b),
        Matmul(45, 131, 1024, False, transpose_b, 3),
        Matmul(47, 64, 512, False, transpose_b, 5, shared_a=True),
        Matmul(rows, 64, 512, False, transpose_b, batch),
        Matmul(417, 70, 300, True, transpose_b),
        Matmul(93, 600, 520, True, transpose_b, 2, shared_a=True),
        Matmul(97, 70, rows, True, transpose_b, batch),
    ]
    check(products, target, {"rows": 1, "batch": 3}, {"rows": 301, "batch": 2})


@each_target
@pytest.mark.parametrize("transpose_b", [False, True])
def test_transposed_copies_of_a_by_tasks(target, transpose_b):
    """Strips of 9 and of fewer rows, stretches that end within a vector, and a batch."""
    sizes = [(391, 515, 777), (384, 513, 1031)]
    products = [Matmul(*size, False, transpose_b) for size in sizes]
    products.append(Matmul(385, 530, 771, False, transpose_b, 2, shared_b=True))
    properties = {}
    if CPU.of(target).tuning is ICE_LAKE:
        assert {reading_of_a(each, EARLY_AVX512) for each in products} == {"transposed"}
        properties["tuning"] = EARLY_AVX512
    check(products, target, **properties)


def test_intels_processors_before_ice_lake_read_no_transposed_factor_in_place():
    """The others do, of few columns; none of them copies an untransposed one of few rows."""

    def readings(tuning):
        sizes = [(1000, 128, 256, True), (383, 384, 770), (384, 384, 768)]
        return [reading_of_a(Matmul(*size), tuning) for size in sizes]

    assert readings(EARLY_AVX512) == ["strips", "in place", "transposed"]
    assert readings(EARLY_AVX2) == ["strips", "in place", "in place"]
    assert readings(ICE_LAKE) == readings(AVX2) == ["in place"] * 3


@each_target
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_panels_that_several_tasks_of_a_thread_read(target, transpose_a, transpose_b):
    """They are packed once, for all tasks: of one product in one thread, and for each product of a
    batch. Several threads take blocks of rows of one product from each other, and each packs."""
    single = Matmul(2200, 70, 300, transpose_a, transpose_b)
    batches = [
        Matmul(1700, 31, 260, transpose_a, transpose_b, 2),
        Matmul(1700, 33, 256, transpose_a, transpose_b, 3, shared_a=True),
    ]
    for cores, products in ((1, [single]), (2, batches)):
        cpu = replace(CPU.of(target), cores=cores)
        plans = [packed_plan(product, cpu, divides_depth=True) for product in products]
        # Parts of k, whose tasks pack for themselves, would hide that.
        assert all(own.parts == 1 and not own.packs_late for own in plans)
        check(products, target, cores=cores)


@each_target
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_few_rows_or_one_column(target, transpose_a, transpose_b):
    sizes = [(1, 300, 70), (2, 129, 45), (5, 40, 257), (13, 11, 300), (27, 50, 9), (33, 1, 40)]
    sizes += [(50, 16, 33), (9, 5, 40)]
    check([Matmul(*size, transpose_a, transpose_b) for size in sizes], target)


@each_target
@pytest.mark.parametrize("transpose_b", [False, True])
def test_few_columns_and_many_rows_that_are_read_in_place(target, transpose_b):
    """The code of strips is emitted once: that of each of them would exceed TVM's recursion."""
    sizes = [(348, 11, 31), (1000, 3, 40), (69, 9, 130), (33, 2, 7)]
    products = [Matmul(*size, False, transpose_b) for size in sizes]
    check(products, target, way="few rows")
    script = matmul(products[1], CPU.of(target), way="few rows").script()
    assert len(script.splitlines()) < 6000


def test_the_most_rows_that_read_a_factor_in_place():
    """Packing a factor whose rows are one vector gains nothing, except where few registers hold its
    sums."""
    wide, narrow, intel = ZEN4, AVX2, ICE_LAKE
    assert most_rows_in_place(Matmul(64, 16, 768, True), wide) == 32
    assert most_rows_in_place(Matmul(64, 16, 768), wide) == 64
    assert most_rows_in_place(Matmul(64, 17, 768), wide) == 32
    assert most_rows_in_place(Matmul(64, 16, 4096), wide) == 32
    assert most_rows_in_place(Matmul(64, 10, 768), narrow) == 32
    assert most_rows_in_place(Matmul(16, 1024, 1024), intel) == 8
    assert most_rows_in_place(Matmul(16, 1024, 1024), wide) == 32
    # Rows that share few sets of a cache, or are many, are read slowly if they have fewer bytes.
    near, many, crowded = (Matmul(16, *size) for size in ((400, 1300), (136, 3021), (512, 1024)))
    assert [most_rows_in_place(product, intel) for product in (near, many, crowded)] == [32, 8, 8]
    assert [most_rows_in_place(product, wide) for product in (near, many, crowded)] == [32, 32, 32]
    # Intel's processors before Ice Lake read fewer rows in place, if their steps are many or far.
    sizes = [(400, 1300), (400, 800), (512, 256), (2000, 64), (64, 256), (136, 3021), (1300, 1300)]
    mosts = [24, 24, 24, 32, 32, 8, 8], [4, 8, 4, 32, 32, 4, 4]
    for early, most in zip((EARLY_AVX512, EARLY_AVX2), mosts, strict=True):
        assert [most_rows_in_place(Matmul(16, *size), early) for size in sizes] == most
    assert most_rows_in_place(Matmul(16, 1000, 1040), narrow) == 32
    assert most_rows_in_place(Matmul(16, 1000, 1050), narrow) == 8
    assert most_rows_in_place(Matmul(64, 8, 768), narrow) == 8
    # Of a transposed factor, panels of one vector with few empty lanes are soon faster on Intel.
    most = [most_rows_in_place(Matmul(64, n, 128, False, True), intel) for n in (3, 10, 17, 24, 30)]
    assert most == [1820, 49, 80, 28, 14]
    assert most_rows_in_place(Matmul(64, 10, 128, False, True), wide) == 2048


@each_target
@pytest.mark.parametrize("way", WAYS)
def test_each_way(target, way):
    """Sizes for which another way is chosen; rows of B that share few sets of a cache; parts of a
    group of panels."""
    drawn = [(1, 40, 70), (17, 512, 300), (40, 33, 19), (70, 10, 260), (3, 97, 5)]
    forms = itertools.product(drawn, (False, True), (False, True))
    products = [Matmul(*size, *turned) for size, *turned in forms]
    check([product for product in products if product.allows(way)], target, way=way)


@each_target
@pytest.mark.parametrize("way", [way for way in WAYS if way != "turned"])
def test_products_that_add_a_bias(target, way):
    """In parts of vectors, over stretches of k, in batches, and for one column."""
    names = "rows", "columns", "depth"
    rows, columns, depth = (tirx.Var(name, "int32") for name in names)
    sizes = [(3, 41, 70), (17, 70, 300), (40, 33, 530), (21, 1, 90), (1, 37, 40), (1, 1, 5)]
    products = [
        Matmul(*size, *turned) for size in sizes for turned in ((False, True), (True, False))
    ]
    products += [Matmul(rows, columns, depth, False, turned) for turned in (False, True)]
    products.append(Matmul(9, 37, 31, batch=3, shared_b=True))
    products = [product for product in products if product.allows(way)]
    extents = [dict(zip(names, sizes, strict=True)) for sizes in ((5, 19, 7), (23, 70, 600))]
    check(products, target, *extents, way=way, adds_bias=True)


@each_target
def test_panels_packed_by_tasks_or_before(target):
    """With many cores, tasks have few rows, and long panels are packed before; a shared B is packed
    once."""
    products = [
        Matmul(129, 150, 300),
        Matmul(129, 330, 1200),
        Matmul(61, 70, 300, True, True, 3, shared_b=True),
    ]
    check(products, target, cores=32)
    check(products, target, cores=1)


def test_strips_have_equal_heights():
    """A last strip of few rows takes as long as its multiply-adds wait for each other."""
    assert [equal_height(rows, 10) for rows in (1, 10, 11, 21, 32, 128)] == [1, 10, 6, 7, 8, 10]
    assert equal_height(tirx.Var("rows", "int32"), 6) == 6
    strips = [packed_plan(Matmul(rows, 70, 64), CPU(16, 32, 1)).strips for rows in (32, 33, 41)]
    assert strips == [4, 5, 6]
    for rows in range(1, 60):
        assert -(-rows // equal_height(rows, 6)) == -(-rows // 6)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_tiles_of_few_rows_fit_in_the_registers(transpose_b):
    """Sums that are kept in memory take two to three times as long."""
    widths = {}
    for lanes, registers in [(4, 16), (8, 16), (4, 32), (16, 32)]:
        for rows in range(2, 33):
            product = Matmul(rows, 256, 64, False, transpose_b)
            height, columns = in_place_tile(product, CPU(lanes, registers, 1).tuning, 1)
            assert height * columns + columns + 1 <= registers
            widths[registers, rows] = columns
    assert [widths[16, rows] for rows in (2, 3, 4, 6)] == [5, 3, 3, 3]
    assert [widths[32, rows] for rows in (2, 3, 4, 5, 8)] == [8, 7, 6, 5, 3]


def test_tiles_of_few_rows_divide_the_columns_evenly():
    """Of 9 vectors of columns, tiles of 4 would leave one for the second thread."""

    def tiles(columns: int, cores: int, transpose_b: bool = False) -> list[int]:
        tile = in_place_plan(Matmul(18, columns, 500, False, transpose_b), CPU(16, 32, cores))
        widths = [min(tile.width, columns - at) for at in range(0, columns, tile.width)]
        part = -(-len(widths) // cores)
        return [sum(widths[i : i + part]) for i in range(0, len(widths), part)]

    assert tiles(144, 1) == [144]
    assert tiles(144, 2) == [96, 48]
    assert tiles(128, 2) == [64, 64]
    assert tiles(256, 4) == [64] * 4
    assert tiles(112, 2) == [64, 48]
    assert tiles(9, 2, True) == [6, 3]


@each_target
def test_products_that_divide_their_steps(target):
    """In parts of several stretches, of which the last one has fewer; the number of cores does not
    change the bits."""
    sizes = [(100, 100, 1001), (65, 70, 2050), (40, 40, 3000), (150, 33, 900), (64, 16, 8200)]
    forms = itertools.product((False, True), (False, True))
    products = [Matmul(*size, *form) for size, form in itertools.product(sizes, forms)]
    check(products, target, cores=2)
    cpu = CPU.of(target)
    same = [Matmul(*sizes[0], True), Matmul(*sizes[1], False, True)]
    runs = []
    for product in same:
        *inputs, output = product.shapes()
        arrays = [RNG.normal(size=shape).astype("float32") for shape in inputs]
        runs += [
            Run(matmul(product, replace(cpu, cores=cores)), arrays, [output])
            for cores in (1, 2, 16)
        ]
    bits = [result.tobytes() for (result,) in run_kernels(runs, target)]
    assert len(set(bits[:3])) == len(set(bits[3:])) == 1


@each_target
def test_products_of_few_steps(target):
    """Their tiles follow each other in rows of C. Factors with transposed rows are packed before;
    with partial tiles, tasks of several columns and rows, and batches."""
    forms = list(itertools.product((False, True), (False, True)))
    sizes = [(61, 144, 5), (129, 4192, 16), (700, 272, 32), (35, 90, 3), (40, 2100, 1)]
    sizes += [(130, 157, 9), (9, 70001, 4)]
    products = [Matmul(*size, *form) for size, form in itertools.product(sizes, forms)]
    products += [
        Matmul(41, 112, 24, *forms[i], batch=3, shared_a=i == 1, shared_b=i > 1) for i in range(4)
    ]
    for cores in (1, 2, 7):
        check(products[cores % 2 :: 2], target, cores=cores)
    check([Matmul(61, 144, 5), Matmul(129, 112, 24, True)], target, adds_bias=True)


@each_target
def test_transposed_factors_in_place(target):
    """Rows that are no multiple of a tile, of one vector of columns too, and in batches."""
    depth = tirx.Var("depth", "int32")
    sizes = [(50, 16, 300), (37, 10, 300), (129, 30, 65), (1000, 100, 20), (83, 384, 258)]
    products = [Matmul(*size, True, turned) for size in sizes for turned in (False, True)]
    products += [Matmul(47, 61, depth, True), Matmul(53, 40, 70, True, batch=3, shared_a=True)]
    check(products, target, {"depth": 0}, {"depth": 600}, way="packed")


@each_target
def test_sums_in_stretches_of_rows_that_repeat(target):
    """The last rows of a symbolic number repeat within a tile, and each stretch adds to them."""
    rows, cores = tirx.Var("rows", "int32"), 5
    products = [Matmul(rows, 70, 600), Matmul(rows, 33, 530, transpose_b=True)]
    sizes = [{"rows": rows} for rows in (0, 9, 63, 301)]
    check(products, target, *sizes, cores=cores)


def test_panels_of_a_large_factor_are_prefetched():
    """Of a factor that a second-level cache holds, or with few rows to hide them, nothing is."""
    cpu, rows = CPU(16, 32, 2), tirx.Var("rows", "int32")

    def prefetches(*product):
        return "prefetch" in matmul(Matmul(*product), cpu).script()

    assert prefetches(1024, 2048, 256)
    assert prefetches(1024, 2048, 256, True, True)
    assert prefetches(rows, 1024, 1024)
    assert not prefetches(1024, 512, 256)
    assert not prefetches(64, 2048, 256, True)


@each_target
def test_few_rows_in_batches(target):
    batch = tirx.Var("batch", "int32")
    check([Matmul(3, 40, 20, batch=batch), Matmul(40, 1, 20, batch=batch)], target, {"batch": 4})
    shared = [(True, False), (False, True)]
    check([Matmul(2, 70, 20, False, True, 3, *sharing) for sharing in shared], target)
    check([Matmul(50, 1, 20, False, True, 3, *sharing) for sharing in shared], target)


@each_target
def test_all_symbolic(target):
    rows, columns, depth = (tirx.Var(name, "int32") for name in ("rows", "columns", "depth"))
    symbolic = [Matmul(rows, columns, depth), Matmul(rows, 1, depth), Matmul(1, columns, depth)]
    sizes = [(13, 45, 300), (4, 7, 0), (31, 3, 19)]
    names = ("rows", "columns", "depth")
    check(symbolic, target, *(dict(zip(names, values, strict=True)) for values in sizes))


@each_target
def test_symbolic_rows_and_batch(target):
    rows, batch = (tirx.Var(name, "int32") for name in ("rows", "batch"))
    symbolic = [
        Matmul(rows, 40, 30),
        Matmul(rows, 40, 30, transpose_b=True),
        Matmul(40, 30, rows, transpose_a=True),
        Matmul(rows, 7, 9, batch=batch, shared_b=True),
    ]
    sizes = [(0, 0), (1, 1), (7, 2), (19, 3), (300, 2)]
    check(symbolic, target, *({"rows": rows, "batch": batch} for rows, batch in sizes))


@st.composite
def products(draw):
    size = st.one_of(st.integers(1, 80), st.integers(1, 200))
    batch = draw(st.sampled_from([1, 1, 2, 5]))
    shared = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    return Matmul(
        draw(size),
        draw(size),
        draw(st.one_of(st.integers(1, 700), st.just(512))),
        draw(st.booleans()),
        draw(st.booleans()),
        batch,
        *(shared if batch > 1 else (False, False)),
    )


@pytest.mark.slow
@each_target
@at_length(150)
@given(cases=batches(products()))
def test_any_product(target, cases):
    check(cases, target)


@at_length(50)
@given(cases=batches(products()))
def test_some_products(cases):
    check(cases, {"kind": "llvm"})


@each_target
def test_rounds_of_steps(target):
    """Steps are summed in rounds of 4, 2 or 1, that divide them, in one stretch and in several."""
    depths = (1, 2, 3, 4, 6, 7, 250, 252, 255, 257, 258, 260, 387, 514, 520)
    check([Matmul(37, 50 + 16 * (k % 3), k, k % 2 == 1, k % 4 < 2) for k in depths], target)


@each_target
def test_products_whose_result_a_second_level_cache_does_not_hold(target):
    """Whole and partial tiles of them prefetch in other ways; steps are fewer and more than lines,
    in rounds of 4 and of one, and in several stretches."""
    forms = [(False, False), (False, True), (True, False), (True, True)]
    depths = [1, 4, 7, 40, 145, 201, 260, 700]
    products = [Matmul(300, 490, k, *forms[i % 4]) for i, k in enumerate(depths)]
    check([*products, Matmul(306, 480, 200), Matmul(306, 512, 65, batch=2)], target)
