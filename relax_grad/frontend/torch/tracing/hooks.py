"""Hooks of modules: a hook that changes gradients is refused, and hooks of forward passes run once,
in the trace."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _global
from torch.utils import _pytree as pytree

from .._problems import is_user_file

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_ALL = (*_FORWARD, "_backward_hooks", "_backward_pre_hooks")


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks that change gradients, which torch.export ignores.

    Raises
    ------
    ValueError
        If a parameter or a submodule has such a hook.
    """
    for key, param in module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"the parameter {key.removeprefix('module.')} has a hook of its gradient, which "
                "is not imported; remove it"
            )
    if _global._global_backward_hooks or _global._global_backward_pre_hooks:
        raise ValueError(
            "there is a backward hook of all modules, which is not imported; remove it"
        )
    for key, submodule in module.named_modules():
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            raise ValueError(
                f"the submodule {key.removeprefix('module').removeprefix('.') or '(itself)'} has "
                "a backward hook, which is not imported; remove it"
            )


def hooks_of(modules: Sequence[nn.Module]) -> Callable[[], list[int]]:
    """Return a function of the hooks that modules, and all modules, have now."""
    tables = [getattr(submodule, name) for submodule in modules for name in _ALL]
    tables += [getattr(_global, f"_global{name}") for name in _ALL]
    return lambda: [*itertools.chain.from_iterable(tables)]


@contextlib.contextmanager
def watching_hooks(module: nn.Module, note: Callable[[str, str, str], None]) -> Iterator[None]:
    """Note the hooks of forward passes that only look at tensors.

    A hook runs in the trace and becomes a part of the graph: its result, its writes to tensors, and
    the attributes that it gives to the module, such as a normalised weight. A hook without any of
    these sees a tensor without values, once.
    """
    tensors = [*module.parameters(), *module.buffers()]
    tables = [
        (
            getattr(submodule, name),
            f"of {key.removeprefix('module').removeprefix('.') or type(submodule).__name__}",
        )
        for key, submodule in module.named_modules()
        for name in _FORWARD
        if key and getattr(submodule, name)
    ]
    tables += [(getattr(_global, f"_global{name}"), "of all modules") for name in _FORWARD]
    before = [(table, dict(table)) for table, _ in tables]

    def watched(hook: Callable, owner: str) -> Callable:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
            state = _state(module, [*operands, *tensors])
            result = hook(module, *args, **kwargs)
            is_same = result is None or any(result is arg for arg in args)
            if is_same and state == _state(module, [*operands, *tensors]):
                note(
                    f"the forward hook {getattr(hook, '__qualname__', type(hook).__name__)} "
                    f"{owner}",
                    "it runs once, in the import, on a tensor without values; remove it, and "
                    "return the tensor as an output of the module",
                    _line(hook),
                )
            return result

        return run

    for (table, owner), (_, hooks) in zip(tables, before, strict=True):
        for key, hook in hooks.items():
            table[key] = watched(hook, owner)
    try:
        yield
    finally:
        for table, hooks in before:
            for key, hook in hooks.items():
                if key in table:
                    table[key] = hook


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _state(module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple:
    """Return the numbers of the writes to tensors, and the attributes of a module."""
    members = vars(module)  # a proxy of a module has other submodules at each read
    groups = (members, *(members[name] for name in ("_parameters", "_buffers", "_modules")))
    attributes = [(name, id(value)) for group in groups for name, value in group.items()]
    return [tensor._version for tensor in tensors], attributes


def _line(hook: Callable) -> str:
    """Return the place where a hook is defined."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return "an unknown line"
    return f"{code.co_filename}:{code.co_firstlineno}, in {code.co_name}"
