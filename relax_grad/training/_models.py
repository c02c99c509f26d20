"""The imports that a training step takes. Front ends define them, and import this part of the
package, which does not import them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import tvm
from tvm import relax


class Batch(Protocol):
    """The numbers of rows that an import takes."""

    #: That of its functions; None without one.
    rows: int | None
    #: The inputs and targets whose first axis has the rows.
    names: tuple[str, ...]
    #: The call that imports the model for ``{rows}`` rows.
    how: str

    @property
    def reason(self) -> str:
        """The reason for which the number is fixed."""

    def imported(self) -> Import | None:
        """Return the import for any number of rows; None without one."""


class Import(Protocol):
    """A model of another framework as a module of Relax.

    The last parameters of its functions are ``params``, ``frozen`` and ``states``, in this order.
    """

    module: tvm.IRModule
    inputs: Mapping[str, relax.TensorType]
    outputs: Mapping[str, relax.TensorType]
    params: Mapping[str, tvm.runtime.Tensor]
    frozen: Mapping[str, tvm.runtime.Tensor]
    states: Mapping[str, tvm.runtime.Tensor]
    _batch: Batch | None


@runtime_checkable
class TorchImport(Import, Protocol):
    """A :class:`relax_grad.frontend.torch.Imported`, whose function ``loss`` takes a seed, inputs
    and targets first."""

    targets: Mapping[str, relax.TensorType]
    aliases: Mapping[str, str]


@runtime_checkable
class OnnxImport(Import, Protocol):
    """A :class:`relax_grad.frontend.onnx.Imported`, which gets its loss from the caller of
    ``train_step``."""

    #: Whether the first parameter of its functions is a seed.
    draws: bool
    #: Whether it has a function for evaluation mode, which differs from training mode.
    _infers: bool

    def with_loss(self, loss: Callable, targets: Mapping | None = None) -> tvm.IRModule: ...

    def _with_losses(self, loss: Callable, targets: Mapping | None) -> tvm.IRModule: ...
