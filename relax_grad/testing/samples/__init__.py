"""Samples of every operator with a gradient, for the checker, the tests and the command line."""

from . import (
    activation,
    attention,
    binary,
    ccl,
    conv,
    create,
    datatype,
    dropout,
    image,
    index,
    index_nd,
    index_write,
    linear_algebra,
    loss,
    manipulate,
    manipulate_join,
    manipulate_order,
    norm,
    pad,
    pool,
    qdq,
    quantized,
    recurrent,
    scan,
    search,
    sorting,
    statistical,
    unary,
    vision,
)
from ._sample import Sample, register_samples, sampled_operators, samples

__all__ = ["Sample", "register_samples", "sampled_operators", "samples"]
