"""Random programs as data, with a form in TVMScript and an equivalent computation in PyTorch.

A program is data: statements that name their operands. Each statement holds its text in TVMScript
and the equivalent computation in PyTorch, so the automatic differentiation of PyTorch is an
independent reference for the result of a pass. :mod:`.programs` draws them.

A kind is a :class:`Tensor`, or a tuple of kinds. Extents are integers. In a program with a symbolic
batch, the multiples of :data:`BATCH` are symbolic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

#: The extent of the batch: a prime, so that no other extent is a multiple of it.
BATCH = 11


@dataclass(frozen=True)
class Tensor:
    """The type of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float64"

    @property
    def is_float(self) -> bool:
        return self.dtype == "float64"


#: The type of a value: the type of a tensor, or a tuple of kinds.
Kind: TypeAlias = "Tensor | tuple[Kind, ...]"


@dataclass(frozen=True)
class Value:
    """A variable, or an element of a variable that is a tuple.

    Attributes
    ----------
    name : str
        The variable.
    path : tuple[int, ...]
        The path of indices to the element.
    kind : Tensor or tuple
        Its kind.
    bound : float
        The approximate bound of its numbers.
    """

    name: str
    kind: Kind
    bound: float = 1.0
    path: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return self.name + "".join(f"[{i}]" for i in self.path)

    @property
    def tensor(self) -> Tensor:
        """The kind of a value that is a tensor."""
        assert isinstance(self.kind, Tensor), f"{self.text} is a tuple"
        return self.kind

    def elements(self) -> Iterator[Value]:
        for i, kind in enumerate(self.kind if isinstance(self.kind, tuple) else ()):
            yield Value(self.name, kind, self.bound, (*self.path, i))

    def leaves(self) -> Iterator[Value]:
        """Yield each tensor."""
        if isinstance(self.kind, tuple):
            for element in self.elements():
                yield from element.leaves()
        else:
            yield self


@dataclass(frozen=True)
class Let:
    """``name = template``, where ``{0}``, ``{1}``, ... are the operands and ``{n}`` is the batch.

    A template may have several lines: those before the last bind variables whose names begin with
    ``{name}_``. ``compute`` is None where PyTorch has no such operator.

    Attributes
    ----------
    operators : tuple[str, ...]
        The operators whose samples it was drawn from.
    is_smooth : bool
        Whether its gradient is its derivative: false at a kink, or where a gradient is stopped.
    """

    name: str
    template: str
    compute: Callable | None
    operands: tuple[Value, ...]
    kind: Kind
    operators: tuple[str, ...] = ()
    is_smooth: bool = True


@dataclass(frozen=True)
class Body:
    """Statements and the value of the result."""

    statements: tuple[Statement, ...]
    result: Value


@dataclass(frozen=True)
class If:
    """A conditional; each branch binds its name last."""

    name: str
    condition: Value
    branches: tuple[Body, Body]
    kind: Kind

    def with_branches(self, change: Callable[[Body], Body]) -> If:
        """Return the conditional with a function applied to both branches."""
        first, other = self.branches
        return replace(self, branches=(change(first), change(other)))

    def with_branch(self, i: int, branch: Body) -> If:
        """Return the conditional with another branch."""
        first, other = self.branches
        return replace(self, branches=(branch, other) if i == 0 else (first, branch))


@dataclass(frozen=True)
class Function:
    """A function of the module, or a local one, which may use earlier variables."""

    name: str
    params: tuple[Value, ...]
    body: Body
    is_local: bool = False


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    function: Function
    operands: tuple[Value, ...]
    kind: Kind


Statement: TypeAlias = Let | If | Function | Call


