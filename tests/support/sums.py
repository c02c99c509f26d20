"""Sums of many tensors in Relax functions, and the operators that a pass leaves of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from programs import to_numpy
from sweep import TARGET
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


def check_random(cases: Sequence, transform: Callable, least: int) -> None:
    """Compare random sums behind a pass with their exact values, and assert that more than
    ``least`` of them have a concatenation there.

    A case has the members ``module()``, ``values`` and ``total()``.
    """
    functions, count = {}, 0
    for number, case in enumerate(cases):
        function = transform(case.module())
        count += "concat" in names_in(function)
        name = f"case{number}"
        functions[tvm.ir.GlobalVar(name)] = function.with_attr("global_symbol", name)
    assert count > least
    machine = relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), TARGET), tvm.cpu())
    for number, case in enumerate(cases):
        name = f"case{number}"
        result = to_numpy(machine[name](*map(tvm.runtime.tensor, case.values)))
        assert result.dtype == case.dtype
        np.testing.assert_array_equal(result, case.total(), err_msg=name)
