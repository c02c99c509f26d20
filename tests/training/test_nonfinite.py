"""A step that is not finite leaves every bit as a run without that step, at any place in an
accumulated gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from relax_grad.training import LAMB, SGD, Adam, AdamW, RMSprop, Trainer, train_step

GROUPS = ("params", "frozen", "states", "optimizer_state")
ROWS = 6


def module_of(dtype: str, inner: int, outer: int):
    """Return the loss of a matrix of parameters, with a running mean and random numbers.

    Where a row of ``x`` is 0, its gradient is NaN; where the squares of a row are 0, infinite. The
    loss is finite there.
    """
    types = {"x": (ROWS, inner), "y": (ROWS, outer), "w": (inner, outer), "mean": (inner,)}
    x, y, w, mean = (relax.Var(k, relax.TensorType(v, dtype)) for k, v in types.items())
    b = relax.Var("b", relax.TensorType((outer,), "float32"))
    seed = relax.Var("seed", relax.TensorType((), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, y, w, b, mean, seed]):
        with bb.dataflow():
            product = bb.emit(op.astype(op.matmul(x, w), "float32"))
            root = bb.emit(op.sqrt(op.sum(op.square(product), 1, keepdims=True)))
            noise = bb.emit(op.divide(op.astype(seed, "float32"), relax.const(64.0, "float32")))
            error = bb.emit(op.subtract(op.add(product, b), op.add(op.astype(y, "float32"), noise)))
            loss = bb.emit(op.add(op.mean(op.square(error)), op.mean(root)))
            new = bb.emit(op.add(op.multiply(mean, relax.const(0.5, dtype)), op.mean(x, 0)))
            result = bb.emit_output(relax.Tuple([loss, new]))
        bb.emit_func_output(result)
    return bb.get()


#: The dtype, the extents, the optimizer and the options of compiled steps.
STEPS = {
    "sgd": ("float32", 5, 3, SGD(0.05, momentum=0.9), {"skip_nonfinite": True, "accumulate": 2}),
    "adam": (
        "float32",
        64,
        48,
        Adam(0.01),
        {"skip_nonfinite": True, "accumulate": 3, "clip_value": 0.02, "ema": 0.9},
    ),
    "scaled": (
        "bfloat16",
        32,
        16,
        AdamW(0.01),
        {"loss_scale": "dynamic", "accumulate": 3, "clip_norm": 0.5, "ema": 0.5},
    ),
    "groups": (
        "bfloat16",
        32,
        10,
        {"w": LAMB(0.01), "*": RMSprop(0.01, momentum=0.5)},
        {"skip_nonfinite": True, "loss_scale": 1024.0, "accumulate": 4, "clip_value": 0.5},
    ),
    "alone": ("float32", 16, 16, AdamW(0.01), {"loss_scale": "dynamic", "skip_nonfinite": True}),
    "loss only": ("float32", 128, 10, SGD(0.05, momentum=0.5), {"accumulate": 2, "ema": 0.75}),
}


@pytest.fixture(scope="module", params=STEPS)
def compiled(request):
    """A step, values and batches; the trainer of each run takes the compiled functions of the
    first."""
    dtype, inner, outer, optimizer, options = STEPS[request.param]
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    module = module_of(dtype, inner, outer)
    step = train_step(module, optimizer, wrt=["w", "b"], states=["mean"], **options)
    rng = np.random.default_rng(len(request.param))
    values = {
        "w": (rng.normal(size=(inner, outer)) / inner**0.5).astype(kind),
        "b": rng.normal(size=outer).astype("float32"),
        "mean": np.zeros(inner, kind),
    }
    batches = [
        (rng.normal(size=(ROWS, inner)).astype(kind), rng.normal(size=(ROWS, outer)).astype(kind))
        for _ in range(2 * step.accumulate + 1)
    ]
    return Trainer(step, values=values), values, batches, options, rng


def bits(trainer) -> dict[str, bytes]:
    return {
        f"{group}/{name}": tensor.numpy().tobytes()
        for group in GROUPS
        for name, tensor in trainer._group(group).items()
    }


def anew(first: Trainer, values, on_nan: str) -> Trainer:
    """Return a trainer with the compiled functions of another."""
    trainer = Trainer.__new__(Trainer)
    trainer.__dict__.update(first.__dict__)
    groups = zip(GROUPS, first.train_step.initial(values), strict=True)
    tensors = {name: list(group.values()) for name, group in groups}
    trainer._moment = trainer._moment._replace(groups=tensors)
    trainer.history = type(first.history)()
    trainer.steps = trainer.updates = trainer.skipped = 0
    trainer.on_nan = on_nan
    return trainer


def broken(batch, kind: str, rng):
    """Return a batch whose loss, or only whose gradient, is not finite."""
    x, y = (array.copy() for array in batch)
    row = rng.integers(ROWS)
    if kind.startswith("gradient"):
        x[row] = 0 if kind == "gradient of nan" else 1e-30
    else:
        where = x if rng.integers(2) else y
        where[row, rng.integers(where.shape[1])] = np.nan if kind == "nan" else np.inf
    return x, y


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_all_bits_are_those_of_a_run_without_the_step(compiled, on_nan):
    first, values, batches, options, rng = compiled
    examines = options.get("skip_nonfinite") or "loss_scale" in options
    kinds = ["nan", "inf", *(["gradient of nan", "gradient of inf"] if examines else [])]
    scale = ["optimizer_state/loss_scale", "optimizer_state/good_steps"]
    places = range(first.train_step.accumulate + 1)
    for place, kind in itertools.product(places, kinds):
        trainer, wanted = (anew(first, values, on_nan) for _ in range(2))
        for i, batch in enumerate(batches):
            if i == place:
                bad = broken(batches[-1], kind, rng)
                before = bits(trainer)
                is_dynamic = options.get("loss_scale") == "dynamic"
                if on_nan == "raise" and not (is_dynamic and "gradient" in kind):
                    with pytest.raises(FloatingPointError, match="everything is as before"):
                        trainer.step(*bad)
                    assert bits(trainer) == before, (place, kind)
                else:
                    result = trainer.step(*bad)
                    assert result.metrics.get("applied", 0.0) == 0.0
                    # The random numbers of a step belong to its number, which a skipped one has
                    # too.
                    wanted.steps, wanted.skipped = wanted.steps + 1, wanted.skipped + 1
                    if is_dynamic:
                        lowered = trainer.optimizer_state["loss_scale"].numpy()
                        assert lowered == result.metrics["loss_scale"] / 2
                        assert trainer.optimizer_state["good_steps"].numpy() == 0
            trainer.step(*batch)
            wanted.step(*batch)
            own, other = bits(trainer), bits(wanted)
            differ = [name for name in own if own[name] != other[name] and name not in scale]
            assert not differ, (place, kind, i)
        assert trainer.updates == wanted.updates == len(batches) // first.train_step.accumulate
        assert (trainer.steps, trainer.skipped) == (wanted.steps, wanted.skipped)


@pytest.mark.parametrize("clip", ["clip_value", "clip_norm"])
def test_a_clipped_gradient_keeps_nan(clip):
    """As in PyTorch: NaN is no number to update by, and a norm that is NaN makes all NaN."""
    step = train_step(
        module_of("float32", 5, 3), SGD(0.1), wrt=["w", "b"], states=["mean"], **{clip: 0.5}
    )
    ones = np.ones((5, 3), "float32"), np.ones(3, "float32"), np.zeros(5, "float32")
    trainer = Trainer(step, values=dict(zip(("w", "b", "mean"), ones, strict=True)))
    x = np.ones((ROWS, 5), "float32")
    x[0] = 0
    assert np.isfinite(trainer.step(x, np.ones((ROWS, 3), "float32")).loss)
    assert np.isnan(trainer.params["w" if clip == "clip_value" else "b"].numpy()).all()
