"""How the type of the result of a backward operator is inferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import shapes_differ, shapes_may_differ


def unused(ndim: int = -1) -> relax.Var:
    """Return a tensor to call a forward builder with for the sake of its attributes."""
    return relax.Var("unused", relax.TensorType(dtype="float32", ndim=ndim))


def infer_data(
    call: relax.Call,
    ctx: relax.BlockBuilder,
    forward: str | Callable[[relax.Var], relax.Call],
    shape_name: str = "data_shape",
    *,
    if_known: bool = False,
) -> relax.TensorType:
    """Hold the output gradient against the type inference of the forward operator.

    For an operator that takes the output gradient, the shape of the data, which is the shape of its result,
    and then what else the forward operator takes.

    Parameters
    ----------
    call, ctx
        As for a type inference.
    forward : str or Callable
        The forward operator, or what makes its call of the data where its other arguments are not as in the
        call.
    shape_name : str
        The name of the argument that is the shape.
    if_known : bool
        True for a forward operator of whose result TVM infers nothing, or too much, from a rank alone: nothing is
        checked then where the shape is not known.

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
    """Return the type of a tensor whose shape is an argument; dtype and device are those of another.

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
    """Return the type of a tensor of this shape, or of this rank where the shape is None.

    It is on the device of another tensor, and of its dtype where none is given.
    """
    of_shape = {"ndim": ndim} if shape is None else {"shape": shape}
    return relax.TensorType(**of_shape, dtype=dtype or like.dtype, vdevice=like.vdevice)


def forward_type(call: relax.Call, ctx: relax.BlockBuilder, forward: relax.Call) -> relax.Type:
    """Return what TVM infers for the forward operator, to hold a backward call's arguments against.

    Raises
    ------
    TypeError, ValueError
        Names the backward operator and its arguments, and says what TVM finds wrong.
    """
    try:
        return ctx.normalize(forward).ty
    except (ValueError, TypeError, tvm.error.InternalError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        found = ", ".join(
            f"{info.name}: {argument.ty}"
            for info, argument in zip(call.op.arguments, call.args, strict=False)
        )
        raise kind(
            f"{call.op.name}: the arguments do not fit {forward.op.name}: {error}\n"
            f"The arguments are {found}"
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
    """Return the dimensions of a shape argument, or None when they are not known.

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
    """Refuse a gradient whose shape is not what the forward operator returns.

    What computes the gradient takes the extents of the one for those of the other. So symbols must be the same;
    what is not known at all, and expressions that may be the same, are for run time.

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
    """Refuse a layout that is not a permutation of the plain one.

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
    for name, (found, plain) in layouts.items():
        if sorted(found) != sorted(plain):
            raise ValueError(
                f"{call.op.name}: {name} must be a permutation of {plain!r}, but it is {found!r}; "
                "a layout with packed channels must be unpacked before the operator"
            )


def check_positive(call: relax.Call, *names: str) -> None:
    """Refuse attributes (integers or arrays of them) that are not positive.

    Raises
    ------
    ValueError
        Names the operator, the attribute and the value found.
    """
    for name in names:
        found = getattr(call.attrs, name)
        values = [found] if isinstance(found, int) else [int(value) for value in found]
        if any(value <= 0 for value in values):
            raise ValueError(f"{call.op.name}: {name} must be positive, but it is {found}")


def shape_text(shape: Sequence[tirx.PrimExpr]) -> str:
    dims = (str(dim.value if isinstance(dim, tirx.IntImm) else dim) for dim in shape)
    return f"({', '.join(dims)})"
