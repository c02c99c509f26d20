"""The pass that compiles the tensor functions of a module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ..._progress import advance, describe
from ...ir.compat import links_external_modules
from ...ir.module import unused
from ..threads import default_threads
from . import arguments
from .arguments import Parameter
from .cache import current
from .callees import with_callees
from .common import units, without_definitions
from .declarations import Declarations
from .directory import Directory
from .early import Early
from .entries import JUMPS, Entry, linked, machine, triple
from .generic import shared
from .lower import (
    SYMBOL,
    canonical_name,
    environment,
    is_generated,
    key,
    object_file,
    optimizing,
    prefers_short,
    with_whole_vectors,
    written,
)
from .objects import Embedded, UnsupportedObject, embedded
from .objects import functions as functions_of

#: The empty modules of targets.
_TEMPLATES: dict[str, str] = {}

#: The numbers of kernels and of short functions that are compiled together.
_KERNELS, _TOGETHER = 4, 16

#: The number that a family of functions counts at most: most of them share code.
_OF_FAMILY = 3

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
            compiler = _Compiler(target, current(), self._declarations)
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
        is_one = current() is None and len(_groups(functions, self._early)) == 1
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
        compiler = _Compiler(target, current(), self._declarations)
        compiler.begin(_of_kernels(kernels), self._early)
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


class _Compiler:
    """A compiler of functions to object files. It runs in threads, and uses the object files of a
    directory.

    Parameters
    ----------
    target : tvm.target.Target
        The target of the compilation.
    directory : Directory or None
        The directory of object files.
    declarations : Declarations
        The declarations among the functions.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        directory: Directory | None,
        declarations: Declarations,
    ):
        self._target, self._directory, self._declarations = target, directory, declarations
        self._environment = [] if directory is None else environment(target)

    def begin(self, groups: Sequence[Sequence[tirx.PrimFunc]], early: Early) -> None:
        """Begin to compile groups of kernels in threads, with one core for the caller."""
        # TVM may compile a single group.
        threads = self._threads() - 1 if len(groups) > 1 else 0
        early.begin(groups, self._in_context(self._group), threads)

    def compile(
        self, functions: Sequence[tirx.PrimFunc], early: Early | None = None
    ) -> tuple[list[Embedded], dict[str, Entry]]:
        """Return the assembly of functions, and the entry of each function by its name."""
        early = Early(self._declarations) if early is None else early
        made = self._each(_groups(functions, early), early)
        if self._directory is not None:
            self._directory.trim()
        return [unit for unit, _ in made], {n: e for _, own in made for n, e in own.items()}

    def _each(self, groups: Mapping[int, Sequence[tirx.PrimFunc]], early: Early) -> list[_Unit]:
        describe(f"compiling {sum(map(len, groups.values()))} functions", len(groups))

        def counted(index: int, group: Sequence[tirx.PrimFunc]) -> _Unit:
            made = self._group(index, group)
            advance()
            return made

        threads = self._threads()
        if threads == 1:
            return [counted(i, group) for i, group in groups.items()]
        begun = early.taken(groups)
        for future in begun.values():
            future.add_done_callback(lambda _: advance())
        others = {i: group for i, group in groups.items() if i not in begun}
        with ThreadPoolExecutor(threads) as executor:
            made = executor.map(self._in_context(counted), others, others.values())
            units = dict(zip(others, made, strict=True))
        return [begun[i].result() if i in begun else units[i] for i in groups]

    def _threads(self) -> int:
        """Return the number of threads: one with instruments, which expect one pass at a time."""
        return 1 if tvm.transform.PassContext.current().instruments else default_threads()

    def _in_context(
        self, compile_one: Callable[[int, Sequence[tirx.PrimFunc]], _Unit]
    ) -> Callable[[int, Sequence[tirx.PrimFunc]], _Unit]:
        """Return a function that compiles in a thread with the options of the pass context."""
        context = tvm.transform.PassContext.current()
        options = {"opt_level": context.opt_level, "config": dict(context.config)}

        def in_thread(index: int, group: Sequence[tirx.PrimFunc]) -> _Unit:
            with tvm.transform.PassContext(**options), self._target:
                return compile_one(index, group)

        return in_thread

    def _group(self, index: int, group: Sequence[tirx.PrimFunc]) -> _Unit:
        """Return the assembly of a group of functions that are compiled together, and their
        entries. The index of the group makes their labels unique."""
        functions: dict[str, tirx.PrimFunc] = {}
        called: dict[str, str] = {}
        for function in group:
            symbol = str(function.attrs["global_symbol"])
            name = unused(canonical_name(symbol), functions)
            functions[name] = function
            called[name] = symbol
        labels = {symbol: f"relax_grad_{index}_{i}" for i, symbol in enumerate(called.values())}
        if self._directory is None:
            return _unit(self._compiled(functions), called, labels)
        contents = {
            name: self._declarations.content(function) for name, function in functions.items()
        }
        identity = key(contents, self._environment)
        stored = self._directory.load(identity)
        if stored is not None:
            try:
                return _unit(_Compiled.read(stored), called, labels)
            except UnsupportedObject:
                pass  # compiled again
        compiled = self._compiled(functions)
        result = _unit(compiled, called, labels)
        self._directory.store(identity, compiled.written(), description=", ".join(functions))
        return result

    def _compiled(self, functions: Mapping[str, tirx.PrimFunc]) -> _Compiled:
        """Compile functions together, after generating the declared ones."""
        is_checked = {
            name: arguments.parameters(function) is not None for name, function in functions.items()
        }
        defined = {
            name: without_definitions(self._declarations.defined(function))
            for name, function in functions.items()
        }
        # Code for several functions has no checks.
        scheduled = {
            name: function
            for name, function in defined.items()
            if is_checked[name] and not is_generated(function)
        }
        numbers: dict[str, tuple[str, tuple[int, ...]]] = {name: (name, ()) for name in defined}
        tensors: dict[str, int] = {}
        for code in shared(scheduled):
            first, *others = code.values
            defined[first] = code.function
            for name in others:
                del defined[name]
            if code.values[first]:
                tensors[first] = code.tensors
            numbers.update({name: (first, own) for name, own in code.values.items()})
        checked = [name for name in defined if is_checked[name]]
        return _Compiled(object_file(defined, self._target, checked, tensors), numbers)


