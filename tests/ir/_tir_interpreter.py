"""An interpreter of tensor functions in NumPy, before and after TVM's lowering passes."""

from __future__ import annotations

import operator

import numpy as np
from tvm import tirx
from tvm.ir import Call, Op

from relax_grad.ir.compat import loaded_buffer

_BINARY = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.truediv,
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Min": min, "Max": max,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip


def run(function: tirx.PrimFunc, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the arguments after a run of a function on copies of them.

    An access out of bounds is an error. The function may be lowered up to ``SplitHostDevice``.
    """
    machine = _Machine()
    copies = [array.copy() for array in arrays]
    machine.memory.update(zip(function.params, copies, strict=True))
    machine.run(function.body)
    return copies


class _Machine:
    def __init__(self) -> None:
        self.memory: dict[tirx.Var, np.ndarray] = {}
        self.names: dict[tirx.Var, object] = {}

    def run(self, stmt: tirx.Stmt) -> None:
        getattr(self, f"run_{type(stmt).__name__}")(stmt)

    def run_SeqStmt(self, stmt) -> None:
        for part in stmt.seq:
            self.run(part)

    def run_For(self, stmt) -> None:
        start, extent = self.value(stmt.min), self.value(stmt.extent)
        step = 1 if getattr(stmt, "step", None) is None else self.value(stmt.step)
        for i in range(start, start + extent, step):
            self.names[stmt.loop_var] = i
            self.run(stmt.body)

    def run_SBlockRealize(self, stmt) -> None:
        if not self.value(stmt.predicate):
            return
        block, is_first = stmt.block, True
        values = [self.value(value) for value in stmt.iter_values]
        for axis, value in zip(block.iter_vars, values, strict=True):
            start = self.value(axis.dom.min)
            assert start <= value < start + self.value(axis.dom.extent), (axis, value)
            is_first &= axis.iter_type != tirx.IterVar.CommReduce or value == start
            self.names[axis.var] = value
        for buffer in block.alloc_buffers:
            self.allocate(buffer)
        if block.init is not None and is_first:
            self.run(block.init)
        self.run(block.body)

    def allocate(self, buffer) -> None:
        shape = tuple(self.value(extent) for extent in buffer.shape)
        self.memory[buffer] = np.full(shape, 77, str(buffer.dtype))

    def run_AllocBuffer(self, stmt) -> None:
        self.allocate(stmt.buffer)

    def run_BufferStore(self, stmt) -> None:
        array, at = self.place(stmt.buffer, stmt.indices)
        array[at] = self.value(stmt.value)

    def run_IfThenElse(self, stmt) -> None:
        if self.value(stmt.condition):
            self.run(stmt.then_case)
        elif stmt.else_case is not None:
            self.run(stmt.else_case)

    def run_Bind(self, stmt) -> None:
        self.names[stmt.var] = self.value(stmt.value)

    def run_AttrStmt(self, stmt) -> None:
        self.run(stmt.body)

    def run_AssertStmt(self, stmt) -> None:
        assert self.value(stmt.condition)

    def run_DeclBuffer(self, stmt) -> None:
        source = stmt.data.args[0] if isinstance(stmt.data, Call) else stmt.data
        self.memory[stmt.buffer] = self.memory[source].reshape(-1)

    def run_Evaluate(self, stmt) -> None:
        self.value(stmt.value)

    def place(self, buffer, indices) -> tuple[np.ndarray, tuple[int, ...]]:
        array, at = self.memory[buffer], tuple(map(self.value, indices))
        assert all(0 <= i < size for i, size in zip(at, array.shape, strict=True)), (buffer, at)
        return array, at

    def value(self, expr):
        kind = type(expr).__name__
        if kind in ("IntImm", "FloatImm"):
            return int(expr) if kind == "IntImm" else float(expr.value)
        if kind == "Var":
            return self.names[expr]
        if kind in _BINARY:
            return _BINARY[kind](self.value(expr.a), self.value(expr.b))
        if kind in ("And", "Or"):
            first = self.value(expr.a)
            return (first and self.value(expr.b)) if kind == "And" else first or self.value(expr.b)
        if kind == "Not":
            return not self.value(expr.a)
        if kind in ("BufferLoad", "TensorLoad"):
            array, at = self.place(loaded_buffer(expr), expr.indices)
            return array[at]
        if kind == "Cast":
            return np.dtype(str(expr.ty.dtype)).type(self.value(expr.value)).item()
        if kind == "Select":
            taken = expr.true_value if self.value(expr.condition) else expr.false_value
            return self.value(taken)
        if kind == "Let":
            self.names[expr.var] = self.value(expr.value)
            return self.value(expr.body)
        assert isinstance(expr, Call), (kind, expr)
        assert isinstance(expr.op, Op), expr
        name = expr.op.name.rpartition(".")[2]
        if name == "if_then_else":
            return self.value(expr.args[1] if self.value(expr.args[0]) else expr.args[2])
        if name == "likely":
            return self.value(expr.args[0])
        raise AssertionError(f"unknown call {expr}")
