"""The gradient checker: differentiate, compile, run, and compare with independent references."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .._progress import shown
from .._validation import check_integer
from ..errors import GradientCheckError
from . import _program
from ._arguments import check_tolerance, resolve, select_wrt
from ._chain import Chain, by_name
from ._program import Program, numpy_dtype

#: Relative tolerance by dtype of a gradient against the one in float64.
TOLERANCES = {"float64": 2e-6, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1.5e-1}

#: Step and relative tolerance of the central differences, by the narrowest dtype among the inputs
#: and cotangents. The step balances truncation (its fourth power) against rounding (its inverse).
_DIFFERENCES = {
    "float64": (1e-4, 2e-6),
    "float32": (2e-2, 2e-3),
    "float16": (2.5e-1, 1e-1),
    "bfloat16": (5e-1, 3e-1),
}

#: The rounding error of the loss in the differences, relative to the size of the loss: tens of
#: epsilons.
_EPSILONS = {"float64": 1e-14, "float32": 4e-5, "float16": 2.5e-2, "bfloat16": 1.5e-1}

_DIRECTIONS = 3


@dataclass(frozen=True)
class GradientReport:
    """The measurements of a check that passed.

    Attributes
    ----------
    operator : str
        The checked operator or function.
    order : int
        The highest checked order.
    max_error : float
        The largest error, relative to the scale of the gradient.
    comparisons : int
        The number of compared numbers.
    """

    operator: str
    order: int
    max_error: float
    comparisons: int


def check_gradients(
    fn_or_op: str | Callable[..., relax.Expr],
    inputs: Sequence,
    *,
    wrt: Sequence[int | str] | None = None,
    order: int = 1,
    dtypes: str | Sequence[str] = (),
    through: str = "relax_grad",
    target: tvm.target.Target | str | Mapping | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    symbolic: Mapping[int, Mapping[int, str]] | None = None,
    seed: int = 0,
    **attrs: object,
) -> GradientReport:
    """Check the gradient of an operator, or of a function built of operators.

    Builds the function, differentiates it and compiles both for the target. The gradient in float64
    is compared with central differences in random directions. The gradient in the dtype of the
    inputs is compared element by element with the gradient in float64 at the same values. Each
    gradient must have the type and the shape of its input.

    Parameters
    ----------
    fn_or_op : str or Callable
        The name of an operator (``"relax.nn.conv2d"``), its builder (``relax.op.nn.conv2d``), or a
        function from Relax expressions to a Relax expression.
    inputs : Sequence
        The arguments. Arrays become tensor parameters, (nested) tuples of arrays become tuples, and
        other values are passed on unchanged. Integer arrays are held fixed.
    wrt : Sequence[int or str], optional
        The inputs to differentiate with respect to, by index, or by name (``"x0"``, or ``"x0_1"``
        for an element of a tuple); by default every floating-point array.
    order : int
        The highest order to check. From order 2 on, the gradient of the gradient is checked with
        respect to the inputs and to the output's cotangents.
    dtypes : str or Sequence[str]
        Further dtypes in which to check the first order. The floating-point inputs are cast to
        each.
    through : str
        The pass that applies the rules: ``"relax_grad"`` for
        :class:`relax_grad.transform.Gradient`, or ``"tvm"`` for ``relax.transform.Gradient``, which
        accepts no parameters in bfloat16 and supports few symbolic shapes at order 2.
    target : str or tvm.target.Target, optional
        The compilation target; by default LLVM for this machine without its optimizations, which
        take a third of the time.
    rtol, atol : float, optional
        Replace the default tolerances, which depend on the dtype (:data:`TOLERANCES`). A difference
        up to ``atol + rtol * scale`` is accepted, with the scale of the gradient. By default
        ``atol`` covers the rounding error of a gradient of 0.
    symbolic : Mapping[int, Mapping[int, str]], optional
        Names of symbolic extents, by input and axis: ``{0: {0: "n"}}`` makes the batch of the first
        input symbolic.
    seed : int
        The seed of the cotangents and directions.
    **attrs
        Attributes of the operator.

    Returns
    -------
    report : GradientReport
        The measurements.

    Raises
    ------
    GradientCheckError
        If a gradient is wrong. Names the operator, the argument, the worst element and both
        numbers.
    GradientError
        If the pass refuses the function or the result of a rule.
    TypeError, ValueError
        If an argument of the check itself is wrong, or no input can be differentiated with respect
        to.

    Examples
    --------
    >>> import numpy as np, relax_grad.testing
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.normal(size=(1, 3, 8, 8)), rng.normal(size=(4, 3, 3, 3))
    >>> report = relax_grad.testing.check_gradients("relax.nn.conv2d", [x, w], strides=2, order=2)
    >>> report.max_error < 1e-6
    True
    """
    case = GradientCase(
        fn_or_op,
        inputs,
        attrs,
        wrt=wrt,
        order=order,
        dtypes=dtypes,
        symbolic=symbolic,
        through=through,
    )
    name = fn_or_op if isinstance(fn_or_op, str) else getattr(fn_or_op, "__name__", "a function")
    with shown(f"checking the gradient of {name}"):
        prepared = PreparedGradients(case, through, rtol, atol, seed)
        return prepared.check(_program.compile_together(prepared.modules, target), 1)


@dataclass(frozen=True)
class GradientCase:
    """One check of :func:`relax_grad.testing.check_many_gradients`.

    Attributes
    ----------
    fn_or_op, inputs, wrt, order, dtypes, symbolic
        As for :func:`relax_grad.testing.check_gradients`.
    attrs : Mapping
        The attributes of the operator.
    through : str, optional
        The pass that applies the rules to this case; by default the pass of the call.
    """

    fn_or_op: str | Callable[..., relax.Expr]
    inputs: Sequence
    attrs: Mapping = field(default_factory=dict)
    wrt: Sequence[int | str] | None = None
    order: int = 1
    dtypes: str | Sequence[str] = ()
    symbolic: Mapping[int, Mapping[int, str]] | None = None
    through: str | None = None


class PreparedGradients:
    """A case with its differentiated programs, which are compiled together.

    Attributes
    ----------
    modules : list[tvm.IRModule]
        The programs of all orders and dtypes.
    description : str
        The shapes and attributes, for errors.
    """

    def __init__(
        self,
        case: GradientCase,
        through: str,
        rtol: float | None,
        atol: float | None,
        seed: int,
    ) -> None:
        self.name, function = resolve(case.fn_or_op)
        order = check_integer("order", case.order, 1)
        dtypes = _checked_dtypes(case.dtypes)
        for tolerance_name, tolerance in (("rtol", rtol), ("atol", atol)):
            if tolerance is not None:
                check_tolerance(tolerance_name, tolerance)
        self._check = _Check(self.name, rtol, atol, seed)
        self._order = order
        through = case.through or through

        def program(dtype: str | None) -> Program:
            symbolic = {} if case.symbolic is None else case.symbolic
            arguments = _program.make_arguments(case.inputs, dtype, symbolic)
            return _program.first_order(
                function, arguments, case.attrs, np.random.default_rng(seed)
            )

        own = program(None)
        try:
            reference = program("float64")
        except (TypeError, ValueError, tvm.error.InternalError):
            # The function holds a value of another dtype, such as a float32 constant.
            reference = own
        wrt = select_wrt(own.arguments, case.wrt)
        self._own = Chain(self.name, own, wrt, order=order, through=through, seed=seed)
        self._reference = self._own
        if _dtypes(own) != _dtypes(reference):
            self._reference = Chain(
                self.name, reference, wrt, order=order, through=through, seed=seed
            )
        self._narrow = [
            Chain(
                f"{self.name} in {dtype}", program(dtype), wrt, order=1, through=through, seed=seed
            )
            for dtype in dtypes
        ]
        self._chains = [
            self._own,
            *([self._reference] if self._reference is not self._own else []),
            *self._narrow,
        ]
        self.modules = [level.module for chain in self._chains for level in chain.levels]
        shapes = [a.value.shape for a in own.arguments if not a.name.startswith("cotangent")]
        self.description = f"shapes {shapes}, attributes {dict(case.attrs)}"

    def check(self, run: Callable, first: int) -> GradientReport:
        """Check the gradients; ``run`` executes the compiled modules, of which ``first`` is the
        number of the first."""
        for chain in self._chains:
            chain.bind(run, first)
            first += len(chain.levels)
        for level in range(1, self._order + 1):
            self._check.level(level, self._own, self._reference)
        for chain in self._narrow:
            self._check.elements(1, chain, self._reference)
        return GradientReport(
            self.name, self._order, self._check.max_error, self._check.comparisons
        )


def check_together(
    prepared: Sequence, target: tvm.target.Target | str | Mapping | None
) -> Iterator[GradientReport]:
    """Compile prepared checks in one module and run them. An error ends with the shapes and
    attributes of its case."""
    run = _program.compile_together([m for case in prepared for m in case.modules], target)

    def check(case: Any, first: int) -> GradientReport:
        try:
            return case.check(run, first)
        except GradientCheckError as error:
            raise GradientCheckError(f"{error} ({case.description})") from None

    first = 1
    for case in prepared:
        yield check(case, first)
        first += len(case.modules)


class _Check:
    """The state of one check: its settings and measurements."""

    def __init__(self, name: str, rtol: float | None, atol: float | None, seed: int) -> None:
        self.name, self.rtol, self.atol, self.seed = name, rtol, atol, seed
        self.max_error = 0.0
        self.comparisons = 0

    def level(self, order: int, own: Chain, reference: Chain) -> None:
        """Check one order."""
        if own is not reference:
            self.elements(order, own, reference)
        self._compare_directions(order, reference, reference.gradients(order))

    def elements(self, order: int, own: Chain, reference: Chain) -> None:
        """Compare the gradients in the function's own dtypes with the reference's gradients.

        The reference takes the values that are rounded to these dtypes. Otherwise a gradient in
        float32 would differ by the rounding error of a half-precision cotangent.
        """
        level = own.level(order)
        arguments = by_name(level.program)
        references = reference.gradients(order, level.program.values())
        pairs = zip(own.gradients(order), references, strict=True)
        for name, (gradient, expected) in zip(level.wrt, pairs, strict=True):
            if not expected.size:
                continue
            rtol = TOLERANCES[arguments[name].dtype] if self.rtol is None else self.rtol
            atol = rtol if self.atol is None else self.atol
            scale = np.abs(expected).max()
            error = np.abs(gradient - expected)
            self._record(error.max() / max(scale, 1.0), expected.size)
            if not np.all(error <= atol + rtol * scale):
                worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
                raise _failure(
                    own.name,
                    order,
                    name,
                    worst,
                    gradient[worst],
                    expected=expected[worst],
                    source="float64 gives",
                )

    def _compare_directions(
        self, order: int, chain: Chain, gradients: Sequence[np.ndarray]
    ) -> None:
        """Compare gradients with central differences along random directions, one input at a
        time."""
        program, wrt = chain.level(order).program, chain.level(order).wrt
        names = [argument.name for argument in program.arguments]
        dtype = min((a.dtype for a in program.arguments if a.is_float), key=_width)
        step, default = _DIFFERENCES[dtype]
        rtol = default if self.rtol is None else self.rtol
        size = max(1.0, abs(chain.loss(order, program.values())))
        rounding = _EPSILONS[dtype] * size / step
        atol = rounding if self.atol is None else self.atol
        rng = np.random.default_rng(self.seed)

        def difference(index: int, direction: np.ndarray) -> float:
            def at(offset: int) -> float:
                values = program.values()
                moved = values[index].astype("float64") + offset * step * direction
                values[index] = moved.astype(values[index].dtype)
                return chain.loss(order, values)

            # The fourth-order central difference.
            return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)

        for name, gradient in zip(wrt, gradients, strict=True):
            index = names.index(name)
            for _ in range(_DIRECTIONS if gradient.size else 0):
                direction = rng.choice([-1.0, 1.0], gradient.shape)
                direction *= rng.uniform(0.5, 1.0, gradient.shape)
                expected = difference(index, direction)
                slope = float(np.sum(gradient * direction))
                scale = float(np.sqrt(np.sum((gradient * direction) ** 2)))
                error = abs(slope - expected)
                self._record(error / max(scale, 1.0), 1)
                if not error <= atol + rtol * max(scale, abs(expected)):
                    self._locate(order, name, gradient, partial(difference, index))
                    raise GradientCheckError(
                        f"{self.name}, order {order}: the gradient of {name} along a random "
                        f"direction is {slope:.9g}, but central differences give {expected:.9g}"
                    )

    def _locate(
        self,
        order: int,
        name: str,
        gradient: np.ndarray,
        difference: Callable[[np.ndarray], float],
    ) -> None:
        """Find the element with the largest error and raise an error that names it."""
        worst: tuple[tuple[int, ...], float, float] = ((), math.nan, math.nan)
        largest = -1.0
        for position in np.ndindex(gradient.shape):
            direction = np.zeros(gradient.shape)
            direction[position] = 1.0
            expected = difference(direction)
            error = np.nan_to_num(abs(gradient[position] - expected), nan=np.inf)
            if error > largest:
                worst, largest = (position, float(gradient[position]), expected), error
        raise _failure(self.name, order, name, *worst, "central differences give")

    def _record(self, error: float, comparisons: int) -> None:
        self.max_error = max(self.max_error, float(error))
        self.comparisons += comparisons


def _failure(
    function: str,
    order: int,
    name: str,
    position: Sequence,
    actual: float,
    expected: float,
    source: str,
) -> GradientCheckError:
    at = ", ".join(map(str, (int(i) for i in position)))
    return GradientCheckError(
        f"{function}, order {order}: the gradient of {name} is wrong; the worst element is "
        f"[{at}], where the gradient is {actual:.9g}, but {source} {expected:.9g}"
    )


def _checked_dtypes(dtypes: str | Sequence[str]) -> list[str]:
    if not isinstance(dtypes, (str, Sequence)):
        raise TypeError(f"dtypes must be names of dtypes, but it is {dtypes!r}")
    dtypes = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    for dtype in dtypes:
        if dtype not in TOLERANCES:
            raise ValueError(f"dtypes must be among {', '.join(TOLERANCES)}, but one is {dtype!r}")
    return dtypes


def _dtypes(program: Program) -> list[str]:
    return [argument.dtype for argument in program.arguments]


def _width(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize
