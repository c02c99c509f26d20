"""Linear attention of ONNX: values by formulas in NumPy and by ONNX's evaluator, gradients by
differences of the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import relax_grad

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed: extra onnx")
if onnx.defs.onnx_opset_version() < 27:
    pytest.skip("this version of onnx has no LinearAttention", allow_module_level=True)

import onnx_models as models  # noqa: E402
from onnx_models import node  # noqa: E402

from relax_grad.frontend.onnx import UnsupportedOperatorError, from_model  # noqa: E402

RNG = np.random.default_rng(5)
SIZE, WIDTH = 3, 4


def case(rule, heads, groups, *, state=True, rows=1, rates=None, **attributes) -> dict:
    return {"rule": rule, "heads": heads, "groups": groups, "state": state, "rows": rows,
    "rates": rates, "attributes": attributes}  # fmt: skip


#: ``rows`` is the number of factors of a head, and ``rates`` that of the rates of a step.
CASES = {
    "linear": case("linear", 4, 2, scale=float(np.float32(RNG.uniform(0.2, 0.9)))),
    "gated": case("gated", 2, 2, rows=SIZE),
    "delta": case("delta", 6, 2, state=False, rates=2),
    "gated delta": case("gated_delta", 2, 1, rates=1),
    "gated delta of rows": case("gated_delta", 2, 2, rows=SIZE, rates=1, state=False),
}


def model_of(cases: dict, dtype: str, steps="steps", batch="batch"):
    """Return a model of all cases, whose values have the name of the case before their own."""
    nodes, shapes, outputs = [], {}, []
    for name, entry in cases.items():
        groups, rule = entry["groups"], entry["rule"]
        own = {
            "q": [batch, steps, entry["heads"] * SIZE],
            "k": [batch, steps, groups * SIZE],
            "v": [batch, steps, groups * WIDTH],
            "s": [batch, groups, SIZE, WIDTH] if entry["state"] else None,
            "g": [batch, steps, groups * entry["rows"]] if "gated" in rule else None,
            "b": [batch, steps, entry["rates"]] if "delta" in rule else None,
        }
        operands = [f"{name}/{key}" if shape else "" for key, shape in own.items()]
        results = [f"{name}/y", f"{name}/last"]
        nodes.append(node("LinearAttention", operands, results, update_rule=rule,
        q_num_heads=entry["heads"], kv_num_heads=groups, **entry["attributes"]))  # fmt: skip
        outputs += results
        shapes.update({f"{name}/{key}": shape for key, shape in own.items() if shape})
    return models.model_of(nodes, shapes, {}, outputs=outputs, opset=27, dtype=dtype)


def feeds_of(imported, **extents) -> dict[str, np.ndarray]:
    feeds = {}
    for name, kind in imported.inputs.items():
        shape = [int(extents.get(str(n), n)) for n in kind.shape.values]
        feeds[name] = RNG.normal(size=shape)
        if name.endswith("/b"):
            feeds[name] = RNG.uniform(size=shape)
    return feeds


def expected(entry: dict, q, k, v, s=None, g=None, b=None) -> list[np.ndarray]:
    """Return the results of a layer by the formulas of ONNX."""
    heads, groups = entry["heads"], entry["groups"]
    batch, steps, _ = q.shape
    q, k, v = (
        tensor.reshape(batch, steps, count, -1)
        for tensor, count in ((q, heads), (k, groups), (v, groups))
    )
    state = np.zeros((batch, groups, SIZE, WIDTH)) if s is None else s
    results = []
    for t in range(steps):
        if g is not None:
            state = np.exp(g[:, t].reshape(batch, groups, -1, 1)) * state
        value = v[:, t]
        if b is not None:
            value = b[:, t, :, None] * (value - np.einsum("bgij,bgi->bgj", state, k[:, t]))
        state = state + k[:, t, :, :, None] * value[:, :, None]
        read = np.repeat(state, heads // groups, 1)
        results.append(np.einsum("bhij,bhi->bhj", read, q[:, t]).reshape(batch, -1))
    return [entry["attributes"].get("scale", SIZE**-0.5) * np.stack(results, 1), state]


def own_of(feeds: dict, name: str) -> dict:
    return {key.rpartition("/")[2]: x for key, x in feeds.items() if key.startswith(f"{name}/")}


def squares(bb, *results):
    """Build a loss: the sum of the squares of the results, of any extents."""
    op, total = tvm.relax.op, None
    for result in results:
        part = bb.emit(op.sum(op.multiply(result, result)))
        total = part if total is None else bb.emit(op.add(total, part))
    return total


@pytest.fixture(scope="module")
def layers():
    """Return the functions of results and gradients of all layers with symbolic extents, and the
    import."""
    imported = from_model(model_of(CASES, "float64"))
    module = relax_grad.value_and_grad(imported.with_loss(squares), "loss", wrt=[*imported.inputs])
    return models.compiled(module, None), imported


@pytest.mark.parametrize(("steps", "batch"), [(5, 2), (1, 3)])
def test_values_and_gradients(layers, steps, batch):
    call, imported = layers
    feeds = feeds_of(imported, steps=steps, batch=batch)
    results, (_, slopes) = call("main", *feeds.values()), call("loss_adjoint", *feeds.values())
    slopes = dict(zip(feeds, slopes, strict=True))
    for name, entry in CASES.items():
        own = own_of(feeds, name)
        for other in expected(entry, **own):
            np.testing.assert_allclose(results.pop(0), other, rtol=1e-9, atol=1e-11, err_msg=name)
        for key, value in own.items():
            direction = RNG.normal(size=value.shape)
            ahead, behind = (
                sum((x**2).sum() for x in expected(entry, **{**own, key: moved}))
                for moved in (value + 1e-6 * direction, value - 1e-6 * direction)
            )
            slope, difference = (slopes[f"{name}/{key}"] * direction).sum(), (ahead - behind) / 2e-6
            assert slope == pytest.approx(difference, rel=1e-6, abs=1e-6), (name, key)


def test_half_precision_has_the_values_of_the_evaluator():
    model = model_of(CASES, "float16", 4, 2)
    imported = from_model(model)
    feeds = {name: (value / 2).astype("float16") for name, value in feeds_of(imported).items()}
    models.check_outputs(imported, model, feeds, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attributes": {"update_rule": "squared"}}, "update_rule is 'squared'; .* linear, gated"),
        ({"attributes": {"update_rule": "gated"}}, "update_rule 'gated' needs operand decay"),
        ({"rule": "delta", "rates": 2}, "update_rule 'linear' has no operand beta, which is there"),
        ({"attributes": {"q_num_heads": 3}}, "q_num_heads is 3, .* multiple of kv_num_heads, 2"),
    ],
)
def test_errors(changes, message):
    own = {**CASES["linear"], "attributes": {}, **changes}
    settings = {"update_rule": "linear", **own.pop("attributes")}
    model = model_of({"a": {**own, "attributes": {}}}, "float32", 3, 2)
    attributes = model.graph.node[0].attribute
    kept = [entry for entry in attributes if entry.name not in settings]
    del attributes[:]
    attributes.extend([*kept, *(onnx.helper.make_attribute(*pair) for pair in settings.items())])
    with pytest.raises((UnsupportedOperatorError, ValueError), match=message):
        from_model(model)
