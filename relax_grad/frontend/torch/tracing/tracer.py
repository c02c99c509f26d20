"""The context in which a module is traced: calls that torch.export ignores or misinterprets are
noted or replaced."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import traceback as fx_traceback
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode

from .._problems import Problem, is_user_file, user_line
from . import gradients
from .checks import gaussian_nll_loss, is_validation, multi_margin_loss, without_checks
from .ctc import ctc_loss
from .extents import compare_extents
from .functions import FunctionCalls
from .indices import at_numbers, has_numbers
from .packed import PackedSequences
from .recurrent import decomposed_under_autocast
from .transforms import Transforms

#: The annotation of the nodes of a checkpointed section: the number of the section.
CHECKPOINT = "relax_grad.checkpoint"

_COND = torch.cond
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}

#: Functions that torch.export cannot trace, or traces with other gradients, by name, with those in
#: their place.
_REPLACED: dict[str, Callable] = {
    "ctc_loss": ctc_loss,
    "gaussian_nll_loss": gaussian_nll_loss,
    "multi_margin_loss": multi_margin_loss,
}

#: The generators that run checkpointed sections. PyTorch 2.14 and later have the second one too,
#: which the public function uses.
_CHECKPOINTED = [
    name
    for name in (
        "_checkpoint_without_reentrant_generator",
        "_checkpoint_without_reentrant_generator_impl",
    )
    if hasattr(torch.utils.checkpoint, name)
]

#: The modules whose functions PyTorch uses for itself.
_OWN_FUNCTIONS = ("torch._higher_order_ops.", "torch._library.", "torch._functorch.")
#: A class method of Python, and from PyTorch 2.14 on one of C, which has no ``__func__``.
_ORIGINAL_APPLY = torch.autograd.Function.__dict__["apply"]


#: The functions of ``tensor[index]`` and of assignments to it.
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class Tracer(TorchFunctionMode):
    """Watches the calls of PyTorch's functions during a trace.

    - ``tensor.data`` is ``tensor.detach()``.
    - Parameters outside the module and hooks of tensors are problems.
    - Checkpointed sections are annotated.

    Parameters
    ----------
    training : bool
        Whether gradients matter.

    Attributes
    ----------
    problems : list[Problem]
        The calls that cannot be imported.
    parameters : list[torch.Tensor]
        The parameters of the module during the trace.
    training : bool
        Whether gradients matter.
    """

    def __init__(self, training: bool):
        super().__init__()
        self.problems: list[Problem] = []
        self.parameters: list[torch.Tensor] = []
        self.training = training
        self._packed = PackedSequences()
        self._sections = 0
        self._inferences = 0  # the regions of inference_mode around a call
        self._functions = FunctionCalls(self._note)
        self._transforms = Transforms(self._note)

    def __torch_function__(
        self,
        function: Callable,
        types: Collection[type],
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        function = decomposed_under_autocast(self._packed.replacement(function, args), args)
        if is_validation(function, sys._getframe(1).f_code.co_filename):
            return True
        function = _REPLACED.get(getattr(function, "__name__", ""), function)
        if self._transforms.are_traced:
            return self._transforms.call(function, args, kwargs)
        if function in _INDEXED and has_numbers(args[1]):
            return self._at_numbers(function, *args)
        accessor = getattr(function, "__self__", None)
        if function is torch._C._set_grad_enabled and self._inferences and args[0]:
            self._note(
                "torch.enable_grad", "it is within inference_mode; use torch.no_grad around it"
            )
        if accessor is torch.Tensor.data:
            if function.__name__ == "__get__":
                return args[0].detach()
            self._note(
                "Tensor.data", "a tensor is assigned; use tensor.copy_ within torch.no_grad()"
            )
        if not self.training:
            return _called(function, args, kwargs)
        if function in _HOOKS:
            self._note(f"Tensor.{function.__name__}", "hooks of gradients are not imported")
        if accessor is torch.Tensor.grad_fn and is_user_file(sys._getframe(1).f_code.co_filename):
            self._note("Tensor.grad_fn", "the graph of PyTorch's gradients is not imported")
        if accessor is torch.Tensor.grad and is_user_file(sys._getframe(1).f_code.co_filename):
            self._note(
                "Tensor.grad",
                "the gradients that PyTorch keeps are not imported; use torch.autograd.grad "
                "within the model",
            )
        if function is torch.Tensor.requires_grad_ or accessor is torch.Tensor.requires_grad:
            self._check_flag(*args, **kwargs)
        tensors = [tensor for tensor in _tensors(args, kwargs) if type(tensor) is not torch.Size]
        if any(tensor.requires_grad and not isinstance(tensor, FakeTensor) for tensor in tensors):
            self._note(
                _name(function),
                "it takes a tensor that needs a gradient and is no parameter of the module; "
                "register it as one",
            )
        return _called(function, args, kwargs)

    def _at_numbers(self, function: Callable, data: torch.Tensor, index: Any, *value: Any) -> Any:
        """Read or write a tensor where an index has an integer in a tensor."""
        found = at_numbers(data, index)
        if found is None:
            return function(data, index, *value)
        view, index = found
        if value:
            return function(view, index, *value)
        self._note(
            "Tensor.__getitem__",
            "an index is a tensor without axes, whose value PyTorch reads to return a view; use "
            "tensor[index.reshape(1)].squeeze(0), a copy",
        )
        return view[index].squeeze(0)

    def _check_flag(self, tensor: torch.Tensor, requires_grad: bool | None = None) -> None:
        """Note a change of the flag of a parameter, which the graph does not have."""
        if requires_grad is None or requires_grad == tensor.requires_grad:
            return
        if any(parameter is tensor for parameter in self.parameters):
            self._note(
                "Tensor.requires_grad",
                "the flag of a parameter changes during the call; use parameter.detach(), or "
                "set the flag before the import",
            )

    def _note(self, operator: str, reason: str, line: str | None = None) -> None:
        self.problems.append(Problem(operator, reason, line or _user_line()))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Trace in this context."""
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(without_checks())
            stack.enter_context(self)
            yield

    def _replacements(self) -> list[tuple[object, str, object]]:
        """Return what replaces PyTorch's functions: owner, name and replacement."""
        saved, inference = torch.autograd.graph.saved_tensors_hooks, torch.inference_mode
        enter, leave = self._inference()
        within, outside = self._transforms.within, self._transforms.outside
        return [
            # The line of the user's code is below frames that PyTorch leaves out.
            (TracerBase, "_filter_traceback_frames", _user_frames),
            # torch.export ignores the backward functions of the user.
            (torch.autograd.Function, "apply", classmethod(self._applied())),
            # The sections that the backward pass computes again are marked in the graph.
            *((torch.utils.checkpoint, name, self._checkpoint) for name in _CHECKPOINTED),
            # Dynamo, which traces the branches, does not know this mode.
            (torch, "cond", self._cond),
            # A derivative within the model becomes a node of the graph.
            outside(torch.autograd, "grad", gradients.grad),
            outside(eager_transforms, "grad_and_value_impl", gradients.grad_and_value),
            self._transforms.vjp(gradients.vjp),
            outside(torch.autograd.functional, "_grad_preprocess", gradients.leaves_of),
            # torch.export records batched tensors without their batch.
            within(apis, "vmap_impl"),
            within(eager_transforms, "_jvp_with_argnums"),
            (eager_transforms, "linearize", gradients.linearize),
            (torch.func, "linearize", gradients.linearize),
            (torch.func, "functionalize", gradients.functionalize),
            # What would be ignored is noted.
            outside(torch.autograd, "_engine_run_backward", self._refuse_backward),
            (saved, "__enter__", self._packing(saved)),
            # The graph has gradients off where the mode is on; it cannot have inference tensors.
            (inference, "__enter__", enter),
            (inference, "__exit__", leave),
        ]

    def _applied(self) -> Callable:
        return lambda cls, *args, **kwargs: self._apply(cls, args, kwargs)

    def _checkpoint(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        with self._section():
            yield

    def _refuse_backward(self, *args: Any, **kwargs: Any) -> None:
        self._note(
            "torch.autograd.backward",
            "it writes to parameter.grad; use torch.autograd.grad within the model",
        )

    def _cond(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``torch.cond`` out of this mode, which Dynamo would trace with the branches."""
        self.__exit__(None, None, None)
        try:
            with mock.patch.object(torch, "cond", _COND):
                return _COND(*args, **kwargs)
        finally:
            self.__enter__()

    def _packing(self, saved: Any) -> Callable:
        """Return the entry of hooks of saved tensors, which notes the user's hooks."""
        packed = saved.__enter__

        def pack(hooks: Any) -> Any:
            is_plain = type(hooks).__module__.startswith("torch.") and type(hooks) is not saved
            if self.training and not is_plain:
                self._note(
                    "torch.autograd.graph.saved_tensors_hooks",
                    "hooks of saved tensors are not imported; use torch.utils.checkpoint to "
                    "save memory",
                )
            return packed(hooks)

        return pack

    def _inference(self) -> tuple[Callable, Callable]:
        """Return the entry and the exit of ``torch.inference_mode``, which switch gradients off
        only."""
        tracer = self

        def enter(self: Any) -> None:
            self._gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(self._gradients and not self.mode)
            tracer._inferences += self.mode

        def leave(self: Any, *_: Any) -> None:
            tracer._inferences -= self.mode
            torch.set_grad_enabled(self._gradients)

        return enter, leave

    def _apply(self, cls: type, args: tuple, kwargs: dict) -> object:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            function, _, *operands = args
            with self._section():
                return function(*operands)
        if self._transforms.are_traced:
            self._transforms.note_function(cls, args)
        if self._transforms.are_traced or cls.__module__.startswith(_OWN_FUNCTIONS):
            return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
        return self._functions.call(cls, args, kwargs)

    @contextlib.contextmanager
    def _section(self) -> Iterator[None]:
        self._sections += 1
        with fx_traceback.annotate({CHECKPOINT: self._sections}):
            yield


def _called(function: Callable, args: tuple, kwargs: dict) -> object:
    """Return the result of a function whose operands then have one symbol for an extent."""
    result = function(*args, **kwargs)
    compare_extents(function, args, kwargs)
    return result


def _user_frames(_: object, stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames of the user's code, of all functions; torch.export keeps only those named
    forward."""
    return traceback.StackSummary.from_list(
        frame for frame in stack if is_user_file(frame.filename)
    )


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors among arguments, and in lists of them."""
    tensors = []
    for arg in (*args, *kwargs.values()):
        inner = arg if isinstance(arg, (list, tuple)) else [arg]
        tensors += [item for item in inner if isinstance(item, torch.Tensor)]
    return tensors


def _name(function: Callable) -> str:
    return f"torch.{getattr(function, '__name__', function)}"


def _user_line() -> str:
    return user_line(traceback.extract_stack()) or "an unknown line"
