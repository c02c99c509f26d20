"""Modules of PyTorch whose forward and backward run through TVM."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import Any

import torch
import tvm
from torch import nn
from torch.utils import _pytree as pytree

from ....cpu.target import CPU, host
from .._arguments import check_arguments
from .._tensors import described, uncompiled
from ..inputs.names import Inputs
from .compiled import has_saved_tensors_hooks
from .examples import Examples
from .layout import Layout
from .place import CPU as CPU_PLACE
from .place import check_kind, on_cpu, place_of
from .program import Options, Program


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

    It trains in any loop of PyTorch. It has the parameters, buffers and submodules of the given
    module, under the same keys of the ``state_dict``. Functions are compiled at the first call: for
    each combination of training and evaluation mode of the submodules, of tensors that need a
    gradient, and of values of the attributes that the module's ``forward`` reads.

    Parameters
    ----------
    module : nn.Module
        The module, on the CPU or on a GPU of CUDA. It runs on the device where it is at the call.
    args : Sequence
        Example arguments. Later arguments have their shapes and dtypes; values that are no tensors
        are constants.
    kwargs : Mapping, optional
        Example keyword arguments.
    target : tvm.target.Target or str or Mapping, optional
        The target on the CPU; by default :func:`relax_grad.target.host`.
    compile_options : Mapping, optional
        Further arguments of ``tvm.compile``, such as ``relax_pipeline``.
    dynamic_shapes : Mapping or Sequence, optional
        Symbolic extents, as for :func:`from_module`.
    custom_convert_map : Mapping[str, Callable], optional
        Converters, as for :func:`from_module`.

    Returns
    -------
    wrapped : nn.Module
        The module. After a forward pass in training mode, its buffers have
        their new values. Random numbers have a seed from the generator of PyTorch.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. A call raises them for tensors of another device, dtype or
        shape, and for a module on another device than the CPU or a GPU of CUDA.
    IndexError
        At a call, if an index or a class among the arguments is out of range.
    UnsupportedOperatorError
        At a call, if operations cannot be imported exactly.
    GradientError
        At a call, if an operation has no gradient.
    RuntimeError
        At a call, if TVM cannot use the GPU of the module.

    Examples
    --------
    >>> import torch
    >>> from relax_grad.frontend.torch import wrap
    >>> model = wrap(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    >>> list(model.state_dict())
    ['weight', 'bias']
    """
    if isinstance(module, nn.Module):
        module = uncompiled(module)
    check_arguments(module, args, kwargs, None, (), custom_convert_map)
    if isinstance(module, Wrapped):
        raise ValueError("module is wrapped already")
    chosen = host() if target is None else _target(target)
    if CPU.of(chosen) is None:
        raise ValueError(f"target must be a CPU, but it is {chosen}")
    if compile_options is not None and not isinstance(compile_options, Mapping):
        raise TypeError(
            "compile_options must be a mapping of arguments of tvm.compile, but it is "
            f"{described(compile_options)}"
        )
    args, kwargs = pytree.tree_map_only(torch.Tensor, on_cpu, (tuple(args), dict(kwargs or {})))
    examples = Examples(module, Inputs.of(module, args, kwargs))
    options = Options(chosen, compile_options, dynamic_shapes, custom_convert_map)
    return Wrapped(module, examples, options)


def _target(target: tvm.target.Target | str | Mapping) -> tvm.target.Target:
    if not isinstance(target, tvm.target.Target | str | Mapping):
        raise TypeError(
            f"target must be a tvm.target.Target, a string or a mapping, but it is {target!r}"
        )
    try:
        return tvm.target.Target(dict(target) if isinstance(target, Mapping) else target)
    except (ValueError, TypeError, tvm.error.InternalError) as error:
        raise ValueError(f"target is not one of TVM's, {target!r}: {error}") from error


#: The most values of attributes for which the functions of one mode are kept.
_MOST_PROGRAMS = 8

#: One trace at a time: it replaces functions of PyTorch.
COMPILING = threading.RLock()

#: The attributes that every module has; a wrapper has its own.
_OWN = frozenset(vars(nn.Module()))


