"""The pass that compiles the tensor functions of a module."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ..._progress import advance, describe
from ...ir.compat import links_external_modules
from ...ir.module import unused
from ..threads import default_threads
from . import arguments
from ._check import ENTER, check
from .arguments import Parameter
from .cache import current
from .callees import with_callees
from .declarations import Declarations
from .directory import Directory
from .lower import (
    SYMBOL,
    canonical_name,
    environment,
    is_generated,
    key,
    loaded,
    object_file,
    optimizing,
    prefers_short,
)
from .objects import Embedded, UnsupportedObject, embedded
from .objects import functions as functions_of

#: The machines whose object files can be embedded, as prefixes of LLVM's target triples: the
#: assembly of a jump to machine code (operand 0), and of one to the function that checks arguments
#: (operand 2), with the table (operand 0) as its fifth argument and the code (operand 1) as its
#: sixth one.
_ARM = (
    "b $0",
    "adrp x4, $0\\0Aadd x4, x4, :lo12:$0\\0Aadrp x5, $1\\0Aadd x5, x5, :lo12:$1\\0Ab $2",
)
_JUMPS = {
    "x86_64": (
        "jmp ${0:P}",
        "leaq ${0:P}(%rip), %r8\\0Aleaq ${1:P}(%rip), %r9\\0Ajmp ${2:P}",
    ),
    "aarch64": _ARM,
    "arm64": _ARM,
}

#: The empty modules of targets.
_TEMPLATES: dict[str, str] = {}

#: The number of short functions that are compiled together.
_TOGETHER = 16

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
    """

    def __init__(self, target: tvm.target.Target, declarations: Declarations | None = None):
        self._target = target
        self._declarations = Declarations() if declarations is None else declarations

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        if not links_external_modules() or mod.get_attr("system_lib_prefix") is not None:
            return mod
        functions = _compiled_alone(mod, self._target)
        if not functions or self._is_left_to_tvm(list(functions.values())):
            return mod
        target = optimizing(self._target)
        template = _empty_module(target)
        if not _is_supported(template):
            return mod
        try:
            compiler = _Compiler(target, current(), self._declarations)
            objects, labels = compiler.compile(list(functions.values()))
        except UnsupportedObject:
            return mod
        library = _library(template, objects, labels, _checked(functions.values()))
        return _without(mod, functions, library)

    def _is_left_to_tvm(self, functions: list) -> bool:
        """Tell whether TVM compiles the functions as fast, to the same code: a single group cannot
        be divided among threads."""
        is_one = current() is None and len(_groups(functions)) == 1
        return is_one and not prefers_short(self._target)


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
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "functions.o")
        library.write_to_file(str(path))
        data = path.read_bytes()
    try:
        labels = {name: f"relax_grad_{i}" for i, name in enumerate(functions_of(data, SYMBOL))}
        if not labels:
            return library
        code = embedded(data, {SYMBOL + name: label for name, label in labels.items()})
    except UnsupportedObject:
        return library
    return _library(template, [code], labels, {})


def _is_supported(template: str) -> bool:
    """Tell whether object files for the target of a template can be embedded."""
    name = _triple(template)
    return _machine(template) in _JUMPS and not any(system in name for system in _OTHER_FORMATS)


def _triple(template: str) -> str:
    found = re.search(r'^target triple = "([^"]*)"', template, re.MULTILINE)
    return found[1] if found else ""


