"""The metaclass of :class:`Trainer`, whose calls make trainers of one or several workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tvm

from .._validation import described


def remedy(step: object) -> str:
    """Return the call that makes a trainer of what was given instead of a step."""
    if hasattr(step, "named_parameters"):  # a module of PyTorch
        imported = "from_module(model, (x,), loss=loss, targets=(y,))"
        return f"Trainer(train_step({imported}, AdamW(lr=0.01)))"
    if isinstance(step, tvm.IRModule):
        return 'Trainer(train_step(module, AdamW(lr=0.01), wrt=["weight"]), values=...)'
    return "Trainer(train_step(imported, AdamW(lr=0.01)))"


class TrainerType(type):
    """The metaclass of :class:`Trainer` and its subclasses."""

    #: Makes the trainer of a step and a session; ``relax_grad.distributed`` sets it.
    of_session: Callable[..., object] | None = None

    def __call__(cls, *arguments: Any, distributed: object = None, **options: Any) -> Any:
        is_trainer = not any(isinstance(base, TrainerType) for base in cls.__bases__)
        if is_trainer and len(arguments) > 1:
            raise TypeError(
                f"Trainer takes one step, but it got {', '.join(map(described, arguments))}; write "
                f"{remedy(arguments[0])}"
            )
        if distributed is None:
            return super().__call__(*arguments, **options)
        if not is_trainer:
            raise TypeError(f"distributed is for Trainer; {cls.__name__} has a session already")
        make = TrainerType.of_session
        if make is None:
            raise TypeError(
                "distributed must be a result of relax_grad.distributed.session, but it is "
                f"{distributed!r}"
            )
        return make(*arguments, session=distributed, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]  # cls is a class itself
        return whole.replace(parameters=list(whole.parameters.values())[1:])
