"""Data parallel training: one step, of which each worker has a replica."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm_ffi import structural_equal

from ..activity import holds_floats
from ..ir.compat import dtype_of
from ..training import Optimizer, StepResult, Trainer, TrainStep
from ._parallel_trainer import ParallelTrainer, as_step, check_interval, check_session
from ._parts import Parts, is_shared
from ._processes import shares
from .errors import WorkerError
from .session import Session
from .shards import Shard
from .transform import BUCKET_BYTES, DataParallel


def data_parallel(
    model: TrainStep | tvm.IRModule | object,
    session: Session,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    *,
    reduction: str = "mean",
    batch_norm: str = "synchronized",
    replicated: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
    overlap: bool = True,
    shard_optimizer: bool = False,
    shards: Mapping[str, Shard] | None = None,
    check_every: int = 100,
    values: Mapping[str, object] | None = None,
    seed: int = 0,
    on_nan: str = "raise",
    target: tvm.target.Target | str | Mapping | None = None,
    compile_options: Mapping[str, object] | None = None,
    check_inputs: bool = True,
    **options: object,
) -> DataParallelTrainer:
    """Train one model on all workers of a session, each on its share of every batch.

    ``Trainer(step, distributed=session)`` is the same.

    Losses, gradients and new parameters are as with one worker and the whole batch, apart from
    the order of sums. The result has the methods of :class:`relax_grad.training.Trainer`, and its
    files are files of a Trainer, so that training continues with any number of workers.

    Parameters
    ----------
    model : TrainStep or tvm.IRModule or an import
        A step, or a model of which :func:`relax_grad.training.train_step` makes one with
        ``optimizer`` and ``options``.
    session : Session
        The workers.
    optimizer : Optimizer or Mapping[str, Optimizer], optional
        The optimizer, if ``model`` is no step.
    reduction : str
        ``"mean"``: the loss is a mean over the examples of the batch. ``"sum"``: it is a sum.
    batch_norm : str
        ``"synchronized"``: batch normalisation takes the statistics of the whole batch.
        ``"local"``: each worker takes the statistics of its share, and the running statistics are
        averaged.
    replicated : Collection[str]
        The inputs and targets that all workers get whole. The others are divided along their first
        axis.
    bucket_bytes : int
        The largest size of a bucket of gradients that are reduced together.
    overlap : bool
        Whether buckets are reduced while the rest of the backward pass is computed. Not with
        ``backend="nccl"``.
    shard_optimizer : bool
        Whether each worker keeps and updates a part of the optimizer's state only, as the first
        stage of ZeRO (Rajbhandari et al., 2020): the gradients are reduced, each worker updates its
        part of each parameter, and the parts are gathered. For optimizers whose updates are
        element-wise: all but LAMB and Muon. With ``shards``, the state of a part is divided among
        the workers that have it.
    shards : Mapping[str, Shard], optional
        The annotations of parameters that are divided among the workers of a group, as for
        :func:`relax_grad.distributed.tensor_parallel`. Each group of the session has one share of
        every batch, and its workers compute the share together.
    check_every : int
        The number of steps after which the workers compare digests of all their tensors; 0 for
        never.
    values, seed, on_nan, target, compile_options, check_inputs
        As for :class:`relax_grad.training.Trainer`. Workers have different random numbers.
    **options
        Further arguments of :func:`relax_grad.training.train_step`.

    Returns
    -------
    trainer : DataParallelTrainer
        The trainer.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    WorkerError
        If a worker fails.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import data_parallel, session
    >>> from relax_grad.training import SGD, train_step
    >>> from tvm import relax, tirx
    >>> n = tirx.Var("n", "int64")
    >>> x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.mean(relax.op.square(y))))
    >>> step = train_step(bb.get(), SGD(), wrt="w")
    >>> with session(2) as workers:
    ...     trainer = data_parallel(step, workers, values={"w": np.ones(3, "float32")})
    ...     trainer.step(np.ones((5, 3), "float32")).loss
    9.0
    """
    check_session(session)
    check_every = check_interval(check_every)
    step = as_step(model, optimizer, options, "data parallel")
    split = _divided(step, replicated)
    for name, value in (("shard_optimizer", shard_optimizer), ("overlap", overlap)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, but it is {value!r}")
    parts = None
    if shards is not None:
        _check_groups(session)
        sharing = session.num_groups if shard_optimizer else 1
        parts = Parts(step, shards, session.num_workers // session.num_groups, sharing)
    overlap = overlap and session.num_workers > 1 and session.backend != "nccl"
    group_size = 1 if parts is None else session.num_workers // session.num_groups
    differentiate = _differentiate(
        split, reduction, batch_norm, bucket_bytes, overlap, group_size=group_size
    )
    if parts is None:
        parallel = step.for_workers(differentiate, session.num_workers if shard_optimizer else 1)
    else:
        parallel = parts.step_of_worker(differentiate)
    return DataParallelTrainer(
        step,
        parallel,
        session,
        split=split,
        parts=parts,
        sharing=session.num_workers if shard_optimizer else 1,
        check_every=check_every,
        has_local_norms=batch_norm == "local",
        values=values,
        seed=seed,
        on_nan=on_nan,
        target=target,
        compile_options=compile_options,
        check_inputs=check_inputs,
    )


def _check_groups(session: Session) -> None:
    if session.num_groups < 2:
        raise ValueError(
            "shards are divided among the workers of a group, but the session has one group, "
            "which would have the whole batch; begin the session with num_groups=, or use "
            "tensor_parallel"
        )
    if session.backend == "nccl":
        raise ValueError(
            'shards: the backend "nccl" has no reductions among groups; use tensor_parallel, or '
            "data_parallel without shards"
        )


def _divided(step: TrainStep, replicated: Collection[str]) -> list[str]:
    """Return the inputs and targets that are divided among workers."""
    if isinstance(replicated, str):
        replicated = [replicated]
    for name in replicated:
        if name not in step.batch:
            raise ValueError(
                f"replicated: the step has no input or target {name!r}; it has "
                f"{', '.join(step.batch)}"
            )
    names = [name for name, kind in step.batch.items() if name not in replicated and kind.ndim > 0]
    if not names:
        raise ValueError("the step has no input with an axis that could be divided among workers")
    first = step.batch[names[0]].shape.values[0]
    for name in names[1:]:
        extent = step.batch[name].shape.values[0]
        if not structural_equal(first, extent):
            raise ValueError(
                f"{name} has the first extent {extent}, but {names[0]} has {first}: the first "
                "axis must count the examples; name inputs that all workers get whole in "
                "replicated"
            )
    return names


def _differentiate(
    split: Sequence[str],
    reduction: str,
    batch_norm: str,
    bucket_bytes: int,
    overlap: bool,
    group_size: int = 1,
) -> Callable:
    """Return the differentiation of a step's loss on several workers."""

    def differentiate(
        source: Any, variables: Sequence[relax.Var], name: str, cotangent: str | None
    ) -> tvm.IRModule:
        function = source.function
        averaged = [path for path in source.new_states.values() if _is_float(function.ret_ty, path)]
        pass_ = DataParallel(
            source.name,
            variables,
            source.loss if source.loss else 0,
            batch=function.params[source.signature.batch[split[0]]].name,
            reduction=reduction,
            batch_norm=batch_norm,
            averaged=averaged,
            seed=None
            if source.signature.seed is None
            else function.params[source.signature.seed].name,
            bucket_bytes=bucket_bytes,
            cotangent=cotangent,
            overlap=overlap,
            group_size=group_size,
        )
        return pass_.add_adjoint(source.module, name)

    return differentiate