@dataclass(frozen=True)
class Program:
    """A function with the functions that it calls.

    Attributes
    ----------
    main : Function
        The differentiated function.
    functions : tuple[Function, ...]
        The other functions of the module.
    is_symbolic : bool
        Whether the batch is symbolic.
    segments : tuple[bool, ...]
        For each statement of ``main``, whether it is in a dataflow block; neighbours share a block.
    wrt : tuple[Value, ...]
        The values to differentiate with respect to.
    target : tuple[int, ...]
        The path of the loss in the result; empty where the result is the loss.
    seed : int
        The seed of the values of the parameters.
    """

    main: Function
    functions: tuple[Function, ...] = ()
    is_symbolic: bool = False
    segments: tuple[bool, ...] = ()
    wrt: tuple[Value, ...] = field(default=(), compare=False)
    target: tuple[int, ...] = ()
    seed: int = 0

    def values(self) -> list:
        """Return the values of the parameters: arrays, and lists of them for tuples."""
        rng = np.random.default_rng(self.seed)
        return [_random(rng, param.kind) for param in self.main.params]

    def source(self, prefix: str) -> str:
        """Return the module in TVMScript; ``prefix`` begins the names of its functions."""
        writer = _Writer(prefix, "n" if self.is_symbolic else None)
        lines = ["@I.ir_module", "class Module:"]
        for function in self.functions:
            lines += writer.function(function, (), 1)
        return "\n".join([*lines, *writer.function(self.main, self.segments, 1), ""])

    def statements(self) -> Iterator[Statement]:
        """Yield every statement, including statements of branches and functions."""
        for function in (*self.functions, self.main):
            yield from _statements(function.body)

    def lets(self) -> Iterator[Let]:
        """Yield every :class:`Let` statement: no conditionals, calls or functions."""
        return (statement for statement in self.statements() if isinstance(statement, Let))

    @property
    def has_torch(self) -> bool:
        """Whether PyTorch can compute every statement."""
        return all(let.compute is not None for let in self.lets())

    @property
    def is_smooth(self) -> bool:
        """Whether its gradients are derivatives."""
        return all(let.is_smooth for let in self.lets())

    @property
    def narrowest(self) -> str:
        """The dtype of fewest digits in which a statement computes."""
        templates = [let.template for let in self.lets()]
        for dtype in ("bfloat16", "float16", "float32"):
            if any(f'"{dtype}"' in template for template in templates):
                return dtype
        return "float64"

    @property
    def has_jumps(self) -> bool:
        """Whether its result may be discontinuous."""
        jumps = ("R.floor(", "R.argmax(", "R.greater(")
        return any(isinstance(statement, If) for statement in self.statements()) or any(
            jump in let.template for let in self.lets() for jump in jumps
        )

    @property
    def has_local_functions(self) -> bool:
        return any(isinstance(statement, Function) for statement in self.statements())

    def evaluate(self, torch: ModuleType, values: Sequence, moved: dict | None = None) -> Any:
        """Compute the result in PyTorch.

        Parameters
        ----------
        torch : module
            PyTorch.
        values : Sequence
            The parameters: tensors, and tuples of them.
        moved : dict[str, object], optional
            Offsets to add to variables, by name. A derivative by an offset is one by the variable.
        """
        return _Evaluation(torch, moved or {}).call(self.main, values, {})


def project(value: Any, path: Sequence[int]) -> Any:
    """Return the element at a path of indices."""
    for index in path:
        value = value[index]
    return value


