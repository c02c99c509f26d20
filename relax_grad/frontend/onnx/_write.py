"""The file of a model with other values of its tensors."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnx.inliner
import tvm
from onnx import numpy_helper

from ...ir.arrays import as_array
from ...training import Trainer
from .graph.inference import set_inference
from .read.load import constants_of, is_external, location_of, read, tensor_of
from .read.nodes import every_graph, every_node

#: Files of more bytes have their large tensors in a second file: protobuf has no messages of 2 GB.
MOST_BYTES = 2_000_000_000

#: Tensors of fewer bytes stay in the model, as with ONNX's own writer.
_SMALL = 1024

#: The alignment of tensors in the second file, and the bytes that are copied at once.
_ALIGNMENT, _CHUNK = 64, 1 << 24


def write(
    source: object,
    path: str | os.PathLike,
    values: Mapping[str, np.ndarray],
    places: Mapping[str, str],
    inference: bool,
) -> None:
    """Write the file of a model with other values.

    Parameters
    ----------
    source : str or os.PathLike or bytes or onnx.ModelProto
        The model.
    path : str or os.PathLike
        The new file.
    values : Mapping[str, np.ndarray]
        The values by the names of the import.
    places : Mapping[str, str]
        The places of the tensors in the model.
    inference : bool
        Whether normalisation and dropout are set to inference.
    """
    model, origin = read(source)
    path = Path(path)
    wanted = {places[name]: (name, value) for name, value in values.items()}
    is_outer = {f":{tensor.name}" for tensor in model.graph.initializer}
    # Places count in the model without local functions, which is written only where it is
    # needed.
    if model.functions and (inference or not wanted.keys() <= is_outer):
        model = onnx.inliner.inline_local_functions(model)
    was_external = any(is_external(tensor) for tensor in _tensors(model))
    for place, holder in constants_of(model.graph):
        if place in wanted:
            _set(holder, *wanted.pop(place))
    if wanted:
        name = next(iter(wanted.values()))[0]
        raise ValueError(
            f"the model that was imported has changed: it has no tensor {name} any more"
        )
    if inference:
        set_inference(model)
    size = sum(math.prod(tensor.dims) * _itemsize(tensor) for tensor in _tensors(model))
    if not was_external and size < MOST_BYTES:
        with _replacing(path) as file:
            file.write(model.SerializeToString())
        return
    data = path.with_name(path.name + ".data")
    with _replacing(data) as file:
        for tensor in _tensors(model):
            _move(tensor, origin, data.name, file)
    with _replacing(path) as file:
        file.write(model.SerializeToString())


def given_values(values: object, ema: object) -> dict[str, object]:
    """Return the values to write by their names; the arguments are as for
    :meth:`Imported.write_to`."""
    if not isinstance(values, (Trainer, Mapping)):
        raise TypeError(
            "values must be a Trainer or a mapping from names to values, such as "
            f"trainer.values, but it is {type(values).__name__}"
        )
    if not isinstance(ema, (bool, Mapping)):
        raise TypeError(f"ema must be True, False or a mapping from names to values, not {ema!r}")
    written: dict[str, object] = (
        {**values.params, **values.states} if isinstance(values, Trainer) else dict(values)
    )
    if ema is False:
        return written
    slots: Mapping[str, object]
    if isinstance(ema, Mapping):
        slots = ema
    elif isinstance(values, Trainer):
        slots = values.optimizer_state
    else:
        raise ValueError(
            "ema=True needs a Trainer as values; give the averages of other values as a "
            "mapping: ema={...}"
        )
    start = "ema/"
    averages = {
        name.removeprefix(start): average
        for name, average in slots.items()
        if name.startswith(start) or name in written
    }
    if not averages:
        raise ValueError(
            "ema: there are no moving averages; train_step(..., ema=decay) makes a step that "
            "has them"
        )
    return {**written, **averages}


def array_of(
    name: str, value: object, old: tvm.runtime.Tensor | None, places: Iterable[str]
) -> np.ndarray:
    """Return a value with the dtype of the tensor that it replaces."""
    if old is None:
        shown = ", ".join(list(places)[:5])
        advice = (
            "; merge the adapters first: lora.merged(trainer.params)" if ".lora_" in name else ""
        )
        raise ValueError(f"values: the import has no tensor {name!r}; it has {shown}, ...{advice}")
    if not hasattr(value, "shape"):
        raise TypeError(f"values: {name} must be an array or a tensor, but it is {value!r}")
    array = as_array(value)
    shape = tuple(map(int, old.shape))
    if tuple(array.shape) != shape:
        raise ValueError(
            f"values: {name} must have the shape {shape}, but it has {tuple(array.shape)}"
        )
    return array.astype(old.numpy().dtype, copy=False)


def _itemsize(tensor: onnx.TensorProto) -> int:
    is_text = tensor.data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED)
    return 0 if is_text else onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _move(tensor: onnx.TensorProto, origin: Path | None, name: str, file: BinaryIO) -> None:
    """Move the values of a large tensor to a file of this name."""
    if is_external(tensor):
        source, offset, left = location_of(tensor, origin)
        with source.open("rb") as old:
            old.seek(offset)
            start = _aligned(file)
            for at in range(0, left, _CHUNK):
                file.write(old.read(min(_CHUNK, left - at)))
        length = left
    else:
        if math.prod(tensor.dims) * _itemsize(tensor) < _SMALL:
            return
        if not tensor.HasField("raw_data"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
        start, length = _aligned(file), len(tensor.raw_data)
        file.write(tensor.raw_data)
        tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", name), ("offset", start), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def _aligned(file: BinaryIO) -> int:
    """Fill a file up to the next position for a tensor; return it."""
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    return file.tell()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another one when it is complete."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a model: initializers and those in attributes, also of local
    functions."""
    for graph in every_graph(model.graph):
        yield from graph.initializer
    nodes = [
        *every_node(model.graph),
        *(node for function in model.functions for node in function.node),
    ]
    for node in nodes:
        for attr in node.attribute:
            if attr.HasField("t"):
                yield attr.t
            yield from attr.tensors


def _set(holder: onnx.TensorProto | onnx.NodeProto, name: str, value: np.ndarray) -> None:
    """Give an initializer or a ``Constant`` node another value."""
    old = tensor_of(holder)
    if old is None:
        made = onnx.helper.make_attribute("value", numpy_helper.from_array(value, name))
        del holder.attribute[:]
        holder.attribute.append(made)
        return
    if tuple(old.dims) != value.shape:
        raise ValueError(
            f"the model that was imported has changed: {name} has the shape {tuple(old.dims)} "
            f"there, and its value {value.shape}"
        )
    new = onnx.TensorProto(
        name=old.name, data_type=old.data_type, dims=old.dims, doc_string=old.doc_string
    )
    new.raw_data = np.ascontiguousarray(value).tobytes()
    old.CopyFrom(new)
