"""The description of a training step: the loss, the optimizers and the settings, and the names,
types and first values of the tensors that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import tvm
from tvm import relax

from .._validation import check_integer, described, matching
from ..ir.compat import dtype_of
from ..ir.remat import checked
from ._names import of_groups
from ._optimizer import Optimizer, rates_of
from ._scaling import FIRST_SCALE
from ._shards import Shards
from ._slots import (
    EMA,
    GOOD_STEPS,
    GRADIENT,
    LOSS_SCALE,
    LR,
    MASTER,
    STEP,
    WEIGHT_DECAY,
    Hyperparameter,
    Slot,
)
from ._source import Source
from ._tensors import computed_in, shape_of


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`train_step` after the optimizer."""

    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    loss_scale: float | str | None
    ema: float | None
    skip_nonfinite: bool
    outputs: bool
    remat: str | int | Callable | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate", check_integer("accumulate", self.accumulate, 1))
        object.__setattr__(self, "remat", checked(self.remat))
        self._check_numbers()
        for name in ("skip_nonfinite", "outputs"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, but it is {value!r}")

    def _check_numbers(self) -> None:
        names = ["clip_norm", "clip_value", "ema"]
        if not isinstance(self.loss_scale, str):
            names.append("loss_scale")
        elif self.loss_scale != "dynamic":
            raise ValueError(
                f'loss_scale must be a number or "dynamic", but it is {self.loss_scale!r}'
            )
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, but it is {value!r}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, but it is {value}")
        if self.ema is not None and self.ema >= 1:
            raise ValueError(f"ema must be below 1, but it is {self.ema}")

    @property
    def is_dynamic(self) -> bool:
        return self.loss_scale == "dynamic"

    @property
    def skips(self) -> bool:
        return self.skip_nonfinite or self.is_dynamic

    @property
    def has_budget(self) -> bool:
        """Whether recomputation has a budget in bytes."""
        return isinstance(self.remat, int)


@dataclass(frozen=True)
class Group:
    """Parameters with the same optimizer."""

    optimizer: Optimizer
    lr: str
    weight_decay: str
    names: list[str]

    @property
    def hyperparameters(self) -> dict[str, float]:
        lr, decay = rates_of(self.optimizer)
        return {self.lr: lr, **({self.weight_decay: decay} if decay else {})}


#: Adds the adjoint of a source's function: ``(source, variables, name, cotangent) -> module``. It
#: returns ``(result, gradients, own loss)``; ``cotangent`` is the name of a last parameter, or
#: None.
Differentiate = Callable[[Source, list[relax.Var], str, "str | None"], tvm.IRModule]


@dataclass(frozen=True)
class Workers:
    """The workers of a step.

    Attributes
    ----------
    differentiate : Differentiate or None
        Differentiates the loss, with the own loss of a worker as a further metric; by default
        ``Gradient`` does.
    shards : int
        The number of workers among which the optimizer's state is divided. Its tensors are then
        vectors: a worker's part of the elements, with zeros after the last ones. If parameters are
        divided, they are the workers of the same place in each group.
    divided : Collection[str] or None
        The parameters of which each worker has a part; None if the workers have no groups. The
        function takes the parts. Norms are over all parts.
    """

    differentiate: Differentiate | None = None
    shards: int = 1
    divided: Collection[str] | None = None

    @property
    def division(self) -> Shards:
        """The division of the optimizer's state."""
        return Shards(self.shards, of_peers=self.divided is not None)

    def check(self, optimizer: Optimizer, name: str) -> None:
        """Raise ValueError if the workers cannot divide a parameter, or its state."""
        if optimizer.is_elementwise:
            return
        if name in (self.divided or ()):
            raise ValueError(
                f"{name} cannot be divided among workers with {type(optimizer).__name__}, "
                "because the update of an element depends on others; use another optimizer, or "
                "leave the parameter whole"
            )
        if self.shards > 1:
            raise ValueError(
                f"the state of {type(optimizer).__name__} cannot be divided among workers, "
                f"because the update of an element of {name} depends on others; use another "
                "optimizer, or leave the state whole"
            )


@dataclass(frozen=True)
class Recipe:
    """The description of a training step.

    Attributes
    ----------
    source : Source
        The function that returns the loss.
    groups : list[Group]
        The optimizers with their parameters.
    settings : Settings
        The other arguments of :func:`train_step`.
    workers : Workers
        The workers; by default one.
    """

    source: Source
    groups: list[Group]
    settings: Settings
    workers: Workers = field(default_factory=Workers)

    @classmethod
    def of(
        cls,
        source: Source,
        optimizer: Optimizer | Mapping[str, Optimizer] | object,
        settings: Settings,
    ) -> Recipe:
        """Return the recipe for the arguments of :func:`train_step`."""
        for group, role in (
            ("params", "be trained"),
            ("states", "be a state"),
            ("frozen", "be kept"),
        ):
            for name, ty in source.types[group].items():
                if not _has_constant_shape(ty):
                    raise ValueError(
                        f"{name} must have a constant shape to {role}, because the trainer keeps "
                        f"it from step to step, but its type is {ty}; give its symbolic extents "
                        "numbers, or pass it with each batch"
                    )
        groups = _groups(optimizer, list(source.types["params"]))
        for name, ty in source.types["batch"].items() if settings.has_budget else ():
            if not _has_constant_shape(ty):
                raise ValueError(
                    f"remat: a budget needs constant extents, but the type of {name} is {ty}"
                )
        return cls(source, groups, settings)

    @property
    def hyperparameters(self) -> dict[str, float]:
        """The scalars that a step takes, with their defaults."""
        return {
            name: default
            for group in self.groups
            for name, default in group.hyperparameters.items()
        }

    @property
    def metrics(self) -> tuple[str, ...]:
        """The scalars that a step returns."""
        settings = self.settings
        return (
            *(() if self.workers.differentiate is None else ("own_loss",)),
            *(("grad_norm",) if settings.clip_norm is not None else ()),
            *(("applied",) if settings.skips else ()),
            *(("loss_scale",) if settings.is_dynamic else ()),
        )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the model that a step returns."""
        return tuple(self.source.outputs) if self.settings.outputs else ()

    @cached_property
    def slots(self) -> dict[str, tuple[relax.TensorType, float]]:
        """The tensors of the optimizer's state: the type, and the first value of the elements.

        Raises
        ------
        ValueError
            If an optimizer does not take a parameter, or workers cannot divide it.
        """
        slots = {STEP: (relax.TensorType((), "int64"), 0.0)}
        if self.settings.is_dynamic:
            slots[LOSS_SCALE] = relax.TensorType((), "float32"), FIRST_SCALE
            slots[GOOD_STEPS] = relax.TensorType((), "int64"), 0.0
        for group in self.groups:
            for name in group.names:
                slots |= self._slots_of(name, group.optimizer)
        return slots

    def _slots_of(
        self, name: str, optimizer: Optimizer
    ) -> dict[str, tuple[relax.TensorType, float]]:
        """Return the tensors of the optimizer's state for a parameter."""
        ty = self.source.types["params"][name]
        whole = relax.TensorType(ty.shape, computed_in(ty))
        optimizer.check_param(name, shape_of(ty))
        self.workers.check(optimizer, name)
        fills = {
            **optimizer.slots(),
            **({MASTER: 0.0} if computed_in(ty) != dtype_of(ty) else {}),
            **({EMA: 0.0} if self.settings.ema is not None else {}),
            **({GRADIENT: 0.0} if self.settings.accumulate > 1 else {}),
        }
        part = whole if self.workers.shards == 1 else self.workers.division.type_of_part(whole)
        return {
            str(Slot(kind, name)): (whole if kind == GRADIENT else part, fill)
            for kind, fill in fills.items()
        }


def _has_constant_shape(ty: relax.Type) -> bool:
    shape = getattr(ty, "shape", None)
    return shape is not None and all(hasattr(extent, "value") for extent in shape.values)


def _groups(optimizer: Optimizer | Mapping | object, params: list[str]) -> list[Group]:
    """Return the groups of parameters with their optimizers."""
    if isinstance(optimizer, Optimizer):
        return [Group(optimizer, LR, WEIGHT_DECAY, params)]
    if not isinstance(optimizer, Mapping) or not optimizer:
        raise TypeError(
            "optimizer must be an Optimizer of relax_grad.training, such as AdamW(lr=0.01), or a "
            f"mapping of patterns to them, but it is {described(optimizer)}{of_groups(optimizer)}"
        )
    left, groups = params, []
    for pattern, member in optimizer.items():
        if not isinstance(pattern, str) or not isinstance(member, Optimizer):
            raise TypeError(
                f"optimizer: {pattern!r} must be a pattern of names, and {member!r} an Optimizer"
            )
        names = matching("optimizer", pattern, left, "parameter", "or all have one already")
        left = [name for name in left if name not in names]
        lr, decay = (str(Hyperparameter(kind, pattern)) for kind in (LR, WEIGHT_DECAY))
        groups.append(Group(member, lr, decay, names))
    if left:
        raise ValueError(f'optimizer: no pattern matches {left[0]}; add "*" for all others')
    return groups
