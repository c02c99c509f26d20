"""Low-rank adaptation: small matrices that are trained beside frozen weights.

A weight W of ``y = x W^T`` stays as it is, and ``y + (alpha / rank) (x A^T) B^T`` takes the place
of y (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2022). The gradient of W is
never computed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import tvm
from tvm import relax

from .._validation import check_integer, described, matching
from ..ir.arrays import as_array, is_tensor
from ..ir.module import relax_function, with_functions
from ..ir.signature import Signature
from ..ir.summary import summary
from . import _files
from ._adapters import Adapter, adapted
from ._models import Batch, Import, OnnxImport, TorchImport
from ._quantized import FORMS, QuantizedWeight, choice, tensors_of
from ._readers import Reader, kinds_of

#: The metadata of a file of adapters.
_METADATA = "relax_grad.lora"


@dataclass(frozen=True)
class Lora:
    """A model with adapters, which :func:`train_step` takes.

    Attributes
    ----------
    model : tvm.IRModule or relax_grad.frontend.torch.Imported or relax_grad.frontend.onnx.Imported
        The model. Its trainable parameters belong to the adapters; all other weights are frozen.
    adapters : tuple[Adapter, ...]
        The adapters.
    params : dict[str, tvm.runtime.Tensor]
        The initial values of the adapters' parameters. The first step has the outputs of the model
        without them.
    base : dict[str, tvm.runtime.Tensor]
        The values of the frozen weights.
    rank : int
        The rank of the products B A.
    scale : float
        Their factor: alpha / rank.
    quantized : tuple[QuantizedWeight, ...]
        The frozen weights that are stored in 8 or 4 bits.
    kept : dict[str, str]
        If weights are to be stored so: the names of the others, and the reasons.
    """

    model: tvm.IRModule | Import
    adapters: tuple[Adapter, ...]
    params: dict[str, tvm.runtime.Tensor]
    base: dict[str, tvm.runtime.Tensor]
    rank: int
    scale: float
    quantized: tuple[QuantizedWeight, ...] = ()
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The numbers of rows that the model takes.
    _batch: Batch | None = dataclasses.field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        weights = [adapter.weight for adapter in self.adapters]
        counts = {"adapters": weights, "params": self.params, "base": self.base}
        return summary("Lora", {}, counts)

    def merged(self, values: Mapping[str, object] | None = None) -> dict[str, tvm.runtime.Tensor]:
        """Return the weights with their adapters added, under the names of the model without
        adapters.

        Weights of 8 and 4 bits are returned as floating-point numbers, of the dtype of the weights
        that they were made of: the numbers times their scales, to which the adapters are added.
        They are not the weights from before the quantisation.

        Parameters
        ----------
        values : Mapping[str, array or tensor], optional
            The trained parameters, such as ``trainer.params``; by default the initial ones.
        """
        trained = self._checked(self.params if values is None else values)
        stored = {weight.numbers: weight for weight in self.quantized}
        scales = {weight.scale for weight in self.quantized}
        merged = {}
        for name, value in self.base.items():
            if name in stored:
                merged[stored[name].weight] = stored[name].restored(self.base)
            elif name not in scales:
                merged[name] = value
        for adapter in self.adapters:
            old = merged[adapter.weight].numpy()
            a: np.ndarray = trained[adapter.a].astype("float64")
            b: np.ndarray = trained[adapter.b].astype("float64")
            change = (b.reshape(len(b), -1) @ a.reshape(len(a), -1)) * self.scale
            change = change if adapter.kind in ("linear", "conv") else change.T
            new = old.astype("float64") + change.reshape(old.shape)
            merged[adapter.weight] = tvm.runtime.tensor(new.astype(old.dtype))
        return merged

    def save(self, path: str | os.PathLike, values: Mapping[str, object] | None = None) -> None:
        """Write the parameters of the adapters alone to a file of safetensors.

        Parameters
        ----------
        path : str or os.PathLike
            The file. It is complete or as it was, also after a crash.
        values : Mapping[str, array or tensor], optional
            The trained parameters, such as ``trainer.params``; by default the initial ones.
        """
        trained = self._checked(self.params if values is None else values)
        tensors = {name: tvm.runtime.tensor(array) for name, array in trained.items()}
        _files.write(path, tensors, {_METADATA: {"rank": self.rank, "scale": self.scale}})

    def load(self, path: str | os.PathLike) -> Lora:
        """Return the model with the parameters of a file that :meth:`save` wrote.

        Raises
        ------
        ValueError
            If the file is no file of adapters, has another rank or scale, or has other names or
            shapes.
        """
        tensors, described = _files.read(path)
        settings = described.get(_METADATA)
        if not isinstance(settings, dict):
            raise ValueError(f"{path} has no adapters; Lora.save writes such files")
        wanted = {"rank": self.rank, "scale": self.scale}
        if settings != wanted:
            raise ValueError(
                f"{path} has adapters of {json.dumps(settings)}, not of {json.dumps(wanted)}"
            )
        trained = self._checked(tensors, f"{path}: ")
        params = {name: tvm.runtime.tensor(array) for name, array in trained.items()}
        is_module = isinstance(self.model, tvm.IRModule)
        model = self.model if is_module else _replaced(self.model, params=params)
        return dataclasses.replace(self, model=model, params=params)

    def _checked(
        self, values: Mapping[str, object], where: str = "values: "
    ) -> dict[str, np.ndarray]:
        """Return arrays of the adapters' parameters, in order."""
        if not isinstance(values, Mapping):
            remedy = "; write trainer.params" if hasattr(values, "params") else ""
            raise TypeError(
                "values must be the parameters of the adapters by their names, such as "
                f"trainer.params, but it is {described(values)}{remedy}"
            )
        arrays = {}
        for name, old in self.params.items():
            if name not in values:
                raise ValueError(f"{where}{name} is missing")
            value = np.ascontiguousarray(as_array(values[name]))
            if value.shape != tuple(old.shape) or str(value.dtype) != str(old.dtype):
                raise ValueError(
                    f"{where}{name} must have shape {tuple(old.shape)} and dtype {old.dtype}, "
                    f"but it has {value.shape} and {value.dtype}"
                )
            arrays[name] = value.reshape(tuple(old.shape))
        unknown = sorted(set(values) - set(arrays))
        if unknown:
            raise ValueError(f"{where}the model has no adapter {unknown[0]!r}")
        return arrays


