"""Tensor parallel training: one step, of which each worker computes a part of each layer."""

from __future__ import annotations

from collections.abc import Mapping

import tvm

from ..training import Optimizer, TrainStep
from ._parallel_trainer import ParallelTrainer, as_step, check_interval, check_session
from ._parts import Parts
from .session import Session
from .shards import Shard
from .transform.tensor_parallel import check_shards


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
    check_inputs: bool = True,
    **options: object,
) -> TensorParallelTrainer:
    """Train one model whose layers are divided among all workers of a session.

    All workers get the whole batch. Each has a part of the divided parameters and of their
    optimizer's state. Losses, gradients and new parameters equal one worker's, apart from the
    order of sums. The result has the methods of :class:`relax_grad.training.Trainer` with whole
    tensors, and its files are a Trainer's, so that training continues with any number of
    workers.

    Parameters
    ----------
    model : TrainStep or tvm.IRModule or an import
        A step, or a model of which :func:`relax_grad.training.train_step` makes one with
        ``optimizer`` and ``options``.
    session : Session
        The workers.
    optimizer : Optimizer or Mapping[str, Optimizer], optional
        The optimizer, if ``model`` is no step. The update of a divided parameter must be
        element-wise: all optimizers but LAMB and Muon.
    shards : Mapping[str, Shard]
        The annotations of parameters and frozen parameters by their names or by patterns, as for
        :class:`relax_grad.distributed.transform.TensorParallel`.
    check_every : int
        The number of steps after which the workers compare digests of all tensors that are the same
        on all workers; 0 for never.
    values, seed, on_nan, target, compile_options, check_inputs
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
        If an argument does not fit, the workers do not divide an extent, or an operator cannot run
        on a part of a divided axis.
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
    if session.num_groups > 1:
        raise ValueError(
            f"the session has {session.num_groups} groups, but a tensor parallel step runs on "
            "all workers; use data_parallel(..., shards=...), in which each group has a share "
            "of the batch"
        )
    step = as_step(model, optimizer, options, "tensor parallel")
    parts = Parts(step, shards, session.num_workers)
    return TensorParallelTrainer(
        step,
        parts.step_of_worker(),
        session,
        parts,
        check_every,
        values=values,
        seed=seed,
        on_nan=on_nan,
        target=target,
        compile_options=compile_options,
        check_inputs=check_inputs,
    )


class TensorParallelTrainer(ParallelTrainer):
    """A trainer whose steps run on all workers, each with a part of the layers;
    :func:`tensor_parallel` makes it.

    It has the methods of :class:`relax_grad.training.Trainer`, with whole tensors: ``params`` and
    ``save`` collect the parts. Predictions are computed by this process with the whole model.

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
        parts: Parts,
        check_every: int,
        **options: object,
    ):
        self.shards = parts.shards
        super().__init__(step, parallel, session, parts.layouts(), check_every, **options)


__all__ = ["TensorParallelTrainer", "tensor_parallel"]
