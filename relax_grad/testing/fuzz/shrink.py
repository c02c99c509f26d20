"""Shrinking a program that fails, as long as it fails in the same way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from . import search
from .script import (
    Body,
    Call,
    Function,
    If,
    Let,
    Program,
    Statement,
    Tensor,
    Value,
    bodies_of,
    flat,
)


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a smaller program that fails in the same way.

    Parameters
    ----------
    program : Program
        A program that fails.
    fails : Callable[[Program], bool]
        Tells whether a program fails in the same way; raises ``TimeoutError`` to end the search.
    """
    unused = False
    tidy = cleaned(program)
    try:
        # The failure may be in unused statements. These are then removed one by one, not all at
        # once.
        unused = size(tidy) < size(program) and not fails(tidy)
    except TimeoutError:
        return program
    program, sound = (program, [tidy]) if unused else (tidy, [])
    return search.smallest(
        program, fails, lambda candidate: candidates(candidate, unused), _identity, sound
    )


def _identity(program: Program) -> tuple:
    return program.source("main"), tuple(value.name for value in program.wrt), program.target


def size(program: Program) -> tuple[int, ...]:
    """Return the sizes that the search minimises, the most important first."""
    statements = list(program.statements())
    return (
        sum(not isinstance(item, Let) for item in statements),
        sum(1 + item.template.count("\n") for item in statements if isinstance(item, Let)),
        len(program.main.body.statements),
        len(program.main.params) + len(program.wrt) + len(program.target),
        int(program.is_symbolic) + (len(set(program.segments)) > 1),
    )


def candidates(program: Program, unused: bool = False) -> Iterator[Program]:
    """Yield smaller programs, roughly the smallest first; ``unused`` keeps unused statements."""
    limit = size(program)
    for candidate in _candidates(program):
        try:
            tidy = cleaned(candidate, unused)
        except _NothingLeftError:
            continue
        if size(tidy) < limit:
            yield tidy


class _NothingLeftError(Exception):
    """A program has no variable to differentiate with respect to."""


def _candidates(program: Program) -> Iterator[Program]:
    statements = program.main.body.statements
    kept = [statement for statement in statements if not isinstance(statement, Function)]
    # Shorten the end: the sum of an earlier value becomes the result.
    for let in kept[:-1]:
        yield _ending(program, let)
    # Shorten the start: parameters replace statements, the last ones first.
    names = (f"y{i}" for i in itertools.count())
    used = {param.name for param in program.main.params}
    for let in reversed(kept[:-1]):
        if _is_simple(let.kind):
            name = next(name for name in names if name not in used)
            yield _with_parameter(program, let, Value(name, let.kind))
    for let in reversed(kept):
        yield from _bypassed(program, let)
    yield from _lessened(program)
    for let in reversed(kept):
        yield from _inlined(program, let)
    for let in reversed(kept):
        if isinstance(let, If):
            yield from _emptied(program, let)
    if len(program.wrt) > 1:
        for value in program.wrt:
            yield replace(program, wrt=(value,))
    if program.is_symbolic:
        yield replace(program, is_symbolic=False)
    if not all(program.segments):
        yield replace(program, segments=(True,) * len(program.segments))


def _is_simple(kind: Any) -> bool:
    return all(tensor.dtype in ("float64", "bool") for tensor in flat(kind))


def _ending(program: Program, last: Let | If | Call) -> Program:
    """Return the program up to a statement, with the sum of its first tensor as the result."""
    body = program.main.body
    index = body.statements.index(last)
    leaf = next((v for v in Value(last.name, last.kind).leaves() if v.tensor.is_float), None)
    if leaf is None:
        return program
    end = Let("loss", "R.sum({0})", lambda t, x: x.sum(), (leaf,), Tensor(()))
    if leaf.tensor.shape == ():
        end = Let("loss", "{0}", lambda t, x: x, (leaf,), Tensor(()))
    statements = (*body.statements[: index + 1], end)
    segments = (*program.segments[: index + 1], True)
    result = Body(statements, Value("loss", Tensor(())))
    main = replace(program.main, body=result)
    return replace(program, main=main, segments=segments, target=())


