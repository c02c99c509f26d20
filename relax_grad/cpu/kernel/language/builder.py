"""The language of the generated kernels: functions over flat buffers, vectors and accumulators.

A kernel is a ``tirx.PrimFunc`` that Python code emits statement by statement. Python loops are
unrolled; :func:`serial` and :func:`parallel` emit loops. Expressions are TVM's; :func:`bind` binds
one to a variable, so that it is computed once. Indices are int32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder

from ....ir.dtypes import HALVES
from ....ir.module import IS_KERNEL, NO_ALIASES, SCHEDULED_ATTRS
from .epilogue import ChannelBias, finish, with_bias_param
from .extents import Extent, as_expr, as_float, ceil_div, const, count, quotient, sum_of
from .halves import Half, stored_params
from .statements import (
    bind,
    block,
    clear,
    computed,
    copy,
    either,
    is_in_one_thread,
    one_thread,
    parallel,
    prefetch,
    scopes,
    scratch,
    serial,
    store,
    when,
)
from .vectors import Accumulators, Vectors

__all__ = [
    "Accumulators",
    "Extent",
    "Vectors",
    "as_expr",
    "as_float",
    "bind",
    "block",
    "ceil_div",
    "clear",
    "computed",
    "const",
    "copy",
    "count",
    "either",
    "floats",
    "is_in_one_thread",
    "one_thread",
    "parallel",
    "prefetch",
    "prim_func",
    "quotient",
    "refuse_large",
    "scopes",
    "scratch",
    "serial",
    "store",
    "sum_of",
    "when",
]

#: The elements of all tensors up to which one thread runs a kernel: it takes no longer than waking
#: another one.
_FEW_ELEMENTS = 4096

#: The elements that one task rounds to half precision.
_ROUNDED = 4096

#: The number of elements that an int32 index can address.
_MOST_ELEMENTS = 2**31 - 1


def prim_func(
    name: str,
    params: Sequence[tuple[str, Sequence[Extent], str]],
    body: Callable[..., None],
) -> tirx.PrimFunc:
    """Return a function whose body ``body`` emits.

    Parameters
    ----------
    name : str
        The name.
    params : Sequence[tuple[str, Sequence[int or tirx.PrimExpr], str]]
        The name, shape and dtype of each tensor, the results last.
    body : Callable
        Takes a flat buffer for each tensor, whose elements are in row-major order.
    """
    params, adds_bias = with_bias_param(params)
    params, results = stored_params(params)
    function, flat = _emitted(name, params, body, frozenset(), adds_bias)
    read = {
        i
        for i in range(len(params) - results, len(params))
        if isinstance(flat[i], Half) and flat[i].was_read
    }
    # A result that is read again, such as a sum in several parts, is rounded once, at the end.
    return _emitted(name, params, body, read, adds_bias)[0] if read else function


def _emitted(
    name: str,
    params: Sequence[tuple],
    body: Callable[..., None],
    in_parts: Collection[int],
    adds_bias: bool,
) -> tuple[tirx.PrimFunc, list]:
    """Return a function and its flat buffers; the results ``in_parts`` are computed in a buffer of
    float32. With ``adds_bias``, the tensor before the last is added to the last."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        # The tensors of a call do not alias, and kernels are not fused with other functions.
        T.func_attr({NO_ALIASES: True, IS_KERNEL: True, **SCHEDULED_ATTRS})
        tensors = [T.arg(name, _tensor(name, shape, dtype)) for name, shape, dtype in params]
        # TVM's detection of reshapes assumes that the body of a function with one argument is a
        # block.
        with block(name), scopes():
            sizes = [count(shape) for _, shape, _ in params]
            flat = [
                Half(tensor, size, dtype)
                if dtype in HALVES
                else T.decl_buffer([size], dtype, data=tensor.data, layout=None)
                for tensor, size, (_, _, dtype) in zip(tensors, sizes, params, strict=True)
            ]
            for shape in {str(shape): shape for _, shape, _ in params}.values():
                refuse_large(name, shape)
            if isinstance(flat[-1], Half):
                finish(flat[-1], params[-1][1], flat[-2] if adds_bias else None)
            few = all(isinstance(size, int) for size in sizes) and sum(sizes) <= _FEW_ELEMENTS
            with one_thread(few):
                wide = {i: scratch(sizes[i]) for i in in_parts}
                taken = [wide.get(i, buffer) for i, buffer in enumerate(flat)]
                body(*(taken[:-2] + taken[-1:] if adds_bias else taken))
                for i, buffer in wide.items():
                    _round(buffer, flat[i], sizes[i])
    return builder.get(), flat


def _round(source: tirx.Buffer, target: Half, size: Extent) -> None:
    """Copy elements of float32 to a tensor in half precision, and add its bias."""
    bias = target.bias
    if isinstance(bias, ChannelBias):
        target.bias = None
        with parallel(0, quotient(size, bias.plane)) as i:
            start, number = bind(i * bias.plane), bind(bias.of_plane(i))
            with serial(0, bias.plane) as j:
                target.store(start + j, source[start + j] + number)
        return
    with parallel(0, ceil_div(size, _ROUNDED)) as i:
        start = bind(i * _ROUNDED)
        with serial(0, bind(tirx.min(const(_ROUNDED), size - start))) as j:
            target.store(start + j, source[start + j])


def refuse_large(name: str, shape: Sequence[Extent]) -> None:
    """Emit an assertion that int32 indices can address all elements of a symbolic shape."""
    if all(isinstance(extent, int) for extent in shape):
        return
    size = tirx.const(1, "int64")
    for extent in shape:
        size = size * tirx.Cast("int64", as_expr(extent))
    message = f"{name}: a tensor has more than 2**31 - 1 elements, the limit of this function"
    with T.Assert(size <= tirx.const(_MOST_ELEMENTS, "int64"), message):
        pass


def _tensor(name: str, shape: Sequence[Extent], dtype: str) -> tirx.Buffer:
    # TVM assumes tensors aligned to 64 bytes; PyTorch's tensors may have any alignment.
    align = tvm_ffi.dtype(dtype).itemsize
    return T.buffer(list(shape), dtype, buffer_name=name, align=align, layout=None)


def floats(names: Iterable[str], shapes: Iterable[Sequence[Extent]]) -> list[tuple]:
    """Return float32 parameters for :func:`prim_func`."""
    return [(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]
