"""The terms that change the scores of an attention that is written out: biases and masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.relax import op

from ....ir.expressions import are_equal
from ._shapes import extents_of, is_one

#: The largest number that replaces masked scores: beside a score that is not masked, its weight
#: is zero.
MASKED = -1e4

#: A number that stays the same if any score is added: queries whose keys are all masked attend to
#: all of them equally.
_LOWEST = -1e30


@dataclass(frozen=True)
class Term:
    """A change of the scores: the addition of a bias, or the replacement of masked ones by a
    number.

    Attributes
    ----------
    tensor : relax.Expr
        The bias, or the condition of the mask.
    number : float, optional
        The number of a mask.
    keeps : bool
        Whether the condition holds for the scores that stay.
    value : np.ndarray, optional
        The bias or the condition, if constants determine it.
    may_be_infinite : bool
        Whether some scores may become minus infinity.
    is_zeroed : bool
        Whether the weights of the masked scores are replaced by zero after the softmax.
    """

    tensor: relax.Expr
    number: float | None
    keeps: bool
    value: np.ndarray | None
    may_be_infinite: bool
    is_zeroed: bool = False

    @property
    def allowed(self) -> np.ndarray | None:
        """The scores that a constant mask keeps; of a bias, those with zero, if all others are
        masked."""
        if self.value is None:
            return None
        if self.number is not None:
            return self.value if self.keeps else ~self.value
        hides = self.value <= MASKED
        return ~hides if np.all(hides | (self.value == 0)) else None

    @property
    def is_selection(self) -> bool:
        """Whether a finite number replaces scores."""
        return self.number is not None and math.isfinite(self.number) and not self.is_zeroed

    @property
    def may_add_a_mask(self) -> bool:
        """Whether it is a bias that may have numbers as low as masks have."""
        return self.number is None and (self.value is None or bool(np.any(self.value <= MASKED)))

    def times(self, factor: float) -> Term | None:
        """Return the term of scores that a factor multiplies first, if it multiplies the sum here;
        None if masked scores are not as low then."""
        if factor == 1.0:
            return self
        if not 0.0 < factor < math.inf:
            return None
        with np.errstate(over="ignore"):
            if self.number is None:
                scaled = op.multiply(self.tensor, relax.const(factor, "float32"))
                value = None if self.value is None else self.value * np.float32(factor)
                return replace(self, tensor=relax.BlockBuilder().normalize(scaled), value=value)
            number = float(np.float32(self.number * factor))
        if number > MASKED:
            return None
        return replace(self, number=number, may_be_infinite=math.isinf(number))

    def after(self, bias: relax.Expr | None) -> relax.Expr:
        """Return the bias of this term and of those before it."""
        if self.number is None:
            return self.tensor if bias is None else op.add(bias, self.tensor)
        kept = relax.const(0.0, "float32") if bias is None else bias
        hidden = -math.inf if self.is_zeroed else min(self.number, _LOWEST)
        hidden = relax.const(hidden, "float32")
        return op.where(self.tensor, *((kept, hidden) if self.keeps else (hidden, kept)))


def with_four_axes(bias: relax.Expr, terms: list[Term], rank: int) -> relax.Expr:
    """Return the bias of scores of three or four axes as (batch, heads, queries, keys)."""
    missing = rank - max(term.tensor.ty.ndim for term in terms)
    if missing:
        bias = op.expand_dims(bias, list(range(missing)))
    return op.expand_dims(bias, 1) if rank == 3 else bias


def guarded(query: relax.Expr, bias: relax.Expr, terms: list[Term]) -> relax.Expr:
    """Return queries with which those without a key have the results of the original."""
    # The results of queries whose weights are all replaced by zero equal the operator's.
    hiding = [
        term for term in terms if term.is_selection or (term.may_be_infinite and not term.is_zeroed)
    ]
    allowed = hiding[0].allowed if len(hiding) == 1 else None
    if not hiding or (allowed is not None and np.all(np.any(allowed, axis=-1))):
        return query  # each query has a key
    # The operator returns zero for a query without a key, and softmax NaN. TVM's largest of minus
    # infinities is finite.
    is_finite = op.where(op.greater(bias, relax.const(-math.inf, "float32")), *_constants(1.0, 0.0))
    has_key = op.greater(_largest(is_finite), relax.const(0.0, "float32"))
    zero_or_nan = op.where(has_key, *_constants(0.0, math.nan))
    if not any(term.is_selection for term in terms):
        return op.add(query, zero_or_nan)
    # A selection does not pass gradients to the scores of hidden keys: with zeros as the query, the
    # operator does not either.
    is_hidden = op.less_equal(_largest(bias), relax.const(_LOWEST, "float32"))
    return op.where(is_hidden, zero_or_nan, query)


def _largest(numbers: relax.Expr) -> relax.Expr:
    """Return the largest number of each query as (batch, queries, heads, 1)."""
    return op.permute_dims(op.max(numbers, -1, keepdims=True), [0, 2, 1, 3])


def _constants(*numbers: float) -> list[relax.Expr]:
    return [relax.const(number, "float32") for number in numbers]


def causal_mask_of(term: Term) -> str | None:
    """Return the attribute of a constant mask that lets each query see the keys up to its own, or
    None."""
    allowed = term.allowed
    if allowed is None or allowed.ndim < 2 or allowed.size != math.prod(allowed.shape[-2:]):
        return None
    allowed = allowed.reshape(allowed.shape[-2:])
    queries, keys = allowed.shape
    if np.array_equal(allowed, np.tri(queries, keys, dtype=bool)):
        return "TopLeft"
    if keys > queries and np.array_equal(
        allowed, np.tri(queries, keys, keys - queries, dtype=bool)
    ):
        return "BottomRight"
    return None


def spans(term: Term, weights: relax.Call) -> bool:
    """Tell whether a term has a number for each key, and broadcasts to the scores."""
    own, full = extents_of(term.tensor), extents_of(weights)
    if not own or full is None or len(own) > len(full):
        return False
    full = full[len(full) - len(own) :]
    others = zip(own[:-1], full[:-1], strict=True)
    return are_equal(own[-1], full[-1]) and all(
        is_one(extent) or are_equal(extent, all_) for extent, all_ in others
    )
