"""Threads that take items of work from each other do each item once, in the order of the rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from machines import Run, compile_kernels, each_target, largest_error, makers, run_kernels
from tvm import tirx

import relax_grad
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.builder import bind
from relax_grad.cpu.kernel.language.stealing import Stealing, shared
from relax_grad.cpu.kernel.matmul.matmul import matmul
from relax_grad.cpu.kernel.matmul.plan import packed_plan
from relax_grad.cpu.kernel.matmul.product import Matmul
from relax_grad.cpu.target import CPU

ROUNDS, ITEMS = 5, 23


@pytest.fixture
def one_thread(monkeypatch):
    """Let TVM run in one thread; the default of later targets stays."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    before = relax_grad.get_num_threads()
    relax_grad.set_num_threads(1)
    yield
    relax_grad.set_num_threads(before)


def rounds_of(threads: int, slow: int | None = None) -> tirx.PrimFunc:
    """Return a kernel whose items replace x by ``2 x + round``, and add 1 to the number of items
    that their thread does; those of one thread's part take long."""

    def body(values, done) -> None:
        for i in range(ITEMS):
            b.store(values, b.const(i), tirx.const(0.0, "float32"))
        for i in range(threads):
            b.store(done, b.const(16 * i), tirx.const(0.0, "float32"))
        work = Stealing(ROUNDS, ITEMS, threads)
        with work.threads() as thread, b.serial(0, ROUNDS) as number:

            def item(prepared, at, begin, _) -> None:
                assert prepared == "prepared"
                spent = b.scratch(1)
                b.store(spent, b.const(0), values[at])
                is_slow = tirx.EQ(begin, b.const(0 if slow == 0 else -1))
                with b.serial(0, bind(tirx.Select(is_slow, b.const(20000), b.const(1)))):
                    b.store(spent, b.const(0), spent[0] * 1.5 - spent[0] * 0.5)
                b.store(values, at, spent[0] * 2.0 + tirx.Cast("float32", number))
                b.store(done, thread * 16, done[thread * 16] + 1.0)

            work.round(number, thread, lambda: "prepared", item)

    return b.prim_func("rounds", b.floats(["values", "done"], [[ITEMS], [16 * threads]]), body)


def run(function, threads):
    values, done = (tvm.runtime.tensor(np.zeros(n, "float32")) for n in (ITEMS, 16 * threads))
    target = {"kind": "llvm", "num-cores": threads}
    compile_kernels({"rounds": function}, target)["rounds"](values, done)
    return values.numpy(), done.numpy()[::16]


WANTED = sum(number * 2.0 ** (ROUNDS - 1 - number) for number in range(ROUNDS))


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_each_item_once_in_each_round(threads):
    for slow in (None, 0):
        for _ in range(5):
            values, done = run(rounds_of(threads, slow), threads)
            assert (values == WANTED).all()
            assert done.sum() == ROUNDS * ITEMS


@pytest.mark.parametrize("threads", [2, 5])
def test_one_thread_takes_all(threads, one_thread):
    values, done = run(rounds_of(threads), threads)
    assert (values == WANTED).all()
    assert done.tolist() == [ROUNDS * ITEMS] + [0] * (threads - 1)


def loop_of(number, threads: int, *, is_slow: bool = False) -> tirx.PrimFunc:
    """Return a kernel whose iterations add 1 to an element each; the first of them takes long."""

    def body(extent, values) -> None:
        items = number
        if number is None:
            items = b.computed(tirx.Cast("int32", extent[0]))
        with shared(items, threads) as i:
            spent = b.scratch(1)
            b.store(spent, b.const(0), values[i])
            often = tirx.Select(tirx.EQ(i, b.const(0)), b.const(200000), b.const(1))
            with b.serial(0, bind(often if is_slow else b.const(1))):
                b.store(spent, b.const(0), spent[0] * 1.5 - spent[0] * 0.5)
            b.store(values, i, spent[0] + 1.0)

    return b.prim_func("loop", b.floats(["extent", "values"], [[1], [ITEMS]]), body)


