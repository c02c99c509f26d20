"""PyTorch's own samples of its operators, OpInfo, as cases of :mod:`torch_operators`."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree
from torch_operators import Case, faults_of

#: Families that are no functions of dense tensors on one processor, and functions that draw.
_LEFT_OUT = (
    *("_refs.", "jiterator", "masked.", "sparse", "torch.ops.", "fft.", "stft", "istft"),
    *("nn.functional.rrelu", "empty", "new_empty", "bernoulli", "multinomial", "normal", "rand"),
    *("uniform", "cauchy", "exponential", "geometric", "log_normal", "nn.functional.dropout"),
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout"),
)

#: The dtypes of samples, the first that an operator has.
_DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool)


@contextlib.contextmanager
def _replaced(name: str, module: types.ModuleType | None) -> Iterator[None]:
    """Replace a module; None is one that cannot be imported."""
    had, before = name in sys.modules, sys.modules.get(name)
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if had:
            sys.modules[name] = before  # type: ignore[assignment]


@functools.cache
def operators() -> dict[str, object]:
    """Return PyTorch's descriptions of operators by name.

    The package expecttest, which they import for PyTorch's own tests, may be missing.
    """
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with (
        _replaced("expecttest", sys.modules.get("expecttest", stand_in)),
        _replaced("hypothesis", None),  # its settings would change
        mock.patch.object(sys, "argv", sys.argv[:1]),
        mock.patch.object(torch.backends, "disable_global_flags"),
    ):
        try:
            from torch.testing._internal.common_methods_invocations import op_db
        except ImportError as error:
            pytest.skip(f"PyTorch's samples of its operators need a package: {error}")
    wanted = [entry for entry in op_db if not entry.name.startswith(_LEFT_OUT)]
    return {_name(entry): entry for entry in wanted}


def _name(entry) -> str:
    variant = entry.variant_test_name
    return f"{entry.name}.{variant}" if variant else entry.name


#: Operators whose kernels in PyTorch have a constant of float32, with a tolerance.
_ROUNDED = {"nn.functional.hardsigmoid": 1e-6}


#: Operators of whose gradient PyTorch leaves a part out, as its gradcheck says: that of the mean
#: and the deviation, and the zeros of elements that are written over.
_INCOMPLETE = ("native_layer_norm", "_native_batch_norm_legit", "as_strided_scatter")


def samples(name: str, most: int) -> list[Case]:
    """Return cases of an operator, spread over its samples, without those that draw numbers or that
    PyTorch refuses."""
    entry = operators()[name]
    tolerance = _ROUNDED.get(name)
    dtypes = entry.supported_dtypes("cpu")
    dtype = next((dtype for dtype in _DTYPES if dtype in dtypes), None)
    if dtype is None:
        return []
    torch.manual_seed(0)
    inputs = list(entry.sample_inputs("cpu", dtype, requires_grad=False))
    places = range(len(inputs)) if len(inputs) <= most else _spread(len(inputs), most)
    found = (_case(f"{name}-{i}", entry, inputs[i]) for i in places)
    cases = [case._replace(tolerance=tolerance) for case in found if case is not None]
    is_complete = name not in _INCOMPLETE
    return [case._replace(gradient=case.gradient and is_complete) for case in cases]


def _spread(count: int, most: int) -> list[int]:
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def _case(name: str, entry, sample) -> Case | None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    operands = tuple(leaves[i].detach().clone() for i in places)
    if not operands or any(_is_foreign(operand) for operand in operands):
        return None
    return checked(Case(name, _Call(entry.op, leaves, spec, places), operands))


class _Call:
    """A function of the tensors among the arguments of a call; it returns those of the result."""

    def __init__(self, function: Callable, leaves: list, spec: pytree.TreeSpec, places: list[int]):
        self.function, self.leaves, self.spec, self.places = function, leaves, spec, places

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.function(first, *args, **kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(result) if _is_tensor(leaf))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_foreign(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or tensor.layout is not torch.strided or tensor.is_quantized


def checked(case: Case) -> Case | None:
    """Return a case with gradients if PyTorch has them, or None if PyTorch refuses it, or has other
    results the second time."""
    try:
        results = [_run(case, seed) for seed in (0, 1)]
    except Exception:  # PyTorch raises every kind
        return None
    if not results[0] or any(map(_is_foreign, results[0])):
        return None
    if not all(_equal(*pair) for pair in zip(*results, strict=True)):
        return None
    return case._replace(gradient=_has_gradients(case))


def _run(case: Case, seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    return case.function(*(operand.clone() for operand in case.operands))


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))


def _has_gradients(case: Case) -> bool:
    operands = [
        operand.clone().requires_grad_(operand.is_floating_point()) for operand in case.operands
    ]
    try:
        results = case.function(*operands)
        wanted = [result for result in results if result.requires_grad]
        leaves = [operand for operand in operands if operand.requires_grad]
        if not wanted:
            return False
        ones = [torch.ones_like(result) for result in wanted]
        slopes = torch.autograd.grad(wanted, leaves, ones, allow_unused=True)
    except Exception:
        return False
    return not any(slope is not None and _is_foreign(slope) for slope in slopes)


#: Losses whose gradient for the target differs from PyTorch's at some edges: see the conventions.
_CONSTANT_TARGETS = ("nn.functional.kl_div", "nn.functional.binary_cross_entropy")


#: Functions whose gradient at NaN depends on the number of elements: PyTorch's kernels have one for
#: whole vectors and another one for the rest. torch.export writes prelu as a product, which a NaN
#: slope makes NaN for positive elements, too. The gradient of pdist(p=inf) compares with NaN.
_UNSTABLE = tuple(
    f"nn.functional.{name}"
    for name in (
        *("hardtanh", "relu6", "hardswish", "elu", "selu", "celu", "hardshrink", "softshrink"),
        *("prelu", "pdist"),
    )
)


#: Functions that multiply NaN by weights of zero, or leave these out, or round NaN to a position,
#: or write several numbers to one place: kernels differ.
_WEIGHTED = tuple(
    f"nn.functional.{name}"
    for name in (
        *("conv", "interpolate", "upsample", "grid_sample", "scaled_dot_product_attention"),
        *("multi_head_attention_forward", "max_unpool", "embedding_bag"),
    )
)


class _Constant:
    """A function whose second operand has no gradient."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, first: torch.Tensor, second: torch.Tensor, *rest: torch.Tensor) -> tuple:
        return self.function(first, second.detach(), *rest)


