"""Object files as assembly, which LLVM assembles without any compilation.

TVM's runtime cannot load object files, and a linker may not be installed. An LLVM module whose
inline assembly consists of the sections of object files can be run and exported like a module that
TVM has compiled.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import tvm

_PROGBITS, _SYMTAB, _RELA, _NOBITS, _REL, _INIT_ARRAY = 1, 2, 4, 8, 9, 14
_WRITE, _ALLOC, _EXECUTE = 1, 2, 4
_LOCAL, _GLOBAL, _WEAK = 0, 1, 2
_OBJECT, _FUNCTION = 1, 2

#: Relocation types of the supported machines: the name that assemblers use, by number.
_RELOCATIONS = {
    62: {  # x86-64
        1: "R_X86_64_64",
        2: "R_X86_64_PC32",
        4: "R_X86_64_PLT32",
        9: "R_X86_64_GOTPCREL",
        10: "R_X86_64_32",
        11: "R_X86_64_32S",
        24: "R_X86_64_PC64",
        41: "R_X86_64_GOTPCRELX",
        42: "R_X86_64_REX_GOTPCRELX",
    },
    183: {  # AArch64
        257: "R_AARCH64_ABS64",
        258: "R_AARCH64_ABS32",
        260: "R_AARCH64_PREL64",
        261: "R_AARCH64_PREL32",
        275: "R_AARCH64_ADR_PREL_PG_HI21",
        277: "R_AARCH64_ADD_ABS_LO12_NC",
        278: "R_AARCH64_LDST8_ABS_LO12_NC",
        282: "R_AARCH64_JUMP26",
        283: "R_AARCH64_CALL26",
        284: "R_AARCH64_LDST16_ABS_LO12_NC",
        285: "R_AARCH64_LDST32_ABS_LO12_NC",
        286: "R_AARCH64_LDST64_ABS_LO12_NC",
        299: "R_AARCH64_LDST128_ABS_LO12_NC",
        311: "R_AARCH64_ADR_GOT_PAGE",
        312: "R_AARCH64_LD64_GOT_LO12_NC",
    },
}

#: Sections that are left out: unwind tables, which kernels do not need because they return their
#: errors, and notes.
_UNUSED = re.compile(rb"\.eh_frame|\.note|\.llvm|\.comment")

#: The only function that may run when a file is loaded. It registers the functions of system
#: libraries, and is empty in other files. LLVM's optimizations delete the empty function.
_STARTUP = "__tvm_module_startup"


#: The first version of LLVM that is known to read base64, and the bytes of a line.
_BASE64, _LINE = 22, 6144


class UnsupportedObject(Exception):
    """An error for an object file that cannot be embedded."""


@dataclass(frozen=True)
class _Section:
    name: bytes
    type: int
    flags: int
    data: bytes
    size: int
    link: int
    info: int
    align: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    binding: int
    type: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Embedded:
    """An object file as assembly.

    Attributes
    ----------
    assembly : str
        Its lines.
    context : frozenset[str]
        The names of the pointers that the runtime fills in when it loads the module with this
        assembly.
    external : frozenset[str]
        The symbols that the assembly refers to and does not define.
    """

    assembly: str
    context: frozenset[str]
    external: frozenset[str] = frozenset()


def embedded(data: bytes, entries: Mapping[str, str]) -> Embedded:
    """Return the assembly of an object file.

    Parameters
    ----------
    data : bytes
        The file in ELF format, for little-endian x86-64 or AArch64.
    entries : Mapping[str, str]
        The label of each function that others call, by its symbol. Labels are unique in the module.
        The names of all other labels contain the first one.

    Raises
    ------
    UnsupportedObject
        If the file has another format, or contains other sections than code, constants and plain
        data.
    """
    try:
        machine, sections = _sections(data)
        symbols = _symbols(sections)
        return _Writer(machine, sections, symbols, entries).write()
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise UnsupportedObject(f"the object file is damaged: {error}") from error


def functions(data: bytes, prefix: str) -> list[str]:
    """Return the functions with a prefix that an object file defines for others, without the
    prefix.

    Raises
    ------
    UnsupportedObject
        As in :func:`embedded`.
    """
    try:
        symbols = _symbols(_sections(data)[1])
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise UnsupportedObject(f"the object file is damaged: {error}") from error
    return [
        symbol.name.removeprefix(prefix)
        for symbol in symbols
        if symbol.name.startswith(prefix)
        and (symbol.type, symbol.binding) == (_FUNCTION, _GLOBAL)
        and symbol.section
    ]


def _sections(data: bytes) -> tuple[int, list[_Section]]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise UnsupportedObject("the object file is not a little-endian ELF file of 64 bits")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine not in _RELOCATIONS:
        raise UnsupportedObject(f"the object file is for machine {machine}")
    start = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<3H", data, 58)
    headers = [struct.unpack_from("<2I4Q2I2Q", data, start + i * size) for i in range(count)]
    sections = []
    name_offset = headers[names][4]
    for name, kind, flags, _, offset, length, link, info, align, _ in headers:
        begin = name_offset + name
        content = b"" if kind == _NOBITS else data[offset : offset + length]
        if kind != _NOBITS and len(content) != length:
            raise UnsupportedObject("the object file is damaged: it is too short")
        label = data[begin : data.index(b"\0", begin)]
        sections.append(_Section(label, kind, flags, content, length, link, info, align))
    return machine, sections


def _symbols(sections: list[_Section]) -> list[_Symbol]:
    tables = [section for section in sections if section.type == _SYMTAB]
    if len(tables) != 1:
        raise UnsupportedObject("the object file has no symbols")
    strings = sections[tables[0].link].data
    symbols = []
    for name, info, _, section, value, size in struct.iter_unpack("<I2BH2Q", tables[0].data):
        label = strings[name : strings.index(b"\0", name)].decode()
        symbols.append(_Symbol(label, info >> 4, info & 15, section, value, size))
    return symbols


class _Writer:
    """A writer of the loaded sections, with a label for each, and of their relocations."""

    def __init__(
        self,
        machine: int,
        sections: list[_Section],
        symbols: list[_Symbol],
        entries: Mapping[str, str],
    ):
        self._types = _RELOCATIONS[machine]
        self._sections, self._symbols, self._entries = sections, symbols, entries
        self._name = next(iter(entries.values()))
        self._context: set[str] = set()
        self._external: set[str] = set()
        self._kept = {
            i: section
            for i, section in enumerate(sections)
            if section.flags & _ALLOC and section.size and not _UNUSED.match(section.name)
        }
        for i, section in list(self._kept.items()):
            if section.type == _INIT_ARRAY and self._is_startup(i):
                del self._kept[i]

    def write(self) -> Embedded:
        entries = [s for s in self._symbols if s.name in self._entries and s.section in self._kept]
        missing = set(self._entries) - {symbol.name for symbol in entries}
        if missing or len(entries) != len(self._entries):
            names = ", ".join(sorted(missing)) or "each function once"
            raise UnsupportedObject(f"the object file does not define {names}")
        lines = []
        for i, section in self._kept.items():
            own = {s.value: self._entries[s.name] for s in entries if s.section == i}
            lines += self._section(i, section, own)
        for section in self._sections:
            if section.type in (_RELA, _REL) and section.info in self._kept:
                lines += self._relocations(section)
        return Embedded("\n".join(lines), frozenset(self._context), frozenset(self._external))

    def _is_startup(self, section: int) -> bool:
        """Tell whether a list of functions to run at loading consists of TVM's function for system
        libraries."""
        starts = {(s.section, s.value) for s in self._symbols if s.name == _STARTUP}
        called = [
            (self._symbols[info >> 32].section, self._symbols[info >> 32].value + addend)
            for other in self._sections
            if other.type == _RELA and other.info == section
            for _, info, addend in struct.iter_unpack("<2Qq", other.data)
        ]
        return len(called) == 1 and called[0] in starts

    def _section(self, i: int, section: _Section, entries: Mapping[int, str]) -> list[str]:
        """Return the lines of a section, given the labels by offset in it."""
        if section.type not in (_PROGBITS, _NOBITS) or section.flags & ~(0x10 | 0x20 | 0x207):
            name = section.name.decode(errors="replace")
            raise UnsupportedObject(f"section {name} is neither code nor plain data")
        kind = "nobits" if section.type == _NOBITS else "progbits"
        if section.flags & _EXECUTE:
            name, flags = ".text", "ax"
        elif section.flags & _WRITE:
            name, flags = (".bss" if section.type == _NOBITS else ".data"), "aw"
        else:
            name, flags = ".rodata", "a"
        lines = [
            f'.section {name},"{flags}",@{kind}',
            f".balign {max(section.align, 1)}",
            f"{self._label(i)}:",
        ]
        if section.type == _NOBITS:
            return [*lines, f".zero {section.size}"]
        begin = 0
        for place in sorted(entries):
            lines += [*_bytes(section.data[begin:place]), f"{entries[place]}:"]
            begin = place
        return [*lines, *_bytes(section.data[begin:])]

    def _label(self, section: int) -> str:
        return f".L{self._name}_{section}"

    def _relocations(self, section: _Section) -> list[str]:
        if section.type == _REL:
            raise UnsupportedObject("the object file has relocations without addends")
        label, lines = self._label(section.info), []
        targets: dict[tuple[int, int], str] = {}  # many relocations have the same target
        for offset, info, addend in struct.iter_unpack("<2Qq", section.data):
            kind = self._types.get(info & 0xFFFFFFFF)
            if kind is None:
                raise UnsupportedObject(f"relocation type {info & 0xFFFFFFFF} is not supported")
            number = info >> 32
            target = targets.get((number, addend))
            if target is None:
                target = targets[number, addend] = self._target(self._symbols[number], addend)
            lines.append(f".reloc {label}+{offset}, {kind}, {target}")
        return lines

    def _target(self, symbol: _Symbol, addend: int) -> str:
        if symbol.section in self._kept and not self._is_context(symbol):
            return f"{self._label(symbol.section)}{symbol.value + addend:+d}"
        if symbol.section in range(1, len(self._sections)) and not self._is_context(symbol):
            raise UnsupportedObject(f"{symbol.name} is in a section that is not loaded")
        if not re.fullmatch(r"[\w.$]+", symbol.name):
            raise UnsupportedObject(f"{symbol.name!r} cannot be written in assembly")
        if not symbol.section:
            self._external.add(symbol.name)
        return f"{symbol.name}{addend:+d}" if addend else symbol.name

    def _is_context(self, symbol: _Symbol) -> bool:
        """Tell whether a symbol is a pointer that the runtime fills in. Each object file defines it
        for itself."""
        if symbol.binding != _WEAK or symbol.type != _OBJECT:
            return False
        section = self._sections[symbol.section]
        stored = section.data[symbol.value : symbol.value + symbol.size]
        if symbol.size != 8 or any(stored):
            raise UnsupportedObject(f"{symbol.name} is not a pointer that the runtime sets")
        self._context.add(symbol.name)
        return True


def _bytes(data: bytes) -> list[str]:
    """Return the lines of some bytes. LLVM reads the digits of base64 four times as fast as
    numbers."""
    if not data:
        return []
    if _reads_base64():
        parts = (data[i : i + _LINE] for i in range(0, len(data), _LINE))
        return [f'.base64 "{base64.b64encode(part).decode()}"' for part in parts]
    whole = len(data) // 8
    words = [hex(word) for word in struct.unpack_from(f"<{whole}Q", data)]
    lines = [".quad " + ",".join(words[start : start + 64]) for start in range(0, whole, 64)]
    rest = data[8 * whole :]
    return [*lines, ".byte " + ",".join(map(str, rest))] if rest else lines


@lru_cache(maxsize=1)
def _reads_base64() -> bool:
    return int(tvm.get_global_func("target.llvm_version_major")()) >= _BASE64
