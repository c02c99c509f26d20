"""The gradient coverage of operators, and the missing gradients of a function."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Op

from .autodiff.missing import MissingGradient, missing_gradients
from .ir.partials import is_no_grad
from .registry import Classification, classify, operators
from .testing.samples import sampled_operators, samples

__all__ = [
    "MissingGradient",
    "OperatorCoverage",
    "coverage",
    "coverage_of",
    "differentiable_arguments",
    "missing_gradients",
]


@dataclass(frozen=True)
class OperatorCoverage:
    """The gradient of one operator.

    Attributes
    ----------
    classification : relax_grad.registry.Classification
        Whether it exists and whose it is, or why there is none.
    arguments : tuple[str, ...]
        The names of the arguments that get a gradient.
    """

    classification: Classification
    arguments: tuple[str, ...]


def coverage() -> list[OperatorCoverage]:
    """Return the coverage of every ``relax.*`` operator of the running TVM, in order of name."""
    return [coverage_of(op_name) for op_name in operators()]


def coverage_of(op_name: str) -> OperatorCoverage:
    """Return the coverage of one operator.

    Raises
    ------
    ValueError
        If the running TVM has no such operator.

    Examples
    --------
    >>> from relax_grad.coverage import coverage_of
    >>> found = coverage_of("relax.nn.conv2d")
    >>> found.classification.kind, found.arguments
    ('differentiable', ('data', 'weight'))
    """
    classification = classify(op_name)
    arguments: tuple[str, ...] = ()
    if classification.kind == "differentiable" and classification.rule != "the pass":
        arguments = differentiable_arguments(op_name)
    return OperatorCoverage(classification, arguments)


def differentiable_arguments(op_name: str) -> tuple[str, ...]:
    """Return the names of the arguments that get a gradient in at least one of the operator's
    samples.

    Every sample's call is passed to the operator's rule; nothing is compiled. A sample that TVM's
    or a user's rule rejects contributes no argument.

    Raises
    ------
    ValueError
        If the running TVM has no such operator.

    Examples
    --------
    >>> from relax_grad.coverage import differentiable_arguments
    >>> differentiable_arguments("relax.take")
    ('x',)
    """
    classification = classify(op_name)  # raises for an unknown operator
    if classification.kind == "unclassified" or op_name not in sampled_operators():
        return ()
    places: set[int] = set()
    count = 0
    for sample in samples(op_name):
        try:
            of_calls = sample.partials()
        except Exception:
            # The samples are made for the rules of relax_grad. Another rule, as after uninstall(),
            # may reject them.
            if classification.rule == "relax_grad":
                raise
            continue
        for partials in of_calls:
            count = max(count, len(partials))
            places |= {i for i, partial in enumerate(partials) if not is_no_grad(partial)}
    names = [argument.name for argument in Op.get(op_name).arguments]
    names += [f"argument {i}" for i in range(len(names), count)]
    return tuple(names[i] for i in sorted(places))
