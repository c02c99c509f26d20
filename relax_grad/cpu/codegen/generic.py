"""Machine code that functions share: those that differ only in large extents and strides.

Updates of two parameters differ only in the number of elements. The
loops of such functions run often enough that LLVM needs no constants to compile them well.
Therefore one function is compiled for all of them, which reads the numbers from a table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.tirx.buffer import BufferType

from ...ir.compat import BufferLoad, SBlock, replace_attrs, structural_map, structural_walk

#: The least number that code reads from a table. LLVM unrolls shorter loops, or fills vectors
#: otherwise, and needs their extents.
LEAST = 256

#: The least factor of an index that code reads from a table. LLVM interleaves elements that are
#: closer to each other.
_FACTOR = 16


#: A number and its dtype.
_Number = tuple[int, str]


@dataclass(frozen=True)
class Shared:
    """The function that is compiled for several functions.

    Attributes
    ----------
    function : tirx.PrimFunc
        The function. Its last parameters are the numbers.
    tensors : int
        The number of its other parameters.
    values : dict[str, tuple[int, ...]]
        The numbers of each function, by its name.
    """

    function: tirx.PrimFunc
    tensors: int
    values: dict[str, tuple[int, ...]]


@dataclass
class _Class:
    """Functions that are equal but for their numbers."""

    pattern: tirx.PrimFunc
    names: list[str] = field(default_factory=list)
    numbers: list[tuple[_Number, ...]] = field(default_factory=list)


def shared(functions: Mapping[str, tirx.PrimFunc]) -> list[Shared]:
    """Return the functions to compile for scheduled functions.

    Parameters
    ----------
    functions : Mapping[str, tirx.PrimFunc]
        The functions by name. Their parameters are tensors.

    Returns
    -------
    found : list[Shared]
        One for each class of functions that are equal but for numbers of at least :data:`LEAST`:
        extents of loops, factors of indices, and extents of tensors. A function without others of
        its class is returned as it is.
    """
    classes: dict[object, list[_Class]] = {}
    for name, function in functions.items():
        pattern, numbers = _pattern(function)
        kind = len(numbers), tvm_ffi.structural_hash(pattern, map_free_vars=True)
        for known in classes.setdefault(kind, []):
            if tvm_ffi.structural_equal(known.pattern, pattern, map_free_vars=True):
                break
        else:
            known = _Class(pattern)
            classes[kind].append(known)
        known.names.append(name)
        known.numbers.append(numbers)
    return [_shared(found, functions) for same in classes.values() for found in same]


def _shared(found: _Class, functions: Mapping[str, tirx.PrimFunc]) -> Shared:
    columns = list(zip(*found.numbers, strict=True))
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    numbers = found.numbers[0]
    first = functions[found.names[0]]
    variables = _Variables([numbers[i] for i in differing])
    function = _replaced(first, variables, with_shapes=True)
    if differing:
        parameters = [variables.found[numbers[i]] for i in differing]
        function = tirx.PrimFunc(
            [*first.params, *parameters],
            function.body,
            function.ret_type,
            attrs=function.attrs,
        )
    values = {
        name: tuple(own[i][0] for i in differing)
        for name, own in zip(found.names, found.numbers, strict=True)
    }
    return Shared(function, len(first.params), values)


def _pattern(function: tirx.PrimFunc) -> tuple[tirx.PrimFunc, tuple[_Number, ...]]:
    """Return a function with variables instead of large numbers, and the numbers in the order of
    their first places."""
    variables = _Variables()
    function = function.without_attr("global_symbol")
    if _has_flat_buffers(function):
        function = _replaced(function, variables, with_shapes=False)
    return function, tuple(variables.found)


class _Variables:
    """Variables that replace numbers.

    Parameters
    ----------
    chosen : Collection[Number], optional
        The numbers that are replaced; by default all.

    Attributes
    ----------
    found : dict[Number, tirx.Var]
        The variable of each number, in the order of first places.
    """

    def __init__(self, chosen: Collection[_Number] | None = None):
        self._chosen = chosen
        self.found: dict[_Number, tirx.Var] = {}

    def of(self, expr: tirx.IntImm) -> tirx.PrimExpr:
        """Return the variable of a number, or the number itself."""
        dtype = str(expr.ty.dtype)
        number = int(expr.value), dtype
        if self._chosen is not None and number not in self._chosen:
            return expr
        if number not in self.found:
            self.found[number] = tirx.Var(f"number_{len(self.found)}", dtype)
        return self.found[number]


def _nested(function: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the variables of loops within serial loops."""
    nested: set[tirx.Var] = set()

    def visit(loop: tirx.For) -> None:
        if loop.kind == tirx.ForKind.SERIAL:
            structural_walk(loop.body, (tirx.For, lambda inner: nested.add(inner.loop_var)))

    structural_walk(function.body, (tirx.For, visit))
    return nested


