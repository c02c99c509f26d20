"""Optimizers beside those of torch.optim, and beside the formulas of their papers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.training import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    RMSprop,
    TrainStep,
    train_step,
)

STEPS = 50
SHAPES = {"square": (5, 5), "wide": (3, 7), "tall": (6, 2)}

OPTIMIZERS = {
    "SGD": [
        SGD(0.1),
        SGD(0.05, momentum=0.9, weight_decay=0.1),
        SGD(0.05, momentum=0.8, dampening=0.3),
        SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        SGD(0.05, momentum=0.7, weight_decay=0.1, maximize=True),
    ],
    "Adam": [
        Adam(0.1),
        Adam(0.02, (0.5, 0.8), 1e-3, 0.1),
        Adam(0.05, amsgrad=True),
        Adam(0.01, [0.6, 0.9], 1e-4, 0.2, True, True),
    ],
    "AdamW": [AdamW(0.1), AdamW(0.02, (0.5, 0.8), 1e-3, 0.0, True), AdamW(0.03, maximize=True)],
    "Adagrad": [Adagrad(0.1), Adagrad(0.2, 0.1, 0.05, 0.3, 1e-4), Adagrad(0.1, maximize=True)],
    "RMSprop": [
        RMSprop(0.02),
        RMSprop(0.02, 0.8, 1e-4, 0.1, 0.9),
        RMSprop(0.02, centered=True, momentum=0.5),
        RMSprop(0.02, centered=True, weight_decay=0.1, maximize=True),
    ],
}
CASES = {
    f"{kind}{i}": optimizer for kind, some in OPTIMIZERS.items() for i, optimizer in enumerate(some)
}
PAPERS = {"Lion0": Lion(0.02), "Lion1": Lion(0.01, (0.8, 0.6), 0.1)} | {
    "LAMB0": LAMB(0.02),
    "LAMB1": LAMB(0.05, (0.6, 0.7), 1e-3, 0.0),
}


def module_of(shapes: dict[str, tuple[int, ...]], dtype: str) -> tvm.IRModule:
    """Return ``loss(scale, *params)``, the sum of scale * sum(cos(p) + p^2 / 5) over the
    parameters."""
    scale = relax.Var("scale", relax.TensorType((), dtype))
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in shapes.items()]
    bb = relax.BlockBuilder()
    with bb.function("loss", [scale, *params]):
        with bb.dataflow():
            total = relax.const(0.0, dtype)
            for param in params:
                square = op.multiply(op.multiply(param, param), relax.const(0.2, dtype))
                total = bb.emit(op.add(total, op.sum(op.add(op.cos(param), square))))
            total = bb.emit_output(op.multiply(total, scale))
        bb.emit_func_output(total)
    return bb.get()


def machine_of(step: TrainStep):
    target = relax_grad.target.host()
    executable = tvm.compile(step.module, target, relax_pipeline="relax_grad")
    return relax.VirtualMachine(executable, tvm.cpu())


def run(step: TrainStep, values, scales, *, lr=lambda _: {}):
    """Return the parameters after steps with these scales, and the last results."""
    machine = machine_of(step)
    params, frozen, states, slots = (list(group.values()) for group in step.initial(values))
    dtype = str(next(iter(values.values())).dtype)
    for i, scale in enumerate(scales):
        scalars = {**step.hyperparameters, **lr(i)}
        results = machine["step"](
            tvm.runtime.tensor(np.array(scale, dtype)),
            *(tvm.runtime.tensor(np.array(number)) for number in scalars.values()),
            tvm.runtime.tensor(np.array(i)),
            params,
            frozen,
            states,
            slots,
        )
        params, states, slots = results[3:]
    return dict(zip(step.params, (param.numpy() for param in params), strict=True)), results


def scales() -> np.ndarray:
    return np.random.default_rng(1).uniform(-0.3, 1, STEPS)


def draw(shapes, dtype="float64"):
    rng = np.random.default_rng(0)
    return {name: rng.uniform(-2, 2, shape).astype(dtype) for name, shape in shapes.items()}


def test_optimizers_are_those_of_torch():
    torch = pytest.importorskip("torch")
    shapes = dict.fromkeys(CASES, (4, 3))
    step = train_step(module_of(shapes, "float64"), CASES, wrt=list(shapes))
    values = draw(shapes)
    params, _ = run(step, values, scales(), lr=lambda i: {"lr:Adam0": 0.1 / (1 + i)})
    for name, optimizer in CASES.items():
        param = torch.tensor(values[name], requires_grad=True)
        settings = {key: getattr(optimizer, key) for key in optimizer.__dataclass_fields__}
        other = getattr(torch.optim, type(optimizer).__name__)([param], **settings)
        for i, scale in enumerate(scales()):
            if name == "Adam0":
                other.param_groups[0]["lr"] = 0.1 / (1 + i)
            other.zero_grad()
            (scale * (param.cos() + param**2 * 0.2).sum()).backward()
            other.step()
        # Adagrad and RMSprop divide by roots that begin at 0.
        np.testing.assert_allclose(params[name], param.detach(), 1e-9, 1e-11, err_msg=name)


def test_optimizers_are_those_of_their_papers():
    shapes = dict.fromkeys(PAPERS, (4, 3))
    step = train_step(module_of(shapes, "float64"), PAPERS, wrt=list(shapes))
    values = draw(shapes)
    params, _ = run(step, values, scales())
    for name, optimizer in PAPERS.items():
        wanted = (_lion if "Lion" in name else _lamb)(optimizer, values[name])
        np.testing.assert_allclose(params[name], wanted, 1e-10, 1e-12, err_msg=name)


def _gradient(x, scale):
    return scale * (-np.sin(x) + 0.4 * x)


def _lion(optimizer: Lion, x):
    m = np.zeros_like(x)
    for scale in scales():
        g = _gradient(x, scale)
        c = optimizer.betas[0] * m + (1 - optimizer.betas[0]) * g
        x = x - optimizer.lr * (np.sign(c) + optimizer.weight_decay * x)
        m = optimizer.betas[1] * m + (1 - optimizer.betas[1]) * g
    return x


def _lamb(optimizer: LAMB, x):
    m, v = np.zeros_like(x), np.zeros_like(x)
    b1, b2 = optimizer.betas
    for t, scale in enumerate(scales(), 1):
        g = _gradient(x, scale)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        r = (
            m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + optimizer.eps)
            + optimizer.weight_decay * x
        )
        x = x - optimizer.lr * np.linalg.norm(x) / np.linalg.norm(r) * r
    return x


def test_trust_ratio_of_zeros():
    step = train_step(module_of({"x": (3,)}, "float64"), LAMB(0.1, weight_decay=0.0), wrt="x")
    params, _ = run(step, {"x": np.zeros(3)}, [1.0])
    np.testing.assert_array_equal(params["x"], np.zeros(3))


def test_muon():
    torch = pytest.importorskip("torch")
    shapes = {f"{name}{i}": shape for name, shape in SHAPES.items() for i in range(2)}
    optimizers = {
        "*0": Muon(0.02),
        "*1": Muon(0.05, 0.0, 0.8, False, adjust_lr_fn="match_rms_adamw"),
    }
    step = train_step(module_of(shapes, "float64"), optimizers, wrt=list(shapes))
    values = draw(shapes)
    trained, _ = run(step, values, scales()[:10])
    for name, optimizer in optimizers.items():
        settings = {key: getattr(optimizer, key) for key in optimizer.__dataclass_fields__}
        params = {
            key: torch.tensor(value, requires_grad=True)
            for key, value in values.items()
            if key.endswith(name[1:])
        }
        other = torch.optim.Muon(list(params.values()), **settings)
        for scale in scales()[:10]:
            other.zero_grad()
            sum(scale * (p.cos() + p**2 * 0.2).sum() for p in params.values()).backward()
            other.step()
        for key, param in params.items():
            # PyTorch iterates in bfloat16, with a relative precision of 2 ** -8.
            np.testing.assert_allclose(trained[key], param.detach(), 0.05, 0.01, err_msg=key)
            wanted = _muon(optimizer, values[key])
            np.testing.assert_allclose(trained[key], wanted, 1e-9, 1e-11, err_msg=key)


def _muon(optimizer: Muon, x):
    buffer = np.zeros_like(x)
    rows, columns = x.shape
    for scale in scales()[:10]:
        g = _gradient(x, scale)
        buffer = optimizer.momentum * buffer + (1 - optimizer.momentum) * g
        u = (
            (1 - optimizer.momentum) * g + optimizer.momentum * buffer
            if optimizer.nesterov
            else buffer
        )
        u = u.T if rows > columns else u
        u = u / max(np.linalg.norm(u), optimizer.eps)
        a, b, c = optimizer.ns_coefficients
        for _ in range(optimizer.ns_steps):
            gram = u @ u.T
            u = a * u + (b * gram + c * gram @ gram) @ u
        u = u.T if rows > columns else u
        original = np.sqrt(max(1, rows / columns))
        factor = (
            original if optimizer.adjust_lr_fn == "original" else 0.2 * np.sqrt(max(rows, columns))
        )
        x = x * (1 - optimizer.lr * optimizer.weight_decay) - optimizer.lr * factor * u
    return x


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_parameters_in_half_precision_have_a_copy(dtype):
    """Updates far below the precision of the parameter add up, as in float32."""
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    shapes = {"x": (4, 3)}
    name = np.dtype(dtype).name
    values = draw(shapes, dtype)
    step = train_step(module_of(shapes, name), SGD(1e-4), wrt="x")
    assert ("master/x" in step.optimizer_state) == (name != "float32")
    params, results = run(step, values, np.ones(20))
    wanted = np.asarray(values["x"], "float64")
    for _ in range(20):
        wanted = wanted - 1e-4 * _gradient(wanted, 1.0)
    slots = dict(zip(step.optimizer_state, results[5], strict=True))
    exact = slots["master/x"].numpy() if "master/x" in slots else params["x"]
    before = np.asarray(values["x"], "float64")
    np.testing.assert_allclose(exact - before, wanted - before, 2e-2, 4e-6)
    np.testing.assert_array_equal(params["x"], exact.astype(dtype))
    assert str(params["x"].dtype) == name


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: SGD("fast"), TypeError, "SGD takes hyperparameters, but its first .* is 'fast'"),
        (lambda: SGD(True), TypeError, "SGD: lr must be a number"),
        (lambda: SGD(-1.0), ValueError, "lr must not be negative, but it is -1.0"),
        (lambda: Adam(float("nan")), ValueError, "Adam: lr must be finite"),
        (lambda: SGD(0.1, -0.5), ValueError, "momentum must not be negative"),
        (lambda: SGD(0.1, nesterov=True), ValueError, "nesterov requires a positive momentum"),
        (lambda: Adam(0.1, (0.9, 1.0)), ValueError, r"betas\[1\] must be at least 0 and below 1"),
        (lambda: Lion(0.1, (0.9,)), ValueError, "betas must be a tuple of 2 numbers"),
        (lambda: Adam(0.1, ("a", 0.1)), TypeError, "betas must be a number, but it is 'a'"),
        (lambda: RMSprop(alpha=1.5), ValueError, "alpha must be at least 0 and below 1"),
        (lambda: Adagrad(lr_decay=-1.0), ValueError, "lr_decay must not be negative"),
        (lambda: LAMB(eps=-1.0), ValueError, "eps must not be negative"),
        (lambda: Muon(adjust_lr_fn="x"), ValueError, 'adjust_lr_fn must be "original"'),
        (lambda: Muon(ns_steps=0), ValueError, "ns_steps must be from 1 to 99"),
        (lambda: Muon(ns_steps=2.5), TypeError, "Muon: ns_steps must be an integer, but it is 2.5"),
        (lambda: Muon(ns_coefficients=(1, 2)), ValueError, "must be a tuple of 3 numbers"),
        (lambda: SGD(momentum="0.9"), TypeError, "SGD: momentum must be a number"),
        (lambda: SGD(dampening=None), TypeError, "SGD: dampening must be a number"),
        (lambda: SGD(momentum=True), TypeError, "SGD: momentum must be a number"),
        (lambda: SGD(nesterov="yes"), TypeError, "SGD: nesterov must be True or False"),
        (lambda: Adam(betas=0.9), ValueError, "betas must be a tuple of 2 numbers, but it is 0.9"),
        (lambda: SGD(2**2000), ValueError, "SGD: lr must be finite, but it is inf"),
        (
            lambda: train_step(module_of({"bias": (3,)}, "float32"), Muon(), wrt="bias"),
            ValueError,
            r"Muon updates matrices, but bias has shape \(3,\)",
        ),
    ],
)
def test_bad_hyperparameters(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_numbers_of_numpy_are_numbers():
    assert SGD(np.float32(0.5), np.float64(0.25)) == SGD(0.5, 0.25)
    assert Adam(betas=[np.float64(0.5), 0]).betas == (0.5, 0.0)
    assert type(Muon(ns_steps=np.int64(3)).ns_steps) is int
