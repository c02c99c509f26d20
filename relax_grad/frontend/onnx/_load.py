"""Models in files and in memory, and the values of their large tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.external_data_helper
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from ._graph import STANDARD, subgraphs

#: The values of large tensors by the keys that stand in them. Those of files are mapped, and not
#: read.
Arrays = Mapping[str, np.ndarray]

#: Tensors of more bytes are kept outside of the model: ONNX copies a model for each inference of
#: shapes, and not beyond 2 GB.
_LARGE = 1 << 16

#: The start of keys, in the place of the name of a file.
_KEY = "relax_grad:"

_PROTO = onnx.TensorProto

#: The element types that NumPy has too.
_PLAIN = {
    _PROTO.BOOL,
    _PROTO.DOUBLE,
    _PROTO.FLOAT,
    _PROTO.FLOAT16,
    _PROTO.INT8,
    _PROTO.INT32,
    _PROTO.INT64,
    _PROTO.UINT8,
}


def read(model: str | os.PathLike | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Return a copy of a model, without its external data, and the folder of the file."""
    folder = None
    if isinstance(model, (str, os.PathLike)):
        folder = Path(model).parent
        try:
            loaded = onnx.load(os.fspath(model), load_external_data=False)
        except DecodeError as error:
            raise ValueError(
                f"model is no ONNX model: {os.fspath(model)} holds other data: {error}"
            ) from error
    elif isinstance(model, (bytes, bytearray, memoryview)):
        try:
            loaded = onnx.load_model_from_string(bytes(model))
        except DecodeError as error:
            raise ValueError(f"model is no ONNX model: {error}") from error
    elif isinstance(model, onnx.ModelProto):
        loaded = onnx.ModelProto()
        loaded.CopyFrom(model)
    else:
        raise TypeError(
            f"model must be a path, bytes or an onnx.ModelProto, but it is {type(model).__name__}"
        )
    if not loaded.graph.output:
        raise ValueError("model is no ONNX model with outputs; give a file that onnx.load reads")
    return loaded, folder


def load(
    model: str | os.PathLike | bytes | onnx.ModelProto,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a copy of a model without local functions, and the values of its large tensors.

    The documentation of each initializer and of each ``Constant`` node is its place, see
    :func:`constants_of`.
    """
    loaded, folder = read(model)
    arrays: dict[str, np.ndarray] = {}
    _take_out(loaded.graph, folder, arrays)
    if loaded.functions:
        loaded = onnx.inliner.inline_local_functions(loaded)
        _take_out(loaded.graph, folder, arrays)
    for place, holder in constants_of(loaded.graph):
        holder.doc_string = place
    return loaded, arrays


def constants_of(
    graph: onnx.GraphProto, place: str = ""
) -> Iterator[tuple[str, onnx.TensorProto | onnx.NodeProto]]:
    """Yield the initializers and the ``Constant`` nodes of a graph and of the graphs within, with
    their places.

    A place is a name behind the numbers of the nodes and of the graphs that hold it, such as
    ``3.0/:w``.
    """
    for tensor in graph.initializer:
        yield f"{place}:{tensor.name}", tensor
    for i, node in enumerate(graph.node):
        if node.op_type == "Constant" and node.domain in STANDARD:
            yield f"{place}:{node.output[0]}", node
        for j, inner in enumerate(subgraphs(node)):
            yield from constants_of(inner, f"{place}{i}.{j}/")


def tensor_of(holder: onnx.TensorProto | onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of an initializer or of a ``Constant`` node; None if the node has numbers
    in the place of one."""
    if isinstance(holder, onnx.TensorProto):
        return holder
    return next((attr.t for attr in holder.attribute if attr.name == "value"), None)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Tell whether the values of a tensor are outside of the model."""
    return tensor.HasField("data_location") and tensor.data_location == _PROTO.EXTERNAL


def value_of(tensor: onnx.TensorProto, arrays: Arrays) -> np.ndarray:
    """Return the values of a tensor."""
    if is_external(tensor):
        return np.asarray(arrays[tensor.external_data[0].value])
    return numpy_helper.to_array(tensor)


def put_back(graph: onnx.GraphProto, arrays: Arrays) -> None:
    """Put the values of the initializers of a graph into the model."""
    for tensor in graph.initializer:
        if is_external(tensor):
            tensor.CopyFrom(numpy_helper.from_array(value_of(tensor, arrays), tensor.name))


def location_of(tensor: onnx.TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Return the file of a tensor's external data, the offset and the number of bytes.

    Raises
    ------
    ValueError
        If the folder is unknown, or the file is outside of it or too short.
    FileNotFoundError
        If there is no such file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = entries.get("location", "")
    if folder is None:
        raise ValueError(
            f"the values of the tensor {tensor.name} are not loaded: they are external data in "
            f"the file {name!r}. Give the path of the model in the place of its contents, or "
            "load it by onnx.load(path) with load_external_data=True"
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"the tensor {tensor.name} has external data in {name!r}, outside of the folder of "
            "the model"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"the values of the tensor {tensor.name} are external data in the file {path}, which "
            "does not exist; copy it beside the model"
        )
    offset, size = int(entries.get("offset", 0)), path.stat().st_size
    length = int(entries.get("length", size - offset))
    if offset + length > size:
        raise ValueError(
            f"the tensor {tensor.name} has the bytes {offset} to {offset + length} of {path}, "
            f"which has {size} bytes"
        )
    return path, offset, length


def _take_out(graph: onnx.GraphProto, folder: Path | None, arrays: dict[str, np.ndarray]) -> None:
    """Move the values of large tensors to ``arrays``, and read those of small ones."""
    for _, holder in constants_of(graph):
        tensor = tensor_of(holder)
        if tensor is None or (
            is_external(tensor) and tensor.external_data[0].value.startswith(_KEY)
        ):
            continue
        name = tensor.name or (holder.output[0] if isinstance(holder, onnx.NodeProto) else "")
        tensor.name = name
        is_plain = tensor.data_type in _PLAIN
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) if is_plain else None
        size = 0 if dtype is None else math.prod(tensor.dims) * dtype.itemsize
        if is_external(tensor):
            path, offset, length = location_of(tensor, folder)
            if dtype is None or size <= _LARGE:
                onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = _PROTO.DEFAULT
                del tensor.external_data[:]
                continue
            shape = tuple(tensor.dims)
            if length != size:
                raise ValueError(
                    f"the tensor {name} has the shape {shape} of {dtype}, but {length} bytes of "
                    "external data"
                )
            value: np.ndarray = np.memmap(path, dtype, "r", offset, shape)
        elif size > _LARGE:
            value = numpy_helper.to_array(tensor)
        else:
            continue
        key = f"{_KEY}{len(arrays)}"
        arrays[key] = value
        kept = onnx.TensorProto(
            name=name, data_type=tensor.data_type, dims=tensor.dims, data_location=_PROTO.EXTERNAL
        )
        kept.external_data.add(key="location", value=key)
        tensor.CopyFrom(kept)
