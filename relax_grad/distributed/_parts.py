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
    sharing : int
        The number of groups among whose workers of the same place the optimizer's state is divided.

    Attributes
    ----------
    shards : dict[str, Shard]
        The annotations by the names of parameters, each with its axis; after
        :meth:`step_of_worker`.
    """

    def __init__(
        self, step: TrainStep, shards: Mapping[str, Shard], num_workers: int, sharing: int = 1
    ):
        check_shards(shards)
        self._sharing = sharing
        self._step, self._num_workers, self._places = step, num_workers, step.places()
        self._matched = match_shards(shards, list(self._places))
        self.shards: dict[str, Shard] = {}

    def step_of_worker(self, differentiate: Callable | None = None) -> TrainStep:
        """Return the step of a worker, with another differentiation of its loss if one is given."""
        divided = [name for name in self._matched if name in self._step.params]
        divided = divided if self._num_workers > 1 else []
        step = self._step.with_parts(self._rewritten, divided, differentiate, self._sharing)
        # A step does not use divided outputs of the model, whose parts the pass collects.
        names = [variable.name_hint for variable in step.module.get_global_vars()]
        return replace(step, module=relax.transform.DeadCodeElimination(names)(step.module))

    def _rewritten(self, module: tvm.IRModule, name: str) -> tvm.IRModule:
        params = [param.name for param in module[name].params]
        annotations = {
            params[self._places[param_name]]: shard for param_name, shard in self._matched.items()
        }
        pass_ = TensorParallel(name, annotations, self._num_workers)
        resolved = pass_.shards_of(module)
        self.shards = {
            param_name: resolved[params[self._places[param_name]]] for param_name in self._matched
        }
        return pass_(module)

    def layouts(self) -> dict[str, list[Layout]]:
        """Return how the workers keep the tensors of each group."""

        def layout(name: str, sharing: int = 1) -> Layout:
            shard = self.shards.get(name)
            if shard is None:
                return None if sharing == 1 else [None, 1, sharing]
            return [shard.axis, shard.parts, sharing]

        def of_state(name: str) -> Layout:
            # The state of a parameter, SLOT/PARAMETER, has its shape.
            return layout(name.partition("/")[2], self._sharing if is_shared(name) else 1)

        return {
            "params": [layout(name) for name in self._step.params],
            "frozen": [layout(name) for name in self._step.frozen],
            "optimizer_state": [of_state(name) for name in self._step.optimizer_state],
        }


def is_shared(state: str) -> bool:
    """Tell whether workers can share a tensor of the optimizer's state: every tensor of a
    parameter but its accumulated gradient."""
    kind, _, parameter = state.partition("/")
    return bool(parameter) and kind != "gradient"


__all__ = ["Parts", "is_shared"]