def lora(
    model: object,
    rank: int,
    targets: str | Sequence[str] | Callable[[str], bool],
    *,
    alpha: float | None = None,
    seed: int = 0,
    values: Mapping[str, object] | None = None,
    func_name: str = "loss",
    frozen: str | None = None,
    group_size: int = 32,
) -> Lora:
    """Add low-rank adapters to weights, and freeze all weights.

    All functions of an import read the adapters, also for prediction. The initial values are the
    same as in the library peft: A is uniform in ``+-1 / sqrt(inputs)`` and B is 0; for a table, A
    is 0 and B is normal.

    Parameters
    ----------
    model : tvm.IRModule or relax_grad.frontend.torch.Imported or relax_grad.frontend.onnx.Imported
        An import of a PyTorch or ONNX model, or a module with a function that returns a loss.
    rank : int
        The rank.
    targets : str or Sequence[str] or Callable
        The weights: names or patterns such as ``"*.attn.*.weight"``, or a function from the name to
        a bool. Each must be read by ``matmul`` as the second operand, also transposed, by ``take``
        of rows, or by a convolution with one group.
    alpha : float, optional
        The factor of the adapters is ``alpha / rank``; by default 1.
    seed : int
        The seed of the first values.
    values : Mapping[str, array or tensor], optional
        For a module: the values of its weights by the names of the parameters. They are frozen;
        other parameters of the function are inputs.
    func_name : str
        For a module: the function.
    frozen : str, optional
        ``"int8"`` or ``"int4"`` stores the frozen weights of matrix products in 8 or 4 bits, with
        one scale for each group of ``group_size`` elements of an output. They are read by
        ``relax.grad.quantized_matmul``, whose kernel on CPUs widens them in registers.
        :attr:`Lora.quantized` lists them, and :attr:`Lora.kept` the others, such as tables and
        weights of convolutions, with the reasons.
    group_size : int
        The elements of a group, a multiple of 16. An output is padded to whole groups.

    Returns
    -------
    lora : Lora
        The model with adapters; :func:`train_step` takes it.

    Raises
    ------
    TypeError, ValueError
        If a target matches no weight, if a weight has another use, if the rank exceeds an extent of
        a weight, or if ``frozen`` fits no weight.

    Examples
    --------
    >>> import numpy as np
    >>> from tvm import relax
    >>> from relax_grad.training import SGD, Trainer, lora, train_step
    >>> x = relax.Var("x", relax.TensorType((4, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3, 5), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     with bb.dataflow():
    ...         y = bb.emit_output(relax.op.sum(relax.op.matmul(x, w)))
    ...     _ = bb.emit_func_output(y)
    >>> adapted = lora(bb.get(), 2, "w", values={"w": np.ones((3, 5), "float32")})
    >>> sorted(adapted.params)
    ['w.lora_A', 'w.lora_B']
    >>> trainer = Trainer(train_step(adapted, SGD()))
    >>> trainer.step(np.ones((4, 3), "float32")).loss
    60.0
    """
    rank = check_integer("rank", rank, 1)
    scale = 1.0 if alpha is None else _checked_alpha(alpha) / rank
    seed = check_integer("seed", seed, 0)
    group_size = _check_frozen(frozen, group_size)
    if isinstance(model, tvm.IRModule):
        readers, base = _readers_of_module(model, func_name, values)
        module, taken = model, {*base}
    elif isinstance(model, TorchImport | OnnxImport):
        if values is not None:
            raise ValueError("values are for modules; an import has its own")
        readers, base = _readers_of_import(model), {**model.params, **model.frozen}
        module, taken = model.module, {*base, *model.states}
    else:
        raise TypeError(
            "model must be a tvm.IRModule or a result of relax_grad.frontend.torch.from_module or "
            f"relax_grad.frontend.onnx.from_model, but it is {described(model)}; {_remedy(model)}"
        )
    chosen = _chosen(targets, base)
    kinds = kinds_of(readers, chosen)
    adapters = tuple(Adapter(name, kinds[name], *_names(name, taken)) for name in chosen)
    params = _initial(adapters, base, rank, seed)
    quantized: tuple[QuantizedWeight, ...] = ()
    kept: dict[str, str] = {}
    if frozen is not None:
        quantized, kept = choice(readers, base, frozen, group_size, taken)
        base = tensors_of(base, quantized, group_size)
    changed = {
        reader.name: adapted(reader, adapters, params, scale, base, quantized) for reader in readers
    }
    batch: Batch | None = getattr(model, "_batch", None)
    if batch is not None:
        again = partial(
            lora, rank=rank, targets=chosen, alpha=alpha, frozen=frozen, group_size=group_size
        )
        batch = _AdaptedBatch(batch, again)
    new: tvm.IRModule | Import = with_functions(module, changed)
    if not isinstance(model, tvm.IRModule):
        new = _replaced(model, module=new, params=params, frozen=base, _batch=batch)
    return Lora(new, adapters, params, base, rank, scale, quantized, kept, batch)


