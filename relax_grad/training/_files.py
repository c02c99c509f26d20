"""Files with the state of training: safetensors, with the rest as JSON in the metadata."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from .._packages import load
from .._validation import check_not_folder, check_not_of_torch, check_path
from ._atomic import write_file

#: The name of the format, which is the key of the metadata too; the version that is written, and
#: those that are read, of which the first one has no checksums. runtime/manifest.h has them as
#: well.
FORMAT, VERSION, VERSIONS = "relax_grad.training", 2, (1, 2)

#: The key of the checksum, and its place in a header or a manifest: CRC-32, of the bytes of the
#: file with zeros instead of its digits. In JSON, quotation marks within texts follow a
#: backslash.
CHECKSUM, NO_CHECKSUM = "crc32", "00000000"
_PLACE = re.compile(rb'"crc32": ?"([0-9a-f]{8})"')

#: The largest header of the library safetensors, and the lists and objects of JSON
#: that may contain a value. The C++ library has both as well.
_MOST_HEADER, MOST_DEPTH = 100_000_000, 64

_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def write(path: str | os.PathLike, tensors: Mapping[str, tvm.runtime.Tensor], more: dict) -> None:
    """Write tensors and a JSON object to a file.

    The file is complete or as it was.

    Raises
    ------
    TypeError, ValueError
        If a value could not be read again, here or by the C++ library.
    """
    _safetensors()
    check_path(path)
    from safetensors.numpy import save

    _check_readable("the state", more, 0)
    text = json.dumps({"version": VERSION, **more})
    arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
    data = save(arrays, {FORMAT: text, CHECKSUM: NO_CHECKSUM})
    if _length(data) > _MOST_HEADER:
        raise ValueError(
            f"the names and values other than tensors take {_length(data)} bytes, more than the "
            f"{_MOST_HEADER} that a file of safetensors can have; save them in a separate file"
        )
    parts = with_checksum(data, 8 + _length_of_header(data))
    write_file(path, parts)


def _check_readable(place: str, value: object, depth: int) -> None:
    """Raise an error if a value would be another one after it is written as JSON and read, or
    could not be read."""
    if isinstance(value, str):
        check_text(place, value)
    elif isinstance(value, dict):
        names = [key if isinstance(key, str) else json.dumps(key) for key in value]
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise ValueError(
                    f"{place} has the key {name!r} twice: keys become text in a file, in which "
                    f"{name!r} and another key are the same"
                )
            seen.add(name)
            check_text(f"a key of {place}", name)
        for name, member in zip(names, value.values(), strict=True):
            _check_deeper(f"{place}[{name!r}]", member, depth)
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            _check_deeper(f"{place}[{i}]", member, depth)


def _check_deeper(place: str, value: object, depth: int) -> None:
    if depth == MOST_DEPTH:
        raise ValueError(f"{place[:100]}... is nested more than {MOST_DEPTH} deep in the file")
    _check_readable(place, value, depth + 1)


def check_text(place: str, text: str) -> None:
    """Raise an error if a text has no UTF-8: if it has half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} must be text that UTF-8 has, but it is {text!r}: {error.reason}"
        ) from None


def checksum_of(data: bytes) -> str:
    """Return the CRC-32 of bytes as eight hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def with_checksum(data: bytes, end: int) -> list[memoryview | bytes]:
    """Return the parts of a file with its checksum, in whose JSON, before ``end``, are zeros
    instead of it."""
    place = _PLACE.search(data, 0, end)
    assert place is not None, "the JSON has no place for the checksum"
    begin, end = place.span(1)
    view = memoryview(data)
    return [view[:begin], checksum_of(data).encode(), view[end:]]


def checksum_in(path: str | os.PathLike) -> str:
    """Return the checksum in a file that :func:`write` wrote."""
    with Path(path).open("rb") as file:
        start = file.read(8)
        place = _PLACE.search(file.read(_length(start)))
    assert place is not None, f"{path} has no checksum"
    return place[1].decode()


def _length(start: bytes) -> int:
    return int.from_bytes(start[:8], "little")


def _length_of_header(data: bytes) -> int:
    # Larger numbers are no places in bytes.
    return min(_length(data), len(data))


def _check(path: str | os.PathLike, data: bytes) -> bool:
    """Return whether a file of safetensors has a checksum; raise ValueError if it does not match
    the bytes."""
    place = _PLACE.search(data, 0, 8 + _length_of_header(data))
    if place is None:
        return False
    view, (begin, end) = memoryview(data), place.span(1)
    start = zlib.crc32(NO_CHECKSUM.encode(), zlib.crc32(view[:begin]))
    actual, written = f"{zlib.crc32(view[end:], start):08x}", data[begin:end].decode()
    if actual != written:
        raise ValueError(
            f"{path} is damaged: its checksum is {actual}, but it was written with {written}"
        )
    return True


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict]:
    """Read a file that :func:`write` wrote.

    Raises
    ------
    ValueError
        If the file is damaged, or is of another kind or version.
    """
    safetensors = _safetensors()
    check_path(path)
    check_not_folder(path, "state.safetensors")
    data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path} is damaged: it is empty; Trainer.save writes such files")
    check_not_of_torch(path, data[:4])
    has_checksum = _check(path, data)
    try:
        entries = dict(safetensors.deserialize(data))
        header = _object(data[8 : 8 + _length_of_header(data)])
        text = header.get("__metadata__", {}).get(FORMAT)
        more = None if text is None else _object(text)
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: its JSON is nested too deep") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or no file of safetensors, which Trainer.save writes: it begins "
            f"with {data[:8]!r} ({error})"
        ) from error
    if not isinstance(more, dict):
        raise ValueError(
            f"{path} has no state of training; Trainer.save writes such files. A file of weights "
            "goes to the import: imported = imported.load(path)"
        )
    version = more.get("version")
    if type(version) is not int or version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ValueError(
            f"{path} has version {version!r} of the format, but this relax_grad reads versions "
            f"{known}"
        )
    if version > VERSIONS[0] and not has_checksum:
        raise ValueError(f"{path} is damaged: it has no checksum")
    tensors = {}
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(
                f"{path}: {name} has the dtype {entry['dtype']}, which is not supported"
            )
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        if dtype == "bool" and np.any(np.frombuffer(entry["data"], "uint8") > 1):
            raise ValueError(f"{path} is damaged: {name} has booleans that are neither 0 nor 1")
        tensors[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"]).copy()
    return tensors, more


def _object(text: str | bytes) -> Any:
    """Return the value of a text of JSON; raise ValueError if a key stands twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError(f"one of the keys {', '.join(sorted(members))} stands twice")
        return members

    return json.loads(text, object_pairs_hook=unique)


def _safetensors() -> Any:
    return load("safetensors", "a file with the state of training")