def _has_flat_buffers(function: tirx.PrimFunc) -> bool:
    """Tell whether the extents of tensors do not matter: they are known, and the function accesses
    flat buffers and allocates none."""
    accesses: list[tirx.BufferStore] = []
    others: list[object] = []
    blocks: list[SBlock] = []
    rules: list[tuple] = [
        ((BufferLoad, tirx.BufferStore), accesses.append),
        ((tirx.AllocBuffer, tirx.AssertStmt), others.append),  # an assertion names the function
        (SBlock, blocks.append),
    ]
    structural_walk(function.body, rules)
    extents = [extent for param in function.params for extent in param.shape]
    return (
        not others
        and all(isinstance(extent, tirx.IntImm) for extent in extents)
        and not any(len(block.alloc_buffers) > 0 for block in blocks)
        and all(len(access.indices) == 1 for access in accesses)
    )


def _replaced(
    function: tirx.PrimFunc, variables: _Variables, *, with_shapes: bool
) -> tirx.PrimFunc:
    """Return a function with variables instead of numbers in extents of loops and in factors;
    without ``with_shapes`` also without extents of tensors."""
    nested = _nested(function)

    def of(expr: tirx.PrimExpr, least: int) -> tirx.PrimExpr:
        is_number = isinstance(expr, tirx.IntImm) and expr.value >= least
        return variables.of(expr) if is_number else expr

    def loop(node: tirx.For) -> tirx.For:
        is_serial = node.kind == tirx.ForKind.SERIAL
        extent = (
            of(node.extent, LEAST if node.loop_var in nested else 1) if is_serial else node.extent
        )
        if extent.same_as(node.extent):
            return node
        fields = node.kind, node.body, node.thread_binding, node.annotations, node.step
        return tirx.For(node.loop_var, node.min, extent, *fields)

    def product(node: tirx.Mul) -> tirx.Mul:
        a, b = of(node.a, _FACTOR), of(node.b, _FACTOR)
        return node if a.same_as(node.a) and b.same_as(node.b) else tirx.Mul(a, b)

    def tensor(kind: BufferType) -> BufferType:
        layout = kind.layout
        is_plain = layout is None or layout.is_trivial()
        return replace_attrs(kind, shape=[], layout=None if is_plain else layout)

    rules: list[tuple] = [(tirx.For, loop), (tirx.Mul, product)]
    if not with_shapes:
        rules.append((BufferType, tensor))
    return structural_map(function, rules)


def from_tables(mod: tvm.IRModule, tensors: Mapping[str, int]) -> tvm.IRModule:
    """Let lowered functions read their numbers from the table to which their first argument points.

    TVM calls a function with a pointer to the function itself, which the code does not need. The
    entries of the functions of a class replace it by their tables, which have the layout of TVM's
    arguments.

    Parameters
    ----------
    mod : tvm.IRModule
        Functions lowered to TVM's calling convention.
    tensors : Mapping[str, int]
        The number of parameters before the numbers, by the names of the functions that have
        numbers.
    """
    functions = {
        variable: _from_table(function, tensors[variable.name_hint])
        if variable.name_hint in tensors
        else function
        for variable, function in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _from_table(function: tirx.PrimFunc, tensors: int) -> tirx.PrimFunc:
    table, arguments = function.params[0], function.params[1]
    get = tvm.ir.Op.get("tirx.tvm_struct_get")

    def read(call: tirx.Call) -> tirx.Call:
        if not call.op.same_as(get) or not call.args[0].same_as(arguments):
            return call
        index = int(call.args[1]) - tensors
        if index < 0:
            return call
        return tirx.call_intrin(str(call.ty.dtype), call.op, table, index, call.args[2])

    return function.with_body(structural_map(function.body, (Call, read)))


def table(label: str, numbers: Sequence[int]) -> str:
    """Return the table ``@{label}.numbers`` of a function in LLVM IR: TVM's arguments with these
    values."""
    rows = ", ".join(f"{{ i32, i32, i64 }} {{ i32 1, i32 0, i64 {number} }}" for number in numbers)
    return f"@{label}.numbers = private constant [{len(numbers)} x {{ i32, i32, i64 }}] [{rows}]"
