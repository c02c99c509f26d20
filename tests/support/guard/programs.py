"""The programs of ``guard.py``: cases that are differentiated and lowered to kernels by either
pipeline."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax.backend.cpu_generic import pipeline
from tvm_ffi import structural_hash

from relax_grad.cpu import stages
from relax_grad.ir.compat import dtype_of
from relax_grad.registry import declarations, operators
from relax_grad.testing import _arguments, _chain, _program
from relax_grad.testing.samples import samples
from relax_grad.transform import DispatchKernels

from . import Case, SampleCase

__all__ = [
    "FLOAT_DTYPES",
    "TARGET",
    "Kernel",
    "Program",
    "build",
    "calls_ours",
    "details",
    "exposed",
    "legalize",
    "schedule",
]

#: Without LLVM's optimizer, as in the sweeps: its output is not under test.
TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

_OURS = {declared.op_name for declared in declarations() if declared.attr == "FLegalize"}
#: The pass that replaces sorts and scans by TVM's own kernels.
_SORT_SCAN = "relax.backend.DispatchSortScan"
_CALL_TIR, _CALL_TIR_INPLACE = Op.get("relax.call_tir"), Op.get("relax.call_tir_inplace")


@dataclass
class Kernel:
    """A PrimFunc of a legalized module.

    Attributes
    ----------
    name : str
        Its name in the module.
    outputs : int
        The number of output tensors, which follow the input tensors.
    ops : set[str]
        The operators that are legalized to it.
    hash : str
        Equal for structurally equal functions.
    parameters : Sequence
        Its parameters.
    workspaces : Sequence
        The buffers that it allocates, which :func:`exposed` makes parameters.
    guarded : Callable, optional
        The kernel with the workspaces as arguments; None for a kernel without workspaces.
    """

    name: str
    outputs: int
    ops: set[str] = field(default_factory=set)
    hash: str = ""
    parameters: Sequence = ()
    workspaces: Sequence = ()
    guarded: Callable | None = None

    @property
    def ours(self) -> bool:
        return bool(self.ops & _OURS)


@dataclass(frozen=True)
class Program:
    """A function of the module of a case, and its arguments."""

    case: Case | SampleCase
    module: tvm.IRModule
    values: Sequence[np.ndarray]


def details(case: Case | SampleCase) -> tuple:
    """Return function, inputs, attributes, wrt, order, symbolic and context of a case."""
    if isinstance(case, Case):
        return case.op, case.inputs, case.attrs, None, case.order, case.symbolic, nullcontext
    sample = samples(case.op)[case.number]
    order = min(sample.order, 2) if case.order is None else min(sample.order, case.order)
    symbolic = sample.symbolic if case.symbolic else None
    function = sample.function or sample.op
    return function, sample.inputs, sample.attrs, sample.wrt, order, symbolic, sample.within


def build(case: Case | SampleCase) -> Program:
    """Differentiate a case; only the function of the highest order is kept, which computes the
    lower ones."""
    function, inputs, attrs, wrt, order, symbolic, _ = details(case)
    _, function = _arguments.resolve(function)
    if not order:
        function = functools.partial(_in_floats, function)
    arguments = _program.make_arguments(inputs, None, symbolic or {})
    program = _program.first_order(function, arguments, attrs, np.random.default_rng(0))
    module, name = program.module, "main"
    if order:
        wrt = _arguments.select_wrt(program.arguments, wrt)
        *_, level = _chain.levels(program, wrt, order, seed=0)
        program, module, name = level.program, level.module, "main_adjoint"
    kept = {variable: f for variable, f in module.functions_items() if variable.name_hint != "main"}
    main = module[name].with_attr("global_symbol", "main")
    kept.pop(module.get_global_var(name), None)
    return Program(case, tvm.IRModule({**kept, "main": main}), program.values())


def _in_floats(function: Callable, *args, **attrs) -> relax.Expr:
    """Return a function's results as floats, for a program whose results must all be floats."""
    result = relax.BlockBuilder.current().emit(function(*args, **attrs))
    if not isinstance(result.ty, relax.TupleType):
        return _as_float(result)
    fields = (relax.TupleGetItem(result, i) for i in range(len(result.ty.fields)))
    emitted = [relax.BlockBuilder.current().emit(field) for field in fields]
    return relax.Tuple([_as_float(field) for field in emitted])


