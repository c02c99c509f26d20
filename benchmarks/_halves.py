"""Kernels in bfloat16 beside float32: rows of the benchmark, in relax_grad and in PyTorch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import _steps
import ml_dtypes
import numpy as np
import torch
import tvm
from rows import ROWS, Row
from tvm import relax

import relax_grad

#: The rows: products of all forms, convolutions and their gradients, volumes, attention, a
#: recurrent layer.
KERNELS = (
    *("NN 1024 x 1024 x 1024", "NT 1024 x 3072 x 768", "TN 1024 x 768 x 3072"),
    *(f"{kind} 8x64x56² -> 64, 3x3" for kind in ("forward", "data gradient", "weight gradient")),
    *("forward 8x256x14² -> 1024, 1x1", "data gradient 8x256x56² -> 512, 1x1, stride 2"),
    *("forward 4x16x16x28x28 -> 32, 3x3x3", "weight gradient 4x16x16x28x28 -> 32, 3x3x3"),
    *("attention 2x512x12x64", "attention and gradients 2x512x12x64"),
    *("attention, causal and gradients 1x2048x4x128", "LSTM and gradients 32x32x128 -> 256"),
)

#: The largest difference of results in bfloat16, relative to the largest element of each.
_TOLERANCE = 0.06


def rows(text: str = "") -> list[Row]:
    """Return the rows with a text in their names."""
    found = {row.name: row for row in ROWS if row.name in KERNELS}
    missing = set(KERNELS) - set(found)
    assert not missing, f"the benchmark has no rows {', '.join(sorted(missing))}"
    return [found[name] for name in KERNELS if text in name]


def contestants(row: Row, *, compiled: bool = True) -> dict[str, Callable[[], object]]:
    """Return a call of a row for each column, after a comparison of the results in bfloat16.

    A column that PyTorch cannot run is missing. ``compiled`` includes ``torch.compile``.
    """
    exact = row.arrays()
    halves = [x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for x in exact]
    runs = {
        "relax_grad": _by_relax_grad(row, exact),
        "PyTorch": _by_torch(row.torch, exact, is_half=False),
        "relax_grad, bfloat16": _by_relax_grad(row, halves),
        "PyTorch, bfloat16": _by_torch(row.torch, halves, is_half=True),
    }
    if compiled:
        function = _steps.compiled(row.torch)
        runs["torch.compile, bfloat16"] = _by_torch(function, halves, is_half=True)
    runs = {name: run for name, run in runs.items() if name.startswith("relax") or _runs(run)}
    if "PyTorch, bfloat16" in runs and not row.is_random:
        pair = [runs[f"{library}, bfloat16"]() for library in ("relax_grad", "PyTorch")]
        if not (error := _difference(*pair)) < _TOLERANCE:
            raise SystemExit(f"{row.name}: results differ by {error:.1e} of the largest element")
    return runs


def _runs(run: Callable[[], object]) -> bool:
    """Tell whether a function runs; ``torch.compile`` compiles it."""
    try:
        run()
    except Exception:  # the other columns are still measured
        traceback.print_exc()
        return False
    return True


def _by_relax_grad(row: Row, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
    executable = tvm.compile(
        row.module(arrays), relax_grad.target.host(), relax_pipeline="relax_grad"
    )
    function = relax.VirtualMachine(executable, tvm.cpu())["main"]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    return lambda: function(*tensors)


def _by_torch(
    function: Callable, arrays: Sequence[np.ndarray], is_half: bool
) -> Callable[[], object]:
    tensors = [_tensor(array) for array in arrays]

    def run():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            return function(*tensors)

    return run


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype("float32")).bfloat16()
    return torch.from_numpy(array).clone()


def _difference(results, wanted) -> float:
    """Return the largest difference of results, relative to the largest element of each."""
    pairs = list(zip(_flat(results), _flat(wanted), strict=True))
    return max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) for a, b in pairs)


def _flat(value) -> list[np.ndarray]:
    if isinstance(value, torch.Tensor):
        return [value.detach().double().numpy()]
    if hasattr(value, "numpy"):
        return [value.numpy().astype("float64")]
    return [leaf for item in value for leaf in _flat(item)]
