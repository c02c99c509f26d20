"""Constants as parameters."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax

import relax_grad
from relax_grad.frontend import lift_constants

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(3, 3)).astype("float32")


def module_with(*constants, dtype="float32"):
    """Return a module that multiplies ``x`` by matrices and adds 2; it takes rows by integers."""
    x = relax.Var("x", relax.TensorType((2, 3), dtype))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            y = x
            for constant in constants:
                y = bb.emit(relax.op.matmul(y, constant))
            y = bb.emit(relax.op.add(y, relax.const(2.0, dtype)))
            y = bb.emit_output(relax.op.take(y, relax.const(np.array([1, 0])), axis=0))
        bb.emit_func_output(y)
    return bb.get()


def run(module, *arguments):
    machine = relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arguments)).numpy()


def test_matrices_become_parameters_and_scalars_and_indices_stay():
    first, second = relax.const(KERNEL), relax.const(2 * KERNEL)
    module = module_with(first, second)
    lifted = lift_constants(module)
    main = lifted.module["main"]
    assert [param.name for param in main.params] == ["x", "constant0", "constant1"]
    assert int(main.attrs["num_input"]) == 1
    np.testing.assert_array_equal(lifted.values["constant1"].numpy(), 2 * KERNEL)
    x = RNG.normal(size=(2, 3)).astype("float32")
    result = run(lifted.module, x, *(value.numpy() for value in lifted.values.values()))
    np.testing.assert_array_equal(result, run(module, x))


def test_a_constant_used_twice_is_one_parameter():
    shared = relax.const(KERNEL)
    lifted = lift_constants(module_with(shared, shared))
    assert list(lifted.values) == ["constant0"]


def test_the_values_are_copies():
    constant = relax.const(KERNEL)
    lifted = lift_constants(module_with(constant))
    lifted.values["constant0"].copyfrom(np.zeros((3, 3), "float32"))
    again = lift_constants(module_with(constant))
    np.testing.assert_array_equal(again.values["constant0"].numpy(), KERNEL)


def test_a_mapping_names_constants():
    first, second = relax.const(KERNEL), relax.const(2 * KERNEL)
    lifted = lift_constants(module_with(first, second), {"dense.weight": second})
    assert list(lifted.values) == ["dense.weight"]
    np.testing.assert_array_equal(lifted.values["dense.weight"].numpy(), 2 * KERNEL)


def test_a_function_selects_and_names():
    lifted = lift_constants(
        module_with(relax.const(KERNEL)), lambda name, value: "bias" if value.ndim == 0 else True
    )
    assert list(lifted.values) == ["constant0", "bias"]


def test_half_precision_is_floating_point():
    constant = relax.const(KERNEL.astype("float16"))
    lifted = lift_constants(module_with(constant, dtype="float16"))
    assert str(lifted.values["constant0"].dtype) == "float16"


def test_num_input_is_kept():
    once = lift_constants(
        module_with(relax.const(KERNEL)), lambda name, value: value.ndim == 2
    ).module
    twice = lift_constants(once, lambda name, value: value.ndim == 0).module
    assert int(twice["main"].attrs["num_input"]) == 1
    assert len(twice["main"].params) == 3


def test_constants_in_branches():
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    shared = relax.const(KERNEL[0])
    bb = relax.BlockBuilder()
    with bb.function("main", [x, flag]):
        branches = [
            relax.SeqExpr([], relax.op.add(x, shared)),
            relax.SeqExpr([], relax.op.multiply(x, shared)),
        ]
        bb.emit_func_output(bb.emit(relax.If(flag, *branches)))
    lifted = lift_constants(bb.get())
    assert list(lifted.values) == ["constant0"]
    assert relax.analysis.check_well_formed(lifted.module)


def test_lifted_parameters_have_gradients():
    module = module_with(relax.const(KERNEL))
    main = lift_constants(module).module
    assert not relax_grad.missing_gradients(main, wrt="constant0", target_index=None)


def test_a_module_without_constants_is_returned():
    module = module_with()
    assert lift_constants(module).module.same_as(module)


@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        ({"a": relax.const(KERNEL)}, ValueError, "a is no floating-point constant of main"),
        (lambda name, value: "x", ValueError, "has a parameter 'x' already"),
        (lambda name, value: 1, TypeError, "must return a bool or a name"),
        (3, TypeError, "select must be a function, a mapping or None"),
    ],
)
def test_a_wrong_selection_is_refused(select, error, message):
    with pytest.raises(error, match=message):
        lift_constants(module_with(relax.const(KERNEL)), select)