def _with_parameter(program: Program, statement: Any, param: Value) -> Program:
    main = replace(program.main, params=(*program.main.params, param))
    program = _without(replace(program, main=main), statement)
    wrt = program.wrt if "bool" in {t.dtype for t in flat(param.kind)} else (*program.wrt, param)
    return _substituted(replace(program, wrt=wrt), statement.name, param)


def _bypassed(program: Program, statement: Any) -> Iterator[Program]:
    """Yield programs with a statement replaced by an operand or a parameter."""
    operands = list(getattr(statement, "operands", ()))
    for value in (*operands, *program.main.params):
        for element in (value, *value.elements()):
            if element.kind == statement.kind and element.name != statement.name:
                yield _substituted(_without(program, statement), statement.name, element)


def _inlined(program: Program, statement: Any) -> Iterator[Program]:
    """Yield programs with a conditional replaced by a branch, or a call by the body of its
    function."""
    if isinstance(statement, If):
        for branch in statement.branches:
            yield _spliced(program, statement, branch.statements, branch.result)
    elif isinstance(statement, Call):
        function = statement.function
        mapping = dict(zip((p.name for p in function.params), statement.operands, strict=True))
        body = _renamed(function.body, mapping, f"_{statement.name}")
        yield _spliced(program, statement, body.statements, body.result)


def _lessened(program: Program) -> Iterator[Program]:
    """Yield programs without one of the unused statements, of the program or of a branch."""
    body = program.main.body
    used: set[str] = {body.result.name}
    for inner in body.statements:
        _uses(inner, used, used)
    for inner in reversed(body.statements):
        if inner.name not in used:
            yield _without(program, inner)
        elif isinstance(inner, If):
            yield from (_replaced(program, smaller) for smaller in _lessened_branches(inner, used))


def _lessened_branches(statement: If, used: Collection[str]) -> Iterator[If]:
    for i, branch in enumerate(statement.branches):
        for at, inner in reversed(list(enumerate(branch.statements))):
            before, behind = branch.statements[:at], branch.statements[at + 1 :]
            others: list[tuple[Statement, ...]] = [()] if inner.name not in used else []
            if isinstance(inner, If):
                others += [(nested,) for nested in _lessened_branches(inner, used)]
            for other in others:
                smaller = Body((*before, *other, *behind), branch.result)
                yield statement.with_branch(i, smaller)


def _emptied(program: Program, statement: If) -> Iterator[Program]:
    """Yield programs with a branch that returns a parameter of the program, or an earlier value of
    the branch."""
    for i, branch in enumerate(statement.branches):
        values = [
            Value(inner.name, inner.kind)
            for inner in branch.statements
            if not isinstance(inner, Function)
        ]
        for value in (*program.main.params, *values[:-1]):
            for element in (value, *value.elements()):
                if element.kind == statement.kind and element != branch.result:
                    emptied = statement.with_branch(i, Body(branch.statements, element))
                    yield _replaced(program, emptied)


def _replaced(program: Program, statement: Any) -> Program:
    """Return a program whose statement of the same name is replaced."""
    body = program.main.body
    statements = tuple(statement if s.name == statement.name else s for s in body.statements)
    return replace(program, main=replace(program.main, body=Body(statements, body.result)))


def _spliced(program: Program, statement: Any, inner: Any, result: Value) -> Program:
    body = program.main.body
    index = body.statements.index(statement)
    statements = (*body.statements[:index], *inner, *body.statements[index + 1 :])
    segments = (False,) * len(statements)
    main = replace(program.main, body=Body(statements, body.result))
    return _substituted(replace(program, main=main, segments=segments), statement.name, result)


def _without(program: Program, statement: Any) -> Program:
    body = program.main.body
    index = body.statements.index(statement)
    statements = body.statements[:index] + body.statements[index + 1 :]
    segments = program.segments[:index] + program.segments[index + 1 :]
    main = replace(program.main, body=Body(statements, body.result))
    wrt = tuple(value for value in program.wrt if value.name != statement.name)
    return replace(program, main=main, segments=segments, wrt=wrt)


