"""The base of optimizers, and the operands of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from numbers import Real
from typing import Protocol, cast

import numpy as np
from tvm import relax
from tvm.relax import op

from .._validation import check_integer, described

#: A rule in float64 of scalars, and in the dtype of the computation for tensors.
_SCALAR = "float64"


@dataclass(frozen=True)
class Update:
    """The operands of the update of one parameter, and its results.

    Attributes
    ----------
    emit : Callable
        Binds an expression to a variable.
    dtype : str
        The dtype of the computation: float64 for parameters in float64, float32 for others.
    name : str
        The name of the parameter.
    param, gradient : relax.Expr
        The parameter and its gradient, in ``dtype``.
    slots : Mapping[str, relax.Expr]
        The state of the optimizer for the parameter.
    lr, weight_decay, step : relax.Expr
        Scalars in float64. ``step`` counts from 1.
    shared : dict
        Scalars that the parameters of a group share, by their names.
    """

    emit: Callable[[relax.Expr], relax.Var]
    dtype: str
    name: str
    param: relax.Expr
    gradient: relax.Expr
    slots: Mapping[str, relax.Expr]
    lr: relax.Expr
    weight_decay: relax.Expr
    step: relax.Expr
    shared: dict = field(default_factory=dict)

    def const(self, value: float) -> relax.Expr:
        return relax.const(value, self.dtype)

    def scalar(self, name: str, value: Callable[[], relax.Expr]) -> relax.Expr:
        """Return a scalar in ``dtype`` that is computed in float64, once for all parameters."""
        key = (name, self.dtype)
        if key not in self.shared:
            self.shared[key] = self.emit(op.astype(value(), self.dtype))
        return self.shared[key]

    def decayed(self, decays: bool) -> relax.Expr:
        """Return the gradient of the loss with half the squared parameter times the weight
        decay."""
        if not decays:
            return self.gradient
        rate = self.scalar("weight_decay", lambda: self.weight_decay)
        return self.emit(op.add(self.gradient, op.multiply(self.param, rate)))

    def shrunk(self, decays: bool) -> relax.Expr:
        """Return the parameter after decoupled weight decay: times ``1 - lr * weight_decay``."""
        if not decays:
            return self.param
        kept = self.scalar(
            "kept", lambda: op.subtract(constant(1.0), op.multiply(self.lr, self.weight_decay))
        )
        return self.emit(op.multiply(self.param, kept))

    def mixed(self, old: relax.Expr, new: relax.Expr, share: float) -> relax.Expr:
        """Return ``share * old + (1 - share) * new``."""
        return self.emit(
            op.add(op.multiply(old, self.const(share)), op.multiply(new, self.const(1 - share)))
        )

    def rate(self) -> relax.Expr:
        return self.scalar("lr", lambda: self.lr)

    def unbiased(self, beta: float) -> relax.Expr:
        """Return ``1 - beta ** step`` in float64."""
        return op.subtract(constant(1.0), op.power(constant(beta), self.step))


Results = tuple[relax.Expr, dict[str, relax.Expr]]


@dataclass(frozen=True)
class Optimizer:
    """The base of optimizers. Subclasses have the hyperparameters as fields.

    Attributes
    ----------
    lr : float
        The default of the learning rate.
    weight_decay : float
        The default of the weight decay. With a default of 0 the step has no argument for it.
    """

    #: Whether the loss is maximized. Optimizers of ``torch.optim`` have it as a hyperparameter.
    maximize = False

    #: Whether the update of an element depends on that element alone.
    is_elementwise = True

    def __new__(cls, *arguments: object, **_: object) -> Optimizer:
        if arguments and not isinstance(arguments[0], Real):
            raise TypeError(
                f"{cls.__name__} takes hyperparameters, but its first argument is "
                f"{described(arguments[0])}; train_step gives it the parameters of the model: "
                f"train_step(imported, {cls.__name__}(lr=0.01))"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for member in fields(self):
            value = _checked(type(self).__name__, member, getattr(self, member.name))
            object.__setattr__(self, member.name, value)
        self._check()

    def _check(self) -> None:
        self._check_not_negative("lr", "weight_decay", "eps")

    def _check_not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name, 0.0)
            if value < 0:
                raise ValueError(
                    f"{type(self).__name__}: {name} must not be negative, but it is {value}"
                )

    def _check_shares(self, **shares: float) -> None:
        for name, value in shares.items():
            if not 0 <= value < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be at least 0 and below 1, but it is "
                    f"{value}"
                )

    def check_param(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the optimizer does not support parameters of a shape."""

    def slots(self) -> dict[str, float]:
        """Return the names of the tensors that the optimizer keeps for each parameter, with their
        initial values."""
        return {}

    def update(self, operands: Update) -> Results:
        """Return the new parameter and the new slots."""
        raise NotImplementedError


class _Rates(Protocol):
    lr: float
    weight_decay: float


def rates_of(optimizer: Optimizer) -> tuple[float, float]:
    """Return the learning rate and the weight decay."""
    rates = cast(_Rates, optimizer)  # fields of each optimizer, but not of their base
    return float(rates.lr), float(rates.weight_decay)


def constant(value: float) -> relax.Expr:
    """Return a constant of the rule in which scalars are computed."""
    return relax.const(value, _SCALAR)


def _checked(kind: str, member: Field, value: object) -> object:
    """Return the value of a hyperparameter as a number of Python, or raise an error if its type is
    another one."""
    expected = getattr(member.type, "__name__", member.type)
    start = f"{kind}: {member.name} must be"
    if expected == "bool":
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{start} True or False, but it is {value!r}")
        return bool(value)
    if expected == "int":
        return check_integer(f"{kind}: {member.name}", value)
    if str(expected).startswith("tuple["):
        count = str(expected).count("float")
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ValueError(f"{start} a tuple of {count} numbers, but it is {value!r}")
        return tuple(_number(start, number) for number in value)
    if expected == "float" or member.name in ("lr", "weight_decay"):
        return _number(start, value)
    return value


def _number(start: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{start} a number, but it is {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{start} finite, but it is {number}")
    return number