@pytest.mark.parametrize("threads", [1, 2, 3, 12, 40])
def test_each_iteration_once(threads):
    """Also of fewer iterations than threads, of a number that is known at run time, and of none."""
    functions = {
        "known": loop_of(ITEMS, threads),
        "slow": loop_of(ITEMS, threads, is_slow=True),
        "few": loop_of(5, threads),
        "symbolic": loop_of(None, threads),
    }
    library = compile_kernels(functions, {"kind": "llvm", "num-cores": threads})
    cases = [("known", ITEMS), ("slow", ITEMS), ("few", 5)]
    cases += [("symbolic", number) for number in (0, 1, 2, 17, ITEMS)]
    for name, number in cases * 3:
        extent = tvm.runtime.tensor(np.array([number], "float32"))
        values = tvm.runtime.tensor(np.zeros(ITEMS, "float32"))
        library[name](extent, values)
        assert values.numpy().tolist() == [1.0] * number + [0.0] * (ITEMS - number), name


def test_a_shared_loop_in_one_thread(one_thread):
    library = compile_kernels({"loop": loop_of(ITEMS, 4)}, {"kind": "llvm", "num-cores": 4})
    values = tvm.runtime.tensor(np.zeros(ITEMS, "float32"))
    library["loop"](tvm.runtime.tensor(np.zeros(1, "float32")), values)
    assert (values.numpy() == 1).all()


@each_target
def test_products(target):
    """Of one and of several blocks of rows and stretches of steps, with partial panels."""
    sizes = [(1100, 400, 600), (61, 330, 300), (130, 1000, 70), (533, 700, 513)]
    forms = [(False, False), (False, True), (True, False), (True, True)]
    products = [Matmul(*size, *form) for size, form in zip(sizes, forms, strict=True)]
    cpus = [cpu for cores in (2, 3) for cpu in makers(replace(CPU.of(target), cores=cores))]
    cases = [(product, cpu) for i, cpu in enumerate(cpus) for product in products[i % 2 :: 2]]
    shares = [packed_plan(*case).shares for case in cases]
    assert sum(each is not None for each in shares) > len(cases) / 2
    assert {each.of_strips for each in shares if each is not None} == {True, False}
    rng, runs = np.random.default_rng(0), []
    for product, cpu in cases:
        *inputs, output = product.shapes()
        arrays = [rng.normal(size=shape).astype("float32") for shape in inputs]
        runs.append(Run(matmul(product, cpu), arrays, [tuple(output)]))
    for (product, cpu), run, (result,) in zip(cases, runs, run_kernels(runs, target), strict=True):
        a, bb = (array.astype("float64") for array in run.inputs)
        wanted = (a.T if product.transpose_a else a) @ (bb.T if product.transpose_b else bb)
        assert largest_error(result, wanted) < 2e-6, (product, cpu)


@each_target
def test_a_symbolic_number_of_steps_may_be_0(target):
    """Such products have tasks: no round of threads would write the zeros."""
    cpu = replace(CPU.of(target), cores=2)
    assert packed_plan(Matmul(1100, 800, 600), cpu).shares is not None
    function = matmul(Matmul(1100, 800, tirx.Var("k", "int32")), cpu)
    rng, runs = np.random.default_rng(0), []
    for k in (0, 5, 600):
        arrays = [rng.normal(size=size).astype("float32") for size in ((1100, k), (k, 800))]
        runs.append(Run(function, arrays, [(1100, 800)]))
    for run, (result,) in zip(runs, run_kernels(runs, target), strict=True):
        a, bb = (array.astype("float64") for array in run.inputs)
        assert largest_error(result, a @ bb) < 2e-6


@each_target
def test_results_do_not_depend_on_the_thread(target):
    """Of a processor that other programs use, threads take other panels in each call."""
    product, cpu = Matmul(300, 900, 700), replace(CPU.of(target), cores=2)
    assert packed_plan(product, cpu).shares is not None
    rng = np.random.default_rng(0)
    a, bb = (
        tvm.runtime.tensor(rng.normal(size=size).astype("float32"))
        for size in ((300, 700), (700, 900))
    )
    function = compile_kernels({"product": matmul(product, cpu)}, target)["product"]
    results = []
    for _ in range(30):
        c = tvm.runtime.tensor(np.full((300, 900), np.nan, "float32"))
        function(a, bb, c)
        results.append(c.numpy().tobytes())
    assert len(set(results)) == 1
