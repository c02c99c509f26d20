"""Graphs of torch.export: regions without gradients, checkpointed sections, and messages with the user's lines."""

from __future__ import annotations

import operator
import os
import re
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import fx

from ...errors import UnsupportedOperatorError
from ._operators import GRADIENT

#: The mark of the nodes of a region without gradients.
WITHOUT_GRADIENT = "relax_grad.without_gradient"

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(\n\s+(?P<code>.*))?'
)


class Problem(NamedTuple):
    """An operation that cannot be imported.

    Attributes
    ----------
    operator : str
        The name of its operator.
    reason : str
        The reason, and a way to go on.
    line : str
        The line of the user's code that made it.
    """

    operator: str
    reason: str
    line: str


def problem(node: fx.Node, reason: str) -> Problem:
    """Return the problem of a node."""
    return Problem(operator_of(node), reason, line_of(node))


def operator_of(node: fx.Node) -> str:
    """Return the name of the operator of a node for a message."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def is_user_file(name: str) -> bool:
    """Tell whether a file is outside PyTorch, this package, and Python's standard library."""
    is_standard = name.startswith(_LIBRARY) and "-packages" not in name
    return not (name.startswith(_OWN) or is_standard or name.startswith("<"))


def user_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """Return the innermost line of code outside PyTorch among the frames of a stack."""
    found = [each for each in frames if is_user_file(each.filename)]
    if not found:
        return None
    return f"{found[-1].filename}:{found[-1].lineno}, in {found[-1].name}: {found[-1].line}"


def line_of(node: fx.Node) -> str:
    """Return the innermost line of code outside PyTorch that made a node, and its submodule."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    frames = [each for each in frames if is_user_file(each["file"])]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = ".".join(str(stack[-1][0]).split(".")[1:]).removeprefix("module") if stack else ""
    where = f"the submodule {path.removeprefix('.')}" if path.removeprefix(".") else ""
    if frames:
        frame = frames[-1]
        code = (frame["code"] or "").strip().removeprefix("code: ")
        line = (
            f"{frame['file']}:{frame['line']}, in {frame['function']}{f': {code}' if code else ''}"
        )
        return f"{line} ({where})" if where else line
    return where or "an unknown line"


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error that lists problems, if there are any; those of one operator in one line are listed once."""
    text = text_of(problems)
    if text:
        raise UnsupportedOperatorError(
            "these operations of the model cannot be imported with the meaning that they have in PyTorch:\n"
            + text
            + "\nChange these lines, or give converters of one's own: custom_convert_map={...}."
        )


def text_of(problems: Iterable[Problem]) -> str:
    """Return a list of problems as text."""
    unique = {}
    for each in problems:
        unique.setdefault((each.operator, each.line), each)
    return "\n".join(
        f"  {each.operator}: {each.reason}\n    at {each.line}" for each in unique.values()
    )


def stop_gradients_of_no_grad(module: fx.GraphModule) -> None:
    """Write out the regions with and without gradients, and detach the operands of the latter.

    Tensors that the region writes stay as they are: :mod:`._aliases` refuses those that a gradient reaches.
    Decomposition would write the regions out too, but drop the annotations of their nodes.
    """
    for inner in list(module.modules()):
        if not isinstance(inner, fx.GraphModule):
            continue
        regions = [node for node in inner.graph.nodes if _is_region(node)]
        while regions:
            node = regions.pop()
            region = getattr(inner, node.args[1].target)
            if node.args[0] is False:
                _detach_inputs(region)
            regions += filter(_is_region, _write_out(inner, node, region))
        inner.recompile()


def _is_region(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name == "wrap_with_set_grad_enabled"


def _write_out(module: fx.GraphModule, node: fx.Node, region: fx.GraphModule) -> list[fx.Node]:
    """Replace the call of a region by the nodes of the region, and return them."""
    places = region.graph.find_nodes(op="placeholder")
    values = dict(zip(places, node.args[2:], strict=True))
    with module.graph.inserting_before(node):
        for each in region.graph.nodes:
            if each.op == "get_attr":
                name = each.target
                while hasattr(module, name):
                    name += "_"
                setattr(module, name, getattr(region, each.target))
                values[each] = module.graph.get_attr(name)
                values[each].meta.update(each.meta)
            elif each.op == "call_function":
                values[each] = module.graph.node_copy(each, values.__getitem__)
                values[each].meta[WITHOUT_GRADIENT] = node.args[0] is False
    results = fx.node.map_arg(region.graph.output_node().args[0], values.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    return [values[each] for each in region.graph.nodes if each.op == "call_function"]


def _detach_inputs(region: fx.GraphModule) -> None:
    graph = region.graph
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for place in graph.find_nodes(op="placeholder"):
            value = place.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if any(_writes(user, place) for user in place.users):
                continue
            detached = graph.call_function(torch.ops.aten.detach.default, (place,))
            detached.meta.update(place.meta)
            detached.meta["custom"] = next(iter(place.users)).meta.get("custom")
            place.replace_all_uses_with(
                detached, lambda user, own=detached: user is not own and not _records(user)
            )
    region.recompile()


def _records(node: fx.Node) -> bool:
    """Tell whether a node of a region without gradients has one: within the model, or in a region with gradients."""
    return node.target is GRADIENT or (_is_region(node) and node.args[0] is True)


def _writes(node: fx.Node, operand: fx.Node) -> bool:
    """Tell whether a node writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = {**dict(zip((each.name for each in schema.arguments), node.args, strict=False))}
    given.update(node.kwargs)
    return any(
        given.get(each.name) is operand and each.alias_info is not None and each.alias_info.is_write
        for each in schema.arguments
    )


def start_checkpoint(value):
    """Mark the input of a checkpointed section in a graph; converted, never called."""


def end_checkpoint(value):
    """Mark the result of a checkpointed section in a graph; converted, never called."""


def keep_only(module: fx.GraphModule, annotations: Collection[str]) -> None:
    """Remove the other annotations of nodes; torch.export fails where those of a branch differ."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                custom = node.meta.pop("custom", None) or {}
                kept = {key: each for key, each in custom.items() if key in annotations}
                if kept:
                    node.meta["custom"] = kept


def mark_checkpoints(graph: fx.Graph, annotation: str) -> None:
    """Insert the marks of checkpointed sections, whose nodes have an annotation with the number of the section."""
    sections: dict[int, list[fx.Node]] = defaultdict(list)
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found = (node.meta.get("custom") or {}).get(annotation)
        if node.target is operator.getitem:
            found = number.get(node.args[0])
        if found is not None and node.op == "call_function":
            number[node] = found
            sections[found].append(node)
    for section in sections.values():
        inside = set(section)
        operands = {each: None for node in section for each in node.all_input_nodes}
        for operand in operands:
            if operand not in inside and operand.op != "get_attr" and _is_tensor(operand):
                user = next(node for node in section if operand in node.all_input_nodes)
                with graph.inserting_before(user):
                    _insert(graph, start_checkpoint, operand, inside.__contains__)
        for node in section:
            if _is_tensor(node) and any(user not in inside for user in node.users):
                with graph.inserting_after(node):
                    _insert(graph, end_checkpoint, node, lambda user, own=inside: user not in own)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _insert(graph: fx.Graph, mark, node: fx.Node, chosen) -> None:
    """Let the chosen users of a node take its mark."""
    marked = graph.call_function(mark, (node,))
    marked.meta.update(node.meta)
    node.replace_all_uses_with(marked, lambda user: user is not marked and chosen(user))
