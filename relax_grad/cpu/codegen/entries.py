"""The entries of compiled functions: the LLVM IR functions that TVM finds, which jump to embedded
machine code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tvm

from . import arguments
from ._check import ENTER, check
from .arguments import Parameter
from .generic import table
from .lower import SYMBOL, loaded
from .objects import Embedded


class Jump(NamedTuple):
    """Assembly of the entry of a function.

    Attributes
    ----------
    plain : str
        A jump to machine code, operand 0.
    checked : str
        A jump to the function that checks arguments, operand 2, with the code as its sixth argument
        and the table, operand 1, as its fifth one.
    numbers : str
        Before the jump, it replaces the first argument by the numbers, operand N.
    """

    plain: str
    checked: str
    numbers: str


_ARM = Jump(
    "b $0",
    "adrp x4, $1\\0Aadd x4, x4, :lo12:$1\\0Aadrp x5, $0\\0Aadd x5, x5, :lo12:$0\\0Ab $2",
    "adrp x0, $N\\0Aadd x0, x0, :lo12:$N",
)

#: The machines whose object files can be embedded, as prefixes of LLVM's target triples.
JUMPS = {
    "x86_64": Jump(
        "jmp ${0:P}",
        "leaq ${1:P}(%rip), %r8\\0Aleaq ${0:P}(%rip), %r9\\0Ajmp ${2:P}",
        "leaq ${N:P}(%rip), %rdi",
    ),
    "aarch64": _ARM,
    "arm64": _ARM,
}


@dataclass(frozen=True)
class Entry:
    """The place of a compiled function.

    Attributes
    ----------
    label : str
        The prefix of the labels of its tables.
    code : str
        The label of its machine code.
    numbers : tuple[int, ...]
        The numbers that the code reads from a table.
    """

    label: str
    code: str
    numbers: tuple[int, ...]


def triple(template: str) -> str:
    """Return the triple of the target of a template, the empty module of TVM's code generator."""
    found = re.search(r'^target triple = "([^"]*)"', template, re.MULTILINE)
    return found[1] if found else ""


def machine(template: str) -> str:
    """Return the machine of a template, the first part of the triple of its target."""
    return triple(template).partition("-")[0]


def linked(
    template: str,
    objects: Sequence[Embedded],
    entries: Mapping[str, Entry],
    checked: Mapping[str, Sequence[Parameter]],
) -> tvm.runtime.Module:
    """Return an LLVM module that embeds object files and defines functions with entries.

    TVM finds functions, and the pointers that its runtime fills in, only if LLVM IR defines them.
    Therefore the module has an LLVM IR function for each entry. It checks the arguments if the
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
        lines += arguments.table(entries[name].label, name, parameters, texts)
    jump = JUMPS[machine(template)]
    for code in {entry.code: None for entry in entries.values()}:
        lines.append(f"declare dso_local i32 @{code}(ptr, ptr, i32, ptr)")
    for name, entry in entries.items():
        lines += _entry(name, entry, jump, name in checked)
    return loaded("\n".join(lines))


def _entry(name: str, entry: Entry, jump: Jump, is_checked: bool) -> list[str]:
    """Return the LLVM IR function that TVM finds by a name. It jumps to the machine code of an
    entry, or to the function that checks the arguments first.

    Its body is assembly: LLVM takes a millisecond for a function in its own IR.
    """
    lines = []
    operands = [f"ptr @{entry.code}"]
    assembly = jump.plain
    if is_checked:
        operands += [f"ptr @{entry.label}.table", f"ptr {ENTER}"]
        assembly = jump.checked
    if entry.numbers:
        lines.append(table(entry.label, entry.numbers))
        assembly = f"{jump.numbers.replace('N', str(len(operands)))}\\0A{assembly}"
        operands.append(f"ptr @{entry.label}.numbers")
    constraints = ",".join("i" for _ in operands)
    return [
        *lines,
        f'define i32 @"{SYMBOL}{name}"(ptr %self, ptr %args, i32 %count, ptr %result) '
        "naked noinline nounwind {",
        f'  call void asm sideeffect "{assembly}", "{constraints}"({", ".join(operands)})',
        "  unreachable",
        "}",
    ]


def _quoted(line: str) -> str:
    return line.replace("\\", "\\5C").replace('"', "\\22")
