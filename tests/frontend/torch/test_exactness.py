"""NaN and infinities, half precision, and symbolic extents as numbers, against PyTorch."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_models import check, close, compiled  # noqa: E402
from torch_operators import Case, check_all  # noqa: E402

from relax_grad.frontend.torch import from_module, wrap  # noqa: E402

nn, F = torch.nn, torch.nn.functional

NAN, INF = math.nan, math.inf
DATA = torch.tensor([NAN, INF, -INF, 0.0, 1.0, -1.0, 2.5, -7.0, 6.0, -3.0, 3.0])
OTHER = torch.tensor([1.0, NAN, NAN, 0.0, INF, -INF, INF, -7.0, 2.0, NAN, 3.0])
ROWS = torch.tensor([[1.0, 2.0, INF, -INF], [-INF] * 4, [INF] * 4, [3.0, 3.0, 1.0, 0.0]])
WITH_NAN = torch.tensor([[NAN, 1.0, 2.0, INF], [1.0, NAN, NAN, -INF]])

# PyTorch 2.14 gives the gradient of fmax and fmin to both operands if one is NaN.
_NUMBERS = () if torch.__version__.startswith("2.14.") else ("fmax", "fmin")

SURE = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.25])
TIED = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])


def _distances(x):
    return torch.cdist(x, 1 - x, p=INF)


def _all_distances(x):
    return F.pdist(x, p=INF)


def _slope_of(function):
    def slope(x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            (result,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return result

    return slope


DIVISORS = torch.tensor([0.1, 0.1, -3.0, 3.0, INF, -0.1], dtype=torch.float64)
DIVIDED = torch.tensor([1.5, -1.5, 7.0, 1e20, 2.0, -2.0], dtype=torch.float64)

SPECIAL = [
    *(Case(f.__name__, f, (DIVIDED, DIVISORS)) for f in (torch.fmod, torch.remainder)),
    *(
        Case(f"{f.__name__}-32", lambda x, f=f: f(x, 0.1), (DIVIDED[:3].float(),))
        for f in (torch.fmod, torch.remainder)
    ),
    *(
        Case(f"{f.__name__}-slope", _slope_of(f), (torch.tensor([0.0, 1.0, -2.0]),))
        for f in (F.softplus, F.mish)
    ),
    # Their mean is rounded.
    Case("deviation-of-equal", lambda x: x.std(1), (torch.tensor([[0.3] * 3, [0.7] * 3]),)),
    *(Case(name, getattr(F, name), (DATA,)) for name in ("relu", "hardsigmoid", "leaky_relu")),
    *(Case(name, getattr(F, name), (DATA,)) for name in ("silu", "mish", "softplus")),
    # PyTorch's vector and scalar forms differ in the gradient at NaN.
    Case("softshrink", F.softshrink, (DATA,), False),
    Case("softshrink-infinite", F.softshrink, (DATA[1:],)),
    Case("times-zero", lambda x: x * 0 + 0.0 * x, (DATA,)),
    Case("root-of-times-zero", lambda x: (x * 0).sqrt(), (DATA,)),
    *(
        Case(f"norm-{p}", lambda x, p=p: torch.linalg.vector_norm(x, p, -1), (DATA,), p == 1)
        for p in (0, 1, 3, 0.5)
    ),
    Case("product-times-zero", lambda x, y: x * y * 0, (DATA, OTHER)),
    *(
        Case(f"{f.__name__}-infinite", lambda x, y, f=f: f(x, y, reduction="none"), (DATA, OTHER))
        for f in (F.smooth_l1_loss, F.huber_loss, F.l1_loss)
    ),
    *(
        Case(f"{f.__name__}-one", lambda x, f=f, o=o: f(x, 0 * x.detach() + 0.5, **o), (DATA[3:],))
        for f, o in (
            (F.smooth_l1_loss, {"beta": 0.5}),
            (F.smooth_l1_loss, {"beta": 0.0, "reduction": "sum"}),
            (F.huber_loss, {"delta": 0.5, "reduction": "sum"}),
        )
    ),
    Case("threshold", lambda x: F.threshold(x, 1.0, 5.0), (DATA,)),
    Case("clamp", lambda x: x.clamp(-1, 1), (DATA,)),
    Case("clamp_min", lambda x: x.clamp_min(0), (DATA,)),
    Case("clamp-nan", lambda x: x.clamp(NAN, 1), (DATA,)),
    *(
        Case(name, getattr(torch, name), (DATA, OTHER))
        for name in ("maximum", "minimum", "fmod", *_NUMBERS)
    ),
    Case("sinc-at-zero", torch.sinc, (torch.tensor([0.0, 0.5, -2.0]),)),
    Case("xlogy-at-zero", torch.xlogy, (torch.tensor([0.0, 2.0]), torch.tensor([3.0, 0.5]))),
    *(
        Case(f"{f.__name__}-infinite", lambda x, f=f: f(x, dim=1), (ROWS,))
        for f in (torch.amax, torch.amin)
    ),
    *(
        Case(f"{f.__name__}-nan", lambda x, f=f: f(x, dim=1), (WITH_NAN,), False)
        for f in (torch.amax, torch.amin, torch.median)
    ),
    Case("norm-inf-nan", lambda x: x.norm(INF, 1), (WITH_NAN,), False),
    Case("norm-inf-infinite", lambda x: x.norm(INF, 1), (ROWS,), False),
    Case("sort-nan", lambda x: (x.sort(1)[0], x.topk(2, 1, False)[0]), (WITH_NAN,), False),
    Case(
        "bce-saturated",
        lambda x: F.binary_cross_entropy(x, SURE, weight=SURE + 1, reduction="none"),
        (torch.tensor([0.0, 1.0, 0.0, 1.0, 1e-13, 1 - 1e-7, 0.5]),),
    ),
    Case(
        "cosine-short",
        lambda x, y: F.cosine_similarity(x, y),
        (torch.tensor([[0.0, 0.0], [1e-9, 0.0], [1.0, 1.0]]), torch.eye(3, 2) + 0.5),
    ),
    Case("cosine-axes", lambda x: F.cosine_similarity(x, x[0] * x + 1, dim=-1), (TIED,)),
    *(
        Case(f"distance-inf-{f.__name__}", lambda x, f=f: f(x), (TIED,))
        for f in (_distances, _all_distances)
    ),
    Case("median-ties", lambda x: x.median() + x.flatten()[:5].median(), (TIED,)),
    Case("median-of-nan", lambda x: x.nan_to_num(0.5).median() + x[1].median(), (WITH_NAN,), False),
    *(
        Case(f"{name}-edge", getattr(F, name), (torch.tensor([-3.0, -0.5, -0.0, 0.0, 0.5, 6.0]),))
        for name in ("celu", "selu", "softsign", "logsigmoid", "tanhshrink", "gelu")
    ),
    Case("logcumsumexp-far", lambda x: x.logcumsumexp(0), (torch.tensor([-200.0, 0.0, 5.0]),)),
]


def test_nan_and_infinities():
    assert check_all(SPECIAL) == {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(
        *(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
    )
    data = torch.randn(3, 2, 6, 6, dtype=dtype)
    check(
        module.to(dtype),
        (data,),
        loss=F.cross_entropy,
        targets=(torch.tensor([0, 1, 2]),),
        tolerance=1e-9 if dtype == torch.float64 else 0.08,
    )


class _Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5 + 0.1)

    def forward(self, data):
        data = data @ self.weight
        batch, length, _ = data.shape
        places = torch.arange(length, dtype=data.dtype)[None, :, None] / length
        scaled = data * length**-0.5 + places + torch.zeros_like(data)
        mask = torch.ones(length, length).triu(1).bool()
        scores = (scaled @ scaled.transpose(1, 2)).masked_fill(mask, -INF).softmax(-1)
        return (scores @ scaled.expand(batch, length, 4)).pow(2).sum() / batch


def test_symbolic_extents_are_numbers():
    module = _Sized()
    imported = from_module(
        module, (torch.randn(3, 5, 4),), dynamic_shapes={"data": {0: "batch", 1: "length"}}
    )
    run = compiled(imported, forward=False)
    for extents in ((3, 5), (1, 5), (2, 1), (1, 1)):
        data = torch.randn(*extents, 4)
        wanted = module(data)
        (gradient,) = torch.autograd.grad(wanted, [module.weight])
        (loss, _, _), grad = run("loss_adjoint", torch.tensor(0), data, module.weight)
        close("loss", [loss], [wanted])
        close("gradient", grad, [gradient])


CORNERS = torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 6.0, 2.0], dtype=torch.float64)
FACTORS = torch.tensor([0.5, -0.3, 0.0, 1.0, 0.0], dtype=torch.float64)


class _Slopes(nn.Module):
    """Derivatives of functions."""

    functions = (
        *(getattr(F, name) for name in ("elu", "celu", "selu", "hardswish", "softsign", "gelu")),
        lambda x: F.elu(x, 2.0),
        lambda x: F.softplus(x, 2.0, 1.0),
        lambda x: torch.where(x > 0, x * x, x),
        lambda x: torch.special.entr(x[:2]),
        lambda x: torch.special.xlog1py(x[:5] * FACTORS, 2.0),
    )

    def forward(self, x, factors):
        parts = [_slope_of(function)(x) for function in self.functions]
        products = (
            lambda x: torch.special.xlog1py(x, FACTORS.abs() + x),
            lambda x: torch.special.xlog1py(FACTORS, x),
        )
        return parts + [_slope_of(_slope_of(function))(factors) for function in products]


def test_derivatives_at_corners():
    """Derivatives of the first three orders are PyTorch's."""
    module, results = _Slopes(), []
    for called in (module, wrap(module, (CORNERS.clone().requires_grad_(), FACTORS))):
        x, factors = CORNERS.clone().requires_grad_(), FACTORS.clone().requires_grad_()
        parts = called(x, factors)
        total = sum(part.sum() * (i + 1) for i, part in enumerate(parts))
        results.append([*parts, *torch.autograd.grad(total, (x, factors))])
    for result, wanted in zip(*results, strict=True):
        torch.testing.assert_close(result, wanted)


