"""Backward operators and operators that control differentiation: declaration, type inference and
builder."""

from . import (
    activation,
    attention,
    attention_dropout,
    ccl,
    control,
    conv,
    grid_sample,
    image,
    index,
    index_nd,
    index_slice,
    index_write,
    linear_algebra,
    loss,
    manipulate,
    manipulate_join,
    manipulate_order,
    norm,
    norm_statistics,
    pad,
    pool,
    quantized,
    recurrent,
    scan,
    statistical,
    stock_layout,
    vision,
)
from .control import checkpoint, differentiable_once, stop_gradient, with_backward
