"""Declared functions: equal to functions made at once, and made only on demand."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tvm
from activated_product import ARRAYS, factors, module
from dispatched import HOST
from kernel_cases import cases
from processes import run_python
from programs import build, tensor
from tvm import relax
from tvm.relax import op
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.cpu.codegen import compile as compiler
from relax_grad.cpu.codegen import compiler as groups
from relax_grad.cpu.codegen import declarations
from relax_grad.cpu.codegen.declarations import Declarations
from relax_grad.cpu.codegen.objects import UnsupportedObject
from relax_grad.cpu.codegen.sources import digest, sources
from relax_grad.cpu.dispatch import kernel_for, registry
from relax_grad.cpu.dispatch._identity import key_of, text_of
from relax_grad.cpu.dispatch.declare import UNDEFINED
from relax_grad.cpu.kernel.matmul.matmul import Matmul, matmul
from relax_grad.cpu.passes.dispatch import DeclareKernels
from relax_grad.cpu.passes.schedule import DeclareSchedules
from relax_grad.cpu.target import CPU
from relax_grad.transform import DispatchKernels, ScheduleLoops


class Counting(Declarations):
    """Declarations that record each identity and each function that is made."""

    def __init__(self):
        super().__init__()
        self.identities: list[str] = []
        self.made: list[str] = []

    def kernel(self, function, generate, identity):
        self.identities.append(identity)
        return super().kernel(function, self._counted(generate, "kernel"), identity)

    def scheduled(self, function, make, means):
        return super().scheduled(function, self._counted(make, "schedule"), means)

    def _counted(self, make, what):
        def made():
            self.made.append(what)
            return make()

        return made


@pytest.fixture
def runs(monkeypatch):
    """The declarations of each pipeline run after this point."""
    processes = []

    def for_run():
        made = Declarations.for_run()
        if made is not None:
            processes.append(Counting())
        return made and processes[-1]

    class Watched(Declarations):
        pass

    Watched.for_run = staticmethod(for_run)
    monkeypatch.setattr(declarations, "Declarations", Watched)
    return processes


def in_pipeline(mod, **options):
    with HOST:
        return relax_grad.pipeline(**options)(mod)


def run(mod, pipeline="relax_grad"):
    executable = tvm.compile(mod, HOST, relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, ARRAYS)).numpy()


def test_kernels_are_those_of_dispatching():
    """One case of every operator with kernels; equal identities, of any calls, stand for equal
    functions."""
    functions: dict[str, tvm.tirx.PrimFunc] = {}
    for i, case in enumerate(cases()):
        # Running each case both static and symbolic would take twice as long.
        mod = case.module(None if i % 2 else 3)
        declared = Counting()
        dispatched = DeclareKernels(HOST, 2, declared.kernel)(mod)
        assert not declared.made
        wanted = DispatchKernels(HOST)(mod)
        result = declared.completed(dispatched)
        tvm.ir.assert_structural_equal(result, wanted)
        kernels = {
            variable.name_hint: function
            for variable, function in result.functions_items()
            if isinstance(function, tvm.tirx.PrimFunc)
        }
        assert len(kernels) == len(declared.made), case.name
        # The numbers in their names count them.
        for identity, name in zip(declared.identities, sorted(kernels), strict=True):
            known = functions.setdefault(identity, kernels[name])
            assert structural_equal(known, kernels[name]), case.name
    assert len(functions) > 100


@pytest.mark.parametrize("batch", [None, 3])
def test_functions_without_kernels_are_scheduled_alike(batch):
    n = tvm.tirx.Var("n", "int64") if batch is None else batch
    params = [tensor("x", (n, 37), "float32"), tensor("y", (37,), "float32")]

    def body(bb, x, y):
        return relax.Tuple([bb.emit(op.sum(x, [1])), bb.emit(op.tanh(bb.emit(op.add(x, y))))])

    legal = relax.transform.LegalizeOps()(build(params, body))
    declared = Counting()
    scheduled = DeclareSchedules(HOST, declared.scheduled)(legal)
    assert not declared.made
    tvm.ir.assert_structural_equal(declared.completed(scheduled), ScheduleLoops(HOST)(legal))
    assert declared.made == ["schedule"] * 3


def identities() -> list[str]:
    declared = Counting()
    for case in cases()[::5]:
        DeclareKernels(HOST, 2, declared.kernel)(case.module(None))
    return declared.identities


def test_identities_are_the_same_in_each_process():
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import test_declarations
print("found", repr(test_declarations.identities()))
"""
    printed = run_python(script, {**os.environ, "PYTHONHASHSEED": "7"})
    (identity_line,) = (line for line in printed.splitlines() if line.startswith("found"))
    assert identity_line == f"found {identities()!r}"


