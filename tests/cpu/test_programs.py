"""Whole programs in the directory of compiled functions."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tvm
import tvm_ffi
from activated_product import ARRAYS, factors, module
from dispatched import HOST
from processes import run_python
from programs import build, to_numpy
from tvm import relax
from tvm.ir import Op
from tvm.relax import op

import relax_grad
from relax_grad.cpu import programs
from relax_grad.cpu.codegen import lower
from relax_grad.cpu.codegen.directory import PROGRAM
from relax_grad.ir.remat import REMAT, as_attribute
from relax_grad.training import SGD, Trainer, train_step


@pytest.fixture(autouse=True)
def directory(tmp_path):
    with relax_grad.cache(tmp_path / "kept"):
        yield tmp_path / "kept"


@pytest.fixture
def compilations(monkeypatch):
    """The modules that are compiled after this point."""
    made, compiled = [], tvm.compile
    monkeypatch.setattr(
        programs.tvm, "compile", lambda mod, *a, **k: made.append(mod) or compiled(mod, *a, **k)
    )
    return made


def run(mod, **options):
    machine = relax.VirtualMachine(programs.compiled(mod, HOST, **options), tvm.cpu())
    return to_numpy(machine["main"](*map(tvm.runtime.tensor, ARRAYS)))


def scaled(factor, name="x"):
    """A module with a constant of two elements."""

    def body(bb, x, w):
        y = bb.emit(op.sum(bb.emit(op.matmul(x, w))))
        return op.multiply(y, relax.const(np.array([factor, 1], "float32")))

    params = factors()
    return build([relax.Var(name, params[0].ty), params[1]], body)


def test_a_second_time_the_program_is_loaded(directory, compilations, capfd):
    wanted = run(module())
    np.testing.assert_array_equal(run(module()), wanted)
    assert len(compilations) == 1
    assert len(list(directory.glob(f"*/*{PROGRAM}"))) == 1
    assert "Scope Saving" not in capfd.readouterr().err


def test_loaded_programs_are_exported(tmp_path, compilations):
    wanted = run(module())
    executable = programs.compiled(module(), HOST)
    assert len(compilations) == 1
    executable.export_library(str(tmp_path / "program.so"))
    library = tvm.runtime.load_module(str(tmp_path / "program.so"))
    machine = relax.VirtualMachine(library, tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, ARRAYS))
    np.testing.assert_array_equal(to_numpy(found), wanted)


def test_the_key_has_all_that_matters(compilations, monkeypatch):
    """Elements of constants, names, other inputs, options and versions."""
    two, three = run(scaled(2)), run(scaled(3))
    np.testing.assert_allclose(three, two * [1.5, 1], rtol=1e-6)
    np.testing.assert_array_equal(run(scaled(2)), two)
    assert len(compilations) == 2
    run(scaled(2, "y"))
    run(scaled(2), means="other")
    with tvm.transform.PassContext(opt_level=1):
        run(scaled(2))
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        run(scaled(2))
    monkeypatch.setattr(lower, "_REVISION", -1)
    run(scaled(2))
    assert len(compilations) == 7
    monkeypatch.setattr(lower, "_REVISION", -2)
    keys = {
        programs._key(scaled(2), target, "")
        for target in map(relax_grad.target.x86_64, ("v2", "v3", "v4"))
    }
    keys.add(programs._key(scaled(2), relax_grad.target.x86_64("v3", 2), ""))
    monkeypatch.setattr(lower, "build", lambda: "another build of TVM")
    keys.add(programs._key(scaled(2), relax_grad.target.x86_64("v3"), ""))
    assert len(keys) == 5
    assert None not in keys


def test_damaged_programs_are_compiled_again(directory, compilations):
    wanted = run(module())
    (path,) = directory.glob(f"*/*{PROGRAM}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    np.testing.assert_array_equal(run(module()), wanted)
    # Data with the right checksum that is no program: another build may write it.
    stored = relax_grad.cpu.codegen.directory.Directory(directory)
    for data in (b"", b"no program", programs.zlib.compress(b"\xff" * 40)):
        stored.store(path.parent.name + path.stem, data, PROGRAM)
        np.testing.assert_array_equal(run(module()), wanted)
    assert len(compilations) == 5


def test_programs_of_this_process_alone_are_not_kept(directory, compilations):
    """Callables, instruments, other pipelines, and legalizations of a user."""
    mod = module()
    for name, value in ((REMAT, as_attribute(lambda _: True)), ("more", tvm_ffi.convert(print))):
        function = mod["main"].with_attr(name, value)
        assert programs._key(tvm.IRModule({"main": function}), HOST, "") is None
    with tvm.transform.PassContext(instruments=[tvm.ir.instrument.PassTimingInstrument()]):
        assert programs._key(mod, HOST, "") is None
    assert programs._key(mod, tvm.target.Target("c"), "") is None
    assert programs._key(mod, HOST, "") is not None
    run(mod, options={"relax_pipeline": relax_grad.pipeline(HOST)})
    assert not list(directory.glob(f"*/*{PROGRAM}"))


def test_other_legalizations(compilations):
    """The second program has the legalization that a user registered after the first one."""
    name = "relax.nn.gelu"
    wanted = run(module())
    original = Op.get(name).get_attr("FLegalize")
    try:
        tvm.ir.register_op_attr(
            name, "FLegalize", lambda bb, call: bb.emit(op.sin(call.args[0])), 99
        )
        assert not np.array_equal(run(module()), wanted)
    finally:
        Op.get(name).reset_attr("FLegalize")
        tvm.ir.register_op_attr(name, "FLegalize", original, 10)
    np.testing.assert_array_equal(run(module()), wanted)
    assert len(compilations) == 2


def test_a_training_step_of_another_process(directory, compilations):
    """The same script in another process, with other hashes of strings, compiles nothing."""
    step = """
