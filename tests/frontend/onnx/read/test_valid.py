"""Models that are no valid files of ONNX: errors that name the tensor, the value or the node."""

from __future__ import annotations

import os

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

from onnx import TensorProto  # noqa: E402
from onnx import helper as H  # noqa: E402

from relax_grad.frontend.onnx import from_model  # noqa: E402

N = H.make_node


def value(name, shape=(2, 4)):
    return H.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def model(nodes, outputs=("y",), tensors=(), inputs=("x",), opset=17, **options):
    graph = H.make_graph(
        nodes, "g", [value(i) for i in inputs], [value(o) for o in outputs], list(tensors)
    )
    opsets = [H.make_opsetid("", opset), H.make_opsetid("local", 1)]
    return H.make_model(graph, opset_imports=opsets, ir_version=8, **options)


def tensor(**fields):
    fields = {"name": "w", "data_type": 1, "dims": [4], "raw_data": bytes(16), **fields}
    return TensorProto(**fields)


def with_tensor(**fields):
    return model([N("Add", ["x", "w"], ["y"])], tensors=[tensor(**fields)])


def chain(count, nodes):
    """Return local functions of which each calls the next one twice."""
    functions = []
    for i in range(count):
        inner = f"f{i + 1}" if i < count - 1 else "last"
        calls = [N(inner, ["a"], ["b"], domain="local"), N(inner, ["b"], ["c"], domain="local")]
        functions.append(H.make_function("local", f"f{i}", ["a"], ["c"], calls, [], []))
    opsets = [H.make_opsetid("", 17)]
    functions.append(H.make_function("local", "last", ["a"], ["c"], nodes, opsets, []))
    for function in functions[:-1]:
        function.opset_import.append(H.make_opsetid("local", 1))
    return model([N("f0", ["x"], ["y"], domain="local")], functions=functions)


RELU = [N("Relu", ["x"], ["y"])]

CASES = {
    "a cycle": (
        model([N("Add", ["x", "b"], ["a"]), N("Relu", ["a"], ["b"]), N("Relu", ["b"], ["y"])]),
        "results in a cycle, among 'a', 'b'",
    ),
    "another order": (
        model([N("Relu", ["a"], ["y"]), N("Neg", ["x"], ["a"])]),
        "Relu 'y' reads 'a', which the later node Neg 'a' makes; sort the nodes",
    ),
    "an unknown value": (
        model([N("Add", ["x", "nope"], ["y"])]),
        "the node Add 'y' reads 'nope', which is no input",
    ),
    "an unknown output": (model(RELU, ("z",)), "no node makes the output 'z'"),
    "a value of two nodes": (
        model([*RELU, N("Neg", ["x"], ["y"])]),
        "'y' is made twice, by the node Relu 'y' and by the node Neg 'y'",
    ),
    "two initializers": (
        model([N("Add", ["x", "w"], ["y"])], tensors=[tensor(), tensor()]),
        "'w' is made twice, by an initializer",
    ),
    "an initializer of a node": (
        model([N("Relu", ["x"], ["w"]), N("Neg", ["w"], ["y"])], tensors=[tensor()]),
        "'w' is made twice, by an initializer and by the node Relu",
    ),
    "an element type": (with_tensor(data_type=99), "the tensor w has the element type 99"),
    "no element type": (with_tensor(data_type=0), "the tensor w has the element type 0"),
    "negative extents": (with_tensor(dims=[-1]), r"tensor w has the shape \(-1,\) with a negative"),
    "too few bytes": (with_tensor(dims=[5]), r"the tensor w has no values of the shape \(5,\)"),
    "version 0": (model(RELU, opset=0), "has version 0 of ONNX's operators, but onnx"),
    "version 99": (model(RELU, opset=99), "has version 99 of ONNX's operators, but onnx"),
    "functions in a cycle": (
        chain(2, [N("f0", ["a"], ["c"], domain="local")]),
        "functions of the model call each other in a cycle: f0, f1, last",
    ),
    "functions that double": (
        chain(24, [N("Relu", ["a"], ["c"])]),
        "has 16777216 nodes if its local functions .* at most 100000 .*the function f0 has",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_models_are_refused(name):
    given, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        from_model(given)


def test_functions_of_a_few_calls_are_written_out():
    given = chain(3, [N("Relu", ["a"], ["c"])])
    assert list(from_model(given).outputs) == ["y"]


def external(path, entries, dims=(4,)):
    """Write a model with a tensor in a file."""
    kept = TensorProto(name="w", data_type=1, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, text in entries.items():
        kept.external_data.add(key=key, value=text)
    path.write_bytes(model([N("Add", ["x", "w"], ["y"])], tensors=[kept]).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "the tensor w has external data without a location; it has the entries none"),
        ({"location": "relax_grad:0"}, "tensor w has external data in the file 'relax_grad:0'"),
        ({"location": "a", "offset": "abc"}, "the offset of the .* tensor w must be a number"),
        ({"location": "a", "offset": "-4"}, "the offset of the .* tensor w must be a number"),
        ({"location": "a", "length": "1e3"}, "the length of the .* tensor w must be a number"),
        ({"location": "a", "offset": "64"}, "the tensor w has the bytes 64 to 64 of"),
        (
            {"location": "a", "length": "8"},
            r"tensor w has the shape \(4,\) of float32, but 8 bytes",
        ),
        ({"location": "../a"}, "the tensor w has external data in '../a', outside of the folder"),
    ],
)
def test_entries_of_external_data_are_checked(tmp_path, entries, message):
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "a").write_bytes(bytes(16))
    with pytest.raises(ValueError, match=message):
        from_model(external(folder / "model.onnx", entries))


@pytest.mark.parametrize("count", [4, 1 << 15])
def test_links_to_external_data(tmp_path, count):
    """Links of the cache of Hugging Face, and hard links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0f3a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    values = np.arange(count, dtype="float32")
    (blobs / "22").write_bytes(values.tobytes())
    external(blobs / "11", {"location": "model.onnx_data"}, (count // 4, 4))
    os.symlink("../../blobs/11", snapshot / "model.onnx")
    os.symlink("../../blobs/22", snapshot / "model.onnx_data")
    shapes = {"x": (count // 4, 4)}
    found = from_model(snapshot / "model.onnx", shapes=shapes).params["w"].numpy()
    np.testing.assert_array_equal(found.ravel(), values)
    os.link(blobs / "22", blobs / "model.onnx_data")
    found = from_model(blobs / "11", shapes=shapes).params["w"].numpy()
    np.testing.assert_array_equal(found.ravel(), values)
    # A link that leaves both folders.
    (tmp_path / "other").write_bytes(values.tobytes())
    os.remove(snapshot / "model.onnx_data")
    os.symlink("../../other", snapshot / "model.onnx_data")
    with pytest.raises(ValueError, match="outside of the folder of the model"):
        from_model(snapshot / "model.onnx", shapes=shapes)