def _remedy(model: object) -> str:
    """Return the call that makes adapters of what was given instead of an import."""
    if isinstance(model, Lora):
        return "it has adapters already: give all targets to one call of lora"
    if hasattr(model, "named_parameters"):  # a module of PyTorch
        return "write lora(from_module(model, (x,), loss=loss, targets=(y,)), rank, targets)"
    return "write train_step(lora(imported, rank, targets), optimizer)"


class _AdaptedBatch:
    """The numbers of rows that an import with adapters takes, which are the import's.

    Parameters
    ----------
    batch : Batch
        The numbers of the import.
    again : Callable
        Adds the adapters to an import.
    """

    def __init__(self, batch: Batch, again: Callable[[Import], Lora]):
        self.rows, self.names, self.how = batch.rows, batch.names, batch.how
        self._batch, self._again = batch, again

    @property
    def reason(self) -> str:
        return self._batch.reason

    def imported(self) -> Import | None:
        """Return the import for any number of rows, with the adapters; None without one."""
        imported = self._batch.imported()
        return None if imported is None else self._again(imported).model


def _readers_of_module(
    model: tvm.IRModule, func_name: str, values: Mapping[str, object] | None
) -> tuple[list[Reader], dict[str, tvm.runtime.Tensor]]:
    """Return the function of a module that reads weights, and the weights."""
    if values is None:
        raise ValueError("values must have the weights of a module by the names of its parameters")
    base = {name: _tensor(name, value) for name, value in values.items()}
    function = relax_function(model, func_name)
    known = {param.name: param for param in function.params}
    for name in base:
        if name not in known:
            raise ValueError(
                f"values: {func_name} has no parameter {name!r}; it has {', '.join(known)}"
            )
    weights = {name: known[name] for name in base}
    return [Reader(func_name, function, weights, len(function.params))], base


