"""Bindings that block gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import Op

from ..activity import useful
from ..errors import GradientError
from ..ir.bindings import used
from ..ir.module import tuple_fields
from ..registry import classify, refusal
from ..tir.call import TensorFunctions, float_arguments, is_call


@dataclass(frozen=True)
class MissingGradient:
    """A binding on the path of a gradient whose operator has no gradient.

    Attributes
    ----------
    binding : str
        The name of the bound variable.
    operator : str
        The name of the callee.
    reason : str
        Why there is no gradient, and the remedy.
    span : tvm.ir.Span or None
        The place of the call in the source, if TVM knows it.
    """

    binding: str
    operator: str
    reason: str
    span: tvm.ir.Span | None = None

    def __str__(self) -> str:
        at = "" if self.span is None else f" at {_place(self.span)}"
        return f"binding {self.binding!r}{at}: {self.operator}: {self.reason}"


def obstacles(
    bindings: Sequence[relax.Binding],
    active: Collection[relax.Var],
    target: relax.Expr,
    constants: Collection[str],
    functions: TensorFunctions,
) -> list[MissingGradient]:
    """Return the bindings that block gradients between the active variables and a target.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings in order, including bindings of branches.
    active : Collection[relax.Var]
        The sources of the gradient and the variables that depend on them.
    target : relax.Expr
        The differentiated expression.
    constants : Collection[str]
        Operators that count as constants here.
    functions : TensorFunctions
        The tensor functions of the module.
    """
    wanted = useful(bindings, target, constants)
    missing = [
        MissingGradient(binding.var.name, *obstacle, _span(binding))
        for binding in bindings
        if binding.var in active
        and binding.var in wanted
        # A source is active even if it is computed from inactive variables only.
        and any(variable in active for variable in used(binding.value))
        for obstacle in _obstacles(binding.value, active, functions)
    ]
    # A callee that is called twice repeats its missing gradients: report each once.
    return [
        gradient
        for i, gradient in enumerate(missing)
        if gradient.span is None or gradient not in missing[:i]
    ]


def _obstacles(
    value: relax.Expr, active: Collection[relax.Var], functions: TensorFunctions
) -> Iterator[tuple[str, str]]:
    """Yield each callee that blocks gradients at a value, with the reason."""
    if not isinstance(value, relax.Call):
        return
    callee = value.op
    if is_call(value):
        arguments = tuple_fields(value.args[1])
        wrt = [
            i
            for i in float_arguments(value)
            if any(variable in active for variable in used(arguments[i]))
        ]
        try:
            if wrt:
                functions.adjoint(value, wrt)
        except GradientError as error:
            yield str(getattr(value.args[0], "name_hint", value.args[0])), str(error)
    elif isinstance(callee, Op):
        classification = classify(callee.name)
        if classification.kind == "unclassified":
            yield (
                callee.name,
                "no gradient is registered; register one with relax_grad.register_gradient",
            )
        elif classification.refused:
            yield callee.name, refusal(value)
    elif isinstance(callee, relax.ExternFunc):
        yield (
            str(callee.global_symbol),
            "the external function that is called is opaque to TVM; call it from an operator of "
            "your own with a gradient (relax_grad.register_gradient), or compute it outside and "
            "pass the result as a parameter",
        )
    else:
        name = callee.name_hint if isinstance(callee, relax.GlobalVar) else str(callee)
        yield (
            name,
            "the Relax function that is called is known at run time only; call a function of "
            "the module by its GlobalVar",
        )


def _place(span: tvm.ir.Span) -> str:
    """Return the start of a span in the notation of compilers, ``file:line:column``."""
    if not isinstance(span, tvm.ir.Span):
        return str(span)
    return f"{span.source_name.name}:{span.line}:{span.column}"


def _span(binding: relax.Binding) -> tvm.ir.Span | None:
    return binding.value.span if binding.value.span is not None else binding.var.span
