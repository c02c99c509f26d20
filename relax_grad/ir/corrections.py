"""Corrections of functions that TVM writes in Python."""

from __future__ import annotations

import functools

from tvm import relax
from tvm.relax.training.optimizer import Optimizer

_set_params_and_dtype = Optimizer._set_params_and_dtype


@functools.wraps(_set_params_and_dtype)
def _set_named_dtype(
    self: relax.training.optimizer.Optimizer, params: relax.Var | list[relax.Var]
) -> None:
    """Let the dtype of an optimizer be a string, as its documentation says.

    TVM keeps the type of the parameters there, from which NumPy 2.3 and later make no dtype: Adam
    cannot make its state.
    """
    _set_params_and_dtype(self, params)
    self.dtype = str(getattr(self.dtype, "dtype", self.dtype))


def install() -> None:
    """Replace the functions that are at fault."""
    Optimizer._set_params_and_dtype = _set_named_dtype


def uninstall() -> None:
    """Restore TVM's functions."""
    if Optimizer._set_params_and_dtype is _set_named_dtype:
        Optimizer._set_params_and_dtype = _set_params_and_dtype
