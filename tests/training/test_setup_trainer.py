"""Training through relax.training, against PyTorch."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tvm
from programs import build, tensor
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.training import AppendLoss, Trainer
from tvm.relax.training.loss import (
    CategoricalCrossEntropyLoss,
    CrossEntropyLoss,
    L1Loss,
    Loss,
    MSELoss,
)
from tvm.relax.training.optimizer import SGD, Adam, MomentumSGD
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_grad import value_and_grad
from relax_grad.cpu.target import host
from relax_grad.training import SetupTrainer, append_loss
from relax_grad.transform import DispatchKernels

SHAPES = {"weight": (4, 3, 3, 3), "gamma": (4,), "beta": (4,), "dense": (4, 5)}


def backbone(batch, training):
    """Return a backbone: a convolution, a normalisation with running statistics, and a
    classifier."""
    params = [tensor("x", (batch, 3, 6, 6), "float32")]
    params += [tensor(name, shape, "float32") for name, shape in SHAPES.items()]
    params += [tensor(name, (4,), "float32") for name in ("mean", "variance")]
    bb = relax.BlockBuilder()
    with bb.function("backbone", params):
        x, weight, gamma, beta, dense, mean, variance = params
        with bb.dataflow():
            y = bb.emit(op.nn.conv2d(x, weight, padding=1))
            normalized = bb.emit(
                op.nn.batch_norm(y, gamma, beta, mean, variance, axis=1, training=training)
            )
            y = bb.emit(op.nn.relu(relax.TupleGetItem(normalized, 0)))
            scores = bb.emit_output(op.matmul(bb.emit(op.mean(y, [2, 3])), dense))
            states = [bb.emit_output(relax.TupleGetItem(normalized, i)) for i in (1, 2)]
        bb.emit_func_output(relax.Tuple([scores, *states]))
    return bb.get().with_attrs({"param_num": len(SHAPES), "state_num": 2})


def torch_step(torch, values, mean, variance, x, training):
    y = torch.conv2d(torch.from_numpy(x), values["weight"], padding=1)
    y = torch.nn.functional.batch_norm(
        y, mean, variance, values["gamma"], values["beta"], training, 0.1, 1e-5
    )
    return y.relu().mean((2, 3)) @ values["dense"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("batch", "optimizer", "pipeline", "legalize"),
    [
        (tirx.Var("n", "int64"), SGD, "default", False),
        (6, Adam, "relax_grad", False),
        (tirx.Var("n", "int64"), Adam, "relax_grad", True),
    ],
    ids=["symbolic", "static", "legalized"],
)
def test_steps_are_those_of_torch(torch, batch, optimizer, pipeline, legalize, training):
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    types = [relax.TensorType((batch, 5), "float32"), relax.TensorType((batch,), "int64")]
    loss = CrossEntropyLoss(reduction="mean")
    setup = SetupTrainer(loss, optimizer(0.05), types, legalize=legalize)
    module = setup(backbone(batch, training))
    executable = tvm.compile(module, "llvm", relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    trainer = Trainer(module, machine, tvm.cpu(), False)
    trainer.load_params(start)
    trainer.load_states([np.full(4, 0.1, "float32"), np.full(4, 2.0, "float32")])

    values = {k: torch.from_numpy(v.copy()).requires_grad_() for k, v in start.items()}
    mean, variance = torch.full((4,), 0.1), torch.full((4,), 2.0)
    torch_optimizer = getattr(torch.optim, optimizer.__name__)(values.values(), 0.05)
    for rows in (6, 6) if isinstance(batch, int) else (6, 3, 9):
        x = rng.normal(size=(rows, 3, 6, 6)).astype("float32")
        labels = rng.integers(0, 5, rows)
        loss = trainer.update(x, labels).numpy()
        scores = torch_step(torch, values, mean, variance, x, training)
        wanted = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels))
        torch_optimizer.zero_grad()
        wanted.backward()
        torch_optimizer.step()
        np.testing.assert_allclose(loss, wanted.detach().numpy(), rtol=1e-4)

    for name, param in trainer.export_params().items():
        np.testing.assert_allclose(
            param.numpy(), values[name].detach().numpy(), rtol=2e-3, atol=2e-4, err_msg=name
        )
    states = trainer.export_states()
    np.testing.assert_allclose(states["mean"].numpy(), mean.numpy(), rtol=1e-4, atol=1e-6)
    if training:  # TVM keeps the biased variance, PyTorch the unbiased one
        assert np.all(np.abs(states["variance"].numpy() / variance.numpy() - 1) < 0.02)
    else:
        np.testing.assert_array_equal(states["variance"].numpy(), variance.numpy())

    x = rng.normal(size=(6, 3, 6, 6)).astype("float32")
    predicted = trainer.predict(x).numpy()
    state = [torch.from_numpy(states[name].numpy()) for name in ("mean", "variance")]
    final = torch_step(torch, values, *state, x, False).detach().numpy()
    np.testing.assert_allclose(predicted, final, rtol=1e-2, atol=2e-3)


def kernels(module: tvm.IRModule) -> int:
    """Return the number of kernels to which a module's calls are dispatched."""
    dispatched = DispatchKernels(host())(module)
    names = [variable.name_hint for variable in dispatched.get_global_vars()]
    return sum("_kernel" in name for name in names)


