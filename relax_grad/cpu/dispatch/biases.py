"""Biases behind products in half precision, which the kernels of the products add.

The kernel of a product adds the bias to its sums in float32. The result is rounded once: written
apart, the product is rounded before the bias is added.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tvm import relax, tirx
from tvm.ir import Op

from ...ir.bindings import used
from ...ir.compat import dtype_of
from ...ir.dtypes import HALVES
from ...ir.expressions import are_equal
from ...ir.shapes import known_extents
from ..kernel.matmul import matmul
from .registry import CallSite, Kernel

_ADD, _MATMUL = Op.get("relax.add"), Op.get("relax.matmul")


class _Addition(NamedTuple):
    """The variable of a product, and the indices of the product and of the bias in the call that
    adds them."""

    product: relax.Var
    product_index: int
    bias_index: int


class AddedBiases:
    """The products of half precision in a dataflow block that are only used by the addition of a
    bias.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        bindings = block.bindings[:]
        products = {binding.var for binding in bindings if _is_product(binding)}
        self._additions: dict[relax.Var, _Addition] = {}
        self._products: set[relax.Var] = set()
        if not products:
            return
        counts = Counter(var for binding in bindings for var in used(binding.value))
        single = {var for var in products if counts[var] == 1}
        for binding in bindings:
            addition = _addition(binding.value, single)
            if addition is not None:
                self._additions[binding.var] = addition
        self._products = {addition.product for addition in self._additions.values()}

    def has(self, var: relax.Var) -> bool:
        """Tell whether a variable is bound to such a product."""
        return var in self._products

    def operands(self, var: relax.Var, call: relax.Call) -> tuple[relax.Expr, relax.Expr] | None:
        """Return the product and the bias that the call that a variable is bound to adds, or
        None."""
        addition = self._additions.get(var)
        if addition is None:
            return None
        return call.args[addition.product_index], call.args[addition.bias_index]


def with_bias(kernel: Kernel, site: CallSite, bias: relax.Expr) -> Kernel | None:
    """Return the kernel of a product that also adds a bias, or None if there is none.

    Parameters
    ----------
    kernel : Kernel
        The kernel of the product.
    site : CallSite
        The call of the product.
    bias : relax.Expr
        The bias.
    """
    generator, shape = kernel.generator, site.shape(bias)
    if generator.func is not matmul or shape is None:
        return None
    first, second, result = generator.keywords["shapes"]
    return replace(
        kernel,
        generator=partial(generator, shapes=[first, second, shape, result], adds_bias=True),
        arguments=[*kernel.arguments, bias],
        name="relax.matmul",
    )


def _is_product(binding: relax.Binding) -> bool:
    """Tell whether a variable of the block is bound to a product of half precision."""
    value = binding.value
    return (
        isinstance(value, relax.Call)
        and value.op == _MATMUL
        and isinstance(binding.var, relax.DataflowVar)
        and known_extents(binding.var.ty) is not None
        and dtype_of(binding.var.ty) in HALVES
    )


def _addition(value: relax.Expr, products: set[relax.Var]) -> _Addition | None:
    if not isinstance(value, relax.Call) or value.op != _ADD:
        return None
    for index, other in ((0, 1), (1, 0)):
        product, bias = value.args[index], value.args[other]
        if isinstance(product, relax.Var) and product in products and _is_bias(bias, product):
            return _Addition(product, index, other)
    return None


def _is_bias(bias: relax.Expr, product: relax.Var) -> bool:
    """Tell whether a tensor has a number for each column of a product, and no other axes."""
    own, full = known_extents(bias.ty), known_extents(product.ty)
    if not own or not full or len(own) > len(full) or dtype_of(bias.ty) != dtype_of(product.ty):
        return False
    return are_equal(own[-1], full[-1]) and all(
        isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in own[:-1]
    )
