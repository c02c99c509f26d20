"""The gradients of ONNX's node tests by this package's import, against differences in float64."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_models as models
import tvm
from sweep import TARGET
from tvm import relax, tirx

import relax_grad
from relax_grad.errors import UnsupportedOperatorError
from relax_grad.frontend.onnx import from_model
from relax_grad.testing._program import compile_together, without_assertions

from . import _nodes as nodes

#: Node tests without a finite gradient or without a difference, by patterns of names.
WITHOUT = {
    # The definition computes a softmax of -inf only, and replaces its NaN by a choice.
    r"attention_\w*nan_robustness_expanded",
    r"attention_2[34]_fullymasked_qk_matmul_output_mode3_zero_expanded",
    r"attention_4d_causal_nonpad_negative_offset_structural_empty_expanded",
    r"attention_local_window_gqa_rank4_mask_expanded",
    r"acosh_example",  # an operand is the end of the domain
    r"pow",  # negative bases have whole exponents only
    r"dynamicquantizelinear\w*",  # the scale is a constant of the straight-through estimator
}

#: Operators whose first operand only has a gradient: regions have none, as in torchvision.
FIRST_ONLY = ("test_roialign",)


@dataclass
class Gradient:
    """A module with ``main``, a loss, and ``main_adjoint``; ``places`` are the arguments that are
    differentiated."""

    name: str
    module: tvm.IRModule
    arguments: list
    places: list[int]


def _is_counted(kind: relax.TensorType) -> bool:
    """Tell whether a result is one of float64, with known extents."""
    is_known = isinstance(kind.shape, relax.ShapeExpr) and all(
        isinstance(extent, tirx.IntImm) for extent in kind.shape.values
    )
    return is_known and str(kind.dtype) == "float64"


def _loss(bb, *results):
    return models.weighted_sum(bb, *(r for r in results if _is_counted(r.ty)))


def _moved(value: np.ndarray, rng) -> np.ndarray:
    """Return numbers that are not equal, and farther from a kink than a step of a difference."""
    if value.dtype != "float64":
        return value
    sign = rng.choice([-1.0, 1.0], value.shape)
    move = 1e-3 * sign * rng.uniform(0.3, 1, value.shape)
    return value + move * (1 + np.abs(value))


def _feeds(case, model) -> dict:
    rng, feeds = np.random.default_rng(0), {}
    for info, value in zip(model.graph.input, case.data_sets[0][0], strict=True):
        value = nodes.array(value)
        if info.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
            value = value.astype("float64")
        feeds[info.name] = value
    return {name: _moved(value, rng) for name, value in feeds.items()}


def differentiated(case) -> Gradient | None:
    """Return the gradients of a node test, or None if it has none: no import, no input and no
    result of floating-point numbers, or no finite ones."""
    if any(re.fullmatch(f"test_{pattern}", case.name) for pattern in WITHOUT):
        return None
    if any(isinstance(value, list) for value in [*case.data_sets[0][0], *case.data_sets[0][1]]):
        return None
    model = models.in_double(case.model)
    feeds = _feeds(case, model)
    values = [*feeds.values(), *map(nodes.array, case.data_sets[0][1])]
    if not all(np.isfinite(value).all() for value in values if value.dtype.kind in "fc"):
        return None
    for fixed in nodes.fixed_inputs(case):
        try:
            constants = {name: feeds[name] for name in fixed}
            imported = from_model(model, constants=constants)
        except (UnsupportedOperatorError, ValueError, TypeError, KeyError):
            continue
        if imported.draws or not any(map(_is_counted, imported.outputs.values())):
            return None
        names = [name for name, kind in imported.inputs.items() if str(kind.dtype) == "float64"]
        names = names[:1] if case.name.startswith(FIRST_ONLY) else names
        return _gradient(case.name, imported, feeds, names) if names else None
    return None


def _gradient(name: str, imported, feeds: dict, wrt: list[str]) -> Gradient:
    module = relax_grad.value_and_grad(imported.with_loss(_loss), "loss", wrt=wrt)
    renamed = {"loss": "main", "loss_adjoint": "main_adjoint"}
    kept = tvm.IRModule()
    for variable, function in module.functions_items():
        if variable.name_hint in renamed:
            kept[renamed[variable.name_hint]] = function
        elif variable.name_hint not in ("main", "inference"):
            kept[variable] = function
    inputs = list(imported.inputs)
    arguments = [feeds[name] for name in inputs] + [value.numpy() for value in imported.values]
    return Gradient(name, kept, arguments, [inputs.index(name) for name in wrt])


def _faults_of(gradient: Gradient, call, number: int) -> Iterator[str]:
    main, rng = f"main_{number}", np.random.default_rng(1)
    _, gradients = call(f"{main}_adjoint", gradient.arguments)

    def loss(place: int, value):
        arguments = [*gradient.arguments]
        arguments[place] = value
        result = call(main, arguments)
        return float(result[0] if isinstance(result, list) else result)

    for place, slope in zip(gradient.places, gradients, strict=True):
        value = gradient.arguments[place]
        direction = rng.normal(size=value.shape)
        wanted, errors = float(np.sum(slope * direction)), []
        for step in (1e-5, 1e-7):
            ahead, behind = (loss(place, value + sign * step * direction) for sign in (1, -1))
            difference = (ahead - behind) / (2 * step)
            errors.append(abs(wanted - difference) / max(1.0, abs(difference)))
        if not min(errors) < 1e-4:
            yield f"{gradient.name}: argument {place} has {wanted}, not {difference}"


def faults(tests: Sequence, batch: int = 20) -> tuple[list[str], int, list[str]]:
    """Return what is wrong with gradients of node tests, the number of those compared, and the
    refused ones."""
    found, gradients, refused = [], [], []
    for case in tests:
        try:
            gradient = differentiated(case)
        except Exception as error:  # of several kinds
            refused.append(f"{case.name}: {type(error).__name__} {error}")
            continue
        gradients += [gradient] if gradient else []
    for start in range(0, len(gradients), batch):
        some = gradients[start : start + batch]
        with without_assertions():
            call = compile_together([gradient.module for gradient in some], TARGET)
        for number, gradient in enumerate(some, start=1):
            found += _faults_of(gradient, call, number)
    return found, len(gradients), refused
