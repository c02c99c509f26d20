"""Converters of ONNX operators, one file per family.

The import of a family enters its converters in a table: ``CONVERTERS``, or ``FUSED`` for operators
of ONNX Runtime.
"""

from . import (
    attention,
    contrib,
    gated,
    indices,
    integers,
    n_bits,
    normalize,
    padding,
    places,
    recent,
    symbolic,
    top_k,
    transforms,
    windows,
)
