"""Estimates of the time that calls of tensor functions take, before these are scheduled."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ....ir.compat import structural_walk
from ....ir.module import tuple_fields
from ....ir.shapes import known_extents
from ..reorder import size_in_bytes

_CALL_TIR = Op.get("relax.call_tir")

#: Bytes of traffic that take as long as a floating-point operation of a dense kernel.
_BYTES_PER_OPERATION = 0.1

#: The most iterations of loops for each element of operands and results of a cheap function.
_CHEAP = 4

#: The extent that stands for a symbolic one.
_NOMINAL = 64

#: Kernels and functions of products, by their names, which consist of the names of operators.
_PRODUCT = re.compile(
    r"(?:^|_)(matmul|einsum|linear|conv\w*?|attention|lstm|gru|rnn|recurrent)\d*(?:_|$)"
)


@dataclass(frozen=True)
class Cost:
    """The cost of a call.

    Attributes
    ----------
    time : float
        An estimate, in bytes of memory traffic.
    is_cheap : bool
        Whether the call computes few operations for each byte: element-wise functions,
        normalisations, pools, softmax.
    is_product : bool
        Whether it computes matrix products or convolutions, such as attention and recurrent layers.
    has_batch : bool
        Whether these are stacks of matrix products with operands that both differ within the stack,
        as in attention.
    """

    time: float
    is_cheap: bool
    is_product: bool = False
    has_batch: bool = False


def cost_of(call: relax.Call, mod: tvm.IRModule) -> Cost | None:
    """Return the cost of a call of a tensor function; None for any other value, which is not
    computed again."""
    if not (isinstance(call, relax.Call) and call.op == _CALL_TIR):
        return None
    callee = call.args[0]
    if not isinstance(callee, GlobalVar) or not isinstance(mod[callee], tirx.PrimFunc):
        return None
    operands = [operand.ty for operand in tuple_fields(call.args[1])]
    (result,) = call.ty_args[:]
    results = list(result.fields[:]) if isinstance(result, relax.TupleType) else [result]
    traffic = float(sum(map(size_in_bytes, (*operands, *results))))
    name = callee.name_hint
    is_kernel = re.search(r"_kernel\d*$", name) is not None
    product = _PRODUCT.search(re.sub(r"_kernel\d*$", "", name))
    if product is not None:
        stacked = [operand for operand in operands if getattr(operand, "ndim", 0) >= 3]
        has_batch = product[1] in ("matmul", "einsum", "attention") and len(stacked) >= 2
        count = _operations(product[1], operands, results)
        return Cost(traffic + _BYTES_PER_OPERATION * count, False, True, has_batch)
    if is_kernel:  # normalisations, softmax, pools, sums, and copies
        return Cost(2 * traffic, True)
    nests = _nests(mod[callee].body) or [0.0]
    elements = sum(map(_elements, (*operands, *results)))
    # The function may compute intermediate elements in separate nests, which are fused when it is
    # scheduled.
    return Cost(traffic + _BYTES_PER_OPERATION * sum(nests), max(nests) <= _CHEAP * elements)


def _operations(kind: str, operands: list[relax.Type], results: list[relax.Type]) -> float:
    """Return an estimate of the floating-point operations of a product."""
    sizes = sorted((_elements(operand) for operand in operands), reverse=True)[:2]
    made = max(map(_elements, results))
    if len(sizes) < 2 or not made:
        return 0.0
    if kind == "attention":  # two products of queries, or weights, with all keys
        steps = max(max(_extents(operand)[1:-1], default=1) for operand in operands)
        return 4.0 * made * steps
    if kind in ("lstm", "gru", "rnn", "recurrent"):  # the gates of all steps, times the weight
        return 2.0 * sizes[0] * math.sqrt(sizes[1])
    if kind.startswith(
        "conv"
    ):  # the smaller operand is the weight; each of its filters makes a share of the result
        weight = min(operands, key=_elements)
        filters = _extents(weight)[:1] or [1]
        return 2.0 * made * _elements(weight) / max(filters[0], 1)
    # (m k) (k n) / (m n) = k^2, and a common stack counts once more.
    ranks = [_extents(operand) for operand in operands if len(_extents(operand)) >= 3]
    stack = math.prod(ranks[0][:-2]) if len(ranks) >= 2 else 1
    return 2.0 * made * math.sqrt(max(sizes[0] * sizes[1] / (made * stack), 1.0))


def _nests(statement: tirx.Stmt) -> list[float]:
    """Return the number of iterations of each nest of loops in a statement."""
    loops: list[tirx.For] = []

    def visit(loop: tirx.For) -> tvm_ffi.WalkResult:
        loops.append(loop)
        return tvm_ffi.WalkResult.SKIP

    structural_walk(statement, (tirx.For, visit), order="pre")
    return [_extent(loop.extent) * max(sum(_nests(loop.body)), 1.0) for loop in loops]


def _elements(kind: relax.Type) -> int:
    return math.prod(_extents(kind))


def _extents(kind: relax.Type) -> list[int]:
    extents = known_extents(kind)
    return [0] if extents is None else list(map(_extent, extents))


def _extent(extent: tirx.PrimExpr) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else _NOMINAL
