"""Many gradient checks, compiled in one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm

from .check import GradientCase, GradientReport, PreparedGradients, check_together
from .parity import PreparedParity, TorchCase

#: The tolerance of a comparison with PyTorch.
_PARITY = 1e-7


def check_many_gradients(
    cases: Sequence[GradientCase | TorchCase],
    *,
    through: str = "relax_grad",
    target: tvm.target.Target | str | Mapping | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> list[GradientReport]:
    """Check the gradients of several calls, against finite differences or PyTorch.

    The programs of all calls, orders and dtypes are compiled in one module. They share equal
    kernels, and the fixed cost of a compilation.

    Parameters
    ----------
    cases : Sequence[GradientCase or TorchCase]
        The calls. A :class:`relax_grad.testing.TorchCase` is compared with PyTorch.
    through, target, rtol, atol, seed
        As for :func:`relax_grad.testing.check_gradients`. Comparisons with PyTorch ignore ``atol``;
        their ``rtol`` is by default as in :func:`relax_grad.testing.check_against_torch`.

    Returns
    -------
    reports : list[GradientReport]
        The measurements, one for each case.

    Raises
    ------
    GradientCheckError
        If a gradient is wrong. Names the operator, the argument, the shapes and attributes, the
        worst element and both numbers.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.testing import GradientCase, check_many_gradients
    >>> x = np.random.default_rng(0).normal(size=(3, 4))
    >>> sine = GradientCase("relax.sin", [x], order=2)
    >>> cases = [sine, GradientCase("relax.sum", [x], {"axis": 1})]
    >>> [report.operator for report in check_many_gradients(cases)]
    ['relax.sin', 'relax.sum']
    """
    if not isinstance(cases, (list, tuple)):
        raise TypeError(f"cases must be a list of type GradientCase, but it is {cases!r}")
    for case in cases:
        if not isinstance(case, (GradientCase, TorchCase)):
            raise TypeError(f"cases must be of type GradientCase or TorchCase, but one is {case!r}")

    def prepare(case: GradientCase | TorchCase) -> PreparedGradients | PreparedParity:
        if isinstance(case, TorchCase):
            return PreparedParity(case, through, _PARITY if rtol is None else rtol, seed)
        return PreparedGradients(case, through, rtol, atol, seed)

    prepared = [prepare(case) for case in cases]
    if not prepared:
        return []
    return list(check_together(prepared, target))
