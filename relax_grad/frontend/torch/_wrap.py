"""Modules of PyTorch whose forward and backward run through TVM."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from ...cpu.target import CPU, host
from ...ir.compat import dtype_of
from ...ir.index_ranges import index_ranges
from ._arguments import check_arguments
from ._build import values_of
from ._compiled import ALIGNMENT, Compiled, Run, compiled, plain
from ._export import TENSOR, named_inputs
from ._hooks import hooks_of
from ._imported import Imported
from ._tensors import described
from .model import as_it_is

#: The constants that a module may return beside tensors.
_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def wrap(
    module: nn.Module,
    args: Sequence,
    kwargs: Mapping | None = None,
    *,
    target: tvm.target.Target | str | Mapping | None = None,
    compile_options: Mapping[str, object] | None = None,
    dynamic_shapes: Mapping | Sequence | None = None,
    custom_convert_map: Mapping[str, Callable] | None = None,
) -> nn.Module:
    """Return a module whose forward and backward run through TVM.

    It trains in any loop of PyTorch. Its parameters, buffers and submodules are those of the given module, under the same
    keys of the ``state_dict``. Functions are compiled at the first call: for each combination of training and evaluation
    mode of the submodules, and of tensors that need a gradient.

    Parameters
    ----------
    module : nn.Module
        The module, on the CPU.
    args : Sequence
        Example arguments. Later arguments have their shapes and dtypes; values that are no tensors are constants.
    kwargs : Mapping, optional
        Example keyword arguments.
    target : tvm.target.Target or str or Mapping, optional
        The target, a CPU; by default :func:`relax_grad.target.host`.
    compile_options : Mapping, optional
        Further arguments of ``tvm.compile``, such as ``relax_pipeline``.
    dynamic_shapes : Mapping or Sequence, optional
        Symbolic extents, as for :func:`from_module`.
    custom_convert_map : Mapping[str, Callable], optional
        Converters, as for :func:`from_module`.

    Returns
    -------
    wrapped : nn.Module
        The module. After a forward pass in training mode, its buffers have their new values. Random numbers have a seed
        from the generator of PyTorch.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. A call raises them for tensors of another device, dtype or shape.
    IndexError
        At a call, if an index or a class among the arguments is out of range.
    UnsupportedOperatorError
        At a call, if operations cannot be imported exactly.
    GradientError
        At a call, if an operation has no gradient.

    Examples
    --------
    >>> import torch
    >>> from relax_grad.frontend.torch import wrap
    >>> model = wrap(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> list(model.state_dict())
    ['weight', 'bias']
    """
    check_arguments(module, args, kwargs, None, (), custom_convert_map)
    if isinstance(module, Wrapped):
        raise ValueError("module is wrapped already")
    chosen = host() if target is None else _target(target)
    if CPU.of(chosen) is None:
        raise ValueError(f"target must be a CPU, but it is {chosen}")
    if compile_options is not None and not isinstance(compile_options, Mapping):
        raise TypeError(
            f"compile_options must be a mapping of arguments of tvm.compile, but it is {described(compile_options)}"
        )
    examples = _Examples(module, tuple(args), dict(kwargs or {}))
    options = _Options(chosen, compile_options, dynamic_shapes, custom_convert_map)
    return Wrapped(module, examples, options)


def _target(given: tvm.target.Target | str | Mapping) -> tvm.target.Target:
    if not isinstance(given, tvm.target.Target | str | Mapping):
        raise TypeError(
            f"target must be a tvm.target.Target, a string or a mapping, but it is {given!r}"
        )
    try:
        return tvm.target.Target(dict(given) if isinstance(given, Mapping) else given)
    except (ValueError, TypeError, tvm.error.InternalError) as error:
        raise ValueError(f"target is not one of TVM's, {given!r}: {error}") from error


class _Options:
    """The arguments of :func:`wrap` besides the module and the examples."""

    def __init__(self, target, compile_options, dynamic_shapes, custom_convert_map):
        self.target = str(target)  # a target cannot be copied by deepcopy
        self.compile_options = dict(compile_options or {})
        self.dynamic_shapes = dynamic_shapes
        self.custom_convert_map = custom_convert_map

    def compiled(self, imported: Imported, wrt: Sequence[int]) -> Compiled:
        return compiled(imported, wrt, tvm.target.Target(self.target), self.compile_options)


class Wrapped(nn.Module):
    """The result of :func:`wrap`. Other attributes are those of the original module."""

    def __init__(self, module: nn.Module, examples: _Examples, options: _Options):
        super().__init__()
        self.__dict__["_original"] = module
        self.__dict__["_examples"] = examples
        self.__dict__["_options"] = options
        self.__dict__["_functions"] = _Functions()
        self.__dict__["_layout"] = None
        # Both modules have the same tensors and submodules.
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:  # while it is unpickled
                raise
            return getattr(self.__dict__["_original"], name)

    def __getstate__(self):
        return {**self.__dict__, "_layout": None}

    def __repr__(self) -> str:
        return f"wrap({self._original!r})"

    def train(self, mode: bool = True) -> Wrapped:
        """Set training or evaluation mode."""
        self._original.train(mode)
        self.training = self._original.training
        return self

    def state_dict(self, *args, **kwargs):
        """Return the state_dict of the original module."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """Load the state_dict of the original module."""
        return self._original.load_state_dict(*args, **kwargs)

    def forward(self, *args, **kwargs):
        """Run the module through TVM."""
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "a wrapped module runs in the dtypes that it was traced with: call it outside of torch.autocast, or enter "
                "torch.autocast within the forward function of the original module"
            )
        original = self._original
        if original.training is not self.training:
            original.training = self.training
        layout = self._layout
        if layout is None or not layout.is_current():
            if layout is not None:
                self._functions.clear()
            layout = self.__dict__["_layout"] = _Layout(original)
        inputs = self._examples.inputs(args, kwargs)
        flags = layout.flags()
        program = self._functions.programs.get(flags)
        if program is None:
            self._examples.check_dtypes(inputs)
            program = _Program(original, self._examples, self._options)
            self._functions.programs[flags] = program
        program.check(inputs)
        return program.run(inputs, layout.tensors(flags, program.keys))


class _Functions:
    """The compiled functions of a wrapped module, which its deep copies share and pickling leaves out."""

    def __init__(self):
        self.programs: dict[tuple[bool, ...], _Program] = {}

    def clear(self) -> None:
        self.programs = {}

    def __deepcopy__(self, memo) -> _Functions:
        copy = _Functions()
        copy.programs = dict(self.programs)
        return copy

    def __reduce__(self):
        return _Functions, ()


class _Layout:
    """The places of the tensors of a module by their keys."""

    def __init__(self, module: nn.Module):
        self._modules = list(module.modules())
        self._children = [
            (each._modules, tuple(each._modules.values()))
            for each in self._modules
            if each._modules
        ]
        _, aliases = values_of({"": module})
        self._places = {}
        self._read: dict[tuple[bool, ...], list] = {}
        for prefix, each in module.named_modules(remove_duplicate=False):
            for tensors in (each._parameters, each._buffers):
                for name in tensors:
                    self._places[f"{prefix}.{name}" if prefix else name] = tensors, name
        self._hooks = hooks_of(self._modules)
        self._found = self._hooks()
        self._ties = [(*self._places[key], *self._places[first]) for key, first in aliases.items()]

    def is_current(self) -> bool:
        """Tell whether the module has the submodules, the hooks and the tied tensors that it had."""
        if self._hooks() != self._found:
            return False
        for each, found in self._children:
            if tuple(each.values()) != found:
                return False
        return all(one.get(name) is other.get(first) for one, name, other, first in self._ties)

    def flags(self) -> tuple[bool, ...]:
        """Return the modes of all submodules."""
        return tuple([each.training for each in self._modules])

    def tensors(self, flags: tuple[bool, ...], keys: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors of some keys, which depend on the modes only."""
        places = self._read.get(flags)
        if places is None:
            places = self._read[flags] = [self._places[key] for key in keys]
        return [tensors[name] for tensors, name in places]


class _Examples:
    """The example arguments, which later arguments are compared with."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict):
        named = named_inputs(module, args, kwargs, ())
        self.args, self.kwargs = args, kwargs
        self._names = [name for name, _ in named]
        self._tensors = {name: each.dtype for name, each in named if isinstance(each, torch.Tensor)}
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._leaves = [TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]
        self._is_flat = not kwargs and all(isinstance(each, torch.Tensor) for each in args)
        self._signature = inspect.signature(module.forward)
        self._positional = list(self._signature.bind_partial(*args).arguments)

    def __deepcopy__(self, memo) -> _Examples:
        return self

    def __getstate__(self):
        # Values are needed to trace again, but no graph.
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda each: each.detach(), (self.args, self.kwargs)
        )
        return {**self.__dict__, "args": args, "kwargs": kwargs, "_leaves": None, "_spec": None}

    def __setstate__(self, state) -> None:
        self.__dict__.update(state)
        leaves, self._spec = pytree.tree_flatten((self.args, self.kwargs))
        self._leaves = [TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]

    def check_dtypes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise an error if the first arguments of a mode have other dtypes than the examples, as after ``double()``."""
        for (name, dtype), each in zip(self._tensors.items(), inputs, strict=True):
            if each.dtype is not dtype:
                raise ValueError(
                    f"{name} has dtype {each.dtype}, but the example that was given to wrap has {dtype}, with which the module "
                    "is traced; convert the module and the examples first: wrap(module.to(dtype), (example.to(dtype),))"
                )

    def inputs(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """Return the tensors among the arguments of a call, in the order of the examples.

        Raises
        ------
        TypeError, ValueError
            If the arguments have another structure or other constants.
        """
        is_flat = self._is_flat and not kwargs and len(args) == len(self.args)
        if is_flat and all(isinstance(each, torch.Tensor) for each in args):
            return list(args)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            leaves, spec = pytree.tree_flatten(self._arranged(args, kwargs))
        if spec != self._spec:
            raise TypeError(
                f"the arguments have the structure {spec}, but those that were given to wrap have {self._spec}; wrap the "
                "module again with such arguments"
            )
        found = []
        for name, given, expected in zip(self._names, leaves, self._leaves, strict=True):
            if expected is TENSOR:
                if not isinstance(given, torch.Tensor):
                    raise TypeError(f"{name} must be a tensor, but it is {described(given)}")
                found.append(given)
            elif (
                isinstance(given, torch.Tensor)
                or type(given) is not type(expected)
                or given != expected
            ):
                raise ValueError(
                    f"{name} is {described(given)}, but {described(expected)} was given to wrap, which is a constant of the compiled functions; "
                    "wrap the module again"
                )
        return found

    def _arranged(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return arguments as positional and keyword arguments like those of the examples."""
        given = self._signature.bind(*args, **kwargs).arguments
        keyword = next(
            (n for n, p in self._signature.parameters.items() if p.kind is p.VAR_KEYWORD), None
        )
        given.update(given.pop(keyword, {}) if keyword else {})
        unknown = [each for each in given if each not in [*self._positional, *self.kwargs]]
        missing = [each for each in [*self._positional, *self.kwargs] if each not in given]
        if unknown or missing:
            raise TypeError(
                f"the arguments are {', '.join(given)}, but those that were given to wrap are "
                f"{', '.join([*self._positional, *self.kwargs])}; wrap the module again with such arguments"
            )
        positional = []
        for name in self._positional:
            is_rest = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            positional += given[name] if is_rest else [given[name]]
        return tuple(positional), {name: given[name] for name in self.kwargs}


class _Program:
    """The functions of a module in one mode."""

    def __init__(self, module: nn.Module, examples: _Examples, options: _Options):
        self._imported, (self._spec, leaves) = as_it_is(
            module,
            examples.args,
            examples.kwargs,
            options.dynamic_shapes,
            options.custom_convert_map,
        )
        for each in leaves:
            if each is not TENSOR and not isinstance(each, _CONSTANTS):
                raise ValueError(
                    f"the module returns a {type(each).__name__}, which a wrapped module cannot: return tensors and constants "
                    "in tuples, lists and dicts (models of transformers: use_cache=False)"
                )
        self._leaves = leaves
        self._is_tensor = self._spec.is_leaf() and leaves[0] is TENSOR
        self._options = options
        imported = self._imported
        groups = imported.params, imported.frozen, imported.states
        self.keys = [key for group in groups for key in group]
        self._params, self._states = len(imported.params), len(imported.states)
        function = imported.module["training"]
        self._types = [each.ty for each in function.params[1:]]
        self._names = [*imported.inputs, *self.keys]
        self._is_random = function.params[0] in relax.analysis.free_vars(function.body)
        self._seed = torch.zeros((), dtype=torch.int64)
        self._expected = [
            (name, getattr(torch, dtype_of(kind)), _extents(kind))
            for name, kind in imported.inputs.items()
        ]
        self._sizes = [
            None if None in extents else torch.Size(extents) for _, _, extents in self._expected
        ]
        self._compiled: dict[tuple[bool, ...], Compiled] = {}
        names = list(imported.inputs)
        ranges = index_ranges(imported.module, "training", names)
        self._ranges = [(names.index(each.input), each) for each in ranges]
        # The values are those of the module at each call.
        for group in groups:
            group.update(dict.fromkeys(group))

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise an error if an input does not fit."""
        for each, size, (name, dtype, extents) in zip(
            inputs, self._sizes, self._expected, strict=True
        ):
            shape = each.shape
            if (
                not each.is_cpu
                or each.dtype is not dtype
                or each.layout is not torch.strided
                or (
                    shape != size
                    if size is not None
                    else len(shape) != len(extents)
                    or any(e is not None and n != e for n, e in zip(shape, extents, strict=True))
                )
            ):
                raise ValueError(_misfit(name, each, dtype, self._types[self._names.index(name)]))
        if self._ranges:
            symbols = {
                extent.name: n
                for each, kind in zip(inputs, self._types, strict=False)
                for n, extent in zip(each.shape, kind.shape.values, strict=True)
                if isinstance(extent, tirx.Var)
            }
            for at, each in self._ranges:
                if isinstance(each.extent, int) or each.extent in symbols:
                    each.check(inputs[at].detach().numpy(), symbols)

    def run(self, inputs: list[torch.Tensor], tensors: list[torch.Tensor]):
        """Run the function, and return its outputs in their structure."""
        seed = torch.randint(2**63 - 1, ()) if self._is_random else self._seed
        given = [*inputs, *tensors]
        candidates = given[: len(inputs) + self._params]
        needs = (
            tuple([each.requires_grad for each in candidates]) if torch.is_grad_enabled() else ()
        )
        tracked = list(itertools.compress(candidates, needs))
        if not tracked:
            needs = ()
        functions = self._compiled.get(needs)
        if functions is None:
            wrt = [i for i, need in enumerate(needs, 1) if need]
            functions = self._compiled[needs] = self._options.compiled(self._imported, wrt)
        # Most tensors are as they must be, and a function call for each would take longer than the test.
        arguments = [
            each if each.is_contiguous() and not each.data_ptr() % ALIGNMENT else plain(each)
            for each in given
        ]
        arguments.insert(0, seed)
        states: list[torch.Tensor] = []
        try:
            if functions.backward is None:
                outputs, states, _ = functions.run(arguments)
            else:
                outputs = Run.apply(functions, arguments, states, *tracked)
        except Exception as error:
            self._explain(given, error)
            raise
        if states:
            torch._foreach_copy_(tensors[-self._states :], states)
        if self._is_tensor:
            return outputs[0]
        rest = iter(outputs)
        leaves = [next(rest) if each is TENSOR else each for each in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def _explain(self, given: Sequence[torch.Tensor], error: Exception) -> None:
        """Raise an error that names the tensor that does not fit, if there is one."""
        extents: dict[tirx.Var, tuple[int, str]] = {}
        for name, kind, each in zip(self._names, self._types, given, strict=True):
            dtype, shape = getattr(torch, dtype_of(kind)), _extents(kind)
            fits = each.is_cpu and each.dtype is dtype and each.ndim == len(shape)
            if not fits or any(
                e is not None and n != e for n, e in zip(each.shape, shape, strict=True)
            ):
                raise ValueError(_misfit(name, each, dtype, kind)) from error
            for n, extent in zip(each.shape, kind.shape.values, strict=True):
                if isinstance(extent, tirx.Var):
                    first, other = extents.setdefault(extent, (n, name))
                    if first != n:
                        raise ValueError(
                            f"the symbolic extent {extent.name} is {first} in {other}, but {n} in {name}"
                        ) from error


def _extents(kind: relax.TensorType) -> list[int | None]:
    """Return the extents of a type, with None for symbolic ones."""
    return [int(n) if isinstance(n, tirx.IntImm) else None for n in kind.shape.values]


def _misfit(name: str, tensor: torch.Tensor, dtype: torch.dtype, kind: relax.TensorType) -> str:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return (
            f"{name} is a tensor of layout {tensor.layout} on the device {tensor.device}, but the compiled functions take dense "
            'tensors on the CPU; move it by .to("cpu")'
        )
    extents = zip(_extents(kind), kind.shape.values, strict=True)
    shape = ", ".join(str(each if n is None else n) for n, each in extents)
    return (
        f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, but the functions were compiled for ({shape}) and "
        f"{dtype}; give such a tensor, or wrap the module again (dynamic_shapes makes extents symbolic)"
    )
