"""Gradient rules, one module per family, named as in ``tvm.relax.op``."""

from . import grad, index, manipulate, nn, search, statistical
