"""Inputs that the legalization of padding refuses. The tests of the gradients check its numbers."""

from __future__ import annotations

import pytest
from tvm import relax


def legalize(shape, widths, mode):
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(relax.op.nn.pad(x, widths, mode))
        bb.emit_func_output(out)
    return relax.transform.LegalizeOps()(bb.get())


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_refuses_to_pad_an_empty_axis_with_its_elements(mode):
    with pytest.raises(ValueError, match=rf"'{mode}' must not be empty"):
        legalize((2, 0), (0, 0, 1, 0), mode)


def test_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match=r"relax\.nn\.pad: pad_mode must be one of.*not 'edge'"):
        legalize((2,), (1, 0), "edge")
