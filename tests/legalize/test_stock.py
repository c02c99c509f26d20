"""A legalization that corrects TVM's own in some cases leaves the other cases exactly as in TVM."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, topi
from tvm.relax.transform.legalize_ops import binary as stock_binary
from tvm.relax.transform.legalize_ops import image as stock_image
from tvm.relax.transform.legalize_ops import index as stock_index
from tvm.relax.transform.legalize_ops import linear_algebra as stock_linear_algebra
from tvm.relax.transform.legalize_ops import manipulate as stock_manipulate
from tvm.relax.transform.legalize_ops import nn as stock_nn
from tvm.relax.transform.legalize_ops import qdq as stock_qdq
from tvm.relax.transform.legalize_ops import statistical as stock_statistical
from tvm.relax.transform.legalize_ops.common import _call_topi_without_attr


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def integers(x):
    """Return a tensor of integers, which have no NaN."""
    return relax.Var(x.name, relax.TensorType(x.ty.shape, "int32"))


N = tvm.tirx.Var("n", "int64")
X, VECTOR, INDEX = tensor("x", 4, 5), tensor("v", 5), tensor("i", 3, dtype="int64")
TUPLE = relax.Var("t", relax.TupleType([X.ty, VECTOR.ty]))
IMAGES, KERNEL = tensor("x", N, 4, 9, 8), tensor("w", 6, 2, 3, 3)
SEQUENCES, VOLUMES = tensor("x", N, 9, 4), tensor("x", N, 4, 5, 4, 6)
CHANNELS = [tensor(name, 4) for name in "gbmv"]
QUERIES = [tensor(name, N, 3, 2, 4) for name in "qkv"]

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
    "gather_nd": (
        "relax.gather_nd",
        [X, relax.const([[0, 4], [3, 0]], "int64")],
        {},
        stock_manipulate._gather_nd,
    ),
    "index_tensor": (
        "relax.index_tensor",
        [X, [relax.const([0, 3]), relax.const([[4], [0]])]],
        {},
        stock_manipulate._index_tensor,
    ),
    "repeat": ("relax.repeat", [X, 3, 1], {}, stock_manipulate._repeat),
    "repeat all": ("relax.repeat", [X, 2], {}, stock_manipulate._repeat),
    "permute_dims": ("relax.permute_dims", [X], {}, stock_manipulate._permute_dims),
    "squeeze": ("relax.squeeze", [tensor("x", 1, 3), [0]], {}, stock_manipulate._squeeze),
    "expand_dims": ("relax.expand_dims", [X, [0, -1]], {}, stock_manipulate._expand_dims),
    "concat": ("relax.concat", [[X, X]], {"axis": 1}, stock_manipulate._concat),
    "split": ("relax.split", [X, [1, 3]], {"axis": 1}, stock_manipulate._split),
    "split into equal parts": ("relax.split", [X, 2], {}, stock_manipulate._split),
    "split into symbolic parts": ("relax.split", [IMAGES, 2], {}, stock_manipulate._split),
    "stack": ("relax.stack", [[X, X]], {"axis": -1}, stock_manipulate._stack),
    "meshgrid": ("relax.meshgrid", [[INDEX, INDEX]], {}, stock_manipulate._meshgrid),
    "reverse_sequence": (
        "relax.reverse_sequence",
        [tensor("x", 3, 5), INDEX],
        {"seq_axis": 1, "batch_axis": 0},
        stock_manipulate._reverse_sequence,
    ),
    "layout_transform": (
        "relax.layout_transform",
        [X, lambda i, j: (j, i)],
        {},
        stock_manipulate._layout_transform,
    ),
    "pad constant": ("relax.nn.pad", [IMAGES, [0, 0] * 3 + [2, 9]], {}, stock_nn._nn_pad),
    "pad reflect": (
        "relax.nn.pad",
        [IMAGES, [0, 0] * 3 + [7, -1]],
        {"pad_mode": "reflect"},
        stock_nn._nn_pad,
    ),
    "pad replicate": (
        "relax.nn.pad",
        [VECTOR, [7, 9]],
        {"pad_mode": "replicate"},
        stock_nn._nn_pad,
    ),
    "pad circular": ("relax.nn.pad", [VECTOR, [7, 9]], {"pad_mode": "circular"}, stock_nn._nn_pad),
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
    "conv1d": (
        "relax.nn.conv1d",
        [SEQUENCES, tensor("w", 3, 6, 2)],
        {"groups": 2, "data_layout": "NWC", "kernel_layout": "WOI", "strides": 2},
        stock_nn._nn_conv1d,
    ),
    "conv3d": (
        "relax.nn.conv3d",
        [VOLUMES, tensor("w", 6, 2, 2, 1, 3)],
        {"groups": 2, "padding": (1, 0, 2, 1, 0, 2)},
        stock_nn._nn_conv3d,
    ),
    "conv1d_transpose": (
        "relax.nn.conv1d_transpose",
        [tensor("x", N, 4, 9), tensor("w", 4, 3, 2)],
        {"strides": 2, "output_padding": 1},
        stock_nn._nn_conv1d_transpose,
    ),
    "conv2d_transpose": (
        "relax.nn.conv2d_transpose",
        [IMAGES, tensor("w", 4, 3, 2, 2)],
        {"groups": 2, "padding": 1},
        stock_nn._nn_conv2d_transpose,
    ),
    "conv3d_transpose": (
        "relax.nn.conv3d_transpose",
        [VOLUMES, tensor("w", 4, 3, 2, 2, 1)],
        {"dilation": 2},
        stock_nn._nn_conv3d_transpose,
    ),
    **{
        f"{kind}_pool{rank}d": (
            f"relax.nn.{kind}_pool{rank}d",
            [integers(x) if kind == "max" else x],
            {"pool_size": 2, "padding": 1},
            getattr(stock_nn, f"_nn_{kind}_pool{rank}d"),
        )
        for kind in ("max", "avg")
        for rank, x in enumerate([SEQUENCES, IMAGES, VOLUMES], 1)
    },
    **{
        f"adaptive_avg_pool{rank}d": (
            f"relax.nn.adaptive_avg_pool{rank}d",
            [x],
            {"output_size": 3 if rank == 1 else None},
            getattr(stock_nn, f"_nn_adaptive_avg_pool{rank}d"),
        )
        for rank, x in enumerate([SEQUENCES, IMAGES, VOLUMES], 1)
    },
    "batch_norm": (
        "relax.nn.batch_norm",
        [IMAGES, *CHANNELS],
        {"axis": 1, "training": True},
        stock_nn._nn_batch_norm,
    ),
    "layer_norm": (
        "relax.nn.layer_norm",
        [IMAGES, tensor("g", 4, 8), tensor("b", 4, 8)],
        {"axes": [1, -1]},
        stock_nn._nn_layer_norm,
    ),
    "rms_norm": (
        "relax.nn.rms_norm",
        [IMAGES, tensor("w", 9, 8)],
        {"axes": [2, -1]},
        stock_nn._nn_rms_norm,
    ),
    "group_norm": (
        "relax.nn.group_norm",
        [IMAGES, *CHANNELS[:2]],
        {"num_groups": 2, "channel_axis": 1, "axes": [2, 3]},
        stock_nn._nn_group_norm,
    ),
    "instance_norm": (
        "relax.nn.instance_norm",
        [IMAGES, *CHANNELS[:2]],
        {"channel_axis": 1, "axes": [2, 3]},
        stock_nn._nn_instance_norm,
    ),
    "attention": ("relax.nn.attention", QUERIES, {"scale": 0.5}, stock_nn._nn_attention),
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
def test_correct_legalizations_of_tvm_stay(case):
    op_name, arguments, attrs, stock = CASES[case]
    builder = relax.op
    for part in op_name.split(".")[1:]:
        builder = getattr(builder, part)
    bb = relax.BlockBuilder()
    params = []
    for arg in arguments:
        items = arg if isinstance(arg, list) else [arg]
        params += [item for item in items if isinstance(item, relax.Var) and item not in params]
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(builder(*arguments, **attrs))
        bb.emit_func_output(result)
    module = bb.get()
    legal = relax.transform.LegalizeOps()(module)
    expected = relax.transform.LegalizeOps({op_name: stock})(module)
    tvm.ir.assert_structural_equal(legal, expected)
