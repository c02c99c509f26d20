"""What is known of the gradients of all operators, and which gradients a function lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax
from tvm.ir import Op

from ._bindings import used
from ._partials import is_no_grad
from .activity import useful
from .registry import Classification, classify, operators

__all__ = [
    "MissingGradient",
    "OperatorCoverage",
    "coverage",
    "differentiable_arguments",
    "missing_gradients",
]


@dataclass(frozen=True)
class OperatorCoverage:
    """The gradient of one operator.

    Attributes
    ----------
    classification : relax_grad.registry.Classification
        Whether there is one and whose it is, or why there is none.
    arguments : tuple[str, ...]
        The arguments that get a gradient, by name.
    """

    classification: Classification
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class MissingGradient:
    """A binding that gradients would have to pass, whose operator has none.

    Attributes
    ----------
    binding : str
        The name of the variable that is bound.
    operator : str
        What is called.
    reason : str
        Why there is no gradient.
    span : tvm.ir.Span or None
        Where the call stands in the source, if TVM knows.
    """

    binding: str
    operator: str
    reason: str
    span: tvm.ir.Span | None = None

    def __str__(self) -> str:
        at = "" if self.span is None else f" at {_place(self.span)}"
        return f"binding {self.binding!r}{at}: {self.operator}: {self.reason}"


def coverage() -> list[OperatorCoverage]:
    """Return what is known of every ``relax.*`` operator of the running TVM, in order of name."""
    found = []
    for op_name in operators():
        classification = classify(op_name)
        arguments = ()
        if classification.kind == "differentiable" and classification.rule != "the pass":
            arguments = differentiable_arguments(op_name)
        found.append(OperatorCoverage(classification, arguments))
    return found


def differentiable_arguments(op_name: str) -> tuple[str, ...]:
    """Return the names of the arguments that get a gradient in at least one of the operator's samples.

    Every sample's call is handed to the operator's rule; nothing is compiled. A sample that a rule of TVM's or
    of a user's does not take shows none.

    Raises
    ------
    ValueError
        If the running TVM has no such operator.
    """
    classification = classify(op_name)  # which refuses what is no operator
    from .testing.samples import sampled_operators, samples

    if classification.kind == "unclassified" or op_name not in sampled_operators():
        return ()
    found: set[int] = set()
    count = 0
    for sample in samples(op_name):
        try:
            of_calls = sample.partials()
        except Exception:
            # The samples are made for the rules of relax_grad: another, as after uninstall(), may refuse them.
            if classification.rule == "relax_grad":
                raise
            continue
        for partials in of_calls:
            count = max(count, len(partials))
            found |= {i for i, partial in enumerate(partials) if not is_no_grad(partial)}
    names = [argument.name for argument in Op.get(op_name).arguments]
    names += [f"argument {i}" for i in range(len(names), count)]
    return tuple(names[i] for i in sorted(found))


def missing_gradients(
    mod: tvm.IRModule,
    func_name: str = "main",
    require_grads: relax.Var | str | Sequence[relax.Var | str] | None = None,
    *,
    target_index: int | Sequence[int] | None = 0,
    allow_zero: str | Collection[str] = (),
) -> list[MissingGradient]:
    """Return every binding that keeps a function from being differentiated for lack of a gradient.

    Those of the functions that it calls are among them, as :class:`relax_grad.transform.Gradient` follows
    these; TVM's pass does not. Only what lies between ``require_grads`` and the target counts: a result
    of integers, a constant, or an operator that counts as a constant ends a path.

    Parameters
    ----------
    mod : tvm.IRModule
        The module.
    func_name : str
        The name of the function.
    require_grads : relax.Var or str or Sequence, optional
        The variables to differentiate with respect to, themselves or by name; by default all parameters
        that hold floating-point tensors.
    target_index : int or Sequence[int] or None
        Which element of the function's result is differentiated, where the result is a tuple; several
        integers lead into nested tuples, and None stands for the whole result.
    allow_zero : str or Collection[str]
        Operators that count as constants.

    Returns
    -------
    missing : list[MissingGradient]
        In the order of the function; empty where no gradient is missing.

    Raises
    ------
    TypeError
        If ``mod`` is no module or ``func_name`` names no Relax function.
    ValueError
        If the function or a variable does not exist, or the result has no such element.
    GradientError
        If the function is recursive.

    Examples
    --------
    >>> import relax_grad
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit(relax.op.call_pure_packed("mystery", x, ty_args=x.ty), name_hint="y")
    ...         loss = bb.emit_output(relax.op.sum(y))
    ...     _ = bb.emit_func_output(loss)
    >>> for missing in relax_grad.missing_gradients(bb.get(), "main"):
    ...     print(missing.binding, missing.operator)
    y relax.call_pure_packed
    """
    from .transform.gradient import Gradient, missing

    return missing(mod, Gradient(func_name, require_grads, target_index, allow_zero=allow_zero))


def obstacles(
    bindings: Sequence[relax.Binding],
    active: Collection[relax.Var],
    target: relax.Expr,
    constants: Collection[str] = (),
) -> list[MissingGradient]:
    """Return what keeps gradients from passing the bindings between the active variables and a target.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings in order, those of branches among them.
    active : Collection[relax.Var]
        What depends on the variables that are differentiated with respect to.
    target : relax.Expr
        What is differentiated.
    constants : Collection[str]
        Operators that count as constants here.
    """
    wanted = useful(bindings, target, constants)
    found = [
        MissingGradient(binding.var.name, *obstacle, _span(binding))
        for binding in bindings
        if binding.var in active
        and binding.var in wanted
        # A variable that is differentiated with respect to is active whatever it was computed from.
        and any(variable in active for variable in used(binding.value))
        for obstacle in _obstacles(binding.value)
    ]
    # What a function lacks that is called twice is one gap.
    return [each for i, each in enumerate(found) if each.span is None or each not in found[:i]]


def _obstacles(value: relax.Expr) -> Iterator[tuple[str, str]]:
    """Yield what keeps gradients from passing a value: what is called, and why it has no gradient."""
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
    """Return where a span begins, as compilers write it."""
    if not isinstance(span, tvm.ir.Span):
        return str(span)
    return f"{span.source_name.name}:{span.line}:{span.column}"


def _span(binding: relax.Binding) -> tvm.ir.Span | None:
    return binding.value.span if binding.value.span is not None else binding.var.span
