"""The edge cases of operators, as calls of relax_grad, PyTorch and JAX; ``measure_edges`` runs
them."""

from __future__ import annotations

import numpy as np
from edge import Edge, written
from tvm import relax
from tvm.relax import op

INF, NAN = np.inf, np.nan


def _f(*values) -> np.ndarray:
    return np.array(values, "float64")


def _const(*values) -> relax.Expr:
    return relax.const(np.array(values), "float64")


def _pool(x):
    return op.nn.max_pool1d(x, 2, 2)


def _torch_pool(torch, x):
    return torch.nn.functional.max_pool1d(x, 2, 2)


def _jax_pool(jax, x):
    window = (1, 1, 2)
    return jax.lax.reduce_window(x, -np.inf, jax.lax.max, window, window, "VALID")


def _nll(reduction="mean", ignore_index=-100):
    return (
        lambda x, t: op.nn.nll_loss(x, t, reduction=reduction, ignore_index=ignore_index),
        lambda torch, x, t: torch.nn.functional.nll_loss(
            x, t, reduction=reduction, ignore_index=ignore_index
        ),
        None,
    )


_LOG_PROBABILITIES = np.log([[0.25, 0.75], [0.5, 0.5]])
_W = np.array([1.0, 2.0, 3.0, 4.0])

_NAN = "TVM's forward operator [drops the NaN](limits.md#faults-of-forward-operators)"
_OUTSIDE = (
    "[nothing is read outside a tensor](conventions.md#invalid-indices-and-targets), and nothing "
    "raised"
)

#: The reason for each difference between relax_grad and PyTorch, by call.
REASONS = {
    "relu([nan])": _NAN,
    "clip([nan], -1, 1)": _NAN,
    "maximum([nan], [1])": _NAN,
    "max([nan, 1])": _NAN,
    "floor_divide([5, -5], [3, 3])": "PyTorch has no derivative; that of a step is 0",
    "take([1, 2, 3], [3])": _OUTSIDE,
    "gather([1, 2, 3], [3])": _OUTSIDE,
    "scatter([1, 2], [2], [5])": _OUTSIDE,
    "nll_loss(x, [0, 2]), of two classes": _OUTSIDE,
    "batch_norm([[3]]), one element per channel": "PyTorch refuses a variance of one element; "
    "it is 0",
    "w * top2([1, 2, 2, 2]), w = [1, 2]": "relax_grad takes the first of equal elements; "
    "PyTorch promises no order",
    "scatter([1, 2], [0, 0], u), u = [5, 7]": "[the last update is the one that is "
    "kept](conventions.md#derivatives-at-kinks-and-ties); PyTorch's gradient counts both",
}

_UNARY = {
    "abs": _f(-1, 0, 1),
    "sqrt": _f(0, -1),
    "rsqrt": _f(0),
    "log": _f(0, -1),
    "exp": _f(1000, -1000),
    "asin": _f(1),
    "acosh": _f(1),
    "atanh": _f(1),
    "sigmoid": _f(1000, -1000),
    "tanh": _f(30),
    "round": _f(0.5, 1.5, 2.5, -0.5),
    "floor": _f(1, -0.5),
    "sign": _f(-2, 0, 2),
}


