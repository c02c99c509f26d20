"""Checks of a model that a file gives: versions, names, the order of nodes, and local functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import onnx

from .nodes import every_node, label, operands, opset_of, subgraphs

#: The most nodes of a model whose local functions are written out.
_MOST_NODES = 100_000


def check_versions(model: onnx.ModelProto) -> None:
    """Refuse versions of ONNX's operators that the installed package does not have."""
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset_of(model) <= newest:
        raise ValueError(
            f"the model has version {opset_of(model)} of ONNX's operators, but onnx "
            f"{onnx.__version__} has the versions 1 to {newest}; write the model again with one of "
            "these, or install another version of onnx"
        )


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse local functions that call each other in a cycle, or have too many nodes if they are
    written out."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple, int] = {}

    def called(nodes: Iterable[onnx.NodeProto]) -> list[tuple]:
        inner = [node for top in nodes for node in (top, *_within(top))]
        return [(node.domain, node.op_type, node.overload) for node in inner]

    def size(keys: list[tuple]) -> int:
        return sum(sizes.get(key, 1) for key in keys)

    waiting = {key: called(function.node) for key, function in functions.items()}
    while waiting:
        ready = [key for key, keys in waiting.items() if not any(k in waiting for k in keys)]
        if not ready:
            names = ", ".join(key[1] for key in waiting)
            raise ValueError(f"local functions of the model call each other in a cycle: {names}")
        for key in ready:
            sizes[key] = size(waiting.pop(key))
    total = size(called(model.graph.node))
    if functions and total > _MOST_NODES:
        largest = max(sizes, key=lambda key: sizes[key])
        raise ValueError(
            f"the model has {total} nodes if its local functions are written out, and at most "
            f"{_MOST_NODES} are imported; the function {largest[1]} has {sizes[largest]}"
        )


def _within(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    for inner in subgraphs(node):
        yield from every_node(inner)


def check_graph(graph: onnx.GraphProto, outer: Set[str] = frozenset()) -> None:
    """Refuse values that several nodes make, or none, and nodes in another order than their
    computation.

    Parameters
    ----------
    graph : onnx.GraphProto
        The graph.
    outer : Set[str]
        The names of the values of the graphs around it.
    """
    made: dict[str, str] = {}
    initializers = [tensor.name for tensor in graph.initializer]
    initializers += [sparse.values.name for sparse in graph.sparse_initializer]
    _enter(made, initializers, "an initializer")
    # An initializer may be the default of an input of the same name.
    _enter(made, (v.name for v in graph.input if v.name not in set(initializers)), "an input")
    given = set(made)
    for node in graph.node:
        _enter(made, filter(None, node.output), f"the node {node.op_type} {label(node)!r}")
    known = outer | set(made)
    for node in graph.node:
        for name in operands(node):
            if name not in known:
                raise ValueError(
                    f"the node {node.op_type} {label(node)!r} reads {name!r}, which is no input, "
                    "no initializer, and no result of a node"
                )
    for output in graph.output:
        if output.name not in known:
            raise ValueError(f"no node makes the output {output.name!r} of the graph {graph.name}")
    _check_order(graph, given | outer)
    for node in graph.node:
        for inner in subgraphs(node):
            check_graph(inner, known)


def _enter(made: dict[str, str], names: Iterable[str], maker: str) -> None:
    for name in names:
        if name in made:
            raise ValueError(
                f"the value {name!r} is made twice, by {made[name]} and by {maker}; give one of "
                "them another name"
            )
        made[name] = maker


def _check_order(graph: onnx.GraphProto, given: Set[str]) -> None:
    """Refuse nodes that read results of later nodes, or of each other in a cycle."""
    owners = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    sources = [
        {owners[name]: name for name in operands(node) if name in owners and name not in given}
        for node in graph.node
    ]
    late = [(i, j) for i, own in enumerate(sources) for j in own if j >= i]
    if not late:
        return
    waiting = dict(enumerate(sources))
    while ready := [i for i, own in waiting.items() if not any(j in waiting for j in own)]:
        for i in ready:
            del waiting[i]
    if waiting:
        names = [repr(label(graph.node[i])) for i in waiting]
        raise ValueError(
            f"nodes of the graph {graph.name} read each other's results in a cycle, among "
            f"{', '.join(names[:5])}"
        )
    reader, maker = late[0]
    raise ValueError(
        f"the node {graph.node[reader].op_type} {label(graph.node[reader])!r} reads "
        f"{sources[reader][maker]!r}, which the later node {graph.node[maker].op_type} "
        f"{label(graph.node[maker])!r} makes; sort the nodes, for example by "
        "onnxruntime.transformers.onnx_model.OnnxModel(model).topological_sort()"
    )
