"""The way from a module to a static plan, and what it refuses."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

import relax_grad
from relax_grad.static.planner import Entry, bound, plan
from relax_grad.training import SGD, memory_of, static_plan, train_step

NUMBERS = np.arange(4, dtype="float32")
TARGET = relax_grad.target.x86_64("v2", num_cores=1)


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def network():
    """Return ``loss(x, w, v)`` with a symbolic number of rows."""
    n = tirx.Var("n", "int64")
    x, w, v = tensor("x", (n, 5)), tensor("w", (5, 7)), tensor("v", (7,))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, v]):
        with bb.dataflow():
            y = bb.emit(op.nn.relu(bb.emit(op.matmul(x, w))))
            loss = bb.emit_output(op.mean(op.square(op.matmul(y, v))))
        bb.emit_func_output(loss)
    return bb.get()


@pytest.fixture(scope="module")
def step():
    return train_step(network(), SGD(momentum=0.9), wrt=["w", "v"], outputs=False)


@pytest.fixture(scope="module")
def several(step):
    return static_plan(step, TARGET, [{"n": 6}, {"n": 4}])


def test_several_sizes_share_the_state_and_equal_kernels(several):
    assert [function.name for function in several.functions] == ["step", "step"]
    large, small = several.functions
    assert dict(large.inputs)["batch/x"].shape == (6, 5)
    assert dict(small.inputs)["batch/x"].shape == (4, 5)
    assert [name for name, _ in several.state] == [
        *("params/w", "params/v", "optimizer_state/step"),
        *("optimizer_state/momentum_buffer/w", "optimizer_state/momentum_buffer/v"),
    ]
    names = [{call.kernel for call in function.calls} for function in several.functions]
    assert names[0] & names[1], "the optimizer's kernels do not depend on the size"
    assert names[0] != names[1]
    known = {variable.name_hint for variable in several.kernels.get_global_vars()}
    assert known == names[0] | names[1]


def test_the_plan_has_the_bytes_of_memory_of(step, several):
    for function, rows in zip(several.functions, (6, 4), strict=True):
        memory = memory_of(step, TARGET, {"n": rows})
        groups = {"params": 0, "optimizer_state": 0}
        for name, place in several.state:
            groups[name.partition("/")[0]] += place.bytes
        assert groups == {"params": memory.params, "optimizer_state": memory.optimizer_state}
        batch = sum(t.bytes for name, t in function.inputs if name.startswith("batch/"))
        assert batch == memory.batch
        assert sum(result.bytes for result in function.results) == memory.results
        # The arena also holds the inputs, and rounds each tensor up to 64 bytes.
        count = len({t for c in function.calls for t in c.arguments if not isinstance(t, int)})
        inputs = sum(t.bytes for _, t in function.inputs)
        assert function.arena <= memory.peak + inputs + 64 * count


def test_places_are_aligned_and_within_their_areas(several):
    sizes = {
        "state": several.state_bytes,
        "arena": several.arena_bytes,
        "constants": len(several.constants),
    }
    for function in several.functions:
        for call in function.calls:
            for place in call.arguments:
                assert place.offset % 64 == 0
                assert place.offset + place.bytes <= sizes[place.area]


def test_a_plan_is_printed(several):
    assert str(several).count("step: arena") == 2


def test_symbolic_extents_need_values(step):
    with pytest.raises(ValueError, match=r'step has the symbolic extents n; .*extents=\{"n": 32\}'):
        static_plan(step, TARGET)


def refused(module, match):
    with pytest.raises(ValueError, match=match):
        plan([module], [Entry("main", ("x",), ())], {}, TARGET)


def test_a_branch_at_run_time_is_refused():
    x = tensor("x", (4,))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        condition = bb.emit(op.greater(op.sum(x), relax.const(0.0, "float32")))
        one, other = (relax.SeqExpr([], f(x)) for f in (op.sin, op.cos))
        y = bb.emit(relax.If(condition, one, other))
        bb.emit_func_output(y)
    refused(bb.get(), r"main has a branch at run time; .*relax\.op\.where")


def test_state_that_is_exchanged_is_refused():
    """Copies one after another would give both the same value."""
    x, a, b = tensor("x", (4,)), tensor("a", (4,)), tensor("b", (4,))
    bb = relax.BlockBuilder()
    with bb.function("step", [x, a, b]):
        with bb.dataflow():
            loss = bb.emit_output(op.sum(x))
        bb.emit_func_output(relax.Tuple([loss, relax.Tuple([b, a])]))
    entries = [Entry("step", ("x", "a", "b"), (("a", "b"),))]
    with pytest.raises(ValueError, match="step gives a the value of b, which it changes too"):
        plan([bb.get()], entries, {"a": a.ty, "b": b.ty}, TARGET)


def test_a_packed_function_is_refused():
    x = tensor("x", (4,))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        y = bb.emit(op.call_dps_packed("my.function", (x,), x.ty))
        bb.emit_func_output(y)
    refused(bb.get(), r"main calls the packed function my\.function, .*leaving out runtime")


def test_a_loop_at_run_time_is_refused():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            cls = Module
            y: R.Tensor((4,), "float32") = cls.main(R.sin(x))
            return y

    refused(Module, r"main calls the function main of Relax, as a loop")


def test_extents_that_a_step_computes_are_refused():
    x = tensor("x", (4,))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        y = bb.emit(op.nonzero(x))
        bb.emit_func_output(y)
    refused(bb.get(), r"main (computes extents|calls the packed function)")


def test_views_and_constants_have_their_bytes():
    x = tensor("x", (2, 6))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(op.reshape(bb.emit(op.sin(x)), (3, 4)))
            kept = relax.const(tvm.runtime.tensor(NUMBERS), "float32")
            z = bb.emit_output(op.matmul(y, kept))
        bb.emit_func_output(z)
    made = plan([bb.get()], [Entry("main", ("x",), ())], {}, TARGET)
    (main,) = made.functions
    assert NUMBERS.tobytes() in made.constants
    shapes = {place.shape: place.offset for call in main.calls for place in call.arguments}
    assert shapes.get((3, 4)) is not None
    assert main.results[0].shape == (3,)


def test_bound_extents_are_numbers():
    module = bound(network(), ["loss"], {"n": 3, "m": 4})
    assert [int(extent) for extent in module["loss"].params[0].ty.shape.values] == [3, 5]
