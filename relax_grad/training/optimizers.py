"""Optimizers: the update of one parameter as Relax expressions, with the hyperparameters of
``torch.optim``.

The learning rate and the weight decay are arguments of the compiled step. The values here are their
defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax
from tvm.relax import op

from ._optimizer import Optimizer, Results, Update, constant
from ._tensors import shape_of

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "Optimizer",
    "RMSprop",
]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as ``torch.optim.SGD``.

    Parameters
    ----------
    lr, momentum, dampening, weight_decay : float
        The hyperparameters.
    nesterov : bool
        Whether to use Nesterov's momentum.
    maximize : bool
        Whether to maximize the loss.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    def _check(self) -> None:
        super()._check()
        self._check_not_negative("momentum")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("SGD: nesterov requires a positive momentum and no dampening")

    def slots(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def update(self, operands: Update) -> Results:
        change, slots = operands.decayed(self.weight_decay != 0), {}
        if self.momentum:
            old = op.multiply(operands.slots["momentum_buffer"], operands.const(self.momentum))
            if self.dampening:
                # PyTorch does not dampen the first gradient.
                share = operands.scalar(
                    "share",
                    lambda: op.where(
                        op.equal(operands.step, constant(1.0)),
                        constant(1.0),
                        constant(1 - self.dampening),
                    ),
                )
                buffer = operands.emit(op.add(old, op.multiply(change, share)))
            else:
                buffer = operands.emit(op.add(old, change))
            slots["momentum_buffer"] = buffer
            change = buffer
            if self.nesterov:
                ahead = op.multiply(buffer, operands.const(self.momentum))
                change = op.add(operands.decayed(self.weight_decay != 0), ahead)
        return operands.emit(
            op.subtract(operands.param, op.multiply(change, operands.rate()))
        ), slots


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), as ``torch.optim.Adam``: weight decay is added to the gradient.

    Parameters
    ----------
    lr : float
        The learning rate.
    betas : tuple[float, float]
        The decay of the means of the gradient and of its square.
    eps : float
        Is added to the denominator.
    weight_decay : float
        The weight decay.
    amsgrad : bool
        Whether to use the largest of all previous second moments.
    maximize : bool
        Whether to maximize the loss.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def _check(self) -> None:
        super()._check()
        _check_betas(self)

    def slots(self) -> dict[str, float]:
        more = {"max_exp_avg_sq": 0.0} if self.amsgrad else {}
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0, **more}

    def _prepared(self, operands: Update) -> tuple[relax.Expr, relax.Expr]:
        """Return the parameter and the gradient after weight decay."""
        return operands.param, operands.decayed(self.weight_decay != 0)

    def update(self, operands: Update) -> Results:
        param, gradient = self._prepared(operands)
        mean, square, slots = _moments(operands, gradient, self.betas)
        if self.amsgrad:
            square = operands.emit(op.maximum(operands.slots["max_exp_avg_sq"], square))
            slots["max_exp_avg_sq"] = square
        size = operands.scalar(
            "step_size", lambda: op.divide(operands.lr, operands.unbiased(self.betas[0]))
        )
        root = operands.scalar("root", lambda: op.sqrt(operands.unbiased(self.betas[1])))
        scale = op.add(op.divide(op.sqrt(square), root), operands.const(self.eps))
        change = op.multiply(op.divide(mean, scale), size)
        return operands.emit(op.subtract(param, change)), slots


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as ``torch.optim.AdamW``.

    Parameters
    ----------
    lr, betas, eps, weight_decay, amsgrad, maximize
        As for :class:`Adam`.

    Examples
    --------
    >>> from relax_grad.training import AdamW
    >>> AdamW(lr=3e-4, weight_decay=0.1).slots()
    {'exp_avg': 0.0, 'exp_avg_sq': 0.0}
    """

    weight_decay: float = 1e-2

    def _prepared(self, operands: Update) -> tuple[relax.Expr, relax.Expr]:
        return operands.shrunk(self.weight_decay != 0), operands.gradient


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, 2011), as ``torch.optim.Adagrad``.

    Parameters
    ----------
    lr : float
        The learning rate.
    lr_decay : float
        The learning rate of step t is divided by ``1 + (t - 1) * lr_decay``.
    weight_decay : float
        The weight decay.
    initial_accumulator_value : float
        The initial value of the sum of squares.
    eps : float
        Is added to the denominator.
    maximize : bool
        Whether to maximize the loss.

    Examples
    --------
    >>> from relax_grad.training import Adagrad
    >>> Adagrad(lr=0.1).slots()  # the state of a parameter, with its first values
    {'sum': 0.0}
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    def _check(self) -> None:
        super()._check()
        self._check_not_negative("lr_decay", "initial_accumulator_value")

    def slots(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def update(self, operands: Update) -> Results:
        gradient = operands.decayed(self.weight_decay != 0)
        total = operands.emit(op.add(operands.slots["sum"], op.multiply(gradient, gradient)))

        def rate() -> relax.Expr:
            before = op.subtract(operands.step, constant(1.0))
            slowed = op.add(constant(1.0), op.multiply(before, constant(self.lr_decay)))
            return op.divide(operands.lr, slowed)

        size = operands.scalar("step_size", rate) if self.lr_decay else operands.rate()
        scale = op.add(op.sqrt(total), operands.const(self.eps))
        change = op.multiply(op.divide(gradient, scale), size)
        return operands.emit(op.subtract(operands.param, change)), {"sum": total}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop (Tieleman and Hinton, 2012), as ``torch.optim.RMSprop``.

    Parameters
    ----------
    lr : float
        The learning rate.
    alpha : float
        The decay of the mean of the squared gradient.
    eps : float
        Is added to the denominator.
    weight_decay, momentum : float
        The hyperparameters.
    centered : bool
        Whether to subtract the squared mean of the gradient from the mean of its square.
    maximize : bool
        Whether to maximize the loss.

    Examples
    --------
    >>> from relax_grad.training import RMSprop
    >>> sorted(RMSprop(lr=0.01, momentum=0.9).slots())
    ['momentum_buffer', 'square_avg']
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    def _check(self) -> None:
        super()._check()
        self._check_shares(alpha=self.alpha)
        self._check_not_negative("momentum")

    def slots(self) -> dict[str, float]:
        return {
            "square_avg": 0.0,
            **({"grad_avg": 0.0} if self.centered else {}),
            **({"momentum_buffer": 0.0} if self.momentum else {}),
        }

    def update(self, operands: Update) -> Results:
        gradient = operands.decayed(self.weight_decay != 0)
        square = operands.mixed(
            operands.slots["square_avg"], op.multiply(gradient, gradient), self.alpha
        )
        slots, variance = {"square_avg": square}, square
        if self.centered:
            mean = operands.mixed(operands.slots["grad_avg"], gradient, self.alpha)
            slots["grad_avg"] = mean
            variance = op.subtract(square, op.multiply(mean, mean))
        scale = op.add(op.sqrt(variance), operands.const(self.eps))
        change = op.divide(gradient, scale)
        if self.momentum:
            old = op.multiply(operands.slots["momentum_buffer"], operands.const(self.momentum))
            change = operands.emit(op.add(old, change))
            slots["momentum_buffer"] = change
        return operands.emit(
            op.subtract(operands.param, op.multiply(change, operands.rate()))
        ), slots


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al., 2023, algorithm 2), with decoupled weight decay.

    Parameters
    ----------
    lr : float
        The learning rate.
    betas : tuple[float, float]
        The share of the old mean in the update, and in the new mean.
    weight_decay : float
        The weight decay.

    Examples
    --------
    >>> from relax_grad.training import Lion
    >>> Lion(lr=1e-4, weight_decay=0.1).slots()
    {'exp_avg': 0.0}
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def _check(self) -> None:
        super()._check()
        _check_betas(self)

    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def update(self, operands: Update) -> Results:
        mean = operands.slots["exp_avg"]
        direction = op.sign(operands.mixed(mean, operands.gradient, self.betas[0]))
        new = operands.mixed(mean, operands.gradient, self.betas[1])
        param = operands.shrunk(self.weight_decay != 0)
        change = op.multiply(direction, operands.rate())
        return operands.emit(op.subtract(param, change)), {"exp_avg": new}


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB (You et al., 2020, algorithm 2): Adam's update with the norm of the parameter.

    The trust ratio is 1 where the norm of the parameter or of the update is 0.

    Parameters
    ----------
    lr : float
        The learning rate.
    betas : tuple[float, float]
        As for :class:`Adam`.
    eps : float
        Is added to the denominator.
    weight_decay : float
        The weight decay.

    Examples
    --------
    >>> from relax_grad.training import LAMB
    >>> LAMB(lr=2e-3, weight_decay=0.01).slots()
    {'exp_avg': 0.0, 'exp_avg_sq': 0.0}
    """

    is_elementwise = False

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

    def _check(self) -> None:
        super()._check()
        _check_betas(self)

    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(self, operands: Update) -> Results:
        mean, square, slots = _moments(operands, operands.gradient, self.betas)
        first = operands.scalar("first", lambda: operands.unbiased(self.betas[0]))
        root = operands.scalar("root", lambda: op.sqrt(operands.unbiased(self.betas[1])))
        scale = op.add(op.divide(op.sqrt(square), root), operands.const(self.eps))
        change = op.divide(op.divide(mean, first), scale)
        if self.weight_decay:
            rate = operands.scalar("weight_decay", lambda: operands.weight_decay)
            change = op.add(change, op.multiply(operands.param, rate))
        change = operands.emit(change)
        sizes = [operands.emit(_norm(tensor)) for tensor in (operands.param, change)]
        zero = operands.const(0.0)
        both = op.logical_and(op.greater(sizes[0], zero), op.greater(sizes[1], zero))
        # The denominator is positive where it is used.
        ratio = op.divide(sizes[0], op.where(both, sizes[1], operands.const(1.0)))
        trust = operands.emit(
            op.multiply(op.where(both, ratio, operands.const(1.0)), operands.rate())
        )
        return operands.emit(op.subtract(operands.param, op.multiply(change, trust))), slots


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (Jordan et al., 2024), as ``torch.optim.Muon``: for matrices; others need another
    optimizer.

    The Newton-Schulz iterations are computed in the dtype of the update, where PyTorch computes
    them in bfloat16.

    Parameters
    ----------
    lr : float
        The learning rate.
    weight_decay : float
        The decoupled weight decay.
    momentum : float
        The decay of the mean of the gradient.
    nesterov : bool
        Whether to use Nesterov's momentum.
    ns_coefficients : tuple[float, float, float]
        The coefficients of the polynomial.
    eps : float
        The smallest norm that the matrix is divided by.
    ns_steps : int
        The number of iterations.
    adjust_lr_fn : str
        ``"original"``: the learning rate times the root of ``max(1, rows / columns)``.
        ``"match_rms_adamw"``: times 0.2 times the root of ``max(rows, columns)``.
    """

    is_elementwise = False

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str = "original"

    def _check(self) -> None:
        super()._check()
        self._check_not_negative("momentum")
        if not 0 < self.ns_steps < 100:
            raise ValueError(f"Muon: ns_steps must be from 1 to 99, but it is {self.ns_steps}")
        if self.adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                'Muon: adjust_lr_fn must be "original" or "match_rms_adamw", but it is '
                f"{self.adjust_lr_fn!r}"
            )

    def check_param(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            raise ValueError(
                f"Muon updates matrices, but {name} has shape {tuple(shape)}; give it another "
                "optimizer by its name, "
                f'for example {{"{name}": AdamW(), "*": Muon()}}'
            )

    def slots(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0}

    def update(self, operands: Update) -> Results:
        rows, columns = shape_of(operands.param.ty)
        buffer = operands.mixed(operands.slots["momentum_buffer"], operands.gradient, self.momentum)
        change = (
            operands.mixed(operands.gradient, buffer, 1 - self.momentum)
            if self.nesterov
            else buffer
        )
        is_tall = rows > columns
        x = operands.emit(op.permute_dims(change)) if is_tall else change
        size = op.maximum(operands.const(self.eps), _norm(x))
        x = operands.emit(op.divide(x, size))
        a, b, c = map(operands.const, self.ns_coefficients)
        for _ in range(self.ns_steps):
            gram = operands.emit(op.matmul(x, op.permute_dims(x)))
            square = operands.emit(op.matmul(gram, gram))
            polynomial = operands.emit(op.add(op.multiply(gram, b), op.multiply(square, c)))
            x = operands.emit(op.add(op.multiply(x, a), op.matmul(polynomial, x)))
        change = operands.emit(op.permute_dims(x)) if is_tall else x
        if self.adjust_lr_fn == "original":
            factor = math.sqrt(max(1, rows / columns))
        else:
            factor = 0.2 * math.sqrt(max(rows, columns))
        size = op.multiply(operands.rate(), operands.const(factor))
        param = operands.shrunk(self.weight_decay != 0)
        return operands.emit(op.subtract(param, op.multiply(change, size))), {
            "momentum_buffer": buffer
        }


def _moments(operands: Update, gradient: relax.Expr, betas: tuple[float, float]) -> tuple:
    """Return the means of the gradient and of its square, and both as slots."""
    mean = operands.mixed(operands.slots["exp_avg"], gradient, betas[0])
    square = operands.mixed(operands.slots["exp_avg_sq"], op.multiply(gradient, gradient), betas[1])
    return mean, square, {"exp_avg": mean, "exp_avg_sq": square}


def _norm(x: relax.Expr) -> relax.Expr:
    return op.sqrt(op.sum(op.multiply(x, x)))


def _check_betas(optimizer: Adam | Lion | LAMB) -> None:
    optimizer._check_shares(**{f"betas[{i}]": beta for i, beta in enumerate(optimizer.betas)})
