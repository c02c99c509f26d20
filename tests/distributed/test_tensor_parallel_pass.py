"""Tensor parallelism as a pass, on workers that are threads, against the function of whole
tensors."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tvm
from thread_workers import thread_workers
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.op import grad as own_op
from tvm_ffi import structural_equal

from relax_grad.distributed import along, column, join_values, row, shard_values
from relax_grad.distributed.transform import TensorParallel
from relax_grad.ir.bindings import bindings_of
from relax_grad.transform import Gradient

from ._divided_models import BATCH, CASES, MLP, MLP_SHARDS, mean_of, mlp, module_of, values_of


def compiled(module, *passes):
    for transform in passes:
        module = transform(module)
    return tvm.compile(module, target="llvm")


@functools.cache
def results_of_whole_tensors(build, shapes):
    """Return the loss and the gradients of the function of whole tensors."""
    module = module_of(build, dict(shapes))
    machine = relax.VirtualMachine(compiled(module, Gradient("loss")), tvm.cpu())
    values = map(tvm.runtime.tensor, values_of(dict(shapes)).values())
    return machine["loss_adjoint"](*values)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_whole_tensors(name):
    build, shapes, shards = CASES[name]
    module = module_of(build, shapes)
    pass_, gradient = TensorParallel("loss", shards, 2), Gradient("loss")
    values, divided = values_of(shapes), pass_.shards_of(module)
    loss, wanted = results_of_whole_tensors(build, tuple(shapes.items()))
    executable = compiled(module, pass_, gradient)
    with thread_workers() as start:
        arguments = [list(part.values()) for part in shard_values(values, divided, 2)]
        results = start(2).run(executable, "loss_adjoint", arguments)
    for own, _ in results:
        np.testing.assert_allclose(own.numpy(), loss.numpy(), 1e-12)
    gradients = [
        {key: grad.numpy() for key, grad in zip(shapes, result[1], strict=True)}
        for result in results
    ]
    for key in shapes:
        if key not in divided:
            np.testing.assert_array_equal(gradients[1][key], gradients[0][key], key)
    whole = join_values(gradients, divided)
    for key, grad in zip(shapes, wanted, strict=True):
        np.testing.assert_allclose(whole[key], grad.numpy(), 1e-9, 1e-12, err_msg=key)


def test_second_order():
    """The gradient of the squared gradient with respect to the input."""
    module = module_of(mlp, {**MLP, "x": (BATCH, 4)})

    def penalty(mod):
        adjoint = Gradient("loss")(mod)
        params = [relax.Var(param.name, param.ty) for param in mod["loss"].params]
        bb = relax.BlockBuilder(adjoint)
        with bb.function("penalty", params):
            with bb.dataflow():
                both = bb.emit(relax.Call(adjoint.get_global_var("loss_adjoint"), params))
                first = bb.emit(relax.TupleGetItem(bb.emit(relax.TupleGetItem(both, 1)), 0))
                result = bb.emit_output(op.sum(op.square(first)))
            bb.emit_func_output(result)
        return Gradient("penalty")(bb.get())

    pass_, values = TensorParallel("loss", MLP_SHARDS, 2), values_of(MLP)
    machine = relax.VirtualMachine(compiled(module, penalty), tvm.cpu())
    _, wanted = machine["penalty_adjoint"](*map(tvm.runtime.tensor, values.values()))
    divided = pass_.shards_of(module)
    with thread_workers() as start:
        arguments = [list(part.values()) for part in shard_values(values, divided, 2)]
        results = start(2).run(compiled(module, pass_, penalty), "penalty_adjoint", arguments)
    shares = [
        {key: grad.numpy() for key, grad in zip(MLP, result[1], strict=True)} for result in results
    ]
    for key, grad in zip(MLP, wanted, strict=True):
        np.testing.assert_allclose(join_values(shares, divided)[key], grad.numpy(), 1e-9, 1e-12)


def test_divided_results_are_collected():
    """The scores beside the loss, and a nested tuple with two parts that are divided within
    themselves."""
    n, shapes = tirx.Var("n", "int64"), {"w": (4, 6), "joined": (4, 8)}
    x = relax.Var("x", relax.TensorType((n, 4), "float64"))
    w, both = (relax.Var(k, relax.TensorType(v, "float64")) for k, v in shapes.items())
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w, both]):
        y, z = bb.emit(op.matmul(x, w)), bb.emit(op.matmul(x, both))
        loss = mean_of(bb.emit, y)
        bb.emit_func_output(relax.Tuple([loss, y, relax.Tuple([z, x])]))
    shards = {"w": column(), "joined": column(parts=2)}
    pass_, values = TensorParallel("loss", shards, 2), values_of({"x": (3, 4), **shapes})
    with thread_workers() as start:
        arguments = shard_values(values, pass_.shards_of(bb.get()), 2)
        arguments = [list(part.values()) for part in arguments]
        results = start(2).run(compiled(bb.get(), pass_), "loss", arguments)
    for _, y, (z, _) in results:
        np.testing.assert_allclose(y.numpy(), values["x"] @ values["w"], 1e-12)
        np.testing.assert_allclose(z.numpy(), values["x"] @ values["joined"], 1e-12)


def calls(function):
    values = [binding.value for binding in bindings_of(function.body)]
    return [value.op.name.rpartition(".")[2] for value in values if isinstance(value, relax.Call)]


def test_types_and_the_places_of_collectives():
    """A copy before the column-parallel product, and a sum directly behind the row-parallel one."""
    function = TensorParallel("loss", MLP_SHARDS, 2)(module_of(mlp, MLP))["loss"]
    shapes = {param.name: [*param.ty.shape.values][-2:] for param in function.params[1:]}
    assert shapes == {"up": [4, 3], "bias": [3], "down": [3, 4], "last": [4]}
    copy, reduce = "copy_to_tensor_parallel", "reduce_from_tensor_parallel"
    assert calls(function) == [
        copy,
        "matmul",
        "add",
        "gelu",
        "matmul",
        reduce,
        "add",
        "sin",
        "mean",
    ]
    adjoint = Gradient("loss")(tvm.IRModule({"loss": function}))["loss_adjoint"]
    assert calls(adjoint).count(reduce) == 2
    legal = relax.transform.LegalizeOps()(tvm.IRModule({"loss": function}))["loss"].script()
    assert legal.count("runtime.disco.allreduce") == 1
    assert copy not in legal


def test_layers_of_one_input_share_its_copy():
    """The cotangent of the input is reduced once for queries, keys and values."""

    def separate(emit, x, q, k, out):
        y = emit(op.add(emit(op.matmul(x, q)), emit(op.matmul(x, k))))
        return mean_of(emit, emit(op.matmul(y, out)))

    shapes = {"x": (2, 4), "q": (4, 4), "k": (4, 4), "out": (4, 4)}
    module = module_of(separate, shapes)
    function = TensorParallel("loss", {"[qk]": column(), "out": row()}, 2)(module)["loss"]
    assert calls(function).count("copy_to_tensor_parallel") == 1


def test_one_worker_has_the_same_function():
    module = module_of(mlp, MLP)
    divided = TensorParallel("loss", MLP_SHARDS, 1)(module)
    assert structural_equal(divided["loss"], module["loss"])


def test_values_are_divided_within_parts():
    values = {"w": np.arange(12).reshape(1, 12), "b": np.arange(2)}
    first, second = shard_values(values, {"w": along(1, 3)}, 2)
    assert first["w"].tolist() == [[0, 1, 4, 5, 8, 9]]
    assert second["w"].tolist() == [[2, 3, 6, 7, 10, 11]]
    whole = join_values([first, second], {"w": along(1, 3)})
    assert whole["w"].tolist() == values["w"].tolist()
    assert whole["b"].tolist() == [0, 1]


def result_of(build):
    """Return a function whose loss is the mean of ``build(emit, y)``, for y of the shape (4, 6)
    with a divided axis 1."""
    return lambda emit, x, w: mean_of(emit, build(emit, emit(op.matmul(x, w))))


REFUSED = {
    "cumulative sum": (
        lambda emit, y: emit(op.cumsum(y, 1)),
        r"relax\.cumsum \(lv\d*\): the operator needs axis 1 of lv\d* whole",
    ),
    "no rule": (
        lambda emit, y: emit(op.sort(y, 1)),
        r"relax\.sort \(lv\d*\): there is no rule for the operator with lv\d*, whose axis 1 is "
        r"divided",
    ),
    "heads": (
        lambda emit, y: emit(op.reshape(y, (4, 3, 2, 1))),
        r"relax\.reshape \(lv\d*\): axis 1 of lv\d*, of the shape \(4, 6\), is divided among 2 "
        r"workers, and no axis of the new shape \(4, 3, 2, 1\)",
    ),
    "sections": (
        lambda emit, y: emit(relax.TupleGetItem(emit(op.split(y, 3, 1)), 0)),
        r"relax\.split \(lv\d*\): axis 1 of lv\d* is divided within 1 parts of 6 elements, but "
        r"a section has or begins at 2",
    ),
    "two axes": (
        lambda emit, y: emit(op.matmul(y, emit(op.permute_dims(y)))),
        None,
    ),
    "different axes": (
        lambda emit, y: emit(op.matmul(emit(op.permute_dims(y)), y)),
        r"relax\.matmul \(lv\d*\): axis 0 of lv\d* and axis 1 of lv\d* are divided, which are "
        r"different axes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_needs_the_whole_axis_is_refused(name):
    build, message = REFUSED[name]
    module = module_of(result_of(build), {"x": (4, 4), "w": (4, 6)})
    pass_ = TensorParallel("loss", {"w": column()}, 2)
    if message is None:  # a product over the divided axis is a sum
        assert "reduce_from_tensor_parallel" in pass_(module).script()
        return
    with pytest.raises(ValueError, match=message):
        pass_(module)


@pytest.mark.parametrize(
    ("stream", "shard", "message"),
    [
        (3, along(2, 2), r"the axis of the head must .* but it has 2 parts of 1 for a worker"),
        ([3, 0, 4], along(2), r"the heads are a part of other workers' heads already"),
        (3, along(1), r"the operator needs axis 1 of q whole"),
    ],
)
def test_heads_whose_random_numbers_have_no_place_are_refused(stream, shard, message):
    def build(emit, q, k, v):
        numbers = relax.const(7, "int64"), relax.const(np.array(stream), "int64")
        return mean_of(emit, emit(own_op.attention_dropout(q, k, v, *numbers, 0.4)))

    module = module_of(build, dict.fromkeys("qkv", (2, 4, 4, 2)))
    with pytest.raises(ValueError, match=r"relax\.grad\.attention_dropout \(lv\d*\): " + message):
        TensorParallel("loss", {"q": shard}, 2)(module)


def test_more_workers_than_heads_of_keys_are_refused():
    build, shapes, _ = CASES["attention, two heads of keys"]
    pass_ = TensorParallel("loss", {"query": column(), "out": row()}, 4)
    with pytest.raises(
        ValueError,
        match=r"axis 2 of lv\d* has the extent 2, and 2 positions of the divided axis share one of "
        r"them, so that the 4 workers must divide this extent",
    ):
        pass_(module_of(build, shapes))


def test_branches_results_and_parts_are_refused():
    shapes = {"x": (4, 4), "w": (4, 6)}
    mask = module_of(lambda emit, x, w: emit(op.isnan(emit(op.matmul(x, w)))), shapes)
    with pytest.raises(ValueError, match=r"a result .* axis 1 is divided .*the dtype is bool"):
        TensorParallel("loss", {"w": column()}, 2)(mask)
    parts = module_of(mlp, {**MLP, "up": (4, 12), "bias": (12,), "down": (12, 4)})
    shards = {"up": column(), "bias": column(3), "down": row()}
    with pytest.raises(
        ValueError, match=r"relax\.add .* within 1 parts, but axis 0 of bias within 3"
    ):
        TensorParallel("loss", shards, 2)(parts)
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    condition = relax.Var("condition", relax.TensorType((), "bool"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, condition]):
        branch = [relax.SeqExpr([], x), relax.SeqExpr([], x)]
        bb.emit_func_output(bb.emit(relax.If(condition, *branch)))
    with pytest.raises(ValueError, match=r"a conditional \(.*\): cannot take x, whose axis 0"):
        TensorParallel("loss", {"x": along(0)}, 2)(bb.get())


def test_annotations_are_checked():
    module = module_of(mlp, MLP)

    def divided(shards, workers=2):
        return TensorParallel("loss", shards, workers)(module)

    with pytest.raises(
        ValueError,
        match="up: axis 1 has the extent 6, which cannot be divided equally into 4 workers",
    ):
        divided({"up": column()}, 4)
    with pytest.raises(
        ValueError, match="into 3 parts, each for 4 workers; it must be a multiple of 12"
    ):
        divided({"up": column(parts=3)}, 4)
    with pytest.raises(
        ValueError,
        match=r"bias has row\(\), but one axis only: the bias of a row-parallel layer is whole",
    ):
        divided({"bias": row()})
    with pytest.raises(
        ValueError,
        match="no parameter matches 'z\\*', or all have an annotation already; there are x, up",
    ):
        divided({"z*": column()})
    with pytest.raises(
        ValueError, match="the use of x does not tell its output and input features"
    ):
        TensorParallel("loss", {"x": column()}, 2)(
            module_of(lambda emit, x: mean_of(emit, x), {"x": (4, 4)})
        )
    with pytest.raises(ValueError, match=r"up has 2 axes, but along\(2\) names axis 2"):
        divided({"up": along(2)})
    with pytest.raises(ValueError, match="x: axis 0 must have a constant extent"):
        divided({"x": along(0)})
    with pytest.raises(
        TypeError, match="shards: 'up' must be a name or a pattern, and 'column' the result of"
    ):
        divided({"up": "column"})
    with pytest.raises(ValueError, match="num_workers must be a positive integer, but it is 0"):
        divided(MLP_SHARDS, 0)
    with pytest.raises(ValueError, match="parts must be a positive integer, but it is 0"):
        column(0)
    with pytest.raises(TypeError, match="axis must be an integer, but it is 'n'"):
        along("n")
    with pytest.raises(ValueError, match=r"w: column\(\) has no axis"):
        shard_values({"w": np.zeros((2, 2))}, {"w": column()}, 2)
    with pytest.raises(ValueError, match="there is no value 'z'"):
        shard_values({"w": np.zeros((2, 2))}, {"z": column()}, 2)
