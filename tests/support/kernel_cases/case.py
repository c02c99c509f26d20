"""A call of an operator that a kernel replaces, and the kernel of this call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from programs import build, tensor
from tvm import relax, tirx
from tvm.ir import Op
from tvm.tirx.analysis import undefined_vars

from relax_grad.cpu.dispatch.registry import operators_in_halves
from relax_grad.ir.compat import Analyzer
from relax_grad.ir.expressions import substitute
from relax_grad.transform import DispatchKernels

#: The extent that may be symbolic.
N = "n"

_CALL_TIR = Op.get("relax.call_tir")


@dataclass(frozen=True)
class KernelCase:
    """A call that becomes a kernel.

    Attributes
    ----------
    op : str
        The operator.
    shapes : Sequence[tuple]
        The shapes of the parameters, in which :data:`N` stands for the batch.
    body : Callable
        A function of the batch and the parameters that returns the call.
    integers : str or Mapping[int, str]
        The dtype of the last parameter, or of parameters by their places, if it is not float32.
    detail : str
        A part of the name.
    kernels : tuple[int, int]
        The number of calls of kernels in the module, and the place of the one to run.
    differs_in_halves : bool
        Whether the kernel in half precision computes more calls than the one in float32.
    """

    op: str
    shapes: Sequence[tuple]
    body: Callable
    integers: str | Mapping[int, str] = ""
    detail: str = ""
    kernels: tuple[int, int] = (1, 0)
    differs_in_halves: bool = False

    @property
    def name(self) -> str:
        integers = self.integers if isinstance(self.integers, str) else ""
        return " ".join(filter(None, [self.op, str(self.shapes[0]), integers, self.detail]))

    def dtype(self, place: int, dtype: str = "float32") -> str:
        """Return the dtype of a parameter, where that of floats is given."""
        if isinstance(self.integers, str):
            return (place == len(self.shapes) - 1 and self.integers) or dtype
        return dtype if self.integers.get(place, "float32") == "float32" else self.integers[place]

    def takes(self, dtype: str) -> bool:
        """Tell whether the kernels of the operator take floats of a dtype in half precision."""
        refused = dtype == "bfloat16" and self.op == "relax.nn.group_norm"  # by TVM
        is_alone = self.kernels == (1, 0)  # products share panels in float32 only
        return self.op in operators_in_halves() and is_alone and not refused

    def module(self, batch: int | None, dtype: str = "float32") -> tvm.IRModule:
        """Return the module of the call with floats of a dtype; if ``batch`` is None, the batch is
        symbolic."""
        n = tirx.Var("n", "int64") if batch is None else batch
        params = [
            tensor(
                f"x{i}", [n if extent == N else extent for extent in shape], self.dtype(i, dtype)
            )
            for i, shape in enumerate(self.shapes)
        ]
        return build(params, lambda _, *arguments: self.body(n, *arguments))


@dataclass(frozen=True)
class KernelCall:
    """The kernel of a case, and the shapes and dtypes of its inputs and outputs."""

    case: KernelCase
    function: tirx.PrimFunc
    inputs: Sequence[tuple]
    outputs: Sequence[tuple]

    def at(self, batch: int) -> tuple[list, list]:
        """Return the shapes and dtypes of inputs and outputs for a value of the batch."""

        def extent(expr: tirx.Expr) -> int:
            values = dict.fromkeys(undefined_vars(expr), tirx.const(batch, "int64"))
            return int(Analyzer().simplify(substitute(expr, values)))

        def static(tensors):
            return [(tuple(map(extent, shape)), dtype) for shape, dtype in tensors]

        return static(self.inputs), static(self.outputs)


def kernel_of(case: KernelCase, target, batch: int | None, dtype: str = "float32") -> KernelCall:
    """Return the kernel of a case for a target, with floats of a dtype."""
    module = DispatchKernels(target)(case.module(batch, dtype))
    calls = [
        binding.value
        for block in module["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op == _CALL_TIR
    ]
    number, place = case.kernels
    assert len(calls) == number, f"{case.name} has {len(calls)} kernels"
    call = calls[place]
    kinds = call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty]
    inputs, outputs = (
        [(list(kind.shape.values), str(kind.dtype.dtype)) for kind in types]
        for types in ([argument.ty for argument in call.args[1].fields], kinds)
    )
    return KernelCall(case, module[call.args[0]], inputs, outputs)