def _elementwise():
    for name, value in _UNARY.items():
        section = "Corners" if name not in ("round", "floor", "sign") else "Steps and casts"
        yield Edge(
            section,
            f"{name}({written(value)})",
            [value],
            getattr(op, name),
            lambda torch, x, name=name: getattr(torch, name)(x),
            lambda jax, x, name=name: (
                jax.lax.rsqrt(x)
                if name == "rsqrt"
                else jax.nn.sigmoid(x)
                if name == "sigmoid"
                else getattr(jax.numpy, name)(x)
            ),
        )
    x = _f(-1, 0, 1)
    yield Edge(
        "Corners",
        "relu([-1, 0, 1])",
        [x],
        op.nn.relu,
        lambda torch, x: torch.relu(x),
        lambda jax, x: jax.nn.relu(x),
    )
    yield Edge(
        "Corners",
        "leaky_relu([-1, 0, 1], 0.1)",
        [x],
        lambda x: op.nn.leakyrelu(x, 0.1),
        lambda torch, x: torch.nn.functional.leaky_relu(x, 0.1),
        lambda jax, x: jax.nn.leaky_relu(x, 0.1),
    )
    yield Edge(
        "Corners",
        "clip([-2, -1, 0, 1, 2], -1, 1)",
        [_f(-2, -1, 0, 1, 2)],
        lambda x: op.clip(x, -1, 1),
        lambda torch, x: torch.clamp(x, -1, 1),
        lambda jax, x: jax.numpy.clip(x, -1, 1),
    )
    yield Edge(
        "Corners",
        "relu([nan])",
        [_f(NAN)],
        op.nn.relu,
        lambda torch, x: torch.relu(x),
        lambda jax, x: jax.nn.relu(x),
    )
    yield Edge(
        "Corners",
        "clip([nan], -1, 1)",
        [_f(NAN)],
        lambda x: op.clip(x, -1, 1),
        lambda torch, x: torch.clamp(x, -1, 1),
        lambda jax, x: jax.numpy.clip(x, -1, 1),
    )
    for x, y, text in [
        (_f(0, 0, -2), _f(0, 2, 3), "power([0, 0, -2], [0, 2, 3])"),
        (_f(0, -1), _f(0.5, 0.5), "power([0, -1], [0.5, 0.5])"),
        (_f(0), _f(-1), "power([0], [-1])"),
    ]:
        yield _binary("Corners", text, x, y, op.power, "pow", "power")
    yield Edge(
        "Corners",
        "where(x > 0, sqrt(x), 0), x = [0, 4]",
        [_f(0, 4)],
        lambda x: op.where(op.greater(x, _const(0.0)), op.sqrt(x), _const(0.0)),
        lambda torch, x: torch.where(x > 0, torch.sqrt(x), 0.0),
        lambda jax, x: jax.numpy.where(x > 0, jax.numpy.sqrt(x), 0.0),
    )
    yield Edge(
        "Corners",
        "sqrt(sum(x * x)), x = [0, 0]",
        [_f(0, 0)],
        lambda x: op.sqrt(op.sum(op.multiply(x, x))),
        lambda torch, x: torch.sqrt(torch.sum(x * x)),
        lambda jax, x: jax.numpy.sqrt(jax.numpy.sum(x * x)),
    )


def _binary(section, text, x, y, relax_op, torch_name, jax_name) -> Edge:
    return Edge(
        section,
        text,
        [x, y],
        relax_op,
        lambda torch, x, y: getattr(torch, torch_name)(x, y),
        lambda jax, x, y: getattr(jax.numpy, jax_name)(x, y),
    )


def _arithmetic():
    section = "Arithmetic"
    yield _binary(section, "[0] * [inf]", _f(0), _f(INF), op.multiply, "mul", "multiply")
    yield _binary(
        section, "[1, -1, 0] / [0, 0, 0]", _f(1, -1, 0), _f(0, 0, 0), op.divide, "div", "divide"
    )
    yield _binary(
        section,
        "floor_mod([5, -5, 5], [3, 3, -3])",
        _f(5, -5, 5),
        _f(3, 3, -3),
        op.floor_mod,
        "remainder",
        "remainder",
    )
    yield _binary(section, "floor_mod([5], [0])", _f(5), _f(0), op.floor_mod, "remainder", "mod")
    yield _binary(section, "mod([5, -5], [3, 3])", _f(5, -5), _f(3, 3), op.mod, "fmod", "fmod")
    yield _binary(
        section,
        "floor_divide([5, -5], [3, 3])",
        _f(5, -5),
        _f(3, 3),
        op.floor_divide,
        "floor_divide",
        "floor_divide",
    )
    yield _binary(section, "atan2([0], [0])", _f(0), _f(0), op.atan2, "atan2", "arctan2")
    yield _binary(
        section,
        "log_add_exp([-inf, 1000], [-inf, 1000])",
        _f(-INF, 1000),
        _f(-INF, 1000),
        op.log_add_exp,
        "logaddexp",
        "logaddexp",
    )
    yield _binary(
        section, "maximum([1, 2], [1, 3])", _f(1, 2), _f(1, 3), op.maximum, "maximum", "maximum"
    )
    yield _binary(
        section, "minimum([1, 2], [1, 3])", _f(1, 2), _f(1, 3), op.minimum, "minimum", "minimum"
    )
    yield _binary(section, "maximum([nan], [1])", _f(NAN), _f(1), op.maximum, "maximum", "maximum")
    yield _binary(section, "maximum([1], [nan])", _f(1), _f(NAN), op.maximum, "maximum", "maximum")


