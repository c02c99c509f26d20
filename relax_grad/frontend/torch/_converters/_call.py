"""A node of the graph with its arguments by name, and helpers that converters of several families
share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import tvm
from torch import fx
from tvm import relax, tirx

from ....ir.compat import Analyzer, constant_value, dtype_of
from ._support import Converter, Importer, Refused

_RESHAPE = tvm.ir.Op.get("relax.reshape")

#: The names of dtypes in Relax.
DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
}

#: Arguments that say where and how a tensor lies in memory.
_PLACEMENT = {
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "copy",
    "is_coalesced",
}

#: Names of PyTorch's first operand.
_DATA = {"self": "data", "input": "data"}


#: A function of a call and its arguments by name.
F = TypeVar("F", bound=Callable)


def converts(table: dict[str, Converter], *names: str) -> Callable[[F], F]:
    """Enter a function ``(call, **arguments) -> relax.Expr`` into a table of converters.

    The arguments have the names of PyTorch's schema; ``self`` and ``input`` are ``data``.
    """

    def enter(function: F) -> F:
        for name in names:
            table[name] = _converter(function)
        return function

    return enter


def _converter(function: Callable) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> Any:
        call = Call(importer, node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and 0 in [e for e in value.shape if isinstance(e, int)]:
            return relax.op.zeros(call.type.shape, dtype_of(call.type))
        return function(call, **call.arguments())

    return convert


class Call:
    """A call of an operator.

    Parameters
    ----------
    importer : Importer
        It has the values of the operands and takes the bindings.
    node : fx.Node
        The call.
    """

    def __init__(self, importer: Importer, node: fx.Node):
        self.importer, self.node = importer, node
        self.value = node.meta.get("val")

    def arguments(self) -> dict:
        """Return the arguments by name, with PyTorch's defaults and Relax values instead of
        nodes."""
        return self._named(lambda operand: self.importer.env[operand])

    def meta(self) -> dict:
        """Return the arguments by name with PyTorch's fake tensors."""
        return self._named(lambda operand: operand.meta["val"])

    def _named(self, value: Callable) -> dict:
        args = fx.node.map_arg(self.node.args, value)
        kwargs = fx.node.map_arg(self.node.kwargs, value)
        result = {}
        for i, argument in enumerate(self.node.target._schema.arguments):
            if argument.name in _PLACEMENT:
                continue
            if i < len(args):
                entry = args[i]
            elif argument.name in kwargs:
                entry = kwargs[argument.name]
            else:
                entry = argument.default_value
            result[_DATA.get(argument.name, argument.name)] = _plain(entry)
        return result

    @property
    def type(self) -> relax.TensorType:
        """The type of the result, or of the first of several results."""
        value = self.value[0] if isinstance(self.value, (tuple, list)) else self.value
        return self.importer.type_of(value)

    @property
    def shape(self) -> list:
        """The extents of the result."""
        return extents_of(self.type)

    @property
    def dtype(self) -> str:
        """The dtype of the result."""
        return dtype_of(self.type)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a variable, whose type is known."""
        return self.importer.emit(expr)

    def uses(self, index: int) -> bool:
        """Tell whether another node takes one of several results."""
        return any(user.args[1] == index for user in self.node.users)

    def cast(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """Return a tensor in another dtype; a number other than zero is true."""
        source = dtype_of(value.ty)
        if source == dtype:
            return value
        if dtype == "bool":
            return self.emit(relax.op.not_equal(value, relax.const(0, source)))
        return self.emit(relax.op.astype(value, dtype))

    def tensor(self, value: float | relax.Expr, dtype: str) -> relax.Expr:
        """Return a tensor or a number as a tensor of a dtype."""
        if isinstance(value, (bool, int, float)):
            return scalar(value, dtype)
        if isinstance(value.ty, relax.TensorType):
            return self.cast(value, dtype)
        sizes = self.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
        return self.cast(self.emit(relax.op.reshape(sizes, [])), dtype)

    def count(self, extents: Sequence, dtype: str) -> relax.Expr:
        """Return the product of extents as a tensor."""
        total = tirx.IntImm("int64", 1)
        for extent in extents:
            total = total * extent
        total = plain_extent(total)
        return self.tensor(total, dtype)

    def require_some(self, extents: Iterable) -> None:
        """Require at least one element along axes that are reduced, as PyTorch does."""
        product = tirx.IntImm("int64", 1)
        for extent in extents:
            product = product * extent
        name = self.node.target.__name__.partition(".")[0]
        self.importer.require(product != 0, f"{name} needs at least one element to reduce")

    def require_windows(self, data: relax.Expr, rank: int) -> None:
        """Require elements along the last axes of an operand and of the result."""
        for extent in (*extents_of(data)[-rank:], *self.shape[-rank:]):
            if not isinstance(extent, int):
                self.require_slice(0, 1, extent)

    def require_slice(
        self, begin: int | tirx.Expr, end: int | tirx.Expr, extent: int | tirx.Expr
    ) -> None:
        """Require that elements are on an axis, if the number of elements is symbolic."""
        if isinstance(extent, int):
            return
        name = self.node.target.__name__.partition(".")[0]
        begin, end = (tirx.IntImm("int64", n) if isinstance(n, int) else n for n in (begin, end))
        begin, end = map(Analyzer().simplify, (begin, end))
        reason = f"{name} takes elements from {begin} to {end} of an axis of {extent}"
        self.importer.require(begin >= 0, reason)
        self.importer.require(extent >= end, reason)

    def constant(self, value: relax.Expr) -> np.ndarray | None:
        """Return the numbers of a constant tensor, reshaped or not; None for another tensor."""
        while True:
            if isinstance(value, relax.Var):
                value = self.importer.block_builder.lookup_binding(value)
            elif isinstance(value, relax.Call) and value.op.same_as(_RESHAPE):
                value = value.args[0]
            else:
                return constant_value(value)

    def numbers(self, count: int | tirx.Expr, dtype: str = "int64") -> relax.Expr:
        """Return the integers from 0 on."""
        bounds = [
            tirx.IntImm("int64", bound) if isinstance(bound, int) else bound
            for bound in (0, count, 1)
        ]
        return self.cast(self.emit(relax.op.arange(*bounds, "int64")), dtype)

    def filled(self, shape: Sequence, value: float, dtype: str) -> relax.Expr:
        """Return a tensor of one number; TVM's ``full`` does not compile infinities."""
        return self.emit(relax.op.broadcast_to(scalar(value, dtype), list(shape)))

    def reshape(self, value: relax.Expr, shape: Sequence) -> relax.Expr:
        """Return a tensor in another shape."""
        return self.emit(relax.op.reshape(value, list(shape)))

    def item(self, value: relax.Expr, index: int) -> relax.Expr:
        """Return a field of a tuple."""
        return self.emit(relax.TupleGetItem(value, index))