#: The assembly of a group of functions, and their entries by name.
_Unit = tuple[Embedded, dict[str, Entry]]


@dataclass(frozen=True)
class _Compiled:
    """An object file.

    Attributes
    ----------
    data : bytes
        The object file.
    numbers : dict[str, tuple[str, tuple[int, ...]]]
        Of each function, the name of the function in the object file, and the numbers that it
        reads from a table.
    """

    data: bytes
    numbers: dict[str, tuple[str, tuple[int, ...]]]

    def written(self) -> bytes:
        """Return the contents of a file that :meth:`read` reads."""
        return json.dumps(self.numbers).encode() + b"\n" + self.data

    @staticmethod
    def read(stored: bytes) -> _Compiled:
        """Return the object file of a file's contents; raise UnsupportedObject for others."""
        header, _, data = stored.partition(b"\n")
        try:
            numbers = {
                name: (code, tuple(map(int, own)))
                for name, (code, own) in json.loads(header).items()
            }
        except (ValueError, AttributeError, TypeError) as error:
            raise UnsupportedObject("no names of functions") from error
        return _Compiled(data, numbers)


def _unit(compiled: _Compiled, called: Mapping[str, str], labels: Mapping[str, str]) -> _Unit:
    """Return the assembly of an object file and the entries of its functions.

    Parameters
    ----------
    compiled : _Compiled
        The object file.
    called : Mapping[str, str]
        The names by which a program calls the functions, by their names in the object file.
    labels : Mapping[str, str]
        The labels of the functions, by the names of calls.
    """
    if set(compiled.numbers) != set(called):
        raise UnsupportedObject("the functions of another group")
    codes = {code: labels[called[code]] for code, _ in compiled.numbers.values()}
    entries = {
        called[name]: Entry(labels[called[name]], codes[code], numbers)
        for name, (code, numbers) in compiled.numbers.items()
    }
    unit = embedded(compiled.data, {SYMBOL + code: label for code, label in codes.items()})
    return unit, entries


def _groups(functions: Sequence[tirx.PrimFunc], early: Early) -> dict[int, list[tirx.PrimFunc]]:
    """Divide functions into groups that are compiled together: kernels, then the others, which are
    short. Each group has an index.

    If each were compiled alone, the setup and the end of a module would take a tenth of the time of
    a kernel, and half the time of a short function. Functions with equal names but for numbers may
    share their code, and are in one group. The groups do not depend on the number of threads, so
    that machines with different numbers of cores can share a directory.
    """
    groups, functions = early.divided(functions)
    kernels: list[tirx.PrimFunc] = []
    families: dict[str, list[tirx.PrimFunc]] = {}
    for function in functions:
        if is_generated(function):
            kernels.append(function)
        else:
            name = canonical_name(str(function.attrs["global_symbol"]))
            families.setdefault(name, []).append(function)
    short: list[list[tirx.PrimFunc]] = []
    room = 0
    for family in families.values():
        if room <= 0:
            short.append([])
            room = _TOGETHER
        short[-1] += family
        room -= min(len(family), _OF_FAMILY)
    return {**groups, **dict(enumerate(_of_kernels(kernels) + short, early.number))}


def _of_kernels(kernels: list[tirx.PrimFunc]) -> list[list[tirx.PrimFunc]]:
    """Divide kernels into groups."""
    return [kernels[i : i + _KERNELS] for i in range(0, len(kernels), _KERNELS)]


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
