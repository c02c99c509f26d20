"""Four workers in two groups: collectives, and groups that compute shares of a batch with divided
layers."""

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
from sessions import assert_ended, new_session, scatter, values
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.distributed import WorkerError, along, column, data_parallel, row, tensor_parallel
from relax_grad.errors import BrokenTrainerError
from relax_grad.training import LAMB, SGD, AdamW, Trainer, train_step

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def groups():
    """Return a session of two groups of two workers."""
    with new_session(4, num_groups=2) as session:
        yield session
        pids = list(session.pids.values())
    assert_ended(pids)


def test_groups(groups):
    inputs = RNG.normal(size=(4, 3)).astype("float32")
    start = scatter(groups, list(inputs))
    result = groups.empty((3,), "float32")
    groups.allreduce(start, result, "sum", True)
    for rank, array in enumerate(values(groups, result)):
        own = inputs[rank // 2 * 2 : rank // 2 * 2 + 2]
        np.testing.assert_allclose(array, own.sum(0), 1e-6)
    groups.allreduce(start, result, "sum", False)
    for array in values(groups, result):
        np.testing.assert_allclose(array, inputs.sum(0), 1e-6)
    pairs = groups.empty((2, 3), "float32")
    groups.allgather(start, pairs, True)
    for rank, array in enumerate(values(groups, pairs)):
        np.testing.assert_array_equal(array, inputs[rank // 2 * 2 : rank // 2 * 2 + 2])
    whole = groups.empty((4, 3), "float32")
    groups.allgather(start, whole, False)
    for array in values(groups, whole):
        np.testing.assert_array_equal(array, inputs)
    groups.broadcast_from_worker0(start, result, True)
    for rank, array in enumerate(values(groups, result)):
        np.testing.assert_array_equal(array, inputs[rank // 2 * 2])
    groups.import_python_module("worker_tasks")
    assert groups.run("to_next_group", value=1.0) == [None, None, 1.0, 2.0]


#: The layers of the GPT, and its vocabulary of 12 characters.
VOCABULARY = {**GPT_SHARDS, "tokens.weight": along(0), "head.weight": column()}


@pytest.mark.slow
def test_the_gpt_with_a_divided_vocabulary_on_two_groups(groups, tmp_path):
    """Losses, norms, parameters and moments are those of one worker; the groups have texts of
    different numbers.

    Two runs have the same bits, with and without overlap. The file is that of one worker.
    """
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    step, batches = char_gpt(characters=12, sizes=(5, 4, 3, 4, 2))
    single = Trainer(step)
    parallel = data_parallel(step, groups, shards=VOCABULARY, check_every=1, bucket_bytes=8000)
    assert parallel.parallel_step.params["tokens.weight"].shape.values[0] == 6
    assert parallel.parallel_step.params["head.weight"].shape.values[0] == 6
    parallel.save(tmp_path / "start")
    results, wanted = [
        [trainer.step(*batch) for batch in batches] for trainer in (parallel, single)
    ]
    np.testing.assert_allclose([e.loss for e in results], [e.loss for e in wanted], 1e-5)
    norms = [[e.metrics["grad_norm"] for e in some] for some in (results, wanted)]
    assert min(norms[1]) > 0.5  # clipped
    np.testing.assert_allclose(*norms, 1e-5)
    after = tensors(parallel)
    assert_close(without_key_biases(after), without_key_biases(tensors(single)))
    parallel.save(tmp_path / "end")
    parallel.load(tmp_path / "start")
    assert [parallel.step(*batch).loss for batch in batches] == [e.loss for e in results]
    assert_same_bits(tensors(parallel), after)
    single.load(tmp_path / "end")
    assert_same_bits(tensors(single), after)
    assert all(traffic.sent > 0 for traffic in parallel.communication)


def divided(emit, x, up, down):
    return emit(op.matmul(emit(op.nn.relu(emit(op.matmul(x, up)))), down))


def test_a_sum_without_overlap_and_accumulation(groups):
    """In float64, against one worker; parts of parameters that differ between groups are told."""
    n = tirx.Var("n", "int64")
    shapes = {"x": (n, 3), "up": (3, 4), "down": (4, 2)}
    params = [relax.Var(k, relax.TensorType(v, "float64")) for k, v in shapes.items()]
    bb = relax.BlockBuilder()
    with bb.function("loss", params):
        y = divided(bb.emit, *params)
        bb.emit_func_output(bb.emit(op.sum(bb.emit(op.square(y)))))
    step = train_step(bb.get(), SGD(lr=0.01, momentum=0.9), wrt=["up", "down"], accumulate=2)
    start = {name: RNG.normal(size=shapes[name]) for name in ("up", "down")}
    shards = {"up": column(), "down": row()}
    parallel = data_parallel(
        step, groups, shards=shards, values=start, reduction="sum", overlap=False, check_every=2
    )
    assert {name: str(shard) for name, shard in parallel.shards.items()} == {
        "up": "column()",
        "down": "row()",
    }
    single = Trainer(step, values=start)
    for count in (5, 3, 2, 4):
        batch = RNG.normal(size=(count, 3))
        assert parallel.step(batch).loss == pytest.approx(single.step(batch).loss, rel=1e-12)
    assert_close(tensors(parallel), tensors(single), 1e-12)
    with pytest.raises(ValueError, match="an example for each of the 2 groups, but it has 1"):
        parallel.step(batch[:1])
    parallel.step(batch)
    groups.import_python_module("worker_tasks")
    groups.run("disturb", name=parallel._name, rank=3)
    with pytest.raises(WorkerError, match=r"worker 3 .*differ from worker 1 after step 5"):
        parallel.step(batch)
    with pytest.raises(BrokenTrainerError, match="load a saved state"):
        parallel.step(batch)


def test_a_divided_state_of_the_optimizer_with_divided_parameters(groups, tmp_path):
    """The bits are those without the division. Parts of ``up`` have 15 elements, which 2 groups do
    not divide, ``bias`` is whole, and ``scale`` has one element. The file is that of one worker."""
    pytest.importorskip("safetensors", reason="files need safetensors: extra train")
    n = tirx.Var("n", "int64")
    shapes = {"x": (n, 5), "up": (5, 6), "down": (6, 2), "bias": (2,), "scale": (1,)}
    x, up, down, bias, scale = (
        relax.Var(k, relax.TensorType(v, "float32")) for k, v in shapes.items()
    )
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, up, down, bias, scale]):
        y = bb.emit(op.add(divided(bb.emit, x, up, down), bb.emit(op.multiply(bias, scale))))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    names = list(shapes)[1:]
    step = train_step(bb.get(), AdamW(lr=0.1), wrt=names, clip_norm=1.0, ema=0.9, accumulate=2)
    start = {name: RNG.normal(size=shapes[name]).astype("float32") for name in names}
    options = {"shards": {"up": column(), "down": row()}, "values": start, "check_every": 1}
    whole = data_parallel(step, groups, **options)
    parallel = data_parallel(step, groups, shard_optimizer=True, **options)
    types = parallel.parallel_step.optimizer_state
    sizes = [int(types[f"exp_avg/{name}"].shape.values[0]) for name in names]
    assert sizes == [8, 3, 1, 1]
    data = [RNG.normal(size=(count, 5)).astype("float32") for count in (5, 3, 2, 4, 6, 2)]
    for batch in data[:4]:
        assert parallel.step(batch).loss == whole.step(batch).loss
    assert_same_bits(tensors(parallel), tensors(whole))
    parallel.save(tmp_path / "state")
    single = Trainer(step, values=start)
    for trainer in (whole, parallel, single):
        trainer.load(tmp_path / "state")
    for batch in data[4:]:
        loss = parallel.step(batch).loss
        assert loss == whole.step(batch).loss
        assert loss == pytest.approx(single.step(batch).loss, rel=1e-5)
    assert_same_bits(tensors(parallel), tensors(whole))


def seeded(optimizer=None):
    """Return a step whose predictions have the seed as an addend."""
    kinds = {"x": ((4, 2), "float64"), "w": ((2,), "float64"), "seed": ((), "int64")}
    x, w, seed = (relax.Var(k, relax.TensorType(*kind)) for k, kind in kinds.items())
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, seed]):
        y = bb.emit(op.add(bb.emit(op.matmul(x, w)), bb.emit(op.astype(seed, "float64"))))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.square(y)))))
    return train_step(bb.get(), optimizer or SGD(lr=0.0), wrt=["w"])


def test_random_numbers_differ_by_group(groups):
    """The workers of a group have the same seed."""
    parallel = data_parallel(seeded(), groups, shards={"w": along(0)}, values={"w": np.ones(2)})
    parallel.step(np.ones((8, 2)))
    first, second, *others = parallel.own_losses
    assert first == second
    assert others == [others[0]] * 2
    assert first != others[0]


def test_wrong_arguments(groups):
    step = seeded()
    with pytest.raises(ValueError, match="session has 2 groups, but a tensor parallel step"):
        tensor_parallel(step, groups, shards={"w": along(0)})
    with pytest.raises(ValueError, match="w cannot be divided among workers with LAMB"):
        data_parallel(seeded(LAMB()), groups, shards={"w": along(0)}, shard_optimizer=True)


def test_an_error_names_the_worker_and_the_shapes(groups):
    """The last test of this session: an error ends it."""
    send, recv = groups.empty((2,), "float32"), groups.empty((2,), "float32")
    groups.allgather(send, recv)
    with pytest.raises(WorkerError, match=r"worker \d on .*: allgather: .*\(2,\).* 2 times"):
        groups.synchronize()
    with pytest.raises(WorkerError, match="allgather"):  # the session has ended
        groups.run("wait")
