"""Functions compiled in threads: the same numbers as TVM's, errors, and the cases that are left to
TVM."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST, flat
from processes import run_python
from programs import build, tensor, to_numpy
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.script import from_source

import relax_grad
from relax_grad.cpu.codegen import lower
from relax_grad.cpu.codegen.compile import CompileFunctions, assembled

RNG = np.random.default_rng(0)
SHAPES = [(6, 32), (32, 48), (48,)]
ARRAYS = [RNG.normal(size=shape).astype("float32") for shape in SHAPES]


def classifier(rows=6):
    """Return a loss with its gradients: kernels, scheduled functions and, for symbolic rows, shape
    functions."""

    def body(bb, x, w, b):
        scores = bb.emit(op.nn.gelu(bb.emit(op.add(op.matmul(x, w), b))))
        return op.negative(op.mean(bb.emit(op.nn.log_softmax(scores))))

    params = [
        tensor(name, shape, "float32")
        for name, shape in zip("xwb", [(rows, 32), *SHAPES[1:]], strict=True)
    ]
    return relax_grad.value_and_grad(build(params, body), wrt=["w", "b"])


def run(executable, *arrays, name="main_adjoint"):
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return flat([to_numpy(machine[name](*map(tvm.runtime.tensor, arrays or ARRAYS)))])


def assert_same(actual, wanted):
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def prim_funcs(mod):
    return [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]


@pytest.mark.parametrize("rows", [6, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_numbers_are_those_of_one_thread(rows):
    wanted = run(tvm.compile(classifier(rows), HOST, relax_pipeline=relax_grad.pipeline()))
    for _ in range(2):
        results = run(tvm.compile(classifier(rows), HOST, relax_pipeline="relax_grad"))
        assert_same(results, wanted)


def test_all_functions_are_compiled():
    with HOST:
        left = relax_grad.pipeline()(classifier())
        done = relax_grad.pipeline(compile_functions=True)(classifier())
    assert len(prim_funcs(left)) > 4
    assert left.get_attr("external_mods") is None
    assert [str(f.attrs["global_symbol"]) for f in prim_funcs(done)] == ["nothing"]
    (library,) = done.get_attr("external_mods")
    for function in prim_funcs(left):
        assert library.get_function(str(function.attrs["global_symbol"])) is not None


@pytest.mark.parametrize("machine", ["emeraldrapids", "x86-64-v4", "znver5"])
def test_loops_fill_whole_vectors(machine):
    """LLVM vectorizes loops for Intel's processors with half of a vector of AVX-512 by default."""
    target = lower.optimizing(tvm.target.Target({"kind": "llvm", "mcpu": machine}))
    x = te.placeholder((64, 96), "float32", name="x")
    y = te.compute(x.shape, lambda *i: x[i] * x[i] + 1, name="y")
    library = lower.library({"f": te.create_prim_func([x, y])}, target)
    assert "zmm" in library.inspect_source("asm")


@pytest.mark.parametrize(
    ("machine", "is_left"), [("emeraldrapids", False), ("znver5", True), ("haswell", True)]
)
def test_single_functions_are_left_to_tvm_unless_it_fills_half_vectors(machine, is_left):
    def double(bb, x):
        return op.add(x, x)

    module = build([tensor("x", (32, 64), "float32")], double)
    target = tvm.target.Target({"kind": "llvm", "mcpu": machine, "num-cores": 2})
    done = relax_grad.pipeline(target, compile_functions=True)(module)
    assert len(prim_funcs(done)) == 1
    assert (done.get_attr("external_mods") is None) == is_left


def test_exported_library_runs_in_another_process(tmp_path):
    executable = tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")
    executable.export_library(str(tmp_path / "step.so"))
    np.savez(tmp_path / "arrays.npz", *ARRAYS)
    library, inputs, results = (
        str(tmp_path / name) for name in ("step.so", "arrays.npz", "results.npz")
    )
    run_python(
        f"""
import sys
import numpy as np
import tvm
from tvm import relax
assert "relax_grad" not in sys.modules
machine = relax.VirtualMachine(tvm.runtime.load_module({library!r}), tvm.cpu())
arrays = np.load({inputs!r})
loss, gradients = machine["main_adjoint"](*(tvm.runtime.tensor(arrays[name]) for name in arrays))
np.savez({results!r}, loss.numpy(), *(gradient.numpy() for gradient in gradients))
"""
    )
    stored = np.load(results)
    assert_same([stored[name] for name in stored], run(executable))


def test_errors_of_functions_arrive():
    """A function reports the argument that it refuses."""
    executable = tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    wrong = [np.zeros((6, 31), "float32"), *ARRAYS[1:]]
    with pytest.raises((ValueError, RuntimeError), match=r"shape|Mismatch"):
        machine["main_adjoint"](*map(tvm.runtime.tensor, wrong))


def with_function(source: str) -> tvm.IRModule:
    """Return a module that calls a tensor function on a vector and returns the result."""
    return from_source(
        f"""
@I.ir_module
class Module:
    {source}

    @R.function
    def main(x: R.Tensor((48,), "float32")):
        cls = Module
        with R.dataflow():
            y = R.call_tir(cls.function, (x,), R.Tensor((48,), "float32"))
            R.output(y)
        return y
"""
    )


