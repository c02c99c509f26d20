"""What differentiation leaves to be tidied: transposes of products, unused bindings."""

from __future__ import annotations

from tvm import relax


def simplify(function: relax.Function) -> relax.Function:
    return relax.analysis.remove_all_unused(function)
