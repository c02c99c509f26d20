"""The functions of an import, of the graphs in training and in evaluation mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from tvm import relax

from ...transform import FuseAttention
from ._imported import Imported
from ._importer import Importer
from ._problems import raise_problems, text_of
from ._tensors import check_memory, copied, merged
from .export.program import Program
from .tracing.hooks import check_hooks


class Options(NamedTuple):
    """Options of an import: the mode of batch normalisation, the user's converters, and the dtype
    of autocast."""

    batch_norm: str
    custom: dict[str, Callable]
    autocast: torch.dtype | None = None


class Values(NamedTuple):
    """The parameters and buffers of a module and its loss.

    Attributes
    ----------
    tensors : dict[str, torch.Tensor]
        Each tensor once, by its first key.
    aliases : dict[str, str]
        The first keys of tied tensors by their other keys.
    params : list[str]
        The keys of the parameters to train.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    params: list[str]


def imported_from(
    training: Program,
    evaluation: Program | None,
    values: Values,
    options: Options,
    num_inputs: int,
    reasons: str | None = None,
    copies_values: bool = True,
    stacklevel: int = 3,
) -> Imported:
    """Return the import of the graphs in training and in evaluation mode.

    Parameters
    ----------
    training, evaluation : Program
        The graphs; that in evaluation mode may be missing.
    values : Values
        The tensors of the module.
    options : Options
        The options of the import.
    num_inputs : int
        The number of inputs of the module. The other inputs of the graph in training mode are
        targets.
    reasons : str, optional
        The reasons for which evaluation mode cannot be imported, for a warning.
    copies_values : bool
        Whether training changes copies of the parameters, and not the module's.
    stacklevel : int
        The frame to which warnings point.
    """
    programs = [program for program in (training, evaluation) if program is not None]
    for program in programs:
        program.rename(values.aliases)
    groups = _groups(values, training, programs)
    check_memory(values.tensors, [*groups["states"], *(groups["params"] if copies_values else ())])
    tensors = {key: values.tensors[key] for keys in groups.values() for key in keys}
    bb = relax.BlockBuilder()
    importer = Importer(bb, options.custom, options.batch_norm == "frozen")
    outputs: dict[str, relax.TensorType] = {}

    def of_training(results: list, _: Mapping) -> relax.Expr:
        fields = {name: results[i] for name, i in training.outputs.items()}
        outputs.update({name: field.ty for name, field in fields.items()})
        new_states = [results[training.states[key]] for key in groups["states"]]
        result = [relax.Tuple(list(fields.values())), relax.Tuple(new_states)]
        if training.loss is not None:
            loss = results[training.loss]
            if loss.ty.ndim:
                loss = bb.emit(relax.op.reshape(loss, ()))
            result.insert(0, loss)
        return relax.Tuple(result)

    def of_evaluation(results: list, _: Mapping) -> relax.Expr:
        assert evaluation is not None
        return relax.Tuple([results[i] for i in evaluation.outputs.values()])

    name = "training" if training.loss is None else "loss"
    params = importer.function(name, training, tensors, of_training, keeps_seed=True)
    raise_problems(importer.problems)
    module = bb.get()
    if evaluation is not None:
        importer.function("forward", evaluation, tensors, of_evaluation, keeps_seed=False)
        if importer.problems:
            reasons = text_of(importer.problems)
        else:
            module = bb.get()
    if reasons:
        warnings.warn(
            "the import has no function forward, since evaluation mode cannot be imported:\n"
            f"{reasons}",
            stacklevel=stacklevel,
        )
    elif evaluation is not None and evaluation.states:
        warnings.warn(
            (
                "the function forward does not return the buffers that the module writes in "
                "evaluation mode: "
            )
            + ", ".join(evaluation.states),
            stacklevel=stacklevel,
        )
    types = [(param.name, param.ty) for param in params[1 : 1 + len(training.inputs)]]
    copies: dict[str, Any] = {
        group: {key: copied(tensors[key]) for key in keys} for group, keys in groups.items()
    }
    return Imported(
        FuseAttention()(module),
        dict(types[:num_inputs]),
        dict(types[num_inputs:]),
        outputs,
        **copies,
        aliases=values.aliases,
    )


def _groups(values: Values, training: Program, programs: Sequence[Program]) -> dict[str, list[str]]:
    """Return the keys of the parameters to train, of the frozen tensors, and of the states."""
    read = {key for program in programs for key in program.tensors.values()}
    states = [key for key in values.tensors if key in training.states]
    frozen = [
        key
        for key, tensor in values.tensors.items()
        if (isinstance(tensor, nn.Parameter) or key in read)
        and key not in values.params
        and key not in states
    ]
    return {"params": values.params, "frozen": frozen, "states": states}


def values_of(owners: Mapping[str, nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parameters and buffers of modules by their prefixes, and the keys of tied ones."""
    params: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in owners.items():
        check_hooks(module)
        for group, named in (
            (params, module.named_parameters(prefix, remove_duplicate=False)),
            (buffers, module.named_buffers(prefix, remove_duplicate=False)),
        ):
            for key, tensor in named:
                if key in params or key in buffers:
                    raise ValueError(
                        f"the module and the loss both have {key!r}; rename one of them"
                    )
                group[key] = tensor
    return merged(params, buffers)
