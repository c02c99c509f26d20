"""Buffers that a call assigns, which torch.export leaves as they were."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from .._tensors import described
from .state import is_cache

_SYMBOLIC_STATE = (
    ", and symbolic extents are none; leave this axis out of dynamic_shapes, or return the tensor"
)


@contextlib.contextmanager
def assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Write the tensors that a call assigns to buffers into these buffers.

    All tensors are read before the first write: a call may exchange buffers.

    Raises
    ------
    ValueError
        If a buffer gets a tensor of another shape or dtype, begins as None, or shares the memory of
        a parameter or of a buffer that is written in place: the graph has no shared memory.
    """
    # The modules of a trace are proxies, two of a module that is registered twice.
    owners = {id(submodule._buffers): submodule for submodule in module.modules()}
    before = [(submodule, dict(submodule._buffers)) for submodule in owners.values()]
    olds = [old for _, buffers in before for old in buffers.values() if old is not None]
    versions = {id(old): old._version for old in olds}
    yield
    names = Counter(map(id, olds))
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
    for submodule, buffers in before:
        for name, new in list(submodule._buffers.items()):
            old = buffers.get(name)
            if new is old:
                continue
            if old is None:
                _forget(submodule, name, new, name in buffers)
                continue
            _check_type(submodule, name, old, new)
            if names[id(old)] > 1:
                raise ValueError(
                    f"the buffer {name} of {type(submodule).__name__} is a buffer of another name, "
                    "too, and a call assigns only one of them; write to it in place: "
                    f"self.{name}.copy_(...)"
                )
            assigned.append((submodule, name, old, new))
    written = [old for old in olds if old._version != versions[id(old)]]
    _check_memory(module, assigned, written)
    # A copy of one tensor may be the operand of the next.
    values = [new.clone() if len(assigned) > 1 else new for *_, new in assigned]
    for (submodule, name, old, _), value in zip(assigned, values, strict=True):
        with torch.no_grad():
            old.copy_(value)
        submodule._buffers[name] = old


def _forget(module: nn.Module, name: str, new: torch.Tensor, is_known: bool) -> None:
    """Remove a cache, which each call computes again; refuse other tensors instead of None."""
    if not is_cache(new):
        raise ValueError(
            f"the buffer {name} of {type(module).__name__} is None, and a call gives it "
            f"{described(new)}; register it with its first value: "
            f"register_buffer({name!r}, torch.zeros({tuple(new.shape)}))"
        )
    if is_known:
        module._buffers[name] = None
    else:
        del module._buffers[name]


def _check_type(module: nn.Module, name: str, old: torch.Tensor, new: torch.Tensor | None) -> None:
    # The comparison with a symbolic extent would make it a number.
    is_symbolic = new is not None and not all(isinstance(n, int) for n in new.shape)
    if new is None or is_symbolic or new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(
            f"the buffer {name} of {type(module).__name__} gets {described(new)} instead of "
            f"{described(old)}; a buffer must keep its shape and dtype"
            + _SYMBOLIC_STATE
            * is_symbolic
        )
    if any(not step and n > 1 for step, n in zip(old.stride(), old.shape, strict=True)):
        raise ValueError(
            f"the elements of the buffer {name} of {type(module).__name__} share memory, and a "
            "call gives it another tensor; register tensor.contiguous()"
        )


def _check_memory(module: nn.Module, assigned: list, written: list[torch.Tensor]) -> None:
    """Refuse buffers that share memory after the call, if a later write changes both."""
    params = {_memory(param): key for key, param in module.named_parameters()}
    owners: dict[int, str] = {}
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is None:
                continue
            place, text = _memory(buffer), f"{name} of {type(submodule).__name__}"
            is_new = any(buffer is new for *_, new in assigned)
            if is_new and place in params:
                raise ValueError(
                    f"a call gives the buffer {text} the memory of the parameter "
                    f"{params[place].removeprefix('module.')}, so that each step would change it "
                    "too; assign parameter.detach().clone()"
                )
            other = owners.setdefault(place, text)
            if is_new and other != text and any(_memory(old) == place for old in written):
                raise ValueError(
                    f"the buffers {other} and {text} share memory after a call, which writes to it "
                    "in place; assign a clone()"
                )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