def _is_float(kind: relax.Type, path: Sequence[int]) -> bool:
    for i in path:
        kind = kind.fields[i]
    return holds_floats(kind)


class DataParallelTrainer(ParallelTrainer):
    """A trainer whose steps run on all workers of a session; :func:`data_parallel` makes it.

    It has the methods of :class:`relax_grad.training.Trainer`. ``step`` and ``fit`` take whole
    batches, and divide them among the workers, or among the groups if these have parts of the
    parameters; the shares are as equal as possible. Predictions are computed by this process.
    ``save`` and ``export`` write the files of a trainer of one worker.

    Attributes
    ----------
    session : Session
        The workers.
    train_step : TrainStep
        The step of one worker with the whole batch.
    parallel_step : TrainStep
        The step that each worker runs, with its collectives. Its first metric is the loss of the
        worker's share.
    shards : dict[str, Shard]
        The annotations of parameters that are divided among the workers of a group, each with its
        axis.
    own_losses : list[float]
        The loss of each worker's share in the last step.
    communication : list[Communication]
        The collectives of each worker in the last step: ``sent`` bytes, ``seconds``, the seconds
        that it ``waited``, and the share that computations have ``hidden``.
    """

    _has_own_loss = True

    def __init__(
        self,
        step: TrainStep,
        parallel: TrainStep,
        session: Session,
        split: list[str],
        parts: Parts | None,
        sharing: int,
        check_every: int,
        has_local_norms: bool,
        **options: object,
    ):
        self._split = split
        self._has_local_norms = has_local_norms
        self._group_size = 1 if parts is None else session.num_workers // session.num_groups
        self.shards = {} if parts is None else parts.shards
        if parts is None:
            states = [
                [None, 1, sharing] if sharing > 1 and is_shared(name) else None
                for name in step.optimizer_state
            ]
            layouts = {"optimizer_state": states}
        else:
            layouts = parts.layouts()
        super().__init__(step, parallel, session, layouts, check_every, **options)
        # The others depend on the number of examples of a worker.
        self._variants.main.ranges = tuple(
            input_range
            for input_range in self._variants.main.ranges
            if isinstance(input_range.extent, int)
            and (
                input_range.input not in self._split or input_range.slices[:1] in ((), ((0, 0, 1),))
            )
        )

    def _described(self, name: str, array: np.ndarray) -> list:
        if name not in self._split:
            return [list(array.shape), str(array.dtype), None]
        counts = shares(array.shape[0], self._replicas)
        ends = np.cumsum(counts).tolist()
        ranges = [[end - count, end] for end, count in zip(ends, counts, strict=True)]
        ranges = [bounds for bounds in ranges for _ in range(self._group_size)]
        return [list(array.shape[1:]), str(array.dtype), ranges]

    @property
    def _replicas(self) -> int:
        """The number of shares of a batch."""
        return self.session.num_workers // self._group_size

    def step(self, *batch: object, lr: float | None = None, **others: object) -> StepResult:
        try:
            return super().step(*batch, lr=lr, **others)
        except FloatingPointError as error:
            wrong = [rank for rank, loss in enumerate(self.own_losses) if not math.isfinite(loss)]
            if not wrong:
                raise
            rank = wrong[0]
            cause = f"its loss is {self.own_losses[rank]}: {error}"
            raise NonFiniteLoss(rank, self.session.hosts[rank], cause) from None

    def _batch(self, batch: Sequence, others: Mapping) -> tuple[Any, list[tvm.runtime.Tensor]]:
        """Check a whole batch; the types of the step are for a worker's share."""
        types, replicas = self.train_step.batch, self._replicas
        whole = {name: self._whole(name, kind) for name, kind in types.items()}
        tensors = self._tensors(self._variants.main, whole, self._named(whole, batch, others))
        first = tensors[list(types).index(self._split[0])]
        if int(first.shape[0]) < replicas:
            unit = "workers" if self._group_size == 1 else "groups"
            raise ValueError(
                f"a batch must have an example for each of the {replicas} {unit}, but it has "
                f"{int(first.shape[0])}"
            )
        return self._variants.main, tensors

    def _check_extents(self, variant: Any) -> None:
        super()._check_extents(variant)
        name = str(self.train_step.batch[self._split[0]].shape.values[0])
        extents = self._allocator.extents
        if self._has_local_norms and name in extents:
            smallest = {**extents, name: extents[name] // self._replicas}
            for check in variant.checks:
                check.check(smallest)

    def _whole(self, name: str, kind: relax.TensorType) -> relax.TensorType:
        extents = list(kind.shape.values)
        if name in self._split and hasattr(extents[0], "value"):
            extents[0] = int(extents[0]) * self._replicas
        return relax.TensorType(extents, dtype_of(kind))


type(Trainer).of_session = staticmethod(data_parallel)


class NonFiniteLoss(WorkerError, FloatingPointError):
    """The loss of a worker is infinite or NaN. Everything is as before the step, and the session
    goes on."""


__all__ = ["DataParallelTrainer", "NonFiniteLoss", "data_parallel"]