def _readers_of_import(model: Import) -> list[Reader]:
    """Return the functions of an import that read its weights."""
    readers = []
    for variable, function in model.module.functions_items():
        attrs = function.attrs if isinstance(function, relax.Function) else None
        if attrs and "num_input" in attrs:
            # Weights have the same places whether the first input is a seed or not.
            signature = Signature.of_import(
                function, model.params, model.frozen, model.states, has_seed=False
            )
            weights = {
                name: function.params[at]
                for name, at in (signature.params | signature.frozen).items()
            }
            readers.append(Reader(variable.name_hint, function, weights, signature.num_inputs))
    return readers


def _checked_alpha(alpha: object) -> float:
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not math.isfinite(alpha)
        or alpha == 0
    ):
        raise ValueError(f"alpha must be a finite number other than 0, but it is {alpha!r}")
    return alpha


def _check_frozen(frozen: object, group_size: object) -> int:
    """Check the form of frozen weights, and return the size of a group."""
    if frozen is not None and (not isinstance(frozen, str) or frozen not in FORMS):
        raise ValueError(f'frozen must be None, "int8" or "int4", but it is {frozen!r}')
    size = check_integer("group_size", group_size, 16)
    if size % 16:
        raise ValueError(f"group_size must be a multiple of 16, but it is {size}")
    return size


def _replaced(model: Import, **fields: object) -> Import:
    """Return an import with other values of some fields. The imports of both front ends are
    dataclasses, which a protocol cannot say."""
    return dataclasses.replace(cast(Any, model), **fields)


def _tensor(name: str, value: object) -> tvm.runtime.Tensor:
    if isinstance(value, tvm.runtime.Tensor):
        return value
    if not is_tensor(value):
        raise TypeError(f"values: {name} must be an array or a tensor, but it is {value!r}")
    array = as_array(value)
    return tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape))


def _chosen(targets: Any, base: Mapping[str, tvm.runtime.Tensor]) -> list[str]:
    if callable(targets):
        chosen = [name for name in base if targets(name)]
        if not chosen:
            raise ValueError(f"targets chooses none of the weights {', '.join(list(base)[:8])}")
        return chosen
    patterns = [targets] if isinstance(targets, str) else targets
    if not isinstance(patterns, list | tuple | set | frozenset) or not all(
        isinstance(item, str) for item in patterns
    ):
        raise TypeError(
            f"targets must be names or patterns, or a function of the name, but it is {targets!r}"
        )
    selected = set()
    for pattern in patterns:
        selected.update(matching("targets", pattern, base, "weight"))
    if not selected:
        raise ValueError("targets must name at least one weight")
    return [name for name in base if name in selected]


def _names(weight: str, taken: set[str]) -> tuple[str, str]:
    start = weight.removesuffix(".weight")
    names = f"{start}.lora_A", f"{start}.lora_B"
    for name in names:
        if name in taken:
            raise ValueError(f"targets: {weight} has an adapter already: {name}")
    taken.update(names)
    return names


def _initial(
    adapters: Iterable, base: Mapping[str, tvm.runtime.Tensor], rank: int, seed: int
) -> dict[str, tvm.runtime.Tensor]:
    rng = np.random.default_rng(seed)
    params = {}
    for adapter in adapters:
        old = base[adapter.weight]
        dtype, shape = str(old.dtype), tuple(map(int, old.shape))
        if not dtype.startswith(("float", "bfloat")):
            raise TypeError(
                f"targets: {adapter.weight} must be of floating-point numbers, but it is of {dtype}"
            )
        is_outputs_first = adapter.kind in ("linear", "conv")
        outputs, inputs = (shape[0], shape[1]) if is_outputs_first else (shape[1], shape[0])
        most = min(outputs, inputs * math.prod(shape[2:]))
        if rank > most:
            raise ValueError(
                f"rank {rank} exceeds the rank of {adapter.weight}, whose shape is {shape}: "
                f"at most {most}"
            )
        window = shape[2:]
        if adapter.kind == "embedding":
            a, b = np.zeros((rank, inputs)), rng.normal(size=(outputs, rank))
        else:
            bound = 1 / math.sqrt(inputs * math.prod(window))
            a = rng.uniform(-bound, bound, (rank, inputs, *window))
            b = np.zeros((outputs, rank, *(1 for _ in window)))
        for name, value in ((adapter.a, a), (adapter.b, b)):
            params[name] = tvm.runtime.tensor(value.astype(old.numpy().dtype))
    return params
