"""The loop around a compiled training step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

from ..ir.compat import dtype_of
from . import _export, _files
from .history import COUNTERS, History
from .step import Tensors, TrainStep, shape_of

#: The alignment in bytes of tensors whose memory compiled functions read.
_ALIGNMENT = 64


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
    ):
        if not isinstance(step, TrainStep):
            raise TypeError(f"step must be a result of train_step, but it is {step!r}")
        if on_nan not in ("raise", "skip"):
            raise ValueError(f'on_nan must be "raise" or "skip", but it is {on_nan!r}')
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an integer, but it is {seed!r}")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed must be from 0 to 2 ** 31 - 1, but it is {seed}")
        self.target = _export.target_of(target)
        _export.check_runs_here(self.target)
        self.train_step, self.seed, self.on_nan = step, seed, on_nan
        self._groups = dict(zip(_files.GROUPS, step.initial(values), strict=True))
        self._compile_options = compile_options
        self._executable = _export.compiled(step, self.target, compile_options)
        self._machine = relax.VirtualMachine(self._executable, tvm.cpu())
        self._tuples = {name: list(group.values()) for name, group in self._groups.items()}
        self.history = History()
        self.steps = self.updates = self.skipped = self.epoch = self.batch = 0

    # The tensors

    def _group(self, name: str) -> Tensors:
        return dict(zip(self._groups[name], self._tuples[name], strict=True))

    @property
    def params(self) -> Tensors:
        """Copies of the parameters by their names. A step writes to the parameters themselves."""
        return _copies(self._group("params"))

    @property
    def frozen(self) -> Tensors:
        """Copies of the frozen parameters by their names."""
        return _copies(self._group("frozen"))

    @property
    def states(self) -> Tensors:
        """Copies of the states, such as running statistics, by their names."""
        return _copies(self._group("states"))

    @property
    def optimizer_state(self) -> Tensors:
        """Copies of the state of the optimizer by its names."""
        return _copies(self._group("optimizer_state"))

    @property
    def values(self) -> Tensors:
        """Copies of parameters, frozen parameters and states by their names."""
        return _copies(self._values())

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
        FloatingPointError
            If the loss or a gradient is not finite; parameters, states and counters are those before the step.
        """
        start = time.perf_counter()
        scalars = self._scalars(lr, others)
        arguments = self._batch(batch, others)
        accumulate = self.train_step.accumulate
        updates = (self.steps + 1) % accumulate == 0
        function = self._machine["step" if updates else "accumulate"]
        seed = np.array((self.seed << 32) | (self.steps & 0xFFFFFFFF), "int64")
        loss, metrics, outputs, params, states, slots = function(
            *arguments,
            *(tvm.runtime.tensor(np.array(each, "float64")) for each in scalars.values()),
            tvm.runtime.tensor(seed),
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
        applied = metrics.get("applied", 1.0) == 1.0 or not updates
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

    def _scalars(self, lr: float | None, others: dict) -> dict[str, float]:
        """Return the hyperparameters, and remove them from ``others``."""
        found = dict(self.train_step.hyperparameters)
        for name in list(others):
            if name in found:
                found[name] = _number(name, others.pop(name))
        if lr is not None:
            lr = _number("lr", lr)
            for name in found:
                if name == "lr":
                    found[name] = lr
                elif name.startswith("lr:"):
                    found[name] *= lr
        return found

    def _batch(self, batch: Sequence, others: Mapping) -> list[tvm.runtime.Tensor]:
        types = self.train_step.batch
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
        return [_input(name, given[name], kind, symbols) for name, kind in types.items()]

    # The loop

    def fit(
        self,
        loader: Iterable,
        epochs: int = 1,
        *,
        schedule: Callable[[int], float] | object | None = None,
        callbacks: Sequence[Callable[[Trainer], object]] = (),
        evaluate: Callable[[Trainer], Mapping[str, float]] | None = None,
        patience: int | None = None,
        monitor: str = "loss",
        progress: bool = True,
    ) -> History:
        """Train until ``epochs`` epochs are complete, counted from the first.

        After :meth:`load`, training goes on with the batch behind the last one, if the loader has the same order.

        Parameters
        ----------
        loader : Iterable
            Gives the batches of an epoch: tuples or lists of tensors, dicts by names, or single tensors. If it has a
            method ``set_epoch``, that is called with the number of the epoch.
        epochs : int
            The number of epochs in all.
        schedule : Callable or scheduler, optional
            The learning rate by the number of the update, from 0; or a scheduler of ``torch.optim.lr_scheduler``, which
            steps after each update.
        callbacks : Sequence[Callable]
            Are called with the trainer after each step; a callback that returns True ends training.
        evaluate : Callable, optional
            Is called with the trainer after each epoch; its results are part of the history.
        patience : int, optional
            Ends training if ``monitor`` has not fallen for so many epochs.
        monitor : str
            ``"loss"`` is the mean loss of the epoch; other names are those of ``evaluate``'s results.
        progress : bool
            Whether to show a progress bar, if rich is installed.

        Returns
        -------
        history : History
            The course of training so far.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise ValueError(f"epochs must be a number of epochs, but it is {epochs!r}")
        if patience is not None and (
            isinstance(patience, bool) or not isinstance(patience, int) or patience < 1
        ):
            raise ValueError(
                f"patience must be a positive number of epochs, but it is {patience!r}"
            )
        if monitor != "loss" and evaluate is None:
            raise ValueError(f"monitor: {monitor!r} needs evaluate, which returns it")
        if isinstance(loader, Iterator) and epochs > self.epoch + 1:
            raise ValueError(
                "loader gives its batches only once, as generators do; for several epochs, pass a list or an object that "
                "begins anew at each iteration"
            )
        best, bad = math.inf, 0
        with _Bar(progress) as bar:
            while self.epoch < epochs:
                if not self._epoch(loader, epochs, schedule, callbacks, bar):
                    break
                found = dict(evaluate(self)) if evaluate is not None else {}
                mean = self._mean_loss()
                self.history.evaluations.append({"epoch": self.epoch, "mean_loss": mean, **found})
                self.epoch += 1
                if patience is None:
                    continue
                if monitor != "loss" and monitor not in found:
                    raise ValueError(
                        f"monitor: evaluate returns no {monitor!r}; it returns {', '.join(found) or 'nothing'}"
                    )
                value = mean if monitor == "loss" else float(found[monitor])
                best, bad = (value, 0) if value < best else (best, bad + 1)
                if bad >= patience:
                    break
        return self.history

    def _mean_loss(self) -> float:
        history = self.history
        losses = [
            loss
            for loss, epoch in zip(history.loss, history.epoch, strict=True)
            if epoch == self.epoch
        ]
        return float(np.mean(losses)) if losses else math.nan

    def _epoch(self, loader, epochs: int, schedule, callbacks, bar: _Bar) -> bool:
        """Run the rest of an epoch; return whether to go on."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        count = len(loader) if hasattr(loader, "__len__") else None
        bar.begin(f"epoch {self.epoch + 1}/{epochs}", count, self.batch)
        seen = 0
        for batch in loader:
            seen += 1
            if seen <= self.batch:  # before the file was saved
                continue
            before = self.updates
            result = self._one(batch, schedule)
            self.batch += 1
            bar.advance(result.loss)
            if hasattr(schedule, "get_last_lr") and self.updates > before:
                schedule.step()
            if any([callback(self) is True for callback in callbacks]):  # noqa: C419 (each is called)
                return False
        if not seen:
            raise ValueError("the loader gave no batch")
        self.batch = 0
        return True

    def _one(self, batch, schedule) -> StepResult:
        settings = {}
        if hasattr(schedule, "get_last_lr"):
            names = [
                each for each in self.train_step.hyperparameters if each.partition(":")[0] == "lr"
            ]
            rates = schedule.get_last_lr()
            if len(rates) != len(names):
                raise ValueError(
                    f"the scheduler has {len(rates)} groups of parameters, but the step has {len(names)}: {', '.join(names)}"
                )
            settings = dict(zip(names, map(float, rates), strict=True))
        elif schedule is not None:
            settings = {"lr": schedule(self.updates)}
        if isinstance(batch, Mapping):
            return self.step(**{**batch, **settings})
        return self.step(*(batch if isinstance(batch, list | tuple) else (batch,)), **settings)

    # Prediction

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
        values = self._values()
        if ema:
            values.update(self._averages())
        function = self.train_step.module[forward.name]
        kinds = [(param.name, param.ty) for param in function.params]
        kinds = kinds[: len(kinds) - len(forward.values)]
        if kinds and kinds[0][0] == "seed" and len(inputs) == len(kinds) - 1:
            inputs = (np.array((self.seed << 32) | (self.steps & 0xFFFFFFFF), "int64"), *inputs)
        if len(inputs) != len(kinds):
            raise TypeError(
                f"the model takes {len(kinds)} inputs ({', '.join(name for name, _ in kinds)}), but "
                f"{len(inputs)} were given"
            )
        symbols: dict = {}
        given = [
            _input(name, each, kind, symbols)
            for (name, kind), each in zip(kinds, inputs, strict=True)
        ]
        found = self._machine[forward.name](*given, *(values[name] for name in forward.values))
        if isinstance(found, tvm.runtime.Tensor):
            return found
        outputs = _leaves(found)
        return outputs[0] if len(outputs) == 1 else outputs

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
            "history": asdict(self.history),
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
            The folder. Files of the same names are replaced.
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
        _export.write_program(self.train_step, folder, versions, compiler)
        self.save(Path(folder, _export.STATE))

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
        found, described = _files.read(path)
        counters, history, more = _described(path, described)
        unknown = [name for name in found if name.partition("/")[0] not in _files.GROUPS]
        if unknown:
            raise ValueError(
                f"{path} has an unknown {unknown[0]}; it was written by a trainer of another step"
            )
        groups = {}
        for group in _files.GROUPS:
            types = getattr(self.train_step, group)
            names = {key.partition("/")[2] for key in found if key.startswith(f"{group}/")}
            for kind, some in (
                ("lacks", set(types) - names),
                ("has an unknown", names - set(types)),
            ):
                if some:
                    raise ValueError(
                        f"{path} {kind} {group}/{min(some)}; it was written by a trainer of another step"
                    )
            groups[group] = [
                _loaded(path, f"{group}/{name}", found[f"{group}/{name}"], kind)
                for name, kind in types.items()
            ]
        self._tuples = groups
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self.history = history
        return more


def _described(path, described: dict) -> tuple[dict[str, int], History, dict]:
    """Return the counters, the history and further values of a file."""
    parts = [described.get(name) for name in ("counters", "history", "more")]
    if not all(isinstance(each, dict) for each in parts):
        raise ValueError(f"{path} has no state of training; Trainer.save writes such files")
    counters, history, more = parts
    for name in COUNTERS:
        value = counters.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{path} is damaged: its counter {name} is {value!r}")
    try:
        return counters, History(**history), more
    except TypeError as error:
        raise ValueError(f"{path} is damaged: its history is of another form: {error}") from error


def _loaded(path, key: str, array: np.ndarray, kind: relax.TensorType) -> tvm.runtime.Tensor:
    shape = shape_of(kind)
    if array.shape != shape or str(array.dtype) != dtype_of(kind):
        raise ValueError(
            f"{path}: {key} has shape {array.shape} and dtype {array.dtype}, but the step needs {shape} and {dtype_of(kind)}"
        )
    return tvm.runtime.tensor(array)


def _leaves(result) -> list[tvm.runtime.Tensor]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result]
    return [leaf for each in result for leaf in _leaves(each)]


