"""PyTorch modules, and exported programs, as graphs of core operators."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from ....errors import UnsupportedOperatorError
from .._problems import raise_problems
from .._tensors import shared_memory
from ..inputs.extents import DynamicShapes
from ..inputs.names import Inputs, key_name
from ..inputs.results import loss_of, named_tensors
from ..tracing.modes import averaging_statistics
from ..tracing.recurrent import layers_as_operators
from ..tracing.tracer import Tracer
from ..tracing.wrapper import Result, Wrapper
from .decompose import decomposed
from .errors import translated
from .program import Program
from .quiet import quiet


def export(
    module: nn.Module,
    inputs: Inputs,
    loss: Callable | None,
    shapes: DynamicShapes,
    kept: Collection[str],
    has_gradients: bool | None = None,
    autocast: torch.dtype | None = None,
) -> Program:
    """Export a module in the mode that it is in.

    Parameters
    ----------
    module, loss
        As for :func:`relax_grad.frontend.torch.from_module`.
    inputs : Inputs
        The example arguments.
    shapes : DynamicShapes
        The symbolic extents.
    kept : Collection[str]
        The operators that are not decomposed, besides those with converters in this package.
    has_gradients : bool, optional
        Whether gradients matter; by default in training mode.
    autocast : torch.dtype, optional
        The dtype of ``torch.autocast`` around the module and the loss.
    """
    result = Result()
    tracer = Tracer(module.training if has_gradients is None else has_gradients)
    wrapper = Wrapper(module, loss, result, tracer, autocast)
    wrapper.training = module.training
    names = [
        name if isinstance(leaf, torch.Tensor) else None for name, leaf in inputs.leaves.items()
    ]
    extents = shapes.of(inputs)
    with torch.inference_mode(False):
        examples = _distinct((inputs.args, inputs.kwargs, inputs.targets), module, loss)
    with (
        quiet(),
        torch.inference_mode(False),
        torch.enable_grad(),
        fx_traceback.preserve_node_meta(),
        averaging_statistics(),
        layers_as_operators(),
    ):
        try:
            exported = torch.export.export(
                wrapper, examples, dynamic_shapes=extents.specification, strict=False
            )
        except Exception as error:  # torch.export raises every kind
            raise_problems(tracer.problems)
            raise translated(error, inputs.leaves) from error
    _remove_repeated(exported)
    roles = names, result.names, result.has_loss
    try:
        program = decomposed(exported, *roles, kept, _key, tracer.training, has_memory=True)
    except UnsupportedOperatorError as error:
        if isinstance(error.__cause__, AssertionError):
            _refuse_shared_buffers(module, error)
        raise
    program.problems[:0] = tracer.problems
    program.form, program.reads = result.form, result.reads
    program.symbols = extents.symbols(program.exported, list(program.inputs.values()))
    return program


def _remove_repeated(exported: torch.export.ExportedProgram) -> None:
    """Remove the unused inputs for further names of a tensor, as of a layer that is registered
    twice. PyTorch does not decompose a graph that writes to one of two such inputs."""
    signature, nodes = exported.graph_signature, {node.name: node for node in exported.graph.nodes}
    values = {**exported.constants, **exported.state_dict}
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = [spec for spec in signature.input_specs if spec.kind in kinds]
    used = {id(values.get(spec.target)) for spec in specs if nodes[spec.arg.name].users}
    for spec in specs:
        node = nodes[spec.arg.name]
        if not node.users and id(values.get(spec.target)) in used:
            exported.graph.erase_node(node)
            signature.input_specs.remove(spec)
            exported.state_dict.pop(spec.target, None)
            exported.constants.pop(spec.target, None)
    exported.graph_module.recompile()


def _refuse_shared_buffers(module: nn.Module, error: Exception) -> None:
    """Raise an error that names buffers, or a buffer and an attribute, in the same memory, if there
    are some: a graph that writes to one of them cannot be decomposed."""
    tensors = dict(module.named_buffers(remove_duplicate=False))
    for prefix, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            parts = value if isinstance(value, (list, tuple)) else [value]
            for i, part in enumerate(parts):
                if isinstance(part, torch.Tensor):
                    whole = f"{name}[{i}]" if parts is value else name
                    tensors[f"{prefix}.{whole}" if prefix else whole] = part
    for key, other in shared_memory({k: v for k, v in tensors.items() if not v.is_meta}):
        raise ValueError(
            f"the tensors {key} and {other} of the module have the same memory, and a call writes "
            "to it; register one of them, and compute the other from it in forward"
        ) from error


def _distinct(examples: tuple, *owners: object) -> tuple:
    """Return example arguments as separate tensors, outside of the inference mode.

    torch.export takes one tensor in two places for one input.
    """
    taken: set[int] = set()
    for owner in owners:
        if isinstance(owner, nn.Module):
            taken.update(map(id, itertools.chain(owner.parameters(), owner.buffers())))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in taken or tensor.is_inference():
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        taken.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, own, examples)


def _key(target: str) -> str:
    return target.removeprefix("module.")


def _refuse_repeated(exported: torch.export.ExportedProgram) -> None:
    """Refuse a tensor that is an example twice, or a parameter too: the graph of torch.export reads
    it in one place, whatever the other place gets."""
    owners = {id(tensor): f"the tensor {key} of the module" for key, tensor in _state(exported)}
    examples: tuple = exported.example_inputs or ((), {})
    for path, example in pytree.tree_flatten_with_path(examples)[0]:
        if isinstance(example, torch.Tensor):
            text = "the example argument " + ".".join(map(key_name, path[1:]))
            other = owners.setdefault(id(example), text)
            if other != text:
                raise ValueError(
                    f"{text} is {other} too, which torch.export takes for one input; export the "
                    "module with example.clone(), or import it by from_module"
                )


def _state(exported: torch.export.ExportedProgram) -> list[tuple[str, torch.Tensor]]:
    return [*exported.named_parameters(), *exported.named_buffers()]


def from_program(exported: torch.export.ExportedProgram, kept: Collection[str]) -> Program:
    """Return the graph of an exported program, which stays as it is.

    Raises
    ------
    ValueError
        If one tensor was an example in several places.
    """
    _refuse_repeated(exported)
    signature = exported.graph_signature
    names = [
        spec.arg.name if isinstance(spec.arg, TensorArgument) else None
        for spec in signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    results = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in exported.graph.nodes}
    leaves = [
        nodes[result.name].meta["val"] if isinstance(result, TensorArgument) else None
        for result in results
    ]
    result = pytree.tree_unflatten(leaves, exported.call_spec.out_spec)
    loss, named = loss_of(result), named_tensors(result)
    arguments = copy.deepcopy(exported), names, None, False, kept, str
    program = decomposed(*arguments, has_gradients=True, has_memory=False)
    positions = [
        i for i, leaf in zip(program.outputs.values(), leaves, strict=True) if leaf is not None
    ]
    program.outputs = dict(zip(named, positions, strict=True))
    if loss is not None:
        program.loss = positions[
            next(i for i, tensor in enumerate(named.values()) if tensor is loss)
        ]
    return program
