"""Training steps by relax_grad's pipeline for GPUs. Emulated, they do what they do on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compile_cuda import TARGET, missing
from late_device import OPTIONS, late_device
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.ir.bindings import bindings_of
from relax_grad.training import SGD, AdamW, Trainer, _device, memory_of, train_step
from relax_grad.training._donation import donating

from ._emulated_steps import GOES_ON, emulated

NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)


def parameter(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def transformer():
    """Return a module with a layer of an embedding, a normalisation and an activation, the values
    of its parameters, and three batches."""
    rng = np.random.default_rng(0)
    shapes = {"table": (11, 12), "g": (12,), "b": (12,), "w": (12, 9), "v": (9, 11)}
    tokens, classes = parameter("tokens", (3, 5), "int64"), parameter("classes", (15,), "int64")
    params = {name: parameter(name, shape) for name, shape in shapes.items()}
    bb = relax.BlockBuilder()
    with bb.function("loss", [tokens, classes, *params.values()]):
        with bb.dataflow():
            x = bb.emit(op.take(params["table"], bb.emit(op.reshape(tokens, (15,))), 0))
            x = bb.emit(op.nn.layer_norm(x, params["g"], params["b"], [-1]))
            x = bb.emit(op.nn.gelu(bb.emit(op.matmul(x, params["w"]))))
            x = bb.emit(op.nn.log_softmax(bb.emit(op.matmul(x, params["v"]))))
            loss = bb.emit_output(op.nn.nll_loss(x, classes))
        bb.emit_func_output(loss)
    values = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    batches = [(rng.integers(0, 11, (3, 5)), rng.integers(0, 11, (15,))) for _ in range(3)]
    return bb.get(), values, batches, list(shapes)


def convolutions():
    """Return the same of convolutions with batch normalisation and pooling."""
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 3, 3, 3), "c": (4, 4, 3, 3), "g": (4,), "b": (4,)}
    x = parameter("x", (2, 3, 8, 8))
    params = {name: parameter(name, shape) for name, shape in shapes.items()}
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *params.values()]):
        with bb.dataflow():
            y = bb.emit(op.nn.conv2d(x, params["a"], padding=1))
            statistics = [relax.const(np.full(4, value, "float32")) for value in (0, 1)]
            norm = bb.emit(
                op.nn.batch_norm(y, params["g"], params["b"], *statistics, axis=1, training=True)
            )
            y = bb.emit(norm[0])
            z = bb.emit(op.tanh(bb.emit(op.nn.conv2d(y, params["c"], padding=1))))
            y = bb.emit(op.add(bb.emit(op.nn.relu(y)), z))
            y = bb.emit(op.nn.max_pool2d(y, (2, 2), (2, 2)))
            loss = bb.emit_output(op.mean(bb.emit(op.square(y))))
        bb.emit_func_output(loss)
    values = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    batches = [(rng.normal(size=(2, 3, 8, 8)).astype("float32"),) for _ in range(3)]
    return bb.get(), values, batches, list(shapes)


CASES = {
    "AdamW": (transformer, AdamW(lr=0.05), {"clip_norm": 1.0}),
    "SGD": (convolutions, SGD(lr=0.05, momentum=0.9, nesterov=True), {}),
    "bf16": (transformer, SGD(lr=0.01, momentum=0.9), {"precision": "bf16"}),
}


def states(trainer):
    groups = {**trainer.values, **trainer.optimizer_state}
    return {name: tensor.numpy() for name, tensor in groups.items()}


@NEEDS_CXX
@pytest.mark.parametrize("case", CASES)
def test_emulated_steps_are_those_of_the_cpu(case):
    make, optimizer, options = CASES[case]
    module, values, batches, names = make()
    # The pipelines round to bfloat16 in different places.
    near = 1e-2 if "precision" in options else 1e-4
    step = train_step(module, optimizer, wrt=names, **options)
    wanted = Trainer(step, values=values)
    with emulated(step, values=values) as (first, second):
        places = [tensor.data_ptr() for tensor in first._settled().groups["params"]]
        for batch in batches:
            losses = [trainer.step(*batch).loss for trainer in (first, second, wanted)]
            assert losses[0] == losses[1] == pytest.approx(losses[2], near)
        after, expected = states(first), states(wanted)
        for name, value in states(second).items():
            assert after[name].tobytes() == value.tobytes(), f"{name} depends on the order"
            if "precision" in options:
                distance = np.linalg.norm(after[name] - expected[name])
                assert distance <= 0.05 * np.linalg.norm(expected[name]), name
            else:
                np.testing.assert_allclose(after[name], expected[name], 2e-3, 2e-4)
        assert [tensor.data_ptr() for tensor in first._settled().groups["params"]] == places
        if case == "SGD":
            with pytest.raises(FloatingPointError):
                first.step(np.full((2, 3, 8, 8), np.nan, "float32"))
            for name, value in states(first).items():
                assert after[name].tobytes() == value.tobytes(), f"{name} of a rejected step"
        GOES_ON.copyfrom(np.array(False))  # an earlier step was not applied
        first.step(*batches[0])
        GOES_ON.copyfrom(np.array(True))
        for name, value in states(first).items():
            assert after[name].tobytes() == value.tobytes(), f"{name} of a step that is void"


@pytest.mark.skipif(not tvm.cuda().exist, reason="no CUDA device: a stand-in runs ahead instead")
@pytest.mark.parametrize("case", CASES)
def test_a_device_that_runs_ahead(case, tmp_path):
    """Steps that wait for each loss, and steps that do not, have the same bits."""
    make, optimizer, options = CASES[case]
    module, values, batches, names = make()
    step = train_step(module, optimizer, wrt=names, **options)
    trainer, wanted = Trainer(step, values=values, device="cuda"), Trainer(step, values=values)
    trainer.on_nan = wanted.on_nan = "skip"
    trainer.save(tmp_path / "start")
    loader = batches * 5
    if case == "SGD":
        loader[4] = (np.full((2, 3, 8, 8), np.nan, "float32"),)
    wanted.fit(loader, progress=False)
    found = []
    for ahead in (0, 1, 2, 6):
        trainer.load(tmp_path / "start")
        trainer.fit(loader, progress=False, ahead=ahead)
        assert (trainer.steps, trainer.skipped) == (wanted.steps, wanted.skipped)
        bits = {name: value.tobytes() for name, value in states(trainer).items()}
        found.append((bits, repr(trainer.history.loss)))
        np.testing.assert_allclose(trainer.history.loss, wanted.history.loss, 1e-2, 1e-3)
    assert all(each == found[0] for each in found)


def facts(module):
    """Return the kernels that a compiled step calls, and the bytes that it allocates."""
    calls = [b.value for b in bindings_of(module["step"].body) if isinstance(b.value, relax.Call)]
    kernels = [
        call
        for call in calls
        if isinstance(call.op, tvm.ir.GlobalVar) and isinstance(module[call.op], tirx.PrimFunc)
    ]
    allocated = [
        int(call.args[0].values[0])
        for call in calls
        if getattr(call.op, "name", "").endswith(".alloc_storage")
    ]
    return len(kernels), sum(allocated)


def test_a_step_has_fewer_kernels_and_less_memory():
    module, _, _, names = convolutions()
    step = train_step(module, AdamW(), wrt=names)
    roots = _device.roots_of(step)
    with TARGET:
        default = relax.get_default_pipeline(TARGET)(_device.prepared(step.module, roots))
        own = relax_grad.pipeline(TARGET)(_device.prepared(donating(step, is_chained=True), roots))
    before, after = facts(default), facts(own)
    assert after[0] <= before[0] - len(names)
    assert after[1] < before[1]
    memory = memory_of(step, device="cuda")
    assert memory.peak == after[1]
    assert memory.results == 5  # the loss, and whether the step was applied
    assert "step_memory" in {variable.name_hint for variable in own.get_global_vars()}


def test_a_library_leaves_parameters_in_place():
    """A function of a library reads parameters, and an update after it may write to them."""
    pytest.importorskip("torch", reason="PyTorch is not installed: there is no library")
    module, values, batches, names = convolutions()
    step = train_step(module, SGD(lr=0.05, momentum=0.9), wrt=names)
    assert memory_of(step, device="cuda", library="torch").results <= 9
    wanted = Trainer(step, values=values)
    wanted.fit(batches, 2, progress=False)
    with late_device():
        trainer = Trainer(step, values=values, library="torch", **OPTIONS)
        places = [tensor.data_ptr() for tensor in trainer._settled().groups["params"]]
        trainer.fit(batches, 2, progress=False)
        assert [tensor.data_ptr() for tensor in trainer._settled().groups["params"]] == places
        np.testing.assert_allclose(trainer.history.loss, wanted.history.loss, 1e-3)
        after, expected = states(trainer), states(wanted)
        for name, value in expected.items():
            np.testing.assert_allclose(after[name], value, 5e-3, 5e-4, err_msg=name)


@pytest.mark.parametrize("kind", ["rocm", "opencl"])
def test_other_devices_have_the_pipeline_of_tvm(kind):
    """The same functions, by name, as TVM's default pipeline makes."""
    target = tvm.target.Target({"kind": kind}, host="llvm")
    x = parameter("x", (4, 3))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(op.exp(x)))
    with target:
        own = relax_grad.pipeline(target)(bb.get())
        default = relax.get_default_pipeline(target)(bb.get())
    tvm.ir.assert_structural_equal(own, default)


@NEEDS_CXX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("residual", "decoder", "vision transformer", "U-Net")),
        *((name, {"precision": "bf16"}) for name in ("residual", "decoder")),
    ],
)
def test_emulated_steps_of_networks(name, options):
    """With a precision, the network is imported within ``torch.autocast``."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch_dispatched import step_of

    step, batch = step_of(name, **options)
    wanted = Trainer(step)
    with emulated(step) as (first, second):
        for _ in range(2):
            losses = [trainer.step(*batch).loss for trainer in (first, second, wanted)]
            assert losses[0] == losses[1] == pytest.approx(losses[2], 1e-2 if options else 1e-3)
        assert all(
            a.tobytes() == b.tobytes()
            for a, b in zip(states(first).values(), states(second).values(), strict=True)
        )