def test_sinc_at_zero():
    """PyTorch's second derivative is NaN."""
    slope = _slope_of(_slope_of(torch.sinc))

    class Slope(nn.Module):
        def forward(self, x):
            return slope(x)

    zero = torch.zeros(1, dtype=torch.float64)
    near = slope(torch.tensor([1e-3], dtype=torch.float64))
    torch.testing.assert_close(wrap(Slope(), (zero,))(zero), near, rtol=1e-5, atol=0)


def _resized(data, sizes, factor):
    """Return images in twice the size, in another size, and rolled images."""
    size = sizes.shape[2:]
    yield F.interpolate(data, scale_factor=2)
    yield F.interpolate(data, scale_factor=2, mode="bilinear")
    yield F.interpolate(data, scale_factor=2, mode="bicubic", align_corners=True)
    yield F.interpolate(data, size=size)
    yield F.interpolate(data, size=size, mode="nearest-exact")
    yield F.interpolate(data, size=size, mode="bilinear", align_corners=True)
    yield F.interpolate(data, size=size, mode="bicubic")
    yield data.roll((2, -7), (0, 3))
    yield (data * factor).roll(5)


class _Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, data, sizes):
        parts = _resized(data * self.factor, sizes, self.factor)
        return sum(part.pow(2).cumsum(-1).sum() for part in parts)