def _substituted(program: Program, name: str, value: Value) -> Program:
    body = _renamed(program.main.body, {name: value}, "")
    wrt = tuple(variable for variable in program.wrt if variable.name != name)
    return replace(program, main=replace(program.main, body=body), wrt=wrt)


def _renamed(body: Body, mapping: dict[str, Value], suffix: str) -> Body:
    """Return a body with variables replaced by values, and a suffix added to the names that it
    defines."""
    mapping = dict(mapping)
    statements = []
    for statement in body.statements:
        renamed = _with_operands(statement, mapping, suffix)
        if suffix:
            renamed = replace(renamed, name=statement.name + suffix)
            if not isinstance(statement, Function):
                mapping[statement.name] = Value(renamed.name, statement.kind)
        statements.append(renamed)
    return Body(tuple(statements), _mapped(body.result, mapping))


def _with_operands(statement: Any, mapping: dict[str, Value], suffix: str) -> Any:
    if isinstance(statement, If):
        renamed = statement.with_branches(lambda branch: _renamed(branch, mapping, suffix))
        return replace(renamed, condition=_mapped(statement.condition, mapping))
    if isinstance(statement, Function):
        return replace(statement, body=_renamed(statement.body, mapping, suffix))
    operands = tuple(_mapped(operand, mapping) for operand in statement.operands)
    if isinstance(statement, Call) and statement.function.is_local:
        function = _with_operands(statement.function, mapping, suffix)
        return replace(statement, operands=operands, function=function)
    return replace(statement, operands=operands)


def _mapped(value: Value, mapping: dict[str, Value]) -> Value:
    replacement = mapping.get(value.name)
    if replacement is None:
        return value
    return Value(replacement.name, value.kind, value.bound, (*replacement.path, *value.path))


def cleaned(program: Program, unused: bool = False) -> Program:
    """Return a program without the statements, parameters and functions that its result does not
    need.

    Parameters
    ----------
    program : Program
        A program.
    unused : bool
        Whether to keep unused statements. Unused parameters and functions are removed in any case.

    Raises
    ------
    _NothingLeftError
        If no variable to differentiate with respect to is left.
    """
    body = program.main.body
    needed = {body.result.name}
    functions: set[str] = set()
    statements: list[Statement] = []
    segments: list[bool] = []
    pairs = zip(body.statements, program.segments, strict=True)
    for statement, is_dataflow in reversed(list(pairs)):
        if unused or statement.name in needed or statement.name in functions:
            if isinstance(statement, If) and not unused:
                statement = statement.with_branches(_needed)
            statements.insert(0, statement)
            segments.insert(0, is_dataflow)
            _uses(statement, needed, functions)
    params = tuple(param for param in program.main.params if param.name in needed)
    known = {param.name for param in params} | {statement.name for statement in statements}
    wrt = tuple(value for value in program.wrt if value.name in known)
    if not wrt:
        wrt = tuple(p for p in params if any(t.is_float for t in flat(p.kind)))
    if not wrt:
        raise _NothingLeftError
    main = replace(program.main, params=params, body=Body(tuple(statements), body.result))
    kept = tuple(function for function in program.functions if function.name in functions)
    return replace(program, main=main, functions=kept, segments=tuple(segments), wrt=wrt)


def _needed(body: Body) -> Body:
    """Return a branch without the statements that its result does not need."""
    names, functions = {body.result.name}, set[str]()
    statements: list[Statement] = []
    for statement in reversed(body.statements):
        if statement.name in names or statement.name in functions:
            if isinstance(statement, If):
                statement = statement.with_branches(_needed)
            statements.insert(0, statement)
            _uses(statement, names, functions)
    return Body(tuple(statements), body.result)


def _uses(statement: Statement, names: set[str], functions: set[str]) -> None:
    """Add the names that a statement uses, and the names in the functions that it calls."""
    if isinstance(statement, If):
        names.add(statement.condition.name)
    elif not isinstance(statement, Function):
        names.update(operand.name for operand in statement.operands)
    bodies = bodies_of(statement)
    if isinstance(statement, Call):
        functions.add(statement.function.name)
        bodies = (statement.function.body,)
    for body in bodies:
        names.add(body.result.name)
        for inner in body.statements:
            _uses(inner, names, functions)
