"""State of a module outside of its parameters and buffers, which a graph keeps as it was in the
trace."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from .._problems import user_line
from .snapshots import is_users_file, snapshot

#: The attributes that every module has.
_OWN = frozenset(vars(nn.Module()))

_GET, _SET = object.__getattribute__, nn.Module.__setattr__


@contextlib.contextmanager
def watching_state(
    module: nn.Module, note: Callable[[str, str, str], None]
) -> Iterator[set[tuple[int, str]]]:
    """Note the attributes of submodules that a call reads and then changes, and draws of Python and
    NumPy.

    An attribute that is written before it is read holds a result. A tensor that depends on no input
    is a cache. The attributes that PyTorch's own layers write, such as the lists of weights of a
    recurrent network, are no state, and neither are private flags, such as flags of hooks that a
    library installs once.

    The context is the set of the previous reads: :func:`identity` of submodules and names of
    attributes.
    """
    modules = [submodule for submodule in module.modules() if submodule is not module]
    before = {
        (identity(submodule), name): value
        for submodule in modules
        for name, value in _attributes(submodule)
    }
    own, written = set(map(identity, modules)), set()
    read: set[tuple[int, str]] = set()

    # The line that writes an attribute, or else the first one that reads it, where a container is
    # changed.
    lines: dict[tuple[int, str], traceback.FrameSummary] = {}

    def get(self: Any, name: str) -> object:
        if name == "__dict__" and is_users_file(sys._getframe(1).f_code.co_filename):
            for attribute in _GET(self, name):
                get(self, attribute)
        if name not in _OWN:
            key = id(_GET(self, "__dict__"))
            if key in own and (key, name) not in written:
                read.add((key, name))
                if (key, name) not in lines:
                    lines[key, name] = _caller()
        return _GET(self, name)

    def set_(self: Any, name: str, value: object) -> None:
        key = id(_GET(self, "__dict__"))
        if (key, name) not in read:
            written.add((key, name))
        elif key in own:
            lines[key, name] = _caller()
        _SET(self, name, value)

    generators = random.getstate(), _numpy_state()
    patch = mock.patch.object
    with (
        patch(nn.Module, "__getattribute__", get, create=True),
        patch(nn.Module, "__setattr__", set_),
        patch(torch, "compile", _unwatched(torch.compile)),
    ):
        yield read
    names = ("the module random", "numpy.random")
    later = random.getstate(), _numpy_state()
    for name, state, later_state in zip(names, generators, later, strict=True):
        if state != later_state:
            note(
                f"a random number of {name}",
                "the graph has the number of the first call; draw it by torch.rand",
                "the forward function",
            )
    for submodule in modules:
        kind = type(submodule).__name__
        for name, value in _attributes(submodule):
            key = identity(submodule), name
            old = before.get(key)
            new = vars(submodule)[name]
            is_mark = name.startswith("_") and isinstance(new, bool)  # that something is done
            if key not in read or old == value or is_mark or is_cache(new):
                continue
            note(
                f"a write to the attribute {name} of {kind}",
                "the graph has the value of the first call; make it a buffer, or a variable of "
                "the function",
                user_line([lines[key]]) or f"the forward function of {kind}",
            )


def identity(module: nn.Module) -> int:
    """Return the identity of a module's attributes, which a trace of a module that is registered
    twice reads through proxies of all modules."""
    return id(_GET(module, "__dict__"))


def _caller() -> traceback.FrameSummary:
    """Return the line that reads or writes an attribute."""
    frame = sys._getframe(2)
    return traceback.FrameSummary(
        frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False
    )


def _unwatched(compile_: Callable) -> Callable:
    """Return ``torch.compile`` whose results run without the notes, which Dynamo refuses as side
    effects of branches."""

    def changed(model: Callable | None = None, **options: Any) -> Any:
        if model is None:
            return compile_(**options)
        compiled = compile_(model, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            get, set_ = vars(nn.Module).get("__getattribute__"), nn.Module.__setattr__
            if get is None:  # within another such function, or after the trace
                return compiled(*args, **kwargs)
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = _SET
            try:
                return compiled(*args, **kwargs)
            finally:
                nn.Module.__getattribute__, nn.Module.__setattr__ = get, set_

        return run

    return changed


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    # A class is hashable, which mypy does not see through the cache.
    known = _OWN | _written_by_torch(type(module))  # type: ignore[arg-type]
    for name, value in list(vars(module).items()):
        if name not in known:
            yield name, _state(value)


@functools.cache
def _written_by_torch(kind: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that PyTorch's own classes among the bases of a module write."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules.")]
    functions = [f for base in bases for f in vars(base).values() if inspect.isfunction(f)]
    return frozenset(
        instruction.argval
        for function in functions
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    )


def _state(value: object) -> object:
    """Return a value that later changes of this one do not change."""
    return snapshot(value, lambda tensor: (id(tensor), tensor._version), sees_libraries=False)


def is_cache(value: object) -> bool:
    """Tell whether a value is a tensor, or several, of a trace that depends on no input, parameter
    or buffer."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(is_cache, value))
    mode = get_proxy_mode()
    if not isinstance(value, FakeTensor) or mode is None:
        return False
    result = get_proxy_slot(value, mode.tracer, None, lambda slot: slot.proxy.node)
    nodes, seen = [result], set()
    while nodes:
        node = nodes.pop()
        if node is None or node.op == "placeholder":
            return False
        if node not in seen:
            seen.add(node)
            nodes += node.all_input_nodes
    return True


def _numpy_state() -> tuple:
    # The generator of the user's code, whose state is a tuple by default.
    _, keys, *rest = cast(tuple, np.random.get_state())  # noqa: NPY002
    return keys.tobytes(), *rest
