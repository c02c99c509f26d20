"""The options of a training step, beside the same steps in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from training_models import START, batches, close, gradients, module_of
from tvm import relax, tirx
from tvm.relax import op
from tvm_ffi import structural_equal

from relax_grad.training import SGD, Adam, Trainer, _build, _donation, train_step
from relax_grad.training._donation import donating


def test_clipping():
    step = train_step(
        module_of(), SGD(0.1), wrt=["w", "b"], clip_value=1.5, clip_norm=2.0, ema=0.75
    )
    trainer = Trainer(step, values=START)
    values, averages = dict(START), dict(START)
    clipped = 0
    for batch in batches(12):
        result = trainer.step(*batch)
        loss, grads = gradients(values, batch)
        grads = {name: np.clip(grad, -1.5, 1.5) for name, grad in grads.items()}
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        factor = min(1.0, 2.0 / (norm + 1e-6))
        clipped += factor < 1
        values = {name: values[name] - 0.1 * factor * grad for name, grad in grads.items()}
        averages = {name: 0.75 * averages[name] + 0.25 * values[name] for name in values}
        np.testing.assert_allclose(result.loss, loss, 1e-12)
        np.testing.assert_allclose(result.metrics["grad_norm"], norm, 1e-6)
    assert 0 < clipped < 12
    close(trainer.params, values)
    close({name: trainer.optimizer_state[f"ema/{name}"] for name in values}, averages)


def test_accumulation_is_the_mean_gradient():
    step = train_step(module_of(), SGD(0.1, momentum=0.9), wrt=["w", "b"], accumulate=3)
    trainer = Trainer(step, values=START)
    values, moments = dict(START), dict.fromkeys(START, 0.0)
    data = batches(9)
    for batch in data:
        trainer.step(*batch)
    for i in range(0, 9, 3):
        grads = [gradients(values, batch)[1] for batch in data[i : i + 3]]
        for name in values:
            moments[name] = 0.9 * moments[name] + np.mean([grad[name] for grad in grads], 0)
        values = {name: values[name] - 0.1 * moments[name] for name in values}
    assert (trainer.steps, trainer.updates) == (9, 3)
    close(trainer.params, values)


def test_static_loss_scale_changes_nothing():
    results = []
    for scale in (None, 64.0):
        step = train_step(module_of("float32"), Adam(0.01), wrt=["w", "b"], loss_scale=scale)
        trainer = Trainer(step, values={k: v.astype("float32") for k, v in START.items()})
        for batch in batches(5, "float32"):
            trainer.step(*batch)
        results.append({name: param.numpy() for name, param in trainer.params.items()})
    for name in START:
        np.testing.assert_allclose(results[1][name], results[0][name], 1e-6)


def test_dynamic_loss_scale_falls_until_gradients_are_finite():
    """The first scale, 65536, overflows float16."""
    torch = pytest.importorskip("torch")
    step = train_step(module_of("float16"), SGD(0.01), wrt=["w", "b"], loss_scale="dynamic")
    trainer = Trainer(step, values={k: v.astype("float16") for k, v in START.items()})
    expected = 2.0**16
    for batch in batches(10, "float16"):
        before = {name: param.numpy().copy() for name, param in trainer.params.items()}
        result = trainer.step(*batch)
        assert result.metrics["loss_scale"] == expected
        expected *= 1.0 if result.metrics["applied"] else 0.5
        changed = any((trainer.params[k].numpy() != v).any() for k, v in before.items())
        assert changed == (result.metrics["applied"] == 1)
    skipped = trainer.skipped
    assert 0 < skipped < 8
    assert trainer.updates == 10 - skipped == int(trainer.optimizer_state["step"].numpy())
    scaler = torch.amp.GradScaler("cpu")
    assert (scaler.get_scale(), scaler.get_backoff_factor(), scaler.get_growth_factor()) == (
        2.0**16,
        0.5,
        2.0,
    )
    assert scaler.get_growth_interval() == 2000


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_steps_that_are_not_finite_leave_everything(on_nan, value):
    step = train_step(
        module_of(states=True),
        Adam(0.1),
        wrt=["w", "b"],
        states=["mean"],
        skip_nonfinite=True,
        outputs=True,
    )
    trainer = Trainer(step, values={**START, "mean": np.zeros(3)}, on_nan=on_nan)
    good, bad = batches(2)
    result = trainer.step(*good)
    values = {**trainer.values, **trainer.optimizer_state}
    before = {name: param.numpy().copy() for name, param in values.items()}
    close(result.outputs, {"output": good[0] @ START["w"] + START["b"] - good[1]})
    bad[0][2, 1] = value
    if on_nan == "raise":
        with pytest.raises(
            FloatingPointError, match=r"the loss is (nan|inf) in step 1; everything"
        ):
            trainer.step(*bad)
        assert trainer.steps == 1
    else:
        assert trainer.step(*bad).metrics["applied"] == 0
        assert (trainer.steps, trainer.updates, trainer.skipped) == (2, 1, 1)
    for name, tensor in {**trainer.values, **trainer.optimizer_state}.items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)
    assert np.isfinite(trainer.step(*good).loss)


def test_states_and_seeds():
    step = train_step(module_of(seed=True, states=True), SGD(0.0), wrt=["w"], states=["mean"])
    assert list(step.batch) == ["x", "y", "b"]
    trainer = Trainer(step, values={"w": START["w"], "mean": np.zeros(3)}, seed=5)
    mean = np.zeros(3)
    for i, (x, y) in enumerate(batches(3)):
        loss = trainer.step(x, y, START["b"]).loss
        difference = x @ START["w"] + START["b"] - y + ((5 << 32) + i)
        np.testing.assert_allclose(loss, np.mean(difference**2), 1e-12)
        mean = 0.5 * mean + x.mean(0)
    close(trainer.states, {"mean": mean})


def test_weight_decay_is_an_argument():
    step = train_step(module_of(), SGD(0.1, weight_decay=0.5), wrt=["w", "b"])
    assert step.hyperparameters == {"lr": 0.1, "weight_decay": 0.5}
    trainer = Trainer(step, values=START)
    (batch,) = batches(1)
    trainer.step(*batch, lr=0.2, weight_decay=0.25)
    _, grads = gradients(START, batch)
    close(trainer.params, {k: v - 0.2 * (grads[k] + 0.25 * v) for k, v in START.items()})


def test_groups():
    step = train_step(module_of(), {"b": SGD(0.5), "*": SGD(0.1)}, wrt=["w", "b"])
    assert step.hyperparameters == {"lr:b": 0.5, "lr:*": 0.1}
    trainer = Trainer(step, values=START)
    (batch,) = batches(1)
    trainer.step(*batch, lr=0.5, **{"lr:*": 0.3})
    _, grads = gradients(START, batch)
    close(
        trainer.params,
        {"b": START["b"] - 0.25 * grads["b"], "w": START["w"] - 0.15 * grads["w"]},
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"wrt": None}, ValueError, "wrt must name the parameters of loss to train; it has x, y"),
        ({"wrt": "z"}, ValueError, "wrt: loss has no parameter 'z'; there are x, y, w, b"),
        ({"wrt": []}, ValueError, "wrt must name at least one"),
        ({"wrt": 3}, TypeError, "wrt must be names of parameters, but it is 3"),
        ({"wrt": ["w", "w"]}, ValueError, "wrt: w appears more than once"),
        ({"states": ["w"]}, ValueError, "w is in wrt and in states"),
        ({"states": ["b"]}, ValueError, "must return the loss and 1 new states, but it returns 1"),
        ({"func_name": "f"}, ValueError, "f"),
        ({"accumulate": 0}, ValueError, "accumulate must be a positive integer"),
        ({"accumulate": 1.5}, TypeError, "accumulate must be an integer"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm must be positive and finite"),
        ({"clip_value": "a"}, TypeError, "clip_value must be a number"),
        ({"loss_scale": "auto"}, ValueError, 'loss_scale must be a number or "dynamic"'),
        ({"ema": 1.0}, ValueError, "ema must be below 1"),
        ({"skip_nonfinite": "no"}, TypeError, "skip_nonfinite must be True or False"),
        ({"outputs": 1}, TypeError, "outputs must be True or False, but it is 1"),
        ({"loss": lambda bb, x: x}, ValueError, "loss and targets are for ONNX imports"),
        ({"optimizer": "SGD"}, TypeError, "optimizer must be an Optimizer of relax_grad.training"),
        ({"optimizer": {"q*": SGD()}}, ValueError, "no parameter matches 'q\\*'"),
        (
            {"optimizer": {"b*": SGD(), "b": SGD(), "*": SGD()}, "wrt": ["w", "b"]},
            ValueError,
            "all have one",
        ),
        ({"optimizer": {"w": SGD()}, "wrt": ["w", "b"]}, ValueError, "no pattern matches b"),
        ({"optimizer": {"w": 3}}, TypeError, "'w' must be a pattern of names, and 3 an Optimizer"),
        ({"model": 3}, TypeError, "model must be a tvm.IRModule or a result of"),
    ],
)
def test_bad_arguments(settings, error, message):
    arguments = {"model": module_of(), "optimizer": SGD(), "wrt": "w", **settings}
    with pytest.raises(error, match=message):
        train_step(arguments.pop("model"), arguments.pop("optimizer"), **arguments)


def test_a_function_with_a_conditional_trains():
    """Also with gradients of several batches, whose function is another one of the module."""
    kinds = (("c", (), "bool"), ("x", (4,), "float64"), ("w", (4,), "float64"))
    c, x, w = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape, dtype in kinds)
    bb = relax.BlockBuilder()
    with bb.function("loss", [c, x, w]):
        branches = relax.op.multiply(x, w), relax.op.add(x, w)
        y = bb.emit(relax.If(c, *(relax.SeqExpr([], branch) for branch in branches)))
        bb.emit_func_output(bb.emit(relax.op.sum(relax.op.multiply(y, y))))
    step = train_step(bb.get(), SGD(lr=0.1), wrt=["w"], accumulate=2)
    start, data = np.linspace(-1, 1, 4), np.linspace(0.5, 2, 4)
    trainer = Trainer(step, values={"w": start})
    losses = [trainer.step(np.array(flag), data).loss for flag in (True, False)]
    product, total = data * start, data + start
    np.testing.assert_allclose(losses, [(product**2).sum(), (total**2).sum()], 1e-12)
    change = 0.5 * (2 * product * data + 2 * total)
    np.testing.assert_allclose(trainer.params["w"].numpy(), start - 0.1 * change, 1e-12)


def test_kept_tensors_have_constant_shapes():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    m = relax.Var("m", relax.TensorType((n,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, m]):
        y = bb.emit(op.matmul(x, w))
        new = bb.emit(op.add(m, y))
        bb.emit_func_output(relax.Tuple([bb.emit(op.sum(op.multiply(y, y))), new]))
    expected = "^m must have a constant shape to be a state, because the trainer keeps it .*(n,).*"
    with pytest.raises(ValueError, match=f"{expected}give its symbolic extents numbers, or pass"):
        train_step(bb.get(), SGD(), wrt="w", states=["m"])
    with pytest.raises(ValueError, match="m must have a constant shape to be trained"):
        train_step(bb.get(), SGD(), wrt=["w", "m"])


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 1.0, "ema": 0.9}, {"skip_nonfinite": True, "outputs": True}]
)
def test_steps_in_one_block_are_those_of_tvms_passes(settings, monkeypatch):
    def steps():
        model = module_of("float32", seed=True, states=True)
        step = train_step(model, Adam(0.1), wrt=["w", "b"], states=["mean"], **settings)
        return step.module, donating(step)

    in_one_block = steps()
    monkeypatch.setattr(_build, "write_out_adjoint", lambda *_: None)
    monkeypatch.setattr(_donation, "_is_whole", lambda *_: False)
    for module, wanted in zip(in_one_block, steps(), strict=True):
        assert module.script() == wanted.script()
        assert structural_equal(module, wanted, map_free_vars=True)


def test_steps_without_symbolic_extents_need_no_passes(monkeypatch):
    def refused(*_):
        raise AssertionError("TVM's passes infer all types again")

    monkeypatch.setattr(_build, "write_out_calls", refused)
    monkeypatch.setattr(_donation, "in_dataflow", refused)
    model = module_of("float32", seed=True, states=True)
    step = train_step(model, Adam(0.1), wrt=["w", "b"], states=["mean"])
    assert donating(step)["step"]
