"""PyTorch modules as graphs of core operators, with the roles of their inputs and outputs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.export._trace
from torch import nn
from torch._dynamo.exc import Unsupported, UserError, UserErrorType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import traceback as annotations
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from ...errors import UnsupportedOperatorError
from ._aliases import Aliases
from ._converters import CONVERTERS
from ._dynamic import DynamicShapes
from ._functions import SECTION
from ._graph import (
    Problem,
    keep_only,
    line_of,
    mark_checkpoints,
    raise_problems,
    stop_gradients_of_no_grad,
    user_line,
)
from ._hooks import watching_hooks
from ._recurrent import layers_as_operators
from ._state import watching_state
from ._tensors import described
from ._tracing import CHECKPOINT, Tracer, averaging_statistics

_SYMBOLIC_STATE = (
    ", and symbolic extents are none; leave this axis out of dynamic_shapes, or return the tensor"
)

#: It stands for a tensor in the form of a result.
TENSOR = object()


@dataclass
class Program:
    """An exported graph and the roles of its inputs and outputs.

    Attributes
    ----------
    exported : torch.export.ExportedProgram
        The decomposed graph.
    inputs : dict[str, str]
        The placeholder of each input by the input's name: of the module and then of the loss.
    tensors : dict[str, str]
        The key in the state_dict by placeholder: parameters and buffers.
    constants : dict[str, torch.Tensor]
        The values of other tensors by placeholder.
    outputs : dict[str, int]
        The position of each output among the results of the graph by the output's name.
    loss : int or None
        The position of the loss.
    states : dict[str, int]
        The position of the new value of each buffer that the graph writes, by its key.
    problems : list[Problem]
        The parts that cannot be imported.
    symbols : dict[str, str]
        The names of symbolic extents that the user gave, by those of torch.export.
    form : tuple or None
        The structure of the module's result and its leaves, where :data:`TENSOR` stands for each tensor.
    """

    exported: torch.export.ExportedProgram
    inputs: dict[str, str]
    tensors: dict[str, str]
    constants: dict[str, torch.Tensor]
    outputs: dict[str, int]
    loss: int | None
    states: dict[str, int]
    problems: list[Problem]
    symbols: dict[str, str] = field(default_factory=dict)
    form: tuple[pytree.TreeSpec, list] | None = None

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Replace the keys of tied tensors."""
        self.tensors = {place: aliases.get(key, key) for place, key in self.tensors.items()}
        self.states = {aliases.get(key, key): i for key, i in self.states.items()}


class Result:
    """The result of a module, as its trace found it.

    torch.export restores the attributes of modules, and therefore they cannot hold it.

    Attributes
    ----------
    names : list[str]
        The names of the tensors.
    has_loss : bool
        Whether there is a loss.
    form : tuple
        As for :class:`Program`.
    """

    names: list[str]
    has_loss: bool
    form: tuple[pytree.TreeSpec, list]


class Wrapper(nn.Module):
    """A module and a loss as one module that returns a flat tuple of tensors: the loss, if there is one, and the outputs.

    Parameters
    ----------
    module : nn.Module
        The module.
    loss : Callable, optional
        The loss, of the module's result and the targets.
    result : Result
        It takes the form of the result.
    tracer : Tracer
        The context of the trace.
    """

    def __init__(self, module: nn.Module, loss: Callable | None, result: Result, tracer: Tracer):
        super().__init__()
        self.module = module
        self.loss = loss
        self.result = result
        self.tracer = tracer

    def forward(self, args, kwargs, targets):
        self.tracer.parameters = list(self.parameters())
        with (
            watching_state(self, self._note_state),
            watching_hooks(self, self._note_state),
            self.tracer.watching(),
            _assigned_buffers(self),
        ):
            result = self.module(*args, **kwargs)
            loss = loss_of(result) if self.loss is None else self.loss(result, *targets)
        if self.loss is not None and not is_loss(loss):
            raise ValueError(
                f"loss must return a floating-point tensor of one element, but it returns {described(loss)}"
            )
        named = dict(named_tensors(result))
        self.result.names, self.result.has_loss = list(named), loss is not None
        leaves, spec = pytree.tree_flatten(result)
        leaves = [TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]
        self.result.form = spec, leaves
        return (*([] if loss is None else [loss.reshape(())]), *named.values())

    def _note_state(self, operator: str, reason: str, line: str) -> None:
        self.tracer.problems.append(Problem(operator, reason, line))


@contextlib.contextmanager
def _assigned_buffers(module: nn.Module) -> Iterator[None]:
    """Write the tensors that a call assigns to buffers into these buffers, as torch.export drops assignments."""
    before = [(each, dict(each._buffers)) for each in module.modules()]
    yield
    for each, buffers in before:
        for name, old in buffers.items():
            new = each._buffers.get(name)
            if new is old or old is None:
                continue
            # The comparison with a symbolic extent would make it a number.
            is_symbolic = new is not None and not all(isinstance(n, int) for n in new.shape)
            if new is None or is_symbolic or new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"the buffer {name} of {type(each).__name__} gets {described(new)} in the place of "
                    f"{described(old)}; a buffer must keep its shape and dtype"
                    + _SYMBOLIC_STATE
                    * is_symbolic
                )
            with torch.no_grad():
                old.copy_(new)
            each._buffers[name] = old