PRODUCT = Matmul(4, 5, 6)
SHAPES = [[4, 6], [6, 5], [4, 5]]


def text(*arguments, **keywords):
    return text_of(key_of(partial(matmul, *arguments, **keywords)))


def test_identities_know_all_arguments():
    cpu = CPU(16, 32, 2)
    texts = [
        text(PRODUCT, cpu, SHAPES),
        text(Matmul(4, 5, 7), cpu, SHAPES),
        text(PRODUCT, CPU(16, 32, 3), SHAPES),
        text(PRODUCT, cpu, SHAPES[::-1]),
        text(PRODUCT, cpu, shapes=SHAPES),
        text(PRODUCT, cpu, [[4, 6], [6, 5], ["4", 5]]),
        text(PRODUCT, cpu, SHAPES, True),
        text(PRODUCT, cpu, SHAPES, 1),
        text(PRODUCT, cpu, SHAPES, 0.0),
        text(PRODUCT, cpu, SHAPES, -0.0),
        text(PRODUCT, cpu, SHAPES, float("nan")),
        text(PRODUCT, cpu, SHAPES, tvm.tirx.Var("n0", "int32")),
        text(PRODUCT, cpu, SHAPES, tvm.tirx.Var("n0", "int64")),
        text(PRODUCT, cpu, SHAPES, tvm.tirx.Var("n1", "int32")),
        text(PRODUCT, cpu, SHAPES, tvm.tirx.Var("n0", "int32") * 2),
    ]
    assert None not in texts
    assert len(set(texts)) == len(texts)


def test_lambdas_and_unknown_objects_have_no_identity():
    cpu = CPU(16, 32, 2)
    assert text_of(key_of(partial(lambda: None))) is None
    assert text(PRODUCT, cpu, lambda: None) is None
    assert text(PRODUCT, cpu, object()) is None
    # A test or a user may replace a function of the package: the sources then do not describe it.
    replaced = partial(lambda *arguments: matmul(*arguments))
    replaced.func.__module__, replaced.func.__qualname__ = matmul.__module__, matmul.__qualname__
    assert text_of(key_of(replaced)) is None


def test_a_kernel_of_unknown_sources_is_generated(monkeypatch, runs, tmp_path):
    """The kernel's sources are unknown, so its content identifies it."""
    made = []

    def own_matmul(*arguments):
        made.append(arguments)
        return matmul(*arguments)

    known = dict(registry._KERNELS)
    theirs = known.pop("relax.matmul")
    monkeypatch.setattr(registry, "_KERNELS", known)

    @kernel_for("relax.matmul", takes_uncast=False)
    def kernel(site):
        call = theirs(site)
        generator = call.generator
        generator = partial(own_matmul, *generator.args, generator.keywords["shapes"])
        return type(call)(generator, call.arguments)

    with relax_grad.cache(tmp_path):
        run(module())
        run(module())
    assert len(made) == 2
    assert [process.identities for process in runs] == [[], []]


def test_nothing_is_made_when_the_directory_has_it(tmp_path, runs):
    with relax_grad.cache(tmp_path):
        wanted = run(module())
        assert sorted(set(runs[-1].made)) == ["kernel", "schedule"]
        np.testing.assert_array_equal(run(module()), wanted)
    assert len(runs) == 2
    assert runs[-1].identities
    assert not runs[-1].made


def test_other_sources_have_other_keys(tmp_path, runs, monkeypatch):
    with relax_grad.cache(tmp_path):
        run(module())
        monkeypatch.setattr(declarations, "sources", lambda: "others")
        run(module())
    assert sorted(runs[0].made) == sorted(runs[1].made)


