"""Equal calls of TVM's tensor functions share the function of TIR that they are legalized to.

The legalization of a program writes a function for each call: two fifths of the time of a check of
gradients. Most tests have the same sums and products of small tensors. Calls of one function of TVM
with the same target, shapes, dtypes and numbers share the result within a process. The tensor
functions of relax_grad, which are under test, and calls with symbolic extents do not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import FunctionType

import tvm
from tvm import relax, tirx
from tvm.relax import block_builder

#: The number of functions that are kept; each takes some kilobytes.
_KEPT = 20_000

_generate = block_builder.gen_call_tir_inputs

#: The function and the types of the results, by the call.
_known: OrderedDict[Hashable, tuple] = OrderedDict()


class _Unknown(Exception):
    """A call has an argument that is not compared."""


def _key(value, tensors: list) -> Hashable:
    """Return what a function depends on in an argument of its call, and collect the tensors."""
    if value is None or isinstance(value, (bool, int, str)):
        return type(value), value
    if isinstance(value, float):
        return float, repr(value)  # NaN equals no number, and -0.0 equals 0.0
    if isinstance(value, (list, tuple, tvm.ir.Array)):
        return isinstance(value, tuple), *(_key(each, tensors) for each in value)
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return type(value), str(value.ty), repr(value.value)
    if isinstance(value, relax.ShapeExpr):
        return relax.ShapeExpr, *(_key(each, tensors) for each in value.values)
    kind = getattr(value, "ty", None)
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        raise _Unknown
    if kind.vdevice is not None or any(type(n) is not tirx.IntImm for n in kind.shape.values):
        raise _Unknown
    tensors.append(value)
    return relax.TensorType, str(kind.dtype), *(int(n) for n in kind.shape.values)


def _key_of_function(function: Callable) -> Hashable:
    """Return the code of a function with the values that it has taken from its surroundings."""
    if not isinstance(function, FunctionType) or function.__kwdefaults__:
        raise _Unknown
    if not function.__module__.startswith("tvm."):
        raise _Unknown
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [
        _key_of_function(value) if isinstance(value, FunctionType) else _key(value, [])
        for value in (*cells, *(function.__defaults__ or ()))
    ]
    return function.__code__, *held


def _shared(function: Callable, *args, **kwargs):
    tensors: list = []
    target = tvm.target.Target.current(allow_none=True)
    try:
        if "primfunc_attrs" in kwargs or "ty_args" in kwargs:
            raise _Unknown
        key = (
            str(target),
            _key_of_function(function),
            tuple(_key(value, tensors) for value in args),
            tuple((name, _key(value, tensors)) for name, value in kwargs.items()),
        )
    except _Unknown:
        return _generate(function, *args, **kwargs)
    found = _known.get(key)
    if found is None:
        made, operands, types = _generate(function, *args, **kwargs)
        same = len(operands) == len(tensors) and all(
            one.same_as(other) for one, other in zip(operands, tensors, strict=True)
        )
        if same:
            _known[key] = made, types
            if len(_known) > _KEPT:
                _known.popitem(last=False)
        return made, operands, types
    made, types = found
    return made, tensors, types


@contextmanager
def sharing() -> Iterator[None]:
    """Share the functions of equal calls."""
    before = block_builder.gen_call_tir_inputs
    block_builder.gen_call_tir_inputs = _shared
    try:
        yield
    finally:
        block_builder.gen_call_tir_inputs = before
