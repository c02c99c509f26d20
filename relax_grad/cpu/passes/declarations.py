"""Tensor functions with other parameter declarations than tensor expressions."""

from __future__ import annotations

import tvm
from tvm import tirx

from ...ir.module import OPAQUE, is_buffer


@tvm.transform.module_pass(opt_level=0, name="relax_grad.KeepApart")
def keep_apart(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Prevent fusion of functions with other parameter declarations than tensor expressions.

    FuseTIR fails if the producer and the consumer of a tensor declare it differently, for example
    with extents of int32. It also fails on functions of extents alone, such as
    ``shape_to_tensor``, beside other extents.
    """
    apart = {
        variable: function.with_attr("op_pattern", OPAQUE)
        for variable, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc)
        and not (
            all(map(_is_of_expressions, filter(is_buffer, function.params)))
            and any(map(is_buffer, function.params[:-1] or function.params))
        )
    }
    functions = {**dict(mod.functions_items()), **apart}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_of_expressions(buffer: tirx.Buffer) -> bool:
    """Tell whether a parameter has the declaration that tensor expressions give their
    parameters."""
    numbers = [*buffer.shape, *([] if buffer.elem_offset is None else [buffer.elem_offset])]
    return (
        all(str(number.ty.dtype) == "int64" for number in numbers)
        and not buffer.strides
        and buffer.scope() == "global"
        and buffer.offset_factor == 1
        and buffer.data_alignment == 64
        and getattr(buffer, "layout", None) is None
    )
