"""Tensors of modules: tied ones, trainable ones, copies, and files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
import tvm
from torch import nn

from ..._packages import load
from ..._validation import check_not_of_torch, matching
from ..._validation import described as described_value
from .._arguments import Trainable


def described(value: object) -> str:
    """Return a value as text for a message: tensors by shape and dtype, modules by class, others
    cut to a line."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__name__}"
    if isinstance(value, (list, tuple)) and value:
        return f"a {type(value).__name__} with {described(value[0])}"
    if isinstance(value, Mapping) and value:
        key, first = next(iter(value.items()))
        return f"a {type(value).__name__} with {key!r}: {described(first)}"
    if hasattr(value, "shape"):  # an array of another library
        return described_value(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module from which ``torch.compile`` made a module, or the module itself."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        return module._orig_mod
    return module


def copied(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """Return a copy of a tensor that shares no memory with it."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    return tvm.runtime.from_dlpack(fresh.copy_(tensor))


def merged(
    params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return every tensor once, by its first key, and the other keys with the first one.

    Raises
    ------
    ValueError
        If two parameters are different tensors in the same memory, or a tensor is sparse or on the
        device meta.
    """
    values: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, tensor in [*params.items(), *buffers.items()]:
        if tensor.is_meta:
            raise ValueError(
                f"{key} is on the device meta, and has no values; load them, or move the module "
                'by .to_empty(device="cpu")'
            )
        if tensor.layout is not torch.strided:
            kind = "parameter" if key in params else "buffer"
            owner, _, name = f"module.{key}".rpartition(".")
            raise ValueError(
                f"the {kind} {key} has the layout {tensor.layout}, and the import takes dense "
                f"tensors; register {owner}.{name}.to_dense() instead"
            )
        if id(tensor) in first:
            aliases[key] = first[id(tensor)]
            continue
        first[id(tensor)] = key
        values[key] = tensor
    for key, other in shared_memory({key: values[key] for key in params if key in values}):
        raise ValueError(
            f"the parameters {key} and {other} are different tensors in the same memory; tie them "
            "by assigning one parameter to both modules"
        )
    return values, aliases


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of keys of tensors whose memory overlaps."""
    pairs = []
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for key, tensor in tensors.items():
        if not tensor.numel():
            continue
        start = tensor.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (reach + 1) * tensor.element_size()
        others = spans.setdefault(tensor.untyped_storage().data_ptr(), [])
        pairs += [(other, key) for low, high, other in others if low < end and start < high]
        others.append((start, end, key))
    return pairs


def check_memory(values: Mapping[str, torch.Tensor], changed: Collection[str]) -> None:
    """Refuse buffers in the memory of a tensor that a step changes, as they would not follow it.

    Raises
    ------
    ValueError
        If there is such a buffer.
    """
    for pair in shared_memory(values):
        for key, other in (pair, pair[::-1]):
            if key in changed:
                raise ValueError(
                    f"{other} has the memory of {key}, which changes in training, and would keep "
                    f"its first values; register {other} as a clone(), or compute it from {key} in "
                    "forward"
                )


def chosen(
    trainable: Trainable | None,
    values: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> list[str]:
    """Return the keys of the parameters to train, in the order of the module."""
    known = [key for key, tensor in values.items() if isinstance(tensor, nn.Parameter)]
    if trainable is None:
        return [key for key in known if values[key].requires_grad]
    floats = [key for key in known if values[key].is_floating_point()]
    if callable(trainable):
        return [key for key in floats if trainable(key)]
    every = [*floats, *(key for key, first in aliases.items() if first in floats)]
    chosen_keys: set[str] = set()
    for pattern in [trainable] if isinstance(trainable, str) else trainable:
        keys = matching("trainable", pattern, every, "parameter")
        chosen_keys.update(aliases.get(key, key) for key in keys)
    return [key for key in floats if key in chosen_keys]


def write_to(module: nn.Module, key: str, value: torch.Tensor, tensors: Mapping) -> None:
    """Copy a value to a parameter or a buffer of a module."""
    if key not in tensors:
        raise ValueError(f"{type(module).__name__} has no parameter or buffer {key!r}")
    target = tensors[key]
    if target.shape != value.shape or target.dtype != value.dtype:
        raise ValueError(
            f"{key} has shape {tuple(target.shape)} and dtype {target.dtype} in the module, but "
            f"the value has {tuple(value.shape)} and {value.dtype}"
        )
    with torch.no_grad():
        target.copy_(value)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by their keys."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but it is {described(module)}; write "
            "imported.copy_to(model, trainer.params)"
        )
    module = uncompiled(module)
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def as_torch(value: Any) -> torch.Tensor:
    """Return a tensor of TVM, NumPy or another library as one of PyTorch, without a copy where
    possible."""
    return value.detach() if isinstance(value, torch.Tensor) else torch.from_dlpack(value)


def _safetensors(user: str) -> ModuleType:
    load("safetensors", user)
    import safetensors.torch

    return safetensors.torch


def write_file(path: str | os.PathLike, values: Mapping[str, object]) -> None:
    """Write tensors to a file of safetensors."""
    tensors = {key: as_torch(value).contiguous() for key, value in values.items()}
    _safetensors("save").save_file(tensors, path)


def read_file(path: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Read the tensors of a file of safetensors."""
    with open(path, "rb") as file:
        check_not_of_torch(path, file.read(4))
    return _safetensors("load").load_file(path)
