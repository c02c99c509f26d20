"""How a backward operator is added to TVM from Python."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.op import grad as relax_op_grad

from .._compat import shapes_differ, shapes_may_differ
from ..registry import own_operator

InferType = Callable[[relax.Call, relax.BlockBuilder], relax.Type]
Shape = Sequence["int | tirx.PrimExpr"]


def declare_op(
    name: str,
    arguments: Sequence[tuple[str, str, str]],
    infer_type: InferType,
    builder: Callable[..., relax.Call],
    attrs_type: str | None = None,
    *,
    requires_argument_shapes: bool = True,
) -> Callable[..., relax.Call]:
    """Add the operator ``relax.grad.<name>`` and its builder ``tvm.relax.op.grad.<name>``.

    TVMScript prints a call of it as ``R.grad.<name>(...)`` and parses that back with the builder,
    so the builder takes the arguments in order and then the attributes by their names.

    Parameters
    ----------
    name : str
        The name under ``relax.grad``.
    arguments : Sequence[tuple[str, str, str]]
        Name, type and description of each argument; a type that starts with ``Optional`` marks
        one that a call may leave out, at the end.
    infer_type : Callable
        Checks a call and returns the type of its result.
    builder : Callable
        Makes a call of the operator.
    attrs_type : str, optional
        The type key of the attributes, for example ``"relax.attrs.Conv2DAttrs"``.
    requires_argument_shapes : bool
        False for an operator whose legalization gives unknown extents of its arguments a name.

    Returns
    -------
    builder : Callable
        The builder, which refuses what is no argument. It takes the builder's place in its module too.
    """
    op_name = f"relax.grad.{name}"
    if op_name not in Op.list_op_names():
        tvm.ir._ffi_api.RegisterOp(op_name, (builder.__doc__ or "").partition("\n")[0])
        op = Op.get(op_name)
        op.set_num_inputs(len(arguments))
        for argument in arguments:
            op.add_argument(*argument)
        if attrs_type is not None:
            op.set_attrs_type_key(attrs_type)
        op.set_attr("FInferType", of_form(infer_type, arguments, attrs_type))
        op.set_attr("FPurity", True)
        op.set_attr("RequiresArgumentShapes", requires_argument_shapes)
        own_operator(op_name)
    checked = builder if hasattr(builder, _CHECKED) else _checked(builder, op_name, arguments)
    setattr(relax_op_grad, name, checked)
    home = sys.modules.get(builder.__module__)
    if getattr(home, builder.__name__, None) is builder:
        setattr(home, builder.__name__, checked)
    return checked


#: What marks a builder that :func:`_checked` has returned.
_CHECKED = "_refuses_what_is_no_argument"


def _checked(
    builder: Callable[..., relax.Call], op_name: str, arguments: Sequence[tuple[str, str, str]]
) -> Callable[..., relax.Call]:
    """Refuse what is no argument before TVM sees it, which takes any object for a pointer to an expression."""
    signature = inspect.signature(builder)
    numbers_too = {
        n for n, p in signature.parameters.items() if "int" in str(p.annotation).split(" | ")
    }

    @functools.wraps(builder)
    def build(*args, **kwargs) -> relax.Call:
        try:
            found = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{op_name}: {error}; it takes {signature}") from None
        for name, kind, _ in arguments:
            if name in numbers_too and isinstance(found.get(name), numbers.Integral):
                continue
            if name in found and not _is_of_kind(found[name], kind):
                wanted = next(text for key, text in _KINDS.items() if key in kind)
                raise TypeError(
                    f"{op_name}: {name} must be {wanted}, but it is {found[name]!r} of type "
                    f"{type(found[name]).__name__}"
                )
        with _refusals(op_name):
            return builder(*args, **kwargs)

    setattr(build, _CHECKED, True)
    return build


@contextlib.contextmanager
def _refusals(op_name: str) -> Iterator[None]:
    """Turn what TVM calls an internal error into one that names the operator."""
    try:
        yield
    except (tvm.error.InternalError, AssertionError) as error:
        raise ValueError(f"{op_name}: {error}") from error


#: What the arguments of a builder must be, for each kind of argument.
_KINDS = {
    "Tensor": "a Relax expression",
    "Shape": "a Relax expression or a sequence of integers and expressions",
    "Tuple": "a Relax expression, or a sequence of expressions or shapes",
    "PrimExpr": "an integer or an expression",
}


def _is_of_kind(value: object, kind: str) -> bool:
    if isinstance(value, relax.Expr) or (value is None and kind.startswith("Optional")):
        return True
    if "PrimExpr" in kind:
        return isinstance(value, numbers.Integral)
    if "Tensor" in kind or isinstance(value, str) or not isinstance(value, Iterable):
        return False
    if "Tuple" in kind:  # of tensors, shapes or integers
        return all(_is_of_kind(item, "Shape") or _is_of_kind(item, "PrimExpr") for item in value)
    return all(isinstance(item, (relax.Expr, numbers.Integral)) for item in value)


def of_form(
    infer_type: InferType, arguments: Sequence[tuple[str, str, str]], attrs_type: str | None
) -> InferType:
    """Refuse a call that is not of the operator's form before its type is inferred.

    Parameters
    ----------
    infer_type, arguments, attrs_type
        As for :func:`declare_op`.

    Returns
    -------
    infer_type : Callable
        Raises a :class:`TypeError` for another number of arguments or other attributes.
    """

    required = sum(not kind.startswith("Optional") for _, kind, _ in arguments)

    def checked(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
        if not required <= len(call.args) <= len(arguments):
            names = ", ".join(name for name, _, _ in arguments)
            raise TypeError(
                f"{call.op.name} takes the arguments ({names}), of which {required} are required, "
                f"but the call has {len(call.args)}"
            )
        found = type_key(call.attrs)
        if found != attrs_type:
            needs = f"needs attributes of {attrs_type}" if attrs_type else "takes no attributes"
            raise TypeError(f"{call.op.name} {needs}, but has {found}")
        with _refusals(call.op.name):
            return infer_type(call, ctx)

    return checked


def type_key(attrs: tvm.ir.Attrs | None) -> str | None:
    """Return the type key of an attributes node; None for a call without attributes."""
    return None if attrs is None else attrs.__tvm_ffi_type_info__.type_key


def attributes(attrs: tvm.ir.Attrs | None) -> dict[str, object]:
    """Return the attributes of a call as the keyword arguments of a builder: in plain Python."""
    if attrs is None:
        return {}
    names = (field.name for field in attrs.__tvm_ffi_type_info__.fields)
    return {name: _plain(getattr(attrs, name)) for name in names}


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

    What computes the gradient takes the extents of the one for those of the other. So extents that are
    expressions must provably be the same; what is not known at all is for run time.

    Raises
    ------
    ValueError
        Names the operator, the argument, and the shapes expected and found.
    """
    if got.ndim not in (-1, forward.ndim):
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


def as_shape(shape: relax.Expr | Shape) -> relax.Expr:
    """Make a shape expression of a sequence of dimensions; an expression stays as it is."""
    return shape if isinstance(shape, relax.Expr) else relax.ShapeExpr(list(shape))


def _plain(value: object) -> object:
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return value.value
    if isinstance(value, tvm_ffi.Array):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, str) else value


def shape_text(shape: Shape) -> str:
    """Return a shape as an error message shows it."""
    dims = (str(dim.value if isinstance(dim, tirx.IntImm) else dim) for dim in shape)
    return f"({', '.join(dims)})"
