"""Reductions beside the backward pass: the order of the calls, the results, the share that is
hidden, and failures."""

from __future__ import annotations

import numpy as np
import parallel_models
import pytest
import tvm
from dispatched import HOST
from parallel_models import assert_same_bits, tensors
from sessions import assert_ended, new_session
from tvm import relax

from relax_grad.cpu.passes.dispatch import DispatchKernels
from relax_grad.cpu.stages import passes
from relax_grad.distributed import WorkerError, data_parallel
from relax_grad.distributed.trainer import _differentiate
from relax_grad.ir.asynchronous import is_start, is_wait
from relax_grad.ir.bindings import bindings_of

#: The size of a bucket of the GPT, whose gradients have 27 KB.
BUCKET_BYTES = 4000


def kinds(function):
    """Return the kinds of the calls of a function in their order: start, wait, backward, or another
    call."""
    order = []
    for binding in bindings_of(function.body):
        value = binding.value
        if is_start(value) or is_wait(value):
            order.append("start" if is_start(value) else "wait")
        elif isinstance(value, relax.Call):
            name = getattr(value.op, "name", "")
            name = value.args[0].name_hint if name == "relax.call_tir" else name
            is_backward = "backward" in name or "einsum" in name or "collapse" in name
            order.append("backward" if is_backward else "other")
    return order


def check_order(order, buckets):
    """Check that a reduction starts between calls of the backward pass, and that all waits come
    behind these."""
    assert order.count("start") == order.count("wait") == buckets
    backward = [i for i, kind in enumerate(order) if kind == "backward"]
    starts = [i for i, kind in enumerate(order) if kind == "start"]
    behind = [sum(i > start for i in backward) for start in starts]
    assert behind[0] > len(backward) / 2
    assert all(behind[:-3])
    assert order.index("wait") > max(backward[-1], starts[-1])


def test_the_order_of_the_calls():
    """In the step, and in the compiled step, whose passes reorder calls for fusion and memory."""
    step, _, _ = parallel_models.transformer()
    differentiate = _differentiate(["x"], "mean", "synchronized", BUCKET_BYTES, True)
    module = step.for_workers(differentiate).module
    calls = kinds(module["step"])
    buckets = calls.count("start")
    assert buckets >= 6
    check_order(calls, buckets)
    with HOST:
        for transform in passes(HOST, DispatchKernels(HOST)):
            module = transform(module)
            if transform.info.name == "relax_grad.ReorderForPeakMemory":
                check_order(kinds(module["step"]), buckets)
    order = [kind for kind in kinds(module["step"]) if kind in ("start", "wait")]
    assert order == ["start"] * buckets + ["wait"] * buckets


def test_results_have_the_same_bits_with_and_without(gloo_pair):
    """test_trainer.py compares both with one worker. Shared memory has nothing to hide."""
    step, values, data = parallel_models.convolutional()
    options = {"values": values, "bucket_bytes": 500}
    parallel = data_parallel(step, gloo_pair, **options)
    text = str(parallel.parallel_step.module["step"])
    assert text.count("start_allreduce") == text.count("distributed.wait") == 2
    wanted = data_parallel(step, gloo_pair, overlap=False, **options)
    assert "start_allreduce" not in str(wanted.parallel_step.module["step"])
    for batch in data[:4]:
        assert parallel.step(*batch).loss == wanted.step(*batch).loss
    assert_same_bits(tensors(parallel), tensors(wanted))
    for trainer in (parallel, wanted):
        assert [traffic.sent for traffic in trainer.communication] == [
            parallel.communication[0].sent
        ] * 2
        assert all(
            0 < traffic.waited <= traffic.seconds + 1e-9 for traffic in trainer.communication
        )
    # Without overlap, the worker waits as long as a collective takes.
    assert [traffic.hidden for traffic in wanted.communication] == pytest.approx([0, 0], abs=1e-9)
    assert all(traffic.hidden > 0 for traffic in parallel.communication)


@pytest.mark.parametrize("kind", ["pair", "gloo_pair"])
def test_operands_may_be_overwritten_and_time_is_hidden(kind, request):
    pair = request.getfixturevalue(kind)
    pair.import_python_module("worker_tasks")
    for answer in pair.run("reduce_twice", seconds=1.0):
        assert answer["values"] == [[1.5] * 3, [3.0] * 3]
        assert answer["starting"] < 0.4
        # One reduction after the other takes half a second, during which the worker slept.
        assert answer["seconds"] > 0.49
        assert answer["waited"] < 0.5 * answer["seconds"]
    for seconds, waited in pair.run("reduce_with_slow_network", seconds=0.1):
        assert seconds > 0.19
        assert 0.19 < waited <= seconds + 1e-6


def test_no_elements(pair):
    pair.import_python_module("worker_tasks")
    assert pair.run("reduce_nothing") == [[0, 3], [0, 3]]


@pytest.mark.parametrize("ends", [True, False], ids=["killed", "hangs"])
def test_a_worker_that_fails_while_another_one_waits(ends):
    cause = "SIGKILL" if ends else "reduce_beside: no answer.*waited in allreduce"
    session = new_session(2, timeout=3)
    session.import_python_module("worker_tasks")
    with pytest.raises(WorkerError, match=rf"worker 1 on .*{cause}") as error:
        session.run("reduce_beside", rank=1, ends=ends)
    assert error.value.rank == 1
    assert_ended(session.pids.values())


def test_this_process_is_no_worker():
    pytest.importorskip("torch", reason="gloo comes with PyTorch: extra distributed")
    operand = tvm.runtime.tensor(np.ones(3, "float32"))
    with pytest.raises(RuntimeError, match="no worker of a session"):
        tvm.get_global_func("relax_grad.distributed.start_allreduce")("sum", "world", operand)
