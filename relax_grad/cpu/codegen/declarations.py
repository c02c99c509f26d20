"""Declared functions, which are generated only if their machine code is not cached."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ...ir.bindings import bindings_of, used
from ...ir.module import IN_PLACE, SHARED, referred_to, sharing
from .lower import content
from .sources import sources

#: The attribute of a declaration: its number, which is unique in the process.
_NUMBER = "relax_grad.declaration"

_numbers = itertools.count()


@dataclass(frozen=True)
class _Declared:
    make: Callable[[], tirx.PrimFunc]
    identity: Callable[[], str]


class Declarations:
    """The declared functions of a module during one run of the pipeline.

    A declaration has the parameters and the attributes of its function, so that the passes before
    compilation treat both alike. A declaration must not be compiled: :meth:`defined` and
    :meth:`completed` replace it by the function, with the current attributes of the declaration.
    """

    def __init__(self) -> None:
        self._declared: dict[int, _Declared] = {}

    @staticmethod
    def for_run() -> Declarations | None:
        """Return new declarations for a run of the pipeline; None if the run must generate all
        functions at once.

        It must do so with instruments, which inspect the functions of modules. It must also do so
        if the sources of the package are unknown, because they are part of the identity of a
        declared function.
        """
        context = tvm.transform.PassContext.current()
        return None if context.instruments or sources() is None else Declarations()

    def kernel(
        self, function: tirx.PrimFunc, generate: Callable[[], tirx.PrimFunc], identity: str
    ) -> tirx.PrimFunc:
        """Return the declaration of a kernel.

        Parameters
        ----------
        function : tirx.PrimFunc
            A function with the parameters and the attributes of the kernel. It does not link.
        generate : Callable
            Returns the kernel.
        identity : str
            Equal only for kernels with equal functions, in all processes with the same sources.
        """
        return self._added(function, _Declared(generate, lambda: identity))

    def scheduled(
        self, function: tirx.PrimFunc, make: Callable[[], tirx.PrimFunc], means: str
    ) -> tirx.PrimFunc:
        """Return the declaration of a scheduled function: the function without the schedule.

        Parameters
        ----------
        function : tirx.PrimFunc
            The function without a schedule.
        make : Callable
            Returns the scheduled function.
        means : str
            A description of the other inputs of the schedule.
        """
        return self._added(function, _Declared(make, lambda: f"{means} {content(function)}"))

    def _added(self, function: tirx.PrimFunc, declared: _Declared) -> tirx.PrimFunc:
        number = next(_numbers)
        self._declared[number] = declared
        return function.with_attr(_NUMBER, number)

    def content(self, function: tirx.PrimFunc) -> str:
        """Return a digest of a function or a declaration. Equal digests mean equal functions after
        definition."""
        if not _is_declaration(function):
            return content(function)
        attributes = sorted(f"{name}={value!r}" for name, value in _kept(function).items())
        parts = [str(sources()), self._of(function).identity(), *attributes]
        return "declared " + hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def defined(self, function: tirx.PrimFunc) -> tirx.PrimFunc:
        """Return the function of a declaration; any other function is returned unchanged."""
        if not _is_declaration(function):
            return function
        made = self._of(function).make().without_attr("global_symbol")
        pairs = [(int(read), int(written)) for read, written in function.attrs.get(SHARED, [])]
        if pairs:
            made = sharing(made, pairs)
        symbol = function.attrs.get("global_symbol")
        attributes = (
            _kept(function) if symbol is None else {**_kept(function), "global_symbol": symbol}
        )
        return made.with_attrs(attributes)

    def settled(self, mod: tvm.IRModule) -> dict[GlobalVar, tirx.PrimFunc]:
        """Return the declarations of a module that later passes are expected to keep as they are.

        They are called, not only with constants, and cannot write to their arguments.
        """
        functions = [f for f in mod.functions.values() if isinstance(f, relax.Function)]
        folded = set().union(*map(_called_with_constants, functions))
        called = set(referred_to(functions)) - folded
        return {v: f for v, f in mod.functions_items() if v in called and _is_settled(f)}

    def has(self, function: tirx.PrimFunc) -> bool:
        """Tell whether a function is a declaration."""
        return _is_declaration(function)

    def completed(
        self, mod: tvm.IRModule, only: Collection[GlobalVar] | None = None
    ) -> tvm.IRModule:
        """Return a module in which functions replace all declarations, or those in ``only``."""
        functions = dict(mod.functions_items())
        declared = [
            variable
            for variable, function in functions.items()
            if _is_declaration(function) and (only is None or variable in only)
        ]
        if not declared:
            return mod
        functions.update({variable: self.defined(functions[variable]) for variable in declared})
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def completed_on_constants(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return a module in which functions replace the declarations with a call whose arguments
        are all constants.

        TVM runs such functions to fold their results.
        """
        if not any(map(_is_declaration, mod.functions.values())):
            return mod
        called: set[GlobalVar] = set()
        for function in mod.functions.values():
            if isinstance(function, relax.Function):
                called |= _called_with_constants(function)
        return self.completed(mod, called)

    def _of(self, function: tirx.PrimFunc) -> _Declared:
        return self._declared[int(function.attrs[_NUMBER])]


def _is_declaration(function: tvm.ir.BaseFunc) -> bool:
    return (
        isinstance(function, tirx.PrimFunc)
        and function.attrs is not None
        and _NUMBER in function.attrs
    )


def _is_settled(function: tvm.ir.BaseFunc) -> bool:
    return _is_declaration(function) and IN_PLACE not in function.attrs


def _kept(function: tirx.PrimFunc) -> dict[str, object]:
    """Return the attributes that a function gets from its declaration, and that its machine code
    depends on."""
    return {
        str(name): value
        for name, value in function.attrs.items()
        if name not in (_NUMBER, "global_symbol")
    }


def _called_with_constants(function: relax.Function) -> set[GlobalVar]:
    """Return the callees with a call whose arguments are all constants or computed from
    constants."""
    variables: set[GlobalVar] = set()
    constants: set[relax.Var] = set()
    for binding in bindings_of(function.body):
        if all(variable in constants for variable in used(binding.value)):
            constants.add(binding.var)
            variables.update(relax.analysis.all_global_vars(binding.value))
    return variables
