"""Shrinking a program that fails, as long as it is valid and fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from .. import search
from . import language as ir
from .expressions import is_float
from .programs import is_valid


def shrink(program: ir.Program, fails: Callable[[ir.Program], bool]) -> ir.Program:
    """Return a smaller program that fails in the same way.

    Parameters
    ----------
    program : Program
        A program that fails.
    fails : Callable[[Program], bool]
        Tells whether a program fails in the same way; raises ``TimeoutError`` to end the search.
    """
    return search.smallest(program, fails, candidates, lambda tree: tree)


def size(program: ir.Program) -> tuple[int, ...]:
    """Return the sizes that the search minimises, the most important first."""
    called = [program.function(s.function) for s in program.steps if isinstance(s, ir.Call)]
    trees = list(ir.nodes(tuple(f.body for f in called)))
    return (
        len(program.steps),
        sum(isinstance(node, (ir.Store, ir.Block, ir.For, ir.If, ir.While)) for node in trees),
        len(trees),
        sum(not _is_plain(node) for node in trees),
        len(program.params) + len(program.results) + sum(len(f.buffers) for f in called),
        int(program.is_symbolic) + int(program.is_dataflow),
    )


def _is_plain(node: Any) -> bool:
    if isinstance(node, ir.For):
        return node.kind == "serial"
    return not isinstance(node, ir.Axis) or node.kind != "opaque"


def candidates(program: ir.Program) -> Iterator[ir.Program]:
    """Yield smaller valid programs, potentially much smaller ones first."""
    limit = size(program)
    for candidate in _candidates(program):
        tidy = cleaned(candidate)
        if tidy.results and tidy.steps and size(tidy) < limit and _holds(tidy):
            yield tidy


def _holds(program: ir.Program) -> bool:
    """Tell whether a program is valid and has no loop of extent 0."""
    trees = ir.nodes(tuple(function.body for function in program.functions))
    if any(isinstance(node, ir.For) and node.extent == ir.Const(0, ir.INDEX) for node in trees):
        return False
    try:
        return is_valid(program)
    except (KeyError, ValueError, IndexError, TypeError):  # removed names or shapes
        return False


def cleaned(program: ir.Program) -> ir.Program:
    """Return a program without unused steps, tensors and functions."""
    needed = set(program.results)
    steps: list = []
    for step in reversed(program.steps):
        if any(r.name in needed for r in step.results):
            steps.insert(0, step)
            needed.update(step.operands)
    called = {step.function for step in steps if isinstance(step, ir.Call)}
    return replace(
        program,
        steps=tuple(steps),
        params=tuple(p for p in program.params if p.name in needed),
        functions=tuple(_without_unused(f) for f in program.functions if f.name in called),
        kinds=frozenset(),
    )


def _without_unused(function: ir.PrimFunc) -> ir.PrimFunc:
    used = {
        node.buffer for node in ir.nodes(function.body) if isinstance(node, (ir.Load, ir.Store))
    }
    return replace(function, allocated=tuple(b for b in function.allocated if b.name in used))


def _candidates(program: ir.Program) -> Iterator[ir.Program]:
    for i in reversed(range(len(program.steps))):
        yield _without_step(program, i)
        yield _by_parameters(program, i)
    if len(program.results) > 1:
        for name in program.results:
            yield replace(program, results=tuple(r for r in program.results if r != name))
            yield replace(program, results=(name,))
    for function in program.functions:
        for smaller in _smaller(function):
            yield _replaced(program, smaller)
    for i, step in enumerate(program.steps):
        if isinstance(step, ir.Call):
            yield from _without_tensors(program, i, step)
    if program.is_symbolic:
        yield replace(program, is_symbolic=False)
    if program.is_dataflow:
        yield replace(program, is_dataflow=False)


def _replaced(program: ir.Program, function: ir.PrimFunc) -> ir.Program:
    functions = tuple(function if f.name == function.name else f for f in program.functions)
    return replace(program, functions=functions)


def _without_step(program: ir.Program, at: int) -> ir.Program:
    """Return a program without a step; an operand of the same type, if any, replaces each of its
    results."""
    step, known = program.steps[at], program.tensors()
    steps = program.steps[:at] + program.steps[at + 1 :]
    results = program.results
    for result in step.results:
        other = next(
            (
                name
                for name in step.operands
                if (known[name].shape, known[name].dtype) == (result.shape, result.dtype)
            ),
            None,
        )
        steps = tuple(
            replace(
                s, operands=tuple(other if o == result.name and other else o for o in s.operands)
            )
            for s in steps
        )
        results = tuple(r for r in results if r != result.name)
    read = {name for s in steps for name in s.operands}
    results = results or tuple(r.name for s in steps for r in s.results if r.name not in read)
    return replace(program, steps=steps, results=results)


def _by_parameters(program: ir.Program, at: int) -> ir.Program:
    """Return a program with the results of a step replaced by parameters."""
    step = program.steps[at]
    read = {name for s in program.steps[at + 1 :] for name in s.operands}
    params = tuple(r for r in step.results if r.name in read)
    names = {r.name for r in step.results}
    results = tuple(r for r in program.results if r not in names)
    steps = program.steps[:at] + program.steps[at + 1 :]
    return replace(program, steps=steps, params=(*program.params, *params), results=results)


def _without_tensors(program: ir.Program, at: int, call: ir.Call) -> Iterator[ir.Program]:
    """Yield programs without one of the unused arguments or results of a function."""
    if sum(isinstance(s, ir.Call) and s.function == call.function for s in program.steps) > 1:
        return
    function = program.function(call.function)
    used = {
        node.buffer for node in ir.nodes(function.body) if isinstance(node, (ir.Load, ir.Store))
    }

    def put(new: ir.PrimFunc, changed: ir.Call) -> ir.Program:
        steps = (*program.steps[:at], changed, *program.steps[at + 1 :])
        return _replaced(replace(program, steps=steps), new)

    for i, buffer in enumerate(function.inputs):
        if buffer.name not in used and i not in call.inplace and len(call.operands) > 1:
            yield put(
                replace(function, inputs=_but(function.inputs, i)),
                replace(
                    call,
                    operands=_but(call.operands, i),
                    inplace=tuple(j - (j > i) for j in call.inplace),
                ),
            )
    read = {name for s in program.steps for name in s.operands} | set(program.results)
    fresh = [k for k, j in enumerate(call.inplace or [-1] * len(call.results)) if j < 0]
    for i, buffer in enumerate(function.outputs):
        k = fresh[i]
        if call.results[k].name in read or len(call.results) == 1:
            continue
        changed = replace(call, results=_but(call.results, k), inplace=_but(call.inplace, k))
        if not any(j >= 0 for j in changed.inplace):
            changed = replace(changed, inplace=())
        smaller = replace(function, outputs=_but(function.outputs, i))
        # The writes to it may still matter.
        yield put(replace(smaller, allocated=(*smaller.allocated, buffer)), changed)


def _but(items: tuple, at: int) -> tuple:
    return items[:at] + items[at + 1 :]


# Functions


def _smaller(function: ir.PrimFunc) -> Iterator[ir.PrimFunc]:
    body = function.body

    def put(new: Any) -> ir.PrimFunc:
        return replace(function, body=new)

    for length in (len(body) // 2, len(body) // 4):
        for start in range(0, len(body), length) if length > 1 else ():
            yield put(body[:start] + body[start + length :])
    for i in reversed(range(len(body))):
        yield put(_but(body, i))
    for node, rebuild in ir.positions(body, put):
        for new in _in_place_of(node):
            yield rebuild(new)


def _in_place_of(node: Any) -> Iterator:
    """Yield smaller nodes, or tuples of statements, that may replace a node."""
    if isinstance(node, (ir.Store, ir.Bind, ir.If, ir.While, ir.For, ir.Block)):
        yield ()
    if isinstance(node, ir.If):
        yield node.body
        yield node.otherwise
    elif isinstance(node, ir.For):
        if node.kind != "serial":
            yield replace(node, kind="serial")
        yield tuple(_named(statement, node.name, node.start) for statement in node.body)
    elif isinstance(node, ir.Block):
        yield from _smaller_blocks(node)
    elif isinstance(node, ir.Axis):
        if node.kind == "opaque":
            yield replace(node, kind="spatial")
    elif isinstance(node, (ir.Const, ir.Name, ir.Size)):
        return
    elif isinstance(node, (ir.Load, ir.Op, ir.Let)):
        if node.dtype == ir.INDEX:
            yield ir.Const(0, ir.INDEX)
            yield from (a for a in getattr(node, "args", ()) if a.dtype == ir.INDEX)
            return
        value = 1.0 if is_float(node.dtype) else 1
        if isinstance(node, ir.Op):
            yield from (arg for arg in node.args if arg.dtype == node.dtype)
        yield ir.Const(value, node.dtype)
        if isinstance(node, ir.Let):
            yield node.value if node.value.dtype == node.dtype else node.body
            yield _named(node.body, node.name, node.value)


def _smaller_blocks(block: ir.Block) -> Iterator:
    if block.where is not None:
        yield replace(block, where=None)
    if block.init:
        yield replace(block, init=())
    if not block.axes:
        yield block.body
    for i, axis in enumerate(block.axes):
        body = tuple(_named(statement, axis.name, axis.start) for statement in block.body)
        init = tuple(_named(statement, axis.name, axis.start) for statement in block.init)
        yield replace(block, axes=_but(block.axes, i), body=body, init=init)
        if not isinstance(axis.value, (ir.Name, ir.Const)):
            names = [n for n in ir.nodes(axis.value) if isinstance(n, ir.Name)]
            for name in names:
                yield replace(
                    block,
                    axes=(*block.axes[:i], replace(axis, value=name), *block.axes[i + 1 :]),
                )


def _named(tree: Any, name: str, value: Any) -> Any:
    """Return a tree with a name replaced by an expression."""
    if isinstance(tree, ir.Name):
        return value if tree.name == name else tree
    if isinstance(tree, tuple):
        return tuple(_named(item, name, value) for item in tree)
    if not hasattr(tree, "__dataclass_fields__"):
        return tree
    return replace(
        tree,
        **{field: _named(getattr(tree, field), name, value) for field in tree.__dataclass_fields__},
    )
