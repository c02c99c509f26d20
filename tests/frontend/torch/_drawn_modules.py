"""Modules drawn from :mod:`._drawn_blocks`, trained by a ``Trainer`` and wrapped, against
PyTorch.

Batches have drawn sizes, also one row, with whole numbers, which have ties, with NaN and
infinities. Everything that PyTorch has after each step is compared: losses, gradients, parameters,
buffers and errors.

Batch normalization of equal rows returns rounding errors, and their signs select the slopes of a
``leaky_relu`` after it. A difference is allowed where PyTorch's own result changes as much when its
inputs and state are scaled by a few units in the last place, which keeps ties.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch_models import close, tensor_of

from relax_grad.frontend.torch import from_module, wrap
from relax_grad.training import SGD, Adam, AdamW, Trainer, train_step

from ._drawn_blocks import KINDS, Dense, Layer, Missing

WIDTH = 4

#: Optimizers of relax_grad and of PyTorch.
OPTIMIZERS = (
    (lambda: SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (
        lambda: SGD(0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    (lambda: Adam(0.01, eps=1e-3), lambda p: torch.optim.Adam(p, 0.01, eps=1e-3)),
    (lambda: AdamW(0.01, eps=1e-3), lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3)),
)

#: Options of a step, of which each has two.
OPTIONS = (
    *({"accumulate": 2}, {"clip_norm": 0.5}, {"clip_value": 0.05}, {"ema": 0.9}),
    *({"skip_nonfinite": True}, {"loss_scale": 8.0}, {"remat": "auto"}, {"outputs": True}),
)

#: Sizes of batches after the first one.
SIZES = (5, 5, 1, 2, 3, 8)


class Drawn(nn.Module):
    """Layers in a row, of which some are there twice."""

    def __init__(self, draw: random.Random, kinds: tuple[type[Layer], ...]):
        super().__init__()
        chosen = [draw.choice(kinds) for _ in range(draw.randint(1, 4))]
        layers = [kind(draw, WIDTH) for kind in chosen]
        layers.insert(draw.randint(0, len(layers)), Dense(draw, WIDTH))
        self.takes_nan = draw.random() < 0.4
        if self.takes_nan:
            layers.insert(0, Missing(draw, WIDTH))
        if draw.random() < 0.2:
            layers.append(draw.choice(layers))
        self.layers = nn.ModuleList(layers)
        self.has_fixed_rows = any(layer.form in layer.fixed for layer in layers)
        self.form = draw.choice(["tensor", "tuple", "dict"])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.form == "tensor":
            return x
        return (x, x.mean(0)) if self.form == "tuple" else {"rows": x, "squares": x * x}


def result_of(output) -> torch.Tensor:
    """Return the rows in the output of a module."""
    if isinstance(output, torch.Tensor):
        return output
    return output["rows"] if isinstance(output, dict) else output[0]


def loss_of(output, target):
    """Return a loss of the output of a module."""
    rows = result_of(output)
    return nn.functional.smooth_l1_loss(rows, target) + (rows * target).tanh().mean()


def batch_of(draw: random.Random, size: int, dtype: torch.dtype, kind: str) -> tuple:
    """Return inputs of a kind and targets."""
    x, y = torch.randn(size, WIDTH, dtype=dtype), torch.randn(size, WIDTH, dtype=dtype)
    if kind == "whole":
        x = x.mul(2).round()
    elif kind == "equal":
        x = x[:1].round().expand(size, -1).clone()
    elif kind in ("nan", "infinite"):
        for _ in range(draw.randint(1, 3)):
            value = torch.nan if kind == "nan" else draw.choice([torch.inf, -torch.inf])
            x[draw.randrange(size), draw.randrange(WIDTH)] = value
    return x, y


def drawn(seed: int, kinds=None) -> tuple[random.Random, Drawn, torch.dtype]:
    """Return a generator, a drawn module and its dtype."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = Drawn(draw, tuple(kinds or KINDS))
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    return draw, module.to(dtype), dtype


