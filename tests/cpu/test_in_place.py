"""Programs whose calls write to their arguments: each operator reads the original values of its
operands."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from in_place import SIZE, random_function, with_helper
from programs import run, to_numpy
from sweep import share
from tvm import relax

import relax_grad


def check(seeds, pipeline="relax_grad", steps=24):
    """Compile random functions in one module, and return the names of those whose results differ
    from NumPy's."""
    bb = relax.BlockBuilder()
    helper = with_helper(bb)
    cases = {
        f"program{seed}": random_function(
            bb, f"program{seed}", helper, np.random.default_rng(seed), steps
        )
        for seed in seeds
    }
    executable = tvm.compile(bb.get(), relax_grad.target.host(), relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    wrong = []
    for name, (inputs, wanted) in cases.items():
        results = to_numpy(machine[name](*map(tvm.runtime.tensor, inputs)))
        close = [
            np.allclose(result, other, rtol=1e-3, atol=1e-3 * max(1, np.abs(other).max()))
            for result, other in zip(results, wanted, strict=True)
        ]
        if not all(close):
            wrong.append(name)
    return wrong


def test_random_programs():
    assert check(range(12)) == []


@pytest.mark.slow
def test_more_random_programs():
    for first in share(range(0, 400, 20)):
        assert check(range(first, first + 20), steps=40) == []


@tvm_ffi.register_global_func("test.in_place.clear", override=True)
def _clear(target):
    target.copyfrom(np.zeros(target.shape, "float32"))
    return target


@pytest.mark.parametrize("is_pure", [True, False])
def test_external_functions(is_pure):
    """One function declares that it writes in place. The effects of the other are unknown."""
    kind = relax.TensorType((SIZE, SIZE), "float32")
    x, y = relax.Var("x", kind), relax.Var("y", kind)
    bb = relax.BlockBuilder()
    with bb.function("main", [x, y], pure=is_pure):
        a = bb.emit(relax.op.exp(x))
        b = bb.emit(relax.op.permute_dims(a))
        rows = bb.emit(relax.op.reshape(a, (SIZE * SIZE,)))
        name = "test.in_place.clear"
        if is_pure:
            c = bb.emit(relax.op.call_inplace_packed(name, a, inplace_indices=[0], ty_args=kind))
        else:
            c = bb.emit(relax.Call(relax.ExternFunc(name), [a], None, [kind]))
        products = bb.emit(relax.op.matmul(y, b))
        bb.emit_func_output(relax.Tuple([products, bb.emit(relax.op.sin(rows)), c]))
    module = relax.transform.ConvertToDataflow(1)(bb.get())
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SIZE, SIZE)).astype("float32") for _ in range(2))
    results = run(module, "main", x, y, target=relax_grad.target.host(), pipeline="relax_grad")
    wanted = y @ np.exp(x).T, np.sin(np.exp(x)).ravel(), np.zeros((SIZE, SIZE))
    for result, other in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, other, rtol=1e-4, atol=1e-5)
