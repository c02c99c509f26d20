"""Registration of backward operators with TVM from Python."""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.op import grad as relax_op_grad

from ..registry import is_operator, own_operator

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
        Name, type and description of each argument. A type that starts with ``Optional`` marks an
        argument that a call may omit; these come last.
    infer_type : Callable
        Checks a call and returns the type of its result.
    builder : Callable
        Makes a call of the operator.
    attrs_type : str, optional
        The type key of the attributes, for example ``"relax.attrs.Conv2DAttrs"``.
    requires_argument_shapes : bool
        False for an operator whose legalization binds the unknown extents of its arguments to
        symbols.

    Returns
    -------
    builder : Callable
        The builder with checks of its arguments. It replaces the given builder in its module too.
    """
    op_name = f"relax.grad.{name}"
    if not is_operator(op_name):
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


#: The name of the attribute that marks a builder returned by :func:`_checked`.
_CHECKED = "_checks_its_arguments"


def _checked(
    builder: Callable[..., relax.Call], op_name: str, arguments: Sequence[tuple[str, str, str]]
) -> Callable[..., relax.Call]:
    """Wrap a builder in a check of its arguments: TVM treats any object as a pointer to an
    expression."""
    signature = inspect.signature(builder)
    kinds = {n: str(p.annotation).split(" | ") for n, p in signature.parameters.items()}
    number: dict[str, type] = {n: numbers.Integral for n, kind in kinds.items() if "int" in kind}
    number |= {n: numbers.Real for n, kind in kinds.items() if "float" in kind}

    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> relax.Call:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{op_name}: {error}; it takes {signature}") from None
        for name, kind, _ in arguments:
            if name in number and isinstance(bound.get(name), number[name]):
                continue
            if name in bound and not _is_of_kind(bound[name], kind):
                wanted = next(text for key, text in _KINDS.items() if key in kind)
                if number.get(name) is numbers.Real:
                    wanted = wanted.replace("an integer", "a number")
                raise TypeError(
                    f"{op_name}: {name} must be {wanted}, but it is {bound[name]!r} of type "
                    f"{type(bound[name]).__name__}"
                )
        with _refusals(op_name):
            return builder(*args, **kwargs)

    setattr(build, _CHECKED, True)
    return build


@contextlib.contextmanager
def _refusals(op_name: str) -> Iterator[None]:
    """Turn an internal error of TVM into an error that names the operator."""
    try:
        yield
    except (tvm.error.InternalError, AssertionError) as error:
        raise ValueError(f"{op_name}: {error}") from error


#: The accepted types of a builder's arguments, for each kind of argument.
_KINDS = {
    "Tensor": "a Relax expression",
    "Shape": "a Relax expression or a sequence of integers and expressions",
    "Tuple": "a Relax expression, or a sequence of expressions or shapes",
    "PrimExpr": "an integer or an expression",
    "Function": "a global variable",
}


def _is_of_kind(value: object, kind: str) -> bool:
    if isinstance(value, relax.Expr) or (value is None and kind.startswith("Optional")):
        return True
    if "PrimExpr" in kind:
        return isinstance(value, numbers.Integral)
    if (
        "Tensor" in kind
        or "Function" in kind
        or isinstance(value, str)
        or not isinstance(value, Iterable)
    ):
        return False
    if "Tuple" in kind:  # of tensors, shapes or integers
        return all(_is_of_kind(item, "Shape") or _is_of_kind(item, "PrimExpr") for item in value)
    return all(isinstance(item, (relax.Expr, numbers.Integral)) for item in value)


def of_form(
    infer_type: InferType, arguments: Sequence[tuple[str, str, str]], attrs_type: str | None
) -> InferType:
    """Check the form of a call before its type is inferred.

    Parameters
    ----------
    infer_type, arguments, attrs_type
        As for :func:`declare_op`.

    Returns
    -------
    infer_type : Callable
        Raises a :class:`TypeError` for a wrong number of arguments or wrong attributes.
    """

    required = sum(not kind.startswith("Optional") for _, kind, _ in arguments)
    inferred = Inferred()

    def checked(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
        return inferred.of(call, lambda: refused_or_inferred(call, ctx))

    def refused_or_inferred(call: relax.Call, ctx: relax.BlockBuilder) -> relax.Type:
        if not required <= len(call.args) <= len(arguments):
            names = ", ".join(name for name, _, _ in arguments)
            raise TypeError(
                f"{call.op.name} takes the arguments ({names}), of which {required} are required, "
                f"but the call has {len(call.args)}"
            )
        key = type_key(call.attrs)
        if key != attrs_type:
            needs = f"needs attributes of {attrs_type}" if attrs_type else "takes no attributes"
            raise TypeError(f"{call.op.name} {needs}, but has {key}")
        with _refusals(call.op.name):
            return infer_type(call, ctx)

    return checked


class Inferred:
    """A cache of the types inferred for the calls of an operator.

    Every pass infers the types of all calls that it rewrites again. Their attributes and types are
    the same objects as before. A type only depends on these and on shape arguments.
    """

    #: The number of calls after which the cache is cleared.
    MOST = 4096

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[list, relax.Type]] = {}

    def of(self, call: relax.Call, infer: Callable[[], relax.Type]) -> relax.Type:
        """Return the type of a call; ``infer`` computes it if it is not cached."""
        parts = [call.attrs, *call.ty_args]
        for argument in call.args[:]:
            if isinstance(argument, relax.Var):
                parts.append(argument.ty)
            elif isinstance(argument, relax.ShapeExpr):
                parts.append(argument)
            else:
                return infer()
        # The cache keeps these objects alive, so their addresses are unique.
        key = tuple(map(_address, parts))
        if key not in self._known:
            inferred = infer()
            if len(self._known) >= self.MOST:
                self._known.clear()
            self._known[key] = parts, inferred
        return self._known[key][1]


def _address(part: tvm_ffi.Object | None) -> int:
    return 0 if part is None else tvm_ffi.Object.__hash__(part)


def type_key(attrs: tvm.ir.Attrs | None) -> str | None:
    """Return the type key of an attributes node; None for a call without attributes."""
    return None if attrs is None else attrs.__tvm_ffi_type_info__.type_key


def attributes(attrs: tvm.ir.Attrs | None) -> dict[str, object]:
    """Return the attributes of a call as plain Python keyword arguments of a builder."""
    if attrs is None:
        return {}
    names = (field.name for field in attrs.__tvm_ffi_type_info__.fields)
    return {name: _plain(getattr(attrs, name)) for name in names}


def as_shape(shape: relax.Expr | Shape) -> relax.Expr:
    """Convert a sequence of dimensions to a shape expression; return an expression unchanged."""
    return shape if isinstance(shape, relax.Expr) else relax.ShapeExpr(list(shape))


def _plain(value: object) -> object:
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return value.value
    if isinstance(value, tvm_ffi.Array):
        return tuple(map(_plain, value))
    return str(value) if isinstance(value, str) else value
