"""The result of an import: functions, and the values of parameters and buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import tvm
from torch import nn
from tvm import relax

from ..._validation import check_not_folder
from ...ir.summary import summary
from .._batch import Batch
from .._explanation import Explanation, Role
from ._tensors import as_torch, copied, read_file, tensors_of, write_file, write_to

if TYPE_CHECKING:
    import os


@dataclass(frozen=True)
class Imported:
    """An imported module.

    The parameters of each function are in the order of the attributes: inputs, targets, parameters,
    frozen parameters, states. Parameters and buffers have the keys of the module's ``state_dict``;
    those of a loss that is a module have the prefix ``loss.``.

    Attributes
    ----------
    module : tvm.IRModule
        With up to three functions, whose attribute ``num_input`` is the number of parameters before
        ``params``.

        - ``loss(seed, *inputs, *targets, *params, *frozen, *states) -> (loss, outputs,
          new_states)``, in training mode. ``outputs`` and ``new_states`` are tuples, perhaps
          empty; ``outputs`` are all tensors that the module returns. ``seed`` is an integer of
          int64 without axes; give each step another seed.
        - ``training(seed, *inputs, *params, *frozen, *states) -> (outputs, new_states)``, instead
          of ``loss`` if there is no loss.
        - ``forward(*inputs, *params, *frozen, *states) -> outputs``, in evaluation mode. If the
          module draws random numbers in this mode too, the first parameter is the seed.
    inputs : dict[str, relax.TensorType]
        The inputs: the names of the arguments of the module's ``forward``, nested ones joined with
        dots.
    targets : dict[str, relax.TensorType]
        The further arguments of the loss.
    outputs : dict[str, relax.TensorType]
        The outputs in training mode: ``output`` for a tensor, keys and positions otherwise, joined
        with dots.
    params : dict[str, tvm.runtime.Tensor]
        The trainable parameters: copies of the initial values.
    frozen : dict[str, tvm.runtime.Tensor]
        The other parameters, and the buffers that the functions only read.
    states : dict[str, tvm.runtime.Tensor]
        The buffers that the module writes in training mode, such as running statistics. Each call
        returns new ones.
    aliases : dict[str, str]
        The keys of tied parameters and buffers, each with the key whose tensor it is.

    Examples
    --------
    >>> import torch
    >>> from relax_grad.frontend.torch import from_module
    >>> imported = from_module(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> imported
    Imported(inputs: input (4, 3) float32; outputs: output (4, 2) float32; params: 2)
    >>> imported.params["weight"].shape
    (2, 3)
    """

    module: tvm.IRModule
    inputs: dict[str, relax.TensorType]
    targets: dict[str, relax.TensorType]
    outputs: dict[str, relax.TensorType]
    params: dict[str, tvm.runtime.Tensor]
    frozen: dict[str, tvm.runtime.Tensor]
    states: dict[str, tvm.runtime.Tensor]
    aliases: dict[str, str]
    _batch: Batch | None = dataclasses.field(default=None, repr=False, compare=False)
    #: Imports the module within ``torch.autocast`` of a dtype; None if it made another
    #: ``tvm.IRModule`` than the given one.
    _again: Callable[[tvm.IRModule, str], Imported | None] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def __repr__(self) -> str:
        types = {"inputs": self.inputs, "targets": self.targets, "outputs": self.outputs}
        counts = {"params": self.params, "frozen": self.frozen, "states": self.states}
        return summary("Imported", types, counts)

    def explain(self) -> Explanation:
        """Return the role of each parameter and buffer, and the numbers of rows of a batch.

        Returns
        -------
        explanation : dict[str, Role]
            By the keys of the state_dict, each with ``kind`` and ``reason``. The kind is
            ``"trained"``, ``"frozen"`` or ``"state"``. As text, it is a table, with a last line on
            the numbers of rows that a :class:`relax_grad.training.Trainer` takes, and with the
            reason if there is only one. This line, also in the attribute ``batch``, takes a second
            import.

        Examples
        --------
        >>> import torch
        >>> from relax_grad.frontend.torch import from_module
        >>> print(from_module(torch.nn.Linear(3, 2), (torch.ones(4, 3),)).explain())
        weight  trained   it is a parameter to train
        bias    trained   it is a parameter to train
        batch: any number of rows of input; the fastest step has 4 rows
        """
        kinds = (
            (self.params, "trained", "it is a parameter to train"),
            (self.frozen, "frozen", "it is a buffer, or a parameter without requires_grad"),
            (self.states, "state", "training writes it"),
        )
        roles = {key: Role(kind, reason) for group, kind, reason in kinds for key in group}
        explanation = Explanation(roles)
        explanation._rows = self._batch or ""
        return explanation

    @property
    def values(self) -> list[tvm.runtime.Tensor]:
        """The last arguments of every function: the values of parameters, frozen parameters and
        states."""
        return [*self.params.values(), *self.frozen.values(), *self.states.values()]

    def copy_to(self, module: nn.Module, values: Mapping[str, object] | None = None) -> None:
        """Write values to the parameters and buffers of a module, in place.

        Keys of a loss that is a module are left out.

        Parameters
        ----------
        module : nn.Module
            A module with the same keys, such as that which was imported.
        values : Mapping[str, tensor], optional
            Values by key, such as the trained parameters. By default the initial values.

        Raises
        ------
        TypeError, ValueError
            If the module has no such tensor, or one of another shape or dtype.
        """
        tensors = tensors_of(module)
        for key, value in self._given(values).items():
            if key in tensors or not key.startswith("loss."):
                write_to(module, key, as_torch(value), tensors)

    def copy_from(self, module: nn.Module) -> Imported:
        """Return the import with the values of a module with the same keys.

        Parameters
        ----------
        module : nn.Module
            The module. Tensors that it does not have keep their values if they belong to a loss.

        Returns
        -------
        imported : Imported
            The import with copies of the module's values.

        Raises
        ------
        TypeError, ValueError
            If the module lacks a tensor, or has one of another shape or dtype.

        Examples
        --------
        >>> import torch
        >>> from relax_grad.frontend.torch import from_module
        >>> imported = from_module(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
        >>> with torch.no_grad():
        ...     zeros = torch.nn.Linear(3, 2)
        ...     _ = zeros.bias.zero_()
        >>> imported.copy_from(zeros).params["bias"].numpy().tolist()
        [0.0, 0.0]
        """
        tensors = tensors_of(module)
        kept = {key: tensor for key, tensor in self._named().items() if key.startswith("loss.")}
        return self._with({**kept, **tensors}, type(module).__name__)

    def save(self, path: str | os.PathLike, values: Mapping[str, object] | None = None) -> None:
        """Write values to a file of safetensors, by their keys.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        values : Mapping[str, tensor], optional
            Values by key that take the place of the initial ones, such as the trained parameters.
        """
        check_not_folder(path, "weights.safetensors")
        write_file(path, {**self._named(), **self._given(values)})

    def load(self, path: str | os.PathLike) -> Imported:
        """Return the import with the values of a file of safetensors.

        Parameters
        ----------
        path : str or os.PathLike
            A file that :meth:`save` wrote, or one of a state_dict with the same keys.

        Returns
        -------
        imported : Imported
            The import with these values.

        Raises
        ------
        ValueError
            If the file lacks a tensor, or has one of another shape or dtype.
        """
        tensors = read_file(path)
        if any(key.startswith("params/") for key in tensors):
            raise ValueError(
                f"{path} has a state of training, of Trainer.save; load it by trainer.load(path)"
            )
        return self._with(tensors, f"the file {path}")

    def _under_autocast(self, dtype: str) -> Imported | None:
        """Return the import of the module within ``torch.autocast``, with these values; None if the
        module is unknown, or the functions have changed since its import."""
        imported = None if self._again is None else self._again(self.module, dtype)
        if imported is None:
            return None
        return dataclasses.replace(
            imported, params=self.params, frozen=self.frozen, states=self.states
        )

    def _named(self) -> dict[str, tvm.runtime.Tensor]:
        return {**self.params, **self.frozen, **self.states}

    def _given(self, values: Mapping[str, object] | None) -> dict[str, object]:
        """Return values by their first keys."""
        known = self._named()
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(
                "values must be tensors by their keys, such as trainer.values, but it is "
                f"{type(values).__name__}"
            )
        if values is None:
            return known
        by_first_key = {self.aliases.get(key, key): value for key, value in values.items()}
        for key in by_first_key:
            if key not in known:
                raise ValueError(
                    f"values: the import has no parameter, frozen parameter or state {key!r}"
                )
        return by_first_key

    def _with(self, values: Mapping[str, torch.Tensor], source: str) -> Imported:
        """Return the import with other values."""
        # safetensors.torch.save_model keeps any one of the keys of a tied tensor.
        present = {
            self.aliases.get(key, key): key
            for key in [*self.aliases, *self._named()]
            if key in values
        }
        groups: dict[str, dict[str, tvm.runtime.Tensor]] = {}
        for name in ("params", "frozen", "states"):
            groups[name] = {}
            for key, old in getattr(self, name).items():
                if key not in present:
                    others = [other for other, first in self.aliases.items() if first == key]
                    tied = f", nor a tensor tied to it: {', '.join(others)}" if others else ""
                    raise ValueError(f"{source} has no {key!r}{tied}")
                value, wanted = as_torch(values[present[key]]), torch.from_dlpack(old)
                if value.shape != wanted.shape or value.dtype != wanted.dtype:
                    raise ValueError(
                        f"{key} has shape {tuple(value.shape)} and dtype {value.dtype} in "
                        f"{source}, but the import has {tuple(wanted.shape)} and {wanted.dtype}"
                    )
                groups[name][key] = copied(value)
        return dataclasses.replace(self, **cast(Any, groups))
