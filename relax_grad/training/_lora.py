"""Low-rank adaptation: small matrices that are trained beside frozen weights.

A weight W of ``y = x W^T`` stays as it is, and ``y + (alpha / rank) (x A^T) B^T`` takes the place of y (Hu et al., "LoRA:
Low-Rank Adaptation of Large Language Models", 2022). The gradient of W is never computed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from ..ir.bindings import bindings_of
from ..ir.compat import dtype_of
from ..ir.module import relax_function
from . import _files

_CONVOLUTIONS = {f"relax.nn.conv{n}d": n for n in (1, 2, 3)}

#: The metadata of a file of adapters.
_METADATA = "relax_grad.lora"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight.

    Attributes
    ----------
    weight : str
        The name of the weight.
    kind : str
        ``"linear"`` for a weight of shape (outputs, inputs), ``"transposed"`` for one of shape (inputs, outputs),
        ``"embedding"`` for a table of rows, and ``"conv"``.
    a, b : str
        The names of the parameters A, of shape (rank, inputs, ...), and B, of shape (outputs, rank, ...). The inputs of a
        table are its rows.
    """

    weight: str
    kind: str
    a: str
    b: str


@dataclass(frozen=True)
class Lora:
    """A model with adapters, which :func:`train_step` takes.

    Attributes
    ----------
    model : tvm.IRModule or relax_grad.frontend.torch.Imported or relax_grad.frontend.onnx.Imported
        The model. Its trainable parameters are those of the adapters; all other weights are frozen.
    adapters : tuple[Adapter, ...]
        The adapters.
    params : dict[str, tvm.runtime.Tensor]
        The initial values of the adapters' parameters. The first step has the outputs of the model without them.
    base : dict[str, tvm.runtime.Tensor]
        The values of the frozen weights.
    rank : int
        The rank of the products B A.
    scale : float
        Their factor: alpha / rank.
    """

    model: object
    adapters: tuple[Adapter, ...]
    params: dict[str, tvm.runtime.Tensor]
    base: dict[str, tvm.runtime.Tensor]
    rank: int
    scale: float

    def merged(self, values: Mapping[str, object] | None = None) -> dict[str, tvm.runtime.Tensor]:
        """Return the weights with their adapters added, under the names of the model without adapters.

        Parameters
        ----------
        values : Mapping[str, array or tensor], optional
            The trained parameters, such as ``trainer.params``; by default the initial ones.
        """
        given = self._checked(self.params if values is None else values)
        found = dict(self.base)
        for each in self.adapters:
            old = found[each.weight].numpy()
            a, b = (given[name].astype("float64") for name in (each.a, each.b))
            change = (b.reshape(len(b), -1) @ a.reshape(len(a), -1)) * self.scale
            change = change if each.kind in ("linear", "conv") else change.T
            new = old.astype("float64") + change.reshape(old.shape)
            found[each.weight] = tvm.runtime.tensor(new.astype(old.dtype))
        return found

    def save(self, path: str | os.PathLike, values: Mapping[str, object] | None = None) -> None:
        """Write the parameters of the adapters alone to a file of safetensors.

        Parameters
        ----------
        path : str or os.PathLike
            The file. It is complete or as it was, also after a crash.
        values : Mapping[str, array or tensor], optional
            The trained parameters, such as ``trainer.params``; by default the initial ones.
        """
        given = self._checked(self.params if values is None else values)
        tensors = {name: tvm.runtime.tensor(each) for name, each in given.items()}
        _files.write(path, tensors, {_METADATA: {"rank": self.rank, "scale": self.scale}})

    def load(self, path: str | os.PathLike) -> Lora:
        """Return the model with the parameters of a file that :meth:`save` wrote.

        Raises
        ------
        ValueError
            If the file is no file of adapters, has another rank or scale, or has other names or shapes.
        """
        found, described = _files.read(path)
        settings = described.get(_METADATA)
        if not isinstance(settings, dict):
            raise ValueError(f"{path} has no adapters; Lora.save writes such files")
        wanted = {"rank": self.rank, "scale": self.scale}
        if settings != wanted:
            raise ValueError(
                f"{path} has adapters of {json.dumps(settings)}, not of {json.dumps(wanted)}"
            )
        given = self._checked(found, f"{path}: ")
        params = {name: tvm.runtime.tensor(each) for name, each in given.items()}
        return dataclasses.replace(self, model=_with_params(self.model, params), params=params)

    def _checked(
        self, values: Mapping[str, object], where: str = "values: "
    ) -> dict[str, np.ndarray]:
        """Return arrays of the adapters' parameters, in order."""
        found = {}
        for name, old in self.params.items():
            if name not in values:
                raise ValueError(f"{where}{name} is missing")
            value = values[name]
            value = value.detach() if hasattr(value, "detach") else value
            value = np.ascontiguousarray(value.numpy() if hasattr(value, "numpy") else value)
            if value.shape != tuple(old.shape) or str(value.dtype) != str(old.dtype):
                raise ValueError(
                    f"{where}{name} must have shape {tuple(old.shape)} and dtype {old.dtype}, but it has {value.shape} "
                    f"and {value.dtype}"
                )
            found[name] = value.reshape(tuple(old.shape))
        unknown = sorted(set(values) - set(found))
        if unknown:
            raise ValueError(f"{where}the model has no adapter {unknown[0]!r}")
        return found


