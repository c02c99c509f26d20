"""Forward results in float16, which TVM computes in float16 or refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax

#: Points more than one unit in the last place away from the overflow of a result.
POINTS = [-11.0, -2.0, -1.0, -0.5, -1e-4, 0.0, 1e-4, 0.5, 1.0, 2.0, 11.0, 19.0, 60.0]

FORWARD = {
    "acos": "acos",
    "acosh": "acosh",
    "asin": "asin",
    "asinh": "asinh",
    "atan": "atan",
    "atanh": "atanh",
    "cosh": "cosh",
    "sinh": "sinh",
    "tanh": "tanh",
    "nn.gelu": "nn.functional.gelu",
    "nn.gelu_tanh": "nn.functional.gelu",
    "nn.selu": "nn.functional.selu",
    "nn.softplus": "nn.functional.softplus",
}


def lookup(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


def run(op, x, **attrs):
    param = relax.Var("x", relax.TensorType(x.shape, x.dtype.name))
    bb = relax.BlockBuilder()
    with bb.function("main", [param]):
        with bb.dataflow():
            result = bb.emit_output(op(param, **attrs))
        bb.emit_func_output(result)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), TARGET), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


@pytest.mark.parametrize("name", FORWARD)
def test_float16_is_rounded_once(torch, name):
    x = np.array(POINTS, "float16")
    result = run(lookup(relax.op, name), x)
    attrs = {"approximate": "tanh"} if name == "nn.gelu_tanh" else {}
    expected = lookup(torch, FORWARD[name])(torch.tensor(x).double(), **attrs).half().numpy()
    assert result.dtype == "float16"
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-6)


def test_attributes_of_softplus_stay(torch):
    x = np.array(POINTS, "float16")
    result = run(relax.op.nn.softplus, x, beta=0.5, threshold=4.0)
    expected = torch.nn.functional.softplus(torch.tensor(x).double(), 0.5, 4.0).half().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_wrap_param_compiles():
    x = np.array([-1.5, 0.25, 3.0], "float32")
    for dtype in ("float16", "float32", "int32"):
        result = run(relax.op.wrap_param, x, dtype=dtype)
        assert result.dtype == dtype
        assert result.tolist() == x.astype(dtype).tolist()
