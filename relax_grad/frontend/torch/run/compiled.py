"""Compiled functions of a module in one mode: forward with residuals, and backward."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm
import tvm_ffi
from torch.autograd.function import once_differentiable
from tvm import relax

from ....autodiff.gradient import Gradient, add_adjoint
from ....autodiff.split import is_checkpointed, split
from ....ir.module import with_functions
from ....ir.signature import Signature
from .._imported import Imported
from .place import PIPELINE, Place

#: The alignment in bytes that compiled functions may assume.
ALIGNMENT = 64


#: Returns an element of an array of TVM. It takes half of the time of ``array[i]``.
_item = tvm_ffi.get_global_func("ffi.ArrayGetItem")

#: Returns None unless a context such as ``torch.autograd.graph.save_on_cpu`` replaces saved
#: tensors.
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_EMPTY = torch.empty(0, device="cpu")

#: ``Function.apply``, which a trace in another thread replaces. From PyTorch 2.14 on it is a class
#: method of C, without ``__func__``.
_apply = torch.autograd.Function.__dict__["apply"]


def has_saved_tensors_hooks() -> bool:
    """Tell whether a context replaces the tensors that PyTorch saves for the backward pass."""
    return _saved_tensors_hooks(True) is not None


@dataclass
class Compiled:
    """A forward function and perhaps a backward function, with the roles of their arguments and
    results.

    Attributes
    ----------
    forward, backward : callable
        The functions of the virtual machine; ``backward`` is None without gradients.
    is_float : list[bool]
        Whether each output has a cotangent.
    states : frozenset[int]
        The positions of the states among the arguments.
    has_gradient : list[bool]
        Whether each output depends on a differentiated argument.
    arguments, results : list[int]
        The positions of the arguments and of the results that the backward function takes.
    residuals, gradients : int
        The numbers of residuals and of gradients.
    copied : list[int] or None
        The outputs that share memory with an argument or another result; None before the first
        call.
    copied_states : list[int]
        The new states that share memory with an argument, such as exchanged buffers.
    lock : threading.Lock
        Guards the virtual machine, which has one stack of frames for all threads.
    """

    forward: Callable
    backward: Callable | None
    is_float: list[bool]
    states: frozenset[int]
    has_gradient: list[bool] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    residuals: int = 0
    gradients: int = 0
    copied: list[int] | None = None
    copied_states: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, arguments: Sequence[torch.Tensor]) -> tuple[list, list, object]:
        """Return the outputs in separate memory, as the caller may write to them, the new
        states and the residuals."""
        residuals = None
        with self.lock:
            result = self.forward(*arguments)
        if self.backward is not None:
            result, residuals = _item(result, 0), _item(result, 1)
        outputs = _items(_item(result, 0), len(self.is_float))
        states = _items(_item(result, 1), len(self.states)) if self.states else []
        if self.copied is None:  # a property of the compiled function
            kept = _items(residuals, self.residuals) if self.residuals else []
            taken = {_memory(tensor) for tensor in arguments}
            self.copied_states = [i for i, new in enumerate(states) if _memory(new) in taken]
            taken.update(_memory(tensor) for tensor in [*states, *kept])
            self.copied = []
            for i, output in enumerate(outputs):
                if output.numel() and _memory(output) in taken:
                    self.copied.append(i)
                taken.add(_memory(output))
        for i in self.copied:
            outputs[i] = outputs[i].clone()
        for i in self.copied_states:  # the caller writes to the arguments
            states[i] = states[i].clone()
        return outputs, states, residuals


def _items(array: tvm_ffi.Array, count: int) -> list[torch.Tensor]:
    return [_item(array, i) for i in range(count)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def compiled(
    imported: Imported,
    signature: Signature,
    wrt: Sequence[int],
    place: Place,
    target: tvm.target.Target,
    options: Mapping[str, object],
) -> Compiled:
    """Compile the function ``training`` of an import.

    Parameters
    ----------
    imported : Imported
        The import.
    signature : Signature
        The roles of the parameters of the function.
    wrt : Sequence[int]
        The positions of the differentiated parameters of the function.
    place : Place
        The device.
    target : tvm.target.Target
        The target on the CPU.
    options : Mapping
        Further arguments of ``tvm.compile``.
    """
    module = imported.module
    function = module["training"]
    is_float = ["float" in str(kind.dtype) for kind in imported.outputs.values()]
    states = frozenset(signature.states.values())
    settings = {"relax_pipeline": PIPELINE, **options}
    if not wrt or not any(is_float):
        function = place.machine(module, target, settings)("training")
        return Compiled(function, None, is_float, states)
    variables = [function.params[i] for i in wrt]
    gradient = Gradient("training", variables, target_index=0, cotangents=True)
    count = sum(is_float)
    joint = with_functions(add_adjoint(module, gradient, "adjoint"), {}, without=["training"])
    # Kernels would hide which values the backward pass computes again.
    is_own = settings["relax_pipeline"] == PIPELINE
    if place.is_cpu and is_own and not is_checkpointed(function):
        joint = _with_kernels(joint, target)
    parts = split(joint, "adjoint", count, "forward", "backward")
    backward = parts.module["backward"]
    read = set(relax.analysis.free_vars(backward.body))
    used = iter([param in read for param in list(backward.params)[-count:]])
    named = place.machine(parts.module, target, settings)
    return Compiled(
        named("forward"),
        named("backward"),
        is_float,
        states,
        [has_cotangent and next(used) for has_cotangent in is_float],
        parts.arguments,
        parts.results,
        parts.residuals,
        len(wrt),
    )


def _with_kernels(module: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Replace operators by calls of kernels, by the first passes of the pipeline.

    A kernel may read transposed operands, and return residuals such as the places of maxima. These
    are found where one function has the calls of both passes.
    """
    # Imported here: the import of kernels takes a while.
    from ....cpu.stages import kernel_passes

    with target:
        return tvm.transform.Sequential(list(kernel_passes(target)))(module)


