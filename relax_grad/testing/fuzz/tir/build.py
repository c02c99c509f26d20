"""The conversion of programs to modules of TVM."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tvm
import tvm.tirx.script.builder as T
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder

from . import language as ir
from .operations import CAST, OPERATIONS
from .operators import OPERATORS


def build(program: ir.Program, name: str = "main") -> tvm.IRModule:
    """Return the module of a program; the name of the Relax function is a prefix of the others."""
    builder = relax.BlockBuilder()
    called = {step.function for step in program.steps if isinstance(step, ir.Call)}
    functions = {
        function.name: builder.add_func(
            _Function(function, program.is_symbolic).built(), f"{name}_{function.name}"
        )
        for function in program.functions
        if function.name in called
    }
    n = tirx.Var("n", "int64")

    def kind(tensor: ir.Tensor) -> relax.TensorType:
        shape = [_extent(size, n, program.is_symbolic) for size in tensor.shape]
        return relax.TensorType(shape, tensor.dtype)

    values: dict[str, relax.Expr] = {p.name: relax.Var(p.name, kind(p)) for p in program.params}
    with builder.function(name, list(values.values())):
        with builder.dataflow() if program.is_dataflow else contextlib.nullcontext():
            for step in program.steps:
                operands = [values[operand] for operand in step.operands]
                if isinstance(step, ir.Operator):
                    outputs = [_applied(builder, step, operands, kind(step.results[0]).shape)]
                else:
                    kinds = [kind(result) for result in step.results]
                    outputs = _called(builder, step, functions[step.function], operands, kinds)
                values.update(zip((r.name for r in step.results), outputs, strict=True))
            results = [values[result] for result in program.results]
            if program.is_dataflow:
                results = [builder.emit_output(result) for result in results]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()


def source(program: ir.Program) -> str:
    """Return the module of a program as TVMScript."""
    return build(program).script(show_meta=False)


def _extent(size: int, n: tirx.Var, is_symbolic: bool) -> tirx.PrimExpr | int:
    if not is_symbolic or size % ir.BATCH:
        return size
    return n if size == ir.BATCH else n * (size // ir.BATCH)


def _applied(
    builder: relax.BlockBuilder, step: ir.Operator, operands: list, shape: Sequence
) -> relax.Var:
    call = OPERATORS[step.name].apply(shape, *operands, *step.attributes)
    return builder.emit(call, step.results[0].name)


def _called(
    builder: relax.BlockBuilder,
    call: ir.Call,
    function: tvm.ir.GlobalVar,
    operands: list,
    kinds: list,
) -> list[relax.Expr]:
    kind = kinds[0] if len(kinds) == 1 else kinds
    if call.inplace:
        result = relax.op.call_tir_inplace(function, operands, list(call.inplace), kind)
    else:
        result = relax.op.call_tir(function, operands, kind)
    names = [result.name for result in call.results]
    if len(kinds) == 1:
        return [builder.emit(result, names[0])]
    result = builder.emit(result, "_".join(names))
    elements = [relax.TupleGetItem(result, i) for i in range(len(kinds))]
    return [builder.emit(*pair) for pair in zip(elements, names, strict=True)]


class _Function:
    """The conversion of one function of TIR."""

    def __init__(self, function: ir.PrimFunc, is_symbolic: bool):
        self.function, self.is_symbolic = function, is_symbolic
        self.n = tirx.Var("n", "int64")
        self.buffers: dict[str, tirx.Buffer] = {}
        self.names: dict[str, tirx.PrimExpr] = {}

    def built(self) -> tirx.PrimFunc:
        function = self.function
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_name(function.name)
            for tensor in (*function.inputs, *function.outputs):
                buffer = T.buffer(self.shape(tensor), tensor.dtype, layout=None)
                self.buffers[tensor.name] = T.arg(tensor.name, buffer)
            self.allocate(function.allocated)
            self.write(function.body)
        return builder.get()

    def shape(self, buffer: ir.Buffer) -> list:
        return [_extent(size, self.n, self.is_symbolic) for size in buffer.shape]

    def allocate(self, buffers: Sequence[ir.Buffer]) -> None:
        for tensor in buffers:
            buffer = T.sblock_alloc_buffer(self.shape(tensor), tensor.dtype, layout=None)
            self.buffers[tensor.name] = IRBuilder.name(tensor.name, buffer)

    # Statements

    def write(self, statements: Sequence) -> None:
        for statement in statements:
            getattr(self, f"write_{type(statement).__name__.lower()}")(statement)
        if not statements:
            T.evaluate(0)

    def write_store(self, store: ir.Store) -> None:
        indices = [self.expr(index) for index in store.indices]
        T.buffer_store(self.buffers[store.buffer], self.expr(store.value), indices)

    def write_bind(self, bind: ir.Bind) -> None:
        self.names[bind.name] = IRBuilder.name(bind.name, T.Bind(self.expr(bind.value)))

    def write_if(self, statement: ir.If) -> None:
        with T.If(self.expr(statement.condition)):
            with T.Then():
                self.write(statement.body)
            if statement.otherwise:
                with T.Else():
                    self.write(statement.otherwise)

    def write_while(self, loop: ir.While) -> None:
        with T.While(self.expr(loop.condition)):
            self.write(loop.body)

    def write_for(self, loop: ir.For) -> None:
        start, extent = self.expr(loop.start), self.expr(loop.extent)
        with getattr(T, loop.kind)(start, start + extent) as variable:
            self.names[loop.name] = IRBuilder.name(loop.name, variable)
            self.write(loop.body)

    def write_block(self, block: ir.Block) -> None:
        with T.sblock(block.name):
            axes = {}
            for spec in block.axes:
                axis = getattr(T.axis, spec.kind)(self.domain(spec), self.expr(spec.value))
                axes[spec.name] = IRBuilder.name(spec.name, axis)
            if block.where is not None:
                T.where(self.expr(block.where))
            # The bindings above refer to the names of the loops, so the axes are named only now.
            self.names.update(axes)
            self.allocate(block.allocated)
            if block.init:
                with T.init():
                    self.write(block.init)
            self.write(block.body)

    def domain(self, axis: ir.Axis) -> Any:
        start, extent = self.expr(axis.start), self.expr(axis.extent)
        # A constant start beside a symbolic extent would have another dtype.
        return extent if isinstance(start, int) and not start else (start, start + extent)

    # Expressions

    def expr(self, expr: Any) -> tirx.PrimExpr | int:
        return getattr(self, f"expr_{type(expr).__name__.lower()}")(expr)

    def expr_const(self, expr: ir.Const) -> tirx.PrimExpr | int:
        return expr.value if expr.dtype == ir.INDEX else tirx.const(expr.value, expr.dtype)

    def expr_size(self, expr: ir.Size) -> tirx.PrimExpr | int:
        return _extent(expr.size, self.n, self.is_symbolic)

    def expr_name(self, expr: ir.Name) -> tirx.PrimExpr | int:
        return self.names[expr.name]

    def expr_load(self, expr: ir.Load) -> tirx.PrimExpr | int:
        buffer = self.buffers[expr.buffer]
        return buffer[tuple(self.expr(index) for index in expr.indices)]

    def expr_let(self, expr: ir.Let) -> tirx.PrimExpr | int:
        variable = tirx.Var(expr.name, expr.value.dtype)
        value = self.expr(expr.value)
        self.names[expr.name] = variable
        return tirx.Let(variable, value, self.expr(expr.body))

    def expr_op(self, expr: ir.Op) -> tirx.PrimExpr | int:
        args = [self.expr(arg) for arg in expr.args]
        if expr.name == CAST:
            return tirx.Cast(expr.dtype, args[0])
        return OPERATIONS[expr.name].build(*args)
