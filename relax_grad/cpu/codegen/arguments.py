"""Argument checks of tensor functions: one shared function, which compares the arguments with a
table.

TVM generates the checks of every argument in every function. They are the larger part of the
machine code of a small kernel, and take a third of LLVM's time. The checks here are the same, but
run in a loop over a table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import GlobalVar

from ...ir.module import is_buffer, unused
from ._check import MOST_SYMBOLS, PARAMETER, TABLE, string

#: The attribute of the statements that follow the argument checks in TVM's calling convention.
_COMPUTE = "compute_scope"

#: The attribute that marks the place of these statements while they are cut out.
_CUT = "relax_grad.compute_scope"


@dataclass(frozen=True)
class Symbol:
    """A symbolic extent, which has the same value at every occurrence.

    Attributes
    ----------
    name : str
        Its name in error messages.
    bits : int
        The bits of its integer type.
    """

    name: str
    bits: int

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Parameter:
    """A parameter that is a contiguous tensor.

    Attributes
    ----------
    name : str
        Its name in error messages.
    shape : tuple[int or Symbol, ...]
        Its extents.
    dtype : str
        The dtype of its elements.
    """

    name: str
    shape: tuple[int | Symbol, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: Tensor({list(self.shape)}, {self.dtype})"


def parameters(function: tirx.PrimFunc) -> tuple[Parameter, ...] | None:
    """Return the parameters of a function if the table can describe them.

    Returns
    -------
    found : tuple[Parameter, ...] or None
        None for a function that keeps TVM's checks. Such a function has scalar parameters, computed
        extents, tensors with strides or an offset, elements whose size is no multiple of a byte, or
        too many symbolic extents.
    """
    if not all(map(is_buffer, function.params)) or not all(map(_is_plain, function.params)):
        return None
    symbols: dict[tirx.Var, Symbol] = {}
    symbolic = tuple(
        Parameter(p.name, tuple(_extent(e, symbols) for e in p.shape), str(p.dtype))
        for p in function.params
    )
    return symbolic if len(symbols) <= MOST_SYMBOLS else None


def _is_plain(buffer: tirx.Buffer) -> bool:
    """Tell whether a buffer is contiguous, without an offset, and its extents are integers or
    variables."""
    offset = buffer.elem_offset
    dtype = tvm.DataType(str(buffer.dtype))
    return (
        all(isinstance(extent, (tirx.IntImm, tirx.Var)) for extent in buffer.shape)
        and not buffer.strides
        and (offset is None or (isinstance(offset, tirx.IntImm) and int(offset) == 0))
        and dtype.bits % 8 == 0
    )


def _extent(extent: tirx.IntImm | tirx.Var, symbols: dict[tirx.Var, Symbol]) -> int | Symbol:
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    if extent not in symbols:
        names = {symbol.name for symbol in symbols.values()}
        bits = tvm.DataType(str(extent.ty.dtype)).bits
        symbols[extent] = Symbol(unused(extent.name, names), bits)
    return symbols[extent]


def without_checks(mod: tvm.IRModule, names: Collection[str]) -> tvm.IRModule:
    """Remove the argument checks from the named functions; the assertions in their bodies stay.

    Parameters
    ----------
    mod : tvm.IRModule
        Functions lowered to TVM's calling convention.
    names : Collection[str]
        The functions whose arguments are checked before the call.
    """
    whole = {v: f for v, f in mod.functions_items() if v.name_hint in names}
    computing: dict[GlobalVar, tirx.Stmt] = {}
    outer = {}
    for variable, function in whole.items():
        parts: list[tirx.Stmt] = []
        outer[variable] = function.with_body(_cut(function.body, parts))
        if len(parts) == 1:
            computing[variable] = parts[0]
    changed = tirx.transform.SkipAssert()(
        tvm.IRModule({variable: outer[variable] for variable in computing})
    )
    functions = dict(mod.functions_items())
    for variable, function in changed.functions_items():
        body = _joined(function.body, computing[variable])
        functions[variable] = function.with_body(body)
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _cut(body: tirx.Stmt, parts: list[tirx.Stmt]) -> tirx.Stmt:
    """Return a body without the statements after the argument checks, and append these statements
    to a list."""

    def cut(statement: tirx.AttrStmt) -> tirx.Stmt:
        if statement.attr_key != _COMPUTE:
            return statement
        parts.append(statement)
        return tirx.AttrStmt(statement.node, _CUT, statement.value, tirx.Evaluate(0))

    return tvm_ffi.structural_map(body, (tirx.AttrStmt, cut), order="pre")


def _joined(body: tirx.Stmt, computing: tirx.Stmt) -> tirx.Stmt:
    """Return a body with the statements that :func:`_cut` removed."""

    def joined(statement: tirx.AttrStmt) -> tirx.Stmt:
        return computing if statement.attr_key == _CUT else statement

    return tvm_ffi.structural_map(body, (tirx.AttrStmt, joined))


def table(label: str, name: str, checked: Sequence[Parameter], texts: dict[str, str]) -> list[str]:
    """Return the table ``@{label}.table`` of a function, in LLVM IR.

    Parameters
    ----------
    label : str
        The prefix of the names of constants.
    name : str
        The function's name in error messages.
    checked : Sequence[Parameter]
        Its parameters.
    texts : dict[str, str]
        The constants of the module with texts, by text. New ones are added: the tables of a program
        have the same few numbers, shapes and dtypes.
    """
    lines: list[str] = []

    def text(value: str) -> str:
        if value not in texts:
            texts[value] = f"@relax_grad_text.{len(texts)}"
            lines.append(f"{texts[value]} = private constant {string(value)}")
        return texts[value]

    rows = []
    symbols: dict[Symbol, int] = {}
    for i, tensor in enumerate(checked):
        described = tensor.name, str(i), str(list(tensor.shape)), tensor.dtype
        pointers = [*map(text, described), f"@{label}.{i}"]
        extents = ", ".join(f"i64 {_row(extent, symbols)}" for extent in tensor.shape)
        values = f"[{extents}]" if tensor.shape else "zeroinitializer"
        lines.append(f"{pointers[-1]} = private constant [{len(tensor.shape)} x i64] {values}")
        fields = [
            *(f"ptr {pointer}" for pointer in pointers),
            *(f"i32 {n}" for n in (len(tensor.shape), _encoded(tensor.dtype))),
        ]
        rows.append(f"{PARAMETER} {{ {', '.join(fields)} }}")
    size, signature = len(checked), f"{name}({', '.join(map(str, checked))})"
    values = f"[{', '.join(rows)}]" if rows else "zeroinitializer"
    lines.append(f"@{label}.parameters = private constant [{size} x {PARAMETER}] {values}")
    limits = [f"i64 {2 ** (symbol.bits - 1) - 1}" for symbol in symbols]
    values = f"[{', '.join(limits)}]" if limits else "zeroinitializer"
    lines.append(f"@{label}.limits = private constant [{len(limits)} x i64] {values}")
    pointers = [f"@{label}.parameters", text(str(size)), text(signature), f"@{label}.limits"]
    fields = [*(f"ptr {pointer}" for pointer in pointers), f"i32 {size}"]
    lines.append(f"@{label}.table = private constant {TABLE} {{ {', '.join(fields)} }}")
    return lines


def _row(extent: int | Symbol, symbols: dict[Symbol, int]) -> int:
    """Return the entry of an extent in the table: -1 - i for the i-th symbol."""
    if isinstance(extent, int):
        return extent
    return -1 - symbols.setdefault(extent, len(symbols))


def _encoded(dtype: str) -> int:
    """Return the 4 bytes of a DLDataType as an integer."""
    parsed = tvm.DataType(dtype)
    return parsed.type_code | parsed.bits << 8 | parsed.lanes << 16
