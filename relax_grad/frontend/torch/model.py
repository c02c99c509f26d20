"""The import of a PyTorch module, and its result."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree

from ..._progress import shown
from ..._validation import check_integer
from ...errors import UnsupportedOperatorError
from .._arguments import Trainable
from .._batch import Batch, Changed
from ._arguments import check_arguments, check_map, check_options
from ._build import Options, Values, imported_from, values_of
from ._imported import Imported
from ._tensors import chosen, described, merged, uncompiled
from .export.trace import export, from_program
from .inputs.extents import DynamicShapes
from .inputs.names import Inputs
from .tracing.modes import flags_of, frozen_statistics, modes, with_flags

#: The import for another number of rows.
_HOW = "from_module(model, (x[:{rows}],), ...)"


def from_module(
    module: nn.Module,
    args: Sequence,
    kwargs: Mapping | None = None,
    *,
    loss: Callable | None = None,
    targets: Sequence = (),
    batch: int | None = None,
    dynamic_shapes: Mapping | Sequence | None = None,
    trainable: Trainable | None = None,
    batch_norm: str = "update",
    custom_convert_map: Mapping[str, Callable] | None = None,
) -> Imported:
    """Import a PyTorch module to train it.

    ``torch.export`` traces the module and the loss with example arguments, in training mode and in
    evaluation mode. The module stays as it is; its values are copied. A module that is in training
    mode already keeps the modes of its submodules, some of which may be in evaluation mode.

    Parameters
    ----------
    module : nn.Module
        The module.
    args : Sequence
        Example arguments of the module: tensors, also in nested lists, tuples and dicts. Arguments
        that are no tensors are constants.
    kwargs : Mapping, optional
        Example keyword arguments.
    loss : Callable, optional
        ``loss(output, *targets)`` returns a tensor of one element. If the loss is a module, its
        parameters are trained too. Without ``loss``, the module returns the loss: as a tensor of
        one element, as the first element of a tuple, or as the entry or attribute ``loss``. If it
        returns no loss, the import has no function ``loss``.
    targets : Sequence
        Example tensors for the further arguments of the loss.
    batch : int, optional
        The number of rows of each batch: the first axis of the inputs and targets. By default a
        :class:`relax_grad.training.Trainer` takes batches of any size if the module does. Its step
        for the size of the examples is the fastest. The first batch of another size imports and
        compiles a step for all other sizes, from the module, which the import keeps. The
        functions in ``module`` have the size of the examples. :meth:`Imported.explain` says
        whether other sizes are possible.
    dynamic_shapes : Mapping or Sequence, optional
        Symbolic extents of the functions in ``module``, instead of ``batch``. As in
        ``torch.export.export``, by the names of arguments: ``{"x": {0: "batch"}}``. Targets have
        the names ``target``, or ``target0`` and so on. Equal strings are one extent;
        ``torch.export.Dim`` is allowed too.
    trainable : str or Sequence[str] or Callable, optional
        The parameters to train: keys or patterns such as ``"head.*"``, or a function from the key
        to a bool. By default those with ``requires_grad``.
    batch_norm : str
        ``"update"``: batch normalisation in training mode uses the statistics of the batch, and
        returns new running statistics. ``"frozen"``: it uses the running statistics, and does not
        change them.
    custom_convert_map : Mapping[str, Callable], optional
        Converters ``(node, importer) -> relax.Var`` by the names of operators, such as
        ``"silu.default"``. They come before all others.

    Returns
    -------
    imported : Imported
        The module and the values of its parameters.

    Raises
    ------
    UnsupportedOperatorError
        If operations cannot be imported exactly; it lists all of them with the lines of the user's
        code.
    TypeError, ValueError
        If an argument does not fit.

    Examples
    --------
    >>> import torch
    >>> from relax_grad.frontend.torch import from_module
    >>> module, x, y = torch.nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, 2)
    >>> imported = from_module(module, (x,), loss=torch.nn.functional.mse_loss, targets=(y,))
    >>> [param.name for param in imported.module["loss"].params]
    ['seed', 'input', 'target', 'weight', 'bias']
    """
    if isinstance(module, nn.Module):
        module = uncompiled(module)
    check_arguments(module, args, kwargs, loss, targets, custom=custom_convert_map)
    check_options(trainable, batch_norm)
    inputs = Inputs.of(module, args, kwargs, targets)
    owners = {"": module, **({"loss": loss} if isinstance(loss, nn.Module) else {})}
    tensors, aliases = values_of(owners)
    values = Values(tensors, aliases, chosen(trainable, tensors, aliases))
    options = Options(batch_norm, dict(custom_convert_map or {}))
    inputs = _with_batch(inputs, batch, dynamic_shapes)
    shapes = DynamicShapes(dynamic_shapes, inputs)
    job = _Job(module, loss, owners, flags=flags_of(owners), values=values, options=options)
    is_fixed = dynamic_shapes is None

    def of(job: _Job, shown_as: str) -> Imported:
        with shown(shown_as):
            imported = job.imported(inputs, shapes)
        rows = _batch_of(job, inputs, batch, imported) if is_fixed else None
        return dataclasses.replace(imported, _batch=rows)

    first = of(job, "importing the module")

    def again(module: tvm.IRModule, dtype: str) -> Imported | None:
        if not module.same_as(first.module):  # the user's, or one with adapters
            return None
        job.check_same()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first import has given them
            return of(job.under_autocast(dtype), "importing the module under autocast")

    return dataclasses.replace(first, _again=again)


def _with_batch(inputs: Inputs, batch: int | None, dynamic_shapes: object) -> Inputs:
    """Return the examples with the number of rows that the user asks for."""
    if batch is None:
        return inputs
    batch = check_integer("batch", batch, 1)
    if dynamic_shapes is not None:
        raise ValueError("batch fixes the number of rows and dynamic_shapes frees it; give one")
    if not inputs.rows:
        raise ValueError(f"batch is {batch}, but the examples have no rows, as x[:2] would")
    return inputs.with_rows(batch)


def _batch_of(job: _Job, inputs: Inputs, batch: int | None, imported: Imported) -> Batch:
    """Return the numbers of rows that an import takes."""
    rows = inputs.rows
    if batch is not None:
        return Batch(rows, imported, None, _HOW, f"batch={batch} fixes it")
    if not rows:
        return Batch(None, imported, None, _HOW, "the examples have no rows")
    several = inputs if rows > 1 else inputs.with_rows(2)  # torch.export fixes an extent of 1

    def again() -> Imported:
        job.check_same()
        return job.imported(several, DynamicShapes.of_rows(several, several.rows or 0))

    return Batch(rows, imported, again, _HOW)


@dataclasses.dataclass(frozen=True)
class _Job:
    """The import of a module with any examples.

    Attributes
    ----------
    module, loss
        As for :func:`from_module`.
    owners : dict[str, nn.Module]
        The modules by their prefixes.
    flags : list[tuple[nn.Module, bool]]
        The modes of submodules.
    values : Values
        Their tensors.
    options : Options
        The options of the import.
    """

    module: nn.Module
    loss: Callable | None
    owners: dict[str, nn.Module]
    flags: list[tuple[nn.Module, bool]]
    values: Values
    options: Options

    def under_autocast(self, dtype: str) -> _Job:
        """Return the import within ``torch.autocast``."""
        options = self.options._replace(autocast=getattr(torch, dtype))
        return dataclasses.replace(self, options=options)

    def check_same(self) -> None:
        """Raise an error if the module has other submodules than at first."""
        old, new = (
            [id(part) for part, _ in flags] for flags in (self.flags, flags_of(self.owners))
        )
        if old != new:
            raise Changed("the submodules of the module have changed since the import")

    def imported(self, inputs: Inputs, shapes: DynamicShapes) -> Imported:
        """Return the import in the modes that the module had at first."""
        owners, options = self.owners, self.options
        evaluation, reasons = None, None
        arguments, cast = (shapes, options.custom), options.autocast
        with with_flags(owners, self.flags):
            with modes(owners, True), frozen_statistics(owners, options.batch_norm):
                training = export(self.module, inputs, self.loss, *arguments, autocast=cast)
            with modes(owners, False):
                try:
                    others = inputs.without_targets()
                    evaluation = export(self.module, others, None, *arguments, autocast=cast)
                except UnsupportedOperatorError as error:
                    reasons = str(error)
        count = len(training.inputs) - len(inputs.target_tensors)
        programs = training, evaluation
        return imported_from(*programs, self.values, options, count, reasons, stacklevel=5)


def from_exported_program(
    ep: torch.export.ExportedProgram,
    *,
    trainable: Trainable | None = None,
    batch_norm: str = "update",
    custom_convert_map: Mapping[str, Callable] | None = None,
) -> Imported:
    """Import a program that ``torch.export.export`` returned for a module in training mode.

    :func:`from_module` is safer: an exported program has lost hooks, regions of
    ``torch.inference_mode`` and the gradients of ``torch.autograd.Function``, and does not tell.
    There is no function ``forward``, because the program has one mode only.

    Parameters
    ----------
    ep : torch.export.ExportedProgram
        The program, without ``run_decompositions``, which drops ``detach`` and ``no_grad``. It is
        left as it is.
    trainable, batch_norm, custom_convert_map
        As for :func:`from_module`.

    Returns
    -------
    imported : Imported
        The module and the values of its parameters. The inputs have the program's names. The
        function is ``loss`` if the program returns a loss, as for :func:`from_module`, and
        ``training`` otherwise.

    Raises
    ------
    UnsupportedOperatorError
        If operations cannot be imported exactly.
    TypeError, ValueError
        If an argument does not fit, or the program is decomposed.

    Examples
    --------
    >>> import torch
    >>> from relax_grad.frontend.torch import from_exported_program
    >>> program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> imported = from_exported_program(program)
    >>> list(imported.params), list(imported.inputs), list(imported.outputs)
    (['weight', 'bias'], ['input'], ['output'])
    """
    if not isinstance(ep, torch.export.ExportedProgram):
        raise TypeError(
            f"ep must be a torch.export.ExportedProgram, but it is {described(ep)}{_remedy(ep)}"
        )
    check_map(custom_convert_map)
    check_options(trainable, batch_norm)
    if ep.dialect != "TRAINING":
        raise ValueError(
            "ep is decomposed, which drops detach and no_grad; give the program that "
            "torch.export.export returns"
        )
    options = Options(batch_norm, dict(custom_convert_map or {}))
    program = from_program(ep, options.custom)
    tensors, aliases = merged(dict(ep.named_parameters()), dict(ep.named_buffers()))
    values = Values(tensors, aliases, chosen(trainable, tensors, aliases))
    return imported_from(program, None, values, options, len(program.inputs))


def import_for_wrap(
    module: nn.Module,
    inputs: Inputs,
    dynamic_shapes: Mapping | Sequence | None,
    custom_convert_map: Mapping[str, Callable] | None,
) -> tuple[Imported, tuple[pytree.TreeSpec, list], set[tuple[int, str]]]:
    """Import a module in the modes that its submodules have, and return the form of its result and
    the attributes that its trace has read, too.

    The import has one function, ``training``. All floating-point parameters are in ``params``.
    """
    tensors, aliases = values_of({"": module})
    values = Values(tensors, aliases, chosen(lambda key: True, tensors, aliases))
    options = Options("update", dict(custom_convert_map or {}))
    shapes = DynamicShapes(dynamic_shapes, inputs)
    params = [tensors[key] for key in values.params]
    frozen = [param for param in params if not param.requires_grad]
    try:
        for param in frozen:  # the gradient may be wanted later
            param.requires_grad_(True)
        program = export(module, inputs, None, shapes, options.custom, has_gradients=True)
    finally:
        for param in frozen:
            param.requires_grad_(False)
    program.loss = None  # it is among the outputs
    if program.form is None:
        raise RuntimeError("the export of a module must have the form of its result")
    imported = imported_from(
        program, None, values, options, len(program.inputs), copies_values=False
    )
    return imported, program.form, program.reads


def _remedy(ep: object) -> str:
    if isinstance(ep, str) or hasattr(ep, "__fspath__"):
        return "; write torch.export.load(path)"
    if isinstance(ep, nn.Module):
        return "; write from_module(model, (x,)), or torch.export.export(model, (x,))"
    return ""
