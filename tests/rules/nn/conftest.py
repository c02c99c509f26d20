"""Fixtures of the tests of these rules."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax


@pytest.fixture(scope="session")
def run_rule():
    """Run the gradient rule of one operator alone, for a forward operator that does not compile."""

    def run(operator, inputs, cotangents, **attrs):
        """Return the partials. ``operator`` is a builder, and the cotangents are those of its
        results."""

        def variables(name, arrays):
            return [
                relax.Var(f"{name}{i}", relax.TensorType(array.shape, array.dtype.name))
                for i, array in enumerate(arrays)
            ]

        params, grads = variables("x", inputs), variables("grad", cotangents)
        bb = relax.BlockBuilder()
        with bb.function("main", [*params, *grads]):
            with bb.dataflow():
                result = bb.emit(operator(*params, **attrs))
                grad = bb.emit(relax.Tuple(grads)) if len(grads) > 1 else grads[0]
                call = bb.lookup_binding(result)
                partials = call.op.get_attr("FPrimalGradient")(result, call, grad, bb)
                partials = bb.emit_output(relax.Tuple(partials))
            bb.emit_func_output(partials)
        for partial, param in zip(partials.ty.fields, params, strict=True):
            tvm.ir.assert_structural_equal(partial, param.ty)
        module = relax.transform.DeadCodeElimination()(bb.get())
        assert call.op.name not in module.script(), "the forward operator should be left out"
        machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
        values = map(tvm.runtime.tensor, (*inputs, *cotangents))
        return [np.asarray(value.numpy()) for value in machine["main"](*values)]

    return run
