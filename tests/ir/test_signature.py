"""The positions of the parameters of a loss, by their roles."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from relax_grad.ir.signature import Signature
from relax_grad.training import SGD, Trainer, train_step


def test_an_import_has_the_order_seed_batch_params_frozen_states():
    signature = Signature.in_order(["x", "y"], ["w", "b"], ["c"], ["mean"], has_seed=True)
    assert signature.seed == 0
    assert signature.batch == {"x": 1, "y": 2}
    assert signature.groups == {
        "params": {"w": 3, "b": 4},
        "frozen": {"c": 5},
        "states": {"mean": 6},
    }
    assert signature.num_params == 7


def test_without_a_seed_the_batch_is_first():
    signature = Signature.in_order(["x"], ["w"], [], [], has_seed=False)
    assert (signature.seed, signature.batch, signature.num_params) == (None, {"x": 0}, 2)


def importable(names, num_inputs):
    """Return a function that has the attribute of imports and adds its parameters."""
    params = [relax.Var(name, relax.TensorType((2,), "float32")) for name in names]
    bb = relax.BlockBuilder()
    with bb.function("main", params, attrs={"num_input": num_inputs}):
        total = params[0]
        for param in params[1:]:
            total = bb.emit(relax.op.add(total, param))
        bb.emit_func_output(total)
    return bb.get()["main"]


def test_the_signature_of_an_imports_function():
    function = importable(["seed", "x", "y", "w", "c", "mean"], 3)
    signature = Signature.of_import(function, ["w"], ["c"], ["mean"], has_seed=True)
    assert (signature.seed, signature.batch) == (0, {"x": 1, "y": 2})
    assert signature.groups == {"params": {"w": 3}, "frozen": {"c": 4}, "states": {"mean": 5}}
    assert signature.num_inputs == 3
    assert signature.names == ["seed", "x", "y", "w", "c", "mean"]
    assert signature.arguments({"x": 1, "y": 2}, {"w": 3, "c": 4, "mean": 5}, 9) == [
        *(9, 1, 2, 3, 4, 5)
    ]


def test_the_names_of_an_import_must_be_those_of_its_function():
    function = importable(["x", "w", "c"], 1)
    with pytest.raises(ValueError, match="has 3 parameters, but the import names 2"):
        Signature.of_import(function, ["w"], [], [], has_seed=False)


def test_a_seed_must_be_given_if_the_function_takes_one():
    signature = Signature.in_order(["x"], ["w"], [], [], has_seed=True)
    with pytest.raises(ValueError, match="takes a seed"):
        signature.arguments({"x": 1}, {"w": 2})


def test_parameters_that_are_not_trained_are_frozen_in_their_places():
    signature = Signature.in_order(["x"], ["w", "b"], ["c"], [], has_seed=False).training(["b"])
    assert signature.params == {"b": 2}
    assert signature.frozen == {"w": 1, "c": 3}
    assert signature.arguments({"x": 10}, {"w": 11, "b": 12, "c": 13}) == [10, 11, 12, 13]


def test_an_input_may_have_the_name_of_a_parameter():
    signature = Signature.in_order(["weight"], ["weight"], [], [], has_seed=True)
    assert signature.arguments({"weight": "input"}, {"weight": "param"}, "seed") == [
        "seed",
        "input",
        "param",
    ]


@pytest.mark.parametrize("order", [["x", "w", "mean", "seed"], ["seed", "mean", "w", "x"]])
def test_a_module_has_any_order(order):
    types = {"x": ((4, 3), "float32"), "w": ((3,), "float32"), "mean": ((3,), "float32")}
    params = {name: relax.Var(name, relax.TensorType(*ty)) for name, ty in types.items()}
    params["seed"] = relax.Var("seed", relax.TensorType((), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [params[name] for name in order]):
        product = bb.emit(relax.op.matmul(params["x"], params["w"]))
        noise = relax.op.astype(params["seed"], "float32")
        loss = bb.emit(relax.op.add(relax.op.sum(product), noise))
        mean = bb.emit(relax.op.add(params["mean"], relax.op.mean(params["x"], 0)))
        bb.emit_func_output(relax.Tuple([loss, mean]))
    step = train_step(bb.get(), SGD(0.5), wrt="w", states=["mean"])
    values = {"w": np.ones(3, "float32"), "mean": np.zeros(3, "float32")}
    trainer = Trainer(step, values=values)
    x = np.arange(12, dtype="float32").reshape(4, 3)
    assert trainer.step(x).loss == x.sum()
    assert trainer.step(x).loss == float((x @ (1 - 0.5 * x.sum(0))).sum()) + 1  # the seed is 1
    np.testing.assert_allclose(trainer.states["mean"].numpy(), 2 * x.mean(0))
