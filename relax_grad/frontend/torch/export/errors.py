"""The errors of torch.export as errors of the import."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

from torch._dynamo.exc import Unsupported, UserError, UserErrorType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ....errors import UnsupportedOperatorError
from .._problems import user_line
from .._tensors import described

#: The kinds of errors of torch.export that symbolic extents make.
_SHAPE_FAULTS = {
    UserErrorType.CONSTRAINT_VIOLATION,
    UserErrorType.DYNAMIC_DIM,
    UserErrorType.INVALID_INPUT,
}


_CONTROL_FLOW = (
    "\nControl flow that depends on the values of tensors must be torch.where or torch.cond. Leave "
    "out float(), int() and .item() of tensors."
)

_SET = (
    "\nTensor.set_ gives a tensor other memory, which the import cannot follow; write the values "
    "with tensor.copy_, or assign a new tensor: self.buffer = values."
)

_OWN_VALUE = (
    "\nA call writes a buffer's own value to it, by way of another buffer. Write a copy: "
    "self.buffer.copy_(values.clone())."
)

#: PyTorch's words for faults, with the remedies: other memory, a value that does not change, a
#: conversion to NumPy, and an extent in ``dynamic_shapes`` that differs from the example's.
_REMEDIES = {
    "Encountered a set_ on a graph input": _SET,
    "torch.storage.UntypedStorage": _SET,
    "is not in the correct order or is not found": _OWN_VALUE,
    ".numpy() is not supported": "\nCompute with torch: .numpy() ends the trace.",
    "Static shape constraint": (
        '\nName the extent in dynamic_shapes, as {0: "batch"}, or fix it by batch=.'
    ),
}

#: PyTorch's words for indices and classes that are no integers, and the remedy.
_INTEGERS = re.compile(r"[Ee]xpected (?:dtype|scalar type|tensor for argument).*(?:int64|Long)")
_CLASSES = "\nIndices and classes must be integers: target.long()."


def translated(error: Exception, inputs: Mapping[str, object] | None = None) -> Exception:
    """Return the exception that says where torch.export stopped, with the examples if the trace
    failed on them."""
    if isinstance(error, (TypeError, ValueError)) and not type(error).__module__.startswith(
        "torch."
    ):
        return error
    if isinstance(error, UserError) and error.error_type in _SHAPE_FAULTS:
        reasons = str(error).partition("\n\n")[0].strip().splitlines()
        return ValueError(
            "dynamic_shapes does not fit the module or the examples (Dim is torch.export.Dim):\n  "
            + "\n  ".join(line for line in reasons if not line.startswith("Constraints violated"))
            + "\n  A write to a parameter or a buffer fixes extents, too; so do len(tensor), for "
            "which tensor.shape[0] is the remedy, and torch.func.jvp."
        )
    reason = next(iter(str(error).strip().splitlines()), "")
    line = user_line(traceback.extract_tb(error.__traceback__))
    if isinstance(error, NotImplementedError):
        known = "".join(remedy for words, remedy in _REMEDIES.items() if words in reason)
        return UnsupportedOperatorError(reason + (f"\n  at {line}" if line else "") + known)
    return UnsupportedOperatorError(
        f"torch.export cannot trace the module: {type(error).__name__}: {reason}"
        + (f"\n  at {line}" if line else "")
        + _remedy_of(error, reason, inputs)
        + (_CLASSES if _INTEGERS.search(reason) else "")
    )


def _remedy_of(error: Exception, reason: str, inputs: Mapping[str, object] | None) -> str:
    if _depends_on_values(error):
        return _CONTROL_FLOW
    known = (remedy for words, remedy in _REMEDIES.items() if words in reason)
    return next(known, "") or _examples(inputs)


def _depends_on_values(error: Exception) -> bool:
    """Tell whether a trace stopped at a decision or a shape that depends on values."""
    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, (*kinds, Unsupported)) or "data-dependent" in str(error)


def _examples(inputs: Mapping[str, object] | None) -> str:
    """Return the sentence that names the example arguments."""
    if not inputs:
        return ""
    shown = "; ".join(f"{name} is {described(example)}" for name, example in inputs.items())
    return f"\nThe examples must be arguments that the module takes in PyTorch, too: {shown}."