def _copies(tensors: Tensors) -> Tensors:
    return {name: tvm.runtime.tensor(each.numpy()) for name, each in tensors.items()}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number, but it is {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, but it is {value}")
    return float(value)


def _input(name: str, value: object, kind: relax.TensorType, symbols: dict) -> tvm.runtime.Tensor:
    """Return an input as a tensor of TVM; a copy only of memory that TVM cannot read."""
    if isinstance(value, tvm.runtime.Tensor):
        # TVM refuses memory of others that is strided or not aligned.
        if not str(value.device).startswith("cpu"):
            raise ValueError(f"{name} must be on the CPU, but it is on {value.device}")
        tensor = value
    elif hasattr(value, "detach"):  # of PyTorch
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, but it is on {value.device}")
        tensor = _of_torch(value.detach().contiguous())
    else:
        try:
            tensor = tvm.runtime.tensor(np.array(value, order="C"))
        except (TypeError, ValueError) as error:  # such as lists of different lengths, and strings
            raise TypeError(f"{name} must be an array or a tensor, but it is {value!r}") from error
    dtype, shape = dtype_of(kind), tuple(tensor.shape)
    wanted = tuple(kind.shape.values)
    fits = len(shape) == len(wanted)
    for found, extent in zip(shape, wanted, strict=False):
        if hasattr(extent, "value"):
            fits = fits and int(extent) == found
        elif isinstance(extent, tvm.tirx.Var):
            fits = fits and symbols.setdefault(extent.name, found) == found
    if not fits or str(tensor.dtype) != dtype:
        written = ", ".join(str(getattr(each, "value", each)) for each in wanted)
        raise ValueError(
            f"{name} must have shape ({written}) and dtype {dtype}, but it has {shape} and {tensor.dtype}"
        )
    return tensor


def _of_torch(value) -> tvm.runtime.Tensor:
    if value.data_ptr() % _ALIGNMENT:
        value = value.clone()
    return tvm.runtime.from_dlpack(value)


class _Bar:
    """A progress bar of rich, or none."""

    def __init__(self, wanted: bool):
        self._bar = self._task = None
        if wanted:
            try:
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("loss {task.fields[loss]}"),
            )

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, title: str, count: int | None, done: int) -> None:
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=count, completed=done, loss="")

    def advance(self, loss: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, advance=1, loss=f"{loss:.4g}")
