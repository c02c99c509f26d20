"""The replacement of sums of matrix products by one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import tvm
from tvm import relax
from tvm.ir import Op

from ...ir.compat import dtype_of
from ._slices import Lookup, static_shape
from ._tensor_sums import Emit, Group, JoinTerms

_MATMUL, _PERMUTE = Op.get("relax.matmul"), Op.get("relax.permute_dims")

#: The fewest products that are joined.
_FEWEST = 4

#: The dtypes whose products are joined: half precision rounds the results of the single products.
_DTYPES = ("float32", "float64")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.JoinProducts")
class JoinProducts:
    """Replace sums of products of matrices by the product of their concatenations.

    ``A1 B1 + A2 B2 = [A1, A2] [B1; B2]``. A layer that is applied at each step of a sequence has
    such a sum as the gradient of its weight. The sum writes each product to memory and reads it
    again; the concatenations copy the factors, which are smaller if the summed axes are short.

    A sum is rewritten only if the factors of its products have fewer elements than the products,
    each partial sum is used once, in the same dataflow block, and the shapes are static. Other
    terms of the sum stay. The order of the sums of floating-point numbers changes. Factors that a
    call may overwrite before the whole sum is computed are multiplied as before.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((16, 64), "float32"))
    >>> w = relax.Var("w", relax.TensorType((64, 64), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x, w]):
    ...     with bb.dataflow():
    ...         total = relax.const(0.0, "float32")
    ...         for i in range(16):
    ...             row = bb.emit(relax.op.strided_slice(x, [0], [i], [i + 1]))
    ...             part = bb.emit(relax.op.sin(bb.emit(relax.op.matmul(row, w))))
    ...             total = bb.emit(relax.op.add(total, bb.emit(relax.op.sum(part))))
    ...         total = bb.emit_output(total)
    ...     _ = bb.emit_func_output(total)
    >>> module = relax_grad.value_and_grad(bb.get())
    >>> text = transform.JoinProducts()(module).script()  # products of concatenated factors
    >>> module.script().count("R.matmul") - text.count("R.matmul")
    15
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return JoinTerms((_MATMUL,), _product_of, _groups)(mod)


@dataclass(frozen=True)
class _Product:
    """A product of two matrices.

    Attributes
    ----------
    factors : Sequence[relax.Expr]
        The factors, untransposed where the transposition has no other use.
    axes : tuple[int, int]
        The axis of each factor that is summed.
    depth : int
        The extent of this axis.
    variables : Sequence[relax.Var]
        The bindings that compute the product, itself first.
    """

    factors: Sequence[relax.Expr]
    axes: tuple[int, int]
    depth: int
    variables: Sequence[relax.Var]


def _product_of(variable: relax.Var, lookup: Lookup) -> _Product | None:
    """Return the product of matrices that a variable is bound to, or None."""
    call = lookup(variable)
    if not isinstance(call, relax.Call) or call.op != _MATMUL:
        return None
    first, second = (static_shape(operand.ty) for operand in call.args)
    dtypes = {dtype_of(tensor.ty) for tensor in (call, *call.args)}
    if first is None or second is None or not len(first) == len(second) == 2:
        return None
    if len(dtypes) > 1 or dtypes.isdisjoint(_DTYPES):
        return None
    factors, axes, variables = [], [], [variable]
    for factor, axis in zip(call.args, (1, 0), strict=True):
        value = lookup(factor)
        if isinstance(value, relax.Call) and value.op == _PERMUTE and _is_exchange(value):
            variables.append(factor)
            factor, axis = value.args[0], 1 - axis
        factors.append(factor)
        axes.append(axis)
    return _Product(factors, (axes[0], axes[1]), first[1], variables)


def _is_exchange(call: relax.Call) -> bool:
    """Tell whether a permute_dims of a matrix exchanges its axes."""
    axes = call.attrs.axes
    return axes is None or [int(axis) % 2 for axis in axes] == [1, 0]


def _groups(products: Sequence[_Product], kind: relax.TensorType) -> list[Group]:
    """Return groups of products whose joined computation takes less time."""
    shape = static_shape(kind)
    if shape is None or len(shape) != 2:
        return []
    rows, columns = shape
    groups: dict[tuple[int, int], list[_Product]] = {}
    for product in products:
        groups.setdefault(product.axes, []).append(product)

    def is_worth_it(group: Sequence[_Product]) -> bool:
        copied = sum(product.depth for product in group) * (rows + columns)
        return len(group) >= _FEWEST and copied <= len(group) * rows * columns

    return [
        Group(group, partial(_joined, group)) for group in groups.values() if is_worth_it(group)
    ]


def _joined(group: Sequence[_Product], emit: Emit) -> relax.Call:
    """Emit the concatenated factors, and return their product."""
    factors = []
    for i, natural in enumerate((1, 0)):
        axis = group[0].axes[i]
        factor = emit(relax.op.concat(relax.Tuple([product.factors[i] for product in group]), axis))
        factors.append(factor if axis == natural else emit(relax.op.permute_dims(factor)))
    return relax.op.matmul(*factors)
