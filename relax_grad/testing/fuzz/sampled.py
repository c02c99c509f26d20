"""Statements of random programs that are derived from samples of operators.

The inputs of a sample are points where its operator is smooth, or at least defined. The statement
adds small multiples of values of the program, fitted to the shapes of the inputs, to these inputs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.script import from_source

from ...ir.compat import constant_value, dtype_of
from .. import _program
from .._arguments import resolve
from ..samples import Sample, sampled_operators, samples
from .pen import Pen
from .script import BATCH, Kind, Tensor, Value, has_batch

#: The factor of values of the program before they are added to a sample's inputs.
_SCALE = 0.05

#: The assumed bound of results.
_BOUND = 3.0

#: The largest number of elements of an input. Larger inputs would make a program long.
_LARGEST = 128

#: The largest magnitude of inputs. Samples with larger ones test overflow, where rounding differs.
_HIGHEST = 20.0


class NotDrawableError(Exception):
    """A sample has no statement; the message says why."""


@dataclass(frozen=True)
class Form:
    """A sample as text.

    Attributes
    ----------
    operator : str
        The operator.
    lines : tuple[str, ...]
        The right sides of its bindings, with ``{name}_i`` for earlier variables and ``{pi}`` for
        the parameters.
    params : tuple[np.ndarray, ...]
        The inputs to which values of the program are added.
    leaves : tuple[str, ...]
        The index expression of each floating-point tensor in the result, for example ``"[0]"``.
    shapes : tuple[tuple[int, ...], ...]
        The shapes of these tensors.
    compute : Callable or None
        Maps PyTorch and the inputs to the floating-point tensors. None if PyTorch has no such
        operator.
    is_smooth : bool
        Whether its gradient is its derivative.
    """

    operator: str
    lines: tuple[str, ...]
    params: tuple[np.ndarray, ...]
    leaves: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    compute: Callable | None
    is_smooth: bool


@functools.cache
def _samples(operator: str) -> tuple[Sample, ...]:
    return tuple(samples(operator))


@functools.cache
def _form_or_reason(operator: str, number: int) -> Form | str:
    """Return the form of a sample of an operator, or the reason why it has none."""
    try:
        return form(_samples(operator)[number])
    except NotDrawableError as error:
        return str(error)


def write(pen: Pen) -> Value | None:
    """Write a statement from a sample of a random operator."""
    return _write(pen, lambda sample: True)


def write_of_torch(pen: Pen) -> Value | None:
    """Write a statement from a sample that PyTorch can compute."""
    return _write(pen, lambda sample: sample.torch is not None)


def _write(pen: Pen, accept: Callable[[Sample], bool]) -> Value | None:
    operator = pen.rng.choice(sampled_operators())
    samples = [i for i, sample in enumerate(_samples(operator)) if accept(sample)]
    chosen = _form_or_reason(operator, pen.rng.choice(samples)) if samples else ""
    return write_form(pen, chosen) if isinstance(chosen, Form) else None


def write_form(pen: Pen, chosen: Form) -> Value | None:
    """Write a statement from a form."""
    fitting = pen.leaves(lambda tensor: not has_batch([tensor]))
    if chosen.params and not fitting:
        return None
    operands = [pen.choose(fitting) for _ in chosen.params]
    lines, names = [], {}
    for i, (operand, base) in enumerate(zip(operands, chosen.params, strict=True)):
        fitted = _fitted(f"{{{i}}}", operand.tensor.shape, base.shape)
        scaled = f'R.multiply({fitted}, R.const({_SCALE}, "float64"))'
        lines.append(f"{{name}}_x{i} = R.add({scaled}, {_literal(base)})")
        names[f"p{i}"] = f"{{name}}_x{i}"
    texts = [_renamed(line, names) for line in chosen.lines]
    lines += [f"{{name}}_{i} = {text}" for i, text in enumerate(texts[:-1])]
    kinds = tuple(map(Tensor, chosen.shapes))
    kind: Kind
    if chosen.leaves == ("",):
        lines.append(texts[-1])
        kind = kinds[0]
    else:
        lines.append(f"{{name}}_r = {texts[-1]}")
        ends = [f"{{name}}_r{leaf}" for leaf in chosen.leaves]
        kind = kinds if len(ends) > 1 else kinds[0]
        lines.append(f"({', '.join(ends)})" if len(ends) > 1 else ends[0])
    return pen.try_bind(
        "\n".join(lines),
        chosen.compute and _computed(chosen),
        operands,
        kind,
        _BOUND,
        operators=(chosen.operator,),
        is_smooth=chosen.is_smooth,
    )


def _computed(chosen: Form) -> Callable:
    def compute(torch: Any, *values: Any) -> Any:
        inputs = []
        for value, base in zip(values, chosen.params, strict=True):
            flat = value.reshape(-1)
            times = -(-base.size // flat.numel())
            fitted = flat.repeat(times)[: base.size].reshape(base.shape)
            inputs.append(fitted * _SCALE + torch.from_numpy(base))
        outputs = chosen.compute(torch, *inputs)  # type: ignore[misc]  # there is one
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    return compute


def _fitted(text: str, shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Return an expression that fits a tensor's elements to another shape, repeated or
    truncated."""
    if tuple(shape) == tuple(wanted):
        return text
    size, needed = math.prod(shape), math.prod(wanted)
    text = f"R.reshape({text}, R.shape([{size}]))" if len(shape) != 1 else text
    if size < needed:
        text = f"R.tile({text}, [{-(-needed // size)}])"
        size *= -(-needed // size)
    if size > needed:
        text = f"R.strided_slice({text}, axes=[0], begin=[0], end=[{needed}])"
    extents = ", ".join(map(str, wanted))
    return text if len(wanted) == 1 else f"R.reshape({text}, R.shape([{extents}]))"


def form(sample: Sample) -> Form:
    """Return the form of a sample.

    Raises
    ------
    NotDrawableError
        If the sample has no statement; the message says why.
    """
    if sample.within is not nullcontext:
        raise NotDrawableError("it runs only within a separate context")
    if sample.torch is None and not sample.smooth:
        raise NotDrawableError("it is at a kink, and PyTorch has no such operator")
    builder = _Builder(sample)
    lines, result = builder.lines()
    leaves = _program.float_leaves(result)
    shapes = []
    for _, leaf in leaves:
        if dtype_of(leaf) != "float64" or not isinstance(leaf.shape, relax.ShapeExpr):
            raise NotDrawableError(f"a result is of type {leaf}")
        shapes.append(tuple(int(dim) for dim in leaf.shape.values))
        if any(size % BATCH == 0 for size in shapes[-1]):
            raise NotDrawableError(f"a result has the shape {shapes[-1]}")
    if not shapes:
        raise NotDrawableError("no result is of floating point")
    return Form(
        sample.op,
        tuple(lines),
        tuple(_rounded(argument.value) for argument in builder.arguments),
        leaves=tuple("".join(f"[{i}]" for i in path) for path, _ in leaves),
        shapes=tuple(shapes),
        compute=builder.torch,
        is_smooth=sample.smooth,
    )


class _Builder:
    """Builds a sample as a function, and prints its bindings."""

    def __init__(self, sample: Sample):
        self.sample = sample
        self.params: list[relax.Var] = []
        self.literals: dict[str, str] = {}
        #: The inputs that stay parameters; they come first in ``params``.
        self.arguments: list[_program.Argument] = []
        self.inputs = _program.make_arguments(sample.inputs, None, {})
        self.torch = None if sample.torch is None else self.compute

    def compute(self, torch: Any, *values: Any) -> Any:
        """Compute the sample in PyTorch, from the values of its parameters."""

        def take(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple(map(take, item))
            own_values = [v for a, v in zip(self.arguments, values, strict=True) if a is item]
            return own_values[0] if own_values else torch.from_numpy(_rounded(item.value))

        arrays = [item for item in self.inputs if isinstance(item, (tuple, _program.Argument))]
        return self.sample.torch(torch, *map(take, arrays))  # type: ignore[misc]

    def lines(self) -> tuple[list[str], relax.Type]:
        """Return the right sides of the bindings, and the type of the result."""
        _, function = resolve(self.sample.function or self.sample.op)
        bb = relax.BlockBuilder()
        arguments = [self.argument(item) for item in self.inputs]
        with bb.function("probe", self.params):
            result = bb.emit(function(*arguments, **self.sample.attrs))
            bb.emit_func_output(result)
        function = self.without_constants(bb.get()["probe"])
        text = function.script(show_meta=False)
        body = _body(text)
        pairs = [line.strip().split(" = ", 1) for line in body.splitlines() if " = " in line]
        if "metadata[" in body or not pairs or "with R.dataflow" in body:
            raise NotDrawableError("it does not print as statements")
        _check_that_it_parses(text)
        names = {self.params[i].name: f"{{p{i}}}" for i in range(len(self.arguments))}
        names.update(self.literals)
        for i, (left, _) in enumerate(pairs):
            names[left.partition(":")[0]] = f"{{name}}_{i}"
        lines = [_replaced(right, names) for _, right in pairs]
        return lines, result.ty

    def argument(self, value: Any) -> Any:
        if isinstance(value, _program.Argument):
            return self.tensor(value)
        if isinstance(value, tuple) and _program.holds(value, _program.Argument):
            return relax.Tuple([self.argument(item) for item in value])
        return value

    def tensor(self, argument: _program.Argument) -> relax.Expr:
        if self.is_moved(argument):
            if argument.dtype != "float64" or not 0 < argument.value.size <= _LARGEST:
                raise NotDrawableError(f"{argument.name} is of type {argument.type}")
            _literal(argument.value)  # raises if it cannot be written
            self.arguments.append(argument)
            index = len(self.arguments) - 1
            self.params.insert(index, relax.Var(argument.name, argument.type))
            return self.params[index]
        return self.constant(argument.name, _rounded(argument.value), argument.type)

    def constant(self, name: str, value: np.ndarray, kind: relax.Type) -> relax.Var:
        self.literals[name] = _literal(value)
        self.params.append(relax.Var(name, kind))
        return self.params[-1]

    def is_moved(self, argument: _program.Argument) -> bool:
        if not argument.is_float:
            return False
        wrt = self.sample.wrt
        names = None if wrt is None else {w if isinstance(w, str) else f"x{w}" for w in wrt}
        return names is None or argument.name in names

    def without_constants(self, function: relax.Function) -> relax.Function:
        """Return a function with each constant replaced by a parameter."""
        builder = self

        @relax.expr_functor.mutator
        class Mutator(relax.PyExprMutator):
            def visit_generic_const_(self, op: Any) -> Any:
                value = constant_value(op)
                if value is None:
                    return op
                name = f"k{len(builder.literals)}"
                if value.size > _LARGEST:
                    raise NotDrawableError(f"it has a constant of the shape {value.shape}")
                return builder.constant(name, value, op.ty)

            visit_constant_ = visit_generic_const_  # its name in TVM 0.26

        body = Mutator().visit_expr(function.body)
        return relax.Function(self.params, body, ret_ty=function.ret_ty)


def _check_that_it_parses(text: str) -> None:
    """Refuse a function whose text does not parse back to itself, for example with
    ``lambda i: (i, 0)``.

    Arguments in another order are another example.
    """
    try:
        parsed = from_source(text).script(show_meta=False)
    except Exception:  # a diagnostic of the parser
        parsed = None
    if parsed is None or _body(parsed) != _body(text):
        raise NotDrawableError("TVM does not parse its own TVMScript back")


def _body(text: str) -> str:
    return re.split(r"^def .*:$", text, maxsplit=1, flags=re.MULTILINE)[1]


def _rounded(value: np.ndarray) -> np.ndarray:
    """Return an array with its floating-point numbers rounded to the written precision."""
    return np.array(np.round(value, 4) if value.dtype.kind == "f" else value)


def _literal(value: np.ndarray) -> str:
    if value.dtype.name == "bool":
        return f'R.astype(R.const({value.astype("int64").tolist()}, "int64"), "bool")'
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise NotDrawableError("it has a constant that is not finite")
    if value.dtype.kind == "f" and np.abs(value).max(initial=0.0) > _HIGHEST:
        raise NotDrawableError("it has large numbers")
    if value.size == 0 and value.ndim > 1:
        raise NotDrawableError(f"it has a constant of the shape {value.shape}")
    return f'R.const({value.tolist()}, "{value.dtype.name}")'


def _replaced(text: str, names: dict[str, str]) -> str:
    """Return the template of a text, with names replaced."""
    text = text.replace("{", "{{").replace("}", "}}")
    return re.sub(r"(?<![\w.\"])[a-z]\w*\b(?!\s*[=(])", lambda m: names.get(m[0], m[0]), text)


def _renamed(text: str, names: dict[str, str]) -> str:
    return re.sub(r"\{(p\d+)\}", lambda m: names[m[1]], text)
