"""The arguments of one step and of predictions: numbers and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

import numpy as np
import tvm
from tvm import relax

from .._validation import described
from ..cpu.threads import let_torch_threads_sleep
from ..ir.compat import dtype_of
from ..ir.extent_checks import ExtentCheck, extent_checks
from ..ir.index_ranges import IndexRange, index_ranges
from ._functions import StepFunctions
from ._slots import LR, Hyperparameter

#: The alignment in bytes of tensors whose memory compiled functions read.
_ALIGNMENT = 64


#: The remedy for a loader without a batch.
NO_BATCH = (
    "a DataLoader with drop_last=True gives none of fewer examples than its batch_size, and an "
    "iterator gives its batches only once"
)


def number(name: str, value: object) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or PyTorch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number, but it is {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, but it is {value}")
    return float(value)


def result_of(start: str, value: object) -> float:
    """Return the number that a caller's function returned, also as an array or a tensor of one
    element."""
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{start} {described(value)}") from error


def scalars_of(
    hyperparameters: Mapping[str, float], lr: float | None, others: dict[str, object]
) -> dict[str, float]:
    """Return the values of hyperparameters, and remove them from ``others``.

    Parameters
    ----------
    hyperparameters : Mapping[str, float]
        The defaults.
    lr : float, optional
        The learning rate of a step, or a factor for the rates of groups of parameters.
    others : dict[str, object]
        Values by the names of hyperparameters and of tensors.
    """
    scalars = dict(hyperparameters)
    for name in list(others):
        if name in scalars:
            scalars[name] = number(name, others.pop(name))
    if lr is not None:
        lr = number("lr", lr)
        for name in scalars:
            kind, pattern = Hyperparameter.parse(name)
            if kind == LR:
                scalars[name] = lr if pattern is None else scalars[name] * lr
    return scalars


def named_values(
    types: Mapping[str, relax.TensorType],
    hyperparameters: Mapping[str, float],
    batch: Sequence[object],
    others: Mapping[str, object],
) -> dict[str, object]:
    """Return the inputs and targets of a step, which are given by position and by name, in the
    order of ``types``."""
    _check_separate(types, batch)
    if len(batch) > len(types):
        raise TypeError(
            f"the step takes {len(types)} tensors ({', '.join(types)}), but {len(batch)} were given"
        )
    values = dict(zip(types, batch, strict=False))
    for name, value in others.items():
        if name in values:
            raise TypeError(f"{name} was given twice")
        if name not in types:
            known = ", ".join([*types, *hyperparameters])
            raise TypeError(f"the step has no input or hyperparameter {name!r}; it has {known}")
        values[name] = value
    missing = [name for name in types if name not in values]
    if missing:
        every = ", ".join(types)
        raise TypeError(
            f"the step needs {', '.join(missing)} too: it takes step({every}), and fit, evaluate "
            f"a list of such batches, [({every}), ...], or a DataLoader"
        )
    return {name: values[name] for name in types}


def check_loader(loader: object, types: Mapping[str, relax.TensorType]) -> None:
    """Raise TypeError if a loader is one batch, gives single examples, or is no loader."""
    if isinstance(loader, str | bytes | type):
        remedy = (
            f"make one: {loader.__name__}(dataset, batch_size=32)"
            if isinstance(loader, type)
            else 'read the file to arrays first, such as numpy.loadtxt(path, delimiter=",")'
        )
        raise TypeError(
            f"loader must give batches by iteration, but it is {described(loader)}; {remedy}"
        )
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        remedy = ": pass what it returns, loader=function()" if callable(loader) else ""
        raise TypeError(
            f"loader must give batches by iteration, but it is {described(loader)}{remedy}"
        )
    names = f"({', '.join(types)})"
    kinds = {
        f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(loader).__mro__
    }
    if "torch.Dataset" in kinds and "torch.DataLoader" not in kinds:
        raise TypeError(
            "loader must give batches, but it is a dataset, which gives single examples: pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    is_several = isinstance(loader, list | tuple) and len(loader) == len(types) > 1
    if (
        isinstance(loader, Mapping)
        or hasattr(loader, "shape")
        or (is_several and all(hasattr(item, "shape") for item in cast(Sequence, loader)))
    ):
        raise TypeError(
            f"loader must give batches, but it is {described(loader)}, which is one batch: pass "
            f"[{names}], or a torch.utils.data.DataLoader"
        )


def _check_separate(types: Mapping[str, relax.TensorType], batch: Sequence[object]) -> None:
    """Raise an error for a list, a tuple or a mapping of the tensors instead of a tensor."""
    first = batch[0] if len(batch) == 1 else None
    if isinstance(first, Mapping):
        raise TypeError("the step takes tensors, but it got a mapping of them: write step(**batch)")
    if isinstance(first, list | tuple) and any(hasattr(item, "shape") for item in first):
        raise TypeError(
            f"the step takes the tensors {', '.join(types)} one by one, but it got a "
            f"{type(first).__name__} of {len(first)}: write step(*batch)"
        )


def as_input(
    name: str, value: Any, ty: relax.TensorType, symbols: dict[str, int]
) -> tvm.runtime.Tensor:
    """Return an input as a tensor of TVM; a copy only of memory that TVM cannot read."""
    if isinstance(value, tvm.runtime.Tensor):
        # TVM refuses memory of others that is strided or not aligned.
        if not str(value.device).startswith("cpu"):
            raise ValueError(
                f"{name} must be on the CPU, but it is on {value.device}: pass {name}.numpy()"
            )
        tensor = value
    elif hasattr(value, "detach"):  # of PyTorch
        if value.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the CPU, but it is on {value.device}: pass {name}.cpu()"
            )
        tensor = _of_torch(value.detach().contiguous())
    else:
        try:
            tensor = tvm.runtime.tensor(np.array(value, order="C"))
        except (TypeError, ValueError) as error:  # such as lists of different lengths, and strings
            raise TypeError(
                f"{name} must be an array or a tensor, but it is {described(value)}"
                f"{_of_object(name, value, dtype_of(ty))}"
            ) from error
    dtype, shape = dtype_of(ty), tuple(tensor.shape)
    extents = tuple(ty.shape.values)
    fits = len(shape) == len(extents)
    for size, extent in zip(shape, extents, strict=False):
        if hasattr(extent, "value"):
            fits = fits and int(extent) == size
        elif isinstance(extent, tvm.tirx.Var):
            fits = fits and symbols.setdefault(extent.name, size) == size
    if not fits or str(tensor.dtype) != dtype:
        written = ", ".join(str(getattr(extent, "value", extent)) for extent in extents)
        written += "," if len(extents) == 1 else ""
        remedy = _converted(name, value, dtype) if fits else _of_rows(name, shape, extents, dtype)
        raise ValueError(
            f"{name} must have shape ({written}) and dtype {dtype}, but it has {shape} and "
            f"{tensor.dtype}{remedy}"
        )
    return tensor


def _of_rows(name: str, shape: Sequence[int], extents: Sequence, dtype: str) -> str:
    """Return the remedy for another number of rows, for a row alone, and for classes that have an
    axis too many; empty for other shapes."""
    sizes = tuple(int(extent) if hasattr(extent, "value") else -1 for extent in extents)
    if shape == sizes[1:]:
        return f": pass {name}[None] for a batch of one row"
    if len(shape) == len(sizes) and shape[1:] == sizes[1:] and sizes[0] >= 0:
        return (
            f"; the step was made for {sizes[0]} rows: give batches of {sizes[0]} rows, or import "
            f'with dynamic_shapes={{"{name}": {{0: "batch"}}, ...}} for all inputs and targets'
        )
    if len(shape) == len(sizes) + 1 and shape[0] == 1:
        return ": write predict(x), and step(*batch), without a list"
    if len(shape) == 2 and len(sizes) == 1 and "int" in dtype:
        column = f"{name}[:, 0]"
        return f": pass {column if shape[1] == 1 else f'{name}.argmax(1), if its rows are one-hot'}"
    return ""


def _of_object(name: str, value: object, dtype: str) -> str:
    """Return the remedy for a value that is no array of numbers."""
    if str(getattr(value, "dtype", "")) == "object":
        return f': pass {name}.astype("{dtype}")'
    if isinstance(value, list | tuple):
        return ", whose rows must have the same length"
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return f"; pass one batch: for {name}, ... in loader: ..."
    return ""


def _converted(name: str, value: object, dtype: str) -> str:
    """Return the remedy for a value of another dtype."""
    if hasattr(value, "detach"):
        return f": pass {name}.to(torch.{dtype})"
    if hasattr(value, "astype"):
        return f': pass {name}.astype("{dtype}")'
    return f': pass numpy.asarray({name}, "{dtype}")'


#: The end of the error of an index out of range.
_REMEDY = "; check_inputs=False leaves such values to the compiled step, whose results are then NaN"


def ranges_of(step: StepFunctions) -> tuple[IndexRange, ...]:
    """Return the ranges of the indices and classes in the batch of a ``TrainStep``."""
    source = step._recipe.source
    return _decided(index_ranges(source.module, source.name, step.batch), step.batch)


def forward_ranges_of(step: StepFunctions) -> tuple[IndexRange, ...]:
    """Return the ranges of the indices among the inputs of the prediction of a ``TrainStep``."""
    types = input_types(step)
    if step.forward is None or not types:
        return ()
    return _decided(index_ranges(step.module, step.forward.name, types), types)


def input_types(step: StepFunctions) -> dict[str, relax.TensorType]:
    """Return the types of the inputs of a ``TrainStep``'s function for prediction; none if it has
    no such function."""
    if step.forward is None:
        return {}
    params = list(step.module[step.forward.name].params)
    return {param.name: param.ty for param in params[: len(params) - len(step.forward.values)]}


def _decided(
    ranges: Sequence[IndexRange], types: Mapping[str, relax.TensorType]
) -> tuple[IndexRange, ...]:
    """Return the ranges whose extents the shapes of the inputs decide."""
    extents = (extent for ty in types.values() for extent in ty.shape.values)
    symbols = {extent.name for extent in extents if isinstance(extent, tvm.tirx.Var)}
    return tuple(
        known for known in ranges if isinstance(known.extent, int) or known.extent in symbols
    )


def checks_of(step: StepFunctions) -> tuple[ExtentCheck, ...]:
    """Return the conditions on the symbolic extents in the batch of a ``TrainStep``."""
    return extent_checks(step._recipe.source.module, step._recipe.source.name)


def forward_checks_of(step: StepFunctions) -> tuple[ExtentCheck, ...]:
    """Return the conditions on the symbolic extents of the prediction of a ``TrainStep``."""
    return () if step.forward is None else extent_checks(step.module, step.forward.name)


def check_ranges(
    ranges: Sequence[IndexRange], tensors: Mapping[str, tvm.runtime.Tensor], symbols: Mapping
) -> None:
    """Raise IndexError if an element is out of range."""
    for index_range in ranges:
        index_range.check(np.from_dlpack(tensors[index_range.input]), symbols, _REMEDY)


def _of_torch(value: Any) -> tvm.runtime.Tensor:
    let_torch_threads_sleep()
    if value.data_ptr() % _ALIGNMENT:
        value = value.clone()
    return tvm.runtime.from_dlpack(value)
