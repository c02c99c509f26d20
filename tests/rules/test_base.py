"""Gradients of the operators that only pass tensors on."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax

from relax_grad import GradientError

SHAPE = (2, 3)


def differentiate(function, vdevice=None, order=1):
    """Differentiate ``sum(function(x)**2)``, or for order 2 the sum of its gradient."""
    x = relax.Var("x", relax.TensorType(SHAPE, "float32", vdevice=vdevice))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(function(x))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(y, y))))
        bb.emit_func_output(loss)
    module = relax.transform.Gradient("main", [x])(bb.get())
    if order == 1:
        return module
    adjoint = relax.utils.copy_with_new_vars(module["main_adjoint"])
    (block,) = adjoint.body.blocks
    (gradient,) = adjoint.body.body.fields[1].fields
    bb = relax.BlockBuilder()
    with bb.function("main", adjoint.params):
        with bb.dataflow():
            for binding in block.bindings:
                bb.emit_normalized(binding)
            loss = bb.emit_output(relax.op.sum(gradient))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main", adjoint.params)(bb.get())


def gradient_type(module):
    return module["main_adjoint"].ret_ty.fields[1].fields[0]


def run(module, *passes):
    module = tvm.transform.Sequential(list(passes))(module) if passes else module
    machine = relax.VirtualMachine(tvm.compile(module, target=TARGET), tvm.cpu())
    x = np.arange(6, dtype="float32").reshape(SHAPE)
    return machine["main_adjoint"](tvm.runtime.tensor(x))[1][0].numpy().ravel().tolist()


def devices():
    vdevice = relax.VDevice if hasattr(relax, "VDevice") else tvm.ir.VDevice  # TVM 0.26
    return [vdevice("llvm", index) for index in (0, 1)]


@pytest.mark.parametrize("order", [1, 2])
def test_to_vdevice_goes_back_to_where_it_came_from(order):
    source, destination = devices()
    module = differentiate(lambda x: relax.op.to_vdevice(x, destination), source, order)
    assert gradient_type(module).vdevice == source
    assert tuple(map(int, gradient_type(module).shape.values)) == SHAPE


def test_to_vdevice_runs():
    (device, _) = devices()
    module = differentiate(lambda x: relax.op.to_vdevice(x, device), device)
    module.update_global_info("vdevice", [device])
    assert run(module) == [0, 2, 4, 6, 8, 10]


def test_to_vdevice_from_an_unknown_device_is_refused():
    _, destination = devices()
    with pytest.raises(GradientError, match=r"relax\.to_vdevice.*RealizeVDevice"):
        differentiate(lambda x: relax.op.to_vdevice(x, destination))


@pytest.mark.parametrize("order", [1, 2])
def test_hint_on_another_device_goes_back(order):
    source, _ = devices()
    module = differentiate(lambda x: relax.op.hint_on_device(x, tvm.cpu(1)), source, order)
    assert gradient_type(module).vdevice == source
    assert "to_vdevice" in module["main_adjoint"].script()


def test_hint_on_the_same_device_copies_nothing():
    source, _ = devices()
    module = differentiate(lambda x: relax.op.hint_on_device(x, tvm.cpu(0)), source)
    assert "to_vdevice" not in module["main_adjoint"].script()
    module = differentiate(lambda x: relax.op.hint_on_device(x, tvm.cpu(0), "texture"), source)
    assert "to_vdevice" in module["main_adjoint"].script()


def test_hint_on_device_runs():
    (device, _) = devices()
    module = differentiate(lambda x: relax.op.hint_on_device(x, tvm.cpu(0)))
    assert gradient_type(module).vdevice is None
    module.update_global_info("vdevice", [device])
    assert run(module, relax.transform.RealizeVDevice()) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(("order", "expected"), [(1, [0, 2, 4, 6, 8, 10]), (2, [2] * 6)])
def test_stop_lift_params_runs(order, expected):
    module = differentiate(relax.op.builtin.stop_lift_params, order=order)
    module["main_adjoint"] = module["main_adjoint"].with_attr("num_input", 1)
    assert (
        run(
            tvm.IRModule({"main_adjoint": module["main_adjoint"]}),
            relax.transform.LiftTransformParams(),
        )
        == expected
    )
