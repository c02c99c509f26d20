"""The matrices of Winograd's minimal filtering along one axis, by the method of Cook and Toom."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

#: A matrix by rows.
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Transform:
    """The matrices of F(m, r), m results of a filter of r taps: for the data, for the weight, and
    for the result."""

    data: Matrix
    weight: Matrix
    result: Matrix

    @property
    def results(self) -> int:
        return len(self.result)

    @property
    def side(self) -> int:
        """The number of elements that the results are computed from, and of products."""
        return len(self.data)


#: The finite points of the filters, by the number of results and of taps. Points and their negative
#: reciprocals have the smallest errors: see Barabasz et al., "Error Analysis and Improving the
#: Accuracy of Winograd Convolution for Deep Neural Networks" (2020).
_HALF = Fraction(1, 2)
_POINTS = {
    (1, 1): (),
    (2, 3): (0, 1, -1),
    (4, 3): (0, 1, -1, 2, -2),
    (2, 5): (0, 1, -1, _HALF, -2),
}


@cache
def transform_of(results: int, taps: int) -> Transform:
    """Return the matrices of F(results, taps).

    A filter multiplies two polynomials, transposed. Both factors are evaluated at the points, and
    the product is interpolated. The last point is infinity.
    """
    points = [Fraction(point) for point in _POINTS[results, taps]]
    data, weight = [], []
    for i, point in enumerate(points):
        others = points[:i] + points[i + 1 :]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        data.append([*_with_roots(others), Fraction(0)])
        weight.append([point**k / scale for k in range(taps)])
    data.append(_with_roots(points))
    weight.append([Fraction(k == taps - 1) for k in range(taps)])
    result = [[*(point**k for point in points), Fraction(k == results - 1)] for k in range(results)]
    return Transform(*map(_rounded, (data, weight, result)))


def _with_roots(roots: list[Fraction]) -> list[Fraction]:
    """Return the coefficients of the polynomial with these roots, the lowest first."""
    terms = [Fraction(1)]
    for root in roots:
        zero = Fraction(0)
        terms = [a - root * b for a, b in zip([zero, *terms], [*terms, zero], strict=True)]
    return terms


def _rounded(rows: list[list[Fraction]]) -> Matrix:
    return tuple(tuple(map(float, row)) for row in rows)
