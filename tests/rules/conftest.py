"""Fixtures of the tests of rules."""

from __future__ import annotations

import pytest
from tvm import relax


@pytest.fixture
def partials_of():
    """Return the function below. It is a fixture, since tests cannot import from here."""
    return _partials_of


def _partials_of(builder, rule, types):
    """Return a function of the arguments, the output and the output gradient to a rule's
    partials."""
    params = [relax.Var(f"x{i}", ty) for i, ty in enumerate(types)]
    call = relax.BlockBuilder().normalize(builder(*params))
    output, output_grad = (relax.Var(name, call.ty) for name in ("y", "grad"))
    bb = relax.BlockBuilder()
    with bb.function("main", [*params, output, output_grad]):
        partials = [bb.emit(partial) for partial in rule(output, call, output_grad, bb)]
        bb.emit_func_output(partials)
    return bb.get()["main"]
