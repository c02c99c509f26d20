"""Functions of torch.nn.functional that no other test names: plain numbers, whole numbers, which
have ties and lie at kinks, infinities and NaN; values and gradients against PyTorch."""

from __future__ import annotations

import functools
import math

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from torch_operators import Case, check_all  # noqa: E402

F = torch.nn.functional
NAN, INF = math.nan, math.inf

#: 16 numbers at edges, 8 times: PyTorch computes such lengths by its vector loops, whose gradients
#: at NaN differ from those of its scalar loops.
NUMBERS = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 0.5, -0.5, 2.5, -20.0, 20.0)
EDGES = torch.tensor(NUMBERS).repeat(8)


def _in_place(name):
    def run(x):
        return getattr(F, name)(x.clone())

    return run


#: Functions of one tensor of any shape.
UNARY = {
    **{name: getattr(F, name) for name in ("hardshrink", "logsigmoid", "sigmoid", "softsign")},
    **{name: getattr(F, name) for name in ("tanh", "tanhshrink", "relu6", "hardtanh", "hardswish")},
    **{name: getattr(F, name) for name in ("elu", "celu", "selu", "hardsigmoid", "softshrink")},
    **{name: _in_place(name) for name in ("celu_", "hardtanh_", "leaky_relu_", "relu_", "selu_")},
    "threshold_": lambda x: F.threshold_(x.clone(), 0.5, 2.0),
    "hardtanh-bounds": lambda x: F.hardtanh(x, 0.5, 3.0),
    "elu-alpha": lambda x: F.elu(x, 2.5),
    "hardshrink-bound": lambda x: F.hardshrink(x, 3.0),
    "dropout1d": lambda x: F.dropout1d(x.reshape(2, 8, 8), training=False),
    "dropout2d": lambda x: F.dropout2d(x.reshape(1, 2, 8, 8), training=False),
    "dropout3d": lambda x: F.dropout3d(x.reshape(1, 2, 4, 4, 4), training=False),
}

LINE, IMAGE, VOLUME = (2, 3, 12), (1, 2, 6, 6), (1, 1, 4, 4, 4)


def _unpooled(rank):
    def run(x):
        values, places = getattr(F, f"max_pool{rank}d")(x, 2, return_indices=True)
        return getattr(F, f"max_unpool{rank}d")(values, places, 2)

    return run


def _scaled(function, *args, **options):
    return functools.partial(lambda x: function(x, *args, **options))


#: Functions with the shape of their operand.
SHAPED = {
    "adaptive_avg_pool3d": (_scaled(F.adaptive_avg_pool3d, (3, 2, 1)), VOLUME),
    "adaptive_max_pool2d": (_scaled(F.adaptive_max_pool2d, (4, 2)), IMAGE),
    "adaptive_max_pool3d": (_scaled(F.adaptive_max_pool3d, (3, 2, 1)), VOLUME),
    **{
        f"adaptive_max_pool{n}d_with_indices": (
            _scaled(getattr(F, f"adaptive_max_pool{n}d_with_indices"), 2),
            shape,
        )
        for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME))
    },
    "avg_pool1d": (_scaled(F.avg_pool1d, 3, 2, 1), LINE),
    "avg_pool1d-inside": (_scaled(F.avg_pool1d, 3, 2, 1, True, False), LINE),
    "avg_pool3d": (_scaled(F.avg_pool3d, 2, 1, 1, divisor_override=3), VOLUME),
    **{
        f"max_pool{n}d_with_indices": (
            _scaled(getattr(F, f"max_pool{n}d_with_indices"), 3, 2, 1),
            shape,
        )
        for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME))
    },
    **{
        f"max_unpool{n}d": (_unpooled(n), shape)
        for n, shape in ((1, LINE), (2, IMAGE), (3, VOLUME))
    },
    "lp_pool1d": (_scaled(F.lp_pool1d, 2, 3, 2), LINE),
    "lp_pool2d": (_scaled(F.lp_pool2d, 3, 2), IMAGE),
    "lp_pool3d": (_scaled(F.lp_pool3d, 1, 2), VOLUME),
    "softmin": (_scaled(F.softmin, 1), LINE),
    "upsample": (_scaled(F.upsample, scale_factor=2), IMAGE),
    "upsample_nearest": (_scaled(F.upsample_nearest, (4, 9)), IMAGE),
    "upsample_bilinear": (_scaled(F.upsample_bilinear, (4, 9)), IMAGE),
    "cdist": (lambda x: torch.cdist(x, x.flip(1)), (1, 4, 3)),
    "cdist-1": (lambda x: torch.cdist(x, x.flip(1), p=1), (1, 4, 3)),
    "cdist-3": (lambda x: torch.cdist(x, x.flip(1), p=3), (1, 4, 3)),
}

