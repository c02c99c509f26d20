"""Tensor parallel training, against one worker with the whole model."""

from __future__ import annotations

import numpy as np
import pytest
from parallel_models import (
    GPT_SHARDS,
    assert_close,
    assert_same_bits,
    char_gpt,
    tensors,
    without_key_biases,
)
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.distributed import along, column, row, tensor_parallel
from relax_grad.training import LAMB, SGD, Trainer, train_step

MLP = {"up": (4, 6), "bias": (6,), "down": (6, 3)}
SHARDS = {"up": column(), "bias": column(), "down": row()}


def mlp(optimizer, dtype="float32", **options):
    """Return a step of a network with magnitudes as activations, values, and 6 batches of different
    sizes."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), dtype))
    params = [relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in MLP.items()]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *params]):
        up, bias, down = params
        y = bb.emit(op.add(bb.emit(op.matmul(x, up)), bias))
        y = bb.emit(op.matmul(bb.emit(op.sqrt(bb.emit(op.square(y)))), down))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=shape).astype(dtype) for name, shape in MLP.items()}
    batches = [rng.normal(size=(count, 4)).astype(dtype) for count in (5, 3, 1, 4, 5, 2)]
    return train_step(bb.get(), optimizer, wrt=list(MLP), **options), values, batches


@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gpt_of_the_example_is_as_on_one_worker(pair, tmp_path, layers):
    """Losses, norms of the gradients, parameters and moments over 5 steps; two runs have the same
    bits.

    The file is that of one worker, which goes on from it.
    """
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    step, batches = char_gpt(layers)
    single, parallel = Trainer(step), tensor_parallel(step, pair, shards=GPT_SHARDS, check_every=2)
    assert parallel.parallel_step.params["blocks.0.qkv.weight"].shape.values[0] == 24
    assert (
        parallel.parallel_step.optimizer_state["exp_avg/blocks.0.mlp.2.weight"].shape.values[1]
        == 32
    )
    parallel.save(tmp_path / "start")
    wanted = [single.step(*batch) for batch in batches]
    runs = []
    for _ in range(2):
        parallel.load(tmp_path / "start")
        runs.append(([parallel.step(*batch) for batch in batches], tensors(parallel)))
    (results, values), again = runs
    np.testing.assert_allclose([e.loss for e in results], [e.loss for e in wanted], 1e-5)
    norms = [[e.metrics["grad_norm"] for e in some] for some in (results, wanted)]
    assert min(norms[1]) > 0.5  # clipped
    np.testing.assert_allclose(*norms, 1e-5)
    # AdamW divides small gradients by as small moments: their rounding errors remain, and grow with
    # the layers.
    tolerance = 1e-5 if layers == 1 else 5e-5
    assert_close(without_key_biases(values), without_key_biases(tensors(single)), tolerance)
    assert [e.loss for e in again[0]] == [e.loss for e in results]
    assert_same_bits(again[1], values)
    parallel.save(tmp_path / "end")
    single.load(tmp_path / "end")
    assert_same_bits(tensors(single), values)
    tokens = batches[0][0]
    np.testing.assert_array_equal(parallel.predict(tokens).numpy(), single.predict(tokens).numpy())
    np.testing.assert_allclose(single.step(*batches[0]).loss, parallel.step(*batches[0]).loss, 1e-5)


def test_accumulation_and_moving_averages(pair):
    """In float64 with different numbers of examples, against one worker."""
    options = {"accumulate": 2, "ema": 0.9, "clip_norm": 0.1}
    step, values, batches = mlp(SGD(lr=0.05, momentum=0.9), "float64", **options)
    single = Trainer(step, values=values)
    parallel = tensor_parallel(step, pair, shards=SHARDS, values=values, check_every=1)
    assert {name: str(shard) for name, shard in parallel.shards.items()} == {
        "up": "column()",
        "bias": "column()",
        "down": "row()",
    }
    for batch in batches:
        result, wanted = parallel.step(batch), single.step(batch)
        assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.metrics == pytest.approx(wanted.metrics, rel=1e-6)
    assert parallel.updates == 3
    assert_close(tensors(parallel), tensors(single), 1e-11)


def test_a_gradient_that_is_not_finite_on_one_worker(pair):
    """All workers skip the step: the root of 0 has a gradient that is no number, in worker 1's part
    only."""
    step, values, batches = mlp(SGD(lr=0.05), skip_nonfinite=True)
    values["up"][:, 4], values["bias"][4] = 0, 0
    parallel = tensor_parallel(
        step, pair, shards=SHARDS, values=values, check_every=1, on_nan="skip"
    )
    before = tensors(parallel)
    result = parallel.step(batches[0])
    assert np.isfinite(result.loss)
    assert result.metrics["applied"] == 0
    assert parallel.skipped == 1
    assert_same_bits(tensors(parallel), before)


def test_a_loss_that_is_no_number_changes_nothing(pair):
    step, values, batches = mlp(SGD(lr=0.05, momentum=0.9))
    single = Trainer(step, values=values)
    parallel = tensor_parallel(step, pair, shards=SHARDS, values=values, check_every=1)
    parallel.step(batches[0]), single.step(batches[0])
    before = tensors(parallel)
    with pytest.raises(FloatingPointError, match="the loss is nan in step 1"):
        parallel.step(batches[1] * np.nan)
    assert_same_bits(tensors(parallel), before)
    assert parallel.step(batches[1]).loss == pytest.approx(single.step(batches[1]).loss, rel=1e-5)


def test_masks_of_dropout_are_those_of_one_worker(pair):
    """The masks of a divided layer are drawn whole, and each worker takes its part. A frozen layer
    is divided too."""
    torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")
    from relax_grad.frontend.torch import from_module

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )
    network[3].weight.requires_grad = False
    x = torch.randn(6, 4)
    imported = from_module(
        network, (x,), loss=lambda y, z: ((y - z) ** 2).mean(), targets=(x[:, :3],)
    )
    step = train_step(imported, SGD(lr=0.1))
    shards = {"0.weight": column(), "0.bias": along(0), "3.weight": row()}
    single, parallel = Trainer(step), tensor_parallel(step, pair, shards=shards)
    assert "3.weight" in step.frozen
    batch = x.numpy(), x[:, :3].numpy().copy()
    for _ in range(3):
        assert parallel.step(*batch).loss == pytest.approx(single.step(*batch).loss, rel=1e-5)
    assert_close(tensors(parallel), tensors(single))


def test_wrong_arguments(pair):
    step, values, _ = mlp(SGD())
    with pytest.raises(TypeError, match="session must be a result of"):
        tensor_parallel(step, None, shards=SHARDS)
    with pytest.raises(TypeError, match="shards must be a mapping of names or patterns to column"):
        tensor_parallel(step, pair, shards=column())
    with pytest.raises(ValueError, match=r"no parameter matches 'x', .* there are up, bias, down"):
        tensor_parallel(step, pair, shards={"x": column()})
    with pytest.raises(ValueError, match="optimizer is for models"):
        tensor_parallel(step, pair, SGD(), shards=SHARDS)
    with pytest.raises(ValueError, match="check_every must be a number of steps"):
        tensor_parallel(step, pair, shards=SHARDS, check_every=-1)
    step, values, _ = mlp(LAMB())
    with pytest.raises(ValueError, match="up cannot be divided among workers with LAMB"):
        tensor_parallel(step, pair, shards=SHARDS, values=values)
    step, values, _ = mlp(SGD())
    with pytest.raises(
        ValueError, match=r"up: axis 1 has the extent 6, .* 4 parts, each for 2 workers"
    ):
        tensor_parallel(step, pair, shards={**SHARDS, "up": column(parts=4)}, values=values)