def test_the_pipeline_finds_as_many_kernels_as_without_a_trainer():
    types = [relax.TensorType((6, 5), "float32"), relax.TensorType((6,), "int64")]
    loss = CrossEntropyLoss(reduction="mean")
    module = backbone(6, True)
    by_hand = tvm.IRModule({"main": append_loss(module["backbone"], loss(*types))})
    by_hand = value_and_grad(by_hand, wrt=list(SHAPES))
    wanted = kernels(tvm.IRModule({"main_adjoint": by_hand["main_adjoint"]}))
    assert wanted > 3
    trained = SetupTrainer(loss, SGD(0.1), types)(module)
    assert kernels(tvm.IRModule({"main": trained["backbone_loss_adjoint"]})) == wanted


# Losses and optimizers


LOSSES = {
    "l1": (L1Loss("mean"), lambda F, scores, targets: F.l1_loss(scores, targets)),
    "mse": (
        MSELoss("sum"),
        lambda F, scores, targets: F.mse_loss(scores, targets, reduction="sum"),
    ),
    "cross entropy": (
        CrossEntropyLoss("mean", ignore_index=1),
        lambda F, scores, targets: F.cross_entropy(scores, targets, ignore_index=1),
    ),
    "categorical": (
        CategoricalCrossEntropyLoss("mean"),
        lambda F, scores, targets: -(F.log_softmax(scores, -1) * targets).mean(),
    ),
    "categorical with ignore_index": (
        CategoricalCrossEntropyLoss("mean", ignore_index=1),
        lambda F, scores, targets: F.cross_entropy(scores, targets.argmax(1), ignore_index=1),
    ),
}
OPTIMIZERS = [
    (lambda: SGD(0.1, weight_decay=0.01), "SGD", {"lr": 0.1, "weight_decay": 0.01}),
    (
        lambda: MomentumSGD(0.1, 0.9, nesterov=True),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    (lambda: Adam(0.1), "Adam", {"lr": 0.1}),
]


def dense(batch, *, dataflow=True):
    """Return a backbone without states: a matrix product and a bias."""
    params = [tensor("x", (batch, 3), "float32"), tensor("weight", (3, 4), "float32")]
    params.append(tensor("bias", (4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("backbone", params):
        x, weight, bias = params
        with bb.dataflow() if dataflow else contextlib.nullcontext():
            emit = bb.emit_output if dataflow else bb.emit
            scores = emit(op.add(op.matmul(x, weight), bias))
        bb.emit_func_output(scores)
    return bb.get().with_attrs({"param_num": 2, "state_num": 0})


def targets_of(name, rows, rng):
    if name == "cross entropy":
        return rng.integers(0, 4, rows)
    if name.startswith("categorical"):
        return np.eye(4, dtype="int64")[rng.integers(0, 4, rows)]
    return rng.normal(size=(rows, 4)).astype("float32")


def trainer_of(module, loss, optimizer, types, **settings):
    module = SetupTrainer(loss, optimizer, types, **settings)(module)
    assert relax.analysis.check_well_formed(module)
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    return Trainer(module, machine, tvm.cpu(), False)


def types_of(name, batch, other=None):
    shape, dtype = {"cross entropy": ((), "int64"), "l1": ((4,), "float32")}.get(
        name, ((4,), "float32" if name == "mse" else "int64")
    )
    scores = relax.TensorType((batch, 4), "float32")
    return [scores, relax.TensorType((batch if other is None else other, *shape), dtype)]


@pytest.mark.parametrize("batch", [6, tirx.Var("n", "int64")], ids=["static", "symbolic"])
@pytest.mark.parametrize(("number", "name"), list(enumerate(LOSSES)), ids=LOSSES)
def test_losses_and_optimizers(torch, number, name, batch):
    rng = np.random.default_rng(number)
    loss, torch_loss = LOSSES[name]
    optimizer, torch_name, settings = OPTIMIZERS[number % len(OPTIMIZERS)]
    trainer = trainer_of(dense(batch), loss, optimizer(), types_of(name, batch))
    start = [rng.normal(size=shape).astype("float32") for shape in ((3, 4), (4,))]
    trainer.load_params(start)
    values = [torch.from_numpy(value.copy()).requires_grad_() for value in start]
    torch_optimizer = getattr(torch.optim, torch_name)(values, **settings)
    for rows in (6, 6, 6) if isinstance(batch, int) else (6, 2, 9):
        x, targets = rng.normal(size=(rows, 3)).astype("float32"), targets_of(name, rows, rng)
        result = trainer.update(x, targets).numpy()
        scores = torch.from_numpy(x) @ values[0] + values[1]
        wanted = torch_loss(torch.nn.functional, scores, torch.from_numpy(targets))
        torch_optimizer.zero_grad()
        wanted.backward()
        torch_optimizer.step()
        np.testing.assert_allclose(result, wanted.detach().numpy(), rtol=1e-5)
    for param, wanted in zip(trainer.export_params().values(), values, strict=True):
        np.testing.assert_allclose(param.numpy(), wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        trainer.predict(x).numpy(),
        x @ values[0].detach().numpy() + values[1].detach().numpy(),
        1e-3,
    )


# Forms of the backbone


def updated(trainer, rows=6):
    """Return the loss of one step, and the parameters after it."""
    rng = np.random.default_rng(0)
    trainer.load_params([rng.normal(size=(3, 4)).astype("float32"), np.ones(4, "float32")])
    x, targets = rng.normal(size=(rows, 3)).astype("float32"), rng.normal(size=(rows, 4))
    loss = trainer.update(x, targets.astype("float32")).numpy()
    return [loss, *(value.numpy() for value in trainer.export_params().values())]


def test_not_legalized_and_not_dataflow():
    n = tirx.Var("n", "int64")
    types = types_of("mse", n)
    wanted = updated(trainer_of(dense(n), MSELoss(), SGD(0.1), types))
    params = updated(
        trainer_of(dense(n, dataflow=False), MSELoss(), SGD(0.1), types, legalize=False)
    )
    for param, other in zip(params, wanted, strict=True):
        np.testing.assert_allclose(param, other, rtol=1e-6)


def test_extents_that_only_the_loss_fixes():
    n, m = (tirx.Var(name, "int64") for name in "nm")
    fixed, free = (
        trainer_of(dense(n), MSELoss(), SGD(0.1), types_of("mse", *extents))
        for extents in ((6,), (m, m))
    )
    for param, other in zip(updated(fixed), updated(free), strict=True):
        np.testing.assert_allclose(param, other, rtol=1e-6)
    with pytest.raises(RuntimeError):
        updated(fixed, rows=5)


class Distance(Loss):
    """The squared distance between two outputs: a loss without targets."""

    def __init__(self):
        super().__init__("distance", 2)

    def __call__(self, *types):
        params = [relax.Var(f"output{i}", kind) for i, kind in enumerate(types)]
        bb = relax.BlockBuilder()
        with bb.function("distance", params):
            with bb.dataflow():
                difference = bb.emit(op.subtract(params[0], params[1]))
                loss = bb.emit_output(op.sum(op.multiply(difference, difference)))
            bb.emit_func_output(loss)
        return bb.get()["distance"]


@I.ir_module
class Branched:
    """A normalisation in another function, and more outputs than the loss uses."""

    I.module_attrs({"param_num": 1, "state_num": 2})

    @R.function
    def normalize(
        x: R.Tensor(("rows", 4), "float32"),
        mean: R.Tensor((4,), "float32"),
        variance: R.Tensor((4,), "float32"),
    ):
        rows = T.int64()
        flat = R.reshape(x, R.shape([rows * 4]))  # after inlining, an extent of the backbone
        y = R.nn.batch_norm(
            R.reshape(flat, R.shape([rows, 4])),
            R.const([1.0, 1.0, 1.0, 1.0], "float32"),
            R.const([0.0, 0.0, 0.0, 0.0], "float32"),
            mean,
            variance,
            axis=1,
        )
        return y

    @R.function
    def backbone(
        x: R.Tensor(("n", 4), "float32"),
        scale: R.Tensor((4,), "float32"),
        mean: R.Tensor((4,), "float32"),
        variance: R.Tensor((4,), "float32"),
    ):
        scaled = R.multiply(x, scale)
        with R.dataflow():
            shifted = R.add(scaled, R.const(1.0, "float32"))
            R.output(shifted)
        y = Branched.normalize(shifted, mean, variance)
        out = y[0]
        new_mean = y[1]
        new_variance = y[2]
        return out, x, scaled, new_mean, new_variance


def test_several_outputs_and_functions():
    """The loss uses two of the three outputs. The third output is not a state."""
    n = tirx.Var("n", "int64")
    types = [relax.TensorType((n, 4), "float32")] * 2
    trainer = trainer_of(Branched, Distance(), SGD(0.01), types)
    trainer.load_params([np.full(4, 2, "float32")])
    trainer.load_states([np.zeros(4, "float32"), np.ones(4, "float32")])
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    mean = np.zeros(4)
    for _ in range(2):
        scale = trainer.export_params()["scale"].numpy()
        scaled = x * scale + 1
        loss = trainer.update(x, []).numpy()
        normal = (scaled - scaled.mean(0)) / np.sqrt(scaled.var(0) + 1e-5)
        np.testing.assert_allclose(loss, np.sum((normal - x) ** 2), rtol=1e-4)
        mean = 0.9 * mean + 0.1 * scaled.mean(0)
        states = [state.numpy() for state in trainer.export_states().values()]
        np.testing.assert_allclose(states[0], mean, rtol=1e-4)
    scale = trainer.export_params()["scale"].numpy()
    outputs = [output.numpy() for output in trainer.predict(x[:2])]
    wanted = (x[:2] * scale + 1 - states[0]) / np.sqrt(states[1] + 1e-5)
    np.testing.assert_allclose(outputs[0], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs[2], x[:2] * scale, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_appended_as_tvm_does(count):
    params = [tensor(name, (2, 2), "float32") for name in "xyz"]
    bb = relax.BlockBuilder()
    with bb.function("backbone", params):
        with bb.dataflow():
            outputs = [bb.emit_output(op.add(params[0], other)) for other in params[1:]]
            outputs.append(bb.emit_output(op.exp(params[2])))
        bb.emit_func_output(relax.Tuple(outputs))
    module = bb.get()
    loss = (MSELoss(), Distance())[count - 1](*[params[0].ty] * 2)
    function = append_loss(module["backbone"], loss, count)
    wanted = AppendLoss("backbone", loss, count)(module)["backbone_loss"]
    tvm.ir.assert_structural_equal(function.with_attr("global_symbol", "backbone_loss"), wanted)


# Refusals


def test_a_loss_with_mismatched_parameters_is_refused():
    module = backbone(6, True)
    loss = CrossEntropyLoss(reduction="mean")
    types = [relax.TensorType((6, 7), "float32"), relax.TensorType((6,), "int64")]
    with pytest.raises(ValueError, match="for the parameter"):
        append_loss(module["backbone"], loss(*types), 1)
    with pytest.raises(ValueError, match="takes 4 outputs"):
        append_loss(module["backbone"], loss(*types), 4)
    types[0] = relax.TensorType((6, 5), "float32")
    with pytest.raises(ValueError, match="must return 3 new states"):
        append_loss(module["backbone"], loss(*types), 1, num_states=3)


@pytest.mark.parametrize(
    ("attrs", "match"),
    [
        ({}, "attribute param_num, an integer of at least 1, but it has none"),
        ({"param_num": 2}, "attribute state_num"),
        ({"param_num": "2", "state_num": 0}, "but it is '2'"),
        ({"param_num": 0, "state_num": 0}, "at least 1, but it is 0"),
        ({"param_num": 3, "state_num": 1}, "takes 3 in all"),
        ({"param_num": 1, "state_num": 1}, "must return 1 new states"),
    ],
)
def test_mismatched_attributes_are_refused(attrs, match):
    module = tvm.IRModule(dict(dense(6).functions_items())).with_attrs(attrs)
    with pytest.raises(ValueError, match=match):
        SetupTrainer(MSELoss(), SGD(0.1), types_of("mse", 6))(module)


def test_unsupported_modules_and_losses_are_refused():
    setup = SetupTrainer(MSELoss(), SGD(0.1), types_of("mse", 6))
    with pytest.raises(ValueError, match="no function 'backbone'; it has main"):
        setup(build([tensor("x", (3,))], lambda bb, x: op.exp(x)))
    with pytest.raises(ValueError, match="has a function backbone_loss already"):
        setup(setup(dense(6)))
    with pytest.raises(ValueError, match="choose the reduction"):
        SetupTrainer(MSELoss("none"), SGD(0.1), types_of("mse", 6))(dense(6))
    with pytest.raises(TypeError, match="loss_args must be a list of the types"):
        SetupTrainer(MSELoss(), SGD(0.1), types_of("mse", 6)[0])