def at_edges(case: Case) -> Iterator[Case]:
    """Yield a case with whole numbers, which have ties and lie at kinks, and with NaN."""
    name = case.name.rpartition("-")[0]
    if name in _CONSTANT_TARGETS:
        case = case._replace(function=_Constant(case.function))
    whole = case._replace(name=f"{case.name}-whole", operands=tuple(map(_whole, case.operands)))
    wrong = whole._replace(name=f"{case.name}-nan", operands=tuple(map(_with_nan, case.operands)))
    edges = [whole] if name.startswith(_WEIGHTED) else [whole, wrong]
    for edge in map(checked, edges):
        if edge is not None:
            is_unstable = edge.name.endswith("nan") and name in _UNSTABLE
            yield edge._replace(gradient=edge.gradient and not is_unstable)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    is_probability = bool(((tensor >= 0) & (tensor <= 1)).all())
    return tensor.round() if is_probability else tensor.clamp(-4, 4).round()


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    changed = tensor.clone()
    changed.reshape(-1)[changed.numel() // 2] = torch.nan
    return changed


#: The errors that refuse a case: those of the import, and those of torch.export, which decide that
#: a graph would depend on values.
_REFUSALS = (
    *("UnsupportedOperatorError", "GradientError"),
    *("GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound"),
    *("DataDependentOutputException", "DynamicOutputShapeException"),
)


def wrong(cases: list[Case]) -> dict[str, str]:
    """Return the faults of cases that are neither right nor refused, by name."""
    faults = faults_of(cases)
    # Functions that draw numbers, such as attention with dropout, call one that is not merged.
    wrong = {name: text for name, text in faults.items() if "philox" not in text}
    return {name: text for name, text in wrong.items() if not text.startswith(_REFUSALS)}
