"""Loop nests over tensors in half precision, computed in float32.

Elements are widened when they are read, and rounded once when they are stored. Intermediate tensors
of a function are in float32. Casts to half precision keep their rounding. TVM computes bfloat16 by
rewriting the arithmetic of the emitted loops, and that pass fails on them; so elements of bfloat16
are integers of 16 bits here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import tvm.tirx.script.builder as T
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from ...ir.compat import BufferLoad, StringImm, loaded_buffer, structural_map
from ...ir.dtypes import HALVES
from ...ir.float32 import Reader, UnsupportedError
from ...ir.module import is_buffer
from ..kernel.language.halves import narrowed, widened
from ._nest import Nest

#: The name of the function that rounds a float32 to the bits of a bfloat16.
_BITS = "relax_grad.bfloat16_bits"


@dataclass(frozen=True)
class Widened:
    """Nests that compute in float32.

    Attributes
    ----------
    nests : Sequence[Nest]
        The nests.
    params : Sequence[tirx.Var]
        The parameters of the function. Those of bfloat16 are replaced by tensors of integers, their
        bits.
    allocated : Sequence[tirx.Buffer]
        The intermediate tensors.
    """

    nests: Sequence[Nest]
    params: Sequence[tirx.Var]
    allocated: Sequence[tirx.Buffer]


def widened_sections(
    sections: Sequence, params: Sequence[tirx.Var], allocated: Sequence[tirx.Buffer]
) -> tuple[Sequence, Sequence[tirx.Var], Sequence[tirx.Buffer]] | None:
    """Return the sections, the parameters and the intermediate tensors of a function that computes
    in float32.

    Statements that are no nests keep float16. None if they have bfloat16, which loops cannot
    compute.
    """
    dtypes = {str(buffer.dtype) for buffer in (*filter(is_buffer, params), *allocated)}
    if dtypes.isdisjoint(HALVES):
        return sections, params, allocated
    wide = None
    if all(isinstance(section, Nest) for section in sections):
        wide = in_float32(sections, params, allocated)
    if wide is not None:
        return wide.nests, wide.params, wide.allocated
    return None if "bfloat16" in dtypes else (sections, params, allocated)


def with_params(
    body: tirx.Stmt, params: Sequence[tirx.Var], originals: Sequence[tirx.Var]
) -> tirx.Stmt:
    """Return a body over the memory of other parameters."""
    changed = {
        param: original
        for param, original in zip(params, originals, strict=True)
        if not param.same_as(original)
    }
    if not changed:
        return body
    return structural_map(body, (tirx.Var, lambda var: changed.get(var, var)))


def in_float32(
    nests: Sequence[Nest], params: Sequence[tirx.Var], allocated: Sequence[tirx.Buffer]
) -> Widened | None:
    """Return nests that read and write the same tensors, and compute in float32; None if an
    expression cannot be."""
    reader = _Reader()
    for buffer in allocated:
        if str(buffer.dtype) in HALVES:
            reader.wide[buffer] = tirx.decl_buffer(
                buffer.shape, "float32", buffer.name, layout=None
            )
    for param in params:
        if is_buffer(param) and str(param.dtype) == "bfloat16":
            align = tvm_ffi.dtype("uint16").itemsize
            reader.raw[param] = tirx.decl_buffer(
                param.shape, "uint16", param.name, data_alignment=align, layout=None
            )
    made: list[tirx.Buffer] = []
    wide_nests: list[Nest] = []
    try:
        for nest in nests:
            wide_nests += _wide(nest, reader, made)
    except UnsupportedError:
        return None
    return Widened(
        wide_nests,
        [reader.raw.get(param, param) for param in params],
        [*(reader.wide.get(buffer, buffer) for buffer in allocated), *made],
    )


def _wide(nest: Nest, reader: _Reader, made: list[tirx.Buffer]) -> list[Nest]:
    """Return a nest in float32. The rounding of a reduction is a separate nest."""
    buffer, dtype = nest.buffer, str(nest.buffer.dtype)
    if dtype not in HALVES:
        return [replace(nest, value=reader.read(nest.value), init=reader.init(nest))]
    if buffer in reader.wide:
        value, init = reader.read(nest.value), reader.init(nest)
        return [replace(nest, buffer=reader.wide[buffer], value=value, init=init)]
    target = reader.raw.get(buffer, buffer)
    if not nest.combine:
        if isinstance(nest.value, BufferLoad) and loaded_buffer(nest.value) not in reader.wide:
            return [replace(nest, buffer=target, value=reader.stored(nest.value))]  # a copy
        return [replace(nest, buffer=target, value=_stored_as(reader.read(nest.value), dtype))]
    sums = tirx.decl_buffer(buffer.shape, "float32", f"{buffer.name}_sums", layout=None)
    made.append(sums)
    value, init = reader.read(nest.value), reader.init(nest)
    wide = replace(nest, buffer=sums, value=value, init=init)
    last = _stored_as(sums[tuple(nest.indices)], dtype)
    rounding = replace(nest, buffer=target, value=last, reduced=(), combine=None, init=None)
    return [wide, rounding]


@dataclass(frozen=True)
class _Reader(Reader):
    """A translator of expressions.

    Attributes
    ----------
    raw : dict[tirx.Buffer, tirx.Buffer]
        The integers of tensors of bfloat16.
    wide : dict[tirx.Buffer, tirx.Buffer]
        The tensors of float32 in place of intermediate ones.
    """

    raw: dict[tirx.Buffer, tirx.Buffer] = field(default_factory=dict)
    wide: dict[tirx.Buffer, tirx.Buffer] = field(default_factory=dict)

    def init(self, nest: Nest) -> tirx.PrimExpr | None:
        """Return the initial value of a reduction."""
        return None if nest.init is None else self.read(nest.init)

    def stored(self, load: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return an element of a tensor as it is stored."""
        buffer = loaded_buffer(load)
        return self.raw.get(buffer, buffer)[tuple(map(self.read, load.indices))]

    def element(self, load: tirx.PrimExpr) -> tirx.PrimExpr:
        dtype = str(load.ty.dtype)
        if dtype not in HALVES:
            return self.stored(load)
        buffer = loaded_buffer(load)
        if buffer in self.wide:
            return self.wide[buffer][tuple(map(self.read, load.indices))]
        return widened(self.stored(load), dtype)

    def rounded(self, value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
        return widened(_stored_as(value, dtype), dtype)


def _stored_as(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return a float32 as it is stored in a dtype."""
    if dtype == "float16":
        return tirx.Cast(dtype, value)
    return tirx.call_pure_extern("uint16", _BITS, value)


def bits_of_rounded(value: tirx.PrimExpr, bind: Callable = T.Bind) -> tirx.PrimExpr:
    """Return the bits of a float32 that is rounded to bfloat16, as arithmetic."""
    return narrowed(value, "bfloat16", 1, bind)


def rounds(value: tirx.PrimExpr) -> bool:
    """Tell whether a value is a rounding to bfloat16."""
    return (
        isinstance(value, Call)
        and len(value.args) == 2
        and isinstance(value.args[0], StringImm)
        and str(value.args[0].value) == _BITS
    )
