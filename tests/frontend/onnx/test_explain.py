"""The constants of ONNX models that are trained by default, the others, and the reasons."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx_models import node, normal  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402


def constant(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def number(value):
    return np.array(value, "float32")


def basis(length=16):
    """Return the windowed cosines and sines of a Fourier transform, as weights of a convolution."""
    angle = 2 * np.pi * np.outer(np.arange(length // 2 + 1), np.arange(length)) / length
    both = np.concatenate([np.cos(angle), np.sin(angle)]) * np.hanning(length)
    return both[:, None].astype("float32")


def filters(rows=24, columns=6):
    """Return overlapping triangles, as mel filters are."""
    centers = np.linspace(2, rows - 3, columns)
    distance = np.abs(np.arange(rows)[:, None] - centers)
    return np.maximum(0, 1 - distance / 4).astype("float32")


def positions(rows=12, columns=8):
    angle = np.outer(np.arange(rows), 0.3 ** np.arange(columns // 2))
    return np.concatenate([np.sin(angle), np.cos(angle)], 1)[None].astype("float32")


#: Nodes on an input ``x`` of shape (2, 12, 8), the constants, and the names of those that are
#: trained.
CASES = {
    "weights in Constant nodes": (
        [
            constant("123", normal(8, 8)),
            constant("val_4", normal(8)),
            constant("val_5", number(0.5)),
            node("Transpose", ["123"], ["t"], perm=[1, 0]),
            node("MatMul", ["x", "t"], ["a"]),
            node("Add", ["val_4", "a"], ["b"]),
            node("Mul", ["b", "val_5"]),
        ],
        {},
        ["123", "val_4"],
    ),
    "a decomposed normalisation": (
        [
            node("ReduceMean", ["x"], ["m"], axes=[2]),
            node("Sub", ["x", "m"], ["d"]),
            node("Mul", ["d", "d"], ["q"]),
            node("ReduceMean", ["q"], ["variance"], axes=[2]),
            node("Add", ["variance", "fuzz"], ["shifted"]),
            node("Sqrt", ["shifted"], ["root"]),
            node("Div", ["d", "root"], ["n"]),
            node("Mul", ["n", "onnx::Mul_7"], ["s"]),
            node("Add", ["s", "onnx::Add_8"]),
        ],
        {"fuzz": number(1e-6), "onnx::Mul_7": normal(8), "onnx::Add_8": normal(8)},
        ["onnx::Mul_7", "onnx::Add_8"],
    ),
    "a normalisation as TensorFlow writes it": (
        [
            node("ReduceMean", ["x"], ["m"], axes=[2]),
            node("Mul", ["x", "x"], ["q"]),
            node("ReduceMean", ["q"], ["shifted"], axes=[2]),
            node("Sqrt", ["shifted"], ["root"]),
            node("Reciprocal", ["root"], ["inverse"]),
            node("Mul", ["inverse", "norm/Reshape_2:0"], ["factor"]),
            node("Mul", ["x", "factor"], ["scaled"]),
            node("Mul", ["m", "factor"], ["shift"]),
            node("Sub", ["norm/Reshape_3:0", "shift"], ["offset"]),
            node("Add", ["scaled", "offset"], ["n"]),
            node("Mul", ["n", "20"]),
        ],
        {"norm/Reshape_2:0": normal(8), "norm/Reshape_3:0": normal(8), "20": number(20)},
        ["norm/Reshape_2:0", "norm/Reshape_3:0"],
    ),
    "a normalisation of groups as PyTorch writes it": (
        [
            constant("/norm/Constant_1_output_0", np.ones(4, "float32")),
            constant("/norm/Constant_2_output_0", np.zeros(4, "float32")),
            node("Reshape", ["x", "groups"], ["a"]),
            node(
                "InstanceNormalization",
                ["a", "/norm/Constant_1_output_0", "/norm/Constant_2_output_0"],
                ["b"],
            ),
            node("Reshape", ["b", "shape"], ["c"]),
            node("Mul", ["c", "onnx::Mul_9"], ["d"]),
            node("Add", ["d", "onnx::Add_10"]),
        ],
        {
            "groups": np.array([2, 4, -1]),
            "shape": np.array([2, 12, 8]),
            "onnx::Mul_9": normal(12, 1),
            "onnx::Add_10": normal(12, 1),
        },
        ["onnx::Mul_9", "onnx::Add_10"],
    ),
    "weight normalisation": (
        [
            node("ReduceL2", ["v1"], ["length"], axes=[1]),
            node("Div", ["v1", "length"], ["direction"]),
            node("Mul", ["direction", "magnitude"], ["scaled"]),
            node("Mul", ["scaled", "half"], ["weights"]),
            node("MatMul", ["x", "weights"]),
        ],
        {"v1": normal(8, 4), "magnitude": normal(8, 1), "half": number(0.5)},
        ["v1", "magnitude"],
    ),
    "a rotary table": (
        [
            node("MatMul", ["x", "inverse"], ["angles"]),
            node("Concat", ["angles", "angles"], ["both"], axis=2),
            node("Sin", ["both"], ["sine"]),
            node("Cos", ["both"], ["cosine"]),
            node("Add", ["sine", "cosine"]),
        ],
        {"inverse": normal(8, 4)},
        [],
    ),
    "a sinusoidal network": (
        [node("MatMul", ["x", "w1"], ["a"]), node("Sin", ["a"])],
        {"w1": normal(8, 4)},
        ["w1"],
    ),
    "tables of positions": (
        [
            node("Add", ["x", "pos_embed"], ["a"]),
            node("Add", ["a", "position_embedding"], ["b"]),
            node("Mul", ["b", "rope.inv_freq"]),
        ],
        {
            "pos_embed": positions(),
            "position_embedding": normal(1, 12, 8),
            "rope.inv_freq": normal(8),
        },
        ["position_embedding"],
    ),
    "a spectrum": (
        [
            node("Reshape", ["x", "shape"], ["signal"]),
            node("Conv", ["signal", "onnx::Conv_1"], ["spectrum"]),
            node("Mul", ["spectrum", "spectrum"], ["power"]),
            node("ReduceSum", ["power", "axis"], ["energy"], keepdims=0),
            node("Slice", ["energy", "zero", "width", "last"], ["part"]),
            node("MatMul", ["part", "onnx::MatMul_2"], ["bands"]),
            node("Add", ["bands", "tiny"], ["positive"]),
            node("Log", ["positive"], ["logarithm"]),
            node("Sub", ["logarithm", "features_mean"], ["centred"]),
            node("MatMul", ["centred", "onnx::MatMul_3"]),
        ],
        {
            "shape": np.array([2, 1, 96]),
            "onnx::Conv_1": basis(),
            "axis": np.array([1]),
            "zero": np.array([0]),
            "width": np.array([24]),
            "last": np.array([1]),
            "onnx::MatMul_2": filters(),
            "tiny": number(1e-5),
            "features_mean": normal(6),
            "onnx::MatMul_3": normal(6, 3),
        },
        ["onnx::MatMul_3"],
    ),
    "expressions": (
        [
            node("Div", ["x", "eight"], ["a"]),
            node("Mul", ["a", "logit_scale"], ["b"]),
            node("Mul", ["b", "factor"], ["c"]),
            node("PRelu", ["c", "9"], ["d"]),
            node("Pow", ["d", "two"]),
        ],
        {
            "eight": number(8),
            "logit_scale": number(2),
            "factor": normal(8),
            "9": number([0.25]),
            "two": number(2),
        },
        ["logit_scale", "9"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_default_trains_the_parameters_of_a_framework(case):
    nodes, weights, trained = CASES[case]
    imported = from_model(models.model_of(nodes, {"x": [2, 12, 8]}, weights, opset=17))
    assert sorted(imported.params) == sorted(trained)
    explanation = imported.explain()
    assert {name for name, role in explanation.items() if role.kind == "trained"} == {*trained}
    floats = {name for name, value in weights.items() if value.dtype == "float32"}
    assert floats <= {*explanation}
    tables = {name for name in floats - {*trained} if weights[name].size > 1}
    assert tables <= {*imported.frozen}
    assert all(role.reason for role in explanation.values())
    *lines, last = str(explanation).splitlines()
    assert len(lines) == len(explanation)
    assert last.startswith("batch: ")


def test_an_embedding_is_trained_and_a_table_of_numbers_is_not():
    nodes = [
        node("Gather", ["onnx::Gather_0", "ids"], ["e"]),
        node("Gather", ["schedule", "ids"], ["s"]),
        node("Unsqueeze", ["s", "axis"], ["column"]),
        node("Mul", ["e", "column"]),
    ]
    weights = {"onnx::Gather_0": normal(5, 3), "schedule": normal(5), "axis": np.array([1])}
    model = models.model_of(nodes, {}, weights)
    model.graph.input.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]))
    assert list(from_model(model).params) == ["onnx::Gather_0"]


def test_weights_in_branches_are_trained():
    def branch(kind):
        inner = [constant("7", normal(8, 8)), node("MatMul", ["x", "7"], ["m"])]
        inner.append(node(kind, ["m"], ["z"]))
        output = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 8])
        return helper.make_graph(inner, kind, [], [output])

    nodes = [node("If", ["flag"], then_branch=branch("Relu"), else_branch=branch("Tanh"))]
    model = models.model_of(nodes, {"x": [2, 8]}, {})
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    imported = from_model(model)
    assert list(imported.params) == ["7", "7_"]
    x = normal(2, 8)
    for flag in (True, False):
        models.check_outputs(imported, model, {"x": x, "flag": np.array(flag)})


@pytest.mark.parametrize(
    ("trainable", "params"),
    [
        ("factor", ["factor"]),
        ("fac*", ["factor"]),
        (["*"], ["logit_scale", "9"]),
        (["eight", "9"], ["eight", "9"]),
        (lambda name: "logit" not in name, ["9"]),
    ],
)
def test_trainable_overrides_the_default(trainable, params):
    nodes, weights, _ = CASES["expressions"]
    model = models.model_of(nodes, {"x": [2, 12, 8]}, weights, opset=17)
    imported = from_model(model, trainable=trainable)
    assert sorted(imported.params) == sorted(params)
    roles = imported.explain()
    assert roles["factor"].kind == ("trained" if "factor" in params else "frozen")
    if "logit_scale" not in params:
        assert roles["logit_scale"] == ("frozen", "trainable does not select it")


def test_a_number_that_would_be_folded_can_be_trained():
    nodes = [node("Mul", ["one_third", "3"], ["c"]), node("Mul", ["x", "c"])]
    weights = {"one_third": number(1 / 3), "3": number(3)}
    model = models.model_of(nodes, {"x": [4]}, weights)
    imported = from_model(model, trainable="one_*")
    assert list(imported.params) == ["one_third"]
    models.check_outputs(imported, model, {"x": normal(4)})


def test_a_weight_that_no_gradient_reaches_is_called_so():
    nodes = [
        node("MatMul", ["x", "w1"], ["h"]),
        node("Cast", ["h"], ["whole"], to=TensorProto.INT32),
        node("Cast", ["whole"], ["back"], to=TensorProto.FLOAT),
        node("MatMul", ["back", "w2"], ["y"]),
    ]
    weights = {"w1": normal(4, 6), "w2": normal(6, 3)}
    model = models.model_of(nodes, {"x": [2, 4]}, weights)
    imported = from_model(model)
    assert list(imported.params) == ["w2"]
    assert imported.explain()["w1"] == ("constant", "no gradient passes the Cast whole")
    with pytest.raises(ValueError, match=r"no gradient reaches w1, because .* the Cast whole"):
        from_model(model, trainable=["w1"])


@pytest.mark.filterwarnings("ignore")  # the exporter has many
def test_the_parameters_of_a_module_of_pytorch_are_trained(tmp_path):
    """The file of PyTorch's exporter has parameters and buffers under their names, and does not
    tell them apart."""
    torch = pytest.importorskip(
        "torch", reason="PyTorch, which exports the model, is not installed"
    )
    nn = torch.nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, 4)
            self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
            self.pos_embed = nn.Parameter(torch.randn(1, 5, 16))
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
            self.groups = nn.GroupNorm(5, 5)
            self.plain = nn.LayerNorm(16, elementwise_affine=False)
            self.recurrent = nn.GRU(16, 8)
            self.head = nn.utils.weight_norm(nn.Linear(8, 3))
            self.logit_scale = nn.Parameter(torch.tensor(2.0))
            self.register_buffer("image_mean", torch.rand(1, 3, 1, 1))
            self.register_buffer("image_std", 1 + torch.rand(1, 3, 1, 1))
            self.register_buffer("inv_freq", torch.rand(8))

        def forward(self, x):
            x = self.patches((x - self.image_mean) / self.image_std).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
            angles = torch.arange(5)[:, None] * self.inv_freq
            x = x + torch.cat([angles.sin(), angles.cos()], 1)
            x, _ = self.recurrent(self.groups(self.plain(self.layer(x))))
            return self.head(x) * self.logit_scale.exp()

    network, path = Network(), tmp_path / "network.onnx"
    torch.onnx.export(
        network,
        (torch.rand(2, 3, 8, 8),),
        path,
        dynamo=False,
        opset_version=17,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )
    assert {*from_model(path).params} == {name for name, _ in network.named_parameters()}
