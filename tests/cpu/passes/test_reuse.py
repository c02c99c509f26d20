"""Results in the memory of operands that no later call reads."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST
from programs import tensor, to_numpy
from tvm import relax
from tvm.relax import op

from relax_grad.cpu import stages
from relax_grad.cpu.memory import _lowered
from relax_grad.ir.bindings import bindings_of
from relax_grad.op.activation import log_softmax_backward, softmax_backward
from relax_grad.training import SGD, memory_of, train_step

RNG = np.random.default_rng(0)

#: A tensor of rows, one whose lines are columns, and one of columns that fill no vector.
SHAPES = (((6, 37), -1), ((3, 7, 80), 1), ((5, 9, 6), 1))

TOKENS, CLASSES, WIDTH = 64, 96, 16


def around(make, axis):
    """Return the body of a function in which a kernel is the last to read its operands."""

    def body(bb, *params):
        return op.cos(bb.emit(make(*(bb.emit(op.sin(param)) for param in params), axis)))

    return body


def summed(x, *_):
    return op.sum(x, -1, keepdims=True)


def read_later(bb, x):
    """A kernel must not write to an operand that a later call reads."""
    y = bb.emit(op.sin(x))
    z = bb.emit(op.nn.softmax(y, -1))
    return op.add(bb.emit(summed(z)), bb.emit(op.nn.log_softmax(y, -1)))


def through_views(bb, x):
    """A reshaped operand is another name of its memory."""
    y = bb.emit(op.reshape(bb.emit(op.sin(x)), (37, 6)))
    z = bb.emit(op.reshape(bb.emit(op.nn.log_softmax(y, -1)), (6, 37)))
    return op.cos(bb.emit(op.nn.softmax(z, -1)))


def twice(bb, x):
    """An operand that is passed twice, and one that a kernel has written in place."""
    y = bb.emit(op.nn.softmax(bb.emit(op.sin(x)), -1))
    return op.cos(bb.emit(softmax_backward(y, y, -1)))


def after_a_permutation(bb, x):
    """A loop that reads other elements than it writes has memory of its own."""
    y = bb.emit(op.nn.softmax(x, -1))
    z = bb.emit(op.add(y, bb.emit(op.permute_dims(y))))
    return op.nn.softmax(z, -1)


BODIES = {
    f"{make.__name__}_{len(shape)}_{shape[-1]}": (around(make, axis), [shape] * count)
    for shape, axis in SHAPES
    for make, count in (
        *((op.nn.softmax, 1), (op.nn.log_softmax, 1)),
        *((softmax_backward, 2), (log_softmax_backward, 2)),
    )
}
OTHERS = {
    "read_later": (read_later, [(6, 37)]),
    "through_views": (through_views, [(6, 37)]),
    "twice": (twice, [(6, 37)]),
    "after_a_permutation": (after_a_permutation, [(11, 11)]),
}


@tvm.transform.module_pass(opt_level=0, name="Unchanged")
def unchanged(mod, _context):
    return mod


@pytest.fixture
def in_memory_of_their_own(monkeypatch):
    """Replace the pass, so that each result has memory of its own."""
    return lambda: monkeypatch.setattr(stages, "WriteToLastRead", lambda: unchanged)


def module():
    bb = relax.BlockBuilder()
    for name, (body, shapes) in {**BODIES, **OTHERS}.items():
        params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
        with bb.function(name, params):
            with bb.dataflow():
                result = bb.emit_output(body(bb, *params))
            bb.emit_func_output(result)
    return bb.get()


def in_place_calls(mod, name):
    """Return the number of calls of a function of a lowered module that write to an operand."""
    values = [binding.value for binding in bindings_of(mod[name].body)]
    callees = [value.op for value in values if isinstance(value, relax.Call)]
    return sum("in_place" in getattr(callee, "name_hint", "") for callee in callees)


def test_results_in_the_memory_of_operands_have_the_same_bits(in_memory_of_their_own):
    mod = module()
    lowered = _lowered(mod, HOST)
    assert all(in_place_calls(lowered, name) for name in BODIES)
    # Two tensors are live in any case, so that the second kernel may have memory of its own.
    assert in_place_calls(lowered, "read_later") == 0
    assert in_place_calls(lowered, "through_views") == 2
    values = {
        name: [RNG.normal(size=shape).astype("float32") for shape in shapes]
        for name, (_, shapes) in {**BODIES, **OTHERS}.items()
    }

    def results():
        machine = relax.VirtualMachine(
            tvm.compile(mod, HOST, relax_pipeline="relax_grad"), tvm.cpu()
        )
        return {
            name: to_numpy(machine[name](*map(tvm.runtime.tensor, arrays)))
            for name, arrays in values.items()
        }

    ours = results()
    in_memory_of_their_own()
    assert not any(in_place_calls(_lowered(mod, HOST), name) for name in BODIES)
    wanted = results()
    for name, result in ours.items():
        assert result.tobytes() == wanted[name].tobytes(), name
    x = np.sin(values["softmax_2_37"][0].astype("float64"))
    reference = np.cos(np.exp(x) / np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(ours["softmax_2_37"], reference, rtol=1e-5)


def cross_entropy_step():
    x, w = tensor("x", (TOKENS, WIDTH), "float32"), tensor("w", (WIDTH, CLASSES), "float32")
    targets = tensor("targets", (TOKENS,), "int64")
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, targets, w]):
        with bb.dataflow():
            logits = bb.emit(op.matmul(x, w))
            classes = bb.emit(op.nn.log_softmax(logits, -1))
            loss = bb.emit_output(op.nn.nll_loss(classes, targets))
        bb.emit_func_output(loss)
    return train_step(bb.get(), SGD(0.1), wrt="w", remat=None)


def test_the_gradient_of_a_cross_entropy_takes_the_memory_of_the_logits(in_memory_of_their_own):
    step = cross_entropy_step()
    logits = 4 * TOKENS * CLASSES
    ours = memory_of(step).intermediate
    in_memory_of_their_own()
    assert logits < ours < memory_of(step).intermediate - 0.7 * logits
