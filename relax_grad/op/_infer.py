"""Type inference of backward operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import shapes_differ, shapes_may_differ


def unused(ndim: int = -1) -> relax.Var:
    """Return a placeholder tensor, to call a forward builder for its attributes only."""
    return relax.Var("unused", relax.TensorType(dtype="float32", ndim=ndim))


def infer_data(
    call: relax.Call,
    ctx: relax.BlockBuilder,
    forward: str | Callable[[relax.Var], relax.Call],
    shape_name: str = "data_shape",
    *,
    if_known: bool = False,
) -> relax.TensorType:
    """Check the output gradient against the type inference of the forward operator.

    The backward operator takes the output gradient, then the shape of the data, which is also the
    shape of its result, and then the other arguments of the forward operator.

    Parameters
    ----------
    call, ctx
        As for a type inference.
    forward : str or Callable
        The forward operator. If its other arguments differ from the arguments of ``call``, a
        function that builds its call from the data.
    shape_name : str
        The name of the shape argument.
    if_known : bool
        True skips the check if the shape is unknown: for a forward operator whose result type TVM
        does not infer, or infers too specifically, from a rank alone.

    Returns
    -------
    data_type : relax.TensorType
        The type of the data.
    """
    output_grad = tensor_type(call, 0, "output_grad")
    data_type = type_of_argument(call, 1, shape_name, output_grad)
    if if_known and data_type.shape is None:
        return data_type
    data = relax.Var("data", data_type)
    if isinstance(forward, str):
        made = relax.Call(Op.get(forward), [data, *call.args[2:]], call.attrs)
    else:
        made = forward(data)
    check_shape(call, "output_grad", output_grad, forward_type(call, ctx, made))
    return data_type


def type_of_argument(
    call: relax.Call, index: int, name: str, like: relax.TensorType, dtype: str | None = None
) -> relax.TensorType:
    """Return the type of a tensor whose shape is an argument, with the device, and by default the
    dtype, of ``like``.

    Raises
    ------
    TypeError
        If the argument is not a shape.
    """
    return type_of_shape(like, shape_values(call, index, name), call.args[index].ty.ndim, dtype)


def type_of_shape(
    like: relax.TensorType,
    shape: relax.Expr | Sequence[tirx.PrimExpr] | None,
    ndim: int,
    dtype: str | None = None,
) -> relax.TensorType:
    """Return the type of a tensor of this shape, or of this rank if the shape is None.

    The device is taken from ``like``, and so is the dtype if None is given.
    """
    of_shape = {"ndim": ndim} if shape is None else {"shape": shape}
    return relax.TensorType(**of_shape, dtype=dtype or like.dtype, vdevice=like.vdevice)


def forward_type(call: relax.Call, ctx: relax.BlockBuilder, forward: relax.Call) -> relax.Type:
    """Return the type that TVM infers for the forward operator, to check a backward call's
    arguments against.

    Raises
    ------
    TypeError, ValueError
        Names the backward operator and its arguments, and quotes the error of TVM.
    """
    try:
        return ctx.normalize(forward).ty
    except (ValueError, TypeError, tvm.error.InternalError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        types = ", ".join(
            f"{info.name}: {argument.ty}"
            for info, argument in zip(call.op.arguments, call.args, strict=False)
        )
        raise kind(
            f"{call.op.name}: the arguments do not fit {forward.op.name}: {error}\n"
            f"The arguments are {types}"
        ) from error


def tensor_type(call: relax.Call, index: int, name: str) -> relax.TensorType:
    """Return the type of a tensor argument.

    Raises
    ------
    TypeError
        If the argument is not a tensor.
    """
    arg_type = call.args[index].ty
    if not isinstance(arg_type, relax.TensorType):
        raise TypeError(f"{call.op.name}: {name} must be a tensor, but its type is {arg_type}")
    return arg_type


def shape_values(call: relax.Call, index: int, name: str) -> list[tirx.PrimExpr] | None:
    """Return the dimensions of a shape argument, or None if they are unknown.

    Raises
    ------
    TypeError
        If the argument is not a shape.
    """
    arg_type = call.args[index].ty
    if not isinstance(arg_type, relax.ShapeType):
        raise TypeError(f"{call.op.name}: {name} must be a shape, but its type is {arg_type}")
    return None if arg_type.values is None else list(arg_type.values)


def check_shape(
    call: relax.Call, name: str, got: relax.TensorType, forward: relax.TensorType
) -> None:
    """Check that a gradient has the shape of the forward operator's result.

    The code that computes the gradient uses the extents of one for the other, so symbols
    must be the same. Unknown shapes, and expressions that may be equal, are left to run time.

    Raises
    ------
    ValueError
        Names the operator, the argument, and the shapes expected and found.
    """
    if -1 not in (got.ndim, forward.ndim) and got.ndim != forward.ndim:
        raise ValueError(
            f"{call.op.name}: {name} must have {forward.ndim} dimensions, as the result of the "
            f"forward operator has ({forward}), but its type is {got}"
        )
    if shapes_may_differ(got, forward):
        unproved = "" if shapes_differ(got, forward) else ", which may differ from it at run time"
        raise ValueError(
            f"{call.op.name}: {name} must have the shape {shape_text(forward.shape.values)} that "
            f"the forward operator returns, but it has {shape_text(got.shape.values)}{unproved}"
        )


def check_layouts(call: relax.Call, **layouts: tuple[str, str]) -> None:
    """Check that each layout is a permutation of the plain one.

    Parameters
    ----------
    call : relax.Call
        The call that the layouts belong to.
    **layouts : tuple[str, str]
        The attribute's name, its value and the plain layout, for example ``("NHWC", "NCHW")``.

    Raises
    ------
    ValueError
        Names the operator, the attribute and the layout found.
    """
    for name, (layout, plain) in layouts.items():
        if sorted(layout) != sorted(plain):
            raise ValueError(
                f"{call.op.name}: {name} must be a permutation of {plain!r}, but it is {layout!r}; "
                "a layout with packed channels must be unpacked before the operator"
            )


def check_positive(call: relax.Call, *names: str) -> None:
    """Check that attributes (integers or arrays of them) are positive.

    Raises
    ------
    ValueError
        Names the operator, the attribute and the value found.
    """
    for name in names:
        setting = getattr(call.attrs, name)
        values = [setting] if isinstance(setting, int) else [int(value) for value in setting]
        if any(value <= 0 for value in values):
            raise ValueError(f"{call.op.name}: {name} must be positive, but it is {setting}")


def shape_text(shape: Sequence[tirx.PrimExpr]) -> str:
    dims = (str(dim.value if isinstance(dim, tirx.IntImm) else dim) for dim in shape)
    return f"({', '.join(dims)})"
