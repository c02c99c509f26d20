"""Sums of many tensors in Relax functions, and the operators that a pass leaves of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_grad.ir.bindings import bindings_of


def names_in(function: relax.Function) -> list[str]:
    """Return the names of the operators that a function calls."""
    values = [binding.value for binding in bindings_of(function.body)]
    return [
        value.op.name.removeprefix("relax.") for value in values if isinstance(value, relax.Call)
    ]


def total_of(bb: relax.BlockBuilder, terms: Sequence[relax.Expr]) -> relax.Expr:
    """Emit the sum of tensors, one after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = bb.emit(op.add(total, term))
    return total


def in_any_order(
    bb: relax.BlockBuilder, rng: np.random.Generator, terms: Sequence[relax.Expr]
) -> relax.Expr:
    """Emit the sum of tensors as a chain, a tree, or anything between."""
    terms = list(terms)
    while len(terms) > 1:
        a = terms.pop(int(rng.integers(len(terms))))
        b = terms.pop(int(rng.integers(len(terms))))
        terms.append(bb.emit(op.add(a, b)))
    return terms[0]