import numpy as np
from tvm import relax
from relax_grad.training import SGD, Trainer, train_step
x = relax.Var("x", relax.TensorType((4, 3), "float32"))
w = relax.Var("w", relax.TensorType((3,), "float32"))
bb = relax.BlockBuilder()
with bb.function("loss", [x, w]):
    y = bb.emit(relax.op.matmul(x, w))
    _ = bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(y))))
trainer = Trainer(
    train_step(bb.get(), SGD(momentum=0.9), wrt="w"), values={"w": np.ones(3, "float32")}
)
loss = trainer.step(np.ones((4, 3), "float32")).loss
"""
    for seed in ("1", "2"):
        environment = {**os.environ, "RELAX_GRAD_CACHE": str(directory), "PYTHONHASHSEED": seed}
        refusing = "import tvm\ntvm.compile = None\n" if seed == "2" else ""
        found = run_python(f"{refusing}{step}print(loss, trainer.params['w'].numpy())", environment)
        assert found == "36.0 [0.976 0.976 0.976]"
    assert len(list(directory.glob(f"*/*{PROGRAM}"))) == 1


def test_evaluation_and_training_are_kept(directory):
    x, w = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", (4, 3)), ("w", (3,))))

    def step(momentum=0.0):
        mod = build([x, w], lambda bb, x, w: op.sum(bb.emit(op.matmul(x, w))))
        return train_step(mod, SGD(momentum=momentum), wrt="w", func_name="main")

    values, batch = {"w": np.ones(3, "float32")}, np.ones((4, 3), "float32")
    for _ in range(2):
        trainer = Trainer(step(), values=values)
        trainer.step(batch)
        trainer.evaluate([(batch,)])
        assert len(list(directory.glob(f"*/*{PROGRAM}"))) == 2
    Trainer(step(0.5), values=values)
    assert len(list(directory.glob(f"*/*{PROGRAM}"))) == 3
