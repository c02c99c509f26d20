"""Bindings that block gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import Op

from ..activity import useful
from ..ir.bindings import used
from ..registry import classify


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
        Why there is no gradient.
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
    constants: Collection[str] = (),
) -> list[MissingGradient]:
    """Return the bindings that block gradients between the active variables and a target.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings in order, including those of branches.
    active : Collection[relax.Var]
        The sources of the gradient and the variables that depend on them.
    target : relax.Expr
        The differentiated expression.
    constants : Collection[str]
        Operators that count as constants here.
    """
    wanted = useful(bindings, target, constants)
    found = [
        MissingGradient(binding.var.name, *obstacle, _span(binding))
        for binding in bindings
        if binding.var in active
        and binding.var in wanted
        # A source is active even if it is computed from inactive variables only.
        and any(variable in active for variable in used(binding.value))
        for obstacle in _obstacles(binding.value)
    ]
    # A callee that is called twice repeats its missing gradients: report each once.
    return [each for i, each in enumerate(found) if each.span is None or each not in found[:i]]


def _obstacles(value: relax.Expr) -> Iterator[tuple[str, str]]:
    """Yield each callee that blocks gradients at a value, with the reason."""
    if not isinstance(value, relax.Call):
        return
    callee = value.op
    if isinstance(callee, Op):
        found = classify(callee.name)
        if found.kind == "unclassified":
            yield (
                callee.name,
                "no gradient is registered; register one with relax_grad.register_gradient",
            )
        elif found.refused:
            yield callee.name, found.reason
    elif isinstance(callee, relax.ExternFunc):
        yield str(callee.global_symbol), "TVM cannot look into an external function"
    else:
        name = callee.name_hint if isinstance(callee, relax.GlobalVar) else str(callee)
        yield name, "which Relax function is called is not known before it runs"


def _place(span: tvm.ir.Span) -> str:
    """Return the start of a span in the notation of compilers, ``file:line:column``."""
    if not isinstance(span, tvm.ir.Span):
        return str(span)
    return f"{span.source_name.name}:{span.line}:{span.column}"


def _span(binding: relax.Binding) -> tvm.ir.Span | None:
    return binding.value.span if binding.value.span is not None else binding.var.span
