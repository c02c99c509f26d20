"""The half precision in which a training step computes products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import tvm

from .._validation import described
from ..transform import Autocast

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def half_of(precision: object) -> str | None:
    """Return the dtype of the argument ``precision`` of :func:`train_step`; None if it is None."""
    if precision is None:
        return None
    if not isinstance(precision, str) or precision not in _DTYPES:
        raise ValueError(
            f'precision must be "bf16", "fp16" or None, but it is {described(precision)}'
            f"{_remedy(str(precision))}"
        )
    return _DTYPES[precision]


def _remedy(given: str) -> str:
    """Return the spelling that was meant, or the default."""
    for known, dtype in _DTYPES.items():
        if dtype in given:
            return f': write precision="{known}"'
    return "; float32 is the default"


def under_autocast(model: object, dtype: str | None) -> tuple[object, str | None]:
    """Return the import of a PyTorch module within ``torch.autocast``, and any other model as it
    is, with the dtype that its functions still lack."""
    again = getattr(model, "_under_autocast", None)
    imported = again(dtype) if again is not None and dtype is not None else None
    return (model, dtype) if imported is None else (imported, None)


def with_products_in(dtype: str, module: tvm.IRModule, names: Iterable[str]) -> tvm.IRModule:
    """Return a module with the products of some functions in a half precision."""
    # TVM's decorator makes a pass of the class.
    return cast(Any, Autocast(dtype, sorted(set(names))))(module)
