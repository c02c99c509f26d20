"""Transforms of functions that a model computes with: ``torch.func.vmap``, ``jvp``, ``jacfwd``,
``jacrev`` and ``hessian``.

torch.export would record a batched tensor as if it had no batch. A transform is therefore traced on
its own, below PyTorch's transforms, into the operators that it runs; the graph of the model takes
these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch import eager_transforms
from torch._guards import detect_fake_mode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree

#: The annotation of the nodes of calls of ``detach``, which PyTorch adds in other places, too.
_DETACHED = "relax_grad.detached"

_DETACH, _ALIAS = torch.ops.aten.detach.default, torch.ops.aten.alias.default


class Transforms:
    """Traces the outermost transforms.

    Parameters
    ----------
    note : Callable
        ``note(operator, reason)`` notes a problem.

    Attributes
    ----------
    are_traced : bool
        Whether a transform is being traced.
    """

    def __init__(self, note: Callable[[str, str], None]):
        self._note = note
        self.are_traced = False
        self._has_gradients = False

    def within(self, owner: object, name: str) -> tuple[object, str, Callable]:
        """Return the owner and the name of a transform, and a function that traces its outermost
        call."""
        transform = getattr(owner, name)

        def run(function: Callable, *args: Any, **kwargs: Any) -> Any:
            if self.are_traced:
                return transform(function, *args, **kwargs)
            return self._traced(lambda a, k: transform(function, *a, **k), (args, kwargs))

        return owner, name, run

    def outside(
        self, owner: object, name: str, replacement: Callable
    ) -> tuple[object, str, Callable]:
        """Return the owner and the name of a function, and a function that is the replacement
        outside of traced transforms."""
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (original if self.are_traced else replacement)(*args, **kwargs)

        return owner, name, run

    def vjp(self, replacement: Callable) -> tuple[object, str, Callable]:
        """Return the owner and the name of the function behind ``torch.func.vjp`` and ``jacrev``,
        and a function that is the replacement for ``vjp``, and traces ``jacrev``."""
        original = eager_transforms._vjp_with_argnums

        def run(
            function: Callable, *primals: Any, argnums: Any = None, has_aux: bool = False
        ) -> Any:
            if self.are_traced:
                return original(function, *primals, argnums=argnums, has_aux=has_aux)
            if argnums is None:
                return replacement(function, *primals, has_aux=has_aux)

            def pulled(cotangents: Any) -> Any:
                """Compute the function again, in the trace of the transform of its gradient."""
                return original(function, *primals, argnums=argnums, has_aux=has_aux)[1](cotangents)

            def traced(cotangents: Any) -> Any:
                if self.are_traced:
                    return pulled(cotangents)
                return self._traced(lambda args, _: pulled(*args), ((cotangents,), {}))

            output, *aux = function(*primals) if has_aux else (function(*primals),)
            return output, traced, *aux

        return eager_transforms, "_vjp_with_argnums", run

    def call(self, function: Callable, args: tuple, kwargs: dict) -> object:
        """Run a function of PyTorch within a transform."""
        if function is torch._C._set_grad_enabled and self._has_gradients and not args[0]:
            self._note(
                "torch.no_grad",
                "it is within a transform such as torch.func.vmap; use tensor.detach() there",
            )
        accessor = getattr(function, "__self__", None)
        is_data = accessor is torch.Tensor.data and function.__name__ == "__get__"
        is_detached = is_data or function is torch.Tensor.detach
        function = torch.Tensor.detach if is_data else function
        marks = fx_traceback.annotate({_DETACHED: True})
        with torch._C.DisableTorchFunction(), marks if is_detached else contextlib.nullcontext():
            return function(*args, **kwargs)

    def note_function(self, cls: type[torch.autograd.Function], args: tuple) -> None:
        """Note a function with a custom gradient within a transform."""
        if any(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args):
            self._note(
                f"{cls.__name__}.apply",
                "it is within a transform such as torch.func.vmap, whose graph has no backward "
                "functions; call it outside, or write it with PyTorch's operators",
            )

    def _traced(self, function: Callable, operands: tuple) -> object:
        """Return the result of a function of nested operands, by a separate graph."""
        leaves, spec = pytree.tree_flatten(operands)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors, forms = [leaves[i] for i in places], []
        extents = _with_all_extents(tensors)

        def flat(*values: Any) -> Any:
            new = list(leaves)
            for i, value in zip(places, values, strict=False):
                new[i] = value
            results, form = pytree.tree_flatten(function(*pytree.tree_unflatten(new, spec)))
            forms.append(form)
            return results

        with self._tracing():
            graph = make_fx(flat)(*tensors, *extents)
        graph.graph.eliminate_dead_code()
        _with_detached(graph.graph)
        return pytree.tree_unflatten(fx.Interpreter(graph).run(*tensors, *extents), forms[0])

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        self.are_traced, self._has_gradients = True, torch.is_grad_enabled()
        try:
            with disable_proxy_modes_tracing():
                yield
        finally:
            self.are_traced = False


def _with_all_extents(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a tensor with all symbolic extents, if there are some: a trace knows only the extents
    of its inputs, and a function may read other tensors."""
    mode = detect_fake_mode(tensors)
    environment = None if mode is None else mode.shape_env
    if environment is None:
        return []
    known = "backed_var_to_val"  # its name since PyTorch 2.12
    symbols = getattr(environment, known if hasattr(environment, known) else "var_to_val").items()
    if not symbols:
        return []
    with disable_proxy_modes_tracing(), mode:
        sizes = [environment.create_symintnode(symbol, hint=int(n)) for symbol, n in symbols]
        return [torch.empty(sizes)]


def _with_detached(graph: fx.Graph) -> None:
    """Keep ``detach`` where the user calls it: PyTorch detaches the tensors that it saves for
    gradients, which have gradients here."""
    for node in graph.nodes:
        if node.target in (_DETACH, _ALIAS):
            is_users = (node.meta.get("custom") or {}).get(_DETACHED)
            node.target = _DETACH if is_users else _ALIAS
