"""Small ONNX models, and a model's outputs and gradients held against ONNX's evaluator and
differences."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from sweep import TARGET
from tvm import relax

import relax_grad
from relax_grad.frontend.onnx import Imported

OPSET = 18
RNG = np.random.default_rng(0)


def reseed(number):
    """Let the next draws be the same whatever tests ran before."""
    RNG.bit_generator.state = np.random.default_rng(number).bit_generator.state


def normal(*shape, dtype="float32"):
    return RNG.normal(size=shape).astype(dtype)


def node(kind, inputs, outputs=("y",), **attributes):
    return helper.make_node(kind, list(inputs), list(outputs), **attributes)


def model_of(
    nodes, inputs, weights, outputs=("y",), opset: int = OPSET, dtype="float32", **graph
) -> onnx.ModelProto:
    """Return a model.

    Inputs are shapes by name; weights are arrays by name; the outputs have no type.
    """
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, kind, None) for name in outputs],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
            **graph,
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )


def classifier(dtype="float32", batch=2):
    """Return a small network of convolution, normalisation, clipping, pooling and two dense
    layers."""
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["a", "gamma", "beta", "mean", "var"], ["b"]),
        node("Clip", ["b", "low", "high"], ["c"]),
        node("Pad", ["c", "pads"], ["d"], mode="reflect"),
        node("Resize", ["d", "", "scales"], ["e"], mode="linear"),
        node("GlobalAveragePool", ["e"], ["f"]),
        node("Flatten", ["f"], ["g"]),
        node("Gemm", ["g", "dense.weight", "dense.bias"], ["h"], transB=1, alpha=0.5),
        node("Elu", ["h"], ["i"]),
        node("MatMul", ["i", "last"], ["y"]),
    ]
    weights = {
        "conv.weight": normal(4, 3, 3, 3, dtype=dtype),
        "conv.bias": normal(4, dtype=dtype),
        "gamma": 1 + normal(4, dtype=dtype) / 9,
        "beta": normal(4, dtype=dtype),
        "mean": normal(4, dtype=dtype),
        "var": 1 + normal(4, dtype=dtype) ** 2,
        "low": np.array(-1, dtype),
        "high": np.array(2, dtype),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "scales": np.array([1, 1, 2, 2], "float32"),
        "dense.weight": normal(5, 4, dtype=dtype),
        "dense.bias": normal(5, dtype=dtype),
        "last": normal(5, 3, dtype=dtype),
    }
    return model_of(nodes, {"x": [batch, 3, 7, 7]}, weights, dtype=dtype)


WEIGHTS = ["conv.weight", "conv.bias", "gamma", "beta", "dense.weight", "dense.bias", "last"]


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model in float64 in the place of float32, to compare gradients with
    differences."""
    single, double = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    del graph.value_info[:]
    # The scales of a resizing operator are float32 in every model.
    scales = {name for node in graph.node if node.op_type == "Resize" for name in node.input[1:3]}
    tensors = [tensor for tensor in graph.initializer if tensor.name not in scales]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR and node.output[0] not in scales:
                tensors.append(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == single:
                attribute.i = double
    for tensor in tensors:
        if tensor.data_type == single:
            value = numpy_helper.to_array(tensor).astype("float64")
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for interface in (*graph.input, *graph.output):
        if interface.type.tensor_type.elem_type == single:
            interface.type.tensor_type.elem_type = double
    return copy


def in_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose initializers of float64 are of float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_type == onnx.TensorProto.DOUBLE:
            value = numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return copy


def wanted(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the outputs by ONNX's evaluator."""
    return ReferenceEvaluator(model).run(None, feeds)


def compiled(module: tvm.IRModule, name: str | None = "main", pipeline: str = "default"):
    """Return a function of arrays and tensors that returns an array or nested lists.

    Without a name, its first argument is the name of the function of the module.
    """
    target = relax_grad.target.host() if pipeline == "relax_grad" else TARGET
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())

    def call(name, *arguments):
        tensors = [
            argument
            if isinstance(argument, tvm.runtime.Tensor)
            else tvm.runtime.tensor(np.asarray(argument))
            for argument in arguments
        ]
        return _arrays(machine[name](*tensors))

    return call if name is None else functools.partial(call, name)


def _arrays(value):
    return value.numpy() if hasattr(value, "numpy") else [_arrays(item) for item in value]


def outputs(imported: Imported, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the results of the compiled ``main``."""
    results = compiled(imported.module)(
        *(feeds[name] for name in imported.inputs), *imported.values
    )
    return results if isinstance(results, list) else [results]


def check_outputs(imported: Imported, model, feeds, rtol=1e-5, atol=1e-5) -> None:
    """Compare the outputs with ONNX's evaluator, in value, shape and dtype."""
    expected = wanted(model, feeds)
    results = outputs(imported, feeds)
    assert len(results) >= len(expected)
    for result, other in zip(results, expected, strict=False):
        assert result.shape == other.shape
        assert result.dtype == other.dtype
        np.testing.assert_allclose(result, other, rtol=rtol, atol=atol)


def weighted_sum(bb, *results):
    """Build a loss: the sum of all results, each element with a weight of its own."""
    total = None
    for result in results:
        shape = [int(extent) for extent in result.ty.shape.values]
        weights = np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape)
        weights = relax.const(weights, str(result.ty.dtype.dtype))
        part = bb.emit(relax.op.sum(relax.op.multiply(result, weights)))
        total = part if total is None else bb.emit(relax.op.add(total, part))
    return total


def check_parameter_gradients(
    imported: Imported, feeds, rtol: float = 1e-6, steps=(1e-5,), pipeline="default"
) -> None:
    """Compare the gradient of each parameter with central differences in a random direction; for
    float64.

    A difference across a kink is wrong, so that any of the steps may agree.
    """
    names = list(imported.params)
    module = relax_grad.value_and_grad(imported.with_loss(weighted_sum), "loss", wrt=names)
    inputs = [feeds[name] for name in imported.inputs]
    values = {name: value.numpy() for name, value in imported.params.items()}
    rest = [*imported.frozen.values(), *imported.states.values()]
    call = compiled(module, None, pipeline)
    _, gradients = call("loss_adjoint", *inputs, *values.values(), *rest)

    def loss(changed):
        value = call("loss", *inputs, *{**values, **changed}.values(), *rest)
        return float(value[0] if isinstance(value, list) else value)

    rng = np.random.default_rng(0)
    for name, gradient in zip(names, gradients, strict=True):
        assert gradient.shape == values[name].shape
        direction = rng.normal(size=values[name].shape)
        slope, scale = float(np.sum(gradient * direction)), np.abs(gradient * direction).sum()
        differences = []
        for step in steps:
            ahead = loss({name: values[name] + step * direction})
            behind = loss({name: values[name] - step * direction})
            differences.append((ahead - behind) / (2 * step))
        errors = [
            abs(slope - difference) / max(1.0, abs(difference), scale) for difference in differences
        ]
        assert min(errors) <= rtol, (name, slope, differences)
