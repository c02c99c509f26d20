"""Exchanges of the second and third axes of tensors, which kernels read and write in either order.

A permutation between ``(batch, positions, heads, features)`` and ``(batch, heads, positions,
features)`` before a kernel is left out if the kernel takes the tensor before it. A kernel returns
the tensor after such a permutation; where the tensor before is used, the permutation follows. A
cast to half precision may be between the kernel and a permutation of its result, if the kernel
rounds the result itself. Keys of attention may also be ``(batch, heads, features, positions)``, as
the factor of a product; so is their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple

from tvm import relax
from tvm.ir import Op

from ...ir.bindings import used
from ...ir.compat import dtype_of
from .registry import Kernel

_PERMUTE, _ASTYPE = Op.get("relax.permute_dims"), Op.get("relax.astype")
_AXES = [0, 2, 1, 3]

#: The axes of ``(batch, heads, features, positions)`` that are ``(batch, positions, heads,
#: features)``, and the inverse permutation.
_RETURNED, _TURNED = [0, 3, 1, 2], [0, 2, 3, 1]

#: Returns the value of a variable, if the variable and the operands of the value are unchanged.
Lookup = Callable[[relax.Var], "relax.Expr | None"]


def is_exchange(value: relax.Expr | None) -> bool:
    """Tell whether a value is the exchange of the second and third of four axes."""
    return _permutes(value, _AXES)


def _permutes(value: relax.Expr | None, wanted: list[int]) -> bool:
    """Tell whether a value is a permutation of four axes."""
    if not isinstance(value, relax.Call) or value.op != _PERMUTE:
        return False
    axes = value.attrs.axes
    return axes is not None and [int(axis) % 4 for axis in axes] == wanted


def is_cast(value: relax.Expr | None) -> bool:
    """Tell whether a value is a cast of a tensor."""
    return isinstance(value, relax.Call) and value.op == _ASTYPE


def exchanged(expr: relax.Expr) -> relax.Call:
    """Return the exchange of the second and third axes of a tensor."""
    return relax.op.permute_dims(expr, _AXES)


def returned(expr: relax.Expr) -> relax.Call:
    """Return a tensor ``(batch, heads, features, positions)`` as ``(batch, positions, heads,
    features)``."""
    return relax.op.permute_dims(expr, _RETURNED)


def type_of_turned(kind: relax.TensorType) -> relax.TensorType:
    """Return the type ``(batch, heads, features, positions)`` of a tensor ``(batch, positions,
    heads, features)``."""
    batch, positions, heads, features = kind.shape.values
    return relax.TensorType([batch, heads, features, positions], dtype_of(kind), kind.vdevice)


def type_of_exchanged(kind: relax.TensorType) -> relax.TensorType:
    """Return the type of a tensor after the exchange of its axes."""
    batch, first, second, last = kind.shape.values
    return relax.TensorType([batch, second, first, last], dtype_of(kind), kind.vdevice)


def before_exchange(expr: relax.Expr, lookup: Lookup) -> relax.Expr | None:
    """Return the tensor whose axes are exchanged for a tensor, or None if there is none."""
    value = origin(expr, lookup)
    return value.args[0] if isinstance(value, relax.Call) and is_exchange(value) else None


def before_turn(expr: relax.Expr, lookup: Lookup) -> relax.Expr | None:
    """Return the tensor ``(batch, heads, features, positions)`` from which a tensor is permuted, or
    None if there is none."""
    value = origin(expr, lookup)
    return value.args[0] if isinstance(value, relax.Call) and _permutes(value, _RETURNED) else None


def before_both(call: relax.Call, lookup: Lookup) -> relax.Expr | None:
    """Return the tensor whose axes a call permutes back; None if it does not."""
    if is_exchange(call):
        return before_exchange(call.args[0], lookup)
    return before_turn(call.args[0], lookup) if _permutes(call, _TURNED) else None


def origin(expr: relax.Expr, lookup: Lookup) -> relax.Expr | None:
    """Return the value that a variable is bound to, through variables and elements of tuples; None
    if it is unknown or the expression is no variable."""
    value = lookup(expr) if isinstance(expr, relax.Var) else None
    while isinstance(value, (relax.Var, relax.TupleGetItem)):
        if isinstance(value, relax.Var):
            value = lookup(value)
            continue
        whole = value.tuple_value
        whole = lookup(whole) if isinstance(whole, relax.Var) else whole
        value = whole.fields[value.index] if isinstance(whole, relax.Tuple) else None
    return value


class ExchangedResults:
    """The results in a dataflow block whose axes are exchanged later in the block.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        bindings = block.bindings[:]
        sources: set[relax.Var] = set()
        for binding in bindings:
            if is_exchange(binding.value):
                sources.update(used(binding.value))
        before_casts: set[relax.Var] = set()
        for binding in bindings:
            if binding.var in sources and is_cast(binding.value):
                before_casts.update(used(binding.value))
        self._direct = _Results(bindings, sources)
        self._cast = _Results(bindings, before_casts)
        turned = [used(binding.value) for binding in bindings if _permutes(binding.value, _TURNED)]
        self._turned = _Results(bindings, set(chain.from_iterable(turned)))

    def has(self, var: relax.Var, index: int, is_narrowed: bool = False) -> bool:
        """Tell whether the axes of a result of the call that a variable is bound to are exchanged
        later.

        If ``is_narrowed``, the kernel rounds the result, and the exchange follows the cast.
        """
        return (self._cast if is_narrowed else self._direct).has(var, index)

    def has_turned(self, var: relax.Var, index: int) -> bool:
        """Tell whether a result of the call that a variable is bound to gets the heads and the
        features before the positions later."""
        return self._turned.has(var, index)