def flat(value: Any) -> list:
    """Return the leaves of a value that may be a nested tuple."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def has_batch(kinds: object) -> bool:
    """Tell whether an extent of these kinds is a multiple of the batch."""
    return any(size % BATCH == 0 for tensor in flat(kinds) for size in tensor.shape)


def _statements(body: Body) -> Iterator[Statement]:
    for statement in body.statements:
        yield statement
        for nested in bodies_of(statement):
            yield from _statements(nested)


def bodies_of(statement: Statement) -> tuple[Body, ...]:
    """Return the branches of a conditional, or the body of a function."""
    if isinstance(statement, If):
        return statement.branches
    return (statement.body,) if isinstance(statement, Function) else ()


class _Evaluation:
    def __init__(self, torch: Any, moved: Any):
        self.torch, self.moved = torch, moved

    def call(self, function: Function, values: Any, outer: dict) -> Any:
        known = dict(outer) if function.is_local else {}
        for param, value in zip(function.params, values, strict=True):
            known[param.name] = self.move(param.name, value)
        return self.body(function.body, known)

    def body(self, body: Body, known: dict) -> Any:
        for statement in body.statements:
            if isinstance(statement, Function):
                continue
            known[statement.name] = self.move(statement.name, self.value(statement, known))
        return self.find(body.result, known)

    def value(self, statement: Let | If | Call, known: dict) -> Any:
        if isinstance(statement, If):
            taken = 0 if bool(self.find(statement.condition, known)) else 1
            return self.body(statement.branches[taken], dict(known))
        operands = [self.find(operand, known) for operand in statement.operands]
        if isinstance(statement, Call):
            return self.call(statement.function, operands, known)
        assert statement.compute is not None, "PyTorch has no such operator"
        return statement.compute(self.torch, *operands)

    def find(self, value: Value, known: dict) -> Any:
        return project(known[value.name], value.path)

    def move(self, name: str, value: Any) -> Any:
        return _sum(value, self.moved[name]) if name in self.moved else value


class _Writer:
    """Writes functions as lines of TVMScript."""

    def __init__(self, prefix: str, symbol: str | None):
        self.prefix, self.symbol = prefix, symbol

    def function(self, function: Function, segments: Sequence[bool], depth: int) -> list[str]:
        is_main = function.name == "main"
        params = ", ".join(
            f"{p.name}: {self.kind(p.kind, not function.is_local)}" for p in function.params
        )
        result = self.kind(function.body.result.kind, not function.is_local)
        mark = "@R.function" if is_main or function.is_local else "@R.function(private=True)"
        lines = [mark, f"def {self.called(function, True)}({params}) -> {result}:"]
        inner = []
        kinds = [*(p.kind for p in function.params), function.body.result.kind]
        if self.symbol and not function.is_local:
            inner += [f"{self.symbol} = T.int64()"] if has_batch(kinds) else []
        inner += [] if function.is_local else ["cls = Module"]
        inner += self.body(function.body, segments)
        inner.append(f"return {function.body.result.text}")
        return _indented([*lines, *_indented(inner, 1)], depth)

    def body(self, body: Body, segments: Sequence[bool]) -> list[str]:
        segments = segments or [False] * len(body.statements)
        lines: list[str] = []
        start = 0
        for is_dataflow, group in itertools.groupby(segments):
            end = start + len(list(group))
            statements, later = body.statements[start:end], body.statements[end:]
            block = [line for statement in statements for line in self.statement(statement)]
            needed = {body.result.name}.union(*map(_mentioned, later))
            outputs = [statement.name for statement in statements if statement.name in needed]
            lines += _dataflow(block, outputs) if is_dataflow and outputs else block
            start = end
        return lines

    def statement(self, statement: Statement) -> list[str]:
        if isinstance(statement, Function):
            return self.function(statement, (), 0)
        if isinstance(statement, If):
            lines: list[str] = []
            heads = (f"if {statement.condition.text}:", "else:")
            for head, branch in zip(heads, statement.branches, strict=True):
                inner = [*self.body(branch, ()), f"{statement.name} = {branch.result.text}"]
                lines += [head, *_indented(inner, 1)]
            return lines
        texts = [operand.text for operand in statement.operands]
        if isinstance(statement, Call):
            callee = self.called(statement.function, False)
            return [f"{statement.name} = {callee}({', '.join(texts)})"]
        text = statement.template.format(*texts, n=self.symbol or BATCH, name=statement.name)
        *before, last = text.split("\n")
        return [*before, f"{statement.name} = {last}"]

    def called(self, function: Function, is_definition: bool) -> str:
        if function.is_local:
            return function.name
        name = self.prefix if function.name == "main" else f"{self.prefix}_{function.name}"
        return name if is_definition else f"cls.{name}"

    def kind(self, kind: Kind, is_signature: bool) -> str:
        if isinstance(kind, tuple):
            return f"R.Tuple({', '.join(self.kind(k, is_signature) for k in kind)})"
        return f'R.Tensor({self.shape(kind.shape, is_signature)}, "{kind.dtype}")'

    def shape(self, shape: Sequence[int], is_signature: bool) -> str:
        dims = [extent(size, self.symbol, '"' if is_signature else "") for size in shape]
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def extent(size: int, symbol: str | None, quote: str = "") -> str:
    """Return an extent in TVMScript."""
    if symbol is None or size % BATCH:
        return str(size)
    times = size // BATCH
    return f"{quote}{symbol}{quote}" if times == 1 else f"{quote}{symbol} * {times}{quote}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape for the template of a statement."""
    dims = [extent(size, "{n}") for size in shape]
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def _mentioned(statement: Statement) -> set[str]:
    """Return the names of all variables that a statement uses, and of some variables that it
    defines."""
    if isinstance(statement, (If, Function)):
        bodies = bodies_of(statement)
        names = {statement.condition.name} if isinstance(statement, If) else set()
        for body in bodies:
            names |= {body.result.name}.union(*map(_mentioned, body.statements))
        return names
    names = {operand.name for operand in statement.operands}
    if isinstance(statement, Call) and statement.function.is_local:
        names |= _mentioned(statement.function)
    return names


def _dataflow(lines: list[str], names: list[str]) -> list[str]:
    return ["with R.dataflow():", *_indented([*lines, f"R.output({', '.join(names)})"], 1)]


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _random(rng: np.random.Generator, kind: Any) -> Any:
    if isinstance(kind, tuple):
        return [_random(rng, item) for item in kind]
    if kind.dtype == "bool":
        return np.array(rng.integers(2), "bool")
    return rng.uniform(-1, 1, kind.shape)


def _sum(value: Any, other: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_sum(*pair) for pair in zip(value, other, strict=True))
    return value if other is None else value + other
