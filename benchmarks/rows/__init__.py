"""The measured calls of single operators, as data, with a module for each kind of operator."""

from . import (
    activations,
    attentions,
    convolutions,
    elementwise,
    indices,
    losses,
    norms,
    pools,
    products,
    recurrents,
    sums,
)
from ._form import Row, symbolic

_PLAIN = [
    *convolutions.ROWS,
    *products.ROWS,
    *attentions.ROWS,
    *recurrents.ROWS,
    *norms.ROWS,
    *losses.ROWS,
    *activations.ROWS,
    *pools.ROWS,
    *sums.ROWS,
    *indices.ROWS,
    *elementwise.ROWS,
]

_BY_NAME = {row.name: row for row in _PLAIN}

#: Rows that are also compiled for a symbolic batch, each with the inputs whose first extent is the
#: batch.
_SYMBOLIC = {
    "forward 8x64x56² -> 64, 3x3": [0],
    "data gradient 8x64x56² -> 64, 3x3": [0],
    "weight gradient 8x64x56² -> 64, 3x3": [0, 1],
    "forward 8x256x14² -> 1024, 1x1": [0],
    "data gradient 8x256x14² -> 1024, 1x1": [0],
    "weight gradient 8x256x14² -> 1024, 1x1": [0, 1],
    "forward 8x144x56² -> 144, 3x3, depthwise": [0],
    "data gradient 8x144x56² -> 144, 3x3, depthwise": [0],
    "weight gradient 8x144x56² -> 144, 3x3, depthwise": [0, 1],
    "NN 1024 x 3072 x 768": [0],
    "TN 1024 x 3072 x 768": [0, 1],
    "batch_norm in training 8x64x56²": [0],
    "batch_norm, gradients 8x64x56²": [0, 1],
    "layer_norm 4x256x768": [0],
    "softmax 48x256x256": [0],
    "max_pool2d, gradient 8x64x112², 3x3, stride 2": [0, 1, 2],
    "gelu 4x256x3072": [0],
}

ROWS: list[Row] = [
    *_PLAIN,
    *(symbolic(_BY_NAME[name], *positions) for name, positions in _SYMBOLIC.items()),
]
