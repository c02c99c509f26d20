"""What the tensor expressions share."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx

Shape = Sequence["int | tirx.PrimExpr"]

#: Accumulation dtypes of the dtypes that are too narrow to accumulate in.
_ACCUMULATE_IN = {"float16": "float32", "bfloat16": "float32"}


def accumulation_dtype(*dtypes: str) -> str:
    """Return the dtype to accumulate products of these dtypes in: at least float32."""
    wide = {_ACCUMULATE_IN.get(str(dtype), str(dtype)) for dtype in dtypes}
    return "float64" if "float64" in wide else wide.pop() if len(wide) == 1 else "float32"


def cast(tensor: te.Tensor, dtype: str) -> te.Tensor:
    """Cast every element; the tensor itself where the dtype is right already."""
    if tensor.dtype == dtype:
        return tensor
    return te.compute(
        tensor.shape, lambda *i: tensor(*i).astype(dtype), name=f"{tensor.op.name}_cast"
    )


def axes(layout: str, names: str) -> list[int]:
    """Return the positions of the named axes in a layout: ``axes("NHWC", "NCHW") == [0, 3, 1, 2]``."""
    return [layout.index(name) for name in names]


def spatial_names(layout: str, others: str) -> str:
    """Return a layout's axes without the named ones: ``("NWHC", "NC")`` gives ``"HW"``.

    They are in the order D, H, W, in which attributes list strides, padding and dilation, whatever the
    order in the layout.
    """
    return "".join(sorted(name for name in layout if name not in others))
