"""Optimizers: the update of one parameter as Relax expressions, with the hyperparameters of ``torch.optim``.

The learning rate and the weight decay are arguments of the compiled step. The values here are their defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax
from tvm.relax import op

from ._optimizer import Optimizer, Update, constant

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

    def _check(self):
        super()._check()
        self._check_not_negative("momentum")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("SGD: nesterov requires a positive momentum and no dampening")

    def slots(self):
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def update(self, given):
        change, slots = given.decayed(self.weight_decay != 0), {}
        if self.momentum:
            old = op.multiply(given.slots["momentum_buffer"], given.const(self.momentum))
            if self.dampening:
                # PyTorch does not dampen the first gradient.
                share = given.scalar(
                    "share",
                    lambda: op.where(
                        op.equal(given.step, constant(1.0)),
                        constant(1.0),
                        constant(1 - self.dampening),
                    ),
                )
                buffer = given.emit(op.add(old, op.multiply(change, share)))
            else:
                buffer = given.emit(op.add(old, change))
            slots["momentum_buffer"] = buffer
            change = buffer
            if self.nesterov:
                ahead = op.multiply(buffer, given.const(self.momentum))
                change = op.add(given.decayed(self.weight_decay != 0), ahead)
        return given.emit(op.subtract(given.param, op.multiply(change, given.rate()))), slots


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
        Whether to use the largest second moment so far.
    maximize : bool
        Whether to maximize the loss.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False

    def _check(self):
        super()._check()
        _check_betas(self)

    def slots(self):
        more = {"max_exp_avg_sq": 0.0} if self.amsgrad else {}
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0, **more}

    def _prepared(self, given: Update) -> tuple[relax.Expr, relax.Expr]:
        """Return the parameter and the gradient after weight decay."""
        return given.param, given.decayed(self.weight_decay != 0)

    def update(self, given):
        param, gradient = self._prepared(given)
        mean, square, slots = _moments(given, gradient, self.betas)
        if self.amsgrad:
            square = given.emit(op.maximum(given.slots["max_exp_avg_sq"], square))
            slots["max_exp_avg_sq"] = square
        size = given.scalar("step_size", lambda: op.divide(given.lr, given.unbiased(self.betas[0])))
        root = given.scalar("root", lambda: op.sqrt(given.unbiased(self.betas[1])))
        scale = op.add(op.divide(op.sqrt(square), root), given.const(self.eps))
        change = op.multiply(op.divide(mean, scale), size)
        return given.emit(op.subtract(param, change)), slots


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

    def _prepared(self, given):
        return given.shrunk(self.weight_decay != 0), given.gradient


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

    def _check(self):
        super()._check()
        self._check_not_negative("lr_decay", "initial_accumulator_value")

    def slots(self):
        return {"sum": self.initial_accumulator_value}

    def update(self, given):
        gradient = given.decayed(self.weight_decay != 0)
        total = given.emit(op.add(given.slots["sum"], op.multiply(gradient, gradient)))

        def rate():
            before = op.subtract(given.step, constant(1.0))
            slowed = op.add(constant(1.0), op.multiply(before, constant(self.lr_decay)))
            return op.divide(given.lr, slowed)

        size = given.scalar("step_size", rate) if self.lr_decay else given.rate()
        scale = op.add(op.sqrt(total), given.const(self.eps))
        change = op.multiply(op.divide(gradient, scale), size)
        return given.emit(op.subtract(given.param, change)), {"sum": total}


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

    def _check(self):
        super()._check()
        self._check_shares(alpha=self.alpha)
        self._check_not_negative("momentum")

    def slots(self):
        return {
            "square_avg": 0.0,
            **({"grad_avg": 0.0} if self.centered else {}),
            **({"momentum_buffer": 0.0} if self.momentum else {}),
        }

    def update(self, given):
        gradient = given.decayed(self.weight_decay != 0)
        square = given.mixed(given.slots["square_avg"], op.multiply(gradient, gradient), self.alpha)
        slots, variance = {"square_avg": square}, square
        if self.centered:
            mean = given.mixed(given.slots["grad_avg"], gradient, self.alpha)
            slots["grad_avg"] = mean
            variance = op.subtract(square, op.multiply(mean, mean))
        scale = op.add(op.sqrt(variance), given.const(self.eps))
        change = op.divide(gradient, scale)
        if self.momentum:
            old = op.multiply(given.slots["momentum_buffer"], given.const(self.momentum))
            change = given.emit(op.add(old, change))
            slots["momentum_buffer"] = change
        return given.emit(op.subtract(given.param, op.multiply(change, given.rate()))), slots


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

    def _check(self):
        super()._check()
        _check_betas(self)

    def slots(self):
        return {"exp_avg": 0.0}

    def update(self, given):
        mean = given.slots["exp_avg"]
        direction = op.sign(given.mixed(mean, given.gradient, self.betas[0]))
        new = given.mixed(mean, given.gradient, self.betas[1])
        param = given.shrunk(self.weight_decay != 0)
        change = op.multiply(direction, given.rate())
        return given.emit(op.subtract(param, change)), {"exp_avg": new}


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

    def _check(self):
        super()._check()
        _check_betas(self)

    def slots(self):
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(self, given):
        mean, square, slots = _moments(given, given.gradient, self.betas)
        first = given.scalar("first", lambda: given.unbiased(self.betas[0]))
        root = given.scalar("root", lambda: op.sqrt(given.unbiased(self.betas[1])))
        scale = op.add(op.divide(op.sqrt(square), root), given.const(self.eps))
        change = op.divide(op.divide(mean, first), scale)
        if self.weight_decay:
            rate = given.scalar("weight_decay", lambda: given.weight_decay)
            change = op.add(change, op.multiply(given.param, rate))
        change = given.emit(change)
        sizes = [given.emit(_norm(each)) for each in (given.param, change)]
        zero = given.const(0.0)
        both = op.logical_and(op.greater(sizes[0], zero), op.greater(sizes[1], zero))
        # The denominator is positive where it is used.
        ratio = op.divide(sizes[0], op.where(both, sizes[1], given.const(1.0)))
        trust = given.emit(op.multiply(op.where(both, ratio, given.const(1.0)), given.rate()))
        return given.emit(op.subtract(given.param, op.multiply(change, trust))), slots


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (Jordan et al., 2024), as ``torch.optim.Muon``: for matrices; others need another optimizer.

    The Newton-Schulz iterations are computed in the dtype of the update, where PyTorch computes them in bfloat16.

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
        ``"original"``: the learning rate times the root of ``max(1, rows / columns)``. ``"match_rms_adamw"``: times 0.2
        times the root of ``max(rows, columns)``.
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

    def _check(self):
        super()._check()
        self._check_not_negative("momentum")
        if not 0 < self.ns_steps < 100:
            raise ValueError(f"Muon: ns_steps must be from 1 to 99, but it is {self.ns_steps}")
        if self.adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(
                f'Muon: adjust_lr_fn must be "original" or "match_rms_adamw", but it is {self.adjust_lr_fn!r}'
            )

    def check_param(self, name, shape):
        if len(shape) != 2:
            raise ValueError(
                f"Muon updates matrices, but {name} has shape {tuple(shape)}; give it another optimizer by its name, "
                f'for example {{"{name}": AdamW(), "*": Muon()}}'
            )

    def slots(self):
        return {"momentum_buffer": 0.0}

    def update(self, given):
        rows, columns = (int(each) for each in given.param.ty.shape.values)
        buffer = given.mixed(given.slots["momentum_buffer"], given.gradient, self.momentum)
        change = given.mixed(given.gradient, buffer, 1 - self.momentum) if self.nesterov else buffer
        is_tall = rows > columns
        x = given.emit(op.permute_dims(change)) if is_tall else change
        size = op.maximum(_norm(x), given.const(self.eps))
        x = given.emit(op.divide(x, size))
        a, b, c = map(given.const, self.ns_coefficients)
        for _ in range(self.ns_steps):
            gram = given.emit(op.matmul(x, op.permute_dims(x)))
            square = given.emit(op.matmul(gram, gram))
            polynomial = given.emit(op.add(op.multiply(gram, b), op.multiply(square, c)))
            x = given.emit(op.add(op.multiply(x, a), op.matmul(polynomial, x)))
        change = given.emit(op.permute_dims(x)) if is_tall else x
        if self.adjust_lr_fn == "original":
            factor = math.sqrt(max(1, rows / columns))
        else:
            factor = 0.2 * math.sqrt(max(rows, columns))
        size = op.multiply(given.rate(), given.const(factor))
        param = given.shrunk(self.weight_decay != 0)
        return given.emit(op.subtract(param, op.multiply(change, size))), {
            "momentum_buffer": buffer
        }


def _moments(given: Update, gradient: relax.Expr, betas: tuple[float, float]) -> tuple:
    """Return the means of the gradient and of its square, and both as slots."""
    mean = given.mixed(given.slots["exp_avg"], gradient, betas[0])
    square = given.mixed(given.slots["exp_avg_sq"], op.multiply(gradient, gradient), betas[1])
    return mean, square, {"exp_avg": mean, "exp_avg_sq": square}


def _norm(x: relax.Expr) -> relax.Expr:
    return op.sqrt(op.sum(op.multiply(x, x)))


def _check_betas(given: Adam | Lion | LAMB) -> None:
    given._check_shares(**{f"betas[{i}]": each for i, each in enumerate(given.betas)})
