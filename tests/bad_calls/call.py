"""An invalid call of a public function, and arguments of such calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from programs import build
from tvm import relax, te
from tvm.relax import op


@dataclass(frozen=True)
class BadCall:
    """A call that must fail, and the expected error."""

    function: str
    what: str
    call: Callable[[], object]
    error: type | tuple[type, ...]
    message: str | None

    @property
    def name(self) -> str:
        return f"{self.function}: {self.what}"


X = relax.Var("x", relax.TensorType((3,), "float32"))
ONES = [np.ones(3)]
MODULE = build([relax.Var("x", relax.TensorType((3,), "float32"))], lambda _, x: op.sum(op.exp(x)))

_PLACEHOLDER = te.placeholder((3,), "float32", "x")
SQUARE = te.create_prim_func(
    [_PLACEHOLDER, te.compute((3,), lambda i: _PLACEHOLDER[i] * _PLACEHOLDER[i], "y")]
)

#: Values that are no string, no module and no function.
OTHERS = {"None": None, "a number": 3, "a list": [None], "a tensor": X, "an array": np.ones(3)}
