"""One function that computes the loss, its gradients and the update of an optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from .._progress import shown
from .._validation import alternatives, described
from ..ir.compat import dtype_of
from ..ir.signature import GROUPS
from ..ir.summary import summary
from . import _export
from ._build import module_of
from ._functions import StepFunctions
from ._models import Import
from ._names import of_file
from ._packing import packed
from ._precision import half_of, under_autocast
from ._recipe import Differentiate, Recipe, Settings, Workers
from ._rows import OtherRows, other_rows
from ._slots import EMA, MASTER, Slot
from ._source import source_of
from ._state import check_seed
from ._tensors import Tensors, as_tensor, shape_of
from .history import COUNTERS, History
from .optimizers import Optimizer


@dataclass(frozen=True)
class StepResult:
    """The results of one step.

    Attributes
    ----------
    loss : float
        The loss.
    metrics : dict[str, float]
        The metrics of the step.
    outputs : dict[str, tvm.runtime.Tensor]
        The model's outputs, if the step returns them.
    """

    loss: float
    metrics: dict[str, float]
    outputs: Tensors


@dataclass(frozen=True)
class TrainStep(StepFunctions):
    """A training step as a function of Relax.

    The groups of tensors are tuples of Relax, in the order of the attributes' keys. The results of
    a step are arguments of the next one.

    Attributes
    ----------
    module : tvm.IRModule
        ``step(*batch, *hyperparameters, seed, params, frozen, states, optimizer_state) -> (loss,
        metrics, outputs, params, states, optimizer_state)``, in training mode. ``seed`` is an
        integer of int64 without axes; without random numbers, the step does not read it. With
        ``accumulate > 1``, the function ``accumulate`` has the same parameters and results; it adds
        the gradients to those in the state, and updates nothing else. Functions for prediction
        stay, such as ``forward`` of an imported PyTorch model.
    batch : dict[str, relax.TensorType]
        The inputs and the targets.
    hyperparameters : dict[str, float]
        The scalars in float64 that each step takes, with their defaults: ``lr`` and, if its default
        is positive, ``weight_decay``. With several optimizers, ``lr:PATTERN`` and so on.
    params, frozen, states, optimizer_state : dict[str, relax.TensorType]
        The types of the tensors. The names in ``optimizer_state`` are ``step``, ``SLOT/PARAMETER``
        with PyTorch's names of slots, ``master/PARAMETER`` for the copies in float32 of parameters
        in a half precision, ``ema/PARAMETER``, ``gradient/PARAMETER``, ``loss_scale`` and
        ``good_steps``.
    metrics : tuple[str, ...]
        Scalars: ``grad_norm`` before it is clipped, ``applied`` (1 if the step updated the
        parameters, or added its gradient to those in the state, else 0), and ``loss_scale``.
    outputs : tuple[str, ...]
        The model's outputs that the step returns.
    accumulate : int
        The number of batches for each update.
    forward : Forward or None
        The function for prediction: its name, and the names of its last parameters.
    """

    #: The step for batches of other sizes, if the model is an import of one size.
    _other_rows: OtherRows[TrainStep] | None = None

    def __repr__(self) -> str:
        counts = {
            name: getattr(self, name) for name in ("params", "frozen", "states", "optimizer_state")
        }
        return summary("TrainStep", {"batch": self.batch}, counts)

    def for_workers(self, differentiate: Differentiate, shards: int = 1) -> TrainStep:
        """Return this step with another differentiation of its loss, and with parts of the
        optimizer's state; see ``Workers``.

        Its first metric is ``own_loss``.
        """
        return _made(replace(self._recipe, workers=Workers(differentiate, shards)))

    def with_parts(
        self,
        rewrite: Callable[[tvm.IRModule, str], tvm.IRModule],
        divided: Collection[str],
        differentiate: Differentiate | None = None,
        shards: int = 1,
    ) -> TrainStep:
        """Return this step for a worker that has parts of some parameters; see ``Workers``.

        Parameters
        ----------
        rewrite : Callable
            Takes the module and the name of the loss's function, and returns the module with the
            function of one worker.
        divided : Collection[str]
            The names of the parameters of which the worker has a part.
        differentiate : Differentiate, optional
            Another differentiation of its loss, as for :meth:`for_workers`.
        shards : int
            The number of groups among whose workers of the same place the optimizer's state is
            divided.
        """
        source = self._recipe.source
        changed = replace(source, module=rewrite(source.module, source.name))
        workers = Workers(differentiate, shards, divided)
        return _made(replace(self._recipe, source=changed, workers=workers))

    def places(self) -> dict[str, int]:
        """Return the positions of parameters and frozen parameters in the loss's function, by their
        names."""
        return {**self._recipe.source.signature.params, **self._recipe.source.signature.frozen}

    def initial(
        self, values: Mapping[str, object] | None = None
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Return the first parameters, frozen parameters, states and state of the optimizer.

        Parameters
        ----------
        values : Mapping[str, array or tensor], optional
            The values by their names. The others come from the import.

        Returns
        -------
        params, frozen, states, optimizer_state : dict[str, tvm.runtime.Tensor]
            Copies.

        Raises
        ------
        ValueError
            If a value is missing, has an unknown name, or has another shape or dtype.
        """
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(
                "values must be tensors by their names, such as trainer.values, but it is "
                f"{described(values)}{of_file(values)}"
            )
        left = dict(values or {})

        def taken(types: Mapping[str, relax.TensorType]) -> Tensors:
            group = {}
            for name, ty in types.items():
                value = left.pop(name, self._recipe.source.values.get(name))
                if value is None:
                    raise ValueError(
                        f"values: {name} is missing; its type is {ty}: pass "
                        f'values={{"{name}": array}}'
                    )
                group[name] = as_tensor(name, value, ty)
            return group

        params, frozen, states = map(taken, (self.params, self.frozen, self.states))
        if left:
            name = next(iter(left))
            known = [*self.params, *self.frozen, *self.states]
            raise ValueError(
                f"values: the step has no tensor {name!r}; {alternatives(name, known)}"
            )
        slots = {}
        for name, ty in self.optimizer_state.items():
            slot, dtype = Slot.parse(name), dtype_of(ty)
            if slot.param is not None and slot.kind in (MASTER, EMA):
                value = params[slot.param].numpy().astype(dtype)
            else:
                value = np.full(shape_of(ty), self._recipe.slots[name][1], dtype)
            slots[name] = tvm.runtime.tensor(value)
        return params, frozen, states, slots

    def export(
        self,
        folder: str | os.PathLike,
        *,
        target: tvm.target.Target | str | Mapping | Sequence | None = None,
        values: Mapping[str, object] | None = None,
        seed: int = 0,
        compiler: str | os.PathLike | None = None,
        compile_options: Mapping[str, object] | None = None,
    ) -> None:
        """Compile the step and write a folder for programs without Python.

        Of an import, the exported step takes batches of as many rows as the examples; for any
        number, give ``dynamic_shapes`` to the import.

        Parameters
        ----------
        folder : str or os.PathLike
            The folder; see :meth:`Trainer.export`.
        target : tvm.target.Target or str or Mapping or Sequence, optional
            The target, a CPU of any architecture, such as :func:`relax_grad.target.arm` returns; by
            default :func:`relax_grad.target.host`. Several levels of
            :func:`relax_grad.target.x86_64` make one library with a version for each. The program
            that loads it chooses the highest level that its processor has.
        compiler : str or os.PathLike, optional
            The C++ compiler that links the library. By default TVM's compiler for this machine's
            architecture, and the cross compiler ``ARCHITECTURE-linux-gnu-g++`` for another one.
        values, seed, compile_options
            As for :class:`Trainer`.

        Raises
        ------
        ValueError
            If several targets are no different levels of x86-64, or need a compiler that is not
            given; if the seed is out of range.
        FileNotFoundError
            If the compiler is not installed.
        """
        seed = check_seed(seed)
        targets = _export.targets_of(target)
        compiler = _export.compiler_for(targets[0], compiler)
        groups = dict(zip(GROUPS, self.initial(values), strict=True))
        versions = _export.versions(self, targets, compile_options)
        counters = {**dict.fromkeys(COUNTERS, 0), "seed": seed}
        described = {"counters": counters, "history": packed(History()), "more": {}}

        def write_state(path: Path) -> None:
            _export.write_state(path, self, groups, described)

        with _export.new_folder(folder) as part:
            _export.write_folder(self, part, versions, compiler, write_state)


