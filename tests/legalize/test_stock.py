"""A legalization that corrects TVM's own in some cases leaves the other cases exactly as TVM has them."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, topi
from tvm.relax.transform.legalize_ops import binary as stock_binary
from tvm.relax.transform.legalize_ops import index as stock_index
from tvm.relax.transform.legalize_ops import linear_algebra as stock_linear_algebra
from tvm.relax.transform.legalize_ops import manipulate as stock_manipulate
from tvm.relax.transform.legalize_ops import nn as stock_nn
from tvm.relax.transform.legalize_ops import qdq as stock_qdq
from tvm.relax.transform.legalize_ops import statistical as stock_statistical
from tvm.relax.transform.legalize_ops.common import _call_topi_without_attr


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


N = tvm.tirx.Var("n", "int64")
X, VECTOR, INDEX = tensor("x", 4, 5), tensor("v", 5), tensor("i", 3, dtype="int64")
TUPLE = relax.Var("t", relax.TupleType([X.ty, VECTOR.ty]))
IMAGES, KERNEL = tensor("x", N, 4, 9, 8), tensor("w", 6, 2, 3, 3)
CHANNELS = [tensor(name, 4) for name in "gbmv"]

CASES = {
    "power": ("relax.power", [X, VECTOR], {}, stock_binary._binary(topi.power)),
    "atan2": ("relax.atan2", [X, VECTOR], {}, stock_binary._binary(topi.atan2)),
    "mod": ("relax.mod", [X, VECTOR], {}, stock_binary._binary(topi.mod)),
    "einsum": (
        "relax.einsum",
        [TUPLE],
        {"subscripts": "...j,j->..."},
        stock_linear_algebra._einsum,
    ),
    "take clip": ("relax.take", [X, INDEX], {"axis": 1, "mode": "clip"}, stock_index._take),
    "take wrap": ("relax.take", [X, INDEX], {"axis": 0, "mode": "wrap"}, stock_index._take),
    "strided_slice": (
        "relax.strided_slice",
        [X, [0, 1], [1, 0], [4, 5], [2, 1]],
        {},
        stock_index._strided_slice,
    ),
    "repeat": ("relax.repeat", [X, 3, 1], {}, stock_manipulate._repeat),
    "repeat all": ("relax.repeat", [X, 2], {}, stock_manipulate._repeat),
    "permute_dims": ("relax.permute_dims", [X], {}, stock_manipulate._permute_dims),
    "squeeze": ("relax.squeeze", [tensor("x", 1, 3), [0]], {}, stock_manipulate._squeeze),
    "expand_dims": ("relax.expand_dims", [X, [0, -1]], {}, stock_manipulate._expand_dims),
    "conv2d": (
        "relax.nn.conv2d",
        [IMAGES, KERNEL],
        {"groups": 2, "strides": 2, "padding": (1, 0, 2, 1)},
        stock_nn._nn_conv2d,
    ),
    "mean": ("relax.mean", [IMAGES, [1, -1]], {}, stock_statistical._mean),
    "variance": ("relax.variance", [X], {"keepdims": True}, stock_statistical._variance),
    "std": ("relax.std", [X, [0]], {}, stock_statistical._std),
    "median": ("relax.median", [X, [1]], {"keepdims": True}, stock_statistical._median),
    "median of all": ("relax.median", [X], {}, stock_statistical._median),
    "sum": ("relax.sum", [IMAGES, [2]], {}, stock_statistical._statistical(topi.sum)),
    "prod": ("relax.prod", [X, [0]], {}, stock_statistical._statistical(topi.prod)),
    "batch_norm": (
        "relax.nn.batch_norm",
        [IMAGES, *CHANNELS],
        {"axis": 1, "training": True},
        stock_nn._nn_batch_norm,
    ),
    "tanh": ("relax.tanh", [X], {}, _call_topi_without_attr(topi.tanh, "tir_tanh")),
    "gelu": ("relax.nn.gelu", [X], {}, stock_nn._nn_gelu),
    "softplus": ("relax.nn.softplus", [X], {"beta": 2.0}, stock_nn._nn_softplus),
    "prelu": ("relax.nn.prelu", [IMAGES, CHANNELS[0]], {}, stock_nn._nn_prelu),
    "dequantize": (
        "relax.dequantize",
        [tensor("q", 4, 5, dtype="int8"), VECTOR, tensor("z", 5, dtype="int8")],
        {},
        stock_qdq._dequantize,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_tvm_does_right_stays(case):
    op_name, arguments, attrs, stock = CASES[case]
    builder = relax.op
    for part in op_name.split(".")[1:]:
        builder = getattr(builder, part)
    bb = relax.BlockBuilder()
    with bb.function("main", [arg for arg in arguments if isinstance(arg, relax.Var)]):
        with bb.dataflow():
            result = bb.emit_output(builder(*arguments, **attrs))
        bb.emit_func_output(result)
    module = bb.get()
    found = relax.transform.LegalizeOps()(module)
    expected = relax.transform.LegalizeOps({op_name: stock})(module)
    tvm.ir.assert_structural_equal(found, expected)