class Run(torch.autograd.Function):
    """Calls the forward function; its backward calls the backward function.

    Its arguments are the functions, all arguments of the forward function, a list that takes the
    new states, and the tensors that need a gradient.
    """

    @classmethod
    def call(cls, *args: Any) -> Any:
        """Return the outputs."""
        return _apply.__get__(None, cls)(*args)

    @staticmethod
    def forward(
        ctx: Any,
        functions: Compiled,
        arguments: Sequence[torch.Tensor],
        states: list[torch.Tensor],
        *_tracked: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        outputs, new, residuals = functions.run(arguments)
        saved = [arguments[i] for i in functions.arguments]
        if new:
            states += new
            # The caller writes the new states to these buffers.
            for n, i in enumerate(functions.arguments):
                if i in functions.states:
                    saved[n] = saved[n].clone()
        if functions.results:
            results = [*outputs, *new]
            saved += [results[i] for i in functions.results]
        if functions.residuals:
            ctx.is_whole = not has_saved_tensors_hooks()
            if ctx.is_whole:
                # One tuple of TVM takes less time than its tensors. PyTorch keeps it as long as it
                # keeps this tensor.
                holder = _EMPTY.detach()
                holder.residuals = residuals
                saved.append(holder)
            else:
                saved += _items(residuals, functions.residuals)
        ctx.save_for_backward(*saved)
        ctx.functions = functions
        if not all(functions.has_gradient):
            ctx.mark_non_differentiable(
                *(
                    output
                    for output, has in zip(outputs, functions.has_gradient, strict=True)
                    if not has
                )
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        if torch.is_grad_enabled():
            return _differentiated_once(ctx, *cotangents)
        return _gradients(ctx, *cotangents)


def _gradients(ctx: Any, *cotangents: torch.Tensor) -> tuple:
    functions = ctx.functions
    arguments = list(ctx.saved_tensors)
    if functions.residuals:
        count = len(functions.arguments) + len(functions.results)
        arguments[count:] = [arguments[count].residuals if ctx.is_whole else arguments[count:]]
    arguments += map(plain, itertools.compress(cotangents, functions.is_float))
    with functions.lock:
        gradients = functions.backward(*arguments)
    return (None, None, None, *_items(gradients, functions.gradients))


_differentiated_once = once_differentiable(_gradients)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form that compiled functions take: dense, in order, and aligned."""
    if not tensor.numel():  # PyTorch ignores the strides, which TVM compares
        strides = [math.prod(tensor.shape[i + 1 :]) for i in range(tensor.ndim)]
        return tensor.new_empty(0).as_strided(tensor.shape, strides)
    if tensor.is_contiguous():
        return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.detach().clone()
    return tensor.detach().contiguous()
