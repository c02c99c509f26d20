"""Converters of operators that draw random numbers.

The numbers have PyTorch's distributions, but PyTorch draws others. Each operator has a separate
stream. As in PyTorch, no gradient reaches the parameters of a distribution through
a drawn number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx
from tvm import relax, tirx

from ....ir.compat import dtype_of
from ....op import stop_gradient
from ... import random
from ._support import Importer, Refused

#: The largest integers that ``Tensor.random_`` draws into floating-point tensors, which hold all
#: integers up to them, and into booleans.
_MOST = {"bool": 1, "float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}

#: The moments of the activation that AlphaDropout keeps: the negative limit of SELU.
_ALPHA = 1.7580993408473766


def _arguments(importer: Importer, node: fx.Node) -> dict:
    """Return the arguments by name, the omitted ones with their defaults."""
    schema = node.target._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema}
    arguments.update(zip((argument.name for argument in schema), importer.args(node), strict=False))
    arguments.update(node.kwargs)
    if arguments.get("generator") is not None:
        raise Refused(
            "it draws from a torch.Generator, which the compiled function does not have; leave "
            "the argument generator out"
        )
    return arguments


def _type(importer: Importer, node: fx.Node) -> tuple[list, str]:
    """Return the shape and the dtype of the first result."""
    value = node.meta["val"]
    kind = importer.type_of(value[0] if isinstance(value, (tuple, list)) else value)
    return list(kind.shape.values), dtype_of(kind)


def drawn(importer: Importer, function: Callable, *args: Any, **kwargs: Any) -> relax.Expr:
    """Draw with the next stream: ``function(bb, seed, stream, *args, **kwargs)``."""
    if importer.level:
        raise Refused(
            "it draws random numbers in the backward function of a torch.autograd.Function; "
            "draw them in forward, and save them"
        )
    return function(importer.block_builder, importer.seed, importer.stream(), *args, **kwargs)


def _as(importer: Importer, value: relax.Expr, dtype: str) -> relax.Expr:
    return value if dtype_of(value.ty) == dtype else importer.emit(relax.op.astype(value, dtype))


def _scaled(
    importer: Importer, value: relax.Expr, factor: float, offset: float = 0.0
) -> relax.Expr:
    """Return ``value * factor + offset``."""
    dtype = dtype_of(value.ty)
    if factor != 1.0:
        value = importer.emit(relax.op.multiply(value, relax.const(factor, dtype)))
    if offset != 0.0:
        value = importer.emit(relax.op.add(value, relax.const(offset, dtype)))
    return value


# Dropout


def _dropout(importer: Importer, node: fx.Node) -> relax.Expr:
    data, rate, train = (_arguments(importer, node)[name] for name in ("input", "p", "train"))
    if not train or rate == 0.0:
        return data
    return drawn(importer, random.dropout, data, rate)[0]


def _native_dropout(importer: Importer, node: fx.Node) -> tuple:
    data, rate, train = (_arguments(importer, node)[name] for name in ("input", "p", "train"))
    if train is False:
        return data, importer.emit(relax.op.ones(data.ty.shape, "bool"))
    return drawn(importer, random.dropout, data, rate)


def _feature_dropout(importer: Importer, node: fx.Node) -> relax.Expr:
    data, rate, train = (_arguments(importer, node)[name] for name in ("input", "p", "train"))
    if not train or rate == 0.0:
        return data
    return drawn(importer, random.dropout, data, rate, _of_features(data))[0]


def _of_features(data: relax.Expr) -> list:
    """Return the shape of numbers that the elements of a channel share."""
    extents = list(data.ty.shape.values)
    if len(extents) < 2:
        raise Refused(f"it needs data of at least 2 axes, but they are {len(extents)}")
    return [*extents[:2], *(1 for _ in extents[2:])]


def _alpha_dropout(importer: Importer, node: fx.Node) -> relax.Expr:
    return _alpha(importer, node, lambda data: list(data.ty.shape.values))


def _feature_alpha_dropout(importer: Importer, node: fx.Node) -> relax.Expr:
    return _alpha(importer, node, _of_features)


def _alpha(importer: Importer, node: fx.Node, noise_shape: Callable) -> relax.Expr:
    """Set dropped elements to a negative value, and keep mean and variance by an affine
    function."""
    data, rate, train = (_arguments(importer, node)[name] for name in ("input", "p", "train"))
    if not train or rate == 0.0:
        return data
    if rate == 1.0:
        return _scaled(importer, data, 0.0)
    scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * rate + 1.0) * (1.0 - rate))
    dropped, shift = -_ALPHA * scale * (1.0 - rate), _ALPHA * scale * rate
    mask = drawn(importer, random.bernoulli, noise_shape(data), 1.0 - rate)
    kept = _scaled(importer, data, scale, shift)
    return importer.emit(relax.op.where(mask, kept, relax.const(dropped, dtype_of(data.ty))))


def _rrelu(importer: Importer, node: fx.Node) -> tuple:
    """Multiply negative elements by uniform numbers; return the result and the factors of all
    elements."""
    arguments = _arguments(importer, node)
    data, low, high = (arguments[name] for name in ("self", "lower", "upper"))
    shape, dtype = _type(importer, node)
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    positive = importer.emit(relax.op.greater(data, zero))
    if arguments["training"]:
        slope = drawn(importer, random.uniform, shape, dtype, low, high)
    else:
        slope = relax.const((low + high) / 2, dtype)
    negative = importer.emit(relax.op.multiply(data, slope))
    result = importer.emit(relax.op.where(positive, data, negative))
    return result, importer.emit(relax.op.where(positive, one, slope))


# Bernoulli


def _bernoulli(importer: Importer, node: fx.Node) -> relax.Expr:
    arguments = _arguments(importer, node)
    shape, dtype = _type(importer, node)
    probability = arguments["p"] if "p" in arguments else arguments["self"]
    return _as(importer, drawn(importer, random.bernoulli, shape, probability), dtype)


# Continuous distributions


def _rand(importer: Importer, node: fx.Node) -> relax.Expr:
    _arguments(importer, node)
    return drawn(importer, random.uniform, *_type(importer, node))


def _uniform(importer: Importer, node: fx.Node) -> relax.Expr:
    arguments = _arguments(importer, node)
    return drawn(
        importer, random.uniform, *_type(importer, node), arguments["from"], arguments["to"]
    )


def _randn(importer: Importer, node: fx.Node) -> relax.Expr:
    _arguments(importer, node)
    return drawn(importer, random.normal, *_type(importer, node))


def _normal(importer: Importer, node: fx.Node) -> relax.Expr:
    """Each of mean and deviation is a number or a tensor."""
    arguments = _arguments(importer, node)
    shape, dtype = _type(importer, node)
    result = drawn(importer, random.normal, shape, dtype)
    for function, name in ((relax.op.multiply, "std"), (relax.op.add, "mean")):
        operand = arguments[name]
        if isinstance(operand, relax.Expr):
            operand = importer.emit(stop_gradient(_as(importer, operand, dtype)))
        else:
            operand = relax.const(operand, dtype)
        result = importer.emit(function(result, operand))
    return result


def _exponential(importer: Importer, node: fx.Node) -> relax.Expr:
    rate = _arguments(importer, node)["lambd"]
    return drawn(importer, random.exponential, *_type(importer, node), rate)


def _log_normal(importer: Importer, node: fx.Node) -> relax.Expr:
    arguments = _arguments(importer, node)
    shape, dtype = _type(importer, node)
    result = drawn(importer, random.normal, shape, _wide(dtype))
    result = importer.emit(
        relax.op.exp(_scaled(importer, result, arguments["std"], arguments["mean"]))
    )
    return _as(importer, result, dtype)


def _cauchy(importer: Importer, node: fx.Node) -> relax.Expr:
    """The tangent of a uniform angle; 0.5 is the angle of the median."""
    arguments = _arguments(importer, node)
    shape, dtype = _type(importer, node)
    angle = drawn(importer, random.uniform, shape, _wide(dtype), -math.pi / 2, math.pi / 2)
    result = importer.emit(relax.op.tan(angle))
    return _as(importer, _scaled(importer, result, arguments["sigma"], arguments["median"]), dtype)


def _geometric(importer: Importer, node: fx.Node) -> relax.Expr:
    """The number of trials up to the first success."""
    probability = _arguments(importer, node)["p"]
    shape, dtype = _type(importer, node)
    result = drawn(importer, random.exponential, shape, _wide(dtype), -math.log1p(-probability))
    return _as(importer, importer.emit(relax.op.ceil(result)), dtype)


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


# Integers


def _randint(importer: Importer, node: fx.Node) -> relax.Expr:
    arguments = _arguments(importer, node)
    return _integers(importer, node, arguments.get("low", 0), arguments["high"])


def _random(importer: Importer, node: fx.Node) -> relax.Expr:
    """``Tensor.random_``: without an upper bound, up to the largest number of the dtype."""
    arguments = _arguments(importer, node)
    low, high = arguments.get("from") or 0, arguments.get("to")
    return _integers(importer, node, low, high)


def _integers(importer: Importer, node: fx.Node, low: int, high: int | None) -> relax.Expr:
    shape, dtype = _type(importer, node)
    if high is None:
        most = _MOST[dtype] if dtype in _MOST else int(tirx.max_value(dtype))
        high = most + 1
    return drawn(importer, random.randint, low, high, shape, dtype)


def _randperm(importer: Importer, node: fx.Node) -> relax.Expr:
    """The order of random keys of 63 bits. Two keys are equal with a probability of about n * n /
    2**64."""
    _arguments(importer, node)
    shape, dtype = _type(importer, node)
    keys = drawn(importer, random.randint, 0, 2**63, shape)
    return _as(importer, importer.emit(relax.op.argsort(keys, axis=0, dtype="int64")), dtype)


def _refused(reason: str) -> Callable:
    def convert(importer: Importer, node: fx.Node) -> None:
        raise Refused(reason)

    return convert


RANDOM = {
    "dropout.default": _dropout,
    "native_dropout.default": _native_dropout,
    "feature_dropout.default": _feature_dropout,
    "alpha_dropout.default": _alpha_dropout,
    "feature_alpha_dropout.default": _feature_alpha_dropout,
    "rrelu.default": lambda importer, node: _rrelu(importer, node)[0],
    "rrelu_with_noise.default": lambda importer, node: _rrelu(importer, node)[0],
    "rrelu_with_noise_functional.default": _rrelu,
    **dict.fromkeys(("bernoulli.default", "bernoulli.p", "bernoulli.Tensor"), _bernoulli),
    **dict.fromkeys(("rand.default", "rand.generator", "rand_like.default"), _rand),
    **dict.fromkeys(("randn.default", "randn.generator", "randn_like.default"), _randn),
    **dict.fromkeys(
        (
            *("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
            *("normal.float_float", "normal_functional.default"),
        ),
        _normal,
    ),
    "uniform.default": _uniform,
    "exponential.default": _exponential,
    "log_normal.default": _log_normal,
    "cauchy.default": _cauchy,
    "geometric.default": _geometric,
    **dict.fromkeys(
        (
            *("randint.default", "randint.generator", "randint.low", "randint.low_generator"),
            *("randint_like.default", "randint_like.low_dtype"),
        ),
        _randint,
    ),
    **dict.fromkeys(("random.default", "random.to", "random.from"), _random),
    **dict.fromkeys(("randperm.default", "randperm.generator"), _randperm),
    "multinomial.default": _refused(
        "it draws indices with given probabilities; draw them by the Gumbel trick instead: "
        "torch.argmax(torch.log(p) - torch.log(torch.empty_like(p).exponential_()), -1), or "
        "outside of the model"
    ),
    **dict.fromkeys(
        (
            *("_standard_gamma.default", "_sample_dirichlet.default"),
            *("poisson.default", "binomial.default"),
        ),
        _refused(
            "it draws by rejection, whose number of steps is random; draw outside of the model, "
            "and pass an input"
        ),
    ),
}
