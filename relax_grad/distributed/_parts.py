"""Steps of workers that have parts of some parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import tvm
from tvm import relax

from ..training import TrainStep
from ._replica import Layout
from .shards import Shard
from .transform import TensorParallel
from .transform.tensor_parallel import check_shards, match_shards


class Parts:
    """The division of a step's parameters among the workers of a group.

    Parameters
    ----------
    step : TrainStep
        The step of one worker with the whole model.
    shards : Mapping[str, Shard]
        The annotations by names or patterns.
    num_workers : int
        The workers of a group.

    Attributes
    ----------
    shards : dict[str, Shard]
        The annotations by the names of parameters, each with its axis; after
        :meth:`step_of_worker`.
    """

    def __init__(self, step: TrainStep, shards: Mapping[str, Shard], num_workers: int):
        check_shards(shards)
        self._step, self._num_workers, self._places = step, num_workers, step.places()
        self._matched = match_shards(shards, list(self._places))
        self.shards: dict[str, Shard] = {}

    def step_of_worker(self, differentiate: Callable | None = None) -> TrainStep:
        """Return the step of a worker, with another differentiation of its loss if one is given."""
        divided = [name for name in self._matched if name in self._step.params]
        divided = divided if self._num_workers > 1 else []
        step = self._step.with_parts(self._rewritten, divided, differentiate)
        # A step does not use divided outputs of the model, whose parts the pass collects.
        names = [each.name_hint for each in step.module.get_global_vars()]
        return replace(step, module=relax.transform.DeadCodeElimination(names)(step.module))

    def _rewritten(self, module: tvm.IRModule, name: str) -> tvm.IRModule:
        params = [param.name for param in module[name].params]
        annotations = {params[self._places[each]]: shard for each, shard in self._matched.items()}
        pass_ = TensorParallel(name, annotations, self._num_workers)
        resolved = pass_.shards_of(module)
        self.shards = {each: resolved[params[self._places[each]]] for each in self._matched}
        return pass_(module)

    def layouts(self) -> dict[str, list[Layout]]:
        """Return how the workers keep the tensors of each group."""

        def layout(name: str) -> Layout:
            found = self.shards.get(name)
            return None if found is None else [found.axis, found.parts]

        return {
            "params": [layout(name) for name in self._step.params],
            "frozen": [layout(name) for name in self._step.frozen],
            # The state of a parameter, SLOT/PARAMETER, has its shape.
            "optimizer_state": [
                layout(name.partition("/")[2]) for name in self._step.optimizer_state
            ],
        }


__all__ = ["Parts"]
