"""An interpreter of programs in NumPy, statement by statement and element by element."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import language as ir
from .expressions import is_float
from .operations import CAST, CHOICE, OPERATIONS
from .operators import OPERATORS

#: The iterations after which a ``while`` counts as endless, and the maximum number of stores of a
#: function.
_LONGEST, _LARGEST = 1000, 60_000


class InvalidError(Exception):
    """A program is invalid: for example, it reads unwritten elements or accesses a tensor out of
    bounds."""


class Array:
    """The values of a tensor, its written elements, and the memory that it may share."""

    def __init__(self, values: np.ndarray, is_written: bool, memory: object = None):
        self.values = values
        self.written = np.full(values.shape, is_written)
        self.memory = memory or object()

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str) -> Array:
        return cls(np.zeros(shape, dtype), False)


@dataclass(frozen=True)
class Run:
    """The parameters of a program for one value of ``n``, and all tensors after the run."""

    n: int
    inputs: Sequence[np.ndarray]
    wanted: Mapping[str, Array]


@functools.lru_cache(maxsize=128)  # a drawn program is checked soon after
def expected(program: ir.Program) -> Sequence[Run]:
    """Return the runs of a program, one for each value of ``n``.

    Raises
    ------
    InvalidError
        If the program is invalid.
    """
    runs = []
    for n in program.batches:
        inputs = inputs_of(program, n)
        runs.append(Run(n, inputs, interpret(program, n, inputs)))
    return runs


def inputs_of(program: ir.Program, n: int = ir.BATCH) -> list[np.ndarray]:
    """Return values of the parameters: small numbers with exact sums and products."""
    rng = np.random.default_rng(program.seed)
    return [_random(rng, param, n) for param in program.params]


def _random(rng: np.random.Generator, param: ir.Tensor, n: int) -> np.ndarray:
    shape = [ir.extent_at(size, n) for size in param.shape]
    if param.below is not None:
        return np.array(rng.integers(0, ir.extent_at(param.below, n), shape), param.dtype)
    if param.dtype == "bool":
        return np.array(rng.integers(0, 2, shape), "bool")
    if is_float(param.dtype):
        return np.array(rng.integers(-8, 9, shape) / 4, param.dtype)
    low = 0 if param.dtype == "uint8" else -4
    return np.array(rng.integers(low, 5, shape), param.dtype)


def interpret(program: ir.Program, n: int, inputs: list[np.ndarray]) -> dict[str, Array]:
    """Return every tensor of the Relax function after its run.

    Operators and calls return new tensors. A call that writes to an argument changes that
    argument's tensor.

    Parameters
    ----------
    program : Program
        The program.
    n : int
        The symbolic extent.
    inputs : list[np.ndarray]
        The parameters, which stay unchanged.

    Raises
    ------
    InvalidError
        If the program is invalid.
    """
    arrays = {
        param.name: Array(value.copy(), True)
        for param, value in zip(program.params, inputs, strict=True)
    }
    try:
        with np.errstate(all="ignore"):
            for step in program.steps:
                if isinstance(step, ir.Call):
                    _call(program, step, arrays, n)
                else:
                    _apply(step, arrays, n)
    except OverflowError as error:
        raise InvalidError("a number is too large") from error
    return arrays


def _scalar(value: object, dtype: str) -> Any:
    """Return a scalar of NumPy."""
    kind: Any = np.dtype(dtype).type  # NumPy's types say that no dtype of this form exists
    return kind(value)


def _call(program: ir.Program, call: ir.Call, arrays: dict[str, Array], n: int) -> None:
    function = program.function(call.function)
    operands = [arrays[name] for name in call.operands]
    inplace = call.inplace or (-1,) * len(call.results)
    for written in (operands[i] for i in inplace if i >= 0):
        if any(operand.memory is written.memory and operand is not written for operand in operands):
            raise InvalidError("an argument is written to, and another one may be a view of it")
    fresh = []
    for result, index in zip(call.results, inplace, strict=True):
        if index < 0:
            shape = tuple(ir.extent_at(size, n) for size in result.shape)
            fresh.append(Array.empty(shape, result.dtype))
        arrays[result.name] = fresh[-1] if index < 0 else operands[index]
    buffers = (*function.inputs, *function.outputs)
    _Evaluation(n).function(
        function, dict(zip((b.name for b in buffers), (*operands, *fresh), strict=True))
    )


def _apply(step: ir.Operator, arrays: dict[str, Array], n: int) -> None:
    operands = [arrays[name] for name in step.operands]
    if not all(operand.written.all() for operand in operands):
        raise InvalidError("an operator reads elements that nothing wrote")
    computed = OPERATORS[step.name].compute(
        n, *(operand.values for operand in operands), *step.attributes
    )
    (result,) = step.results
    values = np.array(computed, result.dtype)
    shape = tuple(ir.extent_at(size, n) for size in result.shape)
    if values.shape != shape:
        raise InvalidError(f"{step.name} has the shape {values.shape}, not {shape}")
    # TVM may turn a reshape into a view of the same memory.
    memory = operands[0].memory if step.name == "reshape" else None
    arrays[result.name] = Array(values, True, memory)


class _Evaluation:
    """One run of a function."""

    def __init__(self, n: int):
        self.n = n
        self.done = 0
        self.buffers: dict[str, Array] = {}
        self.names: dict[str, object] = {}

    def function(self, function: ir.PrimFunc, buffers: dict[str, Array]) -> None:
        self.buffers = dict(buffers)
        self.allocate(function.allocated)
        self.run(function.body)

    def allocate(self, buffers: tuple[ir.Buffer, ...]) -> None:
        for buffer in buffers:
            shape = tuple(ir.extent_at(size, self.n) for size in buffer.shape)
            self.buffers[buffer.name] = Array.empty(shape, buffer.dtype)

    # Statements

    def run(self, statements: tuple) -> None:
        for statement in statements:
            getattr(self, f"run_{type(statement).__name__.lower()}")(statement)

    def run_store(self, store: ir.Store) -> None:
        self.done += 1
        if self.done > _LARGEST:
            raise InvalidError("it takes too long")
        value = self.value(store.value)
        array, at = self.place(store)
        array.values[at] = value
        array.written[at] = True

    def run_bind(self, bind: ir.Bind) -> None:
        self.names[bind.name] = self.value(bind.value)

    def run_if(self, statement: ir.If) -> None:
        self.run(statement.body if self.value(statement.condition) else statement.otherwise)

    def run_while(self, loop: ir.While) -> None:
        for _ in range(_LONGEST):
            if not self.value(loop.condition):
                return
            self.run(loop.body)
        raise InvalidError("a loop does not end")

    def run_for(self, loop: ir.For) -> None:
        start = self.value(loop.start)
        for i in range(start, start + self.value(loop.extent)):
            self.names[loop.name] = i
            self.run(loop.body)

    def run_block(self, block: ir.Block) -> None:
        if block.where is not None and not self.value(block.where):
            return
        is_first = True
        # The bindings depend on the surrounding loops, not on other axes of this block.
        values = [self.value(axis.value) for axis in block.axes]
        for axis, value in zip(block.axes, values, strict=True):
            start = self.value(axis.start)
            if not start <= value < start + self.value(axis.extent):
                raise InvalidError(f"{axis.name} = {value} is outside of its domain")
            is_first &= axis.kind != "reduce" or value == start
            self.names[axis.name] = value
        self.allocate(block.allocated)
        if is_first:
            self.run(block.init)
        self.run(block.body)

    def place(self, access: ir.Store | ir.Load) -> tuple[Array, tuple[int, ...]]:
        array = self.buffers[access.buffer]
        at = tuple(int(self.value(index)) for index in access.indices)
        if not all(0 <= i < size for i, size in zip(at, array.values.shape, strict=True)):
            raise InvalidError(f"{access.buffer}{list(at)} is out of bounds")
        return array, at

    # Expressions

    def value(self, expr: Any) -> Any:
        return getattr(self, f"value_{type(expr).__name__.lower()}")(expr)

    def value_const(self, expr: ir.Const) -> Any:
        return expr.value if expr.dtype == ir.INDEX else _scalar(expr.value, expr.dtype)

    def value_size(self, expr: ir.Size) -> int:
        return ir.extent_at(expr.size, self.n)

    def value_name(self, expr: ir.Name) -> Any:
        return self.names[expr.name]

    def value_load(self, expr: ir.Load) -> Any:
        array, at = self.place(expr)
        if not array.written[at]:
            raise InvalidError(f"{expr.buffer}{list(at)} is read, but not written")
        return array.values[at]

    def value_op(self, expr: ir.Op) -> Any:
        if expr.name == CHOICE:
            condition, chosen, other = expr.args
            return self.value(chosen if self.value(condition) else other)
        args = [self.value(arg) for arg in expr.args]
        if expr.name == CAST:
            return _scalar(args[0], expr.dtype)
        return OPERATIONS[expr.name].compute(*args)

    def value_let(self, expr: ir.Let) -> Any:
        self.names[expr.name] = self.value(expr.value)
        return self.value(expr.body)
