"""The pass that compiles the tensor functions of a module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ...ir.compat import links_external_modules
from ...ir.module import unused
from . import arguments
from .arguments import Parameter
from .cache import current
from .callees import with_callees
from .common import units
from .compiler import Compiler, groups_of, of_kernels
from .declarations import Declarations
from .early import Early
from .entries import JUMPS, Entry, linked, machine, triple
from .lower import (
    SYMBOL,
    is_generated,
    optimizing,
    prefers_short,
    with_whole_vectors,
    written,
)
from .objects import UnsupportedObject, embedded
from .objects import functions as functions_of

#: The empty modules of targets.
_TEMPLATES: dict[str, str] = {}

#: Systems whose object files are not in ELF format.
_OTHER_FORMATS = ("windows", "darwin", "macos", "ios", "wasm")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.CompileFunctions")
class CompileFunctions:
    """Compile the tensor functions of a module that only Relax functions call.

    They are compiled in as many threads as there are cores, or loaded from the directory of
    :func:`relax_grad.cache`. Relax functions call them by name. The machine code is an external
    module of the result. Functions that cannot be compiled here stay in the module, and TVM
    compiles them.

    Parameters
    ----------
    target : tvm.target.Target
        A target of LLVM. If it has no optimization level, the level is ``-O2``. Kernels are already
        vectorised and unrolled, so that ``-O3`` takes longer and gives the same speed.
    declarations : Declarations, optional
        The declarations in the module. The threads generate a declared function if it has no cached
        object file. Declarations that are not compiled stay in the module.
    early : Early, optional
        The kernels of :class:`BeginKernels`.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        declarations: Declarations | None = None,
        early: Early | None = None,
    ):
        self._target = target
        self._declarations = Declarations() if declarations is None else declarations
        self._early = Early(self._declarations) if early is None else early

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        target = optimizing(self._target)
        template = _template(target)
        if not _may_link(mod, template):
            return mod
        functions = _compiled_alone(mod, self._target)
        if not functions or self._is_left_to_tvm(list(functions.values())):
            return mod
        try:
            compiler = Compiler(target, current(), self._declarations)
            objects, entries = compiler.compile(list(functions.values()), self._early)
            objects += units(objects, _template(with_whole_vectors(target)))
        except UnsupportedObject:
            return mod
        checked = _checked(functions.values())
        library = linked(template, objects, entries, checked)
        return _without(mod, functions, library)

    def _is_left_to_tvm(self, functions: list) -> bool:
        """Tell whether TVM compiles the functions as fast, to the same code: a single group cannot
        be divided among threads."""
        is_one = current() is None and len(groups_of(functions, self._early)) == 1
        return is_one and not prefers_short(self._target)


