"""Files with the state of training: safetensors, with the rest as JSON in the metadata."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tvm

#: The versions that the package is tested with; setup.py has them as well.
SAFETENSORS_REQUIREMENT = "safetensors>=0.5,<0.9"

#: The name of the format, which is the key of the metadata too, and its version. runtime/trainer.cc has them as well.
FORMAT, VERSION = "relax_grad.training", 1

#: The groups of tensors.
GROUPS = ("params", "frozen", "states", "optimizer_state")

_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def write(path: str | os.PathLike, tensors: Mapping[str, tvm.runtime.Tensor], more: dict) -> None:
    """Write tensors and a JSON object to a file.

    The file is complete or absent: it is written under another name, and renamed when the disk has all of it.
    """
    _safetensors()
    from safetensors.numpy import save

    text = json.dumps({"version": VERSION, **more})
    data = save({name: np.asarray(each.numpy()) for name, each in tensors.items()}, {FORMAT: text})
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict]:
    """Read a file that :func:`write` wrote.

    Raises
    ------
    ValueError
        If the file is damaged, or is of another kind or version.
    """
    safetensors = _safetensors()
    data = Path(path).read_bytes()
    try:
        found = dict(safetensors.deserialize(data))
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        text = header.get("__metadata__", {}).get(FORMAT)
        more = None if text is None else json.loads(text)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no file of safetensors: {error}") from error
    if not isinstance(more, dict):
        raise ValueError(f"{path} has no state of training; Trainer.save writes such files")
    if more.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {more.get('version')} of the format, but this relax_grad reads version {VERSION}"
        )
    tensors = {}
    for name, each in found.items():
        dtype = _DTYPES.get(each["dtype"])
        if dtype is None:
            raise ValueError(
                f"{path}: {name} has the dtype {each['dtype']}, which is not supported"
            )
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        tensors[name] = np.frombuffer(each["data"], dtype).reshape(each["shape"]).copy()
    return tensors, more


def _safetensors():
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "files with the state of training need safetensors; install it with: "
            f"pip install '{SAFETENSORS_REQUIREMENT}'"
        ) from error
    return safetensors


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