def test_the_digest_of_sources(tmp_path):
    package = tmp_path / "package"
    (package / "kernel").mkdir(parents=True)
    later = time.time() + 1000
    assert digest(package, later) is None
    (package / "__init__.py").write_text("")
    (package / "kernel/sum.py").write_text("a = 1\n")
    digests = [digest(package, later)]
    assert digests == [digest(package, later)]
    (package / "kernel/sum.py").write_text("a = 2\n")
    digests.append(digest(package, later))
    (package / "kernel/sum.py").rename(package / "kernel/add.py")
    digests.append(digest(package, later))
    (package / "kernel/more.py").write_text("")
    digests.append(digest(package, later))
    assert None not in digests
    assert len(set(digests)) == 4


def test_sources_that_were_written_after_the_import(tmp_path):
    """The modification time may be older than the content, for example after a copy."""
    path = tmp_path / "edited.py"
    path.write_text("a = 1\n")
    os.utime(path, (1, 1))
    assert digest(tmp_path, time.time() + 1000) is not None
    assert digest(tmp_path, time.time() - 1000) is None


def test_without_sources_everything_is_generated_at_once(tmp_path, runs, monkeypatch):
    monkeypatch.setattr(declarations, "sources", lambda: None)
    with relax_grad.cache(tmp_path):
        first = run(module())
        np.testing.assert_array_equal(run(module()), first)
    assert not runs


def raises(*_):
    raise UnsupportedObject("as for another machine")


@pytest.mark.parametrize("way", ["external", "object", "disabled", "instrument"])
def test_declarations_do_not_stay(way, monkeypatch, tmp_path):
    """Where relax_grad does not compile the functions, the pipeline returns the module without
    declarations."""
    mod, options = module(), {}
    if way == "external":
        monkeypatch.setattr(compiler, "links_external_modules", lambda: False)
    elif way == "object":
        monkeypatch.setattr(groups, "embedded", raises)
    elif way == "disabled":
        options["disabled_pass"] = ["relax_grad.CompileFunctions"]
    else:
        monkeypatch.setattr(compiler, "links_external_modules", lambda: False)
        options["instruments"] = [tvm.instrument.PassTimingInstrument()]
    wanted = in_pipeline(mod)
    with tvm.transform.PassContext(**options), relax_grad.cache(tmp_path):
        passed = in_pipeline(mod, compile_functions=True)
    tvm.ir.assert_structural_equal(passed, wanted)
    assert UNDEFINED not in passed.script()


def test_instruments_see_no_declarations():
    @tvm.instrument.pass_instrument
    class Look:
        def run_after_pass(self, mod, info):
            assert UNDEFINED not in mod.script()
            seen.append(info.name)

    seen = []
    with tvm.transform.PassContext(instruments=[Look()]):
        in_pipeline(module(), compile_functions=True)
    assert "relax_grad.DispatchKernels" in seen


def test_an_error_of_a_generator_is_raised(runs, monkeypatch):
    def generate():
        raise ValueError("there is no such kernel")

    def declared(self, function, _generate, identity):
        return Declarations.kernel(self, function, generate, identity)

    monkeypatch.setattr(Counting, "kernel", declared)
    with pytest.raises(ValueError, match="there is no such kernel"):
        run(module())


def test_kernels_of_constants_are_folded():
    """TVM runs these kernels at compile time."""
    weight = relax.const(ARRAYS[1])

    def body(bb, x, w):
        row = bb.emit(op.add(relax.const(ARRAYS[0]), relax.const(np.float32(1))))
        return op.add(bb.emit(op.matmul(x, w)), bb.emit(op.matmul(row, weight)))

    mod = build(factors(), body)
    wanted = in_pipeline(mod)
    with tvm.transform.PassContext(disabled_pass=["relax_grad.CompileFunctions"]):
        passed = in_pipeline(mod, compile_functions=True)
    tvm.ir.assert_structural_equal(passed, wanted)
    product = ARRAYS[0] @ ARRAYS[1]
    np.testing.assert_allclose(run(mod), 2 * product + ARRAYS[1].sum(0), rtol=1e-4, atol=1e-4)


def test_a_declaration_does_not_link():
    """A declaration fails to link. It is not a kernel with an empty body."""
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import test_declarations as t
declared = t.DeclareKernels(t.HOST, 2, t.Declarations().kernel)(t.module())
t.run(declared, "default")
"""
    with pytest.raises(AssertionError, match=UNDEFINED):
        run_python(script)


def test_sources_are_known_here():
    """Without known sources the tests of this file would test nothing."""
    assert sources() is not None
