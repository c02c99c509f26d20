"""The example arguments of a wrapped module."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .._tensors import described
from ..inputs.names import Inputs
from ..tracing.wrapper import TENSOR


class Examples:
    """The example arguments, which later arguments are compared with."""

    def __init__(self, module: nn.Module, inputs: Inputs):
        args, kwargs = inputs.args, inputs.kwargs
        self.inputs = inputs
        self._names = list(inputs.leaves)
        self._dtypes = {name: tensor.dtype for name, tensor in inputs.tensors.items()}
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_flat = not kwargs and all(isinstance(arg, torch.Tensor) for arg in args)
        self._signature = inspect.signature(module.forward)
        self._positional = list(self._signature.bind_partial(*args).arguments)

    def __deepcopy__(self, memo: dict[int, object]) -> Examples:
        return self

    def __getstate__(self) -> dict[str, object]:
        # Values are needed to trace again, but no graph.
        args, kwargs, leaves = pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.detach(),
            (self.inputs.args, self.inputs.kwargs, self.inputs.leaves),
        )
        inputs = dataclasses.replace(self.inputs, args=args, kwargs=kwargs, leaves=leaves)
        return {**self.__dict__, "inputs": inputs, "_leaves": None, "_spec": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        leaves, self._spec = pytree.tree_flatten((self.inputs.args, self.inputs.kwargs))
        self._leaves = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def check_dtypes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise an error if the first arguments of a mode have other dtypes than the examples, as
        after ``double()``."""
        for (name, dtype), tensor in zip(self._dtypes.items(), inputs, strict=True):
            if tensor.dtype is not dtype:
                raise ValueError(
                    f"{name} has dtype {tensor.dtype}, but the example that was given to wrap "
                    f"has {dtype}, with which the module is traced; convert the module and the "
                    "examples first: wrap(module.to(dtype), (example.to(dtype),))"
                )

    def tensors(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """Return the tensors among the arguments of a call, in the order of the examples.

        Raises
        ------
        TypeError, ValueError
            If the arguments have another structure or other constants.
        """
        is_flat = self._is_flat and not kwargs and len(args) == len(self.inputs.args)
        if is_flat and all(isinstance(arg, torch.Tensor) for arg in args):
            return list(args)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            leaves, spec = pytree.tree_flatten(self._arranged(args, kwargs))
        if spec != self._spec:
            raise TypeError(
                f"the arguments are {_listed(args, kwargs)}, but the examples of wrap are "
                f"{_listed(self.inputs.args, self.inputs.kwargs)}; pass arguments like the "
                "examples, or wrap the module again"
            )
        tensors = []
        for name, leaf, expected in zip(self._names, leaves, self._leaves, strict=True):
            if expected is TENSOR:
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(
                        f"{name} must be a tensor, but it is {described(leaf)}; write "
                        f"torch.from_numpy({name}) or torch.tensor({name})"
                    )
                tensors.append(leaf)
            elif (
                isinstance(leaf, torch.Tensor)
                or type(leaf) is not type(expected)
                or leaf != expected
            ):
                raise ValueError(
                    f"{name} is {described(leaf)}, but {described(expected)} was given to wrap, "
                    "which is a constant of the compiled functions; wrap the module again"
                )
        return tensors

    def _arranged(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return arguments as positional and keyword arguments as in the examples."""
        try:
            arguments = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            every = ", ".join([*self._positional, *self.inputs.kwargs])
            raise TypeError(
                f"the wrapped module takes the arguments of its examples, ({every}): {error}"
            ) from None
        keyword = next(
            (n for n, p in self._signature.parameters.items() if p.kind is p.VAR_KEYWORD), None
        )
        arguments.update(arguments.pop(keyword, {}) if keyword else {})
        names = [*self._positional, *self.inputs.kwargs]
        unknown = [name for name in arguments if name not in names]
        missing = [name for name in names if name not in arguments]
        if unknown or missing:
            raise TypeError(
                f"the arguments are {', '.join(arguments)}, but those that were given to wrap are "
                f"{', '.join(names)}; wrap the module again with such arguments"
            )
        positional: list[object] = []
        for name in self._positional:
            is_rest = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            positional += arguments[name] if is_rest else [arguments[name]]
        return tuple(positional), {name: arguments[name] for name in self.inputs.kwargs}


def _listed(args: Sequence, kwargs: Mapping) -> str:
    """Return arguments as text for an error."""
    return ", ".join(map(described, (*args, *kwargs.values()))) or "none"