def test_a_function_that_calls_packed_functions():
    """The machine code finds packed functions through a pointer that the runtime sets."""
    mod = with_function(
        """
    @T.prim_func(private=True, s_tir=True)
    def function(A: T.Buffer((48,), "float32"), B: T.Buffer((48,), "float32")):
        for i in range(48):
            with T.sblock("B"):
                vi = T.axis.spatial(48, i)
                B[vi] = A[vi] * T.Cast("float32", T.call_packed("relax_grad.test.twice", vi))
"""
    )
    tvm.register_global_func("relax_grad.test.twice", lambda value: 2 * value, override=True)
    results = run(tvm.compile(mod, HOST, relax_pipeline="relax_grad"), ARRAYS[2], name="main")
    np.testing.assert_allclose(results[0], ARRAYS[2] * 2 * np.arange(48))


def test_functions_that_call_each_other_are_left_to_tvm():
    calling = from_source(
        """
@I.ir_module
class Module:
    @T.prim_func
    def inner(n: T.int32, m: T.int32) -> T.int32:
        return n + m

    @T.prim_func
    def outer(n: T.int32, m: T.int32) -> T.int32:
        return Module.inner(n, m)
"""
    )
    functions = {**dict(classifier_lowered().functions_items()), **dict(calling.functions_items())}
    done = CompileFunctions(HOST)(tvm.IRModule(functions))
    assert {v.name_hint for v, f in done.functions_items() if isinstance(f, tirx.PrimFunc)} == {
        "inner",
        "outer",
    }


def classifier_lowered():
    with HOST:
        return relax_grad.pipeline()(classifier())


def test_unsupported_objects_and_executables_are_left_to_tvm(monkeypatch):
    """Other object file formats, executables without bytecode, and another pipeline for tensor
    functions."""
    lowered = classifier_lowered()
    count = len(prim_funcs(lowered))
    windows = tvm.target.Target(
        {"kind": "llvm", "mtriple": "x86_64-pc-windows-msvc", "mcpu": "skylake"}
    )
    assert len(prim_funcs(CompileFunctions(windows)(lowered))) == count

    seen = []
    built = tvm.tirx.build

    def build_functions(mod, *args, **options):
        seen.append(len(mod.functions))
        return built(mod, *args, **options)

    monkeypatch.setattr(tvm.tirx, "build", build_functions)
    executable = relax.build(classifier(), HOST, relax_pipeline="relax_grad", exec_mode="compiled")
    assert seen.pop() > count
    assert_same(run(executable), run(tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")))


@pytest.mark.parametrize("triple", ["x86_64-linux-gnu", "aarch64-linux-gnu"])
def test_another_machine(triple, tmp_path):
    """Object files for other machines are assembled and exported as well."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "num-cores": 2})
    with target:
        done = relax_grad.pipeline(target, compile_functions=True)(classifier())
    (library,) = done.get_attr("external_mods")
    library.write_to_file(str(tmp_path / "library.o"))
    data = (tmp_path / "library.o").read_bytes()
    assert data[:4] == b"\x7fELF"
    assert b"__tvm_ffi_matmul_kernel" in data


def test_instruments_see_the_passes_of_functions():
    """Instruments are not thread-safe: functions are compiled one after the other."""

    @tvm.instrument.pass_instrument
    class Names:
        def __init__(self):
            self.seen = []

        def run_before_pass(self, mod, info):
            self.seen.append(info.name)

    names = Names()
    with tvm.transform.PassContext(instruments=[names]):
        executable = tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")
    assert names.seen.count("tirx.MakePackedAPI") > 1
    assert_same(run(executable), run(tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")))


def test_options_of_the_context_count():
    """The compiling threads use the options of the pass context, as does the key of a function in a
    directory."""
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        executable = tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")
    wanted = run(tvm.compile(classifier(), HOST, relax_pipeline="relax_grad"))
    for ours, theirs in zip(run(executable), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", [0, 2])
def test_assembled_modules_contain_machine_code(level):
    """The functions launch threads, call runtime functions, convert float16, and return errors."""
    target = tvm.target.Target({"kind": "llvm", "opt-level": level})
    x = te.placeholder((64,), "float16", name="x")
    y = te.compute((64,), lambda i: tirx.exp(x[i].astype("float32")).astype("float16"), name="y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    schedule.parallel(schedule.get_loops("y")[0])
    library = lower.library({"f": schedule.mod["main"]}, target.with_host(target))
    assert "module asm" not in library.inspect_source("ll")
    code = assembled(library, target)
    text = code.inspect_source("ll")
    assert "module asm" in text
    assert "@expf(" not in text
    x = RNG.normal(size=64).astype("float16")
    y = tvm.runtime.tensor(np.zeros(64, "float16"))
    code["f"](tvm.runtime.tensor(x), y)
    np.testing.assert_allclose(y.numpy(), np.exp(x.astype("float32")), rtol=2e-3)
    with pytest.raises(Exception, match=r"shape\[0\]"):
        code["f"](tvm.runtime.tensor(x[:10]), y)
