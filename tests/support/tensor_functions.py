"""Tensor functions in tests: modules that call one, their gradients, and the checks of these."""

from __future__ import annotations

import numpy as np
import tvm
from sweep import TARGET
from tvm import relax, te

from relax_grad.testing import check_gradients
from relax_grad.tir import adjoint

__all__ = ["call", "check", "expression", "module_of", "numbers", "run", "tensor"]


def call(function, *args, out):
    """Emit a call of a function into the current builder."""
    bb = relax.BlockBuilder.current()
    callee = bb.add_func(function.without_attr("global_symbol"), "f")
    return bb.emit(relax.op.call_tir(callee, list(args), out))


def tensor(*shape, dtype="float64"):
    return relax.TensorType(shape, dtype)


def numbers(*shapes, low=-1.0, high=1.0):
    rng = np.random.default_rng(0)
    return [rng.uniform(low, high, shape) for shape in shapes]


def check(function, inputs, *out, order=2, **more):
    """Compare the gradients of all results with central differences."""

    def emit(*args):
        return call(function, *args, out=list(out) if len(out) > 1 else out[0])

    report = check_gradients(emit, inputs, order=order, **more)
    assert report.comparisons > 0


def run(function, *arrays, num_outputs=None, **more):
    """Return the gradients by the adjoint, given the inputs, and a cotangent of ones for each
    result."""
    derivative = adjoint(function, num_outputs=num_outputs, **more)
    params = list(function.params)
    outputs = params[len(arrays) :]
    values = [np.asarray(array) for array in arrays]
    dtypes = [str(output.dtype) for output in outputs]
    shapes = [tuple(int(extent) for extent in output.shape) for output in outputs]
    results = [tvm.runtime.empty(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    inputs = [tvm.runtime.tensor(value) for value in values]
    compiled = tvm.compile(tvm.IRModule({"f": function.with_attr("global_symbol", "f")}), TARGET)
    compiled["f"](*inputs, *results)
    ones = [tvm.runtime.tensor(np.ones(s, d)) for s, d in zip(shapes, dtypes, strict=True)]
    table = {"input": inputs, "output": results, "cotangent": ones}
    gradients = [tvm.runtime.tensor(np.full_like(values[i], 7)) for i in derivative.wrt]
    module = tvm.IRModule({"g": derivative.function.with_attr("global_symbol", "g")})
    tvm.compile(module, TARGET)["g"](*(table[kind][i] for kind, i in derivative.takes), *gradients)
    return [grad.numpy() for grad in gradients]


def expression(compute, *shapes, dtype="float64"):
    """Return the function of a tensor expression."""
    inputs = [te.placeholder(shape, dtype, f"x{i}") for i, shape in enumerate(shapes)]
    return te.create_prim_func([*inputs, compute(*inputs)])


def module_of(function, call, *types):
    """Return a module whose ``main`` returns the result of
    ``call(builder, function, *parameters)``."""
    bb = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    callee = bb.add_func(function.without_attr("global_symbol"), "f")
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(call(bb, callee, *params))
        bb.emit_func_output(result)
    return bb.get()
