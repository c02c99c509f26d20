"""Random numbers as Relax expressions: a function of a seed, a stream and the position in the
tensor.

The generator is Philox 4x32-10. The seed is its key. The counter consists of the position in the
low half and the stream in the high half, so that tensors drawn with other seeds or streams are
independent, and the numbers do not depend on the target or on the number of threads. A tensor with
more elements begins with the same numbers.

All numbers are constants in differentiation. They are drawn once, and the backward pass uses the
same ones.

Examples
--------
>>> import numpy as np, tvm
>>> from relax_grad import target
>>> from relax_grad.frontend import random
>>> from tvm import relax
>>> seed = relax.Var("seed", relax.TensorType((), "int64"))
>>> bb = relax.BlockBuilder()
>>> with bb.function("main", [seed]):
...     with bb.dataflow():
...         drawn = [
...             random.uniform(bb, seed, 0, (1000,)),
...             random.exponential(bb, seed, 1, (1000,)),
...             random.bernoulli(bb, seed, 2, (1000,), 0.25),
...             random.bits(bb, seed, 3, (1000,)),
...         ]
...         drawn = bb.emit_output(relax.Tuple(drawn))
...     _ = bb.emit_func_output(drawn)
>>> executable = tvm.compile(bb.get(), target.host(), relax_pipeline="relax_grad")
>>> machine = relax.VirtualMachine(executable, tvm.cpu())
>>> uniform, exponential, bernoulli, bits = (each.numpy() for each in machine["main"](np.array(7)))
>>> round(float(uniform.mean()), 1), round(float(exponential.mean()), 1)
(0.5, 1.0)
>>> bernoulli.dtype, bits.dtype
(dtype('bool'), dtype('uint32'))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax, te, tirx

from ..ir.compat import Analyzer, dtype_of
from ..ir.module import FIRST_ELEMENTS
from ..topi.philox import Form, philox

Extents = Sequence["int | tirx.PrimExpr"]

__all__ = [
    "bernoulli",
    "bits",
    "dropout",
    "exponential",
    "normal",
    "randint",
    "uniform",
]

#: The binary digits of uniform numbers of each dtype: those that all numbers in [1/2, 1) have.
_DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}

#: The least exponential number, as a power of 2. No number is 0, so that the logarithm is finite.
_LEAST_EXPONENTIAL = {"float32": -24, "float64": -53}


def bits(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    dtype: str = "uint32",
) -> relax.Var:
    """Draw integers of which every bit is random.

    Parameters
    ----------
    bb : relax.BlockBuilder
        The builder to emit into.
    seed : relax.Expr or int
        The seed: an int64 tensor of shape (), or a number. Any number will do, negative ones too.
    stream : relax.Expr or int
        The number of the stream: like the seed. Tensors with the same seed need different streams.
    shape : Sequence[int or tirx.PrimExpr]
        The shape of the result.
    dtype : str
        ``"uint32"`` or ``"uint64"``.

    Returns
    -------
    result : relax.Var
        The integers.
    """
    forms = {"uint32": Form("bits"), "uint64": Form("long_bits")}
    if dtype not in forms:
        raise ValueError(f"dtype must be one of {', '.join(forms)}, but it is {dtype!r}")
    return _drawn(bb, seed, stream, shape, forms[dtype])


def uniform(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    dtype: str = "float32",
    low: float = 0.0,
    high: float = 1.0,
) -> relax.Var:
    """Draw numbers that are uniform in ``[low, high)``.

    Parameters
    ----------
    bb, seed, stream, shape
        As for :func:`bits`.
    dtype : str
        A floating-point dtype. The numbers between 0 and 1 are multiples of 2**-11 for float16,
        2**-8 for bfloat16, 2**-24 for float32 and 2**-53 for float64.
    low, high : float
        The bounds. As in PyTorch, ``low + u * (high - low)`` may round to ``high``.

    Returns
    -------
    result : relax.Var
        The numbers.
    """
    _check_float(dtype)
    form = Form("long_uniform") if dtype == "float64" else Form("uniform", _DIGITS[dtype])
    result = _drawn(bb, seed, stream, shape, form)
    if high - low != 1.0:
        result = _times(bb, result, high - low)
    if low:
        result = bb.emit(relax.op.add(result, _like(low, result)))
    return _as(bb, result, dtype)


def normal(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    dtype: str = "float32",
) -> relax.Var:
    """Draw numbers of the standard normal distribution, by the transformation of Box and Muller.

    Parameters
    ----------
    bb, seed, stream, shape
        As for :func:`bits`.
    dtype : str
        A floating-point dtype. Half precision is rounded from float32, whose absolute values are at
        most 6.8.

    Returns
    -------
    result : relax.Var
        The numbers.
    """
    _check_float(dtype)
    _, form = _positive(dtype)
    rows, count = _rows(shape, form)
    numbers = _rows_of(bb, seed, stream, rows, form)
    half = form.per_block // 2
    radius, angle = (
        bb.emit(relax.op.strided_slice(numbers, [1], [i * half], [(i + 1) * half])) for i in (0, 1)
    )
    radius = bb.emit(relax.op.log(radius))
    radius = bb.emit(relax.op.sqrt(_times(bb, radius, -2.0)))
    parts = [
        bb.emit(relax.op.multiply(radius, bb.emit_te(function, angle)))
        for function in (_cosine_of_turns, _sine_of_turns)
    ]
    result = bb.emit(relax.op.concat(parts, axis=1))
    return _as(bb, _shaped(bb, result, rows * form.per_row, count, shape), dtype)


def exponential(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    dtype: str = "float32",
    rate: float = 1.0,
) -> relax.Var:
    """Draw numbers of an exponential distribution. They are positive before they are rounded to
    half precision.

    Parameters
    ----------
    bb, seed, stream, shape
        As for :func:`bits`.
    dtype : str
        A floating-point dtype.
    rate : float
        The rate: 1 divided by the mean.

    Returns
    -------
    result : relax.Var
        The numbers.
    """
    _check_float(dtype)
    wide, form = _positive(dtype)
    result = bb.emit(relax.op.log(_drawn(bb, seed, stream, shape, form)))
    least = _like(2.0 ** _LEAST_EXPONENTIAL[wide], result)
    result = bb.emit(relax.op.maximum(bb.emit(relax.op.negative(result)), least))
    if rate != 1.0:
        result = _times(bb, result, 1.0 / rate)
    return _as(bb, result, dtype)


def bernoulli(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    probability: float | relax.Expr,
) -> relax.Var:
    """Draw booleans that are true with a probability.

    Parameters
    ----------
    bb, seed, stream, shape
        As for :func:`bits`.
    probability : float or relax.Expr
        The probability, which is rounded to a multiple of 2**-32; or a floating-point tensor of
        probabilities that broadcasts to ``shape``. 0 is always false, and 1 always true.

    Returns
    -------
    result : relax.Var
        The booleans.

    Raises
    ------
    ValueError
        If the probability is a number outside of [0, 1].
    """
    if not isinstance(probability, relax.Expr):
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability must be between 0 and 1, but it is {probability!r}")
        form = Form("below", round(probability * 2.0**32))
        return _drawn(bb, seed, stream, shape, form)
    wide = "float64" if dtype_of(probability.ty) == "float64" else "float32"
    numbers = uniform(bb, seed, stream, shape, wide)
    return bb.emit(relax.op.less(numbers, _as(bb, probability, wide)))


def randint(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    low: int,
    high: int,
    shape: Extents,
    dtype: str = "int64",
) -> relax.Var:
    """Draw integers that are uniform in ``[low, high)``.

    Parameters
    ----------
    bb, seed, stream
        As for :func:`bits`.
    low, high : int
        The bounds, which fit into int64. Each integer is a number of 63 bits modulo ``high - low``.
    shape : Sequence[int or tirx.PrimExpr]
        The shape of the result.
    dtype : str
        The dtype of the result, of integers or floating-point numbers.

    Returns
    -------
    result : relax.Var
        The integers.

    Raises
    ------
    ValueError
        If the interval is empty, or has more than 2**63 integers.
    """
    if not low < high <= low + 2**63:
        raise ValueError(
            f"high must be above low, by at most 2**63, but the bounds are {low} and {high}"
        )
    numbers = _drawn(bb, seed, stream, shape, Form("long_bits"))
    span, first = high - low, tirx.const(low, "int64")

    def shifted(x: te.Tensor) -> te.Tensor:
        def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
            # Numbers of 63 bits are positive as int64, and no operation overflows.
            number = tirx.Cast("int64", tirx.shift_right(x(*index), tirx.const(1, "uint64")))
            if span < 2**63:
                number = tirx.truncmod(number, tirx.const(span, "int64"))
            return number + first

        return te.compute(x.shape, element, name="randint")

    return _as(bb, bb.emit_te(shifted, numbers), dtype)


def dropout(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    data: relax.Expr,
    rate: float,
    noise_shape: Extents | None = None,
) -> tuple[relax.Expr, relax.Expr]:
    """Set elements to 0 with a probability, and divide the others by the probability to keep them.

    Parameters
    ----------
    bb, seed, stream
        As for :func:`bits`.
    data : relax.Expr
        A floating-point tensor of known shape.
    rate : float
        The probability of 0.
    noise_shape : Sequence[int or tirx.PrimExpr], optional
        A shape that broadcasts to the shape of the data: elements that share a number are kept or
        dropped together. By default, each element has its own.

    Returns
    -------
    result : relax.Expr
        The data with dropped elements. Only the kept elements have a gradient.
    mask : relax.Expr
        The mask: booleans of the shape of the noise, true where elements are kept.

    Raises
    ------
    ValueError
        If the rate is outside of [0, 1].
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"rate must be between 0 and 1, but it is {rate!r}")
    shape = list(data.ty.shape.values) if noise_shape is None else noise_shape
    if rate == 0.0:
        return data, bb.emit(relax.op.ones(list(shape), "bool"))
    mask = bernoulli(bb, seed, stream, shape, 1.0 - rate)
    scale = 0.0 if rate == 1.0 else 1.0 / (1.0 - rate)
    zero = _like(0.0, data)
    return bb.emit(relax.op.where(mask, _times(bb, data, scale), zero)), mask