def _reductions():
    section = "Reductions"

    def reduction(text, x, relax_fn, torch_fn, jax_fn):
        return Edge(section, text, [x], relax_fn, torch_fn, jax_fn)

    yield reduction(
        "max([2, 1, 2])", _f(2, 1, 2), op.max, lambda t, x: t.amax(x), lambda j, x: j.numpy.max(x)
    )
    yield reduction(
        "min([1, 1, 2])", _f(1, 1, 2), op.min, lambda t, x: t.amin(x), lambda j, x: j.numpy.min(x)
    )
    for values, text in [((1, NAN), "max([1, nan])"), ((NAN, 1), "max([nan, 1])")]:
        yield reduction(
            text, _f(*values), op.max, lambda t, x: t.amax(x), lambda j, x: j.numpy.max(x)
        )
    for values in [(0, 2, 3), (0, 0, 3)]:
        yield reduction(
            f"prod({written(_f(*values))})",
            _f(*values),
            op.prod,
            lambda t, x: t.prod(x),
            lambda j, x: j.numpy.prod(x),
        )
    yield reduction(
        "cumprod([2, 0, 3])",
        _f(2, 0, 3),
        lambda x: op.cumprod(x, axis=0),
        lambda t, x: t.cumprod(x, 0),
        lambda j, x: j.numpy.cumprod(x),
    )
    for name in ("variance", "std"):
        for values in [(5,), (5, 5)]:
            yield reduction(
                f"{name}({written(_f(*values))})",
                _f(*values),
                getattr(op, name),
                lambda t, x, name=name: getattr(t, name[:3])(x, correction=0),
                lambda j, x, name=name: getattr(j.numpy, name[:3])(x),
            )
    empty = np.zeros((0,))
    yield reduction("sum([])", empty, op.sum, lambda t, x: t.sum(x), lambda j, x: j.numpy.sum(x))
    yield reduction(
        "prod([])", empty, op.prod, lambda t, x: t.prod(x), lambda j, x: j.numpy.prod(x)
    )
    yield reduction(
        "mean([])", empty, op.mean, lambda t, x: t.mean(x), lambda j, x: j.numpy.mean(x)
    )
    yield reduction(
        "softmax([-inf, -inf])",
        _f(-INF, -INF),
        lambda x: op.nn.softmax(x),
        lambda t, x: t.softmax(x, -1),
        lambda j, x: j.nn.softmax(x),
    )
    yield reduction(
        "log_softmax([-inf, 0])[1]",
        _f(-INF, 0),
        lambda x: op.take(op.nn.log_softmax(x), relax.const(1), 0),
        lambda t, x: t.log_softmax(x, -1)[1],
        lambda j, x: j.nn.log_softmax(x)[1],
    )
    yield reduction(
        "layer_norm([3, 3])",
        _f(3, 3),
        lambda x: op.nn.layer_norm(x, _const(1.0, 1.0), _const(0.0, 0.0), [-1], 1e-5),
        lambda t, x: t.nn.functional.layer_norm(x, (2,)),
        None,
    )
    yield reduction(
        "batch_norm([[3]]), one element per channel",
        np.array([[3.0]]),
        lambda x: relax.TupleGetItem(
            op.nn.batch_norm(x, *map(_const, (1.0, 0.0, 0.0, 1.0)), axis=1, training=True), 0
        ),
        lambda t, x: t.nn.functional.batch_norm(x, None, None, training=True),
        None,
    )
    yield Edge(
        section,
        "cross_entropy([-inf, 0], target [0, 1])",
        [np.array([[-INF, 0.0]])],
        lambda x: op.nn.cross_entropy_with_logits(
            op.nn.log_softmax(x), relax.const(np.array([[0.0, 1.0]]), "float64")
        ),
        lambda t, x: t.nn.functional.cross_entropy(x, t.tensor([[0.0, 1.0]], dtype=x.dtype)),
        lambda j, x: -(j.nn.log_softmax(x) * np.array([0.0, 1.0])).sum(),
    )