def _machine(template: str) -> str:
    """Return the machine of a template, the first part of the triple of its target."""
    return _triple(template).partition("-")[0]


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

    def compile(self, functions: Sequence[tirx.PrimFunc]) -> tuple[list[Embedded], dict[str, str]]:
        """Return the assembly of functions, and the label of each function by its name."""
        labels = {
            str(function.attrs["global_symbol"]): f"relax_grad_{i}"
            for i, function in enumerate(functions)
        }
        made = self._each(lambda group: self._group(group, labels), _groups(functions))
        if self._directory is not None:
            self._directory.trim()
        return made, labels

    def _each(
        self,
        compile_one: Callable[[Sequence[tirx.PrimFunc]], Embedded],
        groups: Sequence[Sequence[tirx.PrimFunc]],
    ) -> list[Embedded]:
        context = tvm.transform.PassContext.current()
        threads = default_threads()
        describe(f"compiling {sum(map(len, groups))} functions", len(groups))

        def counted(group: Sequence[tirx.PrimFunc]) -> Embedded:
            made = compile_one(group)
            advance()
            return made

        if threads == 1 or context.instruments:  # instruments expect one pass at a time
            return list(map(counted, groups))
        options = {"opt_level": context.opt_level, "config": dict(context.config)}

        def in_thread(group: Sequence[tirx.PrimFunc]) -> Embedded:
            with tvm.transform.PassContext(**options), self._target:
                return counted(group)

        with ThreadPoolExecutor(threads) as executor:
            return list(executor.map(in_thread, groups))

    def _group(self, group: Sequence[tirx.PrimFunc], labels: Mapping[str, str]) -> Embedded:
        """Return the assembly of a group of functions that are compiled together."""
        functions: dict[str, tirx.PrimFunc] = {}
        entries: dict[str, str] = {}
        for function in group:
            called = str(function.attrs["global_symbol"])
            name = unused(canonical_name(called), functions)
            functions[name] = function
            entries[SYMBOL + name] = labels[called]
        if self._directory is None:
            return embedded(self._object_file(functions), entries)
        contents = {
            name: self._declarations.content(function) for name, function in functions.items()
        }
        identity = key(contents, self._environment)
        stored = self._directory.load(identity)
        if stored is not None:
            try:
                return embedded(stored, entries)
            except UnsupportedObject:
                pass  # compiled again
        data = self._object_file(functions)
        result = embedded(data, entries)
        self._directory.store(identity, data, description=", ".join(functions))
        return result

    def _object_file(self, functions: Mapping[str, tirx.PrimFunc]) -> bytes:
        """Compile functions together, after generating the declared ones."""
        checked = [
            name
            for name, function in functions.items()
            if arguments.parameters(function) is not None
        ]
        defined = {
            name: self._declarations.defined(function) for name, function in functions.items()
        }
        return object_file(defined, self._target, checked)


def _groups(functions: Sequence[tirx.PrimFunc]) -> list[list[tirx.PrimFunc]]:
    """Divide functions into groups that are compiled together. Long functions come first, each in a
    group of its own.

    The others are short: if each were compiled alone, half of the time would go to the setup and
    the end of a module. The groups do not depend on the number of threads, so that machines with
    different numbers of cores can share a directory.
    """
    alone = [[function] for function in functions if is_generated(function)]
    short = [function for function in functions if not is_generated(function)]
    return alone + [short[i : i + _TOGETHER] for i in range(0, len(short), _TOGETHER)]


def _checked(functions: Iterable[tirx.PrimFunc]) -> dict[str, Sequence[Parameter]]:
    """Return the parameters that are checked before a call, by the name of the function."""
    if tvm.transform.PassContext.current().config.get("tirx.disable_assert", False):
        return {}
    parameters = {str(f.attrs["global_symbol"]): arguments.parameters(f) for f in functions}
    return {name: params for name, params in parameters.items() if params is not None}


def _library(
    template: str,
    objects: Sequence[Embedded],
    labels: Mapping[str, str],
    checked: Mapping[str, Sequence[Parameter]],
) -> tvm.runtime.Module:
    """Return an LLVM module that embeds object files and defines the labelled functions.

    TVM finds functions, and the pointers that its runtime fills in, only if LLVM IR defines them.
    Therefore the module has an LLVM IR function for each label. It checks the arguments if the
    machine code does not, and jumps to the machine code. The module also defines the pointers that
    the machine code reads.
    """
    lines = [template]
    for unit in objects:
        lines += [f'module asm "{_quoted(line)}"' for line in unit.assembly.split("\n")]
    for pointer in sorted({pointer for unit in objects for pointer in unit.context}):
        if f"@{pointer} =" not in template:
            lines.append(f"@{pointer} = weak global ptr null, align 8")
    texts: dict[str, str] = {}
    if checked:
        lines += check()
    for name, parameters in checked.items():
        lines += arguments.table(labels[name], name, parameters, texts)
    jump = _JUMPS[_machine(template)]
    for name, label in labels.items():
        lines += _entry(name, label, jump, name in checked)
    return loaded("\n".join(lines))


def _entry(name: str, label: str, jump: tuple[str, str], is_checked: bool) -> list[str]:
    """Return the LLVM IR function that TVM finds by a name. It jumps to the machine code at a
    label, or to the function that checks the arguments first.

    Its body is assembly: LLVM takes a millisecond for a function of its own language.
    """
    plain, checked = jump
    operands = (
        f'"{checked}", "i,i,i"(ptr @{label}.table, ptr @{label}, ptr {ENTER})'
        if is_checked
        else f'"{plain}", "i"(ptr @{label})'
    )
    return [
        f"declare dso_local i32 @{label}(ptr, ptr, i32, ptr)",
        f'define i32 @"{SYMBOL}{name}"(ptr %self, ptr %args, i32 %count, ptr %result) '
        "naked noinline nounwind {",
        f"  call void asm sideeffect {operands}",
        "  unreachable",
        "}",
    ]


def _quoted(line: str) -> str:
    return line.replace("\\", "\\5C").replace('"', "\\22")


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
