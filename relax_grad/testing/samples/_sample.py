"""The class of operator samples and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Op

from .. import _program
from .._arguments import resolve
from .._program import numpy_dtype
from ..check import GradientCase, GradientReport, check_gradients
from ..parity import TorchCase

SampleMaker = Callable[[np.random.Generator], "Iterator[Sample]"]

_makers: dict[str, SampleMaker] = {}

#: The default dtypes of the checks of a sample besides float64.
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Sample:
    """One call of an operator to check gradients on.

    Attributes
    ----------
    inputs : Sequence
        The arguments, as for :func:`relax_grad.testing.check_gradients`; floating-point arrays in
        float64.
    attrs : Mapping
        The attributes of the operator.
    function : str or Callable, optional
        The function to check instead of the operator, where the operator's builder does not
        accept the arguments in this form.
    wrt : Sequence[int or str], optional
        The inputs to differentiate with respect to; by default every floating-point array.
    order : int
        The highest order to check.
    tvm_order : int, optional
        The highest order to which ``relax.transform.Gradient`` differentiates this sample, if that
        is lower. That pass cannot differentiate a ``match_cast``, or zeros of a symbolic shape that
        it has inserted.
    symbolic : Mapping[int, Mapping[int, str]], optional
        The axes that can be symbolic, as in ``check_gradients``.
    torch : Callable, optional
        The same function in PyTorch. Takes the module ``torch`` and then a tensor for each array
        among the inputs (a tuple of tensors for a tuple), and returns a tensor or a tuple of
        tensors.
    dtypes : Sequence[str]
        The dtypes to check besides float64.
    smooth : bool
        False at a kink of the function: finite differences are meaningless there, so the only
        reference is PyTorch.
    within : Callable
        Returns the context manager for checks of the sample, for an operator that needs more than a
        device to run.
    note : str
        A description of the special case.
    op : str
        The operator; filled in by :func:`samples`.
    """

    inputs: Sequence
    attrs: Mapping = field(default_factory=dict)
    function: str | Callable | None = None
    wrt: Sequence[int | str] | None = None
    order: int = 2
    tvm_order: int | None = None
    symbolic: Mapping[int, Mapping[int, str]] | None = None
    torch: Callable | None = None
    dtypes: Sequence[str] = DTYPES
    smooth: bool = True
    within: Callable[[], AbstractContextManager] = nullcontext
    note: str = ""
    op: str = ""

    def check(
        self,
        *,
        symbolic: bool = False,
        dtype: str = "float64",
        order: int | None = None,
        through: str = "relax_grad",
        **settings: Any,
    ) -> GradientReport:
        """Check the gradient of this sample; ``settings`` are those of ``check_gradients``.

        ``order`` is by default the sample's own. It is limited to the highest order of the pass.
        """
        order = self.limited_order(order, through)
        with self.within():
            return check_gradients(
                self.function or self.op,
                cast(self.inputs, dtype),
                wrt=self.wrt,
                order=order,
                through=through,
                symbolic=self.symbolic if symbolic else None,
                **settings,
                **self.attrs,
            )

    def limited_order(self, order: int | None, through: str) -> int:
        """Return the order, by default the sample's own, but at most the highest one of the
        pass."""
        order = self.order if order is None else order
        return min(order, self.tvm_order or order) if through == "tvm" else order

    def case(
        self, *, through: str = "relax_grad", order: int | None = None, dtypes: Any = ()
    ) -> Any:
        """Return the sample as a case of ``check_many_gradients``, in float64; ``order`` is as for
        :meth:`check`."""
        order = self.limited_order(order, through)
        return GradientCase(
            self.function or self.op,
            self.inputs,
            self.attrs,
            self.wrt,
            order,
            dtypes,
            None,
            through,
        )

    def torch_case(self) -> TorchCase:
        """Return the sample as a comparison with PyTorch."""
        assert self.torch is not None, "the sample has no function of PyTorch"
        return TorchCase(self.function or self.op, self.inputs, self.torch, self.attrs, self.wrt)

    def partials(self) -> list[list[relax.Expr]]:
        """Return the partials of the operator's rule for each of its calls in the sample's
        function."""
        _, function = resolve(self.function or self.op)
        arguments = _program.make_arguments(self.inputs, None, {})
        rng = np.random.default_rng(0)
        main = _program.first_order(function, arguments, self.attrs, rng).module["main"]
        op = Op.get(self.op)
        rule = op.get_attr("FPrimalGradient")
        results = []
        for binding in main.body.blocks[0].bindings:
            if isinstance(binding.value, relax.Call) and binding.value.op == op:
                grad = relax.Var("output_grad", binding.var.ty)
                bb = relax.BlockBuilder()
                with bb.function("probe", [*main.params, grad]):
                    with bb.dataflow():
                        results.append(list(rule(binding.var, binding.value, grad, bb)))
                        bb.emit_output(grad)
                    bb.emit_func_output(grad)
        return results


def register_samples(op: str) -> Callable[[SampleMaker], SampleMaker]:
    """Register the samples of an operator: a decorator for a function from a NumPy generator to
    samples.

    Raises
    ------
    TypeError, ValueError
        If the operator's name is not a string, the decorated object is not a function, or the
        operator has samples already.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.testing.samples import Sample, register_samples, samples
    >>> from tvm import relax
    >>> @register_samples("relax.my_sine")
    ... def sine(rng):
    ...     return [Sample([rng.normal(size=(3,))], function=relax.op.sin)]
    >>> [sample.op for sample in samples("relax.my_sine")]
    ['relax.my_sine']
    """
    if not isinstance(op, str):
        raise TypeError(f"op must be the name of an operator, but it is {op!r}")

    def decorate(maker: SampleMaker) -> SampleMaker:
        if not callable(maker):
            raise TypeError(
                f"the maker of the samples of {op} must be a function, but it is {maker!r}"
            )
        if op in _makers:
            raise ValueError(f"{op} has samples already")
        _makers[op] = maker
        return maker

    return decorate


def sampled_operators() -> list[str]:
    """Return the names of the operators that have samples.

    Examples
    --------
    >>> from relax_grad.testing.samples import sampled_operators
    >>> "relax.tanh" in sampled_operators()
    True
    """
    return sorted(_makers)


def samples(op: str) -> list[Sample]:
    """Return the samples of an operator; the same ones at every call.

    Raises
    ------
    ValueError
        If the operator has no samples.

    Examples
    --------
    >>> from relax_grad.testing.samples import samples
    >>> report = samples("relax.tanh")[0].check(order=1)
    >>> report.operator, report.order
    ('relax.tanh', 1)
    """
    if not isinstance(op, str) or op not in _makers:
        raise ValueError(f"there are no samples of an operator named {op!r}")
    return [replace(sample, op=op) for sample in _makers[op](np.random.default_rng(0))]


def cast(inputs: Any, dtype: str) -> Any:
    """Cast the floating-point arrays in (nested) inputs."""
    if isinstance(inputs, np.ndarray) and np.issubdtype(inputs.dtype, np.floating):
        return inputs.astype(numpy_dtype(dtype))
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(cast(value, dtype) for value in inputs)
    return inputs
