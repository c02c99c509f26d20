"""The loop around a compiled training step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from . import _export, _files
from ._evaluation import Evaluation
from ._inputs import as_input, check_ranges, forward_ranges_of, number, ranges_of
from ._loop import Loop
from ._packing import packed
from ._state import check_seed, read_state
from ._tensors import copies_of, leaves_of
from .history import COUNTERS, History, thin
from .step import StepResult, Tensors, TrainStep

#: Frees the memory that TVM's allocators keep for later tensors of the same size.
_free = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")


class Trainer:
    """Compiles a training step once, and runs it.

    Parameters
    ----------
    step : TrainStep
        The step.
    target : tvm.target.Target or str or Mapping, optional
        The target, a CPU; by default :func:`relax_grad.target.host`.
    values : Mapping[str, array or tensor], optional
        Initial values by their names, as for :meth:`TrainStep.initial`.
    seed : int
        The seed of the random numbers, from 0 to 2 ** 31 - 1. Each step has random numbers of its own.
    on_nan : str
        If the loss or a gradient is not finite: ``"raise"`` raises FloatingPointError, and ``"skip"`` goes on with the next
        batch. Both leave everything as it was before the step. Gradients are examined if the step was made with
        ``skip_nonfinite`` or dynamic loss scaling, the loss always. Steps that only dynamic loss scaling skips count as
        skipped.
    compile_options : Mapping, optional
        Further arguments of ``tvm.compile``, such as ``relax_pipeline``.
    check_inputs : bool
        Whether integers of a batch that select rows of a table, elements or classes are examined before a step. An index out of
        range is an IndexError, as in PyTorch; without the check, the compiled step computes NaN.

    Attributes
    ----------
    history : History
        The course of training.
    steps, updates, skipped, epoch, batch : int
        The numbers of batches, of updates, of skipped steps and of complete epochs, and the batches of the epoch that has begun.

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
        values: Mapping[str, object] | None = None,
        seed: int = 0,
        on_nan: str = "raise",
        compile_options: Mapping[str, object] | None = None,
        check_inputs: bool = True,
    ):
        if not isinstance(step, TrainStep):
            raise TypeError(f"step must be a result of train_step, but it is {step!r}")
        if on_nan not in ("raise", "skip"):
            raise ValueError(f'on_nan must be "raise" or "skip", but it is {on_nan!r}')
        seed = check_seed(seed)
        if not isinstance(check_inputs, bool):
            raise TypeError(f"check_inputs must be True or False, but it is {check_inputs!r}")
        self._ranges = ranges_of(step) if check_inputs else ()
        self._forward_ranges = forward_ranges_of(step) if check_inputs else ()
        self.target = _export.target_of(target)
        _export.check_runs_here(self.target)
        self.train_step, self.seed, self.on_nan = step, seed, on_nan
        self._groups = dict(zip(_files.GROUPS, step.initial(values), strict=True))
        self._compile_options = compile_options
        self._tuples = {name: list(group.values()) for name, group in self._groups.items()}
        self._executable = self._compiled(step)
        self._machine = self._started()
        self._extents: dict[str, int] = {}
        self._evaluation = Evaluation(step, self.target, compile_options)
        self.history = History()
        self.steps = self.updates = self.skipped = self.epoch = self.batch = 0
        #: The epochs that were complete in the last file that was loaded.
        self._loaded_epoch = 0

    def _compiled(self, step: TrainStep) -> tvm.runtime.Executable:
        return _export.compiled(step, self.target, self._compile_options)

    def _started(self) -> Mapping:
        """Return the compiled functions by their names."""
        return relax.VirtualMachine(self._executable, tvm.cpu())

    # The tensors

    def _group(self, name: str) -> Tensors:
        return dict(zip(self._groups[name], self._tuples[name], strict=True))

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

    def _values(self) -> Tensors:
        return {
            name: each
            for group in ("params", "frozen", "states")
            for name, each in self._group(group).items()
        }

    # Steps

    def step(self, *batch: object, lr: float | None = None, **others: object) -> StepResult:
        """Run one step.

        Parameters
        ----------
        *batch : array or tensor
            The inputs and the targets, in the step's order: arrays of NumPy, tensors of PyTorch or of TVM.
        lr : float, optional
            The learning rate; by default the optimizer's. With several optimizers it is a factor of each one's.
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
            If the loss or a gradient is not finite; parameters, states and counters are those before the step.
        """
        start = time.perf_counter()
        scalars = self._scalars(lr, others)
        arguments = self._batch(batch, others)
        # Skipped batches have no place among those of an accumulated gradient.
        updates = (self.steps - self.skipped + 1) % self.train_step.accumulate == 0
        function = self._machine["step" if updates else "accumulate"]
        loss, metrics, outputs, params, states, slots = function(
            *arguments,
            *(tvm.runtime.tensor(np.array(each, "float64")) for each in scalars.values()),
            tvm.runtime.tensor(self._seed()),
            self._tuples["params"],
            self._tuples["frozen"],
            self._tuples["states"],
            self._tuples["optimizer_state"],
        )
        value = float(loss.numpy().reshape(()))
        metrics = {
            name: float(each.numpy())
            for name, each in zip(self.train_step.metrics, metrics, strict=True)
        }
        applied = metrics.get("applied", 1.0) == 1.0
        is_scaled = "loss_scale" in metrics
        keeps = math.isfinite(value) and (applied or is_scaled)
        if not keeps and self.on_nan == "raise":
            found = (
                f"the loss is {value}" if not math.isfinite(value) else "a gradient is not finite"
            )
            raise FloatingPointError(
                f"{found} in step {self.steps}; everything is as before the step. Lower the learning rate, clip the gradients, "
                'or skip such batches with on_nan="skip"'
            )
        self.steps += 1
        if not keeps or not applied:
            self.skipped += 1
        if keeps or is_scaled:
            self._tuples.update(params=params, states=states, optimizer_state=slots)
        self.updates += updates and keeps and applied
        self._note(value, scalars, metrics, time.perf_counter() - start)
        named = dict(zip(self.train_step.outputs, outputs, strict=True))
        return StepResult(value, metrics, named)

    def _note(self, loss: float, scalars: Mapping, metrics: Mapping, seconds: float) -> None:
        history = self.history
        history.step.append(self.steps - 1)
        history.epoch.append(self.epoch)
        history.loss.append(loss)
        history.lr.append(next(iter(scalars.values())))
        history.seconds.append(seconds)
        for name, value in metrics.items():
            history.metrics.setdefault(name, []).append(value)
        thin(history)

    def _scalars(self, lr: float | None, others: dict) -> dict[str, float]:
        """Return the hyperparameters, and remove them from ``others``."""
        found = dict(self.train_step.hyperparameters)
        for name in list(others):
            if name in found:
                found[name] = number(name, others.pop(name))
        if lr is not None:
            lr = number("lr", lr)
            for name in found:
                if name == "lr":
                    found[name] = lr
                elif name.startswith("lr:"):
                    found[name] *= lr
        return found

    def _batch(self, batch: Sequence, others: Mapping) -> list[tvm.runtime.Tensor]:
        return self._checked(self.train_step.batch, batch, others)

    def _checked(
        self, types: Mapping[str, relax.TensorType], batch: Sequence, others: Mapping
    ) -> list[tvm.runtime.Tensor]:
        """Return the inputs and targets as tensors of these types."""
        if len(batch) > len(types):
            raise TypeError(
                f"the step takes {len(types)} tensors ({', '.join(types)}), but {len(batch)} were given"
            )
        given = dict(zip(types, batch, strict=False))
        for name, value in others.items():
            if name in given:
                raise TypeError(f"{name} was given twice")
            if name not in types:
                known = ", ".join([*types, *self.train_step.hyperparameters])
                raise TypeError(f"the step has no input or hyperparameter {name!r}; it has {known}")
            given[name] = value
        missing = [name for name in types if name not in given]
        if missing:
            raise TypeError(f"the step needs {', '.join(missing)} too")
        symbols: dict = {}
        tensors = {name: as_input(name, given[name], kind, symbols) for name, kind in types.items()}
        check_ranges(self._ranges, tensors, symbols)
        self._begin(symbols)
        return list(tensors.values())

    def _begin(self, extents: dict[str, int]) -> None:
        """Free the memory of tensors of other symbolic extents, which TVM would keep for each size."""
        if extents != self._extents:
            _free()
            self._extents = extents

    # The loop

    def fit(
        self,
        loader: Iterable,
        epochs: int | None = None,
        *,
        schedule: Callable[[int], float] | object | None = None,
        callbacks: Sequence[Callable[[Trainer], object]] = (),
        evaluate: Callable[[Trainer], Mapping[str, float]] | None = None,
        patience: int | None = None,
        monitor: str = "loss",
        progress: bool = True,
    ) -> History:
        """Train until ``epochs`` epochs are complete, counted from the first.

        After :meth:`load`, training goes on with the batch behind the last one, if the loader has the same order. A scheduler of
        PyTorch has a state of its own, which ``save(path, {"schedule": schedule.state_dict()})`` keeps; a new
        ``ReduceLROnPlateau`` gets the earlier values of ``monitor`` from the history.

        Parameters
        ----------
        loader : Iterable
            Gives the batches of an epoch: tuples or lists of tensors, dicts by names, or single tensors. If it has a
            method ``set_epoch``, that is called with the number of the epoch.
        epochs : int, optional
            The number of epochs in all; by default one more than those that are complete. A number that an earlier call has
            reached is an error, and one that a loaded file has reached trains nothing.
        schedule : Callable or scheduler, optional
            The learning rate by the number of the update, from 0; or a scheduler of ``torch.optim.lr_scheduler``, which
            steps after each update. ``ReduceLROnPlateau`` steps after each epoch, with the value of ``monitor``.
        callbacks : Sequence[Callable]
            Are called with the trainer after each step; a callback that returns True ends training.
        evaluate : Callable, optional
            Is called with the trainer after each epoch; its results, numbers by their names, are part of the history. An
            example is ``lambda trainer: trainer.evaluate(others, metrics)``.
        patience : int, optional
            Ends training if ``monitor`` has not fallen for so many epochs. Those before :meth:`load` count, and a training that
            ended so before it goes on only with a larger number, or by a further call.
        monitor : str
            ``"loss"`` is the mean of the epoch's finite losses; other names are those of ``evaluate``'s results.
        progress : bool
            Whether to show a progress bar, if rich is installed.

        Returns
        -------
        history : History
            The course of training so far.

        Raises
        ------
        TypeError, ValueError
            If an argument or a batch does not fit. The trainer is as after the last step.
        FloatingPointError
            As for :meth:`step`.
        """
        Loop(self, loader, schedule, callbacks, evaluate, patience, monitor).run(epochs, progress)
        return self.history

    # Prediction

    def evaluate(
        self,
        loader: Iterable,
        metrics: Mapping[str, Callable[..., float]] | None = None,
        *,
        ema: bool = False,
    ) -> dict[str, float]:
        """Return the means of the loss and of metrics over the examples of a loader, without an update.

        Parameters
        ----------
        loader : Iterable
            Gives batches, as for :meth:`fit`.
        metrics : Mapping[str, Callable], optional
            Functions ``metric(*outputs, *targets)`` by their names. They take the outputs of :meth:`predict` and the targets of
            a batch as arrays of NumPy, and return the mean over the batch.
        ema : bool
            Whether to use the moving average of the parameters.

        Returns
        -------
        means : dict[str, float]
            ``"loss"`` and the metrics. A batch has the weight of its first axis. The loss of a PyTorch import, which computes
            in training mode, is left out; a metric may compute it.

        Raises
        ------
        ValueError
            If the loader gives no batch, or nothing can be computed.
        TypeError
            If a metric returns no number.
        """
        return self._evaluation.means(self, loader, metrics, ema)

    def predict(
        self, *inputs: object, ema: bool = False
    ) -> tvm.runtime.Tensor | list[tvm.runtime.Tensor]:
        """Return the model's outputs in evaluation mode.

        Parameters
        ----------
        *inputs : array or tensor
            The inputs of the model.
        ema : bool
            Whether to use the moving average of the parameters.

        Returns
        -------
        outputs : tvm.runtime.Tensor or list of them
            The model's outputs; one tensor if there is only one.

        Raises
        ------
        ValueError
            If the model has no function for prediction.
        """
        forward = self.train_step.forward
        if forward is None:
            raise ValueError(
                "the model has no function for prediction; imports of PyTorch and ONNX models have one"
            )
        values = self._values_of(ema)
        function = self.train_step.module[forward.name]
        kinds = [(param.name, param.ty) for param in function.params]
        kinds = kinds[: len(kinds) - len(forward.values)]
        if kinds and kinds[0][0] == "seed" and len(inputs) == len(kinds) - 1:
            inputs = (self._seed(), *inputs)
        if len(inputs) != len(kinds):
            raise TypeError(
                f"the model takes {len(kinds)} inputs ({', '.join(name for name, _ in kinds)}), but "
                f"{len(inputs)} were given"
            )
        symbols: dict = {}
        given = {
            name: as_input(name, each, kind, symbols)
            for (name, kind), each in zip(kinds, inputs, strict=True)
        }
        check_ranges(self._forward_ranges, given, symbols)
        self._begin(symbols)
        found = self._machine[forward.name](
            *given.values(), *(values[name] for name in forward.values)
        )
        if isinstance(found, tvm.runtime.Tensor):
            return found
        outputs = leaves_of(found)
        return outputs[0] if len(outputs) == 1 else outputs

    def _values_of(self, ema: bool) -> Tensors:
        return {**self._values(), **(self._averages() if ema else {})}

    def _seed(self) -> np.ndarray:
        """Return the seed of the next step."""
        return np.array((self.seed << 32) | (self.steps & 0xFFFFFFFF), "int64")

    def _averages(self) -> Tensors:
        slots = self._group("optimizer_state")
        if not any(name.startswith("ema/") for name in slots):
            raise ValueError(
                "the step has no moving average; make it with train_step(..., ema=0.999)"
            )
        return {
            name: tvm.runtime.tensor(slots[f"ema/{name}"].numpy().astype(each.numpy().dtype))
            for name, each in self._group("params").items()
        }

    # Files

    def save(self, path, more: Mapping[str, object] | None = None) -> None:
        """Write everything that training needs to go on to one file of safetensors.

        The file is replaced only when the new one is complete.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        more : Mapping, optional
            Further values for JSON, such as the state of a scheduler; :meth:`load` returns them.
        """
        counters = {name: getattr(self, name) for name in COUNTERS}
        described = {
            "counters": counters,
            "history": packed(self.history),
            "more": dict(more or {}),
        }
        groups = {name: self._group(name) for name in _files.GROUPS}
        _export.write_state(path, groups, described)

    def export(self, folder, *, target=None, compiler=None) -> None:
        """Write a folder for programs without Python, with the state of this moment.

        The C++ library in :func:`relax_grad.runtime.folder` runs it: ``step.so`` is the compiled step, ``state.safetensors``
        a file as :meth:`save` writes, and ``manifest.json`` describes names, shapes, dtypes and defaults.

        Parameters
        ----------
        folder : str or os.PathLike
            The folder. It appears when it is complete, and replaces an older one at once; other files in that are kept.
        target, compiler
            As for :meth:`TrainStep.export`; by default the target of this trainer. For another target, the step is compiled
            again.

        Raises
        ------
        FileNotFoundError
            If the compiler is not installed.
        """
        targets = [self.target] if target is None else _export.targets_of(target)
        compiler = _export.compiler_for(targets[0], compiler)
        if target is None:
            versions = [(self.target, self._executable)]
        else:
            versions = _export.versions(self.train_step, targets, self._compile_options)
        with _export.new_folder(folder) as part:
            _export.write_program(self.train_step, part, versions, compiler)
            self.save(part / _export.STATE)

    def load(self, path) -> dict[str, object]:
        """Go on from a file that :meth:`save` wrote.

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
        groups, counters, self.history, more = read_state(path, self.train_step)
        self._tuples = groups
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self._loaded_epoch = self.epoch
        return more
