"""Nodes ``If`` whose condition is known at run time, with branches of other extents."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_models import node, normal  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.errors import UnsupportedOperatorError  # noqa: E402
from relax_grad.frontend.onnx import from_model  # noqa: E402


def branch(name: str, *nodes):
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph(list(nodes), name, [], [output])


def choice(first, second, tail=()):
    """Return a model of a choice between two branches by ``flag``, whose result ``y`` others
    read."""
    nodes = [node("If", ["flag"], ["y"], then_branch=first, else_branch=second), *tail]
    weights = {"zero": np.array([0]), "two": np.array([2]), "three": np.array([3])}
    output = tail[-1].output[0] if tail else "y"
    model = models.model_of(nodes, {"x": [4, 3]}, weights, [output])
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    return model


def rows(name: str, count: str):
    return branch(name, node("Slice", ["x", "zero", count], [name]))


def test_the_branches_may_have_other_extents():
    tail = [node("Mul", ["y", "y"], ["s"]), node("ReduceSum", ["s"], ["z"], keepdims=0)]
    imported = from_model(choice(rows("a", "two"), rows("b", "three"), tail))
    main = imported.module["main"]
    module = relax_grad.value_and_grad(imported.module, "main", wrt=[main.params[0]])
    machine = relax.VirtualMachine(tvm.compile(module, models.TARGET), tvm.cpu())
    x = normal(4, 3)
    for flag, count in ((True, 2), (False, 3)):
        value, (gradient,) = machine["main_adjoint"](
            *map(tvm.runtime.tensor, (x, np.array(flag))), *imported.values
        )
        wanted = np.where(np.arange(4)[:, None] < count, 2 * x, 0)
        np.testing.assert_allclose(value.numpy(), np.square(x[:count]).sum(), rtol=1e-6)
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-6)


def test_branches_of_other_ranks_are_refused():
    flat = branch("b", node("Flatten", ["x"], ["f"]), node("ReduceSum", ["f"], ["b"], keepdims=0))
    with pytest.raises(
        UnsupportedOperatorError, match=r"If 'y': its branches return 'y' as .*axes"
    ):
        from_model(choice(rows("a", "two"), flat))