def _order():
    section = "Order and windows"
    x = _f(2, 1, 2, 1)
    yield Edge(
        section,
        "w * sort([2, 1, 2, 1]), w = [1, 2, 3, 4]",
        [x],
        lambda x: op.multiply(op.sort(x), relax.const(_W, "float64")),
        lambda t, x: t.sort(x)[0] * t.from_numpy(_W),
        lambda j, x: j.numpy.sort(x) * _W,
    )
    yield Edge(
        section,
        "w * top2([1, 2, 2, 2]), w = [1, 2]",
        [_f(1, 2, 2, 2)],
        lambda x: op.multiply(op.topk(x, 2, ret_type="values"), relax.const(_W[:2], "float64")),
        lambda t, x: t.topk(x, 2)[0] * t.from_numpy(_W[:2]),
        lambda j, x: j.lax.top_k(x, 2)[0] * _W[:2],
    )
    yield Edge(
        section,
        "median([2, 1, 2])",
        [_f(2, 1, 2)],
        lambda x: relax.TupleGetItem(op.median(x, 0), 0),
        lambda t, x: t.median(x, 0)[0],
        lambda j, x: j.numpy.median(x),
    )
    for values, text in [
        ([[[1, 1, 2, 3]]], "max_pool([1, 1, 2, 3], 2)"),
        ([[[NAN, 1, 2, NAN]]], "max_pool([nan, 1, 2, nan], 2)"),
        ([[[-INF, -INF]]], "max_pool([-inf, -inf], 2)"),
    ]:
        yield Edge(section, text, [np.array(values, "float64")], _pool, _torch_pool, _jax_pool)


def _indices():
    section = "Indices and targets"
    x = _f(1, 2, 3)

    def take(text, index, mode, torch_fn, jax_mode):
        return Edge(
            section,
            text,
            [x, np.array(index)],
            lambda x, i: op.take(x, i, 0, mode),
            torch_fn,
            lambda j, x, i: j.numpy.take(x, i, 0, mode=jax_mode),
        )

    yield take("take([1, 2, 3], [0, 0])", [0, 0], "fast", lambda t, x, i: x[i], "fill")
    yield take("take([1, 2, 3], [-1])", [-1], "fast", lambda t, x, i: x[i], "fill")
    yield take("take([1, 2, 3], [3])", [3], "fast", lambda t, x, i: x[i], "fill")
    yield take("take([1, 2, 3], [5, -5], clip)", [5, -5], "clip", None, "clip")
    yield take("take([1, 2, 3], [5, -1], wrap)", [5, -1], "wrap", None, "wrap")
    yield Edge(
        section,
        "gather([1, 2, 3], [3])",
        [x, np.array([3])],
        lambda x, i: op.gather_elements(x, i, 0),
        lambda t, x, i: t.gather(x, 0, i),
        lambda j, x, i: j.numpy.take_along_axis(x, i, 0, mode="fill"),
    )
    yield Edge(
        section,
        "scatter([1, 2], [0, 0], u), u = [5, 7]",
        [_f(1, 2), np.array([0, 0]), _f(5, 7)],
        lambda x, i, u: op.scatter_elements(x, i, u, 0),
        lambda t, x, i, u: x.scatter(0, i, u),
        lambda j, x, i, u: x.at[i].set(u),
    )
    yield Edge(
        section,
        "scatter_add([1, 2], [0, 0], u), u = [5, 7]",
        [_f(1, 2), np.array([0, 0]), _f(5, 7)],
        lambda x, i, u: op.scatter_elements(x, i, u, 0, "add"),
        lambda t, x, i, u: x.scatter_add(0, i, u),
        lambda j, x, i, u: x.at[i].add(u),
    )
    yield Edge(
        section,
        "scatter_max([2, 2], [0, 0], u), u = [2, 2]",
        [_f(2, 2), np.array([0, 0]), _f(2, 2)],
        lambda x, i, u: op.scatter_elements(x, i, u, 0, "max"),
        lambda t, x, i, u: x.scatter_reduce(0, i, u, "amax"),
        lambda j, x, i, u: x.at[i].max(u),
    )
    yield Edge(
        section,
        "scatter([1, 2], [2], [5])",
        [_f(1, 2), np.array([2]), _f(5)],
        lambda x, i, u: op.scatter_elements(x, i, u, 0),
        lambda t, x, i, u: x.scatter(0, i, u),
        lambda j, x, i, u: x.at[i].set(u),
    )
    log_probabilities = np.round(_LOG_PROBABILITIES, 1)
    for targets, text, ignored in [
        ([0, -100], "nll_loss(x, [0, -100]), a mean", -100),
        ([-100, -100], "nll_loss(x, [-100, -100]), a mean", -100),
        ([0, 1], "nll_loss(x, [0, 1]), ignore_index=1", 1),
        ([0, 2], "nll_loss(x, [0, 2]), of two classes", -100),
    ]:
        yield Edge(section, text, [log_probabilities, np.array(targets)], *_nll("mean", ignored))


