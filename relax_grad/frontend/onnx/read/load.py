"""Models in files and in memory, and the values of their large tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from ...._validation import check_not_folder, described, is_of_torch
from .nodes import STANDARD, subgraphs
from .valid import check_functions, check_graph, check_versions

#: The values of large tensors by the keys that stand in them. Those of files are mapped, and not
#: read.
Arrays = Mapping[str, np.ndarray]

#: Tensors of more bytes are kept outside of the model: ONNX copies a model for each inference of
#: shapes, and not beyond 2 GB.
_LARGE = 1 << 16

#: The start of keys that stand for the name of a file.
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
    """Return a copy of a model, without its external data, and the path of the file."""
    path = None
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        check_not_folder(path, "model.onnx")
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(4)
            if is_of_torch(start):
                raise ValueError(
                    f"{path} must be an ONNX file, but it is one of torch.save; load it into its "
                    "model, and write relax_grad.frontend.torch.from_module(model, (x,))"
                )
        try:
            loaded = onnx.load(os.fspath(model), load_external_data=False)
        except DecodeError as error:
            raise ValueError(
                f"model is no ONNX model: {os.fspath(model)} holds other data: {error}; give a "
                "file that torch.onnx.export or onnx.save writes"
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
            "model must be a path, bytes or an onnx.ModelProto, but it is "
            f"{described(model)}{_remedy(model)}"
        )
    if not loaded.graph.output:
        name = "model" if path is None else str(path)
        raise ValueError(
            f"{name} is no ONNX model with outputs; give a file that onnx.load reads, as "
            "torch.onnx.export writes"
        )
    return loaded, path


def _remedy(model: object) -> str:
    """Return the remedy for a model of another library."""
    if hasattr(model, "named_parameters"):  # a module of PyTorch
        return "; write relax_grad.frontend.torch.from_module(model, (x,))"
    if hasattr(model, "get_inputs"):  # a session of ONNX Runtime
        return "; give the path of the session's file"
    return ""


def load(
    model: str | os.PathLike | bytes | onnx.ModelProto,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a copy of a model without local functions, and the values of its large tensors.

    The documentation of each initializer and of each ``Constant`` node is its place, see
    :func:`constants_of`.
    """
    loaded, path = read(model)
    check_versions(loaded)
    check_functions(loaded)
    _refuse_keys(loaded)
    arrays: dict[str, np.ndarray] = {}
    _take_out(loaded.graph, path, arrays)
    if loaded.functions:
        loaded = onnx.inliner.inline_local_functions(loaded)
        _take_out(loaded.graph, path, arrays)
    check_graph(loaded.graph)
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
    instead."""
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


def _refuse_keys(model: onnx.ModelProto) -> None:
    """Refuse the names of files that stand for values in memory here."""
    graphs = [model.graph, *(onnx.GraphProto(node=f.node) for f in model.functions)]
    for graph in graphs:
        for _, holder in constants_of(graph):
            tensor = tensor_of(holder)
            if tensor is not None and is_external(tensor):
                for entry in tensor.external_data:
                    if entry.key == "location" and entry.value.startswith(_KEY):
                        raise ValueError(
                            f"the tensor {tensor.name} has external data in the file "
                            f"{entry.value!r}; rename the file: no name may begin with {_KEY!r}"
                        )


def _number(tensor: onnx.TensorProto, entries: dict[str, str], key: str, default: int) -> int:
    """Return an entry of external data as a number that is not negative."""
    text = entries.get(key, str(default))
    if not text.isascii() or not text.isdigit():
        raise ValueError(
            f"the {key} of the external data of the tensor {tensor.name} must be a number of "
            f"bytes, but it is {text[:40]!r}"
        )
    return int(text)


def location_of(tensor: onnx.TensorProto, model: Path | None) -> tuple[Path, int, int]:
    """Return the file of a tensor's external data, the offset and the number of bytes.

    The file is in the folder of the model, or of the file that the model is a link to: the cache of
    Hugging Face has links to both.

    Parameters
    ----------
    tensor : onnx.TensorProto
        The tensor.
    model : Path or None
        The file of the model; None if it was given by its contents.

    Raises
    ------
    ValueError
        If the folder is unknown, the file is outside of it or too short, or an entry is no number.
    FileNotFoundError
        If there is no such file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    name = entries.get("location", "")
    if not name:
        raise ValueError(
            f"the tensor {tensor.name} has external data without a location; it has the entries "
            f"{', '.join(entries) or 'none'}"
        )
    if model is None:
        raise ValueError(
            f"the values of the tensor {tensor.name} are not loaded: they are external data in "
            f"the file {name!r}. Give the path of the model instead of its contents, or "
            "load it by onnx.load(path) with load_external_data=True"
        )
    path = model.parent / name
    folders = {model.parent.resolve(), model.resolve().parent}
    if not any(map(path.resolve().is_relative_to, folders)):
        raise ValueError(
            f"the tensor {tensor.name} has external data in {name!r}, outside of the folder of "
            "the model"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"the values of the tensor {tensor.name} are external data in the file {path}, which "
            "does not exist; copy it beside the model"
        )
    offset, size = _number(tensor, entries, "offset", 0), path.stat().st_size
    length = _number(tensor, entries, "length", max(size - offset, 0))
    if offset + length > size:
        raise ValueError(
            f"the tensor {tensor.name} has the bytes {offset} to {offset + length} of {path}, "
            f"which has {size} bytes"
        )
    return path, offset, length


