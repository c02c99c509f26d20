"""Results in the memory of donated arguments."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import tirx as T

from relax_grad import pipeline
from relax_grad.cpu.schedule import _stream, in_place, schedule
from relax_grad.cpu.target import CPU, host, x86_64
from relax_grad.ir.module import DONATED

SHAPE = (6, 6)


@T.prim_func(private=True, s_tir=True)
def elements(x: T.Buffer(SHAPE, "float32"), y: T.Buffer(SHAPE, "float32")):
    half = T.sblock_alloc_buffer(SHAPE)
    for i, j in T.grid(6, 6):
        with T.sblock("half"):
            a, b = T.axis.remap("SS", [i, j])
            half[a, b] = x[a, b] * T.float32(0.5)
    for i, j in T.grid(6, 6):
        with T.sblock("result"):
            a, b = T.axis.remap("SS", [i, j])
            y[a, b] = half[a, b] + x[a, b]


@T.prim_func(private=True, s_tir=True)
def transposed(x: T.Buffer(SHAPE, "float32"), y: T.Buffer(SHAPE, "float32")):
    for i, j in T.grid(6, 6):
        with T.sblock("result"):
            a, b = T.axis.remap("SS", [i, j])
            y[a, b] = x[b, a] + T.float32(1)


@T.prim_func(private=True, s_tir=True)
def transposed_before(x: T.Buffer(SHAPE, "float32"), y: T.Buffer(SHAPE, "float32")):
    half = T.sblock_alloc_buffer(SHAPE)
    for i, j in T.grid(6, 6):
        with T.sblock("half"):
            a, b = T.axis.remap("SS", [i, j])
            half[a, b] = x[b, a] * T.float32(0.5)
    for i, j in T.grid(6, 6):
        with T.sblock("result"):
            a, b = T.axis.remap("SS", [i, j])
            y[a, b] = half[a, b] + x[a, b]


@T.prim_func(private=True, s_tir=True)
def read_later(
    x: T.Buffer(SHAPE, "float32"), y: T.Buffer(SHAPE, "float32"), z: T.Buffer(SHAPE, "float32")
):
    for i, j in T.grid(6, 6):
        with T.sblock("first"):
            a, b = T.axis.remap("SS", [i, j])
            y[a, b] = x[a, b] + T.float32(1)
    for i, j in T.grid(6, 6):
        with T.sblock("second"):
            a, b = T.axis.remap("SS", [i, j])
            z[a, b] = x[a, b] * y[a, b]


@T.prim_func(private=True, s_tir=True)
def summed(x: T.Buffer(SHAPE, "float32"), y: T.Buffer(SHAPE, "float32")):
    for i, j, k in T.grid(6, 6, 6):
        with T.sblock("result"):
            a, b, c = T.axis.remap("SSR", [i, j, k])
            with T.init():
                y[a, b] = T.float32(0)
            y[a, b] = y[a, b] + x[a, c]


@T.prim_func(private=True, s_tir=True)
def other_type(x: T.Buffer((36,), "float32"), y: T.Buffer(SHAPE, "float32")):
    for i, j in T.grid(6, 6):
        with T.sblock("result"):
            a, b = T.axis.remap("SS", [i, j])
            y[a, b] = x[a * 6 + b]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(
    ("function", "wanted"),
    [(elements, lambda x: x / 2 + x), (transposed_before, lambda x: x.T / 2 + x)],
)
def test_a_result_in_the_memory_of_an_argument(function, wanted, scheduled):
    x = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    changed = in_place(function, [(0, 1)])
    assert len(changed.params) == 1
    if scheduled:
        changed = schedule(changed, CPU.of(host()))
    compiled = tvm.compile(
        tvm.IRModule({"main": changed.with_attr("global_symbol", "main")}), host()
    )
    tensor = tvm.runtime.tensor(x)
    compiled["main"](tensor)
    np.testing.assert_allclose(tensor.numpy(), wanted(x), rtol=1e-6)


def test_one_loop_computes_an_element_in_place():
    text = schedule(in_place(elements, [(0, 1)]), CPU.of(host())).script()
    # Of pieces, vectors, and the rest; the only memory beside the argument is that of a vector.
    assert text.count("range") + text.count("T.parallel") + text.count("T.grid") == 3
    assert text.count("T.alloc_buffer") == 1


@pytest.mark.parametrize("function", [transposed, read_later, summed, other_type])
def test_results_with_memory_of_their_own(function):
    assert in_place(function, [(0, 1)]) is None


def test_a_result_after_the_last_read():
    assert in_place(read_later, [(0, 2)]) is not None


def step_of(body, donated=((1, 1),)):
    """Return a module with the function ``step(x, (a, b)) -> (x-like, (new a, new b))`` whose
    second parameter is donated."""
    kind = relax.TensorType(SHAPE, "float32")
    x = relax.Var("x", kind)
    both = relax.Var("both", relax.TupleType([kind, kind]))
    bb = relax.BlockBuilder()
    with bb.function("step", [x, both], {DONATED: [list(pair) for pair in donated]}):
        with bb.dataflow():
            fields = [bb.emit(relax.TupleGetItem(both, i)) for i in range(2)]
            result = bb.emit_output(body(bb, x, *fields))
        bb.emit_func_output(result)
    return bb.get()


def compiled(body, donated=((1, 1),)):
    """Return the function of :func:`step_of`, compiled."""
    built = tvm.compile(step_of(body, donated), host(), relax_pipeline="relax_grad")
    return relax.VirtualMachine(built, tvm.cpu())["step"]


def tensors(count):
    rng = np.random.default_rng(1)
    values = [rng.normal(size=SHAPE).astype("float32") for _ in range(count)]
    return values, [tvm.runtime.tensor(value) for value in values]


def memory(tensor):
    return np.from_dlpack(tensor).__array_interface__["data"][0]


def test_new_values_take_the_memory_of_the_old_ones():
    def body(bb, x, a, b):
        new = bb.emit(op.add(op.multiply(b, relax.const(0.5, "float32")), x))
        return relax.Tuple([x, relax.Tuple([bb.emit(op.subtract(a, new)), new])])

    step = compiled(body)
    (x, a, b), inputs = tensors(3)
    places = list(map(memory, inputs))
    _, results = step(inputs[0], inputs[1:])
    _, again = step(inputs[0], results)
    assert list(map(memory, again)) == places[1:]
    new = b / 2 + x
    newer = new / 2 + x
    np.testing.assert_allclose(again[1].numpy(), newer, rtol=1e-5)
    np.testing.assert_allclose(again[0].numpy(), a - new - newer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_large", [False, True])
def test_updates_in_place_are_vectors_that_are_stored_through_the_caches(is_large, monkeypatch):
    """LLVM makes no vectors of some of these loops, and the lines of tensors that are read are in
    the caches."""
    if is_large:
        monkeypatch.setattr(_stream, "LARGE", 2)

    def body(bb, x, a, b):
        velocity = bb.emit(op.add(op.multiply(b, relax.const(0.5, "float32")), x))
        new = bb.emit(op.subtract(a, op.multiply(velocity, relax.const(0.25, "float32"))))
        return relax.Tuple([x, relax.Tuple([new, velocity])])

    with x86_64("v3", 2):
        module = pipeline()(step_of(body))
    updates = {
        variable.name_hint: function.script()
        for variable, function in module.functions_items()
        if variable.name_hint.endswith("_in_place")
    }
    (text,) = updates.values()
    assert "T.vectorized" in text
    assert "relax_grad_stream_" not in text
    step = compiled(body)
    (x, a, b), inputs = tensors(3)
    _, results = step(inputs[0], inputs[1:])
    np.testing.assert_allclose(results[1].numpy(), b / 2 + x, rtol=1e-6)
    np.testing.assert_allclose(results[0].numpy(), a - (b / 2 + x) / 4, rtol=1e-5, atol=1e-6)


def test_results_that_depend_on_each_others_old_values_take_their_memory():
    """One loop computes both before it stores one."""

    def body(bb, x, a, b):
        new = bb.emit(op.add(op.multiply(a, relax.const(0.5, "float32")), b))
        other = bb.emit(op.add(op.multiply(b, relax.const(0.25, "float32")), a))
        return relax.Tuple([x, relax.Tuple([new, other])])

    step = compiled(body)
    (_x, a, b), inputs = tensors(3)
    places = list(map(memory, inputs))
    _, results = step(inputs[0], inputs[1:])
    assert list(map(memory, results)) == places[1:]
    np.testing.assert_array_equal(results[0].numpy(), a / 2 + b)
    np.testing.assert_array_equal(results[1].numpy(), b / 4 + a)


def test_an_argument_that_is_read_later_is_kept():
    """The update of ``a`` is moved behind its last read, or has memory of its own."""

    def body(bb, x, a, b):
        new = bb.emit(op.add(a, x))
        return relax.Tuple(
            [bb.emit(op.matmul(a, b)), relax.Tuple([new, bb.emit(op.matmul(new, a))])]
        )

    (x, a, b), inputs = tensors(3)
    first, (new, product) = compiled(body)(inputs[0], inputs[1:])
    np.testing.assert_allclose(first.numpy(), a @ b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new.numpy(), a + x, rtol=1e-5)
    np.testing.assert_allclose(product.numpy(), (a + x) @ a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        lambda bb, x, a, b: relax.Tuple([x, relax.Tuple([b, a])]),
        lambda bb, x, a, b: relax.Tuple([x, relax.Tuple([x, b])]),
        lambda bb, x, a, b: relax.Tuple([a, relax.Tuple([a, b])]),
        lambda bb, x, a, b: relax.Tuple([a, relax.Tuple([bb.emit(op.add(a, x)), b])]),
        lambda bb, x, a, b: relax.Tuple([x, relax.Tuple([bb.emit(op.zeros_like(a)), b])]),
        lambda bb, x, a, b: (lambda y: relax.Tuple([x, relax.Tuple([y, y])]))(
            bb.emit(op.add(a, b))
        ),
    ],
    ids=["exchanged", "input", "unchanged", "returned", "constant", "twice"],
)
def test_results_share_no_memory(body):
    """Constants, other arguments and tensors that are returned twice are copied."""
    step = compiled(body)
    (x, a, b), inputs = tensors(3)
    plain = compiled(body, donated=())
    values = [tvm.runtime.tensor(value) for value in (x, a, b)]
    state, wanted = inputs[1:], values[1:]
    for _ in range(3):
        result, state = step(inputs[0], state)
        two, wanted = plain(values[0], [tvm.runtime.tensor(tensor.numpy()) for tensor in wanted])
        for own, value in zip([result, *state], [two, *wanted], strict=True):
            np.testing.assert_array_equal(own.numpy(), value.numpy())
        assert len({memory(inputs[0]), *map(memory, state)}) == 3
        assert memory(result) not in map(memory, state)
