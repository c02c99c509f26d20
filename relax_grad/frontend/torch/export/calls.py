"""Decomposition of a plain graph call by call, each kind of call once.

``run_decompositions`` traces the whole graph twice, which takes as long as the export itself. But
most calls of a graph stay as they are, and the others repeat, because the layers of a network are
alike. Therefore ``run_decompositions`` gets a program of one call of each kind, and its results are
copied to the other calls. Graphs that are not plain are decomposed as a whole.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from .._converters import CONVERTERS
from .writes import writes

_ATEN = torch.ops.aten

#: Views that a trace leaves as they are.
_VIEWS = {
    *(_ATEN.view.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.unsqueeze.default),
    *(_ATEN.squeeze.dim, _ATEN.split.Tensor, _ATEN.split_with_sizes.default),
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.expand.default),
}

#: Calls whose decomposition depends on more than the types of their operands: on the values of
#: constants, or on memory.
_REFUSED = {
    *(_ATEN.lift_fresh_copy.default, _ATEN.lift_fresh.default, _ATEN.lift.default),
    *(_ATEN.as_strided.default, _ATEN.copy_.default),
}

#: Operators whose decomposition is the same for all extents, with no values between the operands
#: and the results.
_SHAPELESS = {
    *(_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default, _ATEN.batch_norm.default)
}

#: A check without a result, which the import ignores.
_METADATA = _ATEN._assert_tensor_metadata.default

#: The kinds of inputs of plain graphs.
_INPUTS = {
    *(InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT, InputKind.CONSTANT_TENSOR)
}


class NotPlain(Exception):
    """A graph cannot be decomposed call by call."""


@dataclass
class _Pattern:
    """The decomposition of the calls of one kind.

    Attributes
    ----------
    places : list[fx.Node]
        The placeholders of the operands.
    nodes : list[fx.Node]
        The calls, in order.
    results : list[fx.Node]
        The results; the only one of a call that returns a tensor.
    writes : dict[int, fx.Node]
        The new values of the operands that the call writes, by their positions.
    """

    places: list[fx.Node]
    nodes: list[fx.Node]
    results: list[fx.Node]
    writes: dict[int, fx.Node]


#: The decompositions of the kinds of calls, those found last at the end.
_KNOWN: dict[tuple, _Pattern] = {}

#: The largest number of kinds of calls that are kept; a deep network has about 100.
_CAPACITY = 2000


def decompose_calls(
    exported: ExportedProgram, kept: Collection[str], has_memory: bool
) -> ExportGraphSignature:
    """Decompose the calls of a graph in place, and return the new signature.

    Parameters
    ----------
    exported : ExportedProgram
        The program.
    kept : Collection[str]
        The operators that are not decomposed, besides those with converters in this package.
    has_memory : bool
        Whether the tensors of the trace share memory as in PyTorch.

    Raises
    ------
    NotPlain
        If the graph is not plain, or a call has no decomposition. The graph is unchanged.
    """
    _check_plain(exported)
    table, aten = _table(frozenset(kept))
    context = frozenset(kept), torch.get_default_dtype()
    kinds: dict[fx.Node, tuple] = {}
    operands: dict[fx.Node, list[fx.Node]] = {}
    examples: dict[tuple, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "call_function" and not _stays(node, table, aten):
            kinds[node], operands[node] = _kind(node, context)
            examples.setdefault(kinds[node], node)
    missing = {kind: node for kind, node in examples.items() if kind not in _KNOWN}
    if missing:
        _KNOWN.update(_patterns(exported, missing, operands, table))
    calls = {node: _KNOWN[kind] for node, kind in kinds.items()}
    while len(_KNOWN) > _CAPACITY:
        del _KNOWN[next(iter(_KNOWN))]
    written = _written(exported, calls, operands, has_memory)
    return _rewrite(exported, calls, operands, written)


def _check_plain(exported: ExportedProgram) -> None:
    """Refuse graphs with regions, symbolic extents, or values other than tensors."""
    signature = exported.graph_signature
    kinds = {spec.kind for spec in signature.input_specs}
    if torch.is_autocast_enabled("cpu") or not kinds <= _INPUTS:
        raise NotPlain
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise NotPlain
    # A copy of a graph renames inputs with names of Python's functions, but not the signature.
    inputs = [node.name for node in exported.graph.find_nodes(op="placeholder")]
    if inputs != [spec.arg.name for spec in signature.input_specs]:
        raise NotPlain
    for node in exported.graph.nodes:
        if node.op == "output":
            if any(result.op == "placeholder" for result in node.all_input_nodes):
                raise NotPlain
        elif node.op == "call_function":
            value = node.meta.get("val")
            items = value if isinstance(value, (tuple, list)) else [value]
            if not (all(map(_is_plain, items)) or node.target is _METADATA):
                raise NotPlain
        elif node.op != "placeholder" or not (_is_plain(node.meta.get("val")) or not node.users):
            raise NotPlain


def _is_plain(value: object) -> bool:
    """Tell whether a value is a strided tensor with constant extents."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and all(type(extent) is int for extent in value.shape)
    )


