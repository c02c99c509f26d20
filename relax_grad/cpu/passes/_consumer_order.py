"""The order of calls in which each product is computed by the call that consumes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm import relax
from tvm.ir import Op

from ...ir.aliases import is_name
from ...ir.shapes import static_extents

_CALL_TIR = Op.get("relax.call_tir")

#: The most calls that are moved before a product.
_MOST_AHEAD = 32


@dataclass(eq=False)
class Item:
    """A group of bindings that become one call: the bindings of merged calls, or a single binding.

    Attributes
    ----------
    bindings : list[relax.Binding]
        The bindings.
    uses : set[relax.Var]
        The variables in their values.
    is_open : bool
        Whether all values are calls of element-wise functions.
    results : list[relax.Var]
        The bound variables.
    has_call : bool
        Whether a value calls a tensor function.
    calls_anything : bool
        Whether a value is any call, and no name, field or tuple.
    product : relax.VarBinding, optional
        The call of a product that the call of the group computes too.
    """

    bindings: list[relax.Binding]
    uses: set[relax.Var] = field(default_factory=set)
    is_open: bool = False
    product: relax.VarBinding | None = None
    results: list[relax.Var] = field(init=False)
    has_call: bool = field(init=False)
    calls_anything: bool = field(init=False)

    def __post_init__(self) -> None:
        for binding in self.bindings:
            self.uses |= set(relax.analysis.free_vars(binding.value)[:])
        self.results = [binding.var for binding in self.bindings]
        self.has_call = any(is_call(binding.value) for binding in self.bindings)
        values = [binding.value for binding in self.bindings]
        self.calls_anything = any(isinstance(value, relax.Call) for value in values)

    def with_call(self, other: Item) -> Item:
        """Return the group with the call of another one."""
        return Item([*self.bindings, *other.bindings], is_open=True)

    def with_product(self, product: relax.VarBinding) -> Item:
        """Return the group with a product that its call computes."""
        return replace(self, product=product)


def is_call(value: relax.Expr) -> bool:
    """Tell whether a value calls a tensor function of the module."""
    return type(value) is relax.Call and value.op.same_as(_CALL_TIR)


def with_products(
    items: Sequence[Item],
    is_product: Callable[[relax.Binding], bool],
    may_consume: Callable[[Item], bool],
) -> list[Item]:
    """Return the items of a dataflow block, in which calls also compute the products that only they
    read.

    Such a call takes the place of the product, so that the factors live no longer. The scalars that
    it needs, such as a learning rate, are computed before.

    Parameters
    ----------
    items : Sequence[Item]
        The items.
    is_product : Callable
        Tells whether a binding is a call of a product that may be consumed.
    may_consume : Callable
        Tells whether there is a function for a group with a product.
    """
    made = {var: i for i, item in enumerate(items) for var in item.results}
    users: dict[relax.Var, list[int]] = {}
    for i, item in enumerate(items):
        for var in item.uses:
            users.setdefault(var, []).append(i)
    changed = list(items)
    places = {i: (i, 1) for i in range(len(items))}
    for j, item in enumerate(items):
        if not item.is_open:
            continue
        for i in sorted(made[v] for v in item.uses if v in made and users[v] == [j]):
            (product, *others) = items[i].bindings
            is_local = isinstance(product.var, relax.DataflowVar)
            if i == j or others or not is_local or not is_product(product):
                continue
            ahead = _ahead(items, made, i, j)
            consumer = item.with_product(product)
            if ahead is None or not may_consume(consumer):
                continue
            changed[j], places[j] = consumer, places.pop(i)
            for k in ahead:
                places[k] = min(places[k], (i, 0))
            break
    return [changed[i] for i in sorted(places, key=lambda i: (places[i], i))]


def _ahead(
    items: Sequence[Item], made: Mapping[relax.Var, int], product: int, consumer: int
) -> Collection[int] | None:
    """Return the items that a consumer needs and that come after its product; None if some of them
    are neither scalars nor names of tensors."""
    ahead: set[int] = set()
    todo = [consumer]
    while todo:
        for var in items[todo.pop()].uses:
            i = made.get(var, -1)
            if i <= product or i in ahead or i == consumer:
                continue
            if len(ahead) == _MOST_AHEAD or not all(map(_is_movable, items[i].bindings)):
                return None
            ahead.add(i)
            todo.append(i)
    return ahead


def _is_movable(binding: relax.Binding) -> bool:
    """Tell whether a binding names a tensor or computes a scalar."""
    if not isinstance(binding, relax.VarBinding):
        return False
    if is_name(binding.value):
        return True
    extents = static_extents(binding.var.ty)
    return extents is not None and all(extent == 1 for extent in extents)
