"""The import for any number of rows, and the reasons for a fixed one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from relax_grad.frontend import onnx as of_onnx  # noqa: E402
from relax_grad.frontend.torch import from_module  # noqa: E402

nn = torch.nn


def shapes_of(types):
    return {
        name: [str(getattr(extent, "value", extent)) for extent in ty.shape.values]
        for name, ty in types.items()
    }


class Masked(nn.Module):
    """A mask without rows, nested inputs, and dropout."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, data, mask):
        return self.dropout(self.layer(data["x"]) * mask + data["y"])


def masked(rows, **options):
    module = Masked()
    module.dropout.eval()
    module.train()
    module.dropout.eval()
    data = {"x": torch.randn(rows, 3), "y": torch.randn(rows, 3)}
    return module, from_module(module, (data, torch.ones(3)), **options)


@pytest.mark.parametrize("rows", [1, 4])
def test_first_axes_of_equal_extent_become_symbolic(rows):
    module, imported = masked(rows)
    module.eval()  # later changes of the mode do not matter
    assert shapes_of(imported.inputs)["data.x"] == [str(rows), "3"]
    again = imported._batch.imported()
    expected = {"data.x": ["batch", "3"], "data.y": ["batch", "3"], "mask": ["3"]}
    assert shapes_of(again.inputs) == expected
    assert "seed" in str(again.module["training"].params[0])
    assert "dropout" not in str(again.module["training"])
    assert not module.training
    assert imported._batch.imported() is again


def test_batch_sets_the_number_of_rows():
    _, imported = masked(4, batch=6)
    assert shapes_of(imported.inputs)["data.y"] == ["6", "3"]
    assert imported.explain().batch == "6 rows of data.x and data.y; batch=6 fixes it"


def test_changed_modules_are_refused():
    module, imported = masked(4)
    module.layer = nn.Linear(3, 3, bias=False)
    assert imported._batch.imported() is None
    assert "the submodules of the module have changed since the import" in imported.explain().batch


def test_explanation_of_a_module():
    module = nn.BatchNorm1d(3)
    module.weight.requires_grad_(False)
    imported = from_module(module, (torch.randn(4, 3),))
    kinds = {name: role.kind for name, role in imported.explain().items()}
    assert kinds["weight"] == "frozen"
    assert kinds["bias"] == "trained"
    assert kinds["running_mean"] == "state"
    text = str(imported.explain())
    assert text.endswith("batch: any number of rows of input; the fastest step has 4 rows")


def test_guards_are_part_of_the_reason():
    class Halves(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1, 3)

    imported = from_module(Halves(), (torch.randn(4, 3),))
    assert "its code needs" in imported.explain().batch


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch": 0}, ValueError),
        ({"batch": "4"}, TypeError),
        ({"batch": 4, "dynamic_shapes": {}}, ValueError),
    ],
)
def test_bad_arguments(options, error):
    with pytest.raises(error, match="batch"):
        from_module(nn.Linear(3, 2), (torch.ones(4, 3),), **options)
    with pytest.raises(error, match="batch"):
        of_onnx.from_model(product(5), **options)


def product(rows):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 3])],
        [numpy_helper.from_array(np.ones((4, 3), "float32"), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_rows_of_an_onnx_model():
    imported = of_onnx.from_model(product(5))
    assert shapes_of(imported.inputs) == {"x": ["5", "4"]}
    assert shapes_of(imported._batch.imported().inputs) == {"x": ["batch", "4"]}
    assert str(imported.explain()).endswith(
        "batch: any number of rows of x; the fastest step has 5 rows"
    )
    fixed = of_onnx.from_model(product("n"), batch=6)
    assert shapes_of(fixed.inputs) == {"x": ["6", "4"]}
    symbolic = of_onnx.from_model(product("n"))
    assert symbolic._batch is None
    assert symbolic.explain().batch == ""
