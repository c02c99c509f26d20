"""Writes to tensors that share memory: whether a functional graph has the gradients that PyTorch
has.

PyTorch keeps a gradient with a tensor and its views, and ``detach`` begins a tensor without one in
the same memory. A functional graph has one value for the memory, and its gradient. A write changes
both, so that they may differ for tensors on the other side of a ``detach``. There are three ways to
build the graph, and a write is refused if each of them has a fault: the graph as it is, with copies
of the detached tensors, and without the gradients of values that are written through them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._operators import GRADIENT
from .._problems import Problem, line_of, problem
from .regions import WITHOUT_GRADIENT
from .writes import KEEPING, name_of, refusal, writes

_DETACH = torch.ops.aten.detach.default
_DETACH_IN_PLACE = torch.ops.aten.detach_.default

#: The number of no gradient.
_NONE = 0

_REASON = (
    "it writes to a tensor that needs a gradient, through a detached tensor or within no_grad, "
    "and the tensor is read later ({}); compute a new tensor, or write to a clone()"
)


@dataclass(eq=False)
class Memory:
    """The memory of some tensors.

    Attributes
    ----------
    gradient, cut : int
        The number of the gradient that a functional graph has for the value in the memory: as it
        is, and if values that are written through detached tensors have none.
    value : int
        The number of the last write.
    written : fx.Node or None
        The last write.
    detached : list[fx.Node]
        The calls of ``detach``.
    through : list[fx.Node]
        The writes through detached tensors.
    faults : dict[str, list[tuple[fx.Node, fx.Node]]]
        By the way to build the graph, the writes and the reads after them that differ from PyTorch.
    """

    gradient: int
    cut: int
    value: int = 0
    written: fx.Node | None = None
    detached: list[fx.Node] = field(default_factory=list)
    through: list[fx.Node] = field(default_factory=list)
    faults: dict[str, list[tuple[fx.Node, fx.Node]]] = field(
        default_factory=lambda: {"shared": [], "cut": [], "copied": []}
    )


@dataclass(eq=False)
class Family:
    """A tensor and its views, without detached ones.

    Attributes
    ----------
    memory : Memory
        The memory of the tensors.
    gradient : int
        The number of the gradient that PyTorch has for the tensors.
    value : int
        The number of the last write to the tensors.
    is_detached : bool
        Whether a ``detach`` began the family.
    is_bypassed : bool
        Whether a write within no_grad left the gradient as it was.
    """

    memory: Memory
    gradient: int
    value: int = 0
    is_detached: bool = False
    is_bypassed: bool = False


class Aliases:
    """The tensors of a graph in the order of their computation.

    Parameters
    ----------
    constants : Collection[str]
        The placeholders that need no gradient.
    has_memory : bool
        Whether the tensors of the trace share memory as in PyTorch; otherwise the
        schemas of the operators tell which results may be views.

    Attributes
    ----------
    problems : list[Problem]
        The writes that cannot be imported.
    """

    def __init__(self, constants: Collection[str], has_memory: bool):
        self.problems: list[Problem] = []
        self._constants = constants
        self._has_memory = has_memory
        self._numbers = itertools.count(1)
        self._families: dict[fx.Node, object] = {}  # nested as the values of the nodes
        self._roots: dict[int, Family] = {}  # by the memory of the trace
        self._memories: list[Memory] = []

    def run(self, module: fx.GraphModule) -> None:
        """Read the graph, note the writes that cannot be imported, and copy detached tensors where
        that is needed."""
        places = module.graph.find_nodes(op="placeholder")
        for place in places:
            needs = place.name not in self._constants
            self._families[place] = self._fresh(place.meta.get("val"), needs)
        self._walk(module)
        end = module.graph.output_node()
        for place in places:
            for family in self._of(place):
                if family.value != family.memory.value:
                    family.memory.faults["copied"].append((family.memory.written, end))
        for memory in self._memories:
            faults = memory.faults
            if all(faults.values()):
                self._refuse(*faults["shared"][0])
            elif faults["shared"] and not faults["cut"]:
                for node in memory.through:
                    _cut(node)
            elif faults["shared"]:
                for node in memory.detached:
                    _copy(node)
        for inner in module.modules():
            if isinstance(inner, fx.GraphModule):
                inner.recompile()

    def _refuse(self, written: fx.Node, read: fx.Node) -> None:
        where = "it is returned" if read.op == "output" else line_of(read)
        self.problems.append(problem(written, _REASON.format(where)))

    def _walk(self, module: fx.GraphModule) -> None:
        for node in list(module.graph.nodes):
            if node.op == "get_attr":
                value = getattr(module, node.target, None)
                self._families[node] = self._fresh(value, False)
            elif node.op == "call_function":
                self._families[node] = self._called(module, node)
            elif node.op == "output":
                self._read(node)

    def _called(self, module: fx.GraphModule, node: fx.Node) -> Family | tuple | None:
        """Return the families of the results of a node."""
        inner = self._region(module, node)
        if inner is not None:
            return inner
        if getattr(node.target, "__name__", "") == "getitem":
            families = self._families.get(node.args[0])
            return families[node.args[1]] if isinstance(families, tuple) else None
        reason = refusal(node.target)
        if reason is not None:
            self.problems.append(problem(node, reason))
        operands = [family for source in node.all_input_nodes for family in self._of(source)]
        written = [family for source in writes(node) for family in self._of(source)]
        if node.target in (_DETACH, _DETACH_IN_PLACE):
            node.target = _DETACH
            return self._detached(node, *operands)
        # Within no_grad, tensors without a write have been detached.
        records = not node.meta.get(WITHOUT_GRADIENT)
        value = node.meta.get("val")
        needs = node.target is GRADIENT or records
        needs = needs and any(operand.gradient for operand in operands)
        if not (records or written or node.target is GRADIENT) and isinstance(value, torch.Tensor):
            self._read_without_gradient(node, operands)
        if written or not _may_be_view(node):
            self._read(node)
        for family in written:
            self._write(node, family, operands, records and name_of(node.target) not in KEEPING)
        return self._results(value, [*written, *operands], node, needs)

    def _detached(self, node: fx.Node, source: Family) -> Family:
        source.memory.detached.append(node)
        return Family(source.memory, _NONE, source.value, is_detached=True)

    def _results(
        self,
        value: object,
        operands: list[Family],
        node: fx.Node,
        needs: bool,
    ) -> Family | tuple | None:
        if isinstance(value, (tuple, list)):
            return tuple(self._results(item, operands, node, needs) for item in value)
        if not isinstance(value, torch.Tensor):
            return None
        if self._has_memory:
            place = _memory_of(value)
            root = None if place is None else self._roots.get(place)
            views = [operand for operand in operands if root and operand.memory is root.memory]
        else:
            views = operands if _may_be_view(node) else []
        return views[0] if views else self._fresh(value, needs)

    def _fresh(self, value: object, needs: bool) -> Any:
        """Return new families of a value, or the family that has its memory already."""
        if isinstance(value, (tuple, list)):
            return tuple(self._fresh(item, needs) for item in value)
        if not isinstance(value, torch.Tensor):
            return None
        place = _memory_of(value) if self._has_memory else None
        if place in self._roots:
            return self._roots[place]
        needs = needs and (value.is_floating_point() or value.is_complex())
        gradient = next(self._numbers) if needs else _NONE
        family = Family(Memory(gradient, gradient), gradient)
        self._memories.append(family.memory)
        if place is not None:
            self._roots[place] = family
        return family

    def _write(self, node: fx.Node, family: Family, operands: list, records: bool) -> None:
        memory, number = family.memory, next(self._numbers)
        needs = records and any(operand.gradient for operand in operands if operand is not family)
        if family.is_detached:
            memory.gradient, memory.cut = number if needs else _NONE, _NONE
            memory.through.append(node)
        else:
            memory.gradient = number if needs or memory.gradient else _NONE
            memory.cut = number if needs or memory.cut else _NONE
        if records:
            family.gradient = number if needs or family.gradient else _NONE
        elif family.gradient:
            family.is_bypassed = True
        memory.value = family.value = number
        memory.written = node

    def _read(self, node: fx.Node) -> None:
        """Note the operands whose value or gradient is another one than PyTorch's."""
        for family in (family for source in node.all_input_nodes for family in self._of(source)):
            memory = family.memory
            if memory.written is None:
                continue
            fault = memory.written, node
            for way, gradient in (("shared", memory.gradient), ("cut", memory.cut)):
                if family.gradient != (_NONE if family.is_detached else gradient):
                    memory.faults[way].append(fault)
            if family.value != memory.value or family.is_bypassed:
                memory.faults["copied"].append(fault)

    def _read_without_gradient(self, node: fx.Node, operands: list[Family]) -> None:
        """Note the operands whose gradient the graph has within no_grad too, since the region
        writes them."""
        for family in operands:
            if family.memory.gradient and not family.is_detached:
                for faults in family.memory.faults.values():
                    faults.append((family.memory.written or node, node))

    def _of(self, node: fx.Node) -> Iterator[Family]:
        leaves = pytree.tree_leaves(self._families.get(node))
        return (leaf for leaf in leaves if isinstance(leaf, Family))

    def _region(self, module: fx.GraphModule, node: fx.Node) -> tuple | None:
        """Read the graph that a node calls once, such as a region of autocast, and return the
        families of its results."""
        inner = [
            argument
            for argument in node.args
            if isinstance(argument, fx.Node) and argument.op == "get_attr"
        ]
        inner = [(argument, getattr(module, argument.target, None)) for argument in inner]
        inner = [
            (argument, attribute)
            for argument, attribute in inner
            if isinstance(attribute, fx.GraphModule)
        ]
        if len(inner) != 1:
            return None
        ((place, region),) = inner
        operands = node.args[node.args.index(place) + 1 :]
        places = region.graph.find_nodes(op="placeholder")
        if len(operands) != len(places):
            return None
        for placeholder, operand in zip(places, operands, strict=True):
            self._families[placeholder] = self._families.get(operand)
        self._walk(region)
        results = region.graph.output_node().args[0]
        results = results if isinstance(results, (tuple, list)) else (results,)
        return tuple(self._families.get(result) for result in results)


def _copy(node: fx.Node) -> None:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy, lambda user: user is not copy)


def _cut(node: fx.Node) -> None:
    """Detach the operands of a write through a detached tensor."""
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if is_float and operand not in writes(node):
            with node.graph.inserting_before(node):
                detached = node.graph.call_function(_DETACH, (operand,))
            detached.meta.update(operand.meta)
            node.replace_input_with(operand, detached)


def _may_be_view(node: fx.Node) -> bool:
    """Tell whether a result may share memory with an operand by the schema of the operator."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.alias_info is not None for argument in schema.returns
    )


def _memory_of(value: torch.Tensor) -> int | None:
    """Return a number of the memory; sparse tensors have none."""
    return value.untyped_storage()._cdata if value.layout is torch.strided else None
