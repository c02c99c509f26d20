"""The sizes and masks of attention, and the places of a head in its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ..language.builder import Extent, as_expr, bind, const

#: The most keys of a single block.
_FEW_KEYS = 256


@dataclass(frozen=True)
class Attention:
    """The sizes and the masks of attention. The batch and the numbers of queries and keys may be
    symbolic (int32).

    Attributes
    ----------
    batch, queries, keys : int or tirx.PrimExpr
        The extents.
    heads, key_heads : int
        The numbers of query heads, and of heads of keys and values, which divides it.
    features, value_features : int
        The number of features of queries and keys, and of values.
    scale : float
        The factor of the scores.
    causal_mask : str, optional
        ``"TopLeft"`` or ``"BottomRight"``, as in ``relax.op.nn.attention``.
    window_size : int, optional
        The largest number of keys that a query attends to.
    bias : Sequence, optional
        The shape of the bias: of each of batch, heads, queries and keys, all or 1.
    rate : float, optional
        The probability that a weight is dropped.
    is_part : bool
        Whether the heads are some of those whose weights are dropped: the stream of the generator
        also has the number of the first one, and the number of heads of an element of the batch.
    heads_first : Sequence[str]
        The parameters of the kernel, by name, that have the heads before the positions.
    features_first : Sequence[str]
        Those that have the heads, the features, then the positions.
    """

    batch: Extent
    queries: Extent
    keys: Extent
    heads: int
    key_heads: int
    features: int
    value_features: int
    scale: float
    causal_mask: str | None = None
    window_size: int | None = None
    bias: Sequence[Extent] | None = None
    rate: float | None = None
    is_part: bool = False
    heads_first: Sequence[str] = ()
    features_first: Sequence[str] = ()

    @property
    def has_few_keys(self) -> bool:
        """Whether one block has all keys, so that few that their weights are saved for the
        gradient: computing them again takes longer than loading them."""
        return isinstance(self.keys, int) and self.keys <= _FEW_KEYS

    @property
    def saved(self) -> list[Extent]:
        """The shape of the numbers that the forward kernel saves for the gradient kernel.

        They are the weights before their dropout, if there are few keys. Otherwise they are, for
        each query, the largest score, and the logarithm of the sum of the exponentials of the
        scores less it.
        """
        last = self.keys if self.has_few_keys else 2
        return [self.batch, self.heads, self.queries, last]

    @property
    def group(self) -> int:
        """The number of heads of the queries that share a head of the keys and values."""
        return self.heads // self.key_heads

    @property
    def offset(self) -> int:
        """The number of keys after the query's position that a query attends to under a causal
        mask."""
        if self.causal_mask != "BottomRight":
            return 0
        difference = self.queries - self.keys
        return abs(difference) if isinstance(difference, int) else tirx.abs(difference)

    def end_of(self, query: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the end of the keys that a query attends to."""
        if self.causal_mask is None:
            return as_expr(self.keys)
        return tirx.min(as_expr(self.keys), query + (self.offset + 1))

    def start_of(self, query: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the first key that a query attends to; it may be beyond the end."""
        if self.window_size is None:
            return const(0)
        return tirx.max(const(0), query - (self.window_size - 1))

    @property
    def shares_bias(self) -> bool:
        """Whether the bias of a query is one number for all keys."""
        return self.bias is not None and isinstance(self.bias[3], int) and self.bias[3] == 1

    def bias_start(
        self, batch: tirx.PrimExpr, head: tirx.PrimExpr, query: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        """Return the offset of the bias of a query."""
        assert self.bias is not None
        n, heads, queries, keys = self.bias
        index = const(0)
        for position, extent in ((batch, n), (head, heads), (query, queries)):
            is_one = isinstance(extent, int) and extent == 1
            index = index * extent + (const(0) if is_one else position)
        return index * keys


@dataclass(frozen=True)
class Head:
    """A head of the queries of one element of the batch, with its head of keys and values."""

    of: Attention
    batch: tirx.PrimExpr
    key_head: tirx.PrimExpr
    number: tirx.PrimExpr | None = None

    def start(self, name: str, position: Extent = 0) -> tirx.PrimExpr:
        """Return the offset of a position in a tensor, by the name of the parameter."""
        positions, heads, features = self._sizes(name)
        head = self.key_head if _is_of_keys(name) else self.number
        if name in self.of.features_first:
            return (self.batch * heads + head) * positions * features + position
        if name in self.of.heads_first:
            return ((self.batch * heads + head) * positions + position) * features
        return ((self.batch * positions + position) * heads + head) * features

    def step(self, name: str) -> int:
        """Return the distance of the positions in a tensor."""
        _, heads, features = self._sizes(name)
        if name in self.of.features_first:
            return 1
        return features if name in self.of.heads_first else heads * features

    def rows(self, name: str, buffer: tirx.Buffer) -> tuple:
        """Return the rows of features of a tensor: its buffer, the offset of the first row, the
        stride of the rows, and the stride of the features if it is not 1."""
        rows = buffer, bind(self.start(name)), self.step(name)
        return (*rows, self._sizes(name)[0]) if name in self.of.features_first else rows

    def extents(self, name: str) -> tuple:
        """Return the offset, the number, the distance and the length of the rows of a tensor as
        they are in memory, or of the saved numbers."""
        if name == "sums":
            last = self.of.saved[3]
            return self.row_start(0) * last, self.of.queries, last, last
        positions, _, features = self._sizes(name)
        if name in self.of.features_first:
            return self.start(name), features, positions, positions
        return self.start(name), positions, self.step(name), features

    def _sizes(self, name: str) -> tuple[Extent, int, int]:
        """Return the extents of a tensor: its positions, heads and features."""
        of = self.of
        features = of.features if name.startswith(("query", "key")) else of.value_features
        if _is_of_keys(name):
            return of.keys, of.key_heads, features
        return of.queries, of.heads, features

    def row_start(self, query: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the offset of a query in a tensor ``(batch, heads, queries)``."""
        return (self.batch * self.of.heads + self.number) * self.of.queries + query


def _is_of_keys(name: str) -> bool:
    return name.startswith(("key", "value"))


def with_orders(
    of: Attention, params: Sequence[tuple], exchanged: Sequence[int], turned: Sequence[int]
) -> tuple[Attention, list[tuple]]:
    """Return the sizes, and the parameters of a kernel, for tensors with other orders of axes.

    Parameters
    ----------
    of : Attention
        The sizes.
    params : Sequence
        The names, shapes and dtypes of tensors with the positions before the heads.
    exchanged : Sequence[int]
        The indices of the tensors that have the heads before the positions.
    turned : Sequence[int]
        The indices of the tensors that have the heads, the features, then the positions.
    """
    params = list(params)
    for index in (*exchanged, *turned):
        name, (batch, positions, heads, features), dtype = params[index]
        last = [features, positions] if index in turned else [positions, features]
        params[index] = name, [batch, heads, *last], dtype
    heads_first, features_first = (
        tuple(params[index][0] for index in indices) for indices in (exchanged, turned)
    )
    return replace(of, heads_first=heads_first, features_first=features_first), params
