"""Graphs of torch.export: regions without gradients, and checkpointed sections."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection

import torch
from torch import fx

from .._operators import GRADIENT

#: The mark of the nodes of a region without gradients.
WITHOUT_GRADIENT = "relax_grad.without_gradient"


def stop_gradients_of_no_grad(module: fx.GraphModule) -> None:
    """Write out the regions with and without gradients, and detach the operands of the latter.

    Tensors that the region writes stay as they are: :mod:`._aliases` refuses those that a gradient
    reaches. Decomposition would write the regions out too, but drop the annotations of their nodes.
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
        for inner in region.graph.nodes:
            if inner.op == "get_attr":
                name = inner.target
                while hasattr(module, name):
                    name += "_"
                setattr(module, name, getattr(region, inner.target))
                values[inner] = module.graph.get_attr(name)
                values[inner].meta.update(inner.meta)
            elif inner.op == "call_function":
                values[inner] = module.graph.node_copy(inner, values.__getitem__)
                values[inner].meta[WITHOUT_GRADIENT] = node.args[0] is False
    results = fx.node.map_arg(region.graph.output_node().args[0], values.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    return [values[inner] for inner in region.graph.nodes if inner.op == "call_function"]


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
    """Tell whether a node of a region without gradients has one: within the model, or in a region
    with gradients."""
    return node.target is GRADIENT or (_is_region(node) and node.args[0] is True)


def _writes(node: fx.Node, operand: fx.Node) -> bool:
    """Tell whether a node writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    operands = {
        **dict(zip((argument.name for argument in schema.arguments), node.args, strict=False))
    }
    operands.update(node.kwargs)
    return any(
        operands.get(argument.name) is operand
        and argument.alias_info is not None
        and argument.alias_info.is_write
        for argument in schema.arguments
    )


def start_checkpoint(value: torch.Tensor) -> torch.Tensor:
    """Mark the input of a checkpointed section in a graph; converted, never called."""


def end_checkpoint(value: torch.Tensor) -> torch.Tensor:
    """Mark the result of a checkpointed section in a graph; converted, never called."""


def keep_only(module: fx.GraphModule, annotations: Collection[str]) -> None:
    """Remove the other annotations of nodes; torch.export fails where the annotations of branches
    differ."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                custom = node.meta.pop("custom", None) or {}
                kept = {key: entry for key, entry in custom.items() if key in annotations}
                if kept:
                    node.meta["custom"] = kept


def mark_checkpoints(graph: fx.Graph, annotation: str) -> None:
    """Insert the marks of checkpointed sections, whose nodes have an annotation with the number of
    the section."""
    sections: dict[int, list[fx.Node]] = defaultdict(list)
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        section = (node.meta.get("custom") or {}).get(annotation)
        if node.target is operator.getitem:
            section = number.get(node.args[0])
        if section is not None and node.op == "call_function":
            number[node] = section
            sections[section].append(node)
    for section in sections.values():
        inside = set(section)
        operands = {operand: None for node in section for operand in node.all_input_nodes}
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


def _insert(graph: fx.Graph, mark: Callable, node: fx.Node, chosen: Callable) -> None:
    """Let the chosen users of a node take its mark."""
    marked = graph.call_function(mark, (node,))
    marked.meta.update(node.meta)
    node.replace_all_uses_with(marked, lambda user: user is not marked and chosen(user))