def _half_turns(share: tirx.PrimExpr, dtype: str) -> tuple:
    """Return the sine and the cosine of ``pi * (share - 1 / 2)``, for a share of a turn between 0
    and 1.

    In float32, they are Taylor polynomials, which LLVM vectorises; their absolute errors are below
    1e-7.
    """

    def number(value: float) -> tirx.PrimExpr:
        return tirx.const(value, dtype)

    angle = (share - number(0.5)) * number(math.pi)
    if dtype == "float64":
        return tirx.sin(angle), tirx.cos(angle)
    square = angle * angle
    sine, cosine = number(0.0), number(0.0)
    for i in range(6, -1, -1):
        sine = sine * square + number((-1) ** i / math.factorial(2 * i + 1))
        cosine = cosine * square + number((-1) ** i / math.factorial(2 * i))
    return sine * angle, cosine


def _cosine_of_turns(share: te.Tensor) -> te.Tensor:
    """Return the cosine of ``2 * pi * (share - 1 / 2)``."""

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        sine, _ = _half_turns(share(*index), str(share.dtype))
        return tirx.const(1.0, str(share.dtype)) - tirx.const(2.0, str(share.dtype)) * sine * sine

    return te.compute(share.shape, element, name="cosine")


def _sine_of_turns(share: te.Tensor) -> te.Tensor:
    """Return the sine of ``2 * pi * (share - 1 / 2)``."""

    def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
        sine, cosine = _half_turns(share(*index), str(share.dtype))
        return tirx.const(2.0, str(share.dtype)) * sine * cosine

    return te.compute(share.shape, element, name="sine")


