"""The dropout of the weights of attention, whose mask is computed block by block."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx import Broadcast, Ramp

from ....topi.philox import LANES, Form, encrypt
from ..language import builder as b
from ..language.builder import Accumulators, Vectors, as_expr, bind, ceil_div, const
from ._blocks import Blocks
from ._spans import Span
from .sizes import Attention, Head

#: The words of a block of the generator, and the numbers of a row of :data:`LANES` blocks.
_WORDS = 4
_PER_ROW = _WORDS * LANES


def with_generator(of: Attention, params: list[tuple], place: int) -> list[tuple]:
    """Return parameters with the generator's parameters at a place, if weights are dropped."""
    if of.rate is None:
        return params
    numbers: list[tuple] = [("seed", [], "int64"), ("stream", [3] if of.is_part else [], "int64")]
    return [*params[:place], *numbers, *params[place:]]


class Dropout:
    """The factors of the weights of a block of queries and keys: 0, or one over the kept share.

    The generator draws the numbers of a tensor of the weights' shape, ``(batch, heads,
    queries, keys)``.

    Parameters
    ----------
    of : Attention
        The sizes.
    blocks : Blocks
        The blocks.
    rate : float
        The probability that a weight is dropped.
    seed, stream : tirx.Buffer
        The key and the stream of the generator, each of one int64; the stream of a part of the
        heads is followed by the number of the first head, and the number of heads.
    """

    def __init__(
        self, of: Attention, blocks: Blocks, rate: float, seed: tirx.Buffer, stream: tirx.Buffer
    ):
        self.of, self.blocks, self.seed, self.stream = of, blocks, seed, stream
        self.form = Form.kept(rate)

    @staticmethod
    def of_generator(
        of: Attention, blocks: Blocks, generator: Sequence[tirx.Buffer]
    ) -> Dropout | None:
        """Return the dropout by a generator, given its seed and stream; None without them."""
        return (
            Dropout(of, blocks, of.rate, *generator) if generator and of.rate is not None else None
        )

    def scratch(self) -> tirx.Buffer:
        """Return a buffer for the factors of a row of a block."""
        return b.scratch(self.blocks.plan.columns + 2 * _PER_ROW)

    def fill(
        self,
        target: tirx.Buffer,
        head: Head,
        query: tirx.PrimExpr,
        span: Span,
        panels: tirx.PrimExpr,
    ) -> tirx.PrimExpr:
        """Emit the factors of a query and the first panels of a block of keys.

        Returns
        -------
        start : tirx.PrimExpr
            The index of the factor of the first key.
        """
        first = bind(self._row(head, query) * _wide(as_expr(self.of.keys)) + _wide(span.start))
        group = bind(tirx.shift_right(first, _number(6)))
        start = bind(tirx.Cast("int32", tirx.bitwise_and(first, _number(_PER_ROW - 1))))
        number = ceil_div(start + panels * self.blocks.plan.width, _PER_ROW)
        integers, floats = Vectors(LANES, "uint64"), Vectors(LANES)
        seed, stream = (
            bind(Broadcast(tirx.Cast("uint64", buffer[0]), LANES))
            for buffer in (self.seed, self.stream)
        )
        lanes = tirx.Cast(f"uint64x{LANES}", Ramp(const(0), const(1), LANES))
        with b.serial(0, bind(number)) as i:
            at = bind((group + _wide(i)) * _number(LANES))
            counter = bind(Broadcast(at, LANES) + lanes)
            words = Accumulators(integers, _WORDS)
            encrypt(words, seed, counter, stream, lambda n: Broadcast(_number(n), LANES))
            threshold = Broadcast(_number(self.form.parameter), LANES)
            for word in range(_WORDS):
                factor = tirx.Select(
                    words[word] < threshold, floats.splat(self.form.scale), floats.splat(0)
                )
                floats.store(target, i * _PER_ROW + word * LANES, factor)
        return start

    def _row(self, head: Head, query: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of a query among the queries of all heads, of uint64."""
        of = self.of
        if of.is_part:
            first, heads = (_wide(self.stream[i]) for i in (1, 2))
            row = _wide(head.batch) * heads + (first + _wide(head.number))
        else:
            row = _wide(head.batch * of.heads + head.number)
        return row * _wide(as_expr(of.queries)) + _wide(query)


def _number(value: int) -> tirx.PrimExpr:
    return tirx.const(value, "uint64")


def _wide(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return an integer that is not negative as uint64."""
    return tirx.Cast("uint64", value)
