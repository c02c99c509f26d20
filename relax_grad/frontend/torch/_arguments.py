"""Checks of the arguments of an import."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._arguments import Trainable, check_trainable
from ._tensors import described


def check_arguments(
    module: object,
    args: Sequence[torch.Tensor],
    kwargs: Mapping | None,
    loss: object,
    targets: Sequence,
    custom: Mapping[str, Callable] | None,
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but it is {described(module)}{_remedy(module)}"
        )
    if any(kind.__module__.startswith("torch.jit") for kind in type(module).__mro__):
        raise TypeError(
            "module must be a torch.nn.Module that torch.export traces, but it is one of "
            "torch.jit; give the module from which torch.jit.script or trace made it"
        )
    if isinstance(args, (torch.Tensor, str, Mapping)) or not isinstance(args, Sequence):
        raise TypeError(
            f"args must be a sequence of example arguments, such as (x,), but it is "
            f"{described(args)}"
            + (": pass args=(), kwargs={...}" if isinstance(args, Mapping) else "")
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"kwargs must be a mapping of names to example arguments, but it is {described(kwargs)}"
            + ("; a loss is given as loss=..., targets=(y,)" if callable(kwargs) else "")
        )
    _check_examples(args)
    if loss is not None and not callable(loss):
        raise TypeError(
            "loss must be a function of the output and the targets, such as "
            f"torch.nn.functional.cross_entropy, but it is {described(loss)}"
        )
    if isinstance(targets, (torch.Tensor, str, Mapping)) or not isinstance(targets, Sequence):
        raise TypeError(
            f"targets must be a sequence of example tensors, such as (y,), but it is "
            f"{described(targets)}"
            + (": pass tuple(targets.values())" if isinstance(targets, Mapping) else "")
        )
    if targets and loss is None:
        raise ValueError("targets are arguments of a loss; give one: loss=...")
    if loss is not None:
        _check_loss(loss, targets)
    check_map(custom)


def _remedy(module: object) -> str:
    if isinstance(module, str) or hasattr(module, "__fspath__"):
        return "; make the model, and load its file: model.load_state_dict(torch.load(path))"
    if isinstance(module, Mapping):
        return "; make the model, and load the values: model.load_state_dict(values)"
    if callable(module) and not isinstance(module, type):
        return "; make it the forward of a subclass of torch.nn.Module"
    return ""


def _check_examples(args: Sequence) -> None:
    """Raise TypeError for an example that is a list of numbers, as only Python has them."""
    for i, example in enumerate(args):
        numbers = example
        while isinstance(numbers, list) and numbers:
            numbers = numbers[0]
        if isinstance(example, list) and isinstance(numbers, float):
            raise TypeError(
                f"args[{i}] must be a tensor, but it is a list of numbers; write torch.tensor(list)"
            )


def _check_loss(loss: Any, targets: Sequence) -> None:
    """Raise TypeError if a loss is a class, or takes other numbers of arguments."""
    if isinstance(loss, type):
        raise TypeError(
            f"loss is the class {loss.__name__}; give an instance: loss={loss.__name__}()"
        )
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind("output", *targets)
    except TypeError as error:
        count = f"{len(targets)} target{'' if len(targets) == 1 else 's'}"
        needed = [
            name for name, param in signature.parameters.items() if param.default is param.empty
        ]
        raise TypeError(
            f"the loss is called with the output and {count}, but it takes {', '.join(needed)}: "
            f"{error}; give as many targets: from_module(..., loss=loss, targets=(y,))"
        ) from None


def check_map(custom: Mapping[str, Callable] | None) -> None:
    if custom is not None and not (
        isinstance(custom, Mapping)
        and all(isinstance(name, str) and callable(converter) for name, converter in custom.items())
    ):
        raise TypeError(
            "custom_convert_map must be a mapping of operators to functions, but it is "
            f"{described(custom)}"
        )


def check_options(trainable: Trainable | None, batch_norm: str) -> None:
    check_trainable(trainable)
    if batch_norm not in ("update", "frozen"):
        raise ValueError(f'batch_norm must be "update" or "frozen", but it is {batch_norm!r}')
