"""Calls of PyTorch's operators with many forms of arguments, by family."""

from __future__ import annotations

from .elementwise import elementwise
from .indexing import indexing, moving
from .losses import losses
from .products import products
from .reduction import reduction

FAMILIES = {
    "elementwise": elementwise,
    "reduction": reduction,
    "moving": moving,
    "indexing": indexing,
    "products": products,
    "losses": losses,
}