def train_step(
    model: tvm.IRModule | object,
    optimizer: Optimizer | Mapping[str, Optimizer],
    *,
    wrt: Sequence[str] | str | None = None,
    states: Sequence[str] = (),
    func_name: str = "loss",
    loss: Callable | None = None,
    targets: Mapping | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    loss_scale: float | str | None = None,
    ema: float | None = None,
    skip_nonfinite: bool = False,
    outputs: bool = False,
    remat: str | int | Callable | None = None,
    precision: str | None = None,
) -> TrainStep:
    """Make one function of a loss, its gradients and an optimizer.

    Parameters
    ----------
    model : tvm.IRModule or relax_grad.frontend.torch.Imported or relax_grad.frontend.onnx.Imported
        A module with a function that returns the loss, first in a tuple if it returns more; or an
        import of a PyTorch or ONNX model.
    optimizer : Optimizer or Mapping[str, Optimizer]
        The optimizer. A mapping gives one to each group of parameters by names or patterns such as
        ``"*.bias"``; the first that matches counts.
    wrt : str or Sequence[str], optional
        The parameters to train, by their names; by default all trainable ones of an import.
    states : Sequence[str]
        Parameters of a module's function whose new values are its last results, in this order.
    func_name : str
        The function that returns the loss. A scalar parameter ``seed`` of int64 is the seed of its
        random numbers.
    loss, targets : Callable, Mapping
        The loss of an ONNX import, as for ``Imported.with_loss``.
    accumulate : int
        The number of batches whose mean gradient one update takes.
    clip_norm : float, optional
        The largest norm of all gradients together, as in ``torch.nn.utils.clip_grad_norm_``.
    clip_value : float, optional
        The largest magnitude of an element of a gradient. It is applied before ``clip_norm``.
    loss_scale : float or str, optional
        A factor of the loss while gradients are computed, for float16. ``"dynamic"`` adapts it as
        ``torch.amp.GradScaler`` does, and skips updates with gradients that are not finite.
    ema : float, optional
        The decay of the exponential moving average of the parameters, which is part of the
        optimizer's state.
    skip_nonfinite : bool
        Whether a loss or a gradient that is not finite leaves parameters, states and the
        optimizer's state as they were.
    outputs : bool
        Whether the step returns the model's outputs.
    remat : str or int or Callable, optional
        The results of the forward pass that are computed again in the backward pass, instead of
        being kept for it. By default none. All results keep their bits. The setting takes effect in
        the pipeline ``"relax_grad"``; calls of tensor functions after fusion are repeated.

        ``"auto"`` minimizes the kept bytes by a minimum cut, and repeats only calls with few
        operations for each byte, no convolutions, matrix products, attention and recurrent layers.
        ``"light"`` repeats as many of these calls as take about 2 % of the step's time at most, by
        an estimate. An integer is a budget in bytes for :attr:`Memory.peak`; any calls may be
        repeated to meet it, and if it cannot be met, the compilation raises ValueError with the
        least peak. The policies of ``jax.checkpoint_policies`` have their names:
        ``"everything_saveable"``, ``"nothing_saveable"``, ``"dots_saveable"`` and
        ``"dots_with_no_batch_dims_saveable"``;
        matrix products and convolutions are dots. A function takes a ``relax.Call`` of a tensor
        function, with the name ``call.args[0].name_hint``, and returns whether its results may be
        kept.
    precision : str, optional
        The precision of matrix products, convolutions, attention and recurrent layers: ``"bf16"``
        for bfloat16, or ``"fp16"`` for float16, which needs ``loss_scale="dynamic"`` in most
        models. Parameters, their gradients, the optimizer's state, the loss and the model's outputs
        stay in float32. An import of a PyTorch module is imported again within ``torch.autocast``
        and has PyTorch's dtypes; other models pass :class:`relax_grad.transform.Autocast`. By
        default all operators compute in the dtypes of the model.

    Returns
    -------
    step : TrainStep
        The function.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    GradientError
        If an operation has no gradient.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad.training import SGD, train_step
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(y))))
    >>> step = train_step(bb.get(), SGD(momentum=0.9), wrt="w")
    >>> list(step.optimizer_state), list(step.batch), step.hyperparameters
    (['step', 'momentum_buffer/w'], ['x'], {'lr': 0.001})
    """
    settings = Settings(
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss_scale=loss_scale,
        ema=ema,
        skip_nonfinite=skip_nonfinite,
        outputs=outputs,
        remat=remat,
    )
    model, dtype = under_autocast(model, half_of(precision))
    selected = partial(
        source_of, func_name=func_name, wrt=wrt, states=states, loss=loss, dtype=dtype
    )
    recipe = Recipe.of(selected(model, targets=targets), optimizer, settings)

    def of_other_rows(imported: Import, types: Mapping | None) -> TrainStep:
        if settings.has_budget:
            raise ValueError("remat is a budget in bytes, which needs a fixed number of rows")
        return _made(replace(recipe, source=selected(imported, targets=types)))

    with shown("differentiating the loss"):
        step = _made(recipe)
    return replace(step, _other_rows=other_rows(model, step.batch, targets, of_other_rows))


def _made(recipe: Recipe) -> TrainStep:
    types = recipe.source.types
    # Before the loss is differentiated, which takes longer, the optimizers check the parameters.
    slots = {name: ty for name, (ty, _) in recipe.slots.items()}
    return TrainStep(
        module=module_of(recipe),
        batch=types["batch"],
        hyperparameters=recipe.hyperparameters,
        params=types["params"],
        frozen=types["frozen"],
        states=types["states"],
        optimizer_state=slots,
        metrics=recipe.metrics,
        outputs=recipe.outputs,
        accumulate=recipe.settings.accumulate,
        forward=recipe.source.forward,
        _recipe=recipe,
    )
