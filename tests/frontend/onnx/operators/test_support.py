"""The table of ONNX's operators, held against the schemas of the package ``onnx`` and against
imports of each operator."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")

import onnx_models as models  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402
from relax_grad.frontend.onnx.operators import support as support  # noqa: E402

from . import cases as operators  # noqa: E402
from .cases import microsoft  # noqa: E402

TABLE = support.STANDARD_OPERATORS

#: Operators that later versions replaced, with the version of the model in which they are tried.
REPLACED = {"Scatter": 10, "Upsample": 9}


def schemas():
    """Return the operators of the versions that the table covers, with the version that introduced
    them."""
    versions = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= support.LAST_OPSET:
            versions[schema.name] = min(
                schema.since_version, versions.get(schema.name, schema.since_version)
            )
    return versions


def named(kind: str) -> set[str]:
    return {name for name, entry in TABLE.items() if entry.kind == kind}


def test_the_table_has_all_operators_of_the_schemas_and_no_others():
    known = schemas()
    if onnx.defs.onnx_opset_version() < support.LAST_OPSET:  # an older package lacks the newest
        assert known.keys() <= TABLE.keys()
    else:
        assert known.keys() == TABLE.keys()
    assert {entry.kind for entry in TABLE.values()} == {"trains", "forward", "refused"}
    assert named("trains") == operators.TRAINS.keys() | REPLACED.keys()
    assert named("forward") == operators.FORWARD.keys()


OPSET = min(support.LAST_OPSET, onnx.defs.onnx_opset_version())


#: Operators that are imported by their definitions, which some versions of the package cannot write
#: out.
DEFINED = {"CenterCropPad", "RotaryEmbedding"}


def covered(cases):
    """Return the cases of operators that the installed package has."""
    known = schemas()
    inline = pytest.importorskip("onnx.inliner").inline_selected_functions
    if "inline_schema_functions" not in inspect.signature(inline).parameters:
        known = {name: version for name, version in known.items() if name not in DEFINED}
    return {name: case for name, case in cases.items() if known.get(name, OPSET + 1) <= OPSET}


X = np.ones(1, "float32")


def test_operators_that_train_have_the_values_of_the_evaluator_and_the_gradients_of_differences():
    operators.check(covered(operators.TRAINS), OPSET)


def test_operators_without_a_gradient_have_the_values_of_the_evaluator():
    cases = covered(operators.FORWARD)
    model, outputs = operators.model_of(cases, OPSET)
    imported = from_model(model)
    seeds = [np.zeros((), "int64")] if imported.draws else []
    results = models.compiled(imported.module)(*seeds, X, *imported.values)
    results = dict(zip([output.name for output in model.graph.output], results, strict=True))
    for kind in outputs:
        if kind in operators.WITHOUT_VALUE:
            continue
        single, _ = operators.model_of({kind: cases[kind]}, OPSET)
        expected = ReferenceEvaluator(single).run(outputs[kind], {"x": X})
        for name, value in zip(outputs[kind], expected, strict=True):
            assert results[name].shape == np.shape(value), kind
            np.testing.assert_allclose(results[name], value, 1e-5, 1e-6, err_msg=kind)


@pytest.mark.parametrize("table", ["", "com.microsoft"])
def test_a_refused_operator_is_an_error_with_its_reason(table):
    operators_of = {"": TABLE, "com.microsoft": support.MICROSOFT_OPERATORS}[table]
    refused = [name for name, entry in operators_of.items() if entry.kind == "refused"]
    assert refused
    for name in refused:
        count = 1 if table else onnx.defs.get_schema(name, max_inclusive_version=OPSET).min_input
        node = onnx.helper.make_node(name, ["x"] * count, ["y"], name="it", domain=table)
        model = models.model_of([node], {"x": [2, 3]}, {})
        if table:
            model.opset_import.append(onnx.helper.make_opsetid(table, 1))
        with pytest.raises(UnsupportedOperatorError) as error:
            from_model(model)
        assert f"{name}: 1 (it): {operators_of[name].note}" in str(error.value)


@pytest.mark.parametrize("kind", REPLACED)
def test_an_operator_that_a_later_version_replaces_trains(kind):
    node = {
        "Scatter": models.node("Scatter", ["a", "places", "w"], axis=0),
        "Upsample": models.node("Upsample", ["a", "scales"], mode="nearest"),
    }[kind]
    weights = {
        "Scatter": {"places": np.array([[1, 0, 2]]), "w": models.normal(1, 3, dtype="float64")},
        "Upsample": {"scales": np.array([1, 1, 2, 2], "float32")},
    }[kind]
    shape = [3, 3] if kind == "Scatter" else [1, 2, 2, 3]
    nodes = [models.node("Mul", ["x", "factor"], ["a"]), node]
    weights["factor"] = models.normal(*shape, dtype="float64")
    model = models.model_of(nodes, {"x": shape}, weights, opset=REPLACED[kind], dtype="float64")
    imported = from_model(model, trainable=[name for name in weights if name in ("factor", "w")])
    models.check_parameter_gradients(imported, {"x": models.normal(*shape, dtype="float64")})


def by_onnxruntime(kind: str) -> np.ndarray:
    """Return the result of a case in float32."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, outputs = operators.model_of({kind: microsoft.CASES[kind]}, 17)
    return runtime.InferenceSession(models.in_single(model).SerializeToString()).run(
        outputs[kind], {"x": X}
    )[0]


def test_every_operator_of_onnx_runtime_that_trains_has_the_gradients_of_differences():
    trains = {name for name, entry in support.MICROSOFT_OPERATORS.items() if entry.kind == "trains"}
    assert trains == microsoft.CASES.keys()
    values = {
        kind: function(
            *(operand for operand in microsoft.CASES[kind].operands if operand is not None)
        )
        for kind, function in microsoft.BY_NUMPY.items()
    }
    operators.check(microsoft.CASES, 17, values, trains - values.keys(), 1e-9)


def test_the_operators_of_onnx_runtime_have_its_values():
    kinds = microsoft.CASES.keys() - microsoft.BY_NUMPY.keys()
    values = {kind: by_onnxruntime(kind) for kind in kinds}
    cases = {kind: microsoft.CASES[kind] for kind in kinds}
    model, outputs = operators.model_of(cases, 17)
    imported = from_model(model)
    results = models.compiled(imported.module)(X, *imported.values)
    results = dict(zip([output.name for output in model.graph.output], results, strict=True))
    for kind in kinds:
        np.testing.assert_allclose(
            results[outputs[kind][0]], values[kind], 2e-4, 2e-4, err_msg=kind
        )
