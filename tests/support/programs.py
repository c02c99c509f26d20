"""Build, run and differentiate small Relax programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from sweep import TARGET
from tvm import relax
from tvm.script import from_source

from relax_grad.transform import Gradient


def tensor(name: str, shape: Sequence, dtype: str = "float64") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def build(params: Sequence[relax.Var], body: Callable, *, dataflow: bool = True) -> tvm.IRModule:
    """Return a module whose ``main`` returns ``body(builder, *params)``."""
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        if dataflow:
            with bb.dataflow():
                result = bb.emit_output(body(bb, *params))
        else:
            result = body(bb, *params)
        bb.emit_func_output(result)
    return bb.get()


def run(module: tvm.IRModule, name: str, *values, target=TARGET, pipeline: str = "default"):
    """Compile a module and run a function of it; values that are no arrays are passed unchanged."""
    executable = tvm.compile(module, target, relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    tensors = [tvm.runtime.tensor(v) if isinstance(v, np.ndarray) else v for v in values]
    return to_numpy(machine[name](*tensors))


def value_and_gradients(function: Callable, inputs: Sequence[np.ndarray], wrt: Sequence[int]):
    """Return the value of a function of tensors at the inputs, and the gradients of the inputs
    ``wrt``."""
    params = [tensor(f"x{i}", array.shape, array.dtype.name) for i, array in enumerate(inputs)]
    module = build(params, lambda bb, *tensors: function(*tensors))
    module = relax.transform.Gradient("main", [params[i] for i in wrt])(module)
    return run(module, "main_adjoint", *inputs)


def with_assertions() -> tvm.transform.PassContext:
    """Return a context for the assertions of functions, where the settings of a folder leave them
    out."""
    return tvm.transform.PassContext()


def to_numpy(value):
    return value.numpy() if hasattr(value, "numpy") else [to_numpy(item) for item in value]


def flat(value) -> list:
    """Return the tensors of nested lists."""
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def gradients(module: tvm.IRModule, *values) -> list:
    """Differentiate ``main``, and return the gradients of its adjoint function, compiled alone."""
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    return run(tvm.IRModule({"main_adjoint": adjoint["main_adjoint"]}), "main_adjoint", *values)[1]


def bindings_in(function: relax.Function) -> int:
    """Return the number of bindings of a function."""
    return sum(len(block.bindings) for block in function.body.blocks)


def is_sound(module: tvm.IRModule) -> None:
    """Assert that a module is well-formed, and that its script parses back to the same module."""
    assert relax.analysis.check_well_formed(module)
    tvm.ir.assert_structural_equal(from_source(module.script(show_meta=True)), module)


def check(module: tvm.IRModule, *values, at: Sequence[int] = (0,), **settings) -> list:
    """Differentiate ``main``, compare with central differences, and return gradients.

    ``at`` lists the positions of the parameters whose gradients are returned. The result of
    ``main`` is a scalar, or a tuple whose first element is one.
    """
    adjoint = Gradient("main", **settings)(module)
    is_sound(adjoint)
    machine = relax.VirtualMachine(tvm.compile(adjoint, target=TARGET), tvm.cpu())

    def call(name, arguments):
        tensors = [tvm.runtime.tensor(v) if isinstance(v, np.ndarray) else v for v in arguments]
        return to_numpy(machine[name](*tensors))

    def loss(arguments):
        result = call("main", arguments)
        return float(np.sum(result[0] if isinstance(result, list) else result))

    result, gradients = call("main_adjoint", values)
    expected = call("main", values)
    for leaf, wanted in zip(flat(result), flat(expected), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    assert len(gradients) == len(at)
    for gradient, position in zip(gradients, at, strict=True):
        np.testing.assert_allclose(
            gradient, _central_differences(loss, values, position), rtol=1e-6, atol=1e-7
        )
    return gradients


def _central_differences(loss, values, position: int, step: float = 1e-5) -> np.ndarray:
    slopes = np.zeros(values[position].shape)
    for index in np.ndindex(*slopes.shape):
        moved = []
        for sign in (1, -1):
            value = values[position].copy()
            value[index] += sign * step
            moved.append(loss([*values[:position], value, *values[position + 1 :]]))
        slopes[index] = (moved[0] - moved[1]) / (2 * step)
    return slopes
