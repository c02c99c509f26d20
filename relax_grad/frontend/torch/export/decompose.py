"""Graphs of core operators with the roles of their inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.fx import traceback as fx_traceback

from .._converters import CONVERTERS
from .._problems import Problem, line_of
from ..tracing.functions import SECTION
from ..tracing.recurrent import layers_as_operators
from ..tracing.tracer import CHECKPOINT
from .aliases import Aliases
from .autocast import decompose_under_autocast
from .calls import NotPlain, decompose_calls
from .errors import translated
from .program import Program
from .quiet import quiet
from .regions import keep_only, mark_checkpoints, stop_gradients_of_no_grad


def decomposed(
    exported: torch.export.ExportedProgram,
    names: Sequence[str | None],
    outputs: Sequence[str] | None,
    has_loss: bool,
    kept: Collection[str],
    key: Callable[[str], str],
    has_gradients: bool,
    has_memory: bool,
) -> Program:
    """Return the graph of core operators with the roles of its inputs and outputs.

    The graph is changed in place.
    """
    keep_only(exported.graph_module, (CHECKPOINT, SECTION))
    stop_gradients_of_no_grad(exported.graph_module)
    aliases = Aliases(_without_gradient(exported, has_gradients), has_memory)
    aliases.run(exported.graph_module)
    decompose_under_autocast(exported.graph_module, kept)
    exported, signature = _with_core_operators(exported, kept, has_memory)
    graph = exported.graph_module.graph
    mark_checkpoints(graph, CHECKPOINT)
    inputs, tensors, constants = {}, {}, {}
    leaves = iter(names)
    used = {node.name for node in graph.find_nodes(op="placeholder") if node.users}
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            name = next(leaves)
            if name is not None:
                inputs[name] = spec.arg.name
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.arg.name in used:
            tensors[spec.arg.name] = key(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[spec.target]
    results = graph.output_node().args[0]
    input_names = {place: name for name, place in inputs.items()}
    positions, states, problems = [], {}, aliases.problems
    for i, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            states[key(spec.target)] = i
        elif spec.kind is OutputKind.USER_OUTPUT:
            positions.append(i)
        elif spec.kind is not OutputKind.TOKEN:  # tokens order checks, which have no converters
            role = "parameter" if spec.kind is OutputKind.PARAMETER_MUTATION else "input"
            problems.append(
                Problem(
                    f"a write to the {role} {input_names.get(spec.target, key(spec.target))}",
                    "writes to it have other gradients than in PyTorch; write to a copy",
                    line_of(results[i]),
                )
            )
    loss = positions.pop(0) if has_loss else None
    output_names = map(str, positions) if outputs is None else outputs
    roles = dict(zip(output_names, positions, strict=True))
    return Program(
        exported,
        inputs,
        tensors,
        constants=constants,
        outputs=roles,
        loss=loss,
        states=states,
        problems=problems,
    )


def _with_core_operators(
    exported: torch.export.ExportedProgram, kept: Collection[str], has_memory: bool
) -> tuple[torch.export.ExportedProgram, ExportGraphSignature]:
    """Decompose operators, besides those with converters, and return the new signature too."""
    with quiet(), fx_traceback.preserve_node_meta(), layers_as_operators():
        with contextlib.suppress(NotPlain):
            return exported, decompose_calls(exported, kept, has_memory)
        table = torch.export.default_decompositions()
        for operator in list(table):
            if operator.namespace == "aten" and operator.__name__ in {*CONVERTERS, *kept}:
                table.pop(operator)
        try:
            whole = exported.run_decompositions(table)
        except Exception as error:  # torch.export raises every kind
            raise translated(error) from error
    return whole, whole.graph_signature


def _without_gradient(exported: torch.export.ExportedProgram, has_gradients: bool) -> set[str]:
    """Return the placeholders of buffers and constants; all if gradients do not matter."""
    kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    specs = exported.graph_signature.input_specs
    return {spec.arg.name for spec in specs if spec.kind in kinds or not has_gradients}
