"""Calls of PyTorch's operators with many forms of arguments, by family."""

from __future__ import annotations

from torch_cases_elementwise import elementwise
from torch_cases_indexing import indexing, moving
from torch_cases_losses import losses
from torch_cases_products import products
from torch_cases_reduction import reduction

FAMILIES = {
    "elementwise": elementwise,
    "reduction": reduction,
    "moving": moving,
    "indexing": indexing,
    "products": products,
    "losses": losses,
}