def named_tensors(result) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a nested result with their names; other leaves are left out."""
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if isinstance(leaf, torch.Tensor):
            yield ".".join(map(_key_name, path)) or "output", leaf


def _key_name(key) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def loss_of(result) -> torch.Tensor | None:
    """Return the loss in a module's result, or None."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, (tuple, list)):
        result = result[0] if result else None
    else:
        result = getattr(result, "loss", result)
    return result if is_loss(result) else None


def is_loss(value) -> bool:
    """Tell whether a value may be a loss: a floating-point tensor of one element."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return all(isinstance(each, int) and each == 1 for each in value.shape)


def export(
    module: nn.Module,
    args: tuple,
    kwargs: Mapping,
    loss: Callable | None,
    targets: tuple,
    shapes: DynamicShapes,
    kept: Collection[str],
    has_gradients: bool | None = None,
) -> Program:
    """Export a module in the mode that it is in.

    Parameters
    ----------
    module, args, kwargs, loss, targets
        As for :func:`relax_grad.frontend.torch.from_module`.
    shapes : DynamicShapes
        The symbolic extents.
    kept : Collection[str]
        The operators that are not decomposed, besides those with converters in this package.
    has_gradients : bool, optional
        Whether gradients matter; by default those of a module in training mode.
    """
    result = Result()
    tracer = Tracer(module.training if has_gradients is None else has_gradients)
    wrapper = Wrapper(module, loss, result, tracer)
    wrapper.training = module.training
    leaves = named_inputs(module, args, kwargs, targets)
    names = [name if isinstance(leaf, torch.Tensor) else None for name, leaf in leaves]
    with torch.inference_mode(False):
        given = _distinct((args, dict(kwargs), targets), module, loss)
    with (
        quiet(),
        torch.inference_mode(False),
        torch.enable_grad(),
        annotations.preserve_node_meta(),
        averaging_statistics(module),
        layers_as_operators(),
    ):
        try:
            exported = torch.export.export(
                wrapper, given, dynamic_shapes=shapes.of(given), strict=False
            )
        except Exception as error:  # torch.export raises every kind
            raise_problems(tracer.problems)
            raise _translated(error, leaves) from error
    roles = names, result.names, result.has_loss
    program = decomposed(exported, *roles, kept, _key, tracer.training, has_memory=True)
    program.problems[:0] = tracer.problems
    program.form = result.form
    program.symbols = shapes.names(program.exported, list(program.inputs.values()))
    return program


def _distinct(given, *owners):
    """Return example arguments as tensors of their own, outside of the inference mode.

    torch.export takes one tensor in two places for one input.
    """
    taken: set[int] = set()
    for each in owners:
        if isinstance(each, nn.Module):
            taken.update(map(id, itertools.chain(each.parameters(), each.buffers())))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in taken or tensor.is_inference():
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        taken.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, own, given)


def _translated(error: Exception, inputs: Sequence[tuple[str, object]] = ()) -> Exception:
    """Return the exception that says where torch.export stopped, with the examples if the trace failed on them."""
    if isinstance(error, (TypeError, ValueError)) and not type(error).__module__.startswith(
        "torch."
    ):
        return error
    if isinstance(error, UserError) and error.error_type in _SHAPE_FAULTS:
        reasons = str(error).partition("\n\n")[0].strip().splitlines()
        return ValueError(
            "dynamic_shapes does not fit the module or the examples (Dim is torch.export.Dim):\n  "
            + "\n  ".join(each for each in reasons if not each.startswith("Constraints violated"))
            + "\n  A write to a parameter or a buffer fixes extents, too."
        )
    reason = next(iter(str(error).strip().splitlines()), "")
    line = user_line(traceback.extract_tb(error.__traceback__))
    if isinstance(error, NotImplementedError):
        return UnsupportedOperatorError(reason + (f"\n  at {line}" if line else ""))
    return UnsupportedOperatorError(
        f"torch.export cannot trace the module: {type(error).__name__}: {reason}"
        + (f"\n  at {line}" if line else "")
        + (_CONTROL_FLOW if _depends_on_values(error) else _examples(inputs))
    )


def _depends_on_values(error: Exception) -> bool:
    """Tell whether a trace stopped at a decision or a shape that depends on values."""
    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, (*kinds, Unsupported)) or "data-dependent" in str(error)


def _examples(inputs: Sequence[tuple[str, object]]) -> str:
    """Return the sentence that names the example arguments."""
    if not inputs:
        return ""
    shown = "; ".join(f"{name} is {described(each)}" for name, each in inputs)
    return f"\nThe examples must be arguments that the module takes in PyTorch, too: {shown}."


#: The kinds of errors of torch.export that symbolic extents make.
_SHAPE_FAULTS = {
    UserErrorType.CONSTRAINT_VIOLATION,
    UserErrorType.DYNAMIC_DIM,
    UserErrorType.INVALID_INPUT,
}

_CONTROL_FLOW = (
    "\nControl flow that depends on the values of tensors must be torch.where or torch.cond."
)


def _key(target: str) -> str:
    return target.removeprefix("module.")


def named_inputs(
    module: nn.Module, args: tuple, kwargs: Mapping, targets: tuple
) -> list[tuple[str, object]]:
    """Return the leaves of the arguments and of the targets with their names, in the order of the graph."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"args and kwargs do not fit {type(module).__name__}.forward: {error}"
        ) from None
    bound = inspect.signature(module.forward).bind_partial(*args).arguments
    given = [*bound.items(), *kwargs.items()]
    given += zip(target_names(targets), targets, strict=True)
    found: dict[str, object] = {}
    for name, value in given:
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            full = ".".join([name, *map(_key_name, path)])
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                raise ValueError(f"{full} is on the device meta; give an example on the CPU")
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                raise ValueError(
                    f"{full} has the layout {leaf.layout}, and the import takes dense tensors; give {full}.to_dense()"
                )
            while full in found:
                full += "_"
            found[full] = leaf
    return list(found.items())


