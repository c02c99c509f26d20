"""The loop around a compiled training step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tvm

from .._validation import described
from ..ir.signature import GROUPS
from . import _export, _static
from ._ahead import Scheduler
from ._allocator import Allocator
from ._device import place_of
from ._evaluation import means
from ._loop import Loop
from ._moment import Moment
from ._names import NamesElsewhere
from ._packing import packed
from ._state import check_seed, read_state
from ._steps import InSteps
from ._tensors import copies_of
from ._trainer_type import TrainerType, remedy
from ._values import described as described_values
from ._values import named
from ._variant import Variants
from .history import COUNTERS, History
from .step import StepResult, Tensors, TrainStep


class Trainer(InSteps, NamesElsewhere, metaclass=TrainerType):
    """Compiles a training step once, and runs it.

    The step of an import takes batches of any number of rows, if the model does. The first batch of
    another size than the import's examples compiles a second step, for all other sizes. The first
    step is the faster one.

    Parameters
    ----------
    step : TrainStep
        The step.
    target : tvm.target.Target or str or Mapping, optional
        The target, a CPU; by default :func:`relax_grad.target.host`. With a device, its target.
    device : str, optional
        ``"cuda"`` or ``"cuda:1"`` to train on a GPU; see :doc:`/gpu`. By default the CPU.
    library : str, optional
        ``"torch"`` to let PyTorch's operators compute on the device; see
        :class:`relax_grad.backend.DispatchLibrary`.
    graph : bool
        Whether the device launches each step as one CUDA graph; see :doc:`/gpu`.
    values : Mapping[str, array or tensor], optional
        Initial values by their names, as for :meth:`TrainStep.initial`.
    seed : int
        The seed of the random numbers, from 0 to 2 ** 31 - 1. Each step draws new random numbers.
    on_nan : str
        If the loss or a gradient is not finite: ``"raise"`` raises FloatingPointError, and
        ``"skip"`` continues with the next batch. Both leave everything as it was before the step.
        Gradients are examined if the step was made with ``skip_nonfinite`` or dynamic loss scaling,
        the loss always. Steps that only dynamic loss scaling skips count as skipped.
    compile_options : Mapping, optional
        Further arguments of ``tvm.compile``, such as ``relax_pipeline``.
    check_inputs : bool
        Whether integers of a batch that select rows of a table, elements or classes are examined
        before a step. An index out of range is an IndexError, as in PyTorch; without the check, the
        compiled step computes NaN.
    distributed : relax_grad.distributed.Session, optional
        The workers that share each batch. The result is made by
        :func:`relax_grad.distributed.data_parallel`: a subclass with the same methods and files,
        and further arguments are passed to that function.

    Attributes
    ----------
    history : History
        The course of training.
    steps, updates, skipped, epoch, batch : int
        The numbers of batches, of updates, of skipped steps and of complete epochs, and the batches
        of the epoch that has begun.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm import relax
    >>> from relax_grad.training import SGD, Trainer, train_step
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(y))))
    >>> trainer = Trainer(train_step(bb.get(), SGD(), wrt="w"), values={"w": np.ones(3, "float32")})
    >>> trainer.step(np.ones((4, 3), "float32")).loss
    36.0
    >>> history = trainer.fit([(np.ones((4, 3), "float32"),)] * 2, epochs=2, progress=False)
    >>> history.epoch, history.loss[-1] < history.loss[0]
    ([0, 0, 0, 1, 1], True)
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        target: tvm.target.Target | str | Mapping | None = None,
        device: str | None = None,
        library: str | None = None,
        graph: bool = False,
        values: Mapping[str, object] | None = None,
        seed: int = 0,
        on_nan: str = "raise",
        compile_options: Mapping[str, object] | None = None,
        check_inputs: bool = True,
        distributed: None = None,
    ):
        if not isinstance(step, TrainStep):
            raise TypeError(
                f"step must be a result of train_step, but it is {described(step)}; write "
                f"{remedy(step)}"
            )
        if on_nan not in ("raise", "skip"):
            raise ValueError(f'on_nan must be "raise" or "skip", but it is {on_nan!r}')
        seed = check_seed(seed)
        if not isinstance(check_inputs, bool):
            raise TypeError(f"check_inputs must be True or False, but it is {check_inputs!r}")
        self._at = place_of(device, library, target, compile_options, graph)
        self.target = self._at.target
        self.train_step, self.on_nan = step, on_nan
        initial = dict(zip(GROUPS, step.initial(values), strict=True))
        groups = {name: list(group.values()) for name, group in initial.items()}
        self._moment = Moment(self._at.groups(groups), History(), seed)
        self._compile_options = compile_options
        self._executable = self._compiled(step)
        #: The virtual machine has one stack of frames for all threads.
        self._lock = threading.RLock()
        self._machine = self._started()
        self._allocator = Allocator()
        self._variants = Variants(step, self._machine, self._at, check_inputs)

    def _compiled(self, step: TrainStep) -> tvm.runtime.Executable:
        return self._at.step(step)

    def _started(self) -> Mapping:
        """Return the compiled functions by their names."""
        return self._at.machine(self._executable)

    # The tensors

    @property
    def params(self) -> Tensors:
        """Copies of the parameters by their names. A step writes to the parameters themselves."""
        return copies_of(self._group("params"))

    @property
    def frozen(self) -> Tensors:
        """Copies of the frozen parameters by their names."""
        return copies_of(self._group("frozen"))

    @property
    def states(self) -> Tensors:
        """Copies of the states, such as running statistics, by their names."""
        return copies_of(self._group("states"))

    @property
    def optimizer_state(self) -> Tensors:
        """Copies of the state of the optimizer by its names."""
        return copies_of(self._group("optimizer_state"))

    @property
    def values(self) -> Tensors:
        """Copies of parameters, frozen parameters and states by their names."""
        return copies_of(self._values())

    # Steps

    def step(self, *batch: object, lr: float | None = None, **others: object) -> StepResult:
        """Run one training step, which is atomic, and return its loss.

        After an error or an interrupt, the state is as before or as after the step. The step
        allocates its memory before it writes the first tensor. If it fails after that, every later
        call but :meth:`load` raises :class:`~relax_grad.errors.BrokenTrainerError`. Ctrl-C waits
        until the compiled step has ended.

        Parameters
        ----------
        *batch : array or tensor
            The inputs and the targets, in the step's order: arrays of NumPy, tensors of PyTorch or
            of TVM.
        lr : float, optional
            The learning rate; by default the optimizer's. With several optimizers it is a factor of
            each one's.
        **others : array or tensor or float
            Inputs and targets by their names, and other hyperparameters, such as ``weight_decay``.

        Returns
        -------
        result : StepResult
            The loss, from before the update, and the metrics.

        Raises
        ------
        TypeError, ValueError
            If a tensor is missing, is unknown, or has another shape or dtype.
        IndexError
            If an index or a class is out of range, with ``check_inputs``.
        FloatingPointError
            If the loss or a gradient is not finite; parameters, states and counters are as before
            the step.
        BrokenTrainerError
            If an earlier step did not end.
        """
        with self._lock:
            return self._step(batch, lr, others)

    # The loop

    def fit(
        self,
        loader: Iterable,
        epochs: int | None = None,
        *,
        schedule: Callable[[int], float] | Scheduler | None = None,
        callbacks: Sequence[Callable[[Trainer], object]] = (),
        evaluate: Callable[[Trainer], Mapping[str, float]] | None = None,
        patience: int | None = None,
        monitor: str = "loss",
        progress: bool = True,
        ahead: int | None = None,
    ) -> History:
        """Train until ``epochs`` epochs are complete, counted from the first.

        After :meth:`load`, training continues with the batch after the last one, if the loader has
        the same order. A scheduler of PyTorch has a separate state: save it with
        ``save(path, {"schedule": schedule.state_dict()})`` and pass the result of :meth:`load` to
        ``load_state_dict`` of a new scheduler. Its last rates are written to its optimizer, from
        which most schedulers compute the next ones. A new ``ReduceLROnPlateau`` without a loaded
        state gets the earlier values of ``monitor`` from the history.

        Parameters
        ----------
        loader : Iterable
            Gives the batches of an epoch: tuples or lists of tensors, dicts by names, or single
            tensors. If it has a method ``set_epoch``, that is called with the number of the epoch.
        epochs : int, optional
            The total number of epochs; by default one more than the number of complete epochs. A
            number that an earlier call has reached is an error. If a loaded file has reached it,
            nothing is trained.
        schedule : Callable or scheduler, optional
            The learning rate by the number of the update, from 0; or a scheduler of
            ``torch.optim.lr_scheduler``, which steps after each update. ``ReduceLROnPlateau`` steps
            after each epoch, with the value of ``monitor``.
        callbacks : Sequence[Callable]
            Are called with the trainer after each step; a callback that returns True ends training.
        evaluate : Callable, optional
            Is called with the trainer after each epoch; its results, numbers by their names, are
            part of the history. An example is
            ``lambda trainer: trainer.evaluate(others, metrics)``.
        patience : int, optional
            Ends training if ``monitor`` has not fallen for so many epochs, including the epochs
            before :meth:`load`. A training that had ended before :meth:`load` continues only
            with a larger number, or at a further call.
        monitor : str
            ``"loss"`` is the mean of the epoch's finite losses; other names are names of
            ``evaluate``'s results.
        progress : bool
            Whether to show a progress bar, if rich is installed.
        ahead : int, optional
            On a device, the number of steps that begin before the loss of the step before them is
            read, by default 2. The results have the same bits with any number. Each of these steps
            keeps its batch on the device. With callbacks, which see the trainer after each step,
            and with a scheduler without ``load_state_dict`` it is 0. On a CPU, and with another
            ``relax_pipeline``, it has no effect.

        Returns
        -------
        history : History
            The course of training from its beginning.

        Raises
        ------
        TypeError, ValueError
            If an argument or a batch does not fit. The trainer is as after the last step.
        FloatingPointError
            As for :meth:`step`.
        """
        self._settled()
        if not isinstance(progress, bool):
            raise TypeError(f"progress must be True or False, but it is {progress!r}")
        loop = Loop(self, loader, schedule, callbacks, evaluate, patience, monitor, ahead)
        loop.run(epochs, progress)
        return self.history

    # Prediction

    def evaluate(
        self,
        loader: Iterable,
        metrics: Mapping[str, Callable[..., float]] | None = None,
        *,
        ema: bool = False,
    ) -> dict[str, float]:
        """Return the means of the loss and of metrics over the examples of a loader, without an
        update.

        Parameters
        ----------
        loader : Iterable
            Gives batches, as for :meth:`fit`.
        metrics : Mapping[str, Callable], optional
            Functions ``metric(*outputs, *targets)`` by their names. They take the outputs of
            :meth:`predict` and the targets of a batch as arrays of NumPy, and return the mean over
            the batch.
        ema : bool
            Whether to use the moving average of the parameters.

        Returns
        -------
        means : dict[str, float]
            ``"loss"`` and the metrics. A batch has the weight of its first axis. The loss of a
            PyTorch import, which computes in training mode, is left out; a metric may compute it.

        Raises
        ------
        ValueError
            If the loader gives no batch, or nothing can be computed.
        TypeError
            If a metric returns no number.
        """
        self._settled()
        return means(self, loader, metrics, ema)

    def predict(
        self, *inputs: object, ema: bool = False
    ) -> tvm.runtime.Tensor | list[tvm.runtime.Tensor]:
        """Return the model's outputs in evaluation mode.

        Parameters
        ----------
        *inputs : array or tensor
            The inputs of the model, in its order, with their dtypes and any number of rows, if the
            model takes any.
        ema : bool
            Whether to use the moving average of the parameters.

        Returns
        -------
        outputs : tvm.runtime.Tensor or list of them
            The model's outputs; one tensor if there is only one. ``.numpy()`` makes it an array.

        Raises
        ------
        TypeError
            If an input is missing, or is no tensor.
        IndexError
            If an index is out of range, with ``check_inputs``.
        ValueError
            If the model has no function for prediction, or an input has another shape or dtype.
        """
        with self._lock:
            self._settled()
            prediction = self._variants.prediction_of(inputs)
            return prediction.outputs(inputs, self._values_of(ema), self._seed(), self._allocator)

    # Files

    def save(self, path: str | os.PathLike, more: Mapping[str, object] | None = None) -> None:
        """Write everything that is needed to resume training to one file of safetensors.

        The file is replaced only when the new one is complete.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        more : Mapping, optional
            Further values, such as the state of a scheduler, which :meth:`load` returns: numbers,
            text, lists, and mappings of them. Tuples become lists.

        Raises
        ------
        TypeError
            If ``more`` has other values. The message names the place, and the file is as before.
        ValueError
            If further values could not be read again.
        OSError
            If the file cannot be written, or is a pipe, a device or a folder.
        BrokenTrainerError
            If the last step did not end.
        """
        moment = self._settled()
        described = {
            "counters": {name: getattr(moment, name) for name in COUNTERS},
            "history": packed(moment.history),
            "more": described_values(named(more), "more"),
        }
        groups = {name: self._group(name) for name in GROUPS}
        _export.write_state(path, self.train_step, groups, described)

    def export(
        self,
        folder: str | os.PathLike,
        *,
        target: tvm.target.Target | str | Mapping | Sequence | None = None,
        compiler: str | os.PathLike | None = None,
        runtime: str = "tvm",
        extents: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
        memory: int | None = None,
    ) -> None:
        """Write a folder for programs without Python, with the state of this moment.

        The C++ library in :func:`relax_grad.runtime.folder` runs it: ``step.so`` is the compiled
        step, ``state.safetensors`` a file as :meth:`save` writes, and ``manifest.json`` describes
        names, shapes, dtypes and defaults. With ``runtime="none"``, the folder has sources of C99
        and an object file with the kernels, which need no runtime and no operating system. With
        the target :func:`relax_grad.target.wasm`, it has one WebAssembly module and a trainer in
        JavaScript, for pages, workers and Node.

        Parameters
        ----------
        folder : str or os.PathLike
            The folder. It appears when it is complete, and replaces an older one at once. Other
            files in the folder are kept.
        target, compiler
            As for :meth:`TrainStep.export`; by default the target of this trainer. For another
            target, the step is compiled again. Without a runtime, no compiler runs here. For
            WebAssembly, the compiler is a clang with its ``wasm-ld``, by default ``clang``, or
            ``"zig"``.
        runtime : str
            ``"tvm"`` for a library that needs TVM's runtime, or ``"none"`` for C that needs none:
            :func:`static_plan` returns its places and calls. WebAssembly never has one.
        extents : Mapping[str, int] or Sequence[Mapping[str, int]]
            The values of symbolic extents by their names, without a runtime, as for
            :func:`static_plan`.
        memory : int, optional
            The bytes that a trainer without a runtime may take at most. More is an error that says
            how many it needs, before the step is compiled.

        Raises
        ------
        FileNotFoundError
            If the compiler is not installed.
        ValueError
            If the step cannot run without a runtime, or needs more memory; the message names the
            obstacle.
        """
        self._settled()
        target = self._at.for_export(target)
        sizes = {"extents": extents or None, "memory": memory}
        if _export.is_without_runtime(runtime, target, compiler, sizes, self._compile_options):
            own = self.target if target is None else _export.target_of(target)
            write = _static.writer(own, compiler)
            with _export.new_folder(folder) as part:
                write(self.train_step, part, own, extents, memory, self.save)
            return
        targets = [self.target] if target is None else _export.targets_of(target)
        compiler = _export.compiler_for(targets[0], compiler)
        if target is None:
            versions = [(self.target, self._executable)]
        else:
            versions = _export.versions(self.train_step, targets, self._compile_options)
        with _export.new_folder(folder) as part:
            _export.write_folder(self.train_step, part, versions, compiler, self.save)

    def load(self, path: str | os.PathLike) -> dict[str, object]:
        """Continue from a file that :meth:`save` wrote, and return its further values.

        Parameters
        ----------
        path : str or os.PathLike
            The file.

        Returns
        -------
        more : dict
            The further values.

        Raises
        ------
        ValueError
            If the file is damaged or belongs to another step. The trainer is then as before.
        """
        self._wait()
        groups, counters, history, more = read_state(path, self.train_step)
        fields: dict[str, Any] = counters
        groups = self._at.groups(groups)
        self._take(Moment(groups, history, **fields, loaded_epoch=counters["epoch"]))
        return more