def _traced(module: nn.Module, examples: Examples, options: Options) -> Program:
    """Return the functions of a module as it is now.

    The trace runs in a separate thread if hooks of saved tensors are set, such as the hooks of
    ``torch.utils.checkpoint``, which would count its tensors.
    """
    if not has_saved_tensors_hooks():
        return Program(module, examples, options)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(Program, module, examples, options).result()


class Wrapped(nn.Module):
    """The result of :func:`wrap`. It has all other attributes of the original module."""

    def __init__(self, module: nn.Module, examples: Examples, options: Options):
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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:  # while it is unpickled
                raise
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._original, name)

    def _is_own(self, name: str) -> bool:
        """Tell whether an attribute is the wrapper's, and not of the original module."""
        is_made = "_original" in self.__dict__
        return not is_made or name in _OWN or name in self.__dict__ or hasattr(type(self), name)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_layout": None}

    def __repr__(self) -> str:
        return f"wrap({self._original!r})"

    def train(self, mode: bool = True) -> Wrapped:
        """Set training or evaluation mode."""
        self._original.train(mode)
        self.training = self._original.training
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> Wrapped:
        """Convert the tensors, also when a module converts that has this one as a part."""
        device = fn(torch.empty(0)).device
        if device.type != "meta":
            check_kind(device)
        return super()._apply(fn, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state_dict of the original module."""
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state_dict of the original module."""
        return self._original.load_state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module through TVM."""
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "a wrapped module runs in the dtypes that it was traced with: call it outside "
                "of torch.autocast, or enter torch.autocast within the forward function of the "
                "original module"
            )
        original = self._original
        if original.training is not self.training:
            original.training = self.training
        layout = self._layout
        if layout is None or not layout.is_current():
            if layout is not None:
                self._functions.clear()
            layout = self.__dict__["_layout"] = Layout(original)
        inputs = self._examples.tensors(args, kwargs)
        flags = layout.flags()
        program = self._functions.current(flags, layout)
        if program is None:
            with COMPILING:
                program = self._functions.current(flags, layout)
                if program is None:
                    self._examples.check_dtypes(inputs)
                    program = _traced(original, self._examples, self._options)
                    self._functions.add(flags, program, layout)
        tensors = layout.tensors(program)
        if NoneType in map(type, tensors):  # such as a bias that was removed
            self._functions.clear()
            self.__dict__["_layout"] = None
            return self.forward(*args, **kwargs)
        first = tensors or inputs
        place = place_of(first[0]) if first else CPU_PLACE
        program.check(inputs, place)
        return program.run(inputs, tensors, place)


class _Functions:
    """The compiled functions of a wrapped module, which its deep copies share and pickling leaves
    out."""

    def __init__(self) -> None:
        #: The functions of each combination of modes, for the last values of attributes first.
        self._programs: dict[tuple[bool, ...], list[Program]] = {}

    def clear(self) -> None:
        self._programs = {}

    def current(self, flags: tuple[bool, ...], layout: Layout) -> Program | None:
        """Return the functions for the modes and the attributes that the modules have now."""
        programs = self._programs.get(flags, [])
        for i, program in enumerate(programs):
            if layout.guards(program).changed() is None:
                if i:
                    self._programs[flags] = [program, *programs[:i], *programs[i + 1 :]]
                return program
        return None

    def add(self, flags: tuple[bool, ...], program: Program, layout: Layout) -> None:
        """Add functions; only those for the last values of attributes are kept."""
        programs = self._programs.get(flags, [])
        if len(programs) == _MOST_PROGRAMS:
            changed = layout.guards(programs[0]).changed()
            warnings.warn(
                f"a wrapped module was compiled for {_MOST_PROGRAMS + 1} values of its attributes, "
                f"the last time since the attribute {changed} has changed; make it a tensor: a "
                "buffer, or an argument of forward",
                RuntimeWarning,
                stacklevel=2,
            )
        self._programs[flags] = [program, *programs[: _MOST_PROGRAMS - 1]]

    def __deepcopy__(self, memo: dict) -> _Functions:
        copy = _Functions()
        copy._programs = dict(self._programs)
        return copy

    def __reduce__(self) -> tuple[type, tuple]:
        return _Functions, ()
