"""Calls of PyTorch's operators with many forms of arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch_operators import Case

_RNG = torch.Generator().manual_seed(0)

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def normal(*shape, dtype=torch.float64) -> torch.Tensor:
    """Return normal numbers; whole ones for integers."""
    values = torch.randn(shape, generator=_RNG, dtype=torch.float64)
    if dtype is torch.bool:
        return values > 0
    if dtype is torch.uint8:
        return (values.abs() * 3).to(dtype)
    return (values if dtype.is_floating_point else values * 3).to(dtype)


def whole(*shape, dtype=torch.float64) -> torch.Tensor:
    """Return small whole numbers, which have ties and lie at kinks."""
    return torch.randint(-4, 5, shape, generator=_RNG).to(dtype)


def positive(*shape, dtype=torch.float64) -> torch.Tensor:
    return normal(*shape, dtype=torch.float64).abs().add(0.1).to(dtype)


def unit(*shape) -> torch.Tensor:
    return torch.rand(shape, generator=_RNG, dtype=torch.float64) * 1.8 - 0.9


def index(high: int, *shape, dtype=torch.int64) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_RNG).to(dtype)


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


def reduction() -> Iterator[Case]:
    """Yield calls of reductions, scans, norms, and orders."""
    dims = (None, 0, -1, (0, 2), (-1, -2), ())
    for name in ("sum", "mean", "amax", "amin", "logsumexp"):
        function = getattr(torch, name)
        for dim in dims:
            if name in ("logsumexp",) and dim in (None, ()):
                continue
            for keep in (False, True) if dim not in (None,) else (False,):
                options = {} if dim is None else {"dim": dim, "keepdim": keep}
                yield Case(
                    f"{name}-{dim}-{keep}",
                    lambda x, f=function, o=options: f(x, **o),
                    (whole(2, 3, 4),),
                )
        for kind in (
            "f32",
            "bf16",
            *([] if name in ("mean", "logsumexp") else ["i64", "bool", "i32"]),
        ):
            if name in ("sum", "amax", "mean", "logsumexp"):
                yield Case(
                    f"{name}-{kind}",
                    lambda x, f=function: f(x, 1),
                    (normal(3, 4, dtype=DTYPES[kind]),),
                    kind == "f32",
                )
    yield Case(
        "sum-dtype", lambda x: x.sum(0, dtype=torch.float64), (normal(3, 4, dtype=torch.float32),)
    )
    yield Case(
        "mean-dtype", lambda x: x.mean(0, dtype=torch.float32), (normal(3, 4, dtype=torch.int64),)
    )
    yield Case("sum-0d", lambda x: x.sum(), (normal(),))
    yield Case("sum-0d-dim", lambda x: x.sum(-1), (normal(),))
    yield Case("amax-0d", lambda x: x.amax(0), (normal(),))
    for name in ("max", "min"):
        function = getattr(torch, name)
        yield Case(f"{name}-all", function, (whole(3, 4),))
        yield Case(f"{name}-all-i64", function, (whole(3, 4, dtype=torch.int64),))
        for keep in (False, True):
            yield Case(
                f"{name}-dim-{keep}",
                lambda x, f=function, k=keep: tuple(f(x, -1, keepdim=k)),
                (whole(3, 6),),
            )
        yield Case(
            f"{name}-dim-i64",
            lambda x, f=function: tuple(f(x, 0)),
            (whole(6, 4, dtype=torch.int64),),
        )
        yield Case(
            f"{name}-dim-bool",
            lambda x, f=function: tuple(f(x, 0)),
            (normal(6, 4, dtype=torch.bool),),
        )
        yield Case(
            f"{name}-dim-f32",
            lambda x, f=function: tuple(f(x, 1)),
            (normal(3, 4, dtype=torch.float32),),
        )
        yield Case(
            f"{name}-dim-bf16",
            lambda x, f=function: tuple(f(x, 1)),
            (normal(3, 4, dtype=torch.bfloat16),),
            False,
        )
        yield Case(
            f"{name}-dim-infinite",
            lambda x, f=function: tuple(f(x, 1)),
            (
                torch.tensor(
                    [[-math.inf] * 3, [math.inf] * 3, [1, -math.inf, math.inf], [1, math.nan, 2]]
                ),
            ),
            False,
        )
        yield Case(f"{name}-0d", lambda x, f=function: tuple(f(x, 0)), (normal(),))
        yield Case(f"arg{name}", lambda x, f=getattr(torch, f"arg{name}"): f(x), (whole(3, 4),))
        yield Case(
            f"arg{name}-dim",
            lambda x, f=getattr(torch, f"arg{name}"): f(x, 1, keepdim=True),
            (whole(3, 6),),
        )
        yield Case(
            f"arg{name}-i32",
            lambda x, f=getattr(torch, f"arg{name}"): f(x, -1),
            (whole(3, 6, dtype=torch.int32),),
        )
    for name in ("any", "all"):
        function = getattr(torch, name)
        for kind in ("bool", "f32", "i64"):
            yield Case(
                f"{name}-{kind}", function, (whole(3, 4, dtype=torch.float64).to(DTYPES[kind]),)
            )
            yield Case(
                f"{name}-dim-{kind}",
                lambda x, f=function: f(x, -1, keepdim=True),
                (whole(3, 2).to(DTYPES[kind]),),
            )
            yield Case(
                f"{name}-dims-{kind}",
                lambda x, f=function: f(x, (0, 1)),
                (whole(3, 2, 2).to(DTYPES[kind]),),
            )
    yield Case("prod", torch.prod, (normal(3, 4),))
    yield Case("prod-dim", lambda x: x.prod(-1, keepdim=True), (normal(3, 4),))
    yield Case(
        "prod-zero",
        lambda x: x.prod(1),
        (torch.tensor([[1.0, 0, 3], [0, 0, 2], [1, 2, 3]], dtype=torch.float64),),
    )
    yield Case("prod-i32", lambda x: x.prod(1), (whole(3, 4, dtype=torch.int32),))
    for name in ("var", "std"):
        function = getattr(torch, name)
        for options in (
            {},
            {"dim": 1},
            {"dim": (0, -1), "correction": 0, "keepdim": True},
            {"dim": -1, "correction": 2},
            {"dim": 1, "unbiased": False},
        ):
            yield Case(
                f"{name}-{options}", lambda x, f=function, o=options: f(x, **o), (normal(4, 5, 3),)
            )
        yield Case(
            f"{name}-equal", lambda x, f=function: f(x, 1), (torch.ones(2, 3, dtype=torch.float64),)
        )
        yield Case(
            f"{name}-bf16",
            lambda x, f=function: f(x, 1),
            (normal(2, 8, dtype=torch.bfloat16),),
            False,
        )
        yield Case(
            f"{name}_mean", lambda x, f=getattr(torch, f"{name}_mean"): f(x, 1), (normal(4, 5),)
        )
    yield Case("var-one", lambda x: x.var(1), (normal(3, 1),), False)
    for order in (2, 1, 0, math.inf, -math.inf, 3, 0.5, 2.5):
        yield Case(
            f"norm-{order}", lambda x, o=order: torch.linalg.vector_norm(x, o, 1), (normal(3, 4),)
        )
    yield Case("norm-zero", lambda x: x.norm(dim=1), (torch.zeros(2, 3, dtype=torch.float64),))
    yield Case("norm-3-zero", lambda x: x.norm(3, dim=1), (torch.zeros(2, 3, dtype=torch.float64),))
    yield Case("norm-fro", lambda x: torch.linalg.norm(x), (normal(3, 4),))
    yield Case("normalize", lambda x: F.normalize(x, dim=1), (normal(3, 4),))
    for name in ("cumsum", "cumprod", "logcumsumexp"):
        function = getattr(torch, name)
        yield Case(name, lambda x, f=function: f(x, -1), (normal(3, 4),))
        yield Case(f"{name}-0", lambda x, f=function: f(x, 0), (normal(3, 4, dtype=torch.float32),))
    for kind in ("bool", "i32", "i64", "u8"):
        yield Case(f"cumsum-{kind}", lambda x: x.cumsum(0), (normal(4, 3, dtype=DTYPES[kind]),))
    yield Case(
        "cumsum-dtype", lambda x: x.cumsum(0, dtype=torch.float32), (normal(4, dtype=torch.int64),)
    )
    yield Case(
        "cumprod-zero",
        lambda x: x.cumprod(0),
        (torch.tensor([2.0, 0, 3, 0, 4], dtype=torch.float64),),
    )
    yield Case("cumsum-bf16", lambda x: x.cumsum(0), (normal(4, 3, dtype=torch.bfloat16),), False)
    for name in ("cummax", "cummin"):
        function = getattr(torch, name)
        yield Case(f"{name}-ties", lambda x, f=function: f(x, 1), (whole(3, 7),))
        yield Case(f"{name}-0", lambda x, f=function: f(x, 0), (normal(5, 3, dtype=torch.float32),))
        unordered = torch.tensor([1.0, math.inf, -math.inf, math.nan, 3.0, math.nan, 9.0])
        yield Case(f"{name}-nan", lambda x, f=function: f(x, 0), (unordered,), False)
        for kind in ("bool", "i64", "bf16"):
            data = whole(3, 7, dtype=DTYPES[kind])
            yield Case(f"{name}-{kind}", lambda x, f=function: f(x, -1), (data,), False)
    yield Case("cummax-scalar", lambda x: torch.cummax(x, 0), (normal(),))
    distinct = torch.randperm(24, generator=_RNG).double().reshape(2, 3, 4)
    for descending in (False, True):
        yield Case(
            f"sort-{descending}",
            lambda x, d=descending: tuple(x.sort(-1, descending=d)),
            (distinct,),
        )
        yield Case(
            f"sort-1-{descending}",
            lambda x, d=descending: tuple(x.sort(1, descending=d)),
            (distinct,),
        )
        yield Case(
            f"sort-stable-{descending}",
            lambda x, d=descending: tuple(x.sort(dim=0, stable=True, descending=d)),
            (whole(20, 3),),
        )
        yield Case(
            f"argsort-{descending}", lambda x, d=descending: x.argsort(0, descending=d), (distinct,)
        )
        yield Case(
            f"topk-{descending}",
            lambda x, d=descending: tuple(x.topk(2, 1, largest=d)),
            (distinct,),
        )
    yield Case("sort-i64", lambda x: tuple(x.sort(-1)), (distinct.long(),))
    yield Case("topk-f32", lambda x: tuple(x.topk(3)), (distinct.float(),))
    yield Case("median-dim", lambda x: tuple(x.median(-1)), (distinct,))
    yield Case("median", lambda x: x.median(), (distinct,))
    yield Case("kthvalue", lambda x: tuple(x.kthvalue(2, 1, keepdim=True)), (distinct,))
    yield Case("histc", lambda x: torch.histc(x, 5, -1, 1), (normal(30),), False)
    yield Case("histc-own", lambda x: torch.histc(x, 4), (normal(30, dtype=torch.float32),), False)
    edges = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    for right in (False, True):
        yield Case(
            f"bucketize-{right}",
            lambda x, e, r=right: torch.bucketize(x, e, right=r),
            (whole(3, 4), edges),
        )
        yield Case(
            f"searchsorted-{right}",
            lambda x, e, r=right: torch.searchsorted(e, x, right=r),
            (whole(3, 4), edges),
        )
    yield Case(
        "searchsorted-rows",
        lambda x, e: torch.searchsorted(e, x),
        (whole(2, 3), torch.stack([edges, edges + 1])),
    )
    for dim in (0, 1, -1):
        yield Case(f"softmax-{dim}", lambda x, d=dim: x.softmax(d), (normal(2, 3, 4),))
        yield Case(f"log_softmax-{dim}", lambda x, d=dim: x.log_softmax(d), (normal(2, 3, 4),))
    yield Case(
        "softmax-bf16", lambda x: x.softmax(-1), (normal(2, 3, dtype=torch.bfloat16),), False
    )
    yield Case(
        "softmax-dtype",
        lambda x: x.softmax(-1, dtype=torch.float32),
        (normal(2, 3, dtype=torch.bfloat16),),
        False,
    )
    yield Case(
        "softmax-i64",
        lambda x: x.softmax(-1, dtype=torch.float32),
        (whole(2, 3, dtype=torch.int64),),
    )
    yield Case(
        "logsumexp-infinite",
        lambda x: x.logsumexp(1),
        (torch.tensor([[-math.inf, -math.inf], [0, -math.inf]]),),
        False,
    )


def moving() -> Iterator[Case]:
    """Yield calls of operators that move elements, and of paddings."""
    x = normal(2, 3, 4)
    # PyTorch's own gradient of it fails torch.autograd.gradcheck: it is that of the written
    # elements.
    yield Case(
        "as_strided_scatter",
        lambda x: x.as_strided_scatter(x[0, :2] * 3, (2, 4), (6, 1), 1),
        (normal(2, 3, 4),),
        False,
    )
    for name, function in {
        "view": lambda x: x.view(6, 4), "view-1": lambda x: x.view(-1, 2),
        "flatten": lambda x: x.flatten(1),
        "unflatten": lambda x: x.unflatten(-1, (2, 2)), "squeeze": lambda x: x[:, :1].squeeze(1),
        "unsqueeze": lambda x: x.unsqueeze(-2),
        "expand": lambda x: x[:, :1].expand(-1, 5, -1),
        "expand-new": lambda x: x.expand(2, 2, 3, 4), "permute": lambda x: x.permute(2, 0, -2),
        "transpose": lambda x: x.transpose(-1, 0), "t": lambda x: x[0].t(),
        "movedim": lambda x: x.movedim(0, -1),
        "split": lambda x: x.split(2, -1), "split-uneven": lambda x: x.split(3, -1),
        "split-sizes": lambda x: x.split([1, 2], 1),
        "chunk": lambda x: x.chunk(2, 2), "unbind": lambda x: x.unbind(1),
        "unbind-1": lambda x: x[:, :1].unbind(1),
        "slice": lambda x: x[:, 1:, ::2], "slice-negative": lambda x: x[..., -3:-1],
        "slice-beyond": lambda x: x[:, :100, 2:9],
        "select": lambda x: x[:, -1], "select-2": lambda x: x[1, ..., 2],
        "narrow": lambda x: x.narrow(-1, 1, 2),
        "flip": lambda x: x.flip(0, -1), "roll": lambda x: x.roll(1, -1),
        "roll-2": lambda x: x.roll((-1, 5), (0, 2)), "roll-flat": lambda x: x.roll(5),
        "repeat": lambda x: x.repeat(2, 1, 3, 1), "tile": lambda x: x.tile(2),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
        "repeat_interleave-flat": lambda x: x.repeat_interleave(2), "tril": lambda x: x.tril(-1),
        "triu": lambda x: x.triu(1),
        "diagonal": lambda x: x.diagonal(0, 1, 2), "diagonal-1": lambda x: x.diagonal(1, 0, -1),
        "diagonal-2": lambda x: x.diagonal(-1, 2, 1),
        "diag": lambda x: x[0].diag(), "diag_embed": lambda x: x[0].diag_embed(1),
        "trace": lambda x: x[0].trace(),
        "as_strided": lambda x: x.contiguous().as_strided((2, 3), (1, 2), 1),
        "unfold": lambda x: x.unfold(2, 3, 1),
        "unfold-1": lambda x: x.unfold(1, 2, 1), "cat": lambda x: torch.cat([x, x * 2], -2),
        "cat-int": lambda x: torch.cat([x, torch.ones(2, 3, 1, dtype=torch.int64)], -1),
        "stack": lambda x: torch.stack([x, x.exp()], -1), "rot90": lambda x: x.rot90(1, (1, 2)),
        "swapaxes": lambda x: x.swapaxes(0, 1),
        "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
        "meshgrid-xy": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="xy"),
        "cat-empty": lambda x: torch.cat([torch.zeros(0, dtype=torch.float64), x[0, 0]]),
        "hstack": lambda x: torch.hstack([x, x]),
        "clone": lambda x: x.clone() * 2, "contiguous": lambda x: x.transpose(0, 1).contiguous(),
        "select_scatter": lambda x: x.select_scatter(x[:, 0] * 2, 1, -1),
        "slice_scatter": lambda x: x.slice_scatter(x[..., :2] * 3, -1, 0, None, 2),
        "slice_scatter-end": lambda x: x.slice_scatter(x[:, :1].exp(), 1, -1),
        "fill_diagonal": lambda x: (x[0] * 2).fill_diagonal_(3.0),
        "triu_indices": lambda x: x[0][torch.triu_indices(3, 4, 1).unbind()],
        "tril_indices-tensor": lambda x: x[0, 0, 0] * torch.tril_indices(3, 4, -1),
        "diagonal_scatter": lambda x: x.diagonal_scatter(x[:, :, 0].exp(), 0, 1, 2),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 4, 6), 2),
        "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 4, 2, 3), 2),
        "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
        "einsum-trace": lambda x: torch.einsum("bij->bj", x),
        "outer": lambda x: torch.outer(x[0, 0], x[1, 1]), "kron": lambda x: torch.kron(x[0], x[1]),
        "cross": lambda x: torch.cross(x, x.flip(1), dim=1), "diff": lambda x: x.diff(dim=-1),
        "cdist": lambda x: torch.cdist(x, x.flip(1)),
        "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp(), dim=-1),
        "trapezoid": lambda x: torch.trapezoid(x, dim=-1),
        "in-place": lambda x: _set(x), "atleast_3d": lambda x: torch.atleast_3d(x[0]),
        "empty": lambda x: x[:, :0], "zero-size-sum": lambda x: x[:, :0].sum(1) + x[:, 0],
    }.items():  # fmt: skip
        yield Case(name, function, (x,))
    yield Case("tril-bool", lambda x: x.tril(), (normal(4, 4, dtype=torch.bool),))
    yield Case("triu-i64", lambda x: x.triu(1), (whole(4, 4, dtype=torch.int64),))
    yield Case("cat-bool", lambda x: torch.cat([x, ~x]), (normal(4, dtype=torch.bool),))
    yield Case("flip-bool", lambda x: x.flip(0), (normal(4, dtype=torch.bool),))
    for mode in ("constant", "reflect", "replicate", "circular"):
        value = 1.5 if mode == "constant" else None
        yield Case(
            f"pad1-{mode}", lambda x, m=mode, v=value: F.pad(x, (1, 2), m, v), (normal(2, 3, 5),)
        )
        yield Case(
            f"pad2-{mode}",
            lambda x, m=mode, v=value: F.pad(x, (1, 2, 2, 0), m, v),
            (normal(1, 2, 4, 5),),
        )
        yield Case(
            f"pad3-{mode}",
            lambda x, m=mode, v=value: F.pad(x, (1, 0, 2, 1, 1, 1), m, v),
            (normal(1, 2, 3, 4, 3),),
        )
        if mode != "circular":
            yield (
                Case(
                    f"pad2-{mode}-unbatched",
                    lambda x, m=mode, v=value: F.pad(x, (1, 2, 1, 0), m, v),
                    (normal(2, 4, 5),),
                )
                if mode != "constant"
                else Case("pad-0", lambda x: F.pad(x, (0, 0)), (normal(3),))
            )
    yield Case("pad-negative", lambda x: F.pad(x, (-1, 2, 1, -2)), (normal(3, 5),))
    yield Case("pad-bool", lambda x: F.pad(x, (1, 1), value=True), (normal(3, dtype=torch.bool),))
    yield Case("pad-i64", lambda x: F.pad(x, (1, 1), value=-100), (normal(3, dtype=torch.int64),))
    yield Case("fold", lambda x: F.fold(x, (4, 5), 2, padding=1, stride=2), (normal(2, 12, 9),))
    yield Case(
        "fold-dilation", lambda x: F.fold(x, (5, 6), (2, 3), dilation=2), (normal(2, 12, 6),)
    )
    yield Case(
        "unfold-image",
        lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=1, stride=2),
        (normal(2, 3, 5, 6),),
    )
    for name, function in {
        "arange": lambda x: torch.arange(5) + x,
        "arange-step": lambda x: torch.arange(1, 6, 2, dtype=torch.float64).sum() * x,
        "arange-float": lambda x: torch.arange(0.5, 3.0, 0.5)[:5] + x,
        "full": lambda x: torch.full((5,), 2.5) + x,
        "zeros_like": lambda x: torch.zeros_like(x) + x, "ones": lambda x: torch.ones(5) * x,
        "eye": lambda x: torch.eye(5)[0] * x, "linspace": lambda x: torch.linspace(0, 1, 5) * x,
        "new_full": lambda x: x.new_full((5,), 3) + x,
        "one_hot": lambda x: F.one_hot(torch.tensor([1, 0, 4]), 5) * x,
        "tensor": lambda x: x * torch.tensor([1.0, 2, 3, 4, 5]),
        "full_like": lambda x: torch.full_like(x, 4) * x,
        "eye-m": lambda x: torch.eye(3, 5).sum(0) * x,
        "logspace": lambda x: torch.logspace(0, 1, 5) * x,
        "tril_indices": lambda x: x[torch.tril_indices(5, 5)[0]],
    }.items():  # fmt: skip
        yield Case(name, function, (normal(5),))


def _set(x):
    y = x.clone()
    y[:, 1] = 0.0
    y[:, :, 2] *= 2
    y[0, 0, 0] += 3
    return y


def indexing() -> Iterator[Case]:
    """Yield calls of operators that read and write elements at computed places."""
    x = normal(4, 5, 6)
    i, j = index(4, 3), index(5, 3)
    signed = index(4, 3) - 2
    for name, function, operands in (
        ("one", lambda x, i: x[i], (x, i)), ("one-negative", lambda x, i: x[i], (x, signed)),
        ("matrix", lambda x, i: x[i], (x, index(4, 2, 3))),
        ("middle", lambda x, i: x[:, i], (x, j)), ("last", lambda x, i: x[..., i], (x, j)),
        ("two", lambda x, i, j: x[i, j], (x, i, j)),
        ("two-last", lambda x, i, j: x[:, i, j], (x, j, j)),
        ("apart", lambda x, i, j: x[i, :, j], (x, i, j)),
        ("slice", lambda x, i: x[1:3, i, ::2], (x, j)),
        ("broadcast", lambda x, i, j: x[i[:, None], j[None]], (x, i, j)),
        ("apart-broadcast", lambda x, i, j: x[i[:, None], :, j[None]], (x, i, j)),
        ("three", lambda x, i, j: x[i, j, j], (x, i, j)), ("none", lambda x, i: x[None, i], (x, i)),
        ("negative-apart", lambda x, i, j: x[i, 1:, -j], (x, signed, j)),
        ("i32", lambda x, i: x[i], (x, i.int())), ("mixed-int", lambda x, i: x[i, 2], (x, i)),
        ("mixed-int-slice", lambda x, i: x[2, :, i], (x, i)),
        ("list", lambda x: x[[0, 2, 2]], (x,)), ("bool-data", lambda x, i: x[i], (x > 0, i)),
        ("i64-data", lambda x, i, j: x[i, j], (whole(4, 5, dtype=torch.int64), i, j)),
        ("f32", lambda x, i: x[:, i], (x.float(), j)),
        ("bf16", lambda x, i: x[:, i], (x.bfloat16(), j)),
    ):  # fmt: skip
        yield Case(f"index-{name}", function, operands, name != "bf16")
    for name, dim, shape in (
        ("0", 0, (3, 5, 6)),
        ("1", 1, (4, 2, 6)),
        ("-1", -1, (2, 3, 8)),
        ("small", 1, (2, 7, 3)),
    ):
        high = x.shape[dim]
        yield Case(f"gather-{name}", lambda x, i, d=dim: x.gather(d, i), (x, index(high, *shape)))
    yield Case("gather-bool", lambda x, i: x.gather(1, i), (x[0] > 0, index(6, 5, 2)))
    yield Case("take", torch.take, (x, index(120, 3, 2) - 60))
    yield Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (x, index(5, 4, 2, 6)))
    yield Case("index_select", lambda x, i: x.index_select(-2, i), (x, j))
    yield Case("index_select-bool", lambda x, i: x.index_select(0, i), (x > 0, i))
    distinct = torch.tensor([3, 0, 2])
    for accumulate in (False, True):
        for name, places, shape in (
            ("0", (distinct,), (3, 5, 6)), ("0-broadcast", (distinct,), (6,)),
            ("0-scalar", (distinct,), ()), ("01", (distinct, distinct), (3, 6)),
            ("1", (None, distinct), (4, 3, 6)),
            ("12", (None, distinct, distinct), (4, 3)), ("02", (distinct, None, distinct), (3, 5)),
            ("2", (None, None, distinct), (4, 5, 3)), ("all", (distinct, distinct, distinct), (3,)),
            ("grid", (distinct[:, None], torch.tensor([1, 4])), (3, 2, 6)),
            ("negative", (distinct - 4,), (3, 5, 6)),
        ):  # fmt: skip
            indices = [place for place in places if place is not None]

            def put(x, v, *tensors, places=places, accumulate=accumulate):
                tensors = list(tensors)
                positions = [None if place is None else tensors.pop(0) for place in places]
                return torch.ops.aten.index_put(x, positions, v, accumulate)

            yield Case(f"index_put-{name}-{accumulate}", put, (x, normal(*shape), *indices))
    yield Case(
        "index_put-duplicates",
        lambda x, v, i: x.index_put((i,), v, accumulate=True),
        (x, normal(3, 5, 6), torch.tensor([1, 1, 3])),
    )
    yield Case(
        "index_put-mask", lambda x, v, m: torch.ops.aten.index_put(x, [m], v), (x, normal(), x > 0)
    )
    yield Case(
        "index_put-mask-rows",
        lambda x, v, m: torch.ops.aten.index_put(x, [m], v),
        (x, normal(6), x[..., 0] > 0),
    )
    yield Case(
        "index_put-mask-add",
        lambda x, v, m: torch.ops.aten.index_put(x, [m], v, True),
        (x, normal(1), x > 0),
    )
    yield Case("assign", lambda x, v, i: _assign(x, v, i), (x, normal(3, 6), distinct))
    yield Case("assign-mask", lambda x: _assign_mask(x), (x,))
    yield Case(
        "index_put-i64",
        lambda x, i: x.index_put((i,), torch.tensor(7)),
        (whole(5, dtype=torch.int64), distinct),
    )
    yield Case(
        "index_put-bool",
        lambda x, i: x.index_put((i,), torch.tensor(True)),
        (normal(5, dtype=torch.bool), distinct),
    )
    for dim in (0, 1, -1):
        shape = [4, 5, 6]
        shape[dim] = 3
        yield Case(
            f"index_add-{dim}",
            lambda x, s, i, d=dim: x.index_add(d, i, s, alpha=2),
            (x, normal(*shape), torch.tensor([1, 1, 3])),
        )
        yield Case(
            f"index_copy-{dim}",
            lambda x, s, i, d=dim: x.index_copy(d, i, s),
            (x, normal(*shape), distinct),
        )
        yield Case(f"index_fill-{dim}", lambda x, i, d=dim: x.index_fill(d, i, 2.5), (x, distinct))
        where = index(3, 3, 3, 2)
        permuted = (
            torch.stack([torch.randperm(3, generator=_RNG) for _ in range(6)])
            .reshape(3, 2, 3)
            .permute(2, 0, 1)
            if dim == 0
            else None
        )
        src = normal(3, 3, 3)
        part = src[..., :2].clone()  # PyTorch has no gradient for a larger source
        base = normal(4, 5, 6)
        if permuted is not None:
            yield Case("scatter-0", lambda x, i, s: x.scatter(0, i, s), (base, permuted, part))
        yield Case(f"scatter-value-{dim}", lambda x, i, d=dim: x.scatter(d, i, 1.5), (base, where))
        yield Case(
            f"scatter_add-{dim}", lambda x, i, s, d=dim: x.scatter_add(d, i, s), (base, where, part)
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin"):
            for own in (True, False):
                yield Case(
                    f"scatter_reduce-{reduce}-{own}-{dim}",
                    lambda x, i, s, d=dim, r=reduce, o=own: x.scatter_reduce(
                        d, i, s, r, include_self=o
                    ),
                    (base, where, src[..., :2].clone()),
                )
    for reduce in ("amax", "amin"):
        yield Case(
            f"scatter_reduce-{reduce}-ties",
            lambda x, i, s, r=reduce: x.scatter_reduce(0, i, s, r),
            (whole(5, 4), index(5, 9, 4), whole(9, 4)),
        )
    yield Case(
        "scatter_reduce-i64",
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
        (whole(5, dtype=torch.int64), index(5, 9), whole(9, dtype=torch.int64)),
    )
    yield Case(
        "scatter_add-f32",
        lambda x, i, s: x.scatter_add(0, i, s),
        (normal(5, dtype=torch.float32), index(5, 9), normal(9, dtype=torch.float32)),
    )
    yield Case(
        "scatter-i64",
        lambda x, i: x.scatter(1, i, 1),
        (whole(3, 5, dtype=torch.int64), index(5, 3, 1)),
    )
    yield Case(
        "scatter-bool",
        lambda x, i: x.scatter(1, i, True),
        (normal(3, 5, dtype=torch.bool), index(5, 3, 1)),
    )
    yield Case(
        "scatter-reduce-add",
        lambda x, i, s: x.scatter(0, i, s, reduce="add"),
        (normal(5), index(5, 4), normal(4)),
        False,
    )
    yield Case(
        "masked_scatter",
        lambda x, m, s: x.masked_scatter(m, s),
        (normal(3, 4), normal(3, 4, dtype=torch.bool), normal(20)),
    )
    yield Case(
        "masked_scatter-broadcast",
        lambda x, m, s: x.masked_scatter(m, s),
        (normal(3, 4), normal(4, dtype=torch.bool), normal(20)),
    )
    for padding in (None, 0, 2, -1):
        yield Case(
            f"embedding-{padding}",
            lambda w, i, p=padding: F.embedding(i, w, padding_idx=p),
            (normal(5, 3), index(5, 4, 6)),
        )
    yield Case(
        "embedding-i32",
        lambda w, i: F.embedding(i, w),
        (normal(5, 3), index(5, 4, dtype=torch.int32)),
    )
    for mode in ("sum", "mean", "max"):
        weight, places, offsets = normal(7, 3), index(7, 9), torch.tensor([0, 2, 2, 6])
        yield Case(
            f"embedding_bag-{mode}",
            lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m),
            (weight, places, offsets),
        )
        yield Case(
            f"embedding_bag-{mode}-matrix",
            lambda w, i, m=mode: F.embedding_bag(i, w, mode=m),
            (weight, index(7, 3, 4)),
        )
        yield Case(
            f"embedding_bag-{mode}-padding",
            lambda w, i, o, m=mode: F.embedding_bag(i, w, o, mode=m, padding_idx=2),
            (weight, places, offsets),
        )
    yield Case(
        "embedding_bag-weights",
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        (weight, places, offsets, normal(9)),
    )
    yield Case(
        "embedding_bag-last",
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum", include_last_offset=True),
        (weight, places, torch.tensor([0, 4, 9])),
    )


def _assign(x, v, i):
    y = x.clone()
    y[1:4, 2] = v
    y[i, 1] = v * 2
    return y


def _assign_mask(x):
    y = x.clone()
    y[y > 0] = 0.0
    return y


def products() -> Iterator[Case]:
    """Yield products of matrices, attention, convolutions, pooling and normalisations."""
    for kind in ("f64", "f32", "bf16", "f16"):
        d = DTYPES[kind]
        exact = kind in ("f64", "f32")
        yield Case(f"mm-{kind}", torch.mm, (normal(3, 4, dtype=d), normal(4, 5, dtype=d)), exact)
        yield Case(
            f"bmm-{kind}", torch.bmm, (normal(2, 3, 4, dtype=d), normal(2, 4, 5, dtype=d)), exact
        )
        yield Case(
            f"linear-{kind}",
            F.linear,
            (normal(2, 3, 4, dtype=d), normal(5, 4, dtype=d), normal(5, dtype=d)),
            exact,
        )
        yield Case(
            f"addmm-{kind}",
            lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
            (normal(5, dtype=d), normal(3, 4, dtype=d), normal(4, 5, dtype=d)),
            exact,
        )
        yield Case(
            f"baddbmm-{kind}",
            lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
            (normal(2, 3, 5, dtype=d), normal(2, 3, 4, dtype=d), normal(2, 4, 5, dtype=d)),
            exact,
        )
        yield Case(
            f"conv2d-{kind}",
            lambda x, w, b: F.conv2d(x, w, b, 2, 1),
            (normal(2, 3, 5, 6, dtype=d), normal(4, 3, 3, 3, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"layer_norm-{kind}",
            lambda x, w, b: F.layer_norm(x, (4,), w, b),
            (normal(2, 3, 4, dtype=d), normal(4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"group_norm-{kind}",
            lambda x, w, b: F.group_norm(x, 2, w, b),
            (normal(2, 4, 5, dtype=d), normal(4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"rms_norm-{kind}",
            lambda x, w: F.rms_norm(x, (4,), w),
            (normal(2, 3, 4, dtype=d), normal(4, dtype=d)),
            exact,
        )
        yield Case(
            f"attention-{kind}",
            F.scaled_dot_product_attention,
            tuple(normal(2, 2, 5, 4, dtype=d) for _ in range(3)),
            exact,
        )
    yield Case("mm-i64", torch.mm, (whole(3, 4, dtype=torch.int64), whole(4, 5, dtype=torch.int64)))
    for a, b in (
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 3)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 3)),
        ((2, 3, 4), (4,)),
        ((3, 4), (2, 4, 3)),
    ):
        yield Case(f"matmul-{a}-{b}", torch.matmul, (normal(*a), normal(*b)))
    yield Case("linear-plain", F.linear, (normal(4), normal(5, 4)))
    yield Case("bilinear", F.bilinear, (normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5)))
    yield Case(
        "addmm-beta-0",
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        (torch.full((3, 5), math.nan, dtype=torch.float64), normal(3, 4), normal(4, 5)),
        False,
    )
    for p in (0, 1, 2, 3, math.inf):
        yield Case(
            f"cdist-{p}", lambda x, y, p=p: torch.cdist(x, y, p), (normal(2, 3, 4), normal(2, 5, 4))
        )
        yield Case(f"pdist-{p}", lambda x, p=p: F.pdist(x, p), (normal(4, 3),))
    halves = torch.tensor([[1.0, 3.0, 3.0, -2.0], [-1.0, -5.0, math.inf, 2.0], [-math.inf] * 4])
    for kind in ("bf16", "f16"):
        data = halves.to(DTYPES[kind])
        for name in ("max", "min", "argmax", "argmin", "sort", "argsort", "median"):
            yield Case(
                f"{name}-{kind}",
                lambda x, f=getattr(torch, name): f(x, dim=1),
                (data[:2] if "sort" in name or name == "median" else data,),
            )
        yield Case(f"topk-{kind}", lambda x: x.topk(3, 1), (data[:1, [0, 1, 3]],))
        yield Case(f"adaptive_max_pool-{kind}", lambda x: F.adaptive_max_pool1d(x, 2), (data[:2],))
    square = normal(2, 4, 4)
    for name in ("inv", "det", "slogdet", "matrix_exp"):
        yield Case(f"{name}-one", getattr(torch.linalg, name), (square[0],))
        yield Case(f"{name}-batch", getattr(torch.linalg, name), (square,))
    yield Case("matrix_exp-large", lambda x: torch.linalg.matrix_exp(x - x.mT), (square * 9,))
    yield Case("matrix_exp-f32", torch.linalg.matrix_exp, (square.float(),))
    yield Case("solve", torch.linalg.solve, (square, normal(2, 4, 3)))
    yield Case("solve-vector", torch.linalg.solve, (square[0], normal(4)))
    yield Case("solve-vectors", torch.linalg.solve, (square, normal(2, 4)))
    yield Case(
        "solve-right", lambda a, b: torch.linalg.solve(a, b, left=False), (square, normal(2, 3, 4))
    )
    yield Case("solve-exchanges", torch.linalg.solve, (torch.eye(4).double().flip(0), normal(4, 2)))
    positive_definite = square @ square.mT + torch.eye(4)
    for upper in (False, True):
        factor = torch.linalg.cholesky(positive_definite, upper=upper)
        for name, function, operands in (
            ("cholesky", torch.linalg.cholesky, (positive_definite,)),
            (
                "cholesky-one-triangle",
                torch.linalg.cholesky,
                (positive_definite + square.tril(-1),),
            ),
            ("cholesky_solve", torch.cholesky_solve, (normal(2, 4, 3), factor)),
            ("cholesky_inverse", torch.cholesky_inverse, (factor[0],)),
            ("cholesky_inverse-whole", torch.cholesky_inverse, (square[0] + 4 * torch.eye(4),)),
        ):
            yield Case(f"{name}-{upper}", lambda *x, f=function, u=upper: f(*x, upper=u), operands)
        for left, unit_diagonal in ((False, False), (True, False), (True, True)):
            options = {"upper": upper, "left": left, "unitriangular": unit_diagonal}
            yield Case(
                f"solve_triangular-{upper}-{left}-{unit_diagonal}",
                lambda a, b, o=options: torch.linalg.solve_triangular(a, b, **o),
                (square, normal(2, 4, 3) if left else normal(2, 3, 4)),
            )
    yield Case(
        "solve_triangular-broadcast",
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        (square[0], normal(2, 4, 3)),
    )
    yield Case("householder", torch.linalg.householder_product, (normal(2, 5, 3), unit(2, 3)))
    q, k, v = (normal(2, 4, n, 8) for n in (5, 7, 7))
    for name, options in {
        "scale": {"scale": 0.3}, "causal": {"is_causal": True},
        "bool": {"attn_mask": normal(5, 7, dtype=torch.bool)},
        "bool-heads": {"attn_mask": normal(2, 1, 5, 7, dtype=torch.bool)},
        "float": {"attn_mask": normal(2, 4, 5, 7)},
        "infinite": {"attn_mask": torch.zeros(5, 7,
        dtype=torch.float64).masked_fill(normal(5, 7) > 0, -math.inf)},
        "empty-rows": {"attn_mask": torch.arange(5)[:, None].expand(5, 7) > 1},
        "empty-rows-float": {"attn_mask": torch.zeros(5, 7,
        dtype=torch.float64).masked_fill(torch.arange(5)[:, None] > 2, -math.inf)},
    }.items():  # fmt: skip
        yield Case(
            f"attention-{name}",
            lambda q, k, v, o=options: F.scaled_dot_product_attention(q, k, v, **o),
            (q, k, v),
        )
    yield Case(
        "attention-mask-gradient",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        (q, k, v, normal(4, 5, 7)),
    )
    yield Case(
        "attention-groups",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (q, k[:, :2].clone(), v[:, :2].clone()),
    )
    yield Case(
        "attention-3d", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q[0], k[0], v[0])
    )
    for rank in (1, 2, 3):
        conv = getattr(F, f"conv{rank}d")
        turned = getattr(F, f"conv_transpose{rank}d")
        extent = (7, 6, 5)[:rank]
        x = normal(2, 4, *extent)
        yield Case(
            f"conv{rank}d",
            lambda x, w, b, f=conv: f(x, w, b, 2, 1, 1),
            (x, normal(3, 4, *[3] * rank), normal(3)),
        )
        yield Case(
            f"conv{rank}d-groups",
            lambda x, w, f=conv: f(x, w, None, 1, 2, 2, 2),
            (x, normal(6, 2, *[3] * rank)),
        )
        yield Case(
            f"conv{rank}d-depthwise",
            lambda x, w, f=conv: f(x, w, None, 1, 1, 1, 4),
            (x, normal(4, 1, *[3] * rank)),
        )
        yield Case(
            f"conv{rank}d-same",
            lambda x, w, f=conv: f(x, w, None, 1, "same"),
            (x, normal(3, 4, *[2] * rank)),
        )
        yield Case(
            f"conv{rank}d-unbatched",
            lambda x, w, f=conv: f(x, w),
            (x[0], normal(3, 4, *[3] * rank)),
        )
        yield Case(
            f"conv_transpose{rank}d",
            lambda x, w, b, f=turned: f(x, w, b, 2, 1, 1),
            (x, normal(4, 3, *[3] * rank), normal(3)),
        )
        yield Case(
            f"conv_transpose{rank}d-groups",
            lambda x, w, f=turned: f(x, w, None, 1, 0, 0, 2),
            (x, normal(4, 3, *[2] * rank)),
        )
        yield Case(
            f"conv_transpose{rank}d-dilation",
            lambda x, w, f=turned: f(x, w, None, 1, 0, 0, 1, 2),
            (x, normal(4, 3, *[2] * rank)),
        )
        image = normal(2, 3, *(8, 7, 6)[:rank])
        avg, top = getattr(F, f"avg_pool{rank}d"), getattr(F, f"max_pool{rank}d")
        for name, args in {
            "plain": (2,),
            "stride": (3, 2, 1),
            "ceil": (3, 2, 1, True),
            "exclude": (3, 2, 1, False, False),
            "ceil-exclude": (3, 2, 1, True, False),
        }.items():
            yield Case(f"avg_pool{rank}d-{name}", lambda x, f=avg, a=args: f(x, *a), (image,))
        if rank > 1:
            yield Case(
                f"avg_pool{rank}d-divisor", lambda x, f=avg: f(x, 2, 2, 1, False, True, 5), (image,)
            )
        for name, args in {
            "plain": (2,),
            "stride": (3, 2, 1),
            "dilation": (2, 1, 0, 2),
            "ceil": (3, 2, 1, 1, True),
        }.items():
            yield Case(f"max_pool{rank}d-{name}", lambda x, f=top, a=args: f(x, *a), (image,))
            data = image[:, :2] if name == "plain" else whole(1, 2, *(8, 7, 6)[:rank])
            yield Case(
                f"max_pool{rank}d-indices-{name}",
                lambda x, f=top, a=args: f(x, *a, return_indices=True),
                (data,),
            )
        yield Case(
            f"max_unpool{rank}d",
            lambda x, f=top, u=getattr(F, f"max_unpool{rank}d"): u(
                *f(x, 2, return_indices=True), 2, output_size=x.shape
            ),
            (image,),
        )
        yield Case(
            f"max_unpool{rank}d-overlap",
            lambda x, f=top, u=getattr(F, f"max_unpool{rank}d"): u(
                *f(x, 3, 2, 1, return_indices=True), 3, 2, 1, output_size=x.shape
            ),
            (image,),
        )
        lowest = torch.full((1, 2, *[4] * rank), -math.inf, dtype=torch.float64)
        yield Case(
            f"max_pool{rank}d-indices-lowest",
            lambda x, f=top: f(x, 2, 2, 1, return_indices=True),
            (lowest,),
            False,
        )
        yield Case(
            f"max_pool{rank}d-ties",
            lambda x, f=top: f(x, 3, 2, 1),
            (whole(2, 3, *(8, 7, 6)[:rank]),),
        )
        yield Case(f"max_pool{rank}d-unbatched", lambda x, f=top: f(x, 2), (image[0],))
        for size in (1, 2, 3, 5):
            yield Case(
                f"adaptive_avg_pool{rank}d-{size}",
                lambda x, f=getattr(F, f"adaptive_avg_pool{rank}d"), s=size: f(x, s),
                (image,),
            )
        for size in (1, 3):
            yield Case(
                f"adaptive_max_pool{rank}d-{size}",
                lambda x, f=getattr(F, f"adaptive_max_pool{rank}d"), s=size: f(
                    x, s, return_indices=True
                ),
                (image,),
            )
    yield Case("layer_norm-plain", lambda x: F.layer_norm(x, (3, 4)), (normal(2, 3, 4),))
    yield Case("group_norm-plain", lambda x: F.group_norm(x, 3), (normal(2, 6, 3, 2),))
    yield Case("instance_norm", lambda x: F.instance_norm(x), (normal(2, 3, 4, 5),))
    yield Case("local_response_norm", lambda x: F.local_response_norm(x, 2), (normal(2, 3, 4, 5),))
    image = normal(2, 3, 4, 5)
    for mode in ("nearest", "bilinear", "bicubic", "nearest-exact", "area"):
        for name, options in {
            "double": {"scale_factor": 2},
            "size": {"size": (7, 3)},
            "fraction": {"scale_factor": 1.7},
        }.items():
            yield Case(
                f"interpolate-{mode}-{name}",
                lambda x, m=mode, o=options: F.interpolate(x, mode=m, **o),
                (image,),
            )
        if mode.startswith("bi"):
            yield Case(
                f"interpolate-{mode}-corners",
                lambda x, m=mode: F.interpolate(x, size=(6, 8), mode=m, align_corners=True),
                (image,),
            )
            yield Case(
                f"interpolate-{mode}-antialias",
                lambda x, m=mode: F.interpolate(x, size=(2, 3), mode=m, antialias=True),
                (image,),
            )
    yield Case(
        "interpolate-bf16",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        (image.bfloat16(),),
        False,
    )
    yield Case("interpolate-linear", lambda x: F.interpolate(x, size=7, mode="linear"), (image[0],))
    yield Case(
        "interpolate-trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (normal(1, 2, 3, 2, 3),),
    )
    yield Case(
        "interpolate-nearest3", lambda x: F.interpolate(x, scale_factor=2), (normal(1, 2, 3, 2, 3),)
    )
    yield Case("interpolate-nearest1", lambda x: F.interpolate(x, size=7), (image[0],))
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                yield Case(
                    f"grid_sample-{mode}-{padding}-{corners}",
                    lambda x, g, m=mode, p=padding, c=corners: F.grid_sample(x, g, m, p, c),
                    (image, normal(2, 3, 4, 2)),
                )
    yield Case(
        "grid_sample-3d",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (normal(1, 2, 3, 4, 3), normal(1, 2, 3, 2, 3) * 0.6),
    )
    for corners in (False, True):
        yield Case(
            f"affine_grid-{corners}",
            lambda x, t, c=corners: F.grid_sample(
                x, F.affine_grid(t, (2, 3, 6, 5), c), align_corners=c
            ),
            (image, normal(2, 2, 3) * 0.5),
        )
    yield Case(
        "grouped_mm",
        lambda x, w, o: torch._grouped_mm(x, w, o),
        (
            normal(16, 16, dtype=torch.bfloat16),
            normal(3, 16, 16, dtype=torch.bfloat16),
            torch.tensor([3, 9, 16], dtype=torch.int32),
        ),
        False,
    )


def losses() -> Iterator[Case]:
    """Yield losses, which torch.export decomposes."""
    logits, target = normal(6, 4), index(4, 6)
    ignored = target.clone()
    ignored[1] = -100
    weight = positive(4)
    for reduction in ("mean", "sum", "none"):
        for name, options in {
            "plain": {},
            "smooth": {"label_smoothing": 0.2},
            "weight": {"weight": weight},
            "both": {"weight": weight, "label_smoothing": 0.1},
            "ignored": {"ignore_index": 2},
        }.items():
            yield Case(
                f"cross_entropy-{name}-{reduction}",
                lambda x, t, o=options, r=reduction: F.cross_entropy(x, t, reduction=r, **o),
                (logits, target if name == "ignored" else ignored),
            )
        yield Case(
            f"nll-{reduction}",
            lambda x, t, r=reduction: F.nll_loss(x, t, weight, reduction=r),
            (logits, ignored),
        )
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            yield Case(
                f"{name}-{reduction}",
                lambda x, y, f=getattr(F, name), r=reduction: f(
                    x, y.detach() if f is F.soft_margin_loss else y, reduction=r
                ),
                (whole(4, 3), whole(4, 3)),
            )
        yield Case(
            f"kl-{reduction}",
            lambda x, y, r=reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r),
            (normal(4, 3), normal(4, 3)),
        )
        yield Case(
            f"bce-{reduction}",
            lambda x, y, r=reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
            (normal(4, 3), normal(4, 3)),
        )
        yield Case(
            f"bce-logits-{reduction}",
            lambda x, y, r=reduction: F.binary_cross_entropy_with_logits(
                x, y.sigmoid(), pos_weight=weight[:3], reduction=r
            ),
            (normal(4, 3), normal(4, 3)),
        )
    yield Case(
        "cross_entropy-images",
        lambda x, t: F.cross_entropy(x, t),
        (normal(2, 4, 3, 3), index(4, 2, 3, 3)),
    )
    yield Case(
        "cross_entropy-shares",
        lambda x, t: F.cross_entropy(x, t.softmax(1), label_smoothing=0.1),
        (logits, normal(6, 4)),
    )
    yield Case(
        "cross_entropy-none-left",
        lambda x, t: F.cross_entropy(x, t),
        (logits, torch.full((6,), -100)),
        False,
    )
    yield Case("poisson_nll", F.poisson_nll_loss, (normal(4, 3), positive(4, 3)))
    yield Case("triplet", F.triplet_margin_loss, tuple(normal(4, 3) for _ in range(3)))
    yield Case("margin_ranking", F.margin_ranking_loss, (normal(4), normal(4), normal(4).sign()))
    yield Case("hinge_embedding", F.hinge_embedding_loss, (normal(4), normal(4).sign()))
    yield Case(
        "cosine_embedding", F.cosine_embedding_loss, (normal(4, 3), normal(4, 3), normal(4).sign())
    )
    yield Case("multi_margin", F.multi_margin_loss, (logits, target))
    labels = torch.tensor([[0, 2, -1, 1], [3, 3, 0, -1], [-1, 1, 2, 3], [2, 0, 1, 3]])
    for reduction in ("none", "mean", "sum"):
        for name, data in (("", normal(4, 4)), ("-kinks", whole(4, 4))):
            yield Case(
                f"multilabel_margin-{reduction}{name}",
                lambda x, y, r=reduction: F.multilabel_margin_loss(x, y, reduction=r),
                (data, labels),
            )
    yield Case("multilabel_margin-row", F.multilabel_margin_loss, (normal(4), labels[0]))
    yield Case(
        "multilabel_soft_margin",
        lambda x, y: F.multilabel_soft_margin_loss(x, (y > 0).to(x)),
        (normal(4, 3), normal(4, 3)),
    )


FAMILIES = {
    "elementwise": elementwise,
    "reduction": reduction,
    "moving": moving,
    "indexing": indexing,
    "products": products,
    "losses": losses,
}
