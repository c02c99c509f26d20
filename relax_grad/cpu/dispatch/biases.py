"""Biases after products and convolutions in half precision, which their kernels add.

The kernel of a product adds the bias to its sums in float32. The result is rounded once: written
apart, the product is rounded before the bias is added. Convolutions are products here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
from ..kernel.language import epilogue
from ..kernel.matmul.matmul import matmul
from .registry import CallSite, Kernel

_ADD, _MATMUL = Op.get("relax.add"), Op.get("relax.matmul")

_CONVOLUTIONS = {
    Op.get(f"relax.nn.conv{rank}d{kind}") for rank in (1, 2, 3) for kind in ("", "_transpose")
}


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
        products = {b.var: _axis(b.value) for b in bindings if _is_product(b)}
        self._additions: dict[relax.Var, _Addition] = {}
        self._products: set[relax.Var] = set()
        if not products:
            return
        counts = Counter(var for binding in bindings for var in used(binding.value))
        single = {var: axis for var, axis in products.items() if counts[var] == 1}
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


def with_bias(
    kernel: Kernel, site: CallSite, bias: relax.Expr, *, rectifies: bool = False
) -> Kernel | None:
    """Return the kernel of a product that also adds a bias, or None if there is none.

    Parameters
    ----------
    kernel : Kernel
        The kernel of the product.
    site : CallSite
        The call of the product.
    bias : relax.Expr
        The bias.
    rectifies : bool
        Whether the kernel also applies ReLU to the sum.
    """
    generator, shape = kernel.generator, site.shape(bias)
    if shape is None:
        return None
    if site.call.op in _CONVOLUTIONS:
        generator = partial(epilogue.with_bias, shape, generator)
    elif generator.func is matmul:
        first, second, result = generator.keywords["shapes"]
        generator = partial(generator, shapes=[first, second, shape, result], adds_bias=True)
    else:
        return None
    return replace(
        kernel,
        generator=partial(epilogue.rectified, generator) if rectifies else generator,
        arguments=[*kernel.arguments, bias],
        name=site.call.op.name,
    )


def _is_product(binding: relax.Binding) -> bool:
    """Tell whether a variable of the block is bound to a product of half precision."""
    value = binding.value
    return (
        isinstance(value, relax.Call)
        and (value.op == _MATMUL or value.op in _CONVOLUTIONS)
        and isinstance(binding.var, relax.DataflowVar)
        and known_extents(binding.var.ty) is not None
        and dtype_of(binding.var.ty) in HALVES
    )


def _axis(product: relax.Call) -> int:
    """Return the axis of a product that a bias has, counted from the last one: columns or
    channels."""
    return -1 if product.op == _MATMUL else 1 - product.ty.ndim


def _addition(value: relax.Expr, products: Mapping[relax.Var, int]) -> _Addition | None:
    if not isinstance(value, relax.Call) or value.op != _ADD:
        return None
    for index, other in ((0, 1), (1, 0)):
        product, bias = value.args[index], value.args[other]
        axis = products.get(product) if isinstance(product, relax.Var) else None
        if axis is not None and _is_bias(bias, product, axis):
            return _Addition(product, index, other)
    return None


def _is_bias(bias: relax.Expr, product: relax.Var, axis: int) -> bool:
    """Tell whether a tensor has a number for each index of an axis of a product, and no other axes;
    the axis is counted from the last one."""
    own, full = known_extents(bias.ty), known_extents(product.ty)
    if not own or not full or not -axis <= len(own) <= len(full):
        return False
    if dtype_of(bias.ty) != dtype_of(product.ty):
        return False
    rest = [extent for i, extent in enumerate(own) if i != len(own) + axis]
    return are_equal(own[axis], full[axis]) and all(
        isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in rest
    )