@tvm.transform.module_pass(opt_level=0, name="relax_grad.BeginKernels")
class BeginKernels:
    """Begin to compile the declared kernels of a module in threads, while later passes run.

    The passes keep one core, so that a single thread only divides the kernels into groups.

    Parameters
    ----------
    target : tvm.target.Target
        A target of LLVM, as for :class:`CompileFunctions`.
    declarations : Declarations
        The declarations in the module.
    early : Early
        The threads.
    symbol_prefix : str
        The prefix that functions get before they are compiled.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        declarations: Declarations,
        early: Early,
        symbol_prefix: str = "",
    ):
        self._target, self._declarations, self._early = target, declarations, early
        self._prefix = symbol_prefix

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        target = optimizing(self._target)
        if not _may_link(mod, _template(target)):
            return mod
        kernels = [
            function.with_attr("global_symbol", self._prefix + variable.name_hint)
            for variable, function in self._declarations.settled(mod).items()
        ]
        compiler = Compiler(target, current(), self._declarations)
        compiler.begin(of_kernels(kernels), self._early)
        return mod


def assembled(library: tvm.runtime.Module, target: tvm.target.Target) -> tvm.runtime.Module:
    """Return the machine code of a module of LLVM as a module that runs without further
    compilation.

    TVM compiles the LLVM IR of a module when the module is loaded to run, with all optimizations of
    the code generator, whatever the level of the target. At level 0 that takes half of the time of
    a compilation. The result has the machine code of the target's level. A module that cannot be
    embedded is returned unchanged.

    Parameters
    ----------
    library : tvm.runtime.Module
        A module of LLVM without imports, which is no system library.
    target : tvm.target.Target
        The target that the module was compiled for.
    """
    template = _template(target)
    if not _is_supported(template):
        return library
    data = written(library)
    try:
        labels = {name: f"relax_grad_{i}" for i, name in enumerate(functions_of(data, SYMBOL))}
        if not labels:
            return library
        code = embedded(data, {SYMBOL + name: label for name, label in labels.items()})
    except UnsupportedObject:
        return library
    entries = {name: Entry(label, label, ()) for name, label in labels.items()}
    return linked(template, [code], entries, {})


def _may_link(mod: tvm.IRModule, template: str) -> bool:
    """Tell whether the machine code of a module may be an external module."""
    is_system = mod.get_attr("system_lib_prefix") is not None
    return links_external_modules() and not is_system and _is_supported(template)


def _is_supported(template: str) -> bool:
    """Tell whether object files for the target of a template can be embedded."""
    name = triple(template)
    return machine(template) in JUMPS and not any(system in name for system in _OTHER_FORMATS)


def _empty_module(target: tvm.target.Target) -> str:
    """Return the LLVM IR of TVM's code generator for an empty module: the target, and the
    conversions of float16."""
    return tvm.get_global_func("target.build.llvm")(tvm.IRModule({}), target).inspect_source("ll")


def _template(target: tvm.target.Target) -> str:
    """Return the empty module for a target, generated once."""
    name = str(target)
    if name not in _TEMPLATES:
        _TEMPLATES[name] = _empty_module(target)
    return _TEMPLATES[name]


def _compiled_alone(mod: tvm.IRModule, target: tvm.target.Target) -> dict[GlobalVar, tirx.PrimFunc]:
    """Return the tensor functions for a target that neither call tensor functions nor are called by
    them."""
    called: set[GlobalVar] = set()
    compiled = {}
    for variable, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        calls = set() if is_generated(function) else _functions_in(function)
        called |= calls
        if not calls and _is_for(function, target) and len(function.params) > 0:
            compiled[variable] = function
    return {variable: function for variable, function in compiled.items() if variable not in called}


def _functions_in(function: tirx.PrimFunc) -> set[GlobalVar]:
    """Return the functions of the module that a tensor function refers to."""
    named: set[GlobalVar] = set()
    tvm_ffi.structural_walk(function.body, (GlobalVar, named.add))
    return named


def _is_for(function: tirx.PrimFunc, target: tvm.target.Target) -> bool:
    """Tell whether a function has a global symbol and is compiled for a target."""
    attributes = function.attrs
    if attributes is None or attributes.get("global_symbol") is None:
        return False
    own = attributes.get("target")
    return own is None or str(own) == str(target)


def _checked(functions: Iterable[tirx.PrimFunc]) -> dict[str, Sequence[Parameter]]:
    """Return the parameters that are checked before a call, by the name of the function."""
    if tvm.transform.PassContext.current().config.get("tirx.disable_assert", False):
        return {}
    parameters = {str(f.attrs["global_symbol"]): arguments.parameters(f) for f in functions}
    return {name: params for name, params in parameters.items() if params is not None}


def _without(
    mod: tvm.IRModule, compiled: dict[GlobalVar, tirx.PrimFunc], library: tvm.runtime.Module
) -> tvm.IRModule:
    """Return a module without the compiled functions. Relax functions call them by name in an
    external module."""
    named = {
        variable: relax.ExternFunc(str(function.attrs["global_symbol"]))
        for variable, function in compiled.items()
    }
    functions = {}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            functions[variable] = with_callees(function, named)
        elif variable not in compiled:
            functions[variable] = function
    if not any(isinstance(function, tirx.PrimFunc) for function in functions.values()):
        # Without any tensor function, TVM would need a C compiler.
        name = unused("nothing", [variable.name_hint for variable in functions])
        nothing = tirx.PrimFunc([], tirx.Evaluate(0))
        functions[GlobalVar(name)] = nothing.with_attr("global_symbol", name)
    attributes = dict(mod.attrs.items()) if mod.attrs is not None else {}
    attributes["external_mods"] = [*attributes.get("external_mods", []), library]
    return tvm.IRModule(functions, attrs=attributes, global_infos=mod.global_infos)
