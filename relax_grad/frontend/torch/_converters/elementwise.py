"""Converters of element-wise operators, with PyTorch's type promotion."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes
from tvm import relax

from ....op import stop_gradient
from ._call import DTYPES, Call, converts, dtype, scalar, wide_dtype
from ._support import Converter, Refused

ELEMENTWISE: dict[str, Converter] = {}

_op = relax.op
_BITS = {"int8": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}


def promoted(call: Call, *names: str) -> str:
    """Return the dtype to which PyTorch promotes the named operands."""
    meta = call.meta()
    values = [meta[name] for name in names if meta[name] is not None]
    dtypes = elementwise_dtypes(*values, type_promotion_kind=KIND.NO_OPMATH)
    return DTYPES[dtypes[0]]


def _floating(kind: str) -> str:
    return kind if "float" in kind else DTYPES[torch.get_default_dtype()]


def _unary(function: Callable, in_float: bool = True, half: bool = True) -> Callable:
    """Return a converter of a function; ``half`` says that it rounds once in half precision."""

    def convert(call: Call, data: relax.Expr, **_: object) -> relax.Expr:
        kind = dtype(data)
        inner = _floating(kind) if in_float else kind
        if not half:
            inner = wide_dtype(inner)
        return call.cast(call.emit(function(call, call.cast(data, inner))), call.dtype)

    return convert


def _plain(function: Callable) -> Callable:
    return lambda call, data: function(data)


def log1p(call: Call, data: relax.Expr) -> relax.Expr:
    """Return ``log(1 + x)``, which is exact for small x; the gradient is that of the formula.

    For small x it is ``2 artanh(x / (2 + x))`` by its series. Kahan's correction does not serve
    here: the compiler simplifies ``(1 + x) - 1``.
    """
    kind = dtype(data)
    value = call.emit(_op.log(_op.add(data, scalar(1, kind))))
    fixed, rounded = (call.emit(stop_gradient(tensor)) for tensor in (data, value))
    small = call.emit(_op.less(_op.abs(fixed), scalar(0.05, kind)))
    fixed = call.emit(_op.where(small, fixed, scalar(0, kind)))
    z = call.emit(_op.divide(fixed, _op.add(fixed, scalar(2, kind))))
    square = call.emit(_op.multiply(z, z))
    series = scalar(2 / 13, kind)
    for power in (11, 9, 7, 5, 3, 1):
        series = call.emit(_op.add(_op.multiply(series, square), scalar(2 / power, kind)))
    exact = call.emit(_op.multiply(series, z))
    error = call.emit(_op.where(small, _op.subtract(exact, rounded), scalar(0, kind)))
    return call.emit(_op.add(value, error))


def expm1(call: Call, data: relax.Expr) -> relax.Expr:
    """Return ``exp(x) - 1``, which is exact for small x by Kahan's correction; the gradient is the
    formula's."""
    kind = dtype(data)
    power = call.emit(_op.exp(data))
    value = call.emit(_op.subtract(power, scalar(1, kind)))
    x, u, v = (call.emit(stop_gradient(tensor)) for tensor in (data, power, value))
    same = call.emit(_op.equal(u, scalar(1, kind)))
    small = call.emit(_op.less(_op.abs(x), scalar(0.5, kind)))
    safe = call.emit(_op.where(_op.logical_or(same, _op.logical_not(small)), scalar(2, kind), u))
    exact = _op.divide(_op.multiply(v, x), _op.log(safe))
    exact = call.emit(_op.where(same, x, exact))
    error = call.emit(_op.where(small, _op.subtract(exact, v), scalar(0, kind)))
    return call.emit(_op.add(value, error))


def _scaled_log(base: float) -> Callable:
    return lambda call, data: _op.multiply(_op.log(data), scalar(1 / math.log(base), dtype(data)))