def lora(
    model: object,
    rank: int,
    targets: str | Sequence[str] | Callable[[str], bool],
    *,
    alpha: float | None = None,
    seed: int = 0,
    values: Mapping[str, object] | None = None,
    func_name: str = "loss",
) -> Lora:
    """Add low-rank adapters to weights, and freeze all weights.

    Every function of an import reads the adapters, that for prediction too. The first values are those of the library
    peft: A is uniform in ``+-1 / sqrt(inputs)`` and B is 0; of a table, A is 0 and B is normal.

    Parameters
    ----------
    model : tvm.IRModule or relax_grad.frontend.torch.Imported or relax_grad.frontend.onnx.Imported
        An import of a PyTorch or ONNX model, or a module with a function that returns a loss.
    rank : int
        The rank.
    targets : str or Sequence[str] or Callable
        The weights: names or patterns such as ``"*.attn.*.weight"``, or a function from the name to a bool. Each must be
        read by ``matmul`` as the second operand, also transposed, by ``take`` of rows, or by a convolution with one
        group.
    alpha : float, optional
        The factor of the adapters is ``alpha / rank``; by default 1.
    seed : int
        The seed of the first values.
    values : Mapping[str, array or tensor], optional
        For a module: the values of its weights by the names of the parameters. They are frozen; other parameters of the
        function are inputs.
    func_name : str
        For a module: the function.

    Returns
    -------
    lora : Lora
        The model with adapters; :func:`train_step` takes it.

    Raises
    ------
    TypeError, ValueError
        If a target matches no weight, if a weight has another use, or if the rank exceeds an extent of a weight.

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
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive integer, but it is {rank!r}")
    if alpha is not None and (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not math.isfinite(alpha)
        or alpha == 0
    ):
        raise ValueError(f"alpha must be a finite number other than 0, but it is {alpha!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer from 0, but it is {seed!r}")
    scale = 1.0 if alpha is None else alpha / rank
    if isinstance(model, tvm.IRModule):
        if values is None:
            raise ValueError(
                "values must have the weights of a module by the names of its parameters"
            )
        base = {name: _tensor(name, each) for name, each in values.items()}
        function = relax_function(model, func_name)
        known = {param.name: param for param in function.params}
        for name in base:
            if name not in known:
                raise ValueError(
                    f"values: {func_name} has no parameter {name!r}; it has {', '.join(known)}"
                )
        functions = {func_name: {name: known[name] for name in base}}
        module = model
    elif hasattr(model, "module") and hasattr(model, "frozen"):
        if values is not None:
            raise ValueError("values are for modules; an import has its own")
        base = {**model.params, **model.frozen}
        names = [*base, *model.states]
        module = model.module
        functions = {
            variable.name_hint: dict(zip(names, list(function.params)[-len(names) :], strict=True))
            for variable, function in module.functions_items()
            if isinstance(function, relax.Function)
            and function.attrs
            and "num_input" in function.attrs
        }
    else:
        raise TypeError(
            "model must be a tvm.IRModule or a result of relax_grad.frontend.torch.from_module or "
            f"relax_grad.frontend.onnx.from_model, but it is {model!r}"
        )
    chosen = _chosen(targets, base)
    kinds = _kinds(module, functions, chosen)
    taken = {*base, *(getattr(model, "states", {}))}
    adapters = tuple(Adapter(name, kinds[name], *_names(name, taken)) for name in chosen)
    params = _initial(adapters, base, rank, seed)
    changed = {
        name: _adapted(module[name], weights, adapters, params, scale, model)
        for name, weights in functions.items()
    }
    new = tvm.IRModule(
        {
            variable: changed.get(variable.name_hint, function)
            for variable, function in module.functions_items()
        },
        attrs=module.attrs,
        global_infos=module.global_infos,
    )
    if not isinstance(model, tvm.IRModule):
        new = dataclasses.replace(model, module=new, params=params, frozen=base)
    return Lora(new, adapters, params, base, rank, scale)


def _with_params(model, params):
    return model if isinstance(model, tvm.IRModule) else dataclasses.replace(model, params=params)


def _tensor(name: str, value: object) -> tvm.runtime.Tensor:
    if isinstance(value, tvm.runtime.Tensor):
        return value
    value = value.detach().numpy() if hasattr(value, "detach") else value
    if not isinstance(value, np.ndarray):
        raise TypeError(f"values: {name} must be an array or a tensor, but it is {value!r}")
    return tvm.runtime.tensor(np.ascontiguousarray(value).reshape(value.shape))


def _chosen(targets, base: Mapping[str, tvm.runtime.Tensor]) -> list[str]:
    if callable(targets):
        chosen = [name for name in base if targets(name)]
        if not chosen:
            raise ValueError(f"targets chooses none of the weights {', '.join(list(base)[:8])}")
        return chosen
    patterns = [targets] if isinstance(targets, str) else targets
    if not isinstance(patterns, list | tuple | set | frozenset) or not all(
        isinstance(each, str) for each in patterns
    ):
        raise TypeError(
            f"targets must be names or patterns, or a function of the name, but it is {targets!r}"
        )
    found = set()
    for pattern in patterns:
        matching = {name for name in base if name == pattern or fnmatchcase(name, pattern)}
        if not matching:
            near = difflib.get_close_matches(pattern, base, 3, 0.4) or list(base)[:8]
            raise ValueError(f"targets: no weight matches {pattern!r}; there are {', '.join(near)}")
        found |= matching
    if not found:
        raise ValueError("targets must name at least one weight")
    return [name for name in base if name in found]


def _names(weight: str, taken: set[str]) -> tuple[str, str]:
    start = weight.removesuffix(".weight")
    found = f"{start}.lora_A", f"{start}.lora_B"
    for name in found:
        if name in taken:
            raise ValueError(f"targets: {weight} has an adapter already: {name}")
    taken.update(found)
    return found


def _operator(value: relax.Expr) -> str:
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return value.op.name if is_call else type(value).__name__


def _swaps_last_axes(call: relax.Call) -> bool:
    axes = call.attrs.axes
    return call.args[0].ty.ndim == 2 and (axes is None or [int(each) for each in axes] == [1, 0])


def _uses(function: relax.Function, weights: Mapping[relax.Var, str]):
    """Yield each use of weights, and of their casts and transposes: the binding, the name and the kind, or no kind."""
    known = {variable: (name, False) for variable, name in weights.items()}
    for binding in bindings_of(function.body):
        value = binding.value
        read = [each for each in relax.analysis.free_vars(value) if each in known]
        for variable in read:
            name, is_turned = known[variable]
            kind = _kind(value, variable, is_turned)
            if kind in ("alias", "turn"):
                known[binding.var] = name, is_turned ^ (kind == "turn")
            else:
                yield binding, name, kind
    for variable in relax.analysis.free_vars(function.body.body):
        if variable in known:
            yield None, known[variable][0], None


def _kind(value: relax.Expr, variable: relax.Var, is_turned: bool) -> str | None:
    """Return the kind of a use of a weight, which may be transposed, or None."""
    name = _operator(value)
    if isinstance(value, relax.Var) or (name == "relax.astype"):
        return "alias"
    if name == "relax.permute_dims" and _swaps_last_axes(value):
        return "turn"
    places = [i for i, each in enumerate(getattr(value, "args", [])) if each.same_as(variable)]
    if variable.ty.ndim == 2 and name == "relax.matmul" and places == [1]:
        return "linear" if is_turned else "transposed"
    if name == "relax.take" and places == [0] and not is_turned and variable.ty.ndim == 2:
        axis = value.attrs.axis
        return "embedding" if axis is not None and int(axis) == 0 else None
    if name in _CONVOLUTIONS and places == [1]:
        letters = "WHD"[: _CONVOLUTIONS[name]][::-1]
        is_usual = str(value.attrs.kernel_layout) == f"OI{letters}" and int(value.attrs.groups) == 1
        return "conv" if is_usual and str(value.attrs.data_layout) == f"NC{letters}" else None
    return None


def _kinds(module, functions, chosen: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for function_name, weights in functions.items():
        wanted = {weights[name]: name for name in chosen}
        for binding, name, kind in _uses(module[function_name], wanted):
            reader = (
                "the result" if binding is None else _operator(binding.value).removeprefix("relax.")
            )
            if kind is None:
                raise ValueError(
                    f"targets: {name} is read by {reader} in {function_name}; an adapter needs a weight of matmul, of take "
                    "of rows, or of a convolution with one group"
                )
            if found.setdefault(name, kind) != kind:
                raise ValueError(
                    f"targets: {name} is read in two ways, as a weight of {found[name]} and of {kind} layers; leave it out"
                )
    for name in chosen:
        if name not in found:
            raise ValueError(f"targets: no function reads {name}")
    return found


def _initial(adapters, base, rank: int, seed: int) -> dict[str, tvm.runtime.Tensor]:
    rng = np.random.default_rng(seed)
    found = {}
    for each in adapters:
        old = base[each.weight]
        dtype, shape = str(old.dtype), tuple(map(int, old.shape))
        if not dtype.startswith(("float", "bfloat")):
            raise TypeError(
                f"targets: {each.weight} must be of floating-point numbers, but it is of {dtype}"
            )
        is_outputs_first = each.kind in ("linear", "conv")
        outputs, inputs = (shape[0], shape[1]) if is_outputs_first else (shape[1], shape[0])
        most = min(outputs, inputs * math.prod(shape[2:]))
        if rank > most:
            raise ValueError(
                f"rank {rank} exceeds that of {each.weight}, whose shape is {shape}: at most {most}"
            )
        window = shape[2:]
        if each.kind == "embedding":
            a, b = np.zeros((rank, inputs)), rng.normal(size=(outputs, rank))
        else:
            bound = 1 / math.sqrt(inputs * math.prod(window))
            a = rng.uniform(-bound, bound, (rank, inputs, *window))
            b = np.zeros((outputs, rank, *(1 for _ in window)))
        for name, value in ((each.a, a), (each.b, b)):
            found[name] = tvm.runtime.tensor(value.astype(old.numpy().dtype))
    return found


def _adapted(function, weights, adapters, params, scale, model) -> relax.Function:
    """Return a function with the parameters of the adapters, in front of the weights of an import."""
    variables = {
        name: relax.Var(
            name, relax.TensorType([int(each) for each in value.shape], str(value.dtype))
        )
        for name, value in params.items()
    }
    old = list(function.params)
    if isinstance(model, tvm.IRModule):
        new = [*old, *variables.values()]
    else:
        first = len(old) - len(model.params) - len(model.frozen) - len(model.states)
        new = [*old[:first], *variables.values(), *old[first:]]
    targets = {weights[each.weight]: each.weight for each in adapters}
    by_name = {each.weight: each for each in adapters}
    calls = [
        (binding.value, by_name[name])
        for binding, name, _ in _uses(function, targets)
        if binding is not None
    ]
    whole = relax.Function(new, function.body, function.ret_ty, function.is_pure, function.attrs)
    return _Adapting(calls, variables, scale).visit_expr(whole)


@relax.expr_functor.mutator
class _Adapting(relax.PyExprMutator):
    """Adds the outputs of adapters to those of calls."""

    def __init__(
        self,
        calls: Sequence[tuple[relax.Call, Adapter]],
        variables: Mapping[str, relax.Var],
        scale: float,
    ):
        super().__init__()
        self._calls, self._variables, self._scale = calls, variables, scale

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        new = super().visit_call_(call)
        adapter = next((adapter for each, adapter in self._calls if each.same_as(call)), None)
        if adapter is None:
            return new
        whole = self.builder_.emit(new)
        return op.add(whole, self._change(adapter, whole, self.builder_.lookup_binding(whole)))

    def _change(self, adapter: Adapter, whole: relax.Var, call: relax.Call) -> relax.Expr:
        emit = self.builder_.emit
        data = call.args[1 if adapter.kind == "embedding" else 0]
        dtype = dtype_of(whole.ty)
        a, b = (self._variables[name] for name in (adapter.a, adapter.b))
        if dtype_of(a.ty) != dtype:
            a, b = (emit(op.astype(each, dtype)) for each in (a, b))
        if adapter.kind == "conv":
            attrs = call.attrs
            make = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[_CONVOLUTIONS[call.op.name]]
            numbers = (attrs.strides, attrs.padding, attrs.dilation)
            inner = emit(make(data, a, *([int(each) for each in number] for number in numbers)))
            found = make(inner, b)
        elif adapter.kind == "embedding":
            inner = emit(op.take(emit(op.permute_dims(a)), data, 0, str(call.attrs.mode)))
            found = op.matmul(inner, emit(op.permute_dims(b)))
        else:
            inner = emit(op.matmul(data, emit(op.permute_dims(a))))
            found = op.matmul(inner, emit(op.permute_dims(b)))
        found = emit(found)
        return (
            found if self._scale == 1 else emit(op.multiply(found, relax.const(self._scale, dtype)))
        )
