"""The example arguments of a module and its loss, with the names of their leaves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Inputs:
    """The example arguments of a module and its loss, with their names.

    Attributes
    ----------
    args : tuple
        The positional arguments of the module.
    kwargs : dict[str, object]
        Its keyword arguments.
    targets : tuple
        The further arguments of the loss.
    leaves : dict[str, object]
        Tensors and constants by their names, in the order of the graph: targets come last.
    positional : tuple[str, ...]
        The names of the positional arguments other than ``*args``.
    variadic : str or None
        The name of ``*args``, whose elements the other positional arguments are.
    """

    args: tuple
    kwargs: dict[str, object]
    targets: tuple
    leaves: dict[str, object]
    positional: tuple[str, ...]
    variadic: str | None

    @classmethod
    def of(
        cls, module: nn.Module, args: Sequence, kwargs: Mapping | None, targets: Sequence = ()
    ) -> Inputs:
        """Name the example arguments.

        Raises
        ------
        TypeError
            If ``forward`` does not take them.
        ValueError
            If a tensor is sparse or on the device meta.
        """
        args, kwargs, targets = tuple(args), dict(kwargs or {}), tuple(targets)
        signature = inspect.signature(module.forward)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"args and kwargs do not fit {type(module).__name__}.forward"
                f"({', '.join(signature.parameters)}): {error}{_of_shape(args)}"
            ) from None
        bound = signature.bind_partial(*args).arguments
        arguments = [*bound.items(), *kwargs.items()]
        arguments += zip(target_names(targets), targets, strict=True)
        params = signature.parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [param.name for param in params if param.kind in kinds]
        variadic = (param.name for param in params if param.kind is param.VAR_POSITIONAL)
        return cls(
            args,
            kwargs,
            targets,
            leaves=_leaves(arguments),
            positional=tuple(positional[: len(args)]),
            variadic=next(variadic, None),
        )

    @property
    def target_names(self) -> list[str]:
        """The names of the targets."""
        return target_names(self.targets)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names."""
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}

    @property
    def target_tensors(self) -> list[torch.Tensor]:
        """The tensors among the targets."""
        leaves = pytree.tree_leaves(self.targets)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def without_targets(self) -> Inputs:
        """Return the arguments of the module alone."""
        count = len(self.leaves) - len(pytree.tree_leaves(self.targets))
        leaves = dict(list(self.leaves.items())[:count])
        return dataclasses.replace(self, targets=(), leaves=leaves)

    @property
    def rows(self) -> int | None:
        """The extent of the first axis of the first input that has axes."""
        shapes = (tensor.shape for tensor in self.without_targets().tensors.values())
        return next((shape[0] for shape in shapes if len(shape)), None)

    def with_rows(self, count: int) -> Inputs:
        """Return arguments with another number of rows: some of these, or these several times."""
        rows = self.rows

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not rows or rows == count or not tensor.ndim or tensor.shape[0] != rows:
                return tensor
            with torch.no_grad():
                chosen = tensor[torch.arange(count, device=tensor.device) % rows]
            return chosen.requires_grad_(tensor.requires_grad)

        groups = self.args, self.kwargs, self.targets, self.leaves
        args, kwargs, targets, leaves = (
            pytree.tree_map_only(torch.Tensor, resized, group) for group in groups
        )
        return dataclasses.replace(self, args=args, kwargs=kwargs, targets=targets, leaves=leaves)


def _leaves(arguments: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return the leaves of named arguments by their names."""
    leaves: dict[str, object] = {}
    for argument, value in arguments:
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            name = ".".join([argument, *map(key_name, path)])
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                raise ValueError(f"{name} is on the device meta; give an example on the CPU")
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                raise ValueError(
                    f"{name} has the layout {leaf.layout}, and the import takes dense tensors; "
                    f"give {name}.to_dense()"
                )
            if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor) and leaf.ndim:
                raise TypeError(
                    f"{name} is an array of NumPy; give a tensor: torch.from_numpy({name})"
                )
            while name in leaves:
                name += "_"
            leaves[name] = leaf
    return leaves


def key_name(key: object) -> str:
    """Return a step of the path to a leaf as text: the key, the index or the name of a field."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def target_names(targets: Sequence) -> list[str]:
    """Return the names of targets."""
    if len(targets) > 1:
        return [f"target{i}" for i in range(len(targets))]
    return ["target"] * len(targets)


def _of_shape(args: tuple) -> str:
    """Return the remedy for a shape where example tensors are expected."""
    if len(args) < 2 or not all(type(arg) is int for arg in args):
        return ""
    return f"; for this shape, pass the tensor (torch.zeros{args},)"
