"""Calls of PyTorch's functions of one operand and of two, element by element."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

from .operands import DTYPES, index, normal, positive, unit, whole


def elementwise() -> Iterator[Case]:
    """Yield calls of functions of one operand and of two."""
    for name in (
        "exp",
        "sin",
        "cos",
        "tan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "atan",
        "sigmoid",
        "erf",
        "expm1",
        "square",
        "neg",
        "abs",
        "floor",
        "ceil",
        "trunc",
        "round",
        "sign",
        "isnan",
        "isinf",
        "isfinite",
        "relu",
        "frac",
        "sgn",
        "exp2",
        "positive",
        "sinc",
        "logical_not",
    ):
        function = getattr(torch, name)
        yield Case(name, function, (normal(3, 4),))
        if name in (
            "exp",
            "floor",
            "abs",
            "round",
            "relu",
            "sign",
            "isnan",
            "isinf",
            "neg",
            "sigmoid",
            "square",
            "logical_not",
            "trunc",
            "tanh",
            "expm1",
        ):
            for kind in (
                "i64",
                "f32",
                "bf16",
                *(
                    ["bool"]
                    if name in ("abs", "sign", "isnan", "logical_not") and name != "abs"
                    else []
                ),
            ):
                yield Case(f"{name}-{kind}", function, (normal(3, 4, dtype=DTYPES[kind]),), False)
    for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "acosh"):
        shift = 1.0 if name == "acosh" else 0.0
        yield Case(name, lambda x, f=getattr(torch, name), s=shift: f(x + s), (positive(3, 4),))
    yield Case("sqrt-int", torch.sqrt, (index(9, 3, 4),))
    yield Case("reciprocal-int", torch.reciprocal, (index(9, 3, 4) + 1,))
    for name in ("asin", "acos", "atanh"):
        yield Case(name, getattr(torch, name), (unit(3, 4),))
    small = torch.tensor([1e-20, -1e-9, 1e-5, 0.0, 0.3, -0.6, 30.0, -40.0], dtype=torch.float64)
    yield Case("expm1-small", lambda x: torch.expm1(x) / x.abs().clamp_min(1e-30), (small,), False)
    yield Case(
        "log1p-small", lambda x: torch.log1p(x) / x.abs().clamp_min(1e-30), (small.abs(),), False
    )
    places = [0.0, -0.0, 1, 2, -1, -2, -0.5, -3.7, 1e-8, -1e-8, 7.999, 8, 8.001, -20.3, 170, 1e5]
    places = torch.tensor(places, dtype=torch.float64)
    infinite = torch.tensor([1e300, math.inf, -math.inf, math.nan], dtype=torch.float64)
    for name in ("lgamma", "digamma"):
        function = getattr(torch, name)
        yield Case(name, function, (normal(4, 5) * 4,))
        for place in places:
            yield Case(f"{name}-{place}", function, (place.reshape(1),), False)
        yield Case(f"{name}-f32", function, (normal(4, 5, dtype=torch.float32) * 4,))
        yield Case(f"{name}-bf16", function, (normal(4, 5, dtype=torch.bfloat16),), False)
        yield Case(f"{name}-i64", function, (index(5, 4) + 1,))
    yield Case("lgamma-infinite", torch.lgamma, (infinite,), False)
    yield Case("mvlgamma", lambda x: torch.mvlgamma(x + 2, 3), (positive(4),))
    ends = [0.0, -0.0, 1e-300, -1e-12, 0.425, 0.85, -0.9999, 1 - 1e-15, 1, -1, 1.5, math.inf]
    for place in torch.tensor([*ends, math.nan], dtype=torch.float64):
        for function in (torch.erfinv, torch.special.ndtri):
            yield Case(f"{function.__name__}-{place}", function, (place.reshape(1),), False)
    for name, function in (("erfinv", torch.erfinv), ("special_ndtri", torch.special.ndtri)):
        yield Case(name, function, (unit(4, 5).abs(),))
        yield Case(f"{name}-f32", function, (unit(4, 5).abs().float(),))
        yield Case(f"{name}-i64", function, (index(2, 4),))
    yield Case("erfinv-bf16", torch.erfinv, (unit(4, 5).bfloat16(),), False)
    yield Case("logit", torch.logit, (unit(3, 4).abs(),))
    yield Case("logit-eps", lambda x: torch.logit(x, 0.1), (unit(3, 4).abs(),))
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, math.inf, -math.inf, math.nan]
    )
    for name in (
        "exp",
        "abs",
        "sign",
        "round",
        "floor",
        "isnan",
        "isinf",
        "isfinite",
        "sigmoid",
        "tanh",
        "log1p",
        "expm1",
        "trunc",
        "sqrt",
        "logical_not",
    ):
        yield Case(f"{name}-special", getattr(torch, name), (special,), False)
    for name in (
        "clamp",
        "hardtanh",
        "softplus",
        "elu",
        "selu",
        "celu",
        "silu",
        "mish",
        "gelu",
        "logsigmoid",
        "hardswish",
        "hardsigmoid",
        "relu6",
        "leaky_relu",
        "threshold",
        "hardshrink",
        "softshrink",
        "softsign",
        "tanhshrink",
    ):
        function = {
            "clamp": lambda x: torch.clamp(x, -1, 2),
            "threshold": lambda x: F.threshold(x, 1.0, 7.0),
        }.get(name, getattr(F, name, None))
        # PyTorch's gradient of hardsigmoid has a constant in single precision.
        tolerance = 1e-7 if name == "hardsigmoid" else None
        yield Case(name, function, (normal(3, 5) * 2,), True, tolerance)
        yield Case(f"{name}-kinks", function, (whole(6, 6),), True, tolerance)
        for kind in ("f32", "bf16"):
            yield Case(
                f"{name}-{kind}", function, (normal(3, 5, dtype=DTYPES[kind]) * 2,), kind == "f32"
            )
    yield Case("gelu-tanh", lambda x: F.gelu(x, approximate="tanh"), (normal(3, 4),))
    yield Case("softplus-beta", lambda x: F.softplus(x, 2.0, 1.5), (normal(4, 4),))
    yield Case("elu-large", F.elu, (torch.tensor([800.0, -800.0, 3.0, 0.0], dtype=torch.float64),))
    yield Case(
        "softplus-large", F.softplus, (torch.tensor([800.0, -800.0, 20.0], dtype=torch.float64),)
    )
    yield Case("clamp-int", lambda x: torch.clamp(x, -1, 2), (normal(4, dtype=torch.int64),))
    yield Case(
        "clamp-int-float", lambda x: torch.clamp(x, -0.5, 2), (normal(4, dtype=torch.int64),)
    )
    yield Case(
        "clamp-tensor",
        lambda x, a, b: torch.clamp(x, a, b),
        (whole(4, 3), whole(3), whole(4, 1) + 3),
    )
    bounds = torch.tensor([-1.0, 2.0, 3.0, 0.0, 0.0]), torch.tensor([-1.0, 2.0, 1.0, 4.0, 0.0])
    yield Case("clamp-equal", torch.clamp, (torch.tensor([-4.0, 5.0, 2.0, 0.0, 0.0]), *bounds))
    grid = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 3).unbind(1)
    yield Case("clamp-ties", torch.clamp, grid)
    yield from (
        Case(f"{name}-ties", getattr(torch, name), grid[:2])
        for name in ("clamp_min", "clamp_max", "fmax", "fmin", "maximum")
    )
    yield Case("clamp-min", lambda x: x.clamp_min(0), (whole(9),))
    yield Case("clamp-max-none", lambda x: x.clamp(max=1), (whole(9),))
    yield Case("prelu", F.prelu, (whole(2, 3, 4), normal(3)))
    yield Case("prelu-one", F.prelu, (normal(2, 3, 4), normal(1)))
    yield Case("glu", lambda x: F.glu(x, 1), (normal(2, 6),))
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "maximum",
        "minimum",
        "fmod",
        "remainder",
        "atan2",
        "logaddexp",
        "fmax",
        "fmin",
        "true_divide",
        "floor_divide",
        "xlogy",
    ):
        function = getattr(torch, name)
        yield Case(
            name,
            function,
            (normal(3, 4), normal(4) + 0.3 if name != "xlogy" else positive(4)),
            name != "floor_divide",
        )
        if name != "xlogy":
            yield Case(
                f"{name}-f32-0d64",
                function,
                (normal(3, 4, dtype=torch.float32), normal() + 3),
                name not in ("fmod", "remainder", "floor_divide"),
                1e-6,  # computed in float32
            )
        if name in (
            "add",
            "mul",
            "div",
            "maximum",
            "remainder",
            "sub",
            "floor_divide",
            "fmod",
            "minimum",
        ):
            yield Case(
                f"{name}-i64-f32",
                function,
                (normal(3, 4, dtype=torch.int64), positive(4, dtype=torch.float32)),
                name != "floor_divide",
            )
            yield Case(f"{name}-i64", function, (whole(5, 5, dtype=torch.int64), index(3, 5) + 1))
            yield Case(
                f"{name}-i64-negative", function, (whole(5, 5, dtype=torch.int64), -index(3, 5) - 1)
            )
            yield Case(
                f"{name}-u8-i32",
                function,
                (normal(3, 4, dtype=torch.uint8), index(3, 4, dtype=torch.int32) + 1),
            )
            yield Case(
                f"{name}-bf16-f32",
                function,
                (normal(3, 4, dtype=torch.bfloat16), positive(4, dtype=torch.float32)),
                False,
            )
        if name in ("add", "mul", "maximum", "minimum"):
            yield Case(
                f"{name}-bool",
                function,
                (normal(3, 4, dtype=torch.bool), normal(4, dtype=torch.bool)),
            )
            yield Case(f"{name}-ties", function, (whole(5, 5), whole(5, 5)))
    yield Case("div-bool", torch.div, (normal(3, 4, dtype=torch.bool), positive(4)))
    yield Case("add-bool-f32", lambda x: x + 1.5, (normal(3, 4, dtype=torch.bool),))
    yield Case("mul-bool-2", lambda x: x * 2, (normal(3, 4, dtype=torch.bool),))
    yield Case("i64-plus-float", lambda x: x + 0.5, (normal(3, dtype=torch.int64),))
    yield Case("i64-half", lambda x: x / 2, (normal(3, dtype=torch.int64),))
    yield Case("rsub", lambda x: 3 - x, (normal(3),))
    yield Case("rsub-int", lambda x: 3.5 - x, (normal(3, dtype=torch.int64),))
    yield Case("rsub-alpha", lambda x: torch.rsub(x, 2, alpha=3), (normal(3),))
    yield Case("add-alpha", lambda x, y: torch.add(x, y, alpha=2), (normal(3), normal(3)))
    yield Case("sub-alpha", lambda x, y: torch.sub(x, y, alpha=0.5), (normal(3), normal(3)))
    yield Case(
        "add-alpha-int",
        lambda x, y: torch.add(x, y, alpha=2),
        (normal(3, dtype=torch.int64), normal(3, dtype=torch.int32)),
    )
    for mode in ("floor", "trunc"):
        yield Case(
            f"div-{mode}",
            lambda x, y, m=mode: torch.div(x, y, rounding_mode=m),
            (normal(3, 4) * 5, normal(4)),
        )
        yield Case(
            f"div-{mode}-scalar",
            lambda x, m=mode: torch.div(x, -2, rounding_mode=m),
            (normal(3, 4) * 5,),
        )
        yield Case(
            f"div-{mode}-int",
            lambda x, y, m=mode: torch.div(x, y, rounding_mode=m),
            (whole(6, 6, dtype=torch.int64), torch.tensor([1, -1, 2, -2, 3, -3])),
        )
    for exponent in (0, 1, 2, 3, 4, 5, -1, -2, -3, 0.5, -0.5, 1.5, 2.0, 0.3):
        yield Case(f"pow-{exponent}", lambda x, e=exponent: x**e, (positive(3, 4),))
        if float(exponent).is_integer():
            yield Case(f"pow-negative-{exponent}", lambda x, e=exponent: x**e, (-positive(3, 4),))
    yield Case("pow-i64", lambda x: x**3, (whole(5, dtype=torch.int64),))
    yield Case("pow-i64-large", lambda x: x**7, (whole(5, dtype=torch.int64),))
    yield Case("pow-i64-float", lambda x: x**2.5, (index(5, 5),))
    yield Case("pow-scalar-base", lambda x: 2.0**x, (normal(3, 4),))
    yield Case("pow-tensor", torch.pow, (positive(3, 4), normal(4)))
    yield Case("pow-zero", lambda x: x**2, (torch.zeros(3, dtype=torch.float64),))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(torch, name)
        yield Case(name, function, (whole(4, 4), whole(4)))
        yield Case(
            f"{name}-scalar", lambda x, f=function: f(x, 1), (whole(4, 4, dtype=torch.float32),)
        )
        yield Case(
            f"{name}-int-float", lambda x, f=function: f(x, 0.5), (whole(4, 4, dtype=torch.int64),)
        )
        yield Case(
            f"{name}-mixed",
            function,
            (whole(4, 4, dtype=torch.int64), whole(4, dtype=torch.float32)),
        )
        yield Case(
            f"{name}-bool", function, (normal(4, dtype=torch.bool), normal(4, dtype=torch.bool))
        )
    for name in ("and", "or", "xor"):
        function = getattr(torch, f"logical_{name}")
        yield Case(f"logical_{name}", function, (whole(4, 4), whole(4, 4, dtype=torch.int64)))
        function = getattr(torch, f"bitwise_{name}")
        yield Case(
            f"bitwise_{name}", function, (whole(4, dtype=torch.int64), whole(4, dtype=torch.int32))
        )
        yield Case(
            f"bitwise_{name}-bool",
            function,
            (normal(4, dtype=torch.bool), normal(4, dtype=torch.bool)),
        )
        yield Case(
            f"bitwise_{name}-scalar", lambda x, f=function: f(x, 5), (whole(4, dtype=torch.int64),)
        )
    yield Case("bitwise_not", torch.bitwise_not, (whole(4, dtype=torch.int64),))
    yield Case("invert-bool", lambda x: ~x, (normal(4, dtype=torch.bool),))
    yield Case("where", torch.where, (normal(3, 4, dtype=torch.bool), normal(4), normal(3, 1)))
    yield Case(
        "where-scalar",
        lambda m, x: torch.where(m, x, 0.0),
        (normal(3, 4, dtype=torch.bool), normal(4)),
    )
    yield Case(
        "where-promotes",
        lambda m, x, y: torch.where(m, x, y),
        (normal(4, dtype=torch.bool), normal(4, dtype=torch.int64), normal(4, dtype=torch.float32)),
    )
    yield Case(
        "masked_fill",
        lambda x, m: x.masked_fill(m, -math.inf).exp(),
        (normal(3, 4), normal(4, dtype=torch.bool)),
    )
    yield Case(
        "masked_fill-tensor",
        lambda x, m, v: x.masked_fill(m, v),
        (normal(3, 4), normal(4, dtype=torch.bool), normal()),
    )
    yield Case("lerp", lambda x, y: torch.lerp(x, y, 0.3), (normal(4), normal(4)))
    yield Case(
        "addcmul",
        lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
        (normal(4), normal(4), normal(4)),
    )
    yield Case(
        "addcdiv",
        lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
        (normal(4), normal(4), positive(4)),
    )
    yield Case("round-decimals", lambda x: torch.round(x, decimals=2), (normal(4),))
    for dtype in DTYPES:
        for other in DTYPES:
            if dtype != other:
                yield Case(
                    f"cast-{dtype}-{other}",
                    lambda x, d=DTYPES[other]: x.to(d),
                    (
                        normal(3, 4, dtype=DTYPES[dtype]).abs()
                        if dtype != "bool"
                        else normal(3, 4, dtype=torch.bool),
                    ),
                    dtype == "f64" and other == "f32",
                )
    yield Case("cast-small-bool", lambda x: x.bool(), (torch.tensor([0.5, 0.0, -0.2, math.nan]),))
    first = torch.tensor([3.0, 0.0, -1e200, math.inf, math.nan, -math.inf, 1e-200]).double()
    second = torch.tensor([-4.0, 2.0, 1e200, math.nan, 1.0, 2.0, 1e-200]).double()
    yield Case("hypot", torch.hypot, (normal(3, 1), normal(4)))
    yield Case("hypot-edges", torch.hypot, (first.clamp(max=1e300), second))
    yield Case("hypot-infinite", torch.hypot, (first, second), False)
    yield Case("hypot-zero", torch.hypot, (first[1:2] * 0, second[1:2] * 0))
    yield Case("ldexp", torch.ldexp, (normal(3, 1), normal(4)))
    whole_powers = torch.tensor([2, 0, 1, 5])
    yield Case("ldexp-i64", torch.ldexp, (normal(3, 4), whole_powers))
    yield Case("ldexp-bf16", torch.ldexp, (normal(3, 4, dtype=torch.bfloat16), whole_powers))
    signs = torch.tensor([-0.0, 0.0, -2.0, 3.0, -math.inf, 1.0]).double()
    sizes = torch.tensor([2.0, -3.0, 0.0, -1.0, -4.0, math.nan]).double()
    yield Case("copysign", torch.copysign, (sizes, signs))
    yield Case("copysign-scalar", lambda x: torch.copysign(x, -2), (sizes,))
    yield Case("signbit", torch.signbit, (signs,))
    yield Case("angle", torch.angle, (sizes,))
    for dtype in (torch.int8, torch.int64, torch.uint8):
        numbers = torch.tensor([-5, 3, 100, 7, -1], dtype=torch.int64).to(dtype)
        counts = torch.tensor([1, 2, 3, 64, 0], dtype=torch.int64).to(dtype)
        yield Case(f"shift-left-{dtype}", lambda x, n: x << n, (numbers, counts))
        yield Case(f"shift-right-{dtype}", lambda x, n: x >> n, (numbers, counts))
        yield Case(f"shift-numbers-{dtype}", lambda x: (x << 2) | (x >> 3), (numbers,))
    for order in (1, 2, 3, math.inf):
        yield Case(
            f"dist-{order}", lambda x, y, p=order: torch.dist(x, y, p), (normal(3, 1), normal(4))
        )
