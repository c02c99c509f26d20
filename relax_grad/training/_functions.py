"""The functions of a training step, as the modules below :class:`TrainStep` read them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import relax

from ..cpu import programs
from ..ir.signature import GROUPS
from ._recipe import Recipe
from ._source import Forward
from ._tensors import listed


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a step, with the names and types of their tensors.

    The attributes are as for :class:`TrainStep`, which also compiles and writes them.
    """

    module: tvm.IRModule
    batch: dict[str, relax.TensorType]
    hyperparameters: dict[str, float]
    params: dict[str, relax.TensorType]
    frozen: dict[str, relax.TensorType]
    states: dict[str, relax.TensorType]
    optimizer_state: dict[str, relax.TensorType]
    metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    accumulate: int
    forward: Forward | None
    _recipe: Recipe

    @cached_property
    def _digest(self) -> str:
        """The digest by which a program knows that a state belongs to a step.

        It depends on the loss, its optimizer and its options, and is the same on every target: a
        state that one machine saves may go to the folder of another one.
        """
        source, groups = self._recipe.source, self._recipe.groups
        try:
            described = programs.description(source.module)
        except TypeError:  # an attribute is a packed function, which has a name in the text at best
            described = [source.module.script(show_meta=False)]
        # Recomputation changes no result.
        settings = replace(self._recipe.settings, remat=None)
        types = [listed(getattr(self, group)) for group in ("batch", *GROUPS)]
        parts = [source.name, described, repr(groups), repr(settings), types, self.hyperparameters]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
