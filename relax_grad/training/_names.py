"""Remedies in errors for what trainers of other libraries have and take."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

#: What to write instead of an attribute of torch.nn.Module, Lightning or Keras.
_REMEDIES = {
    **dict.fromkeys(("model", "module"), "imported.copy_to(model, trainer.params) updates it"),
    **dict.fromkeys(("parameters", "named_parameters", "weights"), "trainer.params has copies"),
    "state_dict": "trainer.values has the tensors by names, and trainer.save(path) writes a state",
    "load_state_dict": "write trainer.load(path), or Trainer(step, values=values)",
    "train": "write trainer.fit(loader, epochs=3), or trainer.step(*batch)",
    "eval": "trainer.predict(x) computes in evaluation mode",
    "forward": "write trainer.predict(x)",
    "compile": "Trainer(step) has compiled the step",
    **dict.fromkeys(("validate", "test", "score"), "write trainer.evaluate(loader, metrics)"),
    **dict.fromkeys(
        ("optimizer", "zero_grad", "backward"),
        "trainer.step(*batch) computes the gradients and updates the parameters",
    ),
    **dict.fromkeys(("to", "cuda", "cpu"), "a trainer runs on the CPU: target= of Trainer is one"),
}


class NamesElsewhere:
    """Errors for attributes that trainers of other libraries have."""

    if not TYPE_CHECKING:  # a checker of types should refuse unknown attributes

        def __getattr__(self, name: str) -> object:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            remedy = _REMEDIES.get(name)
            raise AttributeError(f"{message}; {remedy}" if remedy else message, name=name, obj=self)


def of_file(values: object) -> str:
    """Return the remedy for a path where values are expected."""
    if not isinstance(values, str | os.PathLike):
        return ""
    return "; read the file: safetensors.numpy.load_file(path), or trainer.load(path)"


def of_groups(optimizer: object) -> str:
    """Return the remedy for groups of parameters as ``torch.optim`` takes them."""
    if not isinstance(optimizer, list | tuple):
        return ""
    return '; groups have patterns: {"*.bias": AdamW(weight_decay=0.0), "*": AdamW(lr=0.01)}'