def _check_type(tensor: onnx.TensorProto) -> None:
    """Refuse element types and extents that are none."""
    if tensor.data_type not in _PROTO.DataType.values() or not tensor.data_type:
        raise ValueError(
            f"the tensor {tensor.name} has the element type {tensor.data_type}, which is none of "
            f"onnx {onnx.__version__}"
        )
    if any(extent < 0 for extent in tensor.dims):
        raise ValueError(
            f"the tensor {tensor.name} has the shape {tuple(tensor.dims)} with a negative extent"
        )


def _value(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the values of a tensor, or raise an error that names it."""
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:  # onnx raises several kinds
        kind = _PROTO.DataType.Name(tensor.data_type)
        raise ValueError(
            f"the tensor {tensor.name} has no values of the shape {tuple(tensor.dims)} of {kind}: "
            f"{error}"
        ) from error


def _take_out(graph: onnx.GraphProto, path: Path | None, arrays: dict[str, np.ndarray]) -> None:
    """Move the values of large tensors to ``arrays``, and read the values of small ones."""
    for _, holder in constants_of(graph):
        tensor = tensor_of(holder)
        if tensor is None or any(e.value.startswith(_KEY) for e in tensor.external_data):
            continue
        name = tensor.name or (holder.output[0] if isinstance(holder, onnx.NodeProto) else "")
        tensor.name = name
        _check_type(tensor)
        is_plain = tensor.data_type in _PLAIN
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) if is_plain else None
        size = 0 if dtype is None else math.prod(tensor.dims) * dtype.itemsize
        if is_external(tensor):
            source, offset, length = location_of(tensor, path)
            shape = tuple(tensor.dims)
            if dtype is not None and length != size:
                raise ValueError(
                    f"the tensor {name} has the shape {shape} of {dtype}, but {length} bytes of "
                    "external data"
                )
            if dtype is None or size <= _LARGE:
                with source.open("rb") as file:
                    file.seek(offset)
                    tensor.raw_data = file.read(length)
                tensor.data_location = _PROTO.DEFAULT
                del tensor.external_data[:]
                _value(tensor)
                continue
            value: np.ndarray = np.memmap(source, dtype, "r", offset, shape)
        else:
            value = _value(tensor)
            if size <= _LARGE:
                continue
        key = f"{_KEY}{len(arrays)}"
        arrays[key] = value
        kept = onnx.TensorProto(
            name=name, data_type=tensor.data_type, dims=tensor.dims, data_location=_PROTO.EXTERNAL
        )
        kept.external_data.add(key="location", value=key)
        tensor.CopyFrom(kept)
