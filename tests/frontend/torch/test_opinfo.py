"""PyTorch's own samples of its operators, in float64: values and gradients are those of PyTorch, or
the import refuses them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from sweep import share  # noqa: E402
from torch_operators import check_all  # noqa: E402

from ._opinfo import at_edges, operators, samples, wrong  # noqa: E402

#: The numbers of parts of the sweeps; the samples of a part are compiled together.
PARTS, PARTS_OF_EDGES = 64, 16

#: Operators of the suite that runs always, with one sample of each.
FEW = ("index_reduce.amin", "nanmedian", "hypot", "ldexp", "cumulative_trapezoid", "renorm")

#: Functions of the suite that runs always, with a sample at the edges of each.
FEW_EDGES = tuple(
    f"nn.functional.{name}"
    for name in ("hardtanh", "kl_div", "binary_cross_entropy", "multi_margin_loss", "pdist")
)


def test_a_sample_of_a_few():
    cases = [case for name in FEW for case in samples(name, 1)]
    cases += [edge for name in FEW_EDGES for case in samples(name, 1) for edge in at_edges(case)]
    assert len(cases) >= len(FEW) + len(FEW_EDGES)
    assert check_all(cases) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", share(range(PARTS)))
def test_samples(part):
    names = list(operators())[part::PARTS]
    assert wrong([case for name in names for case in samples(name, 4)]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("part", share(range(PARTS_OF_EDGES)))
def test_functions_at_their_edges(part):
    """At kinks, ties and bounds, and with NaN."""
    names = [name for name in operators() if name.startswith("nn.functional")]
    cases = (case for name in names[part::PARTS_OF_EDGES] for case in samples(name, 3))
    assert wrong([edge for case in cases for edge in at_edges(case)]) == {}