def _reciprocal(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.divide(scalar(1, dtype(data)), data)


def _softsign(call: Call, data: relax.Expr) -> relax.Expr:
    return _op.divide(data, _op.add(_op.abs(data), scalar(1, dtype(data))))


_FLOATING = {
    **{
        f"{name}.default": _plain(getattr(_op, name))
        for name in (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp"),
            *("log", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
        )
    },
    "log2.default": _scaled_log(2),
    "log10.default": _scaled_log(10),
    "exp2.default": lambda call, data: _op.exp(
        _op.multiply(data, scalar(math.log(2), dtype(data)))
    ),
    "reciprocal.default": _reciprocal,
    "log1p.default": log1p,
    "expm1.default": expm1,
    "softsign.default": _softsign,
}
_ROUNDED_TWICE = {"log2.default", "log10.default", "log1p.default", "expm1.default"}
for _name, _function in _FLOATING.items():
    converts(ELEMENTWISE, _name)(_unary(_function, half=_name not in _ROUNDED_TWICE))


def _for_floats(function: Callable, other: Callable) -> Callable:
    def convert(call: Call, data: relax.Expr, **_: object) -> relax.Expr:
        return function(data) if "float" in dtype(data) else other(data)

    return convert


def _same(data: relax.Expr) -> relax.Expr:
    return data


for _name in ("ceil", "floor", "trunc", "round"):
    converts(ELEMENTWISE, f"{_name}.default")(_for_floats(getattr(_op, _name), _same))


def _finiteness(function: Callable, other: Callable) -> Callable:
    def convert(call: Call, data: relax.Expr) -> relax.Expr:
        if "float" not in dtype(data):
            return other(data, "bool")
        return function(call.cast(data, wide_dtype(dtype(data))))  # TVM has none for bfloat16

    return convert


converts(ELEMENTWISE, "abs.default")(
    lambda call, data: data if dtype(data) in ("bool", "uint8") else _op.abs(data)
)
converts(ELEMENTWISE, "neg.default")(lambda call, data: _op.negative(data))
converts(ELEMENTWISE, "square.default")(lambda call, data: _op.multiply(data, data))
converts(ELEMENTWISE, "isnan.default")(_finiteness(_op.isnan, _op.zeros_like))
converts(ELEMENTWISE, "isinf.default")(_finiteness(_op.isinf, _op.zeros_like))
converts(ELEMENTWISE, "isfinite.default")(_finiteness(_op.isfinite, _op.ones_like))


@converts(ELEMENTWISE, "sign.default", "sgn.default")
def _sign(call: Call, data: relax.Expr) -> relax.Expr:
    kind = dtype(data)
    if kind == "bool":
        return data
    zero = scalar(0, kind)
    signs = [call.cast(call.emit(compare(data, zero)), kind) for compare in (_op.greater, _op.less)]
    return stop_gradient(call.emit(_op.subtract(*signs)))


@converts(ELEMENTWISE, "round.decimals")
def _round(call: Call, data: relax.Expr, decimals: int) -> relax.Expr:
    if "float" not in dtype(data):
        return data
    kind = wide_dtype(dtype(data))
    scale = scalar(10.0 ** abs(decimals), kind)
    there, back = (_op.multiply, _op.divide) if decimals >= 0 else (_op.divide, _op.multiply)
    return call.cast(
        call.emit(back(_op.round(there(call.cast(data, kind), scale)), scale)), call.dtype
    )


def binary(
    function: Callable,
    names: tuple[str, str] = ("data", "other"),
    logical: Callable | None = None,
    in_float: bool = False,
) -> Callable:
    """Return a converter of a function of two operands; ``logical`` is the one for booleans."""

    def convert(call: Call, **arguments: Any) -> relax.Expr:
        kind = promoted(call, *names)
        if in_float:
            kind = _floating(kind)
        operands = [call.tensor(arguments[name], kind) for name in names]
        if kind == "bool":
            if logical is None:
                raise Refused("it has no form for booleans")
            return call.cast(call.emit(logical(*operands)), call.dtype)
        return call.cast(call.emit(function(*operands)), call.dtype)

    return convert


@converts(ELEMENTWISE, "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _add(call: Call, data: relax.Expr, other: float | relax.Expr, alpha: float = 1) -> relax.Expr:
    kind = promoted(call, "data", "other")
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    negative = call.node.target.__name__.startswith("sub")
    if kind == "bool":
        return _op.logical_or(data, other) if alpha else data
    if alpha != 1:
        other = call.emit(_op.multiply(other, call.tensor(alpha, kind)))
    return call.cast(call.emit((_op.subtract if negative else _op.add)(data, other)), call.dtype)


@converts(ELEMENTWISE, "rsub.Tensor", "rsub.Scalar")
def _rsub(call: Call, data: relax.Expr, other: float, alpha: float = 1) -> relax.Expr:
    kind = promoted(call, "data", "other")
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    if alpha != 1:
        data = call.emit(_op.multiply(data, call.tensor(alpha, kind)))
    return _op.subtract(other, data)


_product_of = binary(_op.multiply, logical=_op.logical_and)


@converts(ELEMENTWISE, "mul.Tensor", "mul.Scalar")
def _mul(call: Call, data: relax.Expr, other: float | relax.Expr) -> relax.Expr:
    """A product with 0 is computed in float32 at least, so that its legalization keeps NaN."""
    kind = promoted(call, "data", "other")
    if "float" not in kind or not isinstance(other, (int, float)) or other:
        return _product_of(call, data=data, other=other)
    wide = wide_dtype(kind)
    product = call.emit(_op.multiply(call.cast(data, wide), scalar(other, wide)))
    return call.cast(product, call.dtype)


converts(ELEMENTWISE, "atan2.default")(binary(_op.atan2, in_float=True))


@converts(
    ELEMENTWISE,
    *("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode", "floor_divide.default"),
)
def _div(
    call: Call, data: relax.Expr, other: float | relax.Expr, rounding_mode: str | None = None
) -> relax.Expr:
    kind = promoted(call, "data", "other")
    if call.node.target.__name__.startswith("floor_divide"):
        rounding_mode = "floor"
    if rounding_mode is None:
        kind = _floating(kind)
        return _op.divide(call.tensor(data, kind), call.tensor(other, kind))
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    if "float" in kind:
        quotient = call.emit(_op.divide(data, other))
        return stop_gradient(call.emit(getattr(_op, rounding_mode)(quotient)))
    if rounding_mode == "floor":
        return _op.floor_divide(data, other)
    # Relax has no truncating division: the quotient of the absolute values has the sign of the
    # operands.
    signed = kind != "uint8"
    if not signed:
        return _op.floor_divide(data, other)
    quotient = call.emit(_op.floor_divide(data, other))
    rest = call.emit(_op.subtract(data, _op.multiply(quotient, other)))
    zero = scalar(0, kind)
    below = _op.logical_and(_op.not_equal(rest, zero), _op.less(quotient, zero))
    return _op.add(quotient, call.cast(call.emit(below), kind))


@converts(ELEMENTWISE, "remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(call: Call, data: relax.Expr, other: float) -> relax.Expr:
    return _modulo(call, data, other, _op.floor, _op.floor_mod)


@converts(ELEMENTWISE, "fmod.Tensor", "fmod.Scalar")
def _fmod(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    return _modulo(call, data, other, _op.trunc, _op.mod)


def _modulo(
    call: Call, data: relax.Expr, other: float, rounding: Callable, exact: Callable
) -> relax.Expr:
    """Return the remainder; its gradient is the gradient of ``a - b round(a / b)``."""
    kind = promoted(call, "data", "other")
    is_exact = isinstance(other, (int, float)) and abs(math.frexp(other)[0]) == 0.5
    if "float" not in kind:
        return exact(call.tensor(data, kind), call.tensor(other, kind))
    wide = wide_dtype(kind)
    data, other = (call.cast(call.tensor(tensor, kind), wide) for tensor in (data, other))
    quotient = call.emit(stop_gradient(call.emit(rounding(_op.divide(data, other)))))
    # The divisor may be infinite.
    none = call.emit(_op.equal(quotient, scalar(0, wide)))

    def rest(data: relax.Expr, other: relax.Expr) -> relax.Expr:
        whole = _op.where(none, scalar(0, wide), _op.multiply(other, quotient))
        return call.emit(_op.subtract(data, whole))

    result = rest(data, other)
    if not is_exact:  # a power of two: the product has no rounding
        fixed, divisor = (call.emit(stop_gradient(tensor)) for tensor in (data, other))
        change = call.emit(_op.subtract(result, rest(fixed, divisor)))
        value = call.emit(_op.mod(fixed, divisor))
        if rounding is _op.floor:
            signs = call.emit(
                _op.less(_op.multiply(_op.sign(value), _op.sign(divisor)), scalar(0, wide))
            )
            value = call.emit(_op.where(signs, _op.add(value, divisor), value))
        result = call.emit(_op.add(value, change))
    return call.cast(result, kind)


@converts(ELEMENTWISE, "pow.Tensor_Scalar")
def _pow_scalar(call: Call, data: relax.Expr, exponent: float) -> relax.Expr:
    kind = call.dtype
    data = call.cast(data, kind)
    if not isinstance(exponent, (int, float)):
        return _op.power(data, call.tensor(exponent, kind))
    whole = float(exponent).is_integer()
    if whole and (0 <= exponent <= 4 or ("int" in kind and exponent >= 0)):
        return _product(call, data, int(exponent))
    if "int" in kind:
        raise Refused("an integer has no negative power")
    roots = {0.5: _op.sqrt, -0.5: _op.rsqrt}
    if exponent in roots:
        return roots[exponent](data)
    if exponent == -1:
        return _reciprocal(call, data)
    if exponent == -2:
        return _reciprocal(call, call.emit(_op.multiply(data, data)))
    return _op.power(data, scalar(exponent, kind))


def _product(call: Call, data: relax.Expr, exponent: int) -> relax.Expr:
    """Return a whole power by squaring."""
    if exponent == 0:
        return _op.ones_like(data)
    result, square = None, data
    while True:
        if exponent % 2:
            result = square if result is None else call.emit(_op.multiply(result, square))
        exponent //= 2
        if not exponent:
            return result
        square = call.emit(_op.multiply(square, square))


@converts(ELEMENTWISE, "pow.Tensor_Tensor", "pow.Scalar")
def _pow(call: Call, data: relax.Expr, exponent: float | relax.Expr) -> relax.Expr:
    kind = promoted(call, "data", "exponent")
    data, exponent = call.tensor(data, kind), call.tensor(exponent, kind)
    if "float" not in kind:
        if _BITS.get(kind, 64) > 32:
            raise Refused("powers of integers to tensors have no form in Relax; cast the base")
        whole = _op.round(_op.power(call.cast(data, "float64"), call.cast(exponent, "float64")))
        return call.cast(call.emit(whole), kind)
    return _op.power(data, exponent)


@converts(ELEMENTWISE, "hypot.default")
def _hypot(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """The operands are scaled by the larger one, so that no square overflows."""
    kind = wide_dtype(promoted(call, "data", "other"))
    operands = [call.cast(call.tensor(operand, kind), kind) for operand in (data, other)]
    fixed = [call.emit(stop_gradient(operand)) for operand in operands]
    sizes = (_op.abs(operand) for operand in fixed)
    size = call.emit(_op.maximum(*map(call.emit, sizes)))
    zero, one = scalar(0, kind), scalar(1, kind)
    is_plain = call.emit(_op.logical_and(_op.isfinite(size), _op.greater(size, zero)))
    size = call.emit(_op.where(is_plain, size, one))
    scaled = [call.emit(_op.divide(operand, size)) for operand in operands]
    squares = (call.emit(_op.multiply(operand, operand)) for operand in scaled)
    length = call.emit(_op.multiply(size, call.emit(_op.sqrt(call.emit(_op.add(*squares))))))
    # An infinite operand beside NaN has an infinite length.
    infinite = call.emit(_op.logical_or(*(call.emit(_op.isinf(operand)) for operand in fixed)))
    lost = call.emit(_op.logical_and(infinite, call.emit(_op.isnan(stop_gradient(length)))))
    return call.cast(call.emit(_op.where(lost, scalar(math.inf, kind), length)), call.dtype)


def _is_negative(call: Call, data: relax.Expr) -> relax.Expr:
    """Tell whether the sign of a number is set; zero may be negative, NaN is not."""
    zero, one = scalar(0, dtype(data)), scalar(1, dtype(data))
    below = call.emit(_op.less(data, zero))
    if "float" not in dtype(data):
        return below
    nothing = call.emit(_op.equal(data, zero))
    inverse = call.emit(_op.divide(one, call.emit(_op.where(nothing, data, one))))
    return call.emit(_op.logical_or(below, call.emit(_op.less(inverse, zero))))


@converts(ELEMENTWISE, "signbit.default")
def _signbit(call: Call, data: relax.Expr) -> relax.Expr:
    if dtype(data) in ("bool", "uint8"):
        return _op.zeros_like(data, "bool")
    return _is_negative(call, data)


@converts(ELEMENTWISE, "copysign.Tensor", "copysign.Scalar")
def _copysign(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """The gradient at zero is zero, and that at NaN is NaN."""
    kind = _floating(promoted(call, "data", "other"))
    data, other = call.tensor(data, kind), call.tensor(other, kind)
    fixed = call.emit(stop_gradient(data))
    negative = _is_negative(call, call.emit(stop_gradient(other)))
    changes = call.emit(_op.logical_xor(negative, _is_negative(call, fixed)))
    sign = call.emit(_op.where(changes, scalar(-1, kind), scalar(1, kind)))
    wrong = call.emit(_op.isnan(call.cast(fixed, wide_dtype(kind))))
    sign = call.emit(_op.where(wrong, fixed, sign))
    zero = call.emit(_op.where(negative, scalar(-0.0, kind), scalar(0, kind)))
    nothing = call.emit(_op.equal(fixed, scalar(0, kind)))
    return _op.where(nothing, zero, call.emit(_op.multiply(data, sign)))


@converts(ELEMENTWISE, "angle.default")
def _angle(call: Call, data: relax.Expr) -> relax.Expr:
    """Numbers below zero have the angle pi; NaN stays."""
    kind = call.dtype
    data = call.emit(stop_gradient(call.cast(data, kind)))
    below = call.emit(_op.less(data, scalar(0, kind)))
    angle = call.emit(_op.where(below, scalar(math.pi, kind), scalar(0, kind)))
    wrong = call.emit(_op.isnan(call.cast(data, wide_dtype(kind))))
    return _op.where(wrong, data, angle)


@converts(ELEMENTWISE, "ldexp.Tensor")
def _ldexp(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    """The factor is computed in PyTorch's dtype, which may be wider than the operand's."""
    power = _floating(promoted(call, "other"))
    factor = call.emit(_op.power(scalar(2, power), call.tensor(other, power)))
    kind = call.dtype
    return _op.multiply(call.tensor(data, kind), call.cast(factor, kind))


@converts(ELEMENTWISE, "logaddexp.default")
def _logaddexp(call: Call, data: relax.Expr, other: relax.Expr) -> relax.Expr:
    kind = promoted(call, "data", "other")
    return _op.log_add_exp(call.tensor(data, kind), call.tensor(other, kind))


@converts(ELEMENTWISE, "where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(
    call: Call, condition: relax.Expr, data: int | relax.Expr, other: float | relax.Expr
) -> relax.Expr:
    kind = call.dtype
    return _op.where(
        call.cast(condition, "bool"), call.tensor(data, kind), call.tensor(other, kind)
    )


@converts(ELEMENTWISE, "masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(call: Call, data: relax.Expr, mask: relax.Expr, value: float) -> relax.Expr:
    return _op.where(mask, call.tensor(value, dtype(data)), data)