@functools.cache
def _table(kept: frozenset[str]) -> tuple[dict, frozenset]:
    """Return the decompositions of operators, without those that have converters; and all operators
    with a decomposition."""
    table = dict(torch.export.default_decompositions().items())
    names = {*CONVERTERS, *kept}
    left = {
        target: function
        for target, function in table.items()
        if not (target.namespace == "aten" and target.__name__ in names)
    }
    return left, frozenset(table)


def _stays(node: fx.Node, table: Collection, known: Collection) -> bool:
    """Tell whether a call is in the decomposed graph as it is."""
    target = node.target
    if target is operator.getitem or target is _METADATA:
        return True
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not is_aten or target in _REFUSED:
        raise NotPlain
    return target not in table and _is_simple(target, target in known)


@functools.cache
def _is_simple(target: torch._ops.OpOverload, is_known: bool) -> bool:
    """Tell whether an operator without an entry in the table is not decomposed: it neither writes
    nor returns memory of its operands, and is no composite operator besides those that have been
    removed from the table."""
    schema = target._schema
    if any(argument.alias_info for argument in (*schema.arguments, *schema.returns)):
        return target in _VIEWS
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return is_known or not has_kernel(target.name(), "CompositeImplicitAutograd")


def _kind(node: fx.Node, context: tuple) -> tuple[tuple, list[fx.Node]]:
    """Return a key that is equal for calls with equal decompositions, and the operands."""
    operands: dict[fx.Node, int] = {}
    arguments = _described(node.args, operands), _described(node.kwargs, operands)
    values = [operand.meta["val"] for operand in operands]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise NotPlain
    form = _layout if node.target in _SHAPELESS else _shape
    types = tuple((form(value), value.dtype, value.device, value.requires_grad) for value in values)
    return (context, node.target, arguments, types), list(operands)


def _described(value: object, operands: dict[fx.Node, int]) -> object:
    """Return an argument as a hashable value, with numbers for operands."""
    if isinstance(value, fx.Node):
        return "operand", operands.setdefault(value, len(operands))
    if isinstance(value, (tuple, list)):
        return "list", *(_described(item, operands) for item in value)
    if isinstance(value, dict):
        return "dict", *((key, _described(item, operands)) for key, item in value.items())
    return type(value), repr(value)


def _shape(value: torch.Tensor) -> tuple:
    return value.shape, value.stride()


def _layout(value: torch.Tensor) -> tuple:
    return value.ndim, 0 in value.shape, value.is_contiguous()


def _patterns(
    exported: ExportedProgram,
    examples: dict[tuple, fx.Node],
    operands: dict[fx.Node, list[fx.Node]],
    table: dict,
) -> dict[tuple, _Pattern]:
    """Return the decompositions of calls of different kinds, as parts of one program."""
    graph, counts = fx.Graph(), []
    inputs: list[fx.Node] = []
    results: list[fx.Node] = []
    for node in examples.values():
        places = {}
        for operand in operands[node]:
            places[operand] = graph.placeholder(f"operand_{len(inputs)}")
            places[operand].meta["val"] = _copy_of(operand.meta["val"])
            inputs.append(places[operand])
        call = graph.node_copy(node, places.__getitem__)
        if writes(node):  # the result is the operand with its new value
            counts.append(0)
            continue
        value = node.meta["val"]
        items = [call]
        if isinstance(value, (tuple, list)):
            items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(value))]
            for item, field in zip(items, value, strict=True):
                item.meta.update(call.meta, val=field)
        counts.append(len(items))
        results += items
    graph.output(tuple(results))
    program = _program(graph, inputs, results, exported.verifiers)
    try:
        program = program.run_decompositions(table)
    except Exception as error:  # torch.export raises every kind
        raise NotPlain from error
    return _parts(program, examples, operands, counts)


