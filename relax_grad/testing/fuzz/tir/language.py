"""The description of a random TIR program: functions of blocks, and the Relax function that calls
them.

A description is data. :mod:`.build` converts it to a module of TVM, :mod:`.interpret` evaluates it
by NumPy, element by element and without TVM, and :mod:`.shrink` shrinks it.

Extents are integers. In a symbolic program the multiples of :data:`BATCH` are multiples of a
variable ``n``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

#: The extent that is ``n`` in a symbolic program: a prime, and larger than any extent built from
#: the others there.
BATCH = 13

#: The values of ``n`` in the runs of a symbolic program.
BATCHES = (BATCH, 3)

#: The dtype of loop variables, block axes and extents: an integer whose width TVM chooses.
INDEX = "index"


def extent_at(size: int, n: int) -> int:
    """Return the value of an extent for a value of ``n``."""
    return size // BATCH * n if size % BATCH == 0 else size


# Expressions


@dataclass(frozen=True)
class Const:
    """A number."""

    value: float
    dtype: str


@dataclass(frozen=True)
class Size:
    """An extent as an expression."""

    size: int
    dtype: str = INDEX


@dataclass(frozen=True)
class Name:
    """A loop variable, a block axis, or a value bound by a :class:`Let` or a :class:`Bind`."""

    name: str
    dtype: str = INDEX


@dataclass(frozen=True)
class Load:
    """An element of a buffer."""

    buffer: str
    indices: tuple
    dtype: str


@dataclass(frozen=True)
class Op:
    """An operation of :data:`OPERATIONS` on expressions."""

    name: str
    args: tuple
    dtype: str


@dataclass(frozen=True)
class Let:
    """The value of ``body``, with a name bound to a value."""

    name: str
    value: Expr
    body: Expr

    @property
    def dtype(self) -> str:
        return self.body.dtype


Expr: TypeAlias = Const | Size | Name | Load | Op | Let


# Statements


@dataclass(frozen=True)
class Buffer:
    """A tensor of a function."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Store:
    """``buffer[indices] = value``."""

    buffer: str
    indices: tuple
    value: Expr


@dataclass(frozen=True)
class Bind:
    """A name for a value in the statements that follow."""

    name: str
    value: Expr


@dataclass(frozen=True)
class If:
    """A conditional statement; ``otherwise`` may be empty."""

    condition: Expr
    body: tuple
    otherwise: tuple = ()


@dataclass(frozen=True)
class While:
    """A loop on a condition."""

    condition: Expr
    body: tuple


@dataclass(frozen=True)
class For:
    """A loop from ``start`` over ``extent`` iterations; ``kind`` is ``"serial"`` or another of
    TVM's."""

    name: str
    start: Expr
    extent: Expr
    body: tuple
    kind: str = "serial"


@dataclass(frozen=True)
class Axis:
    """An axis of a block, whose value depends on the surrounding loops.

    Attributes
    ----------
    kind : str
        ``"spatial"``, ``"reduce"`` or ``"opaque"``.
    start, extent : expression
        The domain.
    value : expression
        The binding.
    """

    name: str
    kind: str
    start: Expr
    extent: Expr
    value: Expr


@dataclass(frozen=True)
class Block:
    """A block; ``init`` runs if all reduced axes are at the start of their domains."""

    name: str
    axes: tuple[Axis, ...]
    body: tuple
    init: tuple = ()
    where: Expr | None = None
    allocated: tuple[Buffer, ...] = ()


Statement: TypeAlias = Store | Bind | If | While | For | Block


@dataclass(frozen=True)
class PrimFunc:
    """A function on buffers: its arguments, which it may write to, and its results."""

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    allocated: tuple[Buffer, ...]
    body: tuple

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (*self.inputs, *self.outputs, *self.allocated)


# The Relax function


@dataclass(frozen=True)
class Tensor:
    """A tensor of the Relax function.

    Attributes
    ----------
    below : int or None
        The exclusive upper bound of the values, if they are indices.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int | None = None


@dataclass(frozen=True)
class Call:
    """A ``call_tir``, or a ``call_tir_inplace`` where an index in ``inplace`` is not -1.

    Attributes
    ----------
    results : tuple[Tensor, ...]
        All results, including the arguments that are written to.
    inplace : tuple[int, ...]
        For each result, the index of the argument that it aliases, or -1; empty for a ``call_tir``.
    """

    results: tuple[Tensor, ...]
    function: str
    operands: tuple[str, ...]
    inplace: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operator:
    """An operator of Relax, by its name in :data:`.operators.OPERATORS`, with its attributes."""

    results: tuple[Tensor, ...]
    name: str
    operands: tuple[str, ...]
    attributes: tuple = ()


@dataclass(frozen=True)
class Program:
    """A Relax function that calls functions of TIR.

    Attributes
    ----------
    params : tuple[Tensor, ...]
        The parameters of the Relax function.
    results : tuple[str, ...]
        The tensors that it returns.
    inexact : frozenset[str]
        The tensors whose values depend on rounding.
    kinds : frozenset[str]
        The kinds of constructs that it was drawn with.
    seed : int
        The seed of the values of the parameters.
    """

    functions: tuple[PrimFunc, ...]
    params: tuple[Tensor, ...]
    steps: tuple
    results: tuple[str, ...]
    is_symbolic: bool = False
    is_dataflow: bool = True
    inexact: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    seed: int = 0

    @property
    def batches(self) -> tuple[int, ...]:
        return BATCHES if self.is_symbolic else (BATCH,)

    def function(self, name: str) -> PrimFunc:
        return next(function for function in self.functions if function.name == name)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the Relax function by their names."""
        tensors = [*self.params, *(result for step in self.steps for result in step.results)]
        return {tensor.name: tensor for tensor in tensors}


# Trees


def nodes(tree: object) -> Iterator:
    """Yield every node of a description, the outer ones first."""
    yield tree
    for child in _children(tree):
        yield from nodes(child)


def positions(
    tree: object, rebuild: Callable = lambda new: new
) -> Iterator[tuple[object, Callable]]:
    """Yield every node below a tree, with a function that returns the tree with that node replaced.

    In a tuple, a tuple of any number of nodes may replace the node.
    """
    if isinstance(tree, tuple):
        for i, child in enumerate(tree):

            def put(new: Any, i: Any = i) -> Any:
                several = new if isinstance(new, tuple) else (new,)
                return rebuild((*tree[:i], *several, *tree[i + 1 :]))

            yield child, put
            yield from positions(child, put)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            child = getattr(tree, field.name)

            def put(new: Any, name: str = field.name) -> Any:  # type: ignore[misc]
                return rebuild(replace(tree, **{name: new}))

            if hasattr(child, "__dataclass_fields__"):
                yield child, put
            yield from positions(child, put)


def _children(tree: Any) -> Iterator:
    if isinstance(tree, tuple):
        for child in tree:
            if isinstance(child, tuple) or hasattr(child, "__dataclass_fields__"):
                yield child
    elif hasattr(tree, "__dataclass_fields__"):
        for field in fields(tree):
            child = getattr(tree, field.name)
            if isinstance(child, tuple) or hasattr(child, "__dataclass_fields__"):
                yield child