class Order(NamedTuple):
    """An order of the axes of a result.

    Attributes
    ----------
    type_of : Callable
        Returns the type of a tensor in this order.
    restored : Callable
        Returns a tensor of this order with the positions before the heads.
    """

    type_of: Callable[[relax.TensorType], relax.TensorType]
    restored: Callable[[relax.Expr], relax.Call]


class _Results:
    """The variables of a set, and the elements of tuples that are bound to them."""

    def __init__(self, bindings: Sequence[relax.Binding], variables: Collection[relax.Var]):
        self._variables = variables
        self._elements = {
            (binding.value.tuple_value, binding.value.index)
            for binding in bindings
            if isinstance(binding.value, relax.TupleGetItem) and binding.var in variables
        }

    def has(self, var: relax.Var, index: int) -> bool:
        if isinstance(var.ty, relax.TupleType):
            return (var, index) in self._elements
        return index == 0 and var in self._variables


def with_exchanges(
    kernel: Kernel,
    var: relax.Var,
    results: ExchangedResults,
    lookup: Lookup,
    narrowed: Collection[int],
) -> tuple[Kernel, dict[int, Order]]:
    """Return a kernel that takes the tensors before exchanges of axes, and returns those after
    them.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    var : relax.Var
        The variable that the call is bound to.
    results : ExchangedResults
        The results whose axes are exchanged later.
    lookup : Callable
        Returns the value of a variable, if the variable and the operands of the value are
        unchanged.
    narrowed : Collection[int]
        The indices of the results that the kernel rounds to half precision.

    Returns
    -------
    kernel, orders : tuple[Kernel, dict[int, Order]]
        The kernel, and the orders of the results whose axes it permutes, by their indices.
    """
    arguments = list(kernel.arguments)
    indices: list[int] = []
    orders: dict[int, Order] = {}
    for index in kernel.exchangeable:
        if index >= len(arguments):
            number = index - len(arguments)
            if results.has(var, number, number in narrowed):
                orders[number] = Order(type_of_exchanged, exchanged)
                indices.append(index)
            continue
        source = before_exchange(arguments[index], lookup)
        if source is not None:
            arguments[index] = source
            indices.append(index)
    turned = []
    for index in kernel.turnable:
        if index in indices:
            continue
        number = index - len(arguments)
        if number >= 0:
            if number not in narrowed and results.has_turned(var, number):
                orders[number] = Order(type_of_turned, returned)
                turned.append(index)
        else:
            source = before_turn(arguments[index], lookup)
            if source is not None:
                arguments[index] = source
                turned.append(index)
    return kernel.with_orders(arguments, indices, turned), orders
