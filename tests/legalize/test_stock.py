"""A legalization that corrects TVM's own in some cases leaves the other cases exactly as TVM has them."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax.transform.legalize_ops import image as stock_image
from tvm.relax.transform.legalize_ops import index as stock_index
from tvm.relax.transform.legalize_ops import manipulate as stock_manipulate
from tvm.relax.transform.legalize_ops import nn as stock_nn


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


N = tvm.tirx.Var("n", "int64")
X, VECTOR, INDEX = tensor("x", 4, 5), tensor("v", 5), tensor("i", 3, dtype="int64")
IMAGES, KERNEL = tensor("x", N, 4, 9, 8), tensor("w", 6, 2, 3, 3)
CHANNELS = [tensor(name, 4) for name in "gbmv"]

CASES = {
    "resize2d": (
        "relax.image.resize2d",
        [IMAGES, (5, 12)],
        {"layout": "NHWC", "method": "cubic"},
        stock_image._image_resize2d,
    ),
    "resize2d of packed channels": (
        "relax.image.resize2d",
        [tensor("x", 1, 2, 3, 4, 4), (5, 6)],
        {"layout": "NCHW4c"},
        stock_image._image_resize2d,
    ),
    "resize3d": (
        "relax.image.resize3d",
        [tensor("x", N, 2, 3, 4, 5), (5, 6, 7)],
        {"coordinate_transformation_mode": "align_corners", "cubic_exclude": 1},
        stock_image._image_resize3d,
    ),
    "affine_grid": (
        "relax.image.affine_grid",
        [tensor("x", N, 2, 3), (4, 5)],
        {},
        stock_image._image_affine_grid,
    ),
    "grid_sample": (
        "relax.image.grid_sample",
        [IMAGES, tensor("g", N, 2, 5, 6)],
        {"padding_mode": "reflection", "align_corners": True},
        stock_image._image_grid_sample,
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
    "batch_norm": (
        "relax.nn.batch_norm",
        [IMAGES, *CHANNELS],
        {"axis": 1, "training": True},
        stock_nn._nn_batch_norm,
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
