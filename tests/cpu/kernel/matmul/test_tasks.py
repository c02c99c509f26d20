"""The division of matrix products among threads, and the ways to read their factors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from machines import Run, run_kernels
from tvm import tirx

from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.stealing import range_of
from relax_grad.cpu.kernel.matmul._plans import PackedPlan
from relax_grad.cpu.kernel.matmul._tasks import divide, parts_of_depth, shares_of
from relax_grad.cpu.kernel.matmul._ways import is_in_one_thread, most_rows_in_place, reading_of_a
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.kernel.matmul.plan import packed_plan
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tuning import AVX2, EARLY_AVX2, ICE_LAKE, ZEN4


def is_parallel(function):
    return "T.parallel" in function.script()


def test_products_of_few_rows_have_one_parallel_region():
    """A region that packs short panels takes longer than packing them in each task."""
    for cpu in (CPU(16, 32, 2), CPU(8, 16, 2)):
        for size in [(64, 64, 256), (128, 16, 1500), (48, 130, 300)]:
            assert matmul(Matmul(*size), cpu).script().count("T.parallel") == 1
    assert matmul(Matmul(129, 330, 4000), CPU(16, 32, 32)).script().count("T.parallel") == 2


@pytest.mark.parametrize("properties", [(16, 32, 2, False, ICE_LAKE), (16, 32, 2), (8, 16, 2)])
def test_which_panels_are_packed_before_the_tasks(properties):
    """Those that each thread would pack for several tasks, if all of them are not too large."""
    cpu = CPU(*properties)

    def packs_late(*product, cores=2) -> bool:
        return packed_plan(Matmul(*product), replace(cpu, cores=cores)).packs_late

    assert packs_late(700, 768, 768)
    assert not packs_late(700, 768, 768, cores=1)
    for form in itertools.product([False, True], repeat=2):
        assert packs_late(2200, 90, 768, *form)  # threads take blocks of strips from each other
        assert packs_late(2200, 768, 768, *form)  # or panels
        assert not packs_late(2200, 90, 768, *form, cores=1)
        assert not packs_late(2200, 768, 768, *form, cores=1)
        assert packs_late(2200, 50000, 768, *form, cores=1)
    assert packs_late(5000, 768, 16)  # rows of C follow each other
    assert packs_late(5000, 768, tirx.Var("k", "int32"))


@pytest.mark.parametrize("transpose_b", [False, True])
def test_small_products_run_in_one_thread(transpose_b):
    """Waking a thread takes longer than a small product."""
    cpu = CPU(16, 32, 2)
    small = [(1, 64, 64), (16, 16, 64), (64, 16, 64), (20, 70, 50)]
    large = [(1, 1024, 1024), (128, 784, 256), (64, 128, 128)]
    assert not any(is_parallel(matmul(Matmul(*s, False, transpose_b), cpu)) for s in small)
    assert all(is_parallel(matmul(Matmul(*s, False, transpose_b), cpu)) for s in large)


@pytest.mark.parametrize("transpose_a", [False, True])
def test_one_thread_packs_a_single_panel(transpose_a):
    """Threads that share rows would each pack all of a narrow factor, whatever its depth."""
    cpu = CPU(16, 32, 2)
    for size in [(64, 16, 768), (64, 32, 512), (96, 16, 512), (48, 30, 650)]:
        assert not is_parallel(matmul(Matmul(*size, transpose_a), cpu, way="packed"))
        # Intel's processors gain from two threads all the same, if they pack B.
        on_intel = replace(cpu, tuning=ICE_LAKE)
        is_packed = size[0] > most_rows_in_place(Matmul(*size, transpose_a), ICE_LAKE)
        assert is_parallel(matmul(Matmul(*size, transpose_a), on_intel)) == is_packed
    for size in [(128, 16, 768), (512, 32, 512), (64, 33, 1024)]:
        assert is_parallel(matmul(Matmul(*size, transpose_a), cpu))
    assert not is_parallel(matmul(Matmul(32, 16, 4096), cpu))  # one vector of columns


@pytest.mark.parametrize("properties", [(16, 32, 2, False, ICE_LAKE), (16, 32, 2), (8, 16, 2)])
def test_threads_pack_as_little_as_possible(properties):
    """Two threads divide the columns of a wide product, each of which then packs a half of B, and
    the rows of a tall one, each of which then copies a half of A."""

    def parts(*sizes: int) -> tuple[int, int]:
        own = packed_plan(Matmul(*sizes), CPU(*properties))
        strips, panels = own.block
        return -(-own.strips // strips), -(-own.panels // panels)

    assert parts(64, 256, 784) == parts(40, 256, 784) == (1, 2)
    for sizes in [(256, 64, 784), (300, 130, 100)]:
        down, across = parts(*sizes)
        assert across == 1
        assert down % 2 == 0


def test_the_last_tasks_have_more_panels():
    """The last panel may be partial: tasks of 4 and 3 panels would have more unequal columns."""

    def ranges(number: int, tasks: int) -> list[tuple[int, int]]:
        return [range_of(task, tasks, number) for task in range(tasks)]

    assert ranges(7, 2) == [(0, 3), (3, 7)]
    assert ranges(8, 2) == [(0, 4), (4, 8)]
    assert ranges(11, 4) == [(0, 2), (2, 5), (5, 8), (8, 11)]
    assert ranges(1, 1) == [(0, 1)]


@pytest.mark.parametrize(
    ("properties", "steps"),
    [
        ((16, 32, 2, False, ICE_LAKE), 64),
        ((16, 32, 2), 32),
        ((8, 16, 2), 32),
        ((8, 16, 2, False, EARLY_AVX2), 64),
    ],
)
def test_which_products_write_rows(properties, steps):
    """Those of few steps, unless narrow tiles would write vectors of a whole cache line that begin
    within one, or transposed panels would meet few rows."""
    cpu = CPU(*properties)

    def writes(*product) -> bool:
        return packed_plan(Matmul(*product), cpu).by_rows

    assert [writes(300, 512, k) for k in (1, steps, steps + 1)] == [True, True, False]
    assert writes(300, 500, steps) == cpu.tuning.ways.rows_begin_anywhere
    assert [writes(rows, 512, 8, False, True) for rows in (47, 48)] == [False, True]
    assert not writes(300, 16, 8)
    assert not writes(300, tirx.Var("n", "int32"), 8)


@pytest.mark.parametrize("properties", [(16, 32, 2, False, ICE_LAKE), (16, 32, 2), (8, 16, 2)])
def test_which_products_divide_their_steps(properties):
    """Those of many steps, which two threads cannot divide evenly by rows or columns, or where each
    would copy much of both factors; whatever the number of threads."""
    cpu = CPU(*properties)

    def parts(*product) -> int:
        numbers = {
            packed_plan(Matmul(*product), replace(cpu, cores=cores), divides_depth=True).parts
            for cores in (1, 2, 16)
        }
        assert len(numbers) == 1
        return numbers.pop()

    assert [parts(100, 100, k) for k in (256, 512, 1000, 2048, 9000)] == [1, 2, 2, 4, 8]
    assert parts(64, 64, 2048, True) == parts(40, 40, 3000, False, True) == 4
    assert parts(512, 512, 4096) == parts(1024, 384, 1536) == parts(2048, 2048, 2048) == 1
    assert parts(100, 100, 1000, False, False, 2) == 1
    symbolic = tirx.Var("n", "int32")
    assert parts(symbolic, 100, 1000) == parts(100, 100, symbolic) == 1


def test_products_that_do_not_divide_their_steps():
    """Those in one thread, and those whose bias is added before they are rounded, which are in half
    precision."""
    cpu = CPU(16, 32, 2)
    assert "20000" in matmul(Matmul(100, 100, 1000), cpu).script()
    assert "20000" not in matmul(Matmul(100, 100, 1000), cpu, adds_bias=True).script()
    small, tile = Matmul(40, 16, 1500), (8, 32)
    assert is_in_one_thread(small, cpu.tuning)
    assert parts_of_depth(small, cpu.tuning, tile) == 2
    assert f"{2 * 40 * 16}" not in matmul(small, cpu, way="packed").script()


def test_which_transposed_factors_are_read_in_place():
    """Those with few columns, unless their steps are far apart or share few sets of a cache."""
    intel, amd, narrow = ICE_LAKE, ZEN4, AVX2

    def reads(rows, columns, tuning) -> bool:
        return reading_of_a(Matmul(rows, columns, 256, True), tuning) == "in place"

    assert all(reads(784, 128, row) for row in (intel, amd, narrow))
    assert [reads(784, 384, row) for row in (intel, amd, narrow)] == [True, False, False]
    assert [reads(1024, 64, row) for row in (intel, amd, narrow)] == [True, False, False]
    assert not any(reads(*size, intel) for size in [(784, 385), (2001, 64), (1024, 16)])
    symbolic = tirx.Var("n", "int32")
    assert not reads(symbolic, 64, intel)
    assert not reads(64, symbolic, intel)
    # A copy of float16 is widened in vectors.
    product = Matmul(100, 64, 256, True)
    assert reading_of_a(product, intel, copies=True) == "strips"


def test_tasks_of_symbolic_numbers():
    """The emitted code divides a product as it is divided if its extents are known."""
    generator, sizes = np.random.default_rng(7), []
    for cores, largest in [(1, (54, 64)), (2, (54, 64)), (7, (16, 30)), (64, (9, 4))]:
        strips, panels = (tirx.Var(name, "int32") for name in ("strips", "panels"))

        def emit(_a, _b, counts, extents=(strips, panels), largest=largest, cores=cores):
            tasks = divide(*extents, largest, cores, (6, 64))
            ranges = [range_of(b.const(0), tasks[0], extents[0])]
            ranges += [range_of(tasks[1] - 1, tasks[1], extents[1])]
            for i, count in enumerate([*tasks, *itertools.chain(*ranges)]):
                b.store(counts, i, b.as_float(count))

        params = b.floats("abc", [[strips], [panels], [6]])
        function = b.prim_func("divide", params, emit)
        # The work of a million panels exceeds an int32, and so does their product with the tasks.
        fixed = [(1, 1), (1, 90), (90, 1), (54, 10**6), (108, 10**6)]
        for numbers in [*fixed, *generator.integers(1, 200, (20, 2)).tolist()]:
            arrays = [np.zeros(number, "float32") for number in numbers]
            tasks = divide(*numbers, largest, cores, (6, 64))
            first = range_of(0, tasks[0], numbers[0])
            last = range_of(tasks[1] - 1, tasks[1], numbers[1])
            sizes.append((Run(function, arrays, [(6,)]), [*tasks, *first, *last]))
    results = run_kernels([run for run, _ in sizes], {"kind": "llvm"})
    for (counts,), (_, wanted) in zip(results, sizes, strict=True):
        assert counts.tolist() == wanted


def most_of_a_thread(own: PackedPlan) -> float:
    """Return the tiles of the thread that has the most, relative to those of equal parts."""
    (down, across), cores = own.tasks, own.cores
    sizes = [
        [stop - first for first, stop in (range_of(i, tasks, number) for i in range(tasks))]
        for tasks, number in ((down, own.strips), (across, own.panels))
    ]
    tasks = [rows * columns for rows, columns in itertools.product(*sizes)] * own.parts
    # A thread runs tasks of consecutive numbers.
    part = -(-len(tasks) // cores)
    most = max(sum(tasks[i : i + part]) for i in range(0, len(tasks), part))
    return most * cores / sum(tasks)


@pytest.mark.parametrize("properties", [(16, 32, False, ICE_LAKE), (16, 32), (8, 16)])
def test_threads_get_equal_parts(properties):
    """Products of one task and of many, and of more columns than a task has, in up to 16 threads.
    Few strips and panels cannot be divided equally among many threads."""
    generator = np.random.default_rng(11)
    lanes, registers, *others = properties
    for cores, limit, mean in ((2, 1.15, 1.03), (3, 1.4, 1.1), (4, 1.4, 1.1), (16, 1.8, 1.2)):
        cpu, most = CPU(lanes, registers, cores, *others), []
        for rows, columns in np.exp(generator.uniform(np.log(64), np.log(9000), (150, 2))):
            product = Matmul(int(rows), int(columns), 500)
            if rows * columns > 64 * 64 * 4 * cores:
                most.append(most_of_a_thread(packed_plan(product, cpu, divides_depth=True)))
        assert len(most) > 40
        assert max(most) <= limit
        assert np.mean(most) <= mean


@pytest.mark.parametrize("properties", [(16, 32, 2, False, ICE_LAKE), (16, 32, 2), (8, 16, 2)])
def test_threads_write_rows_of_their_own(properties):
    """Products of few steps are divided by their rows, unless these are few, or the panels that
    each thread would pack take as long. A row that each strip reads again is divided too."""
    cpu = CPU(*properties)

    def tasks(*product) -> tuple[int, int]:
        return packed_plan(Matmul(*product), cpu).tasks

    assert tasks(1302, 3776, 4) == tasks(1302, 3776, 4, True, True) == tasks(512, 4096, 8) == (2, 1)
    assert tasks(128, 768, 16) == tasks(64, 9008, 8, False, True) == tasks(4, 1008, 4) == (1, 2)
    down, across = tasks(256, 65536, 16)
    assert across > down
    assert 2**16 <= 65536 * 16 / across <= 2**17


@pytest.mark.parametrize(
    ("size", "divided"),
    [
        ((512, 512), "columns"),  # threads take panels from each other
        ((300, 200), "rows"),  # one of two threads would have three of five panels
        ((900, 140), "rows"),
        ((200, 300), "columns"),
        ((64, 256), "columns"),
        ((100, 1000), "columns"),
    ],
)
def test_what_two_threads_divide(size, divided):
    own = packed_plan(Matmul(*size, 512), CPU(16, 32, 2, False, ICE_LAKE))
    strips, panels = own.block
    assert (strips < own.strips, panels < own.panels) == (
        divided == "rows",
        divided == "columns",
    )


def test_what_threads_take_from_each_other():
    """Panels, or blocks of strips if columns are few; neither if a thread has few of them, or they
    are much more work than tasks of equal rows."""
    largest, tile = (59, 42), (9, 48)

    def of(rows: int, columns: int, cores: int = 2) -> str | None:
        sizes = -(-rows // 9), -(-columns // 48), largest, cores, tile
        shares = shares_of(*sizes, 11, ICE_LAKE.tasks)
        return shares and ("strips" if shares.of_strips else "panels")

    assert {of(*size) for size in [(2048, 2048), (1000, 384), (64, 500)]} == {"panels"}
    assert of(1000, 3072, cores=4) == "panels"
    assert of(2048, 2048, cores=1) is None
    assert {of(*size) for size in [(1000, 140), (1000, 240), (3000, 48)]} == {"strips"}
    assert of(4000, 384, cores=4) == "strips"
    assert not any((of(200, 140), of(100, 140), of(4000, 3000, cores=32)))
