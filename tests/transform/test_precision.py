"""The table of dtypes, against those of torch.autocast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tvm import relax
from tvm.ir import Op
from tvm.relax import op

from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.compat import dtype_of
from relax_grad.op.quantized import quantized_matmul
from relax_grad.transform import Autocast
from relax_grad.transform._precision import OPERATORS, Precision

torch = pytest.importorskip("torch")

#: Operators in float32 that torch.autocast for CPUs computes in the dtype of the data: Relax has
#: losses written out in them. Those of CUDA compute in float32 too.
WIDER = {
    *("exp", "log", "log_add_exp", "power", "softplus", "cumprod", "log_softmax"),
    *("acosh", "asinh", "cosh", "sinh", "tan", "acos", "asin", "rsqrt"),
}

#: Operators that keep their dtypes.
KEPT = OPERATORS[Precision.KEPT]

F = torch.nn.functional


def _unary(name: str, function: Callable | None = None) -> tuple[Callable, Callable]:
    return (lambda h, f: getattr(op, name)(h)), (lambda h, f: (function or getattr(torch, name))(h))


def _nn(name: str, function: Callable, *arguments, **attrs) -> tuple[Callable, Callable]:
    return (lambda h, f: getattr(op.nn, name)(h, **attrs)), (lambda h, f: function(h, *arguments))


def _binary(name: str) -> tuple[Callable, Callable]:
    return (lambda h, f: getattr(op, name)(h, f)), (lambda h, f: getattr(torch, name)(h, f))


def _image(h: relax.Expr) -> relax.Expr:
    return op.reshape(h, (2, 3, 2, 2))


def _vector(f: relax.Expr) -> relax.Expr:
    return op.reshape(op.strided_slice(f, [0, 1], [0, 0], [1, 1]), (4,))


#: Calls of bfloat16 h and float32 f of shape (2, 3, 4), in Relax and in PyTorch.
CASES = {
    **{
        name: _unary(name)
        for name in (
            *("abs", "negative", "ceil", "floor", "round", "sqrt", "rsqrt", "square", "sign"),
            *("exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "sigmoid", "erf"),
            *("asin", "acos", "atan", "asinh", "acosh", "atanh"),
        )
    },
    **{name: _binary(name) for name in ("add", "subtract", "multiply", "divide", "maximum")},
    "log_add_exp": (lambda h, f: op.log_add_exp(h, h), lambda h, f: torch.logaddexp(h, h)),
    "power": (
        lambda h, f: op.power(h, relax.const(2.0, "float32")),
        lambda h, f: torch.pow(h, 2.0),
    ),
    "scalar": (
        lambda h, f: op.multiply(h, relax.const(2.0, "float32")),
        lambda h, f: h * torch.tensor(2.0),
    ),
    "matmul": (
        lambda h, f: op.matmul(f, op.permute_dims(h, [0, 2, 1])),
        lambda h, f: f @ h.transpose(1, 2),
    ),
    "einsum": (
        lambda h, f: op.einsum((f, h), "abc,abc->ab"),
        lambda h, f: torch.einsum("abc,abc->ab", f, h),
    ),
    "concat": (lambda h, f: op.concat([h, f], 1), lambda h, f: torch.cat([h, f], 1)),
    "stack": (lambda h, f: op.stack([h, f], 1), lambda h, f: torch.stack([h, f], 1)),
    "where": (
        lambda h, f: op.where(op.greater(f, h), h, f),
        lambda h, f: torch.where(f > h, h, f),
    ),
    "mean": (lambda h, f: op.mean(h, 1), lambda h, f: h.mean(1)),
    "sum": (lambda h, f: op.sum(h, 1), lambda h, f: h.sum(1)),
    "cumsum": (lambda h, f: op.cumsum(h, 1), lambda h, f: h.cumsum(1)),
    "cumprod": (lambda h, f: op.cumprod(h, 1), lambda h, f: h.cumprod(1)),
    "prod": (lambda h, f: op.prod(h, 1), lambda h, f: h.prod(1)),
    "max": (lambda h, f: op.max(h, 1), lambda h, f: h.amax(1)),
    "relu": _nn("relu", torch.relu),
    "gelu": _nn("gelu", F.gelu),
    "silu": _nn("silu", F.silu),
    "selu": _nn("selu", F.selu),
    "leakyrelu": _nn("leakyrelu", F.leaky_relu),
    "softplus": _nn("softplus", F.softplus),
    "softmax": _nn("softmax", F.softmax, -1),
    "log_softmax": _nn("log_softmax", F.log_softmax, -1),
    "prelu": (
        lambda h, f: op.nn.prelu(h, _vector(f), axis=2),
        lambda h, f: F.prelu(h.transpose(1, 2), f[0, 0]),
    ),
    "layer_norm": (
        lambda h, f: op.nn.layer_norm(h, _vector(f), _vector(f), [-1]),
        lambda h, f: F.layer_norm(h, (4,), f[0, 0], f[0, 0]),
    ),
    "max_pool2d": (
        lambda h, f: op.nn.max_pool2d(_image(h), (2, 2)),
        lambda h, f: F.max_pool2d(h.reshape(2, 3, 2, 2), 2),
    ),
    "avg_pool2d": (
        lambda h, f: op.nn.avg_pool2d(_image(h), (2, 2)),
        lambda h, f: F.avg_pool2d(h.reshape(2, 3, 2, 2), 2),
    ),
    "conv2d": (
        lambda h, f: op.nn.conv2d(op.reshape(f, (2, 3, 2, 2)), op.reshape(h, (8, 3, 1, 1))),
        lambda h, f: F.conv2d(f.reshape(2, 3, 2, 2), h.reshape(8, 3, 1, 1)),
    ),
    "attention": (
        lambda h, f: op.nn.attention(*(op.reshape(t, (2, 3, 1, 4)) for t in (f, h, f))),
        lambda h, f: F.scaled_dot_product_attention(*(t[:, None] for t in (f, h, f))),
    ),
}


def under_autocast(build: Callable, is_half: bool = True) -> relax.Function:
    """Return the function of a call under Autocast."""
    x, w, f = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (2, 3, 5)), ("w", (5, 4)), ("f", (2, 3, 4)))
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [x, w, f]):
        with bb.dataflow():
            h = bb.emit(op.matmul(x, w)) if is_half else f
            result = bb.emit_output(build(h, f))
        bb.emit_func_output(result)
    return Autocast()(bb.get())["main"]


def dtype_of_result(build: Callable, is_half: bool = True) -> str:
    """Return the dtype of a call under Autocast."""
    main = under_autocast(build, is_half)
    assert dtype_of(main.ret_ty) == "float32"
    values = {binding.var: binding.value for binding in bindings_of(main.body)}
    value = values[main.body.body]
    is_cast = isinstance(value, relax.Call) and value.op.name == "relax.astype"
    return dtype_of(value.args[0].ty if is_cast else value.ty)


@pytest.mark.parametrize("name", CASES)
def test_dtypes_are_those_of_torch_autocast(name):
    build, function = CASES[name]
    found = dtype_of_result(build)
    with torch.autocast("cpu", torch.bfloat16):
        f = torch.ones(2, 3, 4) / 2
        result = function(torch.ones(2, 3, 5) @ torch.ones(5, 4) / 20, f)
    wanted = str(result.dtype).removeprefix("torch.")
    assert (found, wanted) == (("float32", "bfloat16") if name in WIDER else (wanted, wanted))


def test_products_with_integers_keep_their_scales():
    """Data and result are in the half precision, also after a bias is added."""

    def product(h, f):
        numbers = relax.const(np.ones((5, 1, 16), "int8"))
        emit = relax.BlockBuilder.current().emit
        result = emit(quantized_matmul(f, numbers, relax.const(np.ones((5, 1), "float32"))))
        return op.add(result, relax.const(np.ones(5, "float32")))

    assert dtype_of_result(product, is_half=False) == "bfloat16"
    calls = [binding.value for binding in bindings_of(under_autocast(product, False).body)]
    (found,) = (call for call in calls if call.op.name == "relax.grad.quantized_matmul")
    assert [dtype_of(operand.ty) for operand in found.args] == ["bfloat16", "int8", "float32"]


def test_losses_are_in_float32():
    """Those that Relax has as operators, and sums over all axes."""
    classes = relax.const([[0] * 3] * 2, "int64")
    target = op.reshape(classes, (6,))

    def negative_log_likelihood(h, f):
        return op.nn.nll_loss(op.reshape(h, (6, 4)), target)

    def cross_entropy(h, f):
        return op.nn.cross_entropy_with_logits(op.reshape(h, (24,)), op.reshape(f, (24,)))

    for build in (negative_log_likelihood, cross_entropy, lambda h, f: op.mean(op.square(h))):
        assert dtype_of_result(build) == "float32"


def test_operators_of_the_table_exist_and_are_on_the_page():
    page = (Path(__file__).parents[2] / "docs/trainer.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", page))
    families = "conv", "attention"  # which the page names in words
    names = [name for group in OPERATORS.values() for name in group]
    assert len(set(names)) == len(names)
    for name in names:
        assert Op.get(name).name == name
        short = name.rpartition(".")[2]
        assert (
            short in named
            or short.startswith(families)
            or name in (*KEPT, *OPERATORS[Precision.DATA])
        ), name
