"""Training on a device: copies, files, errors; without a GPU, a second device of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda
from scheduled import sorted_on_host
from tvm import relax
from tvm.relax import op

from relax_grad.gpu import devices
from relax_grad.ir.module import with_only
from relax_grad.training import SGD, AdamW, Trainer, _device, train_step

#: A device whose tensors the compiled functions do not take for the host's, and the reverse.
OTHER = tvm.cpu(1)


def module() -> tvm.IRModule:
    """Return ``loss(x, w, b)`` and its prediction ``forward``."""
    shapes = {"x": (6, 4), "y": (6, 3), "0.weight": (4, 3), "b": (3,)}
    bb = relax.BlockBuilder()
    for name in ("forward", "loss"):
        params = {key: relax.Var(key, relax.TensorType(s, "float32")) for key, s in shapes.items()}
        x, y, w, b = params.values()
        with bb.function(name, [x, w, b] if name == "forward" else [x, y, w, b]):
            with bb.dataflow():
                result = bb.emit(op.tanh(bb.emit(op.add(bb.emit(op.matmul(x, w)), b))))
                if name == "loss":
                    result = bb.emit(op.mean(op.square(bb.emit(op.subtract(result, y)))))
                result = bb.emit_output(result)
            bb.emit_func_output(result)
    return bb.get()


RNG = np.random.default_rng(0)
VALUES = {
    "0.weight": RNG.normal(size=(4, 3)).astype("float32"),
    "b": np.zeros(3, "float32"),
}
BATCHES = [
    (RNG.normal(size=(6, 4)).astype("float32"), RNG.normal(size=(6, 3)).astype("float32"))
    for _ in range(3)
]


@pytest.fixture
def on_other(monkeypatch):
    """Let ``device="cuda"`` be the second device of the CPU, with TVM's pipeline."""
    monkeypatch.setattr(devices, "present", lambda kind, number: OTHER)
    monkeypatch.setattr(_device, "_KINDS", {"cuda": "llvm"})
    options = {"relax_pipeline": "default"}
    return {"device": "cuda", "target": "llvm", "compile_options": options}


def trainer(**options) -> Trainer:
    step = train_step(module(), AdamW(lr=0.05), wrt=["0.weight", "b"])
    return Trainer(step, values=VALUES, **options)


def test_a_device_trains_as_the_cpu(on_other, tmp_path):
    own, wanted = trainer(**on_other), trainer()
    for each in (own, wanted):
        each.fit(BATCHES, epochs=2, progress=False)
    np.testing.assert_allclose(own.history.loss, wanted.history.loss, 1e-5)
    groups = own._settled().groups
    assert {tensor.device for group in groups.values() for tensor in group} == {OTHER}
    assert own.params["b"].device == tvm.cpu()
    own.save(tmp_path / "own")
    mean = own.evaluate(BATCHES)
    for path in ("own", "wanted"):
        wanted.save(tmp_path / "wanted")
        own.load(tmp_path / path)
        for name, tensor in wanted.values.items():
            np.testing.assert_allclose(own.values[name].numpy(), tensor.numpy(), 1e-5, 1e-6)
    assert own.evaluate(BATCHES) == pytest.approx(mean)
    wanted.load(tmp_path / "own")  # a file of a device on the CPU
    assert own.step(*BATCHES[0]).loss == pytest.approx(wanted.step(*BATCHES[0]).loss, 1e-5)


def test_a_rejected_step_leaves_the_device_as_it_was(on_other):
    own = trainer(**on_other)
    before = {name: tensor.numpy() for name, tensor in own.values.items()}
    with pytest.raises(FloatingPointError):
        own.step(np.full((6, 4), np.nan, "float32"), BATCHES[0][1])
    for name, tensor in own.values.items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])


def test_graphs_are_refused(on_other):
    """A graph that TVM captured runs on the memory of its first arguments."""
    config = {"relax.backend.use_cuda_graph": True}
    with (
        tvm.transform.PassContext(config=config),
        pytest.raises(ValueError, match="must be off: TVM launches a captured graph with"),
    ):
        trainer(**on_other)


def test_a_library_on_a_device(on_other):
    pytest.importorskip("torch", reason="PyTorch is not installed: there is no library")
    own, wanted = trainer(**on_other, library="torch"), trainer()
    losses = [each.step(*BATCHES[0]).loss for each in (own, wanted)]
    assert losses[0] == pytest.approx(losses[1], 1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "cuda"}, RuntimeError, "needs a TVM with support for cuda"),
        ({"device": "gpu"}, ValueError, 'must be "cpu", "cuda" or "cuda:1", but it is \'gpu\''),
        ({"device": "cuda:x"}, ValueError, "but it is 'cuda:x'"),
        ({"device": 1}, TypeError, "but it is 1"),
        ({"library": "torch"}, ValueError, 'library is for a device, such as device="cuda"'),
    ],
)
def test_refusals(options, error, message, monkeypatch):
    monkeypatch.setattr(tvm.runtime, "enabled", lambda name: False)
    with pytest.raises(error, match=message):
        trainer(**options)


def test_a_device_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(tvm.runtime, "enabled", lambda name: True)
    with pytest.raises(RuntimeError, match='device="cuda:7" does not exist: there are 0'):
        trainer(device="cuda:7")


TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")


def test_a_whole_step_has_kernels():
    """All functions that a trainer calls launch kernels, and none works on the host."""
    step = train_step(module(), SGD(momentum=0.9), wrt=["0.weight", "b"], clip_norm=1.0)
    prepared = _device.prepared(step.module, _device.roots_of(step))
    with TARGET:
        devices.scheduled(TARGET)(prepared)
    compiled = compile_for_cuda(prepared)
    assert compiled.launches
    assert (compiled.on_host, compiled.serial) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("library", [None, "torch"])
@pytest.mark.parametrize("name", ["residual", "decoder", "vision transformer", "U-Net"])
def test_steps_of_networks_have_kernels(name, library):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch_dispatched import step_of

    step, _ = step_of(name)
    prepared = _device.prepared(step.module, _device.roots_of(step), library)
    with TARGET:
        devices.scheduled(TARGET)(prepared)
    compiled = compile_for_cuda(prepared)
    assert compiled.launches
    assert (compiled.on_host, compiled.serial) == ([], [])


def test_functions_without_a_schedule_are_named():
    message = "no schedule for sorted_on_host: these functions would run on the host"
    with TARGET, pytest.raises(ValueError, match=message):
        devices.scheduled(TARGET)(sorted_on_host())


def test_only_functions_that_are_called_are_compiled():
    """Each function has a global symbol, for which TVM keeps it."""
    step = train_step(module(), SGD(), wrt=["0.weight", "b"])
    assert names_of(step.module) == {"forward", "step"}
    assert names_of(with_only(step.module, ["forward"])) == {"forward"}
    assert with_only(step.module, ["step", "forward"]).same_as(step.module)
    legalized = relax.transform.LegalizeOps()(step.module)
    assert names_of(with_only(legalized, ["forward"])) == {"forward", "matmul", "add", "tir_tanh"}


def names_of(module):
    return {variable.name_hint for variable in module.get_global_vars()}
