"""ONNX's node tests, which its package brings: the results of this package's import, or its
refusal."""

from __future__ import annotations

import importlib
import pkgutil
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.backend.test.case.node as package
import tvm
from onnx import numpy_helper
from sweep import TARGET

from relax_grad.errors import UnsupportedOperatorError
from relax_grad.frontend.onnx import from_model
from relax_grad.testing._program import (
    compile_together,
    without_assertions,
)

#: Modules of node tests whose values take seconds to compute.
SLOW_MODULES = ("averagepool", "lppool", "maxpool")

#: The node tests that are refused, by patterns of names, with a part of the reason.
REFUSED = {
    r"(cast|castlike)_(no_saturate_)?\w*(FLOAT8|FLOAT4|INT4|INT2)\w*": "not rounded as ONNX",
    r"cast_e8m0\w*": "not rounded as ONNX",
    r"(castlike|quantizelinear|dequantizelinear)_\w*int[24]\w*": "whose numbers TVM does not store",
    r"(de)?quantizelinear_float4e2m1": "which TVM does not round as ONNX",
    r"(de)?quantizelinear_(e4m3fn|e5m2)\w*": "which TVM does not round as ONNX",
    r"(de)?quantizelinear_blocked\w*": "blocked quantization is not supported",
    r"(qlinearconv|qlinearmatmul|convinteger)\w*": "it multiplies integers",
    r"bitcast\w*": "it reads the bits of numbers",
    r"(string|regex|strnormalizer|equal_string)\w*": "strings, which TVM does not have",
    r"tfidfvectorizer\w*": "it counts n-grams",
    r"image_decoder\w*": "it reads files of images",
    r"(adagrad|adam|momentum|nesterov|flexattention)\w*": "no operator of ONNX that is known here",
    r"(identity|loop13|loop16|optional|sequence)_\w*": "which cannot be imported",
    r"if_opt": "whose condition is known only at run time",
    r"maxunpool_export_with_output_shape": "count the places of its indices in different ones",
    r"melweightmatrix": "its operands are constants only",
    r"range_b?float\w*_expanded": "its trips are written out",
    r"scan_sum": "its trips are written out",
    r"roialign_mode_max": "TVM's maximum differs",
}


@dataclass
class Node:
    """An imported node test: a module with the arguments and results of its ``main``."""

    name: str
    module: tvm.IRModule
    arguments: list
    expected: list
    draws: bool


def modules() -> list[str]:
    """Return the names of the modules of node tests, each of an operator."""
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def cases(names: Iterable[str]) -> list:
    """Return the node tests of modules."""
    count, found = len(package._NodeTestCases), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name not in _LOADED:
                importlib.import_module(f"{package.__name__}.{name}")
                _LOADED[name] = package._NodeTestCases[count:]
                count = len(package._NodeTestCases)
            found += _LOADED[name]
    return found


_LOADED: dict[str, list] = {}


def array(value):
    """Return the array of a tensor, or the arrays of a sequence."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return [*map(array, value)] if isinstance(value, list) else np.asarray(value)


def fixed_inputs(case) -> Iterator[list[str]]:
    """Return the inputs to fix, from the fewest on: none, those that are no floating-point numbers,
    or all but the first."""
    names = [value.name for value in case.model.graph.input]
    kinds = [value.type.tensor_type.elem_type for value in case.model.graph.input]
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16}
    yield []
    yield [name for name, kind in zip(names, kinds, strict=True) if kind not in floats]
    yield names[1:]


def _import(case, fixed: Sequence[str]) -> Node:
    inputs, expected = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    feeds = dict(zip(names, map(array, inputs), strict=True))
    imported = from_model(case.model, constants={name: feeds[name] for name in fixed})
    seed = [np.array(3, "int64")] if imported.draws else []
    arguments = [*seed, *(feeds[name] for name in imported.inputs)]
    arguments += [value.numpy() for value in imported.values]
    return Node(case.name, imported.module, arguments, [*map(array, expected)], imported.draws)


def imported(case) -> Node:
    """Import a node test; raise the last error if that is refused with any inputs fixed."""
    last: Exception | None = None
    for fixed in fixed_inputs(case):
        try:
            return _import(case, fixed)
        except (UnsupportedOperatorError, ValueError) as error:
            last = error
    raise last


def check_refusal(name: str, error: Exception) -> str | None:
    """Return what is wrong about a refusal: an error that the table does not name."""
    for pattern, reason in REFUSED.items():
        if re.fullmatch(f"test_({pattern})", name, re.IGNORECASE) and reason in str(error):
            return None
    return f"{name} is refused: {error}"


def _leaves(value) -> list:
    return (
        [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]
    )


def _tolerance(dtype: np.dtype) -> tuple[float, float]:
    """Return the relative and the absolute tolerance: those of the node tests, or wider ones for
    half precision, whose sums are rounded in another order."""
    return {"float16": (4e-3, 4e-4), "bfloat16": (3e-2, 3e-3)}.get(dtype.name, (1e-3, 1e-6))


def _differences(node: Node, results) -> str | None:
    results, expected = _leaves(results), _leaves(node.expected)
    if len(results) < len(expected):
        return f"{node.name} has {len(results)} results, not {len(expected)}"
    for result, wanted in zip(results, expected, strict=False):
        if (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            return (
                f"{node.name} returns {result.dtype}{result.shape}, not "
                f"{wanted.dtype}{wanted.shape}"
            )
        rtol, atol = _tolerance(wanted.dtype)
        if node.draws:
            continue
        wide = [value.astype("float64") for value in (result, wanted)]
        if not np.allclose(*wide, rtol=rtol, atol=atol, equal_nan=True):
            return f"{node.name} returns {result}, not {wanted}"
    return None


def _called(nodes: Sequence[Node]) -> Iterator[tuple[Node, object]]:
    """Yield nodes with their results, or the error; a module that does not compile is halved."""
    try:
        call = compile_together([node.module for node in nodes], TARGET)
    except Exception as error:  # TVM raises several kinds
        if len(nodes) == 1:
            yield nodes[0], error
            return
        half = len(nodes) // 2
        yield from _called(nodes[:half])
        yield from _called(nodes[half:])
        return
    for number, node in enumerate(nodes, start=1):
        try:
            yield node, call(f"main_{number}", node.arguments)
        except Exception as error:  # the same
            yield node, error


def faults(tests: Sequence, batch: int = 40) -> tuple[list[str], int, int]:
    """Return what is wrong with node tests, and the numbers of those that are right and refused."""
    found, nodes, refused = [], [], 0
    for case in tests:
        try:
            nodes.append(imported(case))
        except Exception as error:  # any other than those that are expected is a fault
            wrong = check_refusal(case.name, error)
            refused += wrong is None
            found += [wrong] if wrong else []
    right = 0
    for start in range(0, len(nodes), batch):
        with without_assertions():
            results = list(_called(nodes[start : start + batch]))
        for node, result in results:
            failed = isinstance(result, Exception)
            wrong = f"{node.name}: {result}" if failed else _differences(node, result)
            right += wrong is None
            found += [wrong] if wrong else []
    return found, right, refused
