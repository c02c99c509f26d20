"""Arithmetic of half precision in float32.

An element is widened when it is read, and a result is rounded once, when it is stored. Intermediate
tensors of a function, among them the partial sums of reductions, are in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call, Op, Range

from .blocks import with_init
from .compat import (
    BufferLoad,
    SBlock,
    SBlockRealize,
    StringImm,
    loaded_buffer,
    structural_map,
    structural_walk,
)
from .dtypes import HALVES
from .module import is_buffer

_BINARY = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod),
    *(tirx.Min, tirx.Max, tirx.And, tirx.Or),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)

_REINTERPRET = Op.get("tirx.reinterpret")

#: The statements of tensor expressions.
_PLAIN = (tirx.For, tirx.SeqStmt, tirx.BufferStore, SBlock, SBlockRealize)


class UnsupportedError(Exception):
    """An expression has no form in float32."""


class Reader(ABC):
    """A translator of expressions to float32."""

    @abstractmethod
    def element(self, load: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return an element of a tensor, in float32 if it is in half precision."""

    @abstractmethod
    def rounded(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        """Return a float32 that is rounded to half precision, as a float32."""

    def bits(self, call: Call) -> tirx.PrimExpr:
        """Return a number in half precision that is given by its bits, in float32."""
        raise UnsupportedError

    def read(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return an expression of float32 in place of one in half precision; others keep their
        dtype.

        Raises
        ------
        UnsupportedError
            If the expression has no form in float32.
        """
        is_half = str(expr.ty.dtype) in HALVES
        if isinstance(expr, BufferLoad):
            return self.element(expr)
        if isinstance(expr, tirx.FloatImm) and is_half:
            return tirx.const(expr.value, "float32")
        if isinstance(expr, (tirx.FloatImm, tirx.IntImm, tirx.Var, StringImm)) and not is_half:
            return expr
        if isinstance(expr, tirx.Cast):
            return self._cast(expr)
        if isinstance(expr, _BINARY):
            return type(expr)(self.read(expr.a), self.read(expr.b))
        if isinstance(expr, tirx.Not):
            return tirx.Not(self.read(expr.a))
        if isinstance(expr, tirx.Select):
            parts = expr.condition, expr.true_value, expr.false_value
            return tirx.Select(*map(self.read, parts))
        if isinstance(expr, Call) and isinstance(expr.op, Op):
            return self._call(expr, is_half)
        raise UnsupportedError

    def _cast(self, cast: tirx.Cast) -> tirx.PrimExpr:
        source, target = str(cast.value.ty.dtype), str(cast.ty.dtype)
        value = self.read(cast.value)
        if source == target:
            return value
        if target in HALVES:
            is_wide = source in HALVES or source == "float32"
            return self.rounded(value if is_wide else tirx.Cast("float32", value), target)
        return value if target == str(value.ty.dtype) else tirx.Cast(target, value)

    def _call(self, call: Call, is_half: bool) -> tirx.PrimExpr:
        has_halves = any(str(arg.ty.dtype) in HALVES for arg in call.args)
        if (is_half or has_halves) and call.op.same_as(_REINTERPRET):
            if has_halves:
                raise UnsupportedError  # of the bits
            return self.bits(call)
        args = list(map(self.read, call.args))
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return call
        dtype = "float32" if is_half else str(call.ty.dtype)
        return tirx.call_intrin(dtype, call.op, *args)


def in_float32(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function of tensor expressions that computes half precision in float32.

    It takes and returns the same tensors. Functions that only move elements stay as they are, and
    so do functions with other statements, which choose their dtypes themselves.
    """
    if not _computes_in_half(function):
        return function
    stores, blocks = _found(function, tirx.BufferStore), _found(function, SBlock)
    allocated = [
        buffer for block in blocks for buffer in block.alloc_buffers if str(buffer.dtype) in HALVES
    ]
    summed = {
        block.body.buffer
        for block in blocks
        if block.init is not None
        and isinstance(block.body, tirx.BufferStore)
        and str(block.body.buffer.dtype) in HALVES
    }
    sums = {param: _wide(param) for param in function.params if param in summed}
    wide = {buffer: _wide(buffer) for buffer in _computed(allocated, stores)}
    reader = _Native({**wide, **sums})
    try:
        for store in stores:  # an error does not pass through structural_map
            reader.store(store)
    except UnsupportedError:
        return function
    rules = [(tirx.BufferStore, reader.store), (SBlock, reader.block)]
    body = structural_map(function.body, rules, order="post")
    body = structural_map(body, (tirx.Var, reader.replaced), order="pre")
    if sums:
        body = _with_rounding(body, sums)
    return tirx.PrimFunc(function.params, body, function.ret_type, attrs=function.attrs)


@dataclass(frozen=True)
class _Native(Reader):
    """The casts of the target, and the wide tensors in place of some in half precision."""

    wide: dict[tirx.Buffer, tirx.Buffer]

    def read(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return super().read(expr) if _has_halves(expr) else expr

    def element(self, load: tirx.PrimExpr) -> tirx.PrimExpr:
        buffer, indices = loaded_buffer(load), [self.read(index) for index in load.indices]
        if buffer in self.wide:
            return self.wide[buffer][tuple(indices)]
        value = buffer[tuple(indices)]
        return tirx.Cast("float32", value) if str(buffer.dtype) in HALVES else value

    def rounded(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        return tirx.Cast("float32", tirx.Cast(dtype, value))

    def bits(self, call: Call) -> tirx.PrimExpr:
        return tirx.Cast("float32", call)

    def store(self, store: tirx.BufferStore) -> tirx.BufferStore:
        """Return a store in the dtype of its tensor."""
        buffer, dtype = store.buffer, str(store.buffer.dtype)
        indices = [self.read(index) for index in store.indices]
        if buffer in self.wide:
            return tirx.BufferStore(self.wide[buffer], self.read(store.value), indices)
        if dtype not in HALVES:
            return tirx.BufferStore(buffer, self.read(store.value), indices)
        if _moves(store.value, self.wide):
            return store
        value = store.value.value if _rounds(store.value) else store.value
        return tirx.BufferStore(buffer, tirx.Cast(dtype, self.read(value)), indices)

    def block(self, block: SBlock) -> SBlock:
        """Return a block whose maximum or minimum begins at the limit of float32, the only one
        that TVM's rules know."""
        init = block.init
        if not isinstance(init, tirx.BufferStore) or not isinstance(init.value, tirx.FloatImm):
            return block
        for limit in (tirx.min_value, tirx.max_value):
            if any(init.value.value == limit(dtype).value for dtype in HALVES):
                init = tirx.BufferStore(init.buffer, limit("float32"), init.indices)
                return with_init(block, init)
        return block

    def replaced(self, variable: tirx.Var) -> tirx.Var:
        return self.wide.get(variable, variable)


def _computes_in_half(function: tirx.PrimFunc) -> bool:
    """Tell whether a function consists of tensor expressions, of which one computes with numbers in
    half precision."""
    dtypes = {str(param.dtype) for param in function.params if is_buffer(param)}
    statements = _found(function, tirx.Stmt)
    blocks = _found(function, SBlock)
    dtypes |= {str(buffer.dtype) for block in blocks for buffer in block.alloc_buffers}
    if dtypes.isdisjoint(HALVES) or not all(map(_is_plain, statements)):
        return False
    if not isinstance(function.body, SBlockRealize) or function.body.iter_values:
        return False
    if any(block.match_buffers for block in blocks):
        return False
    loops = [each for each in statements if isinstance(each, tirx.For)]
    if any(loop.thread_binding is not None for loop in loops):
        return False
    return any(_computes(store.value) for store in _found(function, tirx.BufferStore))


def _is_plain(statement: tirx.Stmt) -> bool:
    is_wide = isinstance(statement, tirx.Bind) and not _has_halves(statement.value)
    return is_wide or isinstance(statement, _PLAIN)


def _has_halves(expr: tirx.PrimExpr) -> bool:
    """Tell whether a part of an expression is in half precision."""
    found: list[tirx.PrimExpr] = []
    leaves = (BufferLoad, tirx.Var, tirx.FloatImm, tirx.Cast, Call)
    structural_walk(expr, (leaves, found.append))
    return any(str(getattr(each.ty, "dtype", None)) in HALVES for each in found)


def _computes(value: tirx.PrimExpr) -> bool:
    """Tell whether an expression has arithmetic of half precision."""
    found: list[tirx.PrimExpr] = []
    structural_walk(value, ((*_BINARY, Call), found.append))
    return any(_is_half(expr) for expr in found if not _chooses(expr))


def _is_half(expr: tirx.PrimExpr) -> bool:
    operands = [expr.a, expr.b] if isinstance(expr, _BINARY) else list(expr.args)
    return any(str(each.ty.dtype) in HALVES for each in (expr, *operands))


def _chooses(expr: tirx.PrimExpr) -> bool:
    is_choice = isinstance(expr, Call) and isinstance(expr.op, Op)
    return is_choice and (expr.op.name.endswith(".if_then_else") or expr.op.same_as(_REINTERPRET))


def _moves(value: tirx.PrimExpr, wide: dict | set) -> bool:
    """Tell whether an expression is an element, or a constant, in half precision."""
    if isinstance(value, BufferLoad):
        return loaded_buffer(value) not in wide
    if isinstance(value, tirx.FloatImm):
        return True
    if isinstance(value, tirx.Select):
        return _moves(value.true_value, wide) and _moves(value.false_value, wide)
    if _chooses(value):
        return value.op.same_as(_REINTERPRET) or all(_moves(arg, wide) for arg in value.args[1:])
    return False


def _rounds(value: tirx.PrimExpr) -> bool:
    """Tell whether an expression is a cast of the program to half precision."""
    if not isinstance(value, tirx.Cast) or str(value.ty.dtype) not in HALVES:
        return False
    return str(value.value.ty.dtype) in ("float32", str(value.ty.dtype))


def _computed(allocated: list[tirx.Buffer], stores: list[tirx.BufferStore]) -> list[tirx.Buffer]:
    """Return the intermediate tensors that hold computed numbers.

    Others hold elements of tensors or rounded numbers: the rule for tensor cores takes their dtype
    for the operands'.
    """
    computed: set[tirx.Buffer] = set()
    known = -1
    while known < len(computed):
        known = len(computed)
        computed |= {
            store.buffer
            for store in stores
            if store.buffer in allocated
            and not (_rounds(store.value) or _moves(store.value, computed))
        }
    return [buffer for buffer in allocated if buffer in computed]


def _wide(buffer: tirx.Buffer) -> tirx.Buffer:
    return tirx.decl_buffer(buffer.shape, "float32", buffer.name)


def _with_rounding(body: SBlockRealize, sums: dict[tirx.Buffer, tirx.Buffer]) -> SBlockRealize:
    """Return the body of a function that allocates sums, and rounds them to its results at its
    end."""
    root = body.block
    parts = [root.body, *(_rounding(source, target) for target, source in sums.items())]
    whole = SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        tirx.SeqStmt(parts),
        root.init,
        [*root.alloc_buffers, *sums.values()],
        root.match_buffers,
        root.annotations,
    )
    return SBlockRealize(body.iter_values, body.predicate, whole)


def _rounding(source: tirx.Buffer, target: tirx.Buffer) -> tirx.Stmt:
    """Return the loops that round a tensor of float32 to another one."""
    extents = list(source.shape) or [tirx.IntImm("int64", 1)]
    loops = [tirx.Var(f"i{k}", each.ty.dtype) for k, each in enumerate(extents)]
    axes = [
        tirx.IterVar((0, extent), tirx.Var(f"v{k}", extent.ty.dtype), tirx.IterVar.DataPar)
        for k, extent in enumerate(extents)
    ]
    at = [axis.var for axis in axes[: len(source.shape)]]
    element = [Range.from_min_extent(index, tirx.const(1, index.ty.dtype)) for index in at]
    rounded = tirx.Cast(str(target.dtype), source[tuple(at)])
    block = SBlock(
        axes,
        [tirx.BufferRegion(source, element)],
        [tirx.BufferRegion(target, element)],
        f"{target.name}_rounded",
        tirx.BufferStore(target, rounded, at),
    )
    stmt = SBlockRealize(loops, tirx.const(True), block)
    for loop, extent in zip(reversed(loops), reversed(extents), strict=True):
        stmt = tirx.For(loop, tirx.const(0, extent.ty.dtype), extent, tirx.ForKind.SERIAL, stmt)
    return stmt


def _found(function: tirx.PrimFunc, kind: type) -> list:
    found: list = []
    structural_walk(function.body, (kind, found.append))
    return found
