"""Every converter against PyTorch: value, dtype, shape, and the gradient of floating-point
operands."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402
from torch_operators import check_all  # noqa: E402

from .converter_cases import FAMILIES  # noqa: E402

#: The number of cases that one module has, which saves time of compilation.
TOGETHER = 60

#: A case of each kind of converter, for the suite that runs always.
FEW = {
    "elementwise": {
        "log1p-small",
        "lgamma",
        "erfinv",
        "erfinv-1.0",
        "special_ndtri",
        "clamp-kinks",
        "clamp-equal",
        "add-bool",
        "div-trunc-int",
        "cast-small-bool",
        "hypot-edges",
        "ldexp",
    },
    "reduction": {
        "max-dim-True",
        "cumsum-bool",
        "norm-zero",
        "cummax-ties",
        "cummin-nan",
        "nanmedian",
        "nanmedian-dim",
        "var-{'dim': -1, 'correction': 2}",
    },
    "moving": {"slice_scatter", "diagonal_scatter", "pad2-reflect", "in-place"},
    "indexing": {"index-apart", "index_put-02-True", "scatter_reduce-amin-ties", "embedding-0"}
    | {"index_reduce-amax-True", "index_reduce-prod-False"},
    "products": {
        "mm-bf16",
        "conv2d-f64",
        "attention-empty-rows",
        "max_unpool2d",
        "cholesky_solve-True",
    },
    "losses": {"cross_entropy-both-mean", "multilabel_margin-mean"},
}


def test_a_case_of_each_kind():
    cases = [
        case for family, names in FEW.items() for case in FAMILIES[family]() if case.name in names
    ]
    assert len(cases) == sum(map(len, FEW.values()))
    assert check_all(cases) == {}


CASES = {family: share(list(cases())) for family, cases in FAMILIES.items()}
PARTS = [
    (family, part) for family, cases in CASES.items() for part in range(-(-len(cases) // TOGETHER))
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "part"), PARTS)
def test_all_cases(family, part):
    cases = CASES[family][part * TOGETHER : (part + 1) * TOGETHER]
    assert check_all(cases) == {}