def _casts():
    section = "Steps and casts"
    x = _f(1.5, -1.5)
    yield Edge(
        section,
        "x + float(int(x)), x = [1.5, -1.5]",
        [x],
        lambda x: op.add(x, op.astype(op.astype(x, "int64"), "float64")),
        lambda t, x: x + x.long().double(),
        lambda j, x: x + x.astype("int64").astype("float64"),
    )
    yield Edge(
        section,
        "x * (x > 0), x = [1.5, -1.5]",
        [x],
        lambda x: op.multiply(x, op.astype(op.greater(x, _const(0.0)), "float64")),
        lambda t, x: x * (x > 0),
        lambda j, x: x * (x > 0),
    )
    yield Edge(
        section,
        "float64(float16(x)), x = [1e-8, 1e5]",
        [_f(1e-8, 1e5)],
        lambda x: op.astype(op.astype(x, "float16"), "float64"),
        lambda t, x: x.half().double(),
        lambda j, x: x.astype("float16").astype("float64"),
    )
    yield Edge(
        section,
        "x * float(argmax(x)), x = [1, 3]",
        [_f(1, 3)],
        lambda x: op.multiply(x, op.astype(op.argmax(x), "float64")),
        lambda t, x: x * t.argmax(x),
        lambda j, x: x * j.numpy.argmax(x),
    )
    yield Edge(
        section,
        "x * n, n = [2, 3] of int64",
        [x, np.array([2, 3])],
        lambda x, n: op.multiply(x, op.astype(n, "float64")),
        lambda t, x, n: x * n,
        lambda j, x, n: x * n,
    )


def _attention():
    q = np.array([[[[1.0]]]])
    bias = np.array([[[[-INF]]]])
    yield Edge(
        "Reductions",
        "attention, the only key masked by -inf",
        [q, q, q],
        lambda q, k, v: op.nn.attention(q, k, v, relax.const(bias, "float64")),
        lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(
            q, k, v, t.from_numpy(bias)
        ),
        lambda j, q, k, v: j.nn.dot_product_attention(q, k, v, bias=bias),
    )


def edges() -> list[Edge]:
    """Return all edges in the order of the page."""
    all_edges = [
        *_elementwise(),
        *_arithmetic(),
        *_reductions(),
        *_attention(),
        *_order(),
        *_indices(),
        *_casts(),
    ]
    sections = list(dict.fromkeys(edge.section for edge in all_edges))
    return sorted(all_edges, key=lambda edge: sections.index(edge.section))
