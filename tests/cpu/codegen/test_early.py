"""Kernels that are compiled while later passes run: the same files and bits as in one thread."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import wait

import numpy as np
import pytest
import tvm
from dispatched import HOST, flat
from programs import build, tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.cpu import stages
from relax_grad.cpu.codegen import compiler, early
from relax_grad.ir.module import IS_KERNEL

WIDTHS = (8, 24, 40, 56, 72)
ARRAYS = [
    np.random.default_rng(i).normal(size=(4, n)).astype("float32") for i, n in enumerate(WIDTHS)
]


def module():
    """Return a module with two groups of kernels that stay, a kernel that may be changed to write
    to its argument, and a kernel that is folded."""

    def body(bb, *xs):
        weights = [relax.const(np.ones(n, "float32")) for n in WIDTHS]
        rows = [
            bb.emit(op.nn.rms_norm(x, weight, [-1])) for x, weight in zip(xs, weights, strict=True)
        ]
        ones = relax.const(np.ones((4, 88), "float32"))
        rows.append(bb.emit(op.nn.rms_norm(ones, relax.const(np.ones(88, "float32")), [-1])))
        scores = bb.emit(op.nn.log_softmax(bb.emit(op.exp(xs[0]))))
        return relax.Tuple([*rows, bb.emit(op.sum(scores))])

    return build([tensor(f"x{i}", x.shape, "float32") for i, x in enumerate(ARRAYS)], body)


def compiled(**options):
    pipeline = relax_grad.pipeline(HOST, compile_functions=True, **options)
    return tvm.compile(module(), HOST, relax_pipeline=pipeline)


def run(executable):
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return flat([to_numpy(machine["main"](*map(tvm.runtime.tensor, ARRAYS)))])


def files(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*/*.o")}


@pytest.fixture
def counts(monkeypatch):
    """Numbers of groups since the last clearing: begun early, taken, compiled, and shown."""
    numbers: Counter = Counter()
    taken, made = early.Early.taken, compiler.object_file

    def all_taken(self, groups):
        # Without the wait, the numbers depend on the time of the passes.
        futures = [future for _, future in self._begun.values()]
        wait(futures)
        found = taken(self, groups)
        numbers.update(begun=len(futures), taken=len(found))
        return found

    def object_file(*arguments):
        numbers["compiled"] += 1
        return made(*arguments)

    monkeypatch.setattr(early.Early, "taken", all_taken)
    monkeypatch.setattr(compiler, "object_file", object_file)
    monkeypatch.setattr(compiler, "describe", lambda _, total: numbers.update(total=total))
    monkeypatch.setattr(compiler, "advance", lambda: numbers.update(["shown"]))
    return numbers


def set_threads(monkeypatch, number):
    monkeypatch.setattr(compiler, "default_threads", lambda: number)


def after_dispatch(monkeypatch, change):
    """Let a later pass of the pipeline change modules."""

    def changed(mod, _context):
        return change(mod)

    monkeypatch.setattr(
        stages, "place_updates", tvm.transform.module_pass(changed, opt_level=0, name="changed")
    )


def test_the_same_files_with_any_number_of_threads(tmp_path, monkeypatch, counts):
    """Threads use the options of the context, and the names that functions get later."""
    results, stored = [], []
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        for threads in (1, 2, 4, 4):
            set_threads(monkeypatch, threads)
            counts.clear()
            with relax_grad.cache(tmp_path / str(threads)):
                results.append(run(compiled(symbol_prefix="step_")))
            stored.append(files(tmp_path / str(threads)))
            early_groups = 0 if threads == 1 else 2
            assert (counts["begun"], counts["taken"]) == (early_groups, early_groups)
            assert counts["total"] == counts["shown"] > 2
            assert counts["compiled"] == (counts["total"] if len(results) < 4 else 0)
    assert stored[1:] == stored[:1] * 3
    for result in results[1:]:
        for own, wanted in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(own, wanted)


def test_kernels_that_a_later_pass_changes(tmp_path, monkeypatch, counts):
    """The changed kernel is compiled anew, and so are the others of its group."""
    marked = []

    def change(mod):
        functions = dict(mod.functions_items())
        kernels = [v for v, f in functions.items() if (f.attrs or {}).get(IS_KERNEL, False)]
        changed = next(v for v in kernels if "log" not in v.name_hint)
        marked.append(changed.name_hint)
        functions[changed] = functions[changed].with_attr("relax_grad.test", 1)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    after_dispatch(monkeypatch, change)
    stored = []
    for threads in (1, 2):
        set_threads(monkeypatch, threads)
        counts.clear()
        with relax_grad.cache(tmp_path / str(threads)):
            results = run(compiled())
        stored.append(files(tmp_path / str(threads)))
    assert len(marked) == 2
    assert (counts["begun"], counts["taken"]) == (2, 1)
    assert counts["compiled"] == counts["total"] + 1
    # The group before the change is a file that the run in one thread lacks.
    assert len(stored[1]) == len(stored[0]) + 1
    assert stored[0].items() <= stored[1].items()
    for x, result in zip(ARRAYS, results, strict=False):
        wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_of_a_later_pass_ends_the_threads(monkeypatch, error):
    is_compiling, has_failed = threading.Event(), threading.Event()
    begun = []

    def object_file(functions, *_):
        begun.append(list(functions))
        is_compiling.set()
        assert has_failed.wait(60)
        raise RuntimeError("nobody asks for this group")

    def fail(mod):
        assert is_compiling.wait(60)
        threading.Timer(0.2, has_failed.set).start()
        raise error("of a later pass")  # TVM makes an error of an interrupt

    set_threads(monkeypatch, 2)
    monkeypatch.setattr(compiler, "object_file", object_file)
    after_dispatch(monkeypatch, fail)
    before = set(threading.enumerate())
    with pytest.raises((error, RuntimeError), match="of a later pass"):
        compiled()
    assert has_failed.is_set()
    assert len(begun) == 1
    assert set(threading.enumerate()) <= before


def test_an_error_of_an_early_group_is_raised(monkeypatch, counts):
    def object_file(functions, *_):
        raise ValueError(f"no code for {min(functions)}")

    monkeypatch.setattr(compiler, "object_file", object_file)
    set_threads(monkeypatch, 2)
    with pytest.raises(ValueError, match="no code for"):
        compiled()
    assert counts["taken"] == 2


def test_nothing_is_begun_with_instruments_or_for_one_group(monkeypatch):
    class NoThreads:
        def __init__(self, *_):
            raise AssertionError("a thread begins")

    set_threads(monkeypatch, 2)
    monkeypatch.setattr(early, "ThreadPoolExecutor", NoThreads)
    with pytest.raises(AssertionError, match="a thread begins"):
        compiled()
    with tvm.transform.PassContext(instruments=[tvm.instrument.PassTimingInstrument()]):
        run(compiled())
    x = tensor("x", (4, 8), "float32")
    mod = build([x], lambda _, x: op.nn.softmax(x))
    run_one = relax_grad.pipeline(HOST, compile_functions=True)(mod)
    assert any(isinstance(f, tirx.PrimFunc) for f in run_one.functions.values())
