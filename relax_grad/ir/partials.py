"""Checks of the results of gradient rules against the types of the arguments, with errors that name
the place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import tvm_ffi
from tvm import relax
from tvm.ir import Op

from ..errors import GradientError
from .compat import dtype_of, shapes_differ, types_differ

_NO_GRAD_OP = Op.get("relax.grad.no_grad")


def is_no_grad(partial: relax.Expr) -> bool:
    """Tell whether a partial marks its argument as one without a gradient."""
    return isinstance(partial, relax.Call) and partial.op == _NO_GRAD_OP


@contextlib.contextmanager
def failing_as(where: str) -> Iterator[None]:
    """Turn any error of a rule into a GradientError that names the place."""
    try:
        yield
    except GradientError as error:
        if str(error).startswith(where):
            raise
        raise GradientError(f"{where}: {error}") from error
    except Exception as error:  # a user's rule may raise any exception
        raise GradientError(f"{where}: {str(error) or type(error).__name__}") from error


def check_partial(
    ctx: relax.BlockBuilder,
    partial: relax.Expr,
    argument: relax.Expr,
    is_wanted: Callable[[relax.Expr], bool] = lambda argument: True,
    fits: Callable[[relax.Type, relax.Type], bool] | None = None,
) -> relax.Expr:
    """Normalize the partial that a rule returns for an argument, and reject one that cannot be its
    gradient.

    In a literal tuple, only the elements whose gradients are wanted are checked. ``fits`` takes the
    types of a partial and of an argument, and tells whether the partial has the type of a gradient.
    By default all possible types are accepted.
    """
    if not isinstance(partial, relax.Expr):
        raise GradientError(
            f"the rule must return expressions, but it returned {partial!r}; for an argument "
            "without a gradient, return relax.op.grad.no_grad(argument)"
        )
    if is_no_grad(partial) or not is_wanted(argument):
        return partial
    if isinstance(partial, relax.Tuple) and isinstance(argument, relax.Tuple):
        if len(partial.fields) != len(argument.fields):
            raise GradientError(
                f"the gradient of a tuple of {len(argument.fields)} elements must have as many, "
                f"but it has {len(partial.fields)}"
            )
        pairs = zip(partial.fields, argument.fields, strict=True)
        fields = [check_partial(ctx, *pair, is_wanted, fits) for pair in pairs]
        return ctx.normalize(relax.Tuple(fields))
    partial = ctx.normalize(partial)
    if not (fits or _may_be_gradient)(partial.ty, argument.ty):
        raise GradientError(
            f"the gradient of an argument must have its type {argument.ty}, but it has {partial.ty}"
        )
    return partial


def _may_be_gradient(actual: relax.Type, argument: relax.Type) -> bool:
    """Tell whether a value of the found type may be the gradient of an argument, as far as is
    known."""
    if isinstance(actual, relax.ObjectType):
        return True
    if isinstance(argument, relax.TupleType):
        return (
            isinstance(actual, relax.TupleType)
            and len(actual.fields) == len(argument.fields)
            and all(map(_may_be_gradient, actual.fields, argument.fields))
        )
    if not isinstance(argument, relax.TensorType):
        return True
    is_float = argument.dtype is None or dtype_of(argument).startswith(("float", "bfloat"))
    if not isinstance(actual, relax.TensorType):
        return not is_float  # an element without a gradient may have any partial in a tuple
    if _is_quantized(argument) and actual.dtype is not None and "float" in dtype_of(actual):
        return not shapes_differ(actual, argument)
    return not types_differ(actual, argument)


def _is_gradient(actual: relax.Type, argument: relax.Type) -> bool:
    """Tell whether the type of a partial agrees with the argument's type, as far as is known."""
    return not types_differ(actual, argument)


def _is_gradient_of_quantized(actual: relax.Type, argument: relax.Type) -> bool:
    """Tell whether the types agree, with float32 for the gradients of integer and float8 tensors.

    The gradient of a quantized tensor is the gradient of the numbers that it represents.
    """
    if _is_quantized(argument):
        ndim = argument.ndim if argument.shape is None else -1
        argument = relax.TensorType(argument.shape, "float32", ndim=ndim)
    return _is_gradient(actual, argument)


def check_length(partials: Sequence, expected: int) -> None:
    # TVM returns its own class of array.
    if not isinstance(partials, (list, tvm_ffi.Array)) or len(partials) != expected:
        raise GradientError(
            f"the rule must return a list of {expected} expression{'' if expected == 1 else 's'}, "
            f"one for each argument, but it returned {partials!r}"
        )


def guarded(op_name: str, rule: Callable, quantized: bool) -> Callable:
    """Return a rule that checks its results, and whose errors name the operator and the binding.

    TVM crashes the process if a rule returns something other than a list of expressions.
    """
    fits = _is_gradient_of_quantized if quantized else _is_gradient

    @functools.wraps(rule)
    def checked(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        with failing_as(f"gradient of {op_name}, binding {orig_var.name!r}"):
            partials = rule(orig_var, orig_call, output_grad, ctx)
            check_length(partials, len(orig_call.args))
            return [
                check_partial(ctx, partial, argument, fits=fits)
                for partial, argument in zip(partials, orig_call.args, strict=True)
            ]

    return checked


def _is_quantized(tensor_type: relax.Type) -> bool:
    """Tell whether a type is a tensor type of integers or float8."""
    return (
        isinstance(tensor_type, relax.TensorType)
        and tensor_type.dtype is not None
        and dtype_of(tensor_type).startswith(("int", "uint", "float8"))
    )
