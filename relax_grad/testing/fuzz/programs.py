"""The generator of random programs: control flow, calls, parameters, the loss and the result.

The seed determines the program, on every machine and at every call.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from . import sampled
from .operators import VOCABULARY, in_float32, in_halves, write
from .pen import Pen
from .script import (
    BATCH,
    Body,
    Call,
    Function,
    If,
    Program,
    Tensor,
    Value,
    flat,
    has_batch,
    shape_text,
)

#: The optional features of a program. Without them it is one dataflow block with tensor parameters.
FEATURES = (
    "symbolic",
    "match_cast",
    "blocks",
    "branches",
    "calls",
    "locals",
    "checkpoints",
    "tuple_parameters",
    "stop_gradient",
    "intermediates",
    "element",
)

#: Optional additions to the vocabulary, with their weights: the samples of every differentiable
#: operator, those that PyTorch can compute, and sequences in float32 and in half precision.
MORE = {
    "samples": (sampled.write, 16),
    "samples_of_torch": (sampled.write_of_torch, 30),
    "float32": (in_float32, 3),
    "halves": (in_halves, 12),
}

_SHAPES = [(4,), (4, 3), (3, 4), (3, 1), (2, 3, 4), (), (BATCH, 3), (4, 4)]


def random_program(seed: int, length: int, features: Collection[str]) -> Program:
    """Return the program of a seed.

    Parameters
    ----------
    seed : int
        Determines every choice.
    length : int
        The approximate number of statements of ``main``.
    features : Collection[str]
        The names from :data:`FEATURES` and :data:`MORE` that the program may use.
    """
    return _Author(seed, length, frozenset(features)).program()


class _Author:
    """Draws one program."""

    def __init__(self, seed: int, length: int, features: frozenset[str]):
        self.seed, self.length, self.features = seed, length, features
        self.rng = random.Random(seed)
        self.vocabulary = [*VOCABULARY, *(MORE[name] for name in MORE if name in features)]
        self.names = (f"v{i}" for i in itertools.count())
        self.functions: list[Function] = []

    def program(self) -> Program:
        params = self.params()
        pen = self.pen(params)
        self.write(pen, self.length, depth=2)
        result, target = self.result(pen)
        main = Function("main", tuple(params), Body(tuple(pen.statements), result))
        return Program(
            main,
            tuple(self.functions),
            "symbolic" in self.features,
            segments=tuple(self.segments(pen.statements)),
            wrt=tuple(self.wrt(params, pen)),
            target=target,
            seed=self.seed,
        )

    def pen(self, values: Sequence[Value]) -> Pen:
        return Pen(self.rng, values, self.names, self.vocabulary)

    def params(self) -> list[Value]:
        kinds: list = [Tensor((BATCH, 4))]
        kinds += [Tensor(self.rng.choice(_SHAPES)) for _ in range(self.rng.randint(1, 3))]
        if "tuple_parameters" in self.features:
            some = [Tensor(self.rng.choice(_SHAPES)) for _ in range(3)]
            kinds.append((some[0], (some[1], some[2])) if self.rng.random() < 0.5 else (*some,))
        if "branches" in self.features:
            kinds += [Tensor((), "bool")] * 2
        return [Value(f"x{i}", kind) for i, kind in enumerate(kinds)]

    def write(self, pen: Pen, length: int, depth: int) -> None:
        """Write about ``length`` statements; functions and branches nest at most ``depth``
        levels."""
        ways = self.ways(depth)
        end = len(pen.statements) + length
        while len(pen.statements) < end:
            if ways and self.rng.random() < 0.12:
                self.rng.choice(ways)(pen, depth - 1)
            else:
                write(pen)

    def ways(self, depth: int) -> list[Callable]:
        steps = [
            method
            for feature, method in (
                ("match_cast", self.match_cast),
                ("checkpoints", self.checkpoint),
                ("stop_gradient", self.stop_gradient),
            )
            if feature in self.features
        ]
        if depth > 0:
            steps += [self.branch] * 2 if "branches" in self.features else []
            steps += [self.call] * 2 if "calls" in self.features else []
            if depth == 2 and "locals" in self.features:
                steps += [self.local_call] * 2
        return steps

    def match_cast(self, pen: Pen, depth: int) -> None:
        x = pen.pick()
        kind = f'R.Tensor({shape_text(x.tensor.shape)}, "float64")'
        pen.bind(f"R.match_cast({{0}}, {kind})", lambda t, x: x, [x], x.kind, x.bound)

    def checkpoint(self, pen: Pen, depth: int) -> None:
        whole = [v for v in pen.values if isinstance(v.kind, Tensor) and v.kind.is_float]
        x = self.rng.choice(whole)
        end = self.rng.choice(["start", "end"])
        pen.bind(f"R.grad.{end}_checkpoint({{0}})", lambda t, x: x, [x], x.kind, x.bound)

    def stop_gradient(self, pen: Pen, depth: int) -> None:
        x = pen.pick()
        text = "R.grad.stop_gradient({0})"
        pen.bind(text, lambda t, x: x.detach(), [x], x.kind, x.bound, is_smooth=False)

    def branch(self, pen: Pen, depth: int) -> None:
        if self.rng.random() < 0.5:
            x = pen.pick()
            condition = pen.bind(
                'R.greater(R.sum({0}), R.const(0.1234567, "float64"))',
                lambda t, x: x.sum() > 0.1234567,
                [x],
                Tensor((), "bool"),
                1.0,
            )
        else:
            bools = [v for v in pen.values if v.kind == Tensor((), "bool")]
            if not bools:
                return
            condition = self.rng.choice(bools)
        yes, no = self.pen(pen.values), self.pen(pen.values)
        for inner in (yes, no):
            self.write(inner, self.rng.randint(0, 5), depth)
        pairs = list(_pairs(yes.values, no.values, len(pen.values)))
        best = max(rank for *_, rank in pairs)
        first, other, _ = self.rng.choice([p for p in pairs if p[2] == best][-8:])
        bodies = Body(tuple(yes.statements), first), Body(tuple(no.statements), other)
        name = pen.name()
        pen.add(If(name, condition, bodies, first.kind), max(first.bound, other.bound))

    def call(self, pen: Pen, depth: int) -> None:
        """Call an existing or a new function of the module."""
        for function in self.rng.sample(self.functions, len(self.functions)):
            operands = [_of_kind(pen, p.kind, self.rng) for p in function.params]
            if None not in operands and self.rng.random() < 0.4:
                self.add_call(pen, function, operands)
                return
        # An argument with the batch as an extent defines it in the function.
        batched = [
            v
            for v in _all(pen)
            if isinstance(v.kind, Tensor) and v.kind.is_float and BATCH in v.kind.shape
        ]
        if not batched:
            return
        operands = [self.rng.choice(batched)]
        operands += [self.rng.choice(_all(pen)) for _ in range(self.rng.randint(0, 2))]
        function = self.function(pen, operands, [], depth, is_local=False)
        self.functions.append(function)
        self.add_call(pen, function, operands)

    def local_call(self, pen: Pen, depth: int) -> None:
        """Call a local function, which may use earlier variables."""
        # Its parameters have no batch: in TVMScript it would be a new variable, not the outer
        # function's.
        values = [v for v in _all(pen) if not has_batch([v.kind])]
        if not values:
            return
        operands = [self.rng.choice(values) for _ in range(self.rng.randint(1, 2))]
        function = self.function(pen, operands, pen.values, 0, is_local=True)
        pen.statements.append(function)
        self.add_call(pen, function, operands)
        again = [_of_kind(pen, p.kind, self.rng) for p in function.params]
        if self.rng.random() < 0.5:
            self.add_call(pen, function, again)

    def function(
        self, pen: Pen, operands: Any, outer: Any, depth: int, *, is_local: bool
    ) -> Function:
        params = [Value(pen.name(), operand.kind, operand.bound) for operand in operands]
        inner = self.pen([*outer, *params])
        self.write(inner, self.rng.randint(1, 6), depth)
        name = pen.name().replace("v", "f")
        results = [v for v in inner.values if _holds_floats(v.kind)]
        if is_local:
            results = [v for v in results if not has_batch([v.kind])] or list(params)
        result = self.rng.choice(results[-3:])
        return Function(name, tuple(params), Body(tuple(inner.statements), result), is_local)

    def add_call(self, pen: Pen, function: Function, operands: Any) -> None:
        result = function.body.result
        pen.add(Call(pen.name(), function, tuple(operands), result.kind), result.bound)

    def result(self, pen: Pen) -> tuple[Value, tuple[int, ...]]:
        """Write the loss and the result; return the result, and the path of the loss in it."""
        terms = []
        for x in (pen.pick() for _ in range(3)):
            if x.tensor.shape:
                x = pen.bind("R.mean({0})", lambda t, x: x.mean(), [x], Tensor(()), x.bound)
            terms.append(x)
        loss = pen.bind(
            "R.add(R.add({0}, {1}), {2})",
            lambda t, x, y, z: x + y + z,
            terms,
            Tensor(()),
            1.0,
        )
        if "element" not in self.features:
            return loss, ()
        others = self.rng.choices(pen.values, k=2)
        target: tuple[int, ...]
        if self.rng.random() < 0.5:
            text, operands, target = "({0}, {1}, {2})", [others[0], loss, others[1]], (1,)
        else:
            text, operands, target = "({1}, ({0}, {2}))", [others[0], others[1], loss], (1, 1)

        def compute(t: Any, x: Any, y: Any, z: Any) -> Any:
            return (x, y, z) if target == (1,) else (y, (x, z))

        kind = compute(None, *(v.kind for v in operands))
        return pen.bind(text, compute, operands, kind, 1.0), target

    def segments(self, statements: Any) -> list[bool]:
        is_dataflow, flags = True, []
        for statement in statements:
            if "blocks" in self.features and self.rng.random() < 0.15:
                is_dataflow = not is_dataflow
            flags.append(is_dataflow and not _needs_binding_block(statement))
        return flags

    def wrt(self, params: list[Value], pen: Pen) -> list[Value]:
        floats = [v for v in params if _holds_floats(v.kind)]
        if "intermediates" in self.features:
            markers = ("R.grad", "{0}")
            floats += [
                Value(statement.name, statement.kind)
                for statement in pen.statements
                if not isinstance(statement, Function)
                and _holds_floats(statement.kind)
                and not getattr(statement, "template", "").startswith(markers)
            ]
        return self.rng.sample(floats, self.rng.randint(1, min(4, len(floats))))


def _needs_binding_block(statement: Any) -> bool:
    return isinstance(statement, (If, Function)) or (
        isinstance(statement, Call) and statement.function.is_local
    )


def _holds_floats(kind: Any) -> bool:
    return any(tensor.is_float for tensor in flat(kind))


def _all(pen: Pen) -> list[Value]:
    """Return every value and every element of a tuple, at any depth."""
    values = []
    pending = list(pen.values)
    while pending:
        value = pending.pop(0)
        values.append(value)
        pending += value.elements()
    return values


def _of_kind(pen: Pen, kind: Any, rng: random.Random) -> Value | None:
    values = [value for value in _all(pen) if value.kind == kind]
    return rng.choice(values) if values else None


def _pairs(ones: Any, others: Any, known: int) -> Iterator[tuple]:
    """Yield pairs of the same kind, and the number of new values in each pair."""
    for i, first in enumerate(ones):
        for j, other in enumerate(others):
            if first.kind == other.kind:
                yield first, other, (i >= known) + (j >= known)
