"""The description of one call of a backward operator for a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import relax, tirx
from tvm.ir import Op

from ..ir.compat import dtype_of
from ..op.declare import attributes
from ..registry import is_backward_operator

#: The name of the result of a call, and of the annotation of the call itself.
ROOT = "root"


@dataclass(frozen=True)
class BackwardCall:
    """One call of a backward operator, in plain Python.

    Attributes
    ----------
    op_name : str
        The operator, for example ``"relax.grad.conv2d_backward_weight"``.
    arguments : Mapping[str, relax.Expr]
        The arguments by the operator's names for them.
    attrs : Mapping[str, object]
        The attributes: numbers, strings, and tuples of numbers. The backward operators of
        convolution and pooling have the attributes of the forward operator.
    type : relax.Type
        The type of the result.
    parameters : Mapping[str, int]
        For a call within a function, the parameter index of each argument. A literal shape is not a
        parameter, and neither is a constant in the function.
    """

    op_name: str
    arguments: Mapping[str, relax.Expr]
    attrs: Mapping[str, object]
    type: relax.Type
    parameters: Mapping[str, int]

    @classmethod
    def of(cls, call: relax.Call, params: list[relax.Var] | None = None) -> BackwardCall:
        """Describe a call within a function with these parameters.

        Raises
        ------
        TypeError
            If it is not a call of an operator.
        """
        if not isinstance(call, relax.Call) or not isinstance(call.op, Op):
            raise TypeError(f"call must be a call of an operator, but it is {call!r}")
        names = (argument.name for argument in call.op.arguments)
        arguments = dict(zip(names, call.args, strict=False))
        parameters = {
            name: index
            for name, argument in arguments.items()
            for index, param in enumerate(params or [])
            if argument.same_as(param)
        }
        return cls(call.op.name, arguments, attributes(call.attrs), call.ty, parameters)

    @classmethod
    def of_function(cls, function: relax.Function) -> BackwardCall:
        """Describe the call in a function created by ``FuseOpsByPattern``.

        Parameters
        ----------
        function : relax.Function
            A composite function, or the function around one that a code generator receives; both
            have the same parameters in the same order.

        Raises
        ------
        TypeError
            If it is not a Relax function.
        ValueError
            If the function does not hold exactly one call of a backward operator. After
            ``MergeCompositeFunctions`` a function may hold several; describe each composite
            function.
        """
        if not isinstance(function, relax.Function):
            raise TypeError(f"function must be a Relax function, but it is {function!r}")
        composites = _within(
            function, relax.Function, lambda item: "Composite" in (item.attrs or {})
        )
        if len(composites) > 1:
            raise ValueError(
                f"{_name(function)} holds {len(composites)} composite functions; describe them "
                "one by one"
            )
        composite = composites[0] if composites else function
        calls = _within(composite, relax.Call, _is_backward)
        if len(calls) != 1:
            raise ValueError(
                f"{_name(function)} must hold one call of a backward operator, but it holds "
                f"{len(calls)}"
            )
        return cls.of(calls[0], list(composite.params))

    def dtype(self, name: str = ROOT) -> str:
        """Return the dtype of an argument, or of the result."""
        return dtype_of(self._type_of(name))

    def shape(self, name: str = ROOT) -> tuple[int | tirx.PrimExpr, ...] | None:
        """Return the extents of an argument (a tensor or a shape) or of the result; None if
        unknown."""
        return shape_of(self._type_of(name))

    def is_static(self) -> bool:
        """Tell whether all extents of the result and of the arguments are constants."""
        shapes = map(self.shape, (ROOT, *self.arguments))
        return all(
            shape is not None and all(isinstance(extent, int) for extent in shape)
            for shape in shapes
        )

    def _type_of(self, name: str) -> relax.Type:
        if name == ROOT:
            return self.type
        if name not in self.arguments:
            raise ValueError(
                f"{self.op_name} has no argument {name!r}; its arguments are "
                f"{', '.join(self.arguments)}"
            )
        return self.arguments[name].ty


def shape_of(kind: relax.Type) -> tuple[int | tirx.PrimExpr, ...] | None:
    """Return the extents of a tensor or of a shape of this type; None if unknown."""
    if isinstance(kind, relax.TensorType):
        kind = None if kind.shape is None else kind.shape.ty
    if kind is None or kind.values is None:
        return None
    return tuple(
        int(extent) if isinstance(extent, tirx.IntImm) else extent for extent in kind.values
    )


def _is_backward(call: relax.Call) -> bool:
    return isinstance(call.op, Op) and is_backward_operator(call.op.name)


def _within(function: relax.Function, kind: type, wanted: Callable[[relax.Expr], bool]) -> list:
    """Return the wanted expressions of type ``kind`` in a function, including the function
    itself."""
    results = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, kind) and wanted(expr):
            results.append(expr)

    relax.analysis.post_order_visit(function, visit)
    return results


def _name(function: relax.Function) -> str:
    attrs = function.attrs or {}
    return str(attrs.get("global_symbol") or attrs.get("Composite") or "the function")