def _plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def scalar(value: float, dtype: str) -> relax.Expr:
    """Return a number as a constant; integers wrap around, as in PyTorch."""
    if dtype == "bool":
        return relax.const(bool(value), "bool")
    if "int" in dtype:
        number = int(value)
        bits = np.iinfo(dtype)
        span = int(bits.max) - int(bits.min) + 1
        return relax.const((number - int(bits.min)) % span + int(bits.min), dtype)
    return relax.const(float(value), dtype)


def plain_extent(value: tirx.Expr) -> int | tirx.Expr:
    """Return an extent as an int if it is known."""
    if isinstance(value, tirx.IntImm):
        return int(value)
    return value


def extents_of(kind: relax.Expr | relax.TensorType) -> list:
    """Return the extents of a tensor or of its type: numbers where they are known."""
    kind = getattr(kind, "ty", kind)
    if not isinstance(kind.shape, relax.ShapeExpr):
        raise Refused("the shape of its operand is unknown")
    return [plain_extent(extent) for extent in kind.shape.values]


def dtype(value: relax.Expr) -> str:
    """Return the dtype of a tensor."""
    return dtype_of(value.ty)


def is_float(value: relax.Expr) -> bool:
    """Tell whether a tensor holds floating-point numbers."""
    return "float" in dtype(value)


def is_half(kind: str) -> bool:
    """Tell whether a dtype has 16 bits."""
    return kind in ("float16", "bfloat16")


def wide_dtype(kind: str) -> str:
    """Return the dtype that PyTorch computes in: float32 for half precision."""
    return "float32" if is_half(kind) else kind


def axis_of(dim: int, rank: int) -> int:
    """Return a dimension as a number from 0 on; a scalar has the dimensions -1 and 0."""
    return dim % rank if rank else 0


def axes_of(dims: int | list[int] | None, rank: int) -> list[int]:
    """Return dimensions as numbers from 0 on; none or an empty list are all."""
    if dims is None or dims == []:
        return list(range(rank))
    return [axis_of(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)]


def static(extents: Sequence, what: str = "its shape") -> list[int]:
    """Return extents that must be numbers."""
    if not all(isinstance(extent, int) for extent in extents):
        raise Refused(f"{what} is symbolic; export the model with a static one")
    return list(extents)


def safe_sqrt(call: Call, value: relax.Expr) -> relax.Expr:
    """Return the square root with gradient zero at zero, as PyTorch's norms and standard deviations
    have it."""
    kind = dtype(value)
    value = call.emit(value)
    flat = call.emit(relax.op.equal(value, relax.const(0, kind)))
    root = relax.op.sqrt(relax.op.where(flat, relax.const(1, kind), value))
    return call.emit(relax.op.where(flat, relax.const(0, kind), root))