def _kinds(draw: random.Random, module: Drawn) -> Iterator[str]:
    """Yield kinds of batches."""
    kinds = ["plain", "plain", "whole", "equal", *(["nan", "nan"] if module.takes_nan else [])]
    while True:
        yield draw.choice(kinds) if draw.random() < 0.95 else draw.choice(["nan", "infinite"])


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-7 if dtype == torch.float64 else 2e-3


def _scaled(module: nn.Module, factor: float) -> None:
    """Scale the floating-point parameters and buffers of a module."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(factor)


def _spread(run: Callable[[float], dict], wanted: dict) -> dict[str, float]:
    """Return how far PyTorch's results are from ``wanted`` when ``run`` scales inputs and state."""
    dtype = next(t.dtype for t in wanted.values() if t.is_floating_point())
    spread = dict.fromkeys(wanted, 0.0)
    for count in (-4, -3, -2, -1, 1, 2, 3, 4):
        for name, tensor in run(1 + 8 * count * torch.finfo(dtype).eps).items():
            spread[name] = max(spread[name], _difference(tensor, wanted[name]))
    return spread


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape; NaN for NaN in one of them."""
    first, second = first.detach().double(), second.detach().double()
    is_same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(is_same, 0, (first - second).abs()).max())


def _agree(where: str, own: dict, wanted: dict, tolerance: float, run: Callable) -> bool:
    """Assert that results agree; return False where rounding decides about the difference."""
    assert own.keys() == wanted.keys(), f"{where}: {[*own]}, but PyTorch has {[*wanted]}"
    far = {}
    for name, tensor in wanted.items():
        with contextlib.suppress(AssertionError):
            close(name, [own[name]], [tensor], tolerance)
            continue
        far[name] = tensor
    spread = _spread(run, wanted) if far else {}
    for name, tensor in far.items():
        is_like = own[name].shape == tensor.shape and own[name].dtype == tensor.dtype
        allowed = 4 * spread[name] if is_like and math.isfinite(spread[name]) else 0
        if not (allowed and _difference(own[name], tensor) <= allowed):
            close(f"{where}: {name}", [own[name]], [tensor], tolerance)
    return not far


class _Reference:
    """The training of a module in PyTorch, with the options of a step."""

    def __init__(self, module: Drawn, optimizer: Callable, options: dict):
        self.module, self.options = module, options
        self.params = {k: p for k, p in module.named_parameters() if p.requires_grad}
        self.optimizer = optimizer(self.params.values())
        self.sums: dict[str, torch.Tensor] = {}
        self.count = 0
        self.averages = {k: p.detach().clone() for k, p in self.params.items()}

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        """Return the loss, or None if the step is skipped."""
        options, module = self.options, self.module
        before = copy.deepcopy(module.state_dict())
        try:
            loss = loss_of(module(x), y)
        except Exception:
            module.load_state_dict(before)
            raise
        # A custom gradient need not be linear, so that the scale of the loss shows.
        scale = options.get("loss_scale", 1.0)
        made = torch.autograd.grad(loss * scale, [*self.params.values()], allow_unused=True)
        gradients = {
            k: torch.zeros_like(self.params[k]) if g is None else g / scale
            for k, g in zip(self.params, made, strict=True)
        }
        is_finite = all(bool(g.isfinite().all()) for g in gradients.values())
        if not loss.isfinite() or (options.get("skip_nonfinite") and not is_finite):
            module.load_state_dict(before)
            return None
        number = options.get("accumulate", 1)
        for key, gradient in gradients.items():
            self.sums[key] = self.sums.get(key, 0) + gradient / number
        self.count += 1
        if self.count % number == 0:
            self._update()
        return float(loss.detach())

    def _update(self) -> None:
        for key, param in self.params.items():
            param.grad = self.sums[key]
        if "clip_value" in self.options:
            nn.utils.clip_grad_value_(self.params.values(), self.options["clip_value"])
        if "clip_norm" in self.options:
            nn.utils.clip_grad_norm_(self.params.values(), self.options["clip_norm"])
        self.optimizer.step()
        self.sums = {}
        decay = self.options.get("ema")
        if decay is not None:
            for key, param in self.params.items():
                self.averages[key].mul_(decay).add_(param.detach(), alpha=1 - decay)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers."""
        module = self.module
        both = (*module.named_parameters(), *module.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in both}

    def results(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> dict:
        """Take a step from a scaled state, and return the loss and the state."""
        _scaled(self.module, factor)
        loss = self.step(x * factor, y)
        losses = {} if loss is None else {"loss": torch.tensor(loss, dtype=x.dtype)}
        return losses | self.state()


def check_training(seed: int, kinds=None, batches: int = 5) -> None:
    """Assert that a drawn module trains as in PyTorch."""
    draw, module, dtype = drawn(seed, kinds)
    first, second = draw.sample(OPTIONS, 2)
    options = {**first, **second}
    ours, other = draw.choice(OPTIMIZERS)
    if draw.random() < 0.2:
        draw.choice(list(module.parameters())).requires_grad_(False)
    x, y = batch_of(draw, 5, dtype, "plain")
    imported = from_module(module, (x,), loss=loss_of, targets=(y,))
    module = copy.deepcopy(module).train()
    if not imported.params:
        return
    trainer = Trainer(train_step(imported, ours(), **options), on_nan="skip")
    reference = _Reference(module, other, options)
    tolerance, kinds_of = _tolerance(dtype), _kinds(draw, module)
    for place in range(batches):
        size = 5 if place == 0 or module.has_fixed_rows else draw.choice(SIZES)
        kind = next(kinds_of)
        x, y = batch_of(draw, size, dtype, kind)
        where, before = f"batch {place} of {size} rows ({kind})", copy.deepcopy(reference)
        own = {}
        try:
            wanted = reference.results(x, y)
        except ValueError as error:
            with pytest.raises(ValueError, match=_words(error)):
                trainer.step(x, y)
            wanted = reference.state()
        else:
            loss = trainer.step(x, y).loss
            own = {"loss": torch.tensor(loss, dtype=dtype)} if "loss" in wanted else {}
        own |= {key: tensor_of(value) for key, value in trainer.values.items()}
        # A name for each tensor, of which the trainer has one.
        wanted = {key: wanted[key] for key in own}

        def beside(factor, before=before, x=x, y=y, wanted=wanted):
            results = copy.deepcopy(before).results(x, y, factor)
            return {key: results.get(key, wanted[key]) for key in wanted}

        if not _agree(where, own, wanted, tolerance, beside):
            return  # the next steps would begin at different values
    for key, average in reference.averages.items() if "ema" in options else ():
        own = tensor_of(trainer.optimizer_state[f"ema/{key}"])
        close(f"average of {key}", [own], [average], tolerance)
    size = 5 if module.has_fixed_rows else draw.choice(SIZES)
    x, _ = batch_of(draw, size, dtype, next(kinds_of))
    module.eval()
    try:
        with torch.no_grad():
            wanted = result_of(module(x))
    except ValueError as error:
        with pytest.raises(ValueError, match=_words(error)):
            trainer.predict(x)
        return
    own = pytree.tree_leaves(trainer.predict(x))[0]
    close(f"prediction of {size} rows", [torch.as_tensor(own)], [wanted], tolerance)


def _words(error: Exception) -> str:
    """Return a pattern of our message for an error of PyTorch."""
    return "more than 1 value|one value|2 rows|rows"


def check_wrapped(seed: int, kinds=None, actions: int = 7) -> None:
    """Assert that a drawn module has the results, gradients and buffers of PyTorch when wrapped,
    while a loop changes it."""
    draw, module, dtype = drawn(seed, kinds)
    x, _ = batch_of(draw, 5, dtype, "plain")
    other = copy.deepcopy(module)
    is_symbolic = draw.random() < 0.6 and not module.has_fixed_rows
    axes = {"x": {0: "batch"}} if is_symbolic else None
    wrapped, tolerance = wrap(module, (x,), dynamic_shapes=axes), _tolerance(dtype)
    kinds_of = _kinds(draw, module)
    log = []
    for _ in range(actions):
        action = draw.choice(["train", "train", "train", "evaluate", "change", "copy", "freeze"])
        size = draw.choice(SIZES) if is_symbolic else 5
        kind = next(kinds_of)
        log.append(f"{action} {size} {kind}")
        x, y = batch_of(draw, size, dtype, kind)
        pair = wrapped, other
        if action == "change":
            _change(draw, wrapped, other)
        elif action == "copy":
            wrapped = copy.deepcopy(wrapped)
            wrapped.load_state_dict(other.state_dict())
        elif action == "freeze":
            place = draw.randrange(len(list(other.parameters())))
            for part in pair:
                param = list(part.parameters())[place]
                param.requires_grad_(not param.requires_grad)
        else:
            is_training = action == "train"
            has_input = draw.random() < 0.3
            before = copy.deepcopy(other)
            wanted = _outcome(other, x, y, is_training, has_input)
            own = _outcome(wrapped, x, y, is_training, has_input)
            if isinstance(wanted, Exception):
                assert isinstance(own, type(wanted)), f"{log}: {own!r}, but PyTorch: {wanted!r}"
                continue
            if isinstance(own, Exception):
                raise own
            own = own | dict(wrapped.named_buffers())
            wanted = wanted | dict(other.named_buffers())

            def beside(
                factor, before=before, x=x, y=y, is_training=is_training, has_input=has_input
            ):
                module = copy.deepcopy(before)
                _scaled(module, factor)
                results = _outcome(module, x * factor, y, is_training, has_input)
                return results | dict(module.named_buffers())

            if not _agree(str(log), own, wanted, tolerance, beside):
                wrapped.load_state_dict(other.state_dict())
        buffers = dict(wrapped.named_buffers())
        for key, buffer in other.named_buffers():
            close(f"{log}: {key}", [buffers[key]], [buffer], tolerance)
    if draw.random() < 0.3:
        _check_threads(draw, wrapped, other, dtype, tolerance)


def _change(draw: random.Random, wrapped: nn.Module, other: nn.Module) -> None:
    """Change an attribute or a buffer of a layer of both modules."""
    layers = [layer for layer in other.layers if layer.changes]
    if layers:
        layer = draw.choice(layers)
        change = draw.choice(layer.changes)
        place = list(other.layers).index(layer)
        for part in (wrapped, other):
            with torch.no_grad():
                change(part.layers[place])


def _outcome(module: nn.Module, x, y, is_training: bool, has_input: bool) -> dict | Exception:
    """Return what a step gives, or the error; parameters take a step of gradient descent."""
    module.train(is_training)
    before = copy.deepcopy(module.state_dict())
    x = x.clone().requires_grad_(has_input)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if not is_training:
                with torch.no_grad():
                    return {"output": result_of(module(x))}
            output = module(x)
        except (ValueError, RuntimeError) as error:
            module.load_state_dict(before)
            return error
    module.zero_grad()
    results = {"output": result_of(output).detach()}
    loss = loss_of(output, y)
    if loss.requires_grad:
        loss.backward()
    results |= {k: p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
    if x.grad is not None:
        results["x"] = x.grad
    with torch.no_grad():
        for param in module.parameters():
            if param.grad is not None and param.grad.isfinite().all():
                param -= 0.05 * param.grad
    return results


def _check_threads(draw, wrapped, other, dtype, tolerance) -> None:
    wrapped.eval(), other.eval()
    batches = [batch_of(draw, 5, dtype, "plain")[0] for _ in range(3)]
    before = copy.deepcopy(other.state_dict())

    def run(x):
        with torch.no_grad():
            return result_of(wrapped(x))

    with torch.no_grad():
        wanted = []
        for x in batches:
            wanted.append(result_of(other(x)))
            other.load_state_dict(before)
    if any(not torch.equal(before[k], v) for k, v in other.state_dict().items()):
        return
    wrapped.load_state_dict(before)
    if _writes(other, batches[0]):
        return  # each call would change what the others read
    with ThreadPoolExecutor(3) as pool:
        close("threads", list(pool.map(run, batches)), wanted, tolerance)


def _writes(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether an evaluation changes buffers."""
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module(x)
    after = module.state_dict()
    changed = any(not torch.equal(before[key], value) for key, value in after.items())
    module.load_state_dict(before)
    return changed