def _as_float(tensor: relax.Expr) -> relax.Expr:
    return tensor if dtype_of(tensor.ty) in FLOAT_DTYPES else relax.op.astype(tensor, "float32")


def calls_ours(module: tvm.IRModule) -> bool:
    """Tell whether a program calls an operator that relax_grad legalizes, other than the sum of the
    loss."""
    called = set()

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, Op):
            called.add(expr.op.name)

    relax.analysis.post_order_visit(module["main"], visit)
    return bool(called & _OURS - {"relax.sum"})


def legalize(module: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, Kernel]]:
    """Legalize a module as TVM's CPU pipeline does, without fusion; return it and its kernels by
    name."""
    ops = defaultdict(set)
    current = [_SORT_SCAN]  # TVM dispatches before it legalizes
    add_func = relax.BlockBuilder.add_func

    def traced_add_func(self, func, func_name):
        variable = add_func(self, func, func_name)
        ops[variable.name_hint].update(current[-1:])
        return variable

    def traced_legalize(bb, call):
        current.append(call.op.name)
        try:
            return call.op.get_attr("FLegalize")(bb, call)
        finally:
            current.pop()

    legalizable = [name for name in operators() if Op.get(name).get_attr("FLegalize") is not None]
    relax.BlockBuilder.add_func = traced_add_func
    try:
        with TARGET:
            dispatch = tvm.transform.Sequential(pipeline.library_dispatch_passes(TARGET))
            module = dispatch(module)
            module = relax.transform.LegalizeOps(dict.fromkeys(legalizable, traced_legalize))(
                module
            )
    finally:
        relax.BlockBuilder.add_func = add_func
    kernels = _kernels_of(module, ops)
    _rely_on_no_alignment(module, kernels)
    for name, kernel in kernels.items():
        kernel.parameters, kernel.workspaces = module[name].params, _workspaces(module[name])
    return module, kernels


def _kernels_of(module: tvm.IRModule, ops: Mapping[str, set]) -> dict[str, Kernel]:
    """Return the kernels that a module calls by ``call_tir`` or ``call_tir_inplace``, by name."""
    kernels = {}

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op in (_CALL_TIR, _CALL_TIR_INPLACE):
            name = expr.args[0].name_hint
            outputs = len(expr.ty.fields) if isinstance(expr.ty, relax.TupleType) else 1
            kernels[name] = Kernel(name, outputs, ops[name])

    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return kernels


def schedule(
    module: tvm.IRModule, target: tvm.target.Target
) -> tuple[tvm.IRModule, dict[str, Kernel]]:
    """Run relax_grad's pipeline on a module; return it and the kernels called after fusion, by
    name."""
    kernels, ops = {}, defaultdict(set)
    with target:
        for transform in stages.passes(target, DispatchKernels(target)):
            if transform.info.name == "relax_grad.WriteToLastRead":
                continue  # a result in the memory of an operand has no pages of its own
            if transform.info.name == "CallTIRRewrite":
                kernels = _kernels_of(module, ops)
            before = {variable.name_hint for variable in module.functions}
            module = transform(module)
            if transform.info.name == "DispatchSortScan":
                after = {variable.name_hint for variable in module.functions}
                ops.update({name: {_SORT_SCAN} for name in after - before})
    _rely_on_no_alignment(module, kernels)
    return module, kernels


def _rely_on_no_alignment(module: tvm.IRModule, kernels: Mapping[str, Kernel]) -> None:
    """Let kernels assume no alignment of their buffers: with TVM's 64 bytes there would be
    slack."""
    for name, kernel in kernels.items():
        text = tvm.ir.save_json(module[name])
        text = re.sub(r'"data_alignment": ?\d+', '"data_alignment":1', text)
        module[name] = tvm.ir.load_json(text)
        kernel.hash = str(structural_hash(module[name].without_attr("global_symbol")))


def _workspaces(function) -> Sequence:
    """Return the buffers that a kernel allocates for its whole run."""
    return list(function.body.block.alloc_buffers) if hasattr(function.body, "block") else []


def exposed(function):
    """Turn the buffers that a kernel allocates into parameters, so that they can be guarded too."""
    realize, block = function.body, function.body.block
    block = type(block)(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        [],
        block.match_buffers,
        block.annotations,
    )
    body = type(realize)(realize.iter_values, realize.predicate, block)
    params = [*function.params, *_workspaces(function)]
    return tirx.PrimFunc(params, body, function.ret_type).with_attrs(dict(function.attrs))
