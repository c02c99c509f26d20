"""The memory of a training step, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import tvm
from tvm import relax

from .._validation import check_integer, described
from ..cpu.memory import planned
from ..cpu.storages import value_of
from ..ir.compat import dtype_of
from . import _export
from ._device import prepared, target_of
from ._donation import donating
from .step import TrainStep


@dataclass(frozen=True)
class Memory:
    """The bytes of a training step.

    Attributes
    ----------
    params, frozen, states, optimizer_state : int
        The tensors of each group, which a step takes.
    batch : int
        The inputs and the targets.
    results : int
        The tensors that a step returns, such as the loss, metrics and outputs. A result in the
        memory of an argument, as most new parameters, takes none.
    intermediate : int
        The storages of all other tensors that a step computes. Tensors with disjoint lifetimes
        share a storage.
    """

    params: int
    frozen: int
    states: int
    optimizer_state: int
    batch: int
    results: int
    intermediate: int

    @property
    def peak(self) -> int:
        """The bytes that one step allocates: results and intermediate tensors. ``remat`` of a step
        limits them."""
        return self.results + self.intermediate

    @property
    def total(self) -> int:
        """All bytes: of the arguments, and of the memory that a step allocates."""
        arguments = self.params + self.frozen + self.states + self.optimizer_state + self.batch
        return arguments + self.peak


def memory_of(
    step: TrainStep,
    target: tvm.target.Target | str | Mapping | None = None,
    extents: Mapping[str, int] | None = None,
    *,
    device: str | None = None,
    library: str | None = None,
) -> Memory:
    """Return the memory of a step of a :class:`Trainer`, as the pipeline ``"relax_grad"`` plans it.

    The pipeline runs up to its plan of storages. It generates and compiles no function, and nothing
    runs. With ``device="cuda"``, this is the memory on a GPU, and no GPU is needed.

    Counted are the tensors that the step takes, and all storages that it allocates. The rest of a
    process is not counted: libraries and code, the buffers within tensor functions, such as packed
    operands of matrix products and transformed tiles of convolutions, and batches that a loader
    holds. New parameters, states and slots of the optimizer take the memory of the old ones, except
    those that no loop over elements computes. On a device, the memory that CUDA and a library take
    is not counted either, and :meth:`Trainer.fit` keeps ``1 + ahead`` batches there.

    Parameters
    ----------
    step : TrainStep
        The step.
    target : tvm.target.Target or str or Mapping, optional
        A CPU; by default the processor of this machine.
    extents : Mapping[str, int], optional
        An upper bound of each symbolic extent by its name: ``{"batch": 32}``.
    device, library : str, optional
        As for :class:`Trainer`, instead of a target.

    Returns
    -------
    memory : Memory
        The bytes.

    Raises
    ------
    ValueError
        If the target is no CPU, the device is unknown, the bound of an extent is missing, or the
        step has a budget that cannot be met.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad.training import SGD, memory_of, train_step
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(y))))
    >>> memory = memory_of(train_step(bb.get(), SGD(), wrt="w"))
    >>> memory.params, memory.batch
    (12, 48)
    """
    if isinstance(getattr(step, "train_step", None), TrainStep):
        raise TypeError("step must be a result of train_step; write memory_of(trainer.train_step)")
    if not isinstance(step, TrainStep):
        raise TypeError(f"step must be a result of train_step, but it is {described(step)}")
    extents = dict(extents or {})
    for name, value in extents.items():
        extents[name] = check_integer(f"extents: the bound of {name}", value, 0, of="elements")

    def total(types: Mapping[str, relax.TensorType]) -> int:
        return sum(_bytes(ty, extents) for ty in types.values())

    if device is None or device == "cpu":
        if library is not None:
            raise ValueError(
                f'library is for a device, such as device="cuda", but it is {library!r} without one'
            )
        module, chosen = donating(step), _export.target_of(target)
    else:
        if target is not None:
            raise ValueError(f"device={device!r} has a target: leave target out")
        chosen = target_of(device)
        module = prepared(donating(step, is_chained=True), ["step"], library)
    allocated = planned(module, "step", chosen, extents)
    return Memory(
        params=total(step.params),
        frozen=total(step.frozen),
        states=total(step.states),
        optimizer_state=total(step.optimizer_state),
        batch=total(step.batch),
        results=allocated.results,
        intermediate=allocated.intermediate,
    )


def _bytes(ty: relax.TensorType, extents: Mapping[str, int]) -> int:
    count = prod(value_of(extent, extents) for extent in ty.shape.values)
    return count * tvm.DataType(dtype_of(ty)).bits // 8
