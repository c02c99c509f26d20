"""Tensor parallel training: one step, of which each worker computes a part of each layer."""

from __future__ import annotations

from collections.abc import Mapping

import tvm

from ..training import Optimizer, TrainStep
from ._parallel_trainer import ParallelTrainer, as_step, check_interval, check_session
from ._replica import Layout
from .session import Session
from .shards import Shard
from .transform import TensorParallel
from .transform.tensor_parallel import check_shards, match_shards


def tensor_parallel(
    model: TrainStep | tvm.IRModule | object,
    session: Session,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    shards: Mapping[str, Shard],
    check_every: int = 100,
    values: Mapping[str, object] | None = None,
    seed: int = 0,
    on_nan: str = "raise",
    target: tvm.target.Target | str | Mapping | None = None,
    compile_options: Mapping[str, object] | None = None,
    **options: object,
) -> TensorParallelTrainer:
    """Train one model whose layers are divided among all workers of a session.

    All workers get the whole batch. Each has a part of the divided parameters and of their optimizer's state. Losses, gradients and
    new parameters are those of one worker, apart from the order of sums. The result has the methods of
    :class:`relax_grad.training.Trainer` with whole tensors, and its files are those of a Trainer, so that training goes on with any
    number of workers.

    Parameters
    ----------
    model : TrainStep or tvm.IRModule or an import
        A step, or a model of which :func:`relax_grad.training.train_step` makes one with ``optimizer`` and ``options``.
    session : Session
        The workers.
    optimizer : Optimizer or Mapping[str, Optimizer], optional
        The optimizer, if ``model`` is no step. The update of a divided parameter must be element-wise: all optimizers but LAMB and
        Muon.
    shards : Mapping[str, Shard]
        The annotations of parameters and frozen parameters by their names or by patterns, as for
        :class:`relax_grad.distributed.transform.TensorParallel`.
    check_every : int
        The number of steps after which the workers compare digests of all tensors that are the same on all workers; 0 for never.
    values, seed, on_nan, target, compile_options
        As for :class:`relax_grad.training.Trainer`. Workers have the random numbers of one worker.
    **options
        Further arguments of :func:`relax_grad.training.train_step`.

    Returns
    -------
    trainer : TensorParallelTrainer
        The trainer.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, the workers do not divide an extent, or an operator cannot run on a part of a divided axis.
    WorkerError
        If a worker fails.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import column, row, session, tensor_parallel
    >>> from relax_grad.training import SGD, train_step
    >>> from tvm import relax
    >>> shapes = {"x": (5, 3), "up": (3, 4), "down": (4, 1)}
    >>> x, up, down = (relax.Var(k, relax.TensorType(v, "float32")) for k, v in shapes.items())
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, up, down]):
    ...     y = bb.emit(relax.op.nn.relu(relax.op.matmul(x, up)))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.mean(relax.op.matmul(y, down))))
    >>> step = train_step(bb.get(), SGD(), wrt=["up", "down"])
    >>> ones = {name: np.ones(shape, "float32") for name, shape in shapes.items()}
    >>> with session(2) as workers:
    ...     trainer = tensor_parallel(
    ...         step,
    ...         workers,
    ...         shards={"up": column(), "down": row()},
    ...         values={"up": ones["up"], "down": ones["down"]},
    ...     )
    ...     trainer.step(ones["x"]).loss
    12.0
    """
    check_session(session)
    check_every = check_interval(check_every)
    check_shards(shards)
    step = as_step(model, optimizer, options, "tensor parallel")
    places = step.places()
    matched = match_shards(shards, list(places))
    found: dict[str, Shard] = {}

    def rewrite(module: tvm.IRModule, name: str) -> tvm.IRModule:
        params = [param.name for param in module[name].params]
        annotations = {params[places[each]]: shard for each, shard in matched.items()}
        pass_ = TensorParallel(name, annotations, session.num_workers)
        resolved = pass_.shards_of(module)
        found.update({each: resolved[params[places[each]]] for each in matched})
        return pass_(module)

    divided = [name for name in matched if name in step.params]
    parallel = step.with_parts(rewrite, divided if session.num_workers > 1 else ())
    return TensorParallelTrainer(
        step,
        parallel,
        session,
        found,
        check_every,
        values=values,
        seed=seed,
        on_nan=on_nan,
        target=target,
        compile_options=compile_options,
    )


class TensorParallelTrainer(ParallelTrainer):
    """A trainer whose steps run on all workers, each with a part of the layers; :func:`tensor_parallel` makes it.

    It has the methods of :class:`relax_grad.training.Trainer`, with whole tensors: ``params`` and ``save`` collect the parts.
    Predictions are computed by this process with the whole model.

    Attributes
    ----------
    session : Session
        The workers.
    train_step : TrainStep
        The step of one worker with the whole model.
    parallel_step : TrainStep
        The step that each worker runs, with its collectives and the types of its parts.
    shards : dict[str, Shard]
        The annotations of divided parameters by their names, each with its axis.
    """

    def __init__(
        self,
        step: TrainStep,
        parallel: TrainStep,
        session: Session,
        shards: dict[str, Shard],
        check_every: int,
        **options,
    ):
        self.shards = shards

        def layout(name: str) -> Layout:
            found = shards.get(name)
            return None if found is None else [found.axis, found.parts]

        layouts = {
            "params": [layout(name) for name in step.params],
            "frozen": [layout(name) for name in step.frozen],
            # The state of a parameter, SLOT/PARAMETER, has its shape.
            "optimizer_state": [layout(name.partition("/")[2]) for name in step.optimizer_state],
        }
        super().__init__(step, parallel, session, layouts, check_every, **options)


__all__ = ["TensorParallelTrainer", "tensor_parallel"]