def _check_float(dtype: str) -> None:
    if dtype not in _DIGITS:
        raise ValueError(f"dtype must be one of {', '.join(_DIGITS)}, but it is {dtype!r}")


def _positive(dtype: str) -> tuple[str, Form]:
    """Return the dtype to compute in, and the form of numbers above 0."""
    if dtype == "float64":
        return dtype, Form("long_positive")
    return "float32", Form("positive")


def _like(value: float, data: relax.Expr) -> relax.Expr:
    return relax.const(value, dtype_of(data.ty))


def _times(bb: relax.BlockBuilder, data: relax.Expr, factor: float) -> relax.Expr:
    return bb.emit(relax.op.multiply(data, _like(factor, data)))


def _as(bb: relax.BlockBuilder, data: relax.Expr, dtype: str) -> relax.Expr:
    return data if dtype_of(data.ty) == dtype else bb.emit(relax.op.astype(data, dtype))


def _drawn(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    shape: Extents,
    form: Form,
) -> relax.Var:
    """Emit numbers of a form in a shape."""
    rows, count = _rows(shape, form)
    numbers = _rows_of(bb, seed, stream, rows, form)
    return _shaped(bb, numbers, rows * form.per_row, count, shape)


def _rows(shape: Extents, form: Form) -> tuple:
    """Return the number of rows that hold the elements of a shape, and the number of elements; each
    is at least 1 row."""
    count = _simplified(math.prod(shape))
    if isinstance(count, int):
        return max(1, -(-count // form.per_row)), count
    return _simplified((count + (form.per_row - 1)) // form.per_row), count


def _simplified(extent: int | tirx.PrimExpr) -> int | tirx.PrimExpr:
    """Return an extent as an integer where it is known."""
    if isinstance(extent, int):
        return extent
    extent = Analyzer().simplify(extent)
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def _rows_of(
    bb: relax.BlockBuilder,
    seed: relax.Expr | int,
    stream: relax.Expr | int,
    rows: int | tirx.PrimExpr,
    form: Form,
) -> relax.Var:
    """Emit rows of numbers."""
    function = bb.add_func(philox(rows if isinstance(rows, int) else None, form), "philox")
    operands = [_scalar(scalar) for scalar in (seed, stream)]
    kind = relax.TensorType(
        [rows, *map(int, (form.per_block, form.per_row // form.per_block))], form.dtype
    )
    return bb.emit(relax.op.call_tir(function, relax.Tuple(operands), kind))


def _scalar(value: relax.Expr | int) -> relax.Expr:
    if isinstance(value, relax.Expr):
        return value
    # Numbers are taken modulo 2**64, like seeds of PyTorch.
    return relax.const(np.uint64(int(value) % 2**64).astype("int64"), "int64")


def _shaped(
    bb: relax.BlockBuilder,
    rows: relax.Expr,
    held: int | tirx.PrimExpr,
    count: int | tirx.PrimExpr,
    shape: Extents,
) -> relax.Var:
    """Emit the first elements of rows in a shape."""
    if Analyzer().can_prove_equal(held, count):
        return bb.emit(relax.op.reshape(rows, list(shape)))
    flat = bb.emit(relax.op.reshape(rows, [held]))

    def first(x: te.Tensor, extents: Extents) -> te.Tensor:
        extents = list(extents)

        def element(*index: tirx.PrimExpr) -> tirx.PrimExpr:
            at = tirx.const(0, "int64")
            for i, extent in zip(index, extents, strict=True):
                at = at * extent + i
            return x(at)

        return te.compute(extents, element, name="first")

    return bb.emit_te(
        first, flat, relax.ShapeExpr(list(shape)), primfunc_attrs={FIRST_ELEMENTS: True}
    )
