"""The functions of an import, of the graphs in training and in evaluation mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from tvm import relax

from ...transform import FuseAttention
from ._export import Program, mode
from ._graph import raise_problems, text_of
from ._hooks import check_hooks
from ._imported import Imported
from ._importer import Importer
from ._tensors import copied, merged


class Options(NamedTuple):
    """Options of an import: the mode of batch normalisation, and the user's converters."""

    batch_norm: str
    custom: dict[str, Callable]


class Build:
    """The functions of one import."""

    def __init__(self, values, aliases, params: list[str], options: Options):
        self._values, self._aliases, self._params = values, aliases, params
        self._options = options

    def imported(
        self, training: Program, evaluation: Program | None, count: int, reasons: str | None
    ) -> Imported:
        """Return the import of the graphs in training and in evaluation mode; the others of the inputs are targets."""
        programs = [each for each in (training, evaluation) if each is not None]
        for each in programs:
            each.rename(self._aliases)
        read = {key for each in programs for key in each.tensors.values()}
        states = [key for key in self._values if key in training.states]
        frozen = [
            key
            for key, each in self._values.items()
            if (isinstance(each, nn.Parameter) or key in read)
            and key not in self._params
            and key not in states
        ]
        groups = {"params": self._params, "frozen": frozen, "states": states}
        values = {key: self._values[key] for keys in groups.values() for key in keys}
        bb = relax.BlockBuilder()
        importer = Importer(bb, self._options.custom, self._options.batch_norm == "frozen")
        outputs: dict[str, relax.TensorType] = {}

        def of_training(results, tensors):
            found = [results[i] for i in training.outputs.values()]
            outputs.update(
                {name: each.ty for name, each in zip(training.outputs, found, strict=True)}
            )
            new = [results[training.states[key]] for key in states]
            fields = [relax.Tuple(found), relax.Tuple(new)]
            if training.loss is not None:
                loss = results[training.loss]
                if loss.ty.ndim:
                    loss = bb.emit(relax.op.reshape(loss, ()))
                fields.insert(0, loss)
            return relax.Tuple(fields)

        def of_evaluation(results, tensors):
            return relax.Tuple([results[i] for i in evaluation.outputs.values()])

        name = "training" if training.loss is None else "loss"
        params = importer.function(name, training, values, of_training, keeps_seed=True)
        raise_problems(importer.problems)
        module = bb.get()
        if evaluation is not None:
            importer.function("forward", evaluation, values, of_evaluation, keeps_seed=False)
            if importer.problems:
                reasons = text_of(importer.problems)
            else:
                module = bb.get()
        if reasons:
            warnings.warn(
                f"the import has no function forward, since evaluation mode cannot be imported:\n{reasons}",
                stacklevel=3,
            )
        elif evaluation is not None and evaluation.states:
            warnings.warn(
                "the function forward does not return the buffers that the module writes in evaluation mode: "
                + ", ".join(evaluation.states),
                stacklevel=3,
            )
        inputs = {param.name: param.ty for param in params[1 : 1 + len(training.inputs)]}
        return Imported(
            FuseAttention()(module),
            dict(list(inputs.items())[:count]),
            dict(list(inputs.items())[count:]),
            outputs,
            **{each: {key: copied(values[key]) for key in keys} for each, keys in groups.items()},
            aliases=self._aliases,
        )


def values_of(whole: Mapping[str, nn.Module]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parameters and buffers of a module and its loss, and the keys of tied ones."""
    params: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for prefix, module in whole.items():
        check_hooks(module)
        for found, named in (
            (params, module.named_parameters(prefix, remove_duplicate=False)),
            (buffers, module.named_buffers(prefix, remove_duplicate=False)),
        ):
            for key, each in named:
                if key in params or key in buffers:
                    raise ValueError(
                        f"the module and the loss both have {key!r}; rename one of them"
                    )
                found[key] = each
    return merged(params, buffers)


@contextlib.contextmanager
def modes(whole: Mapping[str, nn.Module], training: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in whole.values():
            stack.enter_context(mode(module, training))
        yield


@contextlib.contextmanager
def frozen_statistics(whole: Mapping[str, nn.Module], batch_norm: str) -> Iterator[None]:
    """Put batch normalisations with running statistics into evaluation mode, if that is asked for."""
    found = [
        each
        for module in whole.values()
        for each in module.modules()
        if isinstance(each, _BatchNorm) and each.running_mean is not None and each.training
    ]
    found = found if batch_norm == "frozen" else []
    for each in found:
        each.training = False
    try:
        yield
    finally:
        for each in found:
            each.training = True
