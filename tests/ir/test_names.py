"""Names of parameters that are identifiers."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.ir.module import identifier
from relax_grad.transform import PlainNames


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("0.weight", "_0_weight"),
        ("layer.0.weight", "layer_0_weight"),
        ("weight", "weight"),
        ("größe", "gr__e"),
        ("_x1", "_x1"),
        ("", "_"),
    ],
)
def test_an_identifier(name, wanted):
    assert identifier(name) == wanted
    assert wanted.isidentifier()


def test_parameters_keep_order_type_and_values():
    """Two names that would be the same differ, a name that exists stays, and so do the function's
    attributes, private functions and tensor functions."""
    n = tirx.Var("n", "int64")
    names = ["0.weight", "0_weight", "_0_weight", "bias"]
    params = [relax.Var(name, relax.TensorType((n, 3), "float32")) for name in names]
    bb = relax.BlockBuilder()
    with bb.function("main", params, attrs={"tag": 1}):
        with bb.dataflow():
            y = params[0]
            for i, param in enumerate(params[1:], start=2):
                y = bb.emit(
                    relax.op.add(y, bb.emit(relax.op.multiply(param, relax.const(float(i)))))
                )
            y = bb.emit_output(relax.op.sum(y))
        bb.emit_func_output(y)
    module = relax_grad.value_and_grad(bb.get(), wrt=names[:2])
    module = tvm.relax.transform.LegalizeOps()(module)
    made = PlainNames()(module)
    for name in ("main", "main_adjoint"):
        function = made[name]
        assert [p.name for p in function.params] == ["_0_weight_", "_0_weight__", *names[2:]]
        assert structural_equal(function, module[name], map_free_vars=True)
    assert len(made.functions) == len(module.functions)
    assert PlainNames()(made)["main"].same_as(made["main"])
    values = [np.full((2, 3), 10.0**-i, "float32") for i in range(4)]
    results = [
        relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](
            *map(tvm.runtime.tensor, values)
        ).numpy()
        for mod in (module, made)
    ]
    assert results[0] == results[1]
