"""The generator of random programs: a Relax function that calls TIR functions and operators."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import language as ir
from .expressions import DTYPES, LIMITS, Range, is_float
from .functions import Argument, Author
from .interpret import InvalidError, expected

#: The extents in programs, and those in large programs.
_SIZES, _LARGE = (1, 2, 3, 4, 4, 5, 6, 8, 12), (4, 16, 24, 33, 40)

#: The constant extents in symbolic programs. No sum of two is a multiple of the symbolic extent.
_BESIDE = (1, 2, 3, 4, 6)

#: The maximum number of elements of a tensor, and that in large programs.
_ELEMENTS, _MANY = 180, 2500

#: The number of invalid draws in a row that counts as an error of this module.
_TRIALS = 200


def draw(seed: int, number: int) -> ir.Program:
    """Return a program of a session, which the two numbers determine.

    Parameters
    ----------
    seed : int
        The seed of the session.
    number : int
        The number of the program, from 0.
    """
    for trial in range(_TRIALS):
        rng = random.Random(f"{seed}/{number}/{trial}")
        program = _Author(rng).program()
        if is_valid(program):
            return program
    raise AssertionError(f"no valid program in {_TRIALS} trials of seed {seed}, program {number}")


def is_valid(program: ir.Program) -> bool:
    """Tell whether a program is valid: all accesses are in bounds, and elements are written before
    they are read."""
    try:
        expected(program)
    except InvalidError:
        return False
    return True


@dataclass(eq=False)
class _Value:
    """A tensor of the Relax function, the bounds of its numbers, and all values that alias it."""

    tensor: ir.Tensor
    range: Range
    same: list[_Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.same.append(self)

    @property
    def is_index(self) -> bool:
        return self.tensor.below is not None


@dataclass
class _Author:
    rng: random.Random
    values: list[_Value] = field(default_factory=list)
    params: list[ir.Tensor] = field(default_factory=list)
    functions: list[ir.PrimFunc] = field(default_factory=list)
    steps: list = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    inplace: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_symbolic = self.rng.random() < 0.2
        self.is_large = not self.is_symbolic and self.rng.random() < 0.04
        sizes = list(_LARGE if self.is_large else _SIZES)
        if self.is_symbolic:
            sizes = [*_BESIDE, *[ir.BATCH] * 4, 2 * ir.BATCH]
        self.sizes = sizes
        self.names = (f"t{k}" for k in itertools.count())

    def program(self) -> ir.Program:
        self.take()
        for _ in range(self.rng.choice([1, 1, 2, 2, 3, 4])):
            self.rng.choice([self.call] * 4 + [self.operator] * 3 + [self.around, self.again])()
        if not self.functions:
            self.call()
        if self.is_symbolic:
            self.kinds.add("symbolic")
        if self.is_large:
            self.kinds.add("large")
        if len(self.functions) > 1:
            self.kinds.add("several_calls")
        for buffer in (b for f in self.functions for b in f.buffers):
            self.kinds.add(buffer.dtype)
            if not buffer.shape:
                self.kinds.add("scalar")
            if 1 in buffer.shape:
                self.kinds.add("extent_1")
        is_dataflow = self.rng.random() < 0.8
        self.kinds.add("dataflow" if is_dataflow else "bindings")
        return ir.Program(
            functions=tuple(self.functions),
            params=tuple(self.params),
            steps=tuple(self.steps),
            results=tuple(self.results()),
            is_symbolic=self.is_symbolic,
            is_dataflow=is_dataflow,
            inexact=frozenset(
                value.tensor.name
                for value in self.values
                if not value.range.is_exact(value.tensor.dtype)
            ),
            kinds=frozenset(self.kinds),
            seed=self.rng.randrange(2**32),
        )

    # Tensors

    def shape(self) -> tuple[int, ...]:
        known = [value.tensor.shape for value in self.values]
        if known and self.rng.random() < 0.6:
            return self.rng.choice(known)
        most = _MANY if self.is_large else _ELEMENTS
        while True:
            rank = self.rng.choice([0, 1, 1, 2, 2, 2, 3])
            shape = tuple(self.rng.choice(self.sizes) for _ in range(rank))
            if math.prod(shape) <= most:
                return shape

    def dtype(self) -> str:
        return self.rng.choices(list(DTYPES), list(DTYPES.values()))[0]

    def take(self) -> None:
        """Add the parameters."""
        main = self.dtype()
        for i in range(self.rng.randint(1, 3)):
            dtype = main if self.rng.random() < 0.75 else self.dtype()
            shape = self.shape()
            if i == 0 and self.is_symbolic:
                shape = (ir.BATCH, *shape[1:])
            bound = 1 if dtype == "bool" else 2 if is_float(dtype) else 4
            bits = 2 if is_float(dtype) else 0
            self.parameter(ir.Tensor(f"x{i}", shape, dtype), Range(bound, bits))
        if self.rng.random() < 0.4:
            sizes = [s for value in self.values for s in value.tensor.shape]
            below = self.rng.choice(sizes or [4])
            shape = (self.rng.choice(sizes or [3]),)
            dtype = self.rng.choice(["int32", "int64"])
            self.parameter(ir.Tensor("ix", shape, dtype, below), Range(below))

    def parameter(self, tensor: ir.Tensor, known: Range) -> None:
        self.params.append(tensor)
        self.values.append(_Value(tensor, known))

    def tensor(self, shape: tuple[int, ...], dtype: str) -> ir.Tensor:
        return ir.Tensor(next(self.names), shape, dtype)

    def results(self) -> list[str]:
        """Return all tensors that no step reads, and some others."""
        made = [r.name for step in self.steps for r in step.results]
        read = {name for step in self.steps for name in step.operands}
        results = [m for m in made if m not in read or m in self.inplace or self.rng.random() < 0.2]
        return results or made[-1:]

    # Steps

    def call(self, target: _Value | None = None) -> None:
        """Call a new function, which writes to ``target`` in place if that is given."""
        count = min(len(self.values), self.rng.randint(1, 3))
        operands = self.rng.sample(self.values, count)
        for value in self.values:
            if value.is_index and value not in operands and self.rng.random() < 0.7:
                operands.append(value)
        written = []
        if target is not None:
            operands = [target, *(operand for operand in operands if operand is not target)]
            written = [target]
        elif self.rng.random() < 0.3:
            written = [operand for operand in operands if not operand.is_index][
                : self.rng.choice([1, 1, 2])
            ]
        symbols = {s for operand in operands for s in operand.tensor.shape if s % ir.BATCH == 0}
        # The function knows the symbolic extent only if an argument has it.
        sizes = [s for s in self.sizes if s % ir.BATCH or not self.is_symbolic or symbols]
        outputs = []
        for _ in range(self.rng.choice([0, 1, 1] if written else [1, 1, 1, 1, 2, 2, 3])):
            shape = self.shape()
            if self.is_symbolic and not symbols:
                shape = tuple(4 if s % ir.BATCH == 0 else s for s in shape)
            same = [operand.tensor.dtype for operand in operands]
            dtype = self.rng.choice(same) if self.rng.random() < 0.7 else self.dtype()
            outputs.append((shape, dtype))
        author = Author(self.rng, self.kinds, sizes, self.rng.random() < 0.55)
        arguments = [
            Argument(e.tensor.shape, e.tensor.dtype, e.range, e.tensor.below, e in written)
            for e in operands
        ]
        name = f"f{len(self.functions)}"
        function, known = author.function(name, arguments, outputs)
        self.functions.append(function)
        results, inplace = [], []
        for operand in written:
            results.append(self.tensor(operand.tensor.shape, operand.tensor.dtype))
            inplace.append(operands.index(operand))
        for shape, dtype in outputs:
            results.append(self.tensor(shape, dtype))
            inplace.append(-1)
        if len(outputs) > 1:
            self.kinds.add("several_outputs")
        if written:
            self.kinds.add("inplace")
            self.inplace.update(r.name for r in results)
            for operand, now in zip(written, known, strict=False):
                for other in operand.same:
                    other.range = other.range.joined(now)
        names = tuple(operand.tensor.name for operand in operands)
        self.steps.append(ir.Call(tuple(results), name, names, tuple(inplace) if written else ()))
        groups = [operand.same for operand in written] + [[] for _ in outputs]
        self.values += [_Value(*fields) for fields in zip(results, known, groups, strict=True)]

    def again(self) -> None:
        """Call a function again, on other tensors whose numbers have the same or smaller bounds."""
        calls = [step for step in self.steps if isinstance(step, ir.Call) and not step.inplace]
        if not calls:
            return
        step = self.rng.choice(calls)
        known = {value.tensor.name: value for value in self.values}
        operands = []
        for old in (known[name] for name in step.operands):
            candidates = [
                value
                for value in self.values
                if replace(value.tensor, name="") == replace(old.tensor, name="")
                and old.range.joined(value.range) == old.range
            ]
            operands.append(self.rng.choice(candidates).tensor.name)
        self.kinds.add("called_again")
        results = tuple(self.tensor(r.shape, r.dtype) for r in step.results)
        self.steps.append(ir.Call(results, step.function, tuple(operands)))
        ranges = [known[r.name].range for r in step.results]
        self.values += [_Value(*pair) for pair in zip(results, ranges, strict=True)]

    def around(self) -> None:
        """Write to a tensor in place, between operators that read it."""
        candidates = [
            value
            for value in self.values
            if not value.is_index and value.tensor.dtype != "bool" and value.tensor.shape
        ]
        if not candidates:
            return
        x = self.rng.choice(candidates)
        if self.rng.random() < 0.6:
            x = self.binary(x)
        before = self.rng.choice([self.permute, self.permute, self.flip, self.unary, self.reshape])(
            x
        )
        self.call(x)
        self.kinds.add("inplace_between")
        for operand in (before, x):
            if len(operand.tensor.shape) == 2 and self.rng.random() < 0.5:
                self.matmul(operand)
            else:
                self.binary(operand)

    def operator(self) -> None:
        candidates = [
            value for value in self.values if not value.is_index and value.tensor.dtype != "bool"
        ]
        if not candidates:
            return
        x = self.rng.choice(candidates)
        ways: list[Callable[[_Value], object]] = [*[self.binary] * 3, self.unary]
        if x.tensor.shape:
            ways += [self.permute] * 2 + [self.reshape] * 2 + [self.reduce, self.flip, self.concat]
        if len(x.tensor.shape) == 2 and x.tensor.dtype in ("float32", "float64"):
            ways += [self.matmul] * 2
        self.rng.choice(ways)(x)

    def apply(
        self, name: str, operands: list[_Value], shape: Any, known: Range, *attributes: Any
    ) -> _Value:
        self.kinds.add(f"R.{name}")
        result = self.tensor(tuple(shape), operands[0].tensor.dtype)
        names = tuple(operand.tensor.name for operand in operands)
        self.steps.append(ir.Operator((result,), name, names, attributes))
        self.values.append(_Value(result, known.rounded(result.dtype)))
        return self.values[-1]

    def same_kind(self, x: _Value) -> _Value:
        candidates = [
            value
            for value in self.values
            if not value.is_index
            and value.tensor.dtype == x.tensor.dtype
            and value.tensor.shape == x.tensor.shape
        ]
        return self.rng.choice(candidates)

    def binary(self, x: _Value) -> _Value:
        y = self.same_kind(x)
        names = ["add", "multiply", "maximum", "minimum", "subtract"]
        name = self.rng.choice(names if x.tensor.dtype != "uint8" else names[:-1])
        total, product = x.range.bound + y.range.bound, x.range.bound * y.range.bound
        bits = max(x.range.bits, y.range.bits)
        if name in ("add", "subtract"):
            known = Range(total, bits)
        elif name == "multiply":
            known = Range(product, x.range.bits + y.range.bits)
        else:
            known = x.range.joined(y.range)
        if known.bound > LIMITS[x.tensor.dtype]:
            name, known = "maximum", x.range.joined(y.range)
        return self.apply(name, [x, y], x.tensor.shape, known)

    def unary(self, x: _Value) -> _Value:
        names = ["relu"] if x.tensor.dtype == "uint8" else ["relu", "negative"]
        if x.tensor.dtype in ("float32", "float64"):
            names.append("tanh")
        name = self.rng.choice(names)
        known = Range(1, math.inf) if name == "tanh" else x.range
        return self.apply(name, [x], x.tensor.shape, known)

    def permute(self, x: _Value) -> _Value:
        axes = list(range(len(x.tensor.shape)))
        self.rng.shuffle(axes)
        return self.apply(
            "permute_dims", [x], [x.tensor.shape[a] for a in axes], x.range, tuple(axes)
        )

    def reshape(self, x: _Value) -> _Value:
        shape = x.tensor.shape
        other: tuple[int, ...]
        if len(shape) == 1 and shape[0] % ir.BATCH and shape[0] % 2 == 0:
            other = (shape[0] // 2, 2)
        elif len(shape) > 1 and not self.is_symbolic:
            other = (math.prod(shape),)
        else:
            other = (*shape, 1)
        return self.apply("reshape", [x], other, x.range, other)

    def reduce(self, x: _Value) -> None:
        axis = self.rng.randrange(len(x.tensor.shape))
        size = x.tensor.shape[axis]
        known = Range(x.range.bound * size, x.range.bits)
        name = "sum"
        if known.bound > LIMITS[x.tensor.dtype] or self.rng.random() < 0.4:
            name, known = "max", x.range
        shape = [s for i, s in enumerate(x.tensor.shape) if i != axis]
        self.apply(name, [x], shape, known, axis)

    def flip(self, x: _Value) -> _Value:
        axis = self.rng.randrange(len(x.tensor.shape))
        return self.apply("flip", [x], x.tensor.shape, x.range, axis)

    def concat(self, x: _Value) -> None:
        y, axis = self.same_kind(x), self.rng.randrange(len(x.tensor.shape))
        shape = list(x.tensor.shape)
        shape[axis] *= 2
        self.apply("concat", [x, y], shape, x.range.joined(y.range), axis)

    def matmul(self, x: _Value) -> None:
        """Multiply by a transpose, possibly with a call in between."""
        if x.tensor.dtype not in ("float32", "float64"):
            return
        candidates = [
            value
            for value in self.values
            if value.tensor.dtype == x.tensor.dtype
            and len(value.tensor.shape) == 2
            and value.tensor.shape[1] == x.tensor.shape[1]
        ]
        y = self.rng.choice(candidates)
        turned = self.apply("permute_dims", [y], y.tensor.shape[::-1], y.range, (1, 0))
        if self.rng.random() < 0.5:
            self.call()
        bound = x.range.bound * y.range.bound * x.tensor.shape[1]
        if bound > LIMITS[x.tensor.dtype]:
            return
        known = Range(bound, x.range.bits + y.range.bits)
        shape = (x.tensor.shape[0], y.tensor.shape[0])
        self.apply("matmul", [x, turned], shape, known)
