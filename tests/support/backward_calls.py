"""Calls of this package's backward operators, taken from differentiated samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.op import grad as backward
from tvm_ffi import structural_equal

from relax_grad.ir.compat import Analyzer, dtype_of
from relax_grad.op.declare import attributes
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve
from relax_grad.testing.samples import Sample, sampled_operators, samples

Extents = Callable[[Sequence], Sequence]

#: Operators under ``relax.grad`` that are not gradients: functions contain them, but no rule
#: returns them.
MARKERS = {
    f"relax.grad.{operator}"
    for operator in ("differentiable_once", "stop_gradient", "with_backward")
}


@dataclass(frozen=True)
class Found:
    """A call, and the sample whose gradient contains it."""

    call: relax.Call
    sample: Sample

    @property
    def name(self) -> str:
        return self.call.op.name


def own_operators() -> list[str]:
    """Return the backward operators whose builders are in this package."""
    return sorted(
        name
        for name in Op.list_op_names()
        if name.startswith("relax.grad.")
        and name not in MARKERS
        and getattr(builder_of(name), "__module__", "").startswith("relax_grad.")
    )


def builder_of(op_name: str) -> Callable | None:
    return getattr(backward, op_name.removeprefix("relax.grad."), None)


@functools.cache
def found_calls(*, symbolic: bool = False) -> dict[str, list[Found]]:
    """Return the calls of each operator that differ in attributes or argument types.

    They come from the first and second derivatives of the samples of all operators.
    """
    own = set(own_operators())
    calls: dict[str, list[Found]] = {name: [] for name in own}
    for op_name in sampled_operators():
        for sample in samples(op_name):
            if symbolic and not sample.symbolic:
                continue
            with sample.within():
                for call in _calls(sample, symbolic):
                    others = calls.get(call.op.name)
                    if others is not None and not any(_alike(call, item.call) for item in others):
                        others.append(Found(call, sample))
    return calls


def _calls(sample: Sample, symbolic: bool) -> Iterator[relax.Call]:
    """Yield the operator calls in the gradients of a sample."""
    _, function = resolve(sample.function or sample.op)
    names = sample.symbolic if symbolic else {}
    arguments = _program.make_arguments(sample.inputs, None, names)
    rng = np.random.default_rng(0)
    program = _program.first_order(function, arguments, sample.attrs, rng)
    wrt = [
        argument.name
        for argument in program.arguments
        if argument.is_float and not argument.name.startswith("cotangent")
    ]
    if sample.wrt is not None:
        wrt = [name if isinstance(name, str) else f"x{name}" for name in sample.wrt]
    differentiated = _program.differentiate(program, wrt)
    yield from calls_in(differentiated)
    if sample.order > 1:
        second = _program.next_order(program, differentiated, wrt, rng)
        names = (argument.name for argument in program.arguments)
        cotangents = [name for name in names if name.startswith("cotangent")]
        yield from calls_in(_program.differentiate(second, [*wrt, *cotangents]))


def calls_in(module: tvm.IRModule) -> list[relax.Call]:
    """Return the operator calls in all Relax functions of a module."""
    calls = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, Op):
            calls.append(expr)

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return calls


def _alike(call: relax.Call, other: relax.Call) -> bool:
    return structural_equal(call.attrs, other.attrs) and structural_equal(
        relax.TupleType([argument.ty for argument in call.args]),
        relax.TupleType([argument.ty for argument in other.args]),
        map_free_vars=True,
    )


def remade(
    call: relax.Call, dtype: str = "float64", extents: Extents = tuple, vdevice=None
) -> tuple[list[relax.Var], relax.Call]:
    """Rebuild a call on new variables, with another dtype in place of float64.

    Parameters
    ----------
    call : relax.Call
        The call.
    dtype : str
        The dtype that replaces float64.
    extents : Callable
        Maps the extents of an argument to new extents.
    vdevice : VDevice, optional
        The device of the tensors.

    Returns
    -------
    params : list[relax.Var]
        The tensor arguments.
    call : relax.Call
        The call from the operator's builder.
    """
    params: list[relax.Var] = []

    def argument(expr: relax.Expr):
        kind = expr.ty
        if isinstance(kind, relax.TupleType):
            fields = [relax.Var("field", field) for field in kind.fields]
            return relax.Tuple([argument(field) for field in getattr(expr, "fields", fields)])
        if isinstance(kind, relax.ShapeType):
            return relax.ShapeExpr(extents(kind.values))
        if isinstance(kind, relax.TensorType):
            params.append(relax.Var(f"x{len(params)}", _with(kind, dtype, extents, vdevice)))
            return params[-1]
        return extents([expr])[0]

    attrs = {
        name: dtype if name.endswith("dtype") and value == "float64" else value
        for name, value in attributes(call.attrs).items()
    }
    arguments = [argument(expr) for expr in call.args]
    return params, builder_of(call.op.name)(*arguments, **attrs)


def _with(kind: relax.TensorType, dtype: str, extents: Extents, vdevice=None) -> relax.TensorType:
    dtype = dtype if dtype_of(kind) == "float64" else dtype_of(kind)
    vdevice = vdevice or kind.vdevice
    if kind.shape is None:
        return relax.TensorType(None, dtype, vdevice, kind.ndim)
    return relax.TensorType(extents(kind.shape.values), dtype, vdevice)


def with_extents(kind: relax.Type, extents: Extents) -> relax.Type:
    """Return the type of a tensor or a tuple of tensors with other extents."""
    if isinstance(kind, relax.TupleType):
        return relax.TupleType([with_extents(field, extents) for field in kind.fields])
    return _with(kind, "float64", extents)


def at_sample(sample: Sample) -> Extents:
    """Return a function that replaces the symbolic extents of a sample by the extents of its
    inputs."""
    known = {
        name: sample.inputs[i].shape[axis]
        for i, names in sample.symbolic.items()
        for axis, name in names.items()
    }

    def extents(values):
        return [_evaluated(value, known) for value in values]

    return extents


def _evaluated(value, known: dict[str, int]):
    if not isinstance(value, relax.Expr):
        return value
    analyzer = Analyzer()
    for variable in tirx.analysis.undefined_vars(value):
        if variable.name in known:
            analyzer.bind(variable, tirx.const(known[variable.name], "int64"))
    return analyzer.simplify(value)


def add_function(
    module: tvm.IRModule, name: str, params: list[relax.Var], call: relax.Call
) -> None:
    """Add a function that returns the result of a call."""
    bb = relax.BlockBuilder()
    with bb.function(name, params):
        with bb.dataflow():
            result = bb.emit_output(call)
        bb.emit_func_output(result)
    module[name] = bb.get()[name]