def test_images_of_symbolic_size():
    """The batch and both sizes are symbolic; a roll goes further than the extent."""

    def operands(batch, height, width, *size):
        shapes = (batch, 2, height, width), (1, 1, *size)
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    module = _Resized()
    axes = {"data": {0: "batch", 2: "height", 3: "width"}, "sizes": {2: "rows", 3: "columns"}}
    imported = from_module(module, operands(2, 4, 5, 7, 9), dynamic_shapes=axes)
    run = compiled(imported, forward=False)
    for extents in ((2, 4, 5, 7, 9), (3, 6, 7, 3, 8), (1, 3, 3, 3, 2)):
        data = operands(*extents)
        wanted = module(*data)
        gradient = torch.autograd.grad(wanted, [module.factor])
        (loss, _, _), grads = run("loss_adjoint", torch.tensor(0), *data, module.factor)
        close("loss", [loss], [wanted])
        close("gradient", grads, gradient)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_infinity_spreads_in_its_channel(mode):
    """Each axis is a product with a matrix, in which the infinity meets zeros."""
    data = torch.arange(40.0).reshape(1, 2, 4, 5)
    data[0, 0, 1, 2] = float("inf")
    module = torch.nn.Upsample(scale_factor=2, mode=mode)
    result, wanted = wrap(module, (data,))(data), module(data)
    assert not result[0, 0].isfinite().any()
    assert wanted[0, 0].isfinite().any()
    torch.testing.assert_close(result[0, 1], wanted[0, 1])


class _ReadsStatistics(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return (y.relu() + self.norm.running_mean) * self.norm.running_var.clone() + y.sin()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_have_no_gradient(momentum):
    torch.manual_seed(0)
    module, data = _ReadsStatistics(momentum).double(), torch.randn(5, 4).double()
    check(module, (data,), loss=lambda y: y.pow(2).sum(), steps=2, forward=False)