def target_names(targets: Sequence) -> list[str]:
    """Return the names of the targets."""
    return (
        [f"target{i}" for i in range(len(targets))]
        if len(targets) > 1
        else ["target"][: len(targets)]
    )


def from_program(exported: torch.export.ExportedProgram, kept: Collection[str]) -> Program:
    """Return the graph of an exported program, which stays as it is."""
    signature = exported.graph_signature
    names = [
        spec.arg.name if isinstance(spec.arg, TensorArgument) else None
        for spec in signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    results = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    nodes = {node.name: node for node in exported.graph.nodes}
    leaves = [
        nodes[each.name].meta["val"] if isinstance(each, TensorArgument) else None
        for each in results
    ]
    result = pytree.tree_unflatten(leaves, exported.call_spec.out_spec)
    loss, named = loss_of(result), dict(named_tensors(result))
    given = copy.deepcopy(exported), names, None, False, kept, str
    program = decomposed(*given, has_gradients=True, has_memory=False)
    positions = [
        i for i, each in zip(program.outputs.values(), leaves, strict=True) if each is not None
    ]
    program.outputs = dict(zip(named, positions, strict=True))
    if loss is not None:
        program.loss = positions[next(i for i, each in enumerate(named.values()) if each is loss)]
    return program


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
    table = torch.export.default_decompositions()
    for operator in list(table):
        if operator.namespace == "aten" and operator.__name__ in {*CONVERTERS, *kept}:
            table.pop(operator)
    with quiet(), annotations.preserve_node_meta(), layers_as_operators():
        try:
            exported = exported.run_decompositions(table)
        except Exception as error:  # torch.export raises every kind
            raise _translated(error) from error
    graph = exported.graph_module.graph
    mark_checkpoints(graph, CHECKPOINT)
    inputs, tensors, constants = {}, {}, {}
    leaves = iter(names)
    used = {node.name for node in graph.find_nodes(op="placeholder") if node.users}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            name = next(leaves)
            if name is not None:
                inputs[name] = spec.arg.name
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.arg.name in used:
            tensors[spec.arg.name] = key(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[spec.target]
    results = graph.output_node().args[0]
    own = {place: name for name, place in inputs.items()}
    found, states, problems = [], {}, aliases.problems
    for i, spec in enumerate(exported.graph_signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            states[key(spec.target)] = i
        elif spec.kind is OutputKind.USER_OUTPUT:
            found.append(i)
        elif spec.kind is not OutputKind.TOKEN:  # tokens order checks, which have no converters
            what = "parameter" if spec.kind is OutputKind.PARAMETER_MUTATION else "input"
            problems.append(
                Problem(
                    f"a write to the {what} {own.get(spec.target, key(spec.target))}",
                    "gradients of writes to it are not those of PyTorch; write to a copy",
                    line_of(results[i]),
                )
            )
    loss = found.pop(0) if has_loss else None
    roles = dict(zip(map(str, found) if outputs is None else outputs, found, strict=True))
    return Program(exported, inputs, tensors, constants, roles, loss, states, problems)


def _without_gradient(exported: torch.export.ExportedProgram, has_gradients: bool) -> set[str]:
    """Return the placeholders of buffers and constants; all if gradients do not matter."""
    kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    specs = exported.graph_signature.input_specs
    return {each.arg.name for each in specs if each.kind in kinds or not has_gradients}


#: The loggers of PyTorch that repeat errors, which are raised too.
_LOGGERS = (
    *("torch.export", "torch._export", "torch.fx"),
    *("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"),
)


def _unprinted(*args, **kwargs) -> None:
    """Print nothing."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of torch.export, which speak of its own code, and the graph that it prints after an error."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.CRITICAL)
        try:
            with mock.patch.object(torch.export._trace, "print", _unprinted, create=True):
                yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


@contextlib.contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode, and restore the flags of its submodules at the end.

    A module in training mode keeps the flags of its submodules, some of which may be in evaluation mode.
    """
    flags = [(each, each.training) for each in module.modules()]
    if not (training and module.training):
        module.train(training)
    try:
        yield
    finally:
        for each, flag in flags:
            each.training = flag
