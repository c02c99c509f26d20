"""Loops whose number of trips is known before the run, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from ....ir.module import unused
from ..read.nodes import attribute, every_graph, label, rename

#: Loops with more trips are not written out.
MOST_TRIPS = 256


class Unrolled(NamedTuple):
    """The nodes that replace a loop, and the further initializers that they need.

    Attributes
    ----------
    nodes : list[onnx.NodeProto]
        The nodes.
    weights : list[onnx.TensorProto]
        The initializers of the body, which all trips share.
    constants : dict[str, np.ndarray]
        Numbers of trips, indices and axes, by their names.
    """

    nodes: list[onnx.NodeProto]
    weights: list[onnx.TensorProto]
    constants: dict[str, np.ndarray]


class _Writer:
    """The nodes of the trips of one loop."""

    def __init__(self, node: onnx.NodeProto, taken: set[str], opset: int):
        self.name, self.taken, self.opset = label(node), taken, opset
        self.body = onnx.GraphProto()
        self.body.CopyFrom(attribute(node, "body"))
        self.unrolled = Unrolled([], [], {})
        shared = {}
        for tensor in self.body.initializer:
            shared[tensor.name] = self.fresh(tensor.name)
        rename(self.body, shared)
        self.unrolled.weights.extend(self.body.initializer)
        del self.body.initializer[:]

    def fresh(self, name: str) -> str:
        unique = unused(name, self.taken)
        self.taken.add(unique)
        return unique

    def constant(self, name: str, value: np.ndarray) -> str:
        name = self.fresh(f"{self.name}/{name}")
        self.unrolled.constants[name] = value
        return name

    def node(self, kind: str, inputs: list[str], result: str, **attributes: object) -> str:
        self.unrolled.nodes.append(
            onnx.helper.make_node(kind, inputs, [result], name=result, **attributes)
        )
        return result

    def trip(self, number: int, operands: list[str]) -> list[str]:
        """Write one trip, and return the names of the results of the body."""
        trip = onnx.GraphProto()
        trip.CopyFrom(self.body)
        arguments = dict(zip((value.name for value in trip.input), operands, strict=True))
        own = {
            name: self.fresh(f"{self.name}/{number}/{name}")
            for inner in every_graph(trip)
            for inner_node in inner.node
            for name in inner_node.output
            if name
        }
        rename(trip, {**own, **arguments})
        for node in trip.node:
            node.name = f"{self.name}/{number}/{node.name}"
        self.unrolled.nodes.extend(trip.node)
        return [value.name for value in trip.output]

    def stacked(self, parts: list[str], result: str, axis: int = 0) -> None:
        """Write the concatenation of results along a new axis."""
        columns = []
        for part in parts:
            wide = self.fresh(f"{part}/row")
            if self.opset >= 13:
                axes = self.constant("axes", np.array([axis], np.int64))
                columns.append(self.node("Unsqueeze", [part, axes], wide))
            else:
                columns.append(self.node("Unsqueeze", [part], wide, axes=[axis]))
        self.node("Concat", columns, result, axis=axis)


def unrolled_loop(
    node: onnx.NodeProto, known: dict[str, np.ndarray], taken: set[str], opset: int
) -> Unrolled | None:
    """Return the trips of a ``Loop``, or None if their number is not known.

    Parameters
    ----------
    node : onnx.NodeProto
        The loop.
    known : dict[str, np.ndarray]
        The values that are known.
    taken : set[str]
        The names of the graph, to which new ones are added.
    opset : int
        The version of the operators.
    """
    count, condition, *states = [*node.input, "", ""][: max(len(node.input), 2)]
    if count not in known or (condition and condition not in known):
        return None
    trips = int(known[count].item())
    if condition and not known[condition].item():
        trips = 0
    body = attribute(node, "body")
    if not 0 < trips <= MOST_TRIPS or not _goes_on(body, known):
        return None
    writer, rows = _Writer(node, taken, opset), []
    for number in range(trips):
        index = writer.constant("trip", np.array(number, np.int64))
        yes = writer.constant("goes_on", np.array(True))
        _, *results = writer.trip(number, [index, yes, *states])
        states, row = results[: len(states)], results[len(states) :]
        rows.append(row)
    return _ended(writer, node, states, rows, lambda i: (0, 0))


def unrolled_scan(
    node: onnx.NodeProto, extents: Callable, taken: set[str], opset: int
) -> Unrolled | None:
    """Return the trips of a ``Scan``, or None if their number is not known.

    ``extents`` returns the extents of a value by its name; other parameters are those of
    :func:`unrolled_loop`.
    """
    if opset < 9:
        return None  # it has batches, and lengths of sequences
    count = attribute(node, "num_scan_inputs")
    states, scanned = list(node.input[:-count]), list(node.input[-count:])
    axes = attribute(node, "scan_input_axes", [0] * count)
    backwards = attribute(node, "scan_input_directions", [0] * count)
    lengths = {
        (extents(name) or [None] * (axis + 1))[axis]
        for name, axis in zip(scanned, axes, strict=True)
    }
    trips = lengths.pop() if len(lengths) == 1 else None
    if not isinstance(trips, int) or not 0 < trips <= MOST_TRIPS:
        return None
    writer, rows = _Writer(node, taken, opset), []
    for number in range(trips):
        parts = []
        for name, axis, back in zip(scanned, axes, backwards, strict=True):
            place = trips - 1 - number if back else number
            index = writer.constant("index", np.array(place, np.int64))
            part = writer.fresh(f"{writer.name}/{number}/{name}")
            parts.append(writer.node("Gather", [name, index], part, axis=axis))
        results = writer.trip(number, [*states, *parts])
        states, row = results[: len(states)], results[len(states) :]
        rows.append(row)
    outer = len(node.output) - len(states)
    directions = attribute(node, "scan_output_directions", [0] * outer)
    places = attribute(node, "scan_output_axes", [0] * outer)
    return _ended(writer, node, states, rows, lambda i: (places[i], directions[i]))


def _goes_on(body: onnx.GraphProto, known: dict[str, np.ndarray]) -> bool:
    """Tell whether the condition of a body is its own condition, or true."""
    name, made = body.output[0].name, {node.output[0]: node for node in body.node}
    while name in made and made[name].op_type in ("Identity", "Cast"):
        name = made[name].input[0]
    if name == body.input[1].name:
        return True
    own = {tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}
    value = own.get(name, known.get(name))
    return value is not None and bool(value.all())


def _ended(
    writer: _Writer,
    node: onnx.NodeProto,
    states: list[str],
    rows: list[list[str]],
    setting: Callable,
) -> Unrolled:
    """Write the results of the loop: the last states, and the stacked results of all trips."""
    for name, result in zip(states, node.output, strict=False):
        if result:
            writer.node("Identity", [name], result)
    for i, result in enumerate(node.output[len(states) :]):
        if result:
            axis, back = setting(i)
            parts = [row[i] for row in rows]
            writer.stacked(parts[::-1] if back else parts, result, axis)
    return writer.unrolled
