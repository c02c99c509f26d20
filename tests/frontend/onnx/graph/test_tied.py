"""Weights that a file stores twice."""

from __future__ import annotations

import numpy as np
import pytest

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import numpy_helper  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402

IDS = np.array([[1, 0, 5], [3, 3, 2]])


def language_model(
    call="p_words_weight", dtype="float64", table=None, copy=None, is_transposed=True
):
    """Return a model whose head is its table of words, stored twice, with the call that PyTorch's
    exporter writes at the head."""
    table = normal(7, 4, dtype=dtype) if table is None else table
    copy = (table.T.copy() if is_transposed else table.copy()) if copy is None else copy
    head = node("MatMul" if is_transposed else "Gemm", ["f", "val_3"], ["y"])
    if not is_transposed:
        head.attribute.append(onnx.helper.make_attribute("transB", 1))
    if call:
        value = (
            f"%linear : call_function[target=aten.linear](args = (%mul, %{call}), kwargs = {{}})"
        )
        head.metadata_props.add(key="pkg.torch.onnx.fx_node", value=value)
    nodes = [
        node("Gather", ["words.weight", "ids"], ["e"]),
        node("MatMul", ["e", "mix.weight"], ["m"]),
        node("Tanh", ["m"], ["t"]),
        node("Reshape", ["t", "shape"], ["f"]),
        head,
    ]
    weights = {
        "words.weight": table,
        "mix.weight": normal(4, 4, dtype=dtype),
        "val_3": copy,
        "shape": np.array([-1, 4]),
    }
    model = models.model_of(nodes, {"ids": [2, 3]}, weights, dtype=dtype)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    for extent in (6, 7):
        model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=extent)
    return model


@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_copy_that_the_exporter_names_is_one_parameter(tmp_path, is_transposed):
    model = language_model(is_transposed=is_transposed)
    imported = from_model(model)
    assert list(imported.params) == ["words.weight", "mix.weight"]
    role = imported.explain()["val_3"]
    assert role.kind == "trained"
    assert role.reason.startswith("it is words.weight")
    models.check_outputs(imported, model, {"ids": IDS})
    models.check_parameter_gradients(imported, {"ids": IDS})
    value = normal(7, 4, dtype="float64")
    imported.write_to(tmp_path / "new.onnx", {"words.weight": value})
    written = {e.name: e for e in onnx.load(tmp_path / "new.onnx").graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(written["words.weight"]), value)
    wanted = value.T if is_transposed else value
    np.testing.assert_array_equal(numpy_helper.to_array(written["val_3"]), wanted)
    onnx.checker.check_model(tmp_path / "new.onnx")
    again = from_model(tmp_path / "new.onnx")
    assert list(again.params) == ["words.weight", "mix.weight"]


def test_the_frozen_original_freezes_the_copy():
    imported = from_model(language_model(), trainable="mix.weight")
    assert list(imported.params) == ["mix.weight"]
    assert list(imported.frozen) == ["words.weight"]
    assert imported.explain()["val_3"].kind == "frozen"
    with pytest.raises(ValueError, match=r"val_3 is words.weight, transposed; select words.weight"):
        from_model(language_model(), trainable="val_3")


def test_equal_weights_without_a_word_of_the_exporter_stay_apart():
    """Clones of a layer are equal before training."""
    for model, arguments in (
        (language_model(call=""), {}),
        (language_model(call="p_head_weight"), {}),
        (language_model(), {"tied": False}),
    ):
        imported = from_model(model, **arguments)
        assert list(imported.params) == ["words.weight", "mix.weight", "val_3"]
        reason = imported.explain()["val_3"].reason
        assert "it has the values of words.weight, transposed, and trains apart" in reason
        assert "tied={'val_3': 'words.weight'}" in reason
    tied = from_model(language_model(call=""), tied={"val_3": "words.weight"})
    assert list(tied.params) == ["words.weight", "mix.weight"]
    models.check_parameter_gradients(tied, {"ids": IDS})


def test_different_values_are_never_tied():
    other = normal(4, 7, dtype="float64")
    imported = from_model(language_model(copy=other))
    assert list(imported.params) == ["words.weight", "mix.weight", "val_3"]
    assert "apart" not in imported.explain()["val_3"].reason
    zeros = from_model(language_model(call="", table=np.zeros((7, 4))))
    assert "apart" not in zeros.explain()["val_3"].reason


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"val_3": "words"}, "tied: the model has no constant tensor 'words'"),
        ({"val_3": "mix.weight"}, r"tied: val_3 \(4, 7\) must have the values of mix.weight"),
        ({"val_3": "words.weight", "words.weight": "val_3"}, "is an original and a copy too"),
    ],
)
def test_wrong_pairs_are_refused(tied, message):
    with pytest.raises(ValueError, match=message):
        from_model(language_model(), tied=tied)


@pytest.mark.slow
def test_a_head_that_is_the_table_of_words_as_pytorch_exports_it(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, with which PyTorch exports, is missing")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 8)
            self.head = torch.nn.Linear(8, 30, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.mix(self.words(ids)).tanh())

    module, path = Model().eval(), str(tmp_path / "model.onnx")
    torch.onnx.export(module, (torch.tensor(IDS),), path, dynamo=True, verbose=False)
    imported = from_model(path)
    assert len(imported.params) == len(list(module.parameters())) == 3
    module(torch.tensor(IDS)).square().sum().backward()
    table = next(name for name, param in imported.params.items() if tuple(param.shape) == (30, 8))

    def loss(bb, y):
        return bb.emit(models.relax.op.sum(models.relax.op.multiply(y, y)))

    adjoint = relax_grad.value_and_grad(imported.with_loss(loss), "loss", wrt=[table])
    _, (grad,) = models.compiled(adjoint, "loss_adjoint")(IDS, *imported.values)
    np.testing.assert_allclose(grad, module.words.weight.grad.numpy(), rtol=1e-4, atol=1e-5)
