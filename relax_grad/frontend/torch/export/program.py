"""An exported graph with the roles of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from .._problems import Problem


@dataclass
class Program:
    """An exported graph and the roles of its inputs and outputs.

    Attributes
    ----------
    exported : torch.export.ExportedProgram
        The decomposed graph.
    inputs : dict[str, str]
        The placeholder of each input by the input's name: of the module and then of the loss.
    tensors : dict[str, str]
        The key in the state_dict by placeholder: parameters and buffers.
    constants : dict[str, torch.Tensor]
        The values of other tensors by placeholder.
    outputs : dict[str, int]
        The position of each output among the results of the graph by the output's name.
    loss : int or None
        The position of the loss.
    states : dict[str, int]
        The position of the new value of each buffer that the graph writes, by its key.
    problems : list[Problem]
        The parts that cannot be imported.
    symbols : dict[str, str]
        The user's names of symbolic extents, by torch.export's names.
    form : tuple or None
        The structure of the module's result and its leaves, where :data:`TENSOR` stands for each
        tensor.
    reads : set[tuple[int, str]]
        The identities of submodules with the names of the attributes that the trace has read.
    """

    exported: torch.export.ExportedProgram
    inputs: dict[str, str]
    tensors: dict[str, str]
    constants: dict[str, torch.Tensor]
    outputs: dict[str, int]
    loss: int | None
    states: dict[str, int]
    problems: list[Problem]
    symbols: dict[str, str] = field(default_factory=dict)
    form: tuple[pytree.TreeSpec, list] | None = None
    reads: set[tuple[int, str]] = field(default_factory=set)

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Replace the keys of tied tensors."""
        self.tensors = {place: aliases.get(key, key) for place, key in self.tensors.items()}
        self.states = {aliases.get(key, key): i for key, i in self.states.items()}