#: Functions whose gradients at NaN and infinities differ from PyTorch's: see the conventions.
ONLY_VALUES = ("cdist-1", "cdist-3", "max_unpool1d", "max_unpool2d", "max_unpool3d")

#: Functions that multiply NaN by weights of zero, which PyTorch does not read.
WEIGHTED = ("upsample_bilinear", "conv_transpose1d-dilated", "conv_transpose2d")

#: Convolutions with their further arguments: stride, padding, dilation, groups.
CONVOLUTIONS = {
    "conv1d": (F.conv1d, LINE, (4, 3, 3), {"padding": "same", "dilation": 2}),
    "conv1d-groups": (F.conv1d, LINE, (3, 1, 3), {"stride": 2, "padding": 1, "groups": 3}),
    "conv_transpose1d": (F.conv_transpose1d, LINE, (3, 2, 3), {"stride": 2, "padding": 1}),
    "conv_transpose1d-dilated": (F.conv_transpose1d, LINE, (3, 2, 3), {"dilation": 3}),
    "conv_transpose2d": (
        F.conv_transpose2d,
        IMAGE,
        (2, 2, 3, 3),
        {"stride": 2, "output_padding": 1, "groups": 2, "dilation": 2},
    ),
    "conv_transpose3d": (F.conv_transpose3d, VOLUME, (1, 2, 2, 2, 2), {"stride": 2}),
}


def _numbers(shape, kind):
    torch.manual_seed(math.prod(shape))
    data = torch.randn(shape, dtype=torch.float64)
    if kind == "whole":
        return data.mul(2).round()
    if kind in ("nan", "infinite"):
        flat = data.reshape(-1)
        flat[flat.numel() // 2] = NAN if kind == "nan" else -INF
        flat[0] = 0 if kind == "nan" else INF
    return data


def _cases(kind):
    is_finite = kind in ("plain", "whole")
    for name, (function, shape) in SHAPED.items():
        if is_finite or name not in WEIGHTED:
            has_gradient = is_finite or name not in ONLY_VALUES
            yield Case(f"{name}-{kind}", function, (_numbers(shape, kind),), has_gradient)


def test_activations():
    cases = [Case(n, f, (EDGES,), not n.startswith("hardshrink")) for n, f in UNARY.items()]
    finite = torch.where(EDGES.isnan(), 0.5, EDGES)
    cases += [Case(f"{n}-finite", UNARY[n], (finite,)) for n in UNARY if n.startswith("hardshrink")]
    assert check_all(cases) == {}


@pytest.mark.parametrize("kind", ["plain", "whole", "nan", "infinite"])
def test_pools_and_distances(kind):
    assert check_all(list(_cases(kind))) == {}


def test_convolutions():
    cases = []
    for name, (function, shape, weights, options) in CONVOLUTIONS.items():
        run = functools.partial(lambda x, w, f=None, o=None: f(x, w, **o), f=function, o=options)
        for kind in ("plain", *(["nan"] if name not in WEIGHTED else [])):
            operands = _numbers(shape, kind), _numbers(weights, "plain")
            cases.append(Case(f"{name}-{kind}", run, operands))
    assert check_all(cases) == {}