def _copy_of(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same type in separate memory."""
    with value.fake_mode:
        copy = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return copy.requires_grad_(value.requires_grad)


def _program(
    graph: fx.Graph, inputs: Sequence[fx.Node], results: Sequence[fx.Node], verifiers: list
) -> ExportedProgram:
    """Return a graph as an exported program of a function of tensors."""
    arguments = [TensorArgument(node.name) for node in inputs]
    fields = [TensorArgument(node.name) for node in results]
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, argument, None) for argument in arguments],
        [OutputSpec(OutputKind.USER_OUTPUT, result, None) for result in fields],
    )
    of_inputs = pytree.tree_flatten(((0,) * len(inputs), {}))[1]
    of_results = pytree.tree_flatten((0,) * len(results))[1]
    call = ModuleCallSignature(arguments, fields, of_inputs, of_results)
    return ExportedProgram(
        torch.nn.Module(),
        graph,
        signature,
        state_dict={},
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", call)],
        verifiers=verifiers,
    )


def _parts(
    program: ExportedProgram,
    examples: dict[tuple, fx.Node],
    operands: dict[fx.Node, list[fx.Node]],
    counts: Sequence[int],
) -> dict[tuple, _Pattern]:
    """Return the parts of a decomposed program of independent calls."""
    graph, specs = program.graph, program.graph_signature.output_specs
    if any(spec.kind is not InputKind.USER_INPUT for spec in program.graph_signature.input_specs):
        raise NotPlain  # a constant of a decomposition
    positions = {node: i for i, node in enumerate(graph.nodes)}
    inputs = iter(graph.find_nodes(op="placeholder"))
    outputs = list(zip(specs, graph.output_node().args[0], strict=True))
    new = {
        spec.target: node for spec, node in outputs if spec.kind is OutputKind.USER_INPUT_MUTATION
    }
    results = iter([node for spec, node in outputs if spec.kind is OutputKind.USER_OUTPUT])
    patterns = {}
    for (kind, node), count in zip(examples.items(), counts, strict=True):
        places = list(itertools.islice(inputs, len(operands[node])))
        own = list(itertools.islice(results, count))
        changed = {i: new[place.name] for i, place in enumerate(places) if place.name in new}
        parts = sorted(_computing([*own, *changed.values()]), key=positions.__getitem__)
        if any(part.op not in ("placeholder", "call_function") for part in parts):
            raise NotPlain
        patterns[kind] = _pattern(places, parts, own, changed)
        if node.target in _SHAPELESS and not _is_direct(patterns[kind]):
            raise NotPlain
    return patterns


def _pattern(
    places: Iterable[fx.Node],
    parts: Iterable[fx.Node],
    results: Iterable[fx.Node],
    writes: Mapping[int, fx.Node],
) -> _Pattern:
    """Return a part of a program as a decomposition that keeps nothing else of it alive."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*places, *parts):
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            value = pytree.tree_map_only(torch.Tensor, _without_memory, node.meta.get("val"))
            copies[node].meta = {"val": value}
    return _Pattern(
        [copies[place] for place in places],
        [copies[part] for part in parts if part.op == "call_function"],
        [copies[result] for result in results],
        {i: copies[node] for i, node in writes.items()},
    )


def _without_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _is_direct(pattern: _Pattern) -> bool:
    """Tell whether a decomposition is one operator, and fields of its result."""
    sources = [node for node in pattern.nodes if node.target is not operator.getitem]
    return len(sources) == 1 and len({*pattern.results, *pattern.writes.values()}) == (
        len(pattern.nodes) - 1 or 1
    )


def _computing(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that results depend on, and the results."""
    found: set[fx.Node] = set()
    waiting = [result for result in results if isinstance(result, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _written(
    exported: ExportedProgram,
    calls: dict[fx.Node, _Pattern],
    operands: dict[fx.Node, list[fx.Node]],
    has_memory: bool,
) -> dict[fx.Node, fx.Node]:
    """Return the nodes whose memory a call writes, each with the node that is first in the memory.

    Writes to memory of views, parameters and inputs are refused.
    """
    targets = {operands[node][i]: None for node, pattern in calls.items() for i in pattern.writes}
    if any(operand not in targets for node in calls for operand in writes(node)):
        raise NotPlain
    if not targets:
        return {}
    if not has_memory:
        raise NotPlain
    buffers = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER
    }
    sharing: dict[int, list[fx.Node]] = defaultdict(list)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, torch.Tensor):
                sharing[item.untyped_storage()._cdata].append(node)
    written: dict[fx.Node, fx.Node] = {}
    for target in targets:
        first, *others = sharing[target.meta["val"].untyped_storage()._cdata]
        is_own = first.op == "call_function" or first.name in buffers
        if not is_own or not all(other in calls and writes(other) for other in others):
            raise NotPlain
        written.update(dict.fromkeys([first, *others], first))
    return written


def _rewrite(
    exported: ExportedProgram,
    calls: dict[fx.Node, _Pattern],
    operands: dict[fx.Node, list[fx.Node]],
    written: dict[fx.Node, fx.Node],
) -> ExportGraphSignature:
    """Replace calls by their decompositions, and return the new signature."""
    graph, signature = exported.graph, exported.graph_signature
    new: dict[fx.Node, fx.Node] = {}  # the values of erased nodes, and of memory that was written
    fields: dict[fx.Node, list[fx.Node]] = {}
    erased = []

    def value_of(node: fx.Node) -> fx.Node:
        node = written.get(node, node)
        return new.get(node, node)

    for node in list(graph.nodes):
        old = operands.get(node)
        moved = (written.get(operand, operand) for operand in node.all_input_nodes)
        if old is None and not new.keys().isdisjoint(moved):
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        if node.target is operator.getitem and node.args[0] in fields:
            new[node] = fields[node.args[0]][node.args[1]]
            erased.append(node)
        if old is None:
            continue
        pattern = calls[node]
        copies = dict(zip(pattern.places, map(value_of, old), strict=True))
        values = _values(node, pattern, old)
        with graph.inserting_before(node):
            for part in pattern.nodes:
                copies[part] = graph.node_copy(part, copies.__getitem__)
                copies[part].meta = {**node.meta, "val": values[part]}
        for i, value in pattern.writes.items():
            new[written[old[i]]] = copies[value]
        results = [copies[result] for result in pattern.results]
        if isinstance(node.meta["val"], (tuple, list)):
            fields[node] = results
        elif results:
            new[node] = results[0]
        erased.append(node)
    for node in reversed(erased):
        graph.erase_node(node)
    places = {node.name: node for node in graph.find_nodes(op="placeholder")}
    changed = [
        (spec, new[place])
        for spec in signature.input_specs
        if (place := places.get(getattr(spec.arg, "name", None))) in new
    ]
    end = graph.output_node()
    end.args = ((*(value for _, value in changed), *end.args[0]),)
    # Random calls without a use are removed too, as run_decompositions does.
    graph.eliminate_dead_code(lambda node: node.is_impure(impure_random=False))
    mutations = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), spec.target)
        for spec, value in changed
    ]
    return ExportGraphSignature(signature.input_specs, [*mutations, *signature.output_specs])


def _values(call: fx.Node, pattern: _Pattern, operands: list[fx.Node]) -> dict[fx.Node, Any]:
    """Return the fake tensors of the nodes of a call's decomposition."""
    if call.target not in _SHAPELESS:
        return {node: node.meta.get("val") for node in pattern.nodes}
    values: dict[fx.Node, Any] = {
        **{node: operands[i].meta["val"] for i, node in pattern.writes.items()},
        **dict.fromkeys(pattern.results, call.meta["val"]),
    }
    for node in pattern.nodes:
        if node.target is operator.getitem:
            source, index = node.args
            fields = values.setdefault(source, [None] * len(source.meta["val"]))
            fields[index] = values[node]
    return values
