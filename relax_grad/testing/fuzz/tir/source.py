"""Programs as TVMScript."""

from __future__ import annotations

from . import language as ir
from .operations import CAST, CHOICE, OPERATIONS
from .operators import OPERATORS


def source(program: ir.Program, prefix: str = "main") -> str:
    """Return the module of a program; ``prefix`` is its Relax function, and begins the names of the others."""
    writer = _Writer(program, prefix)
    lines = ["@I.ir_module(s_tir=True)", "class Module:"]
    called = {step.function for step in program.steps if isinstance(step, ir.Call)}
    for function in program.functions:
        if function.name in called:
            lines += _indented(writer.function(function), 1)
    lines += _indented(writer.main(), 1)
    return "\n".join(lines) + "\n"


class _Writer:
    def __init__(self, program: ir.Program, prefix: str):
        self.program, self.prefix = program, prefix

    def size(self, size: int) -> str:
        if not self.program.is_symbolic or size % ir.BATCH or not size:
            return str(size)
        times = size // ir.BATCH
        return "n" if times == 1 else f"n * {times}"

    def shape(self, shape: tuple[int, ...], quote: str = "") -> str:
        dims = [
            f"{quote}{self.size(size)}{quote}" if not self.size(size).isdigit() else str(size)
            for size in shape
        ]
        return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"

    def is_symbolic(self, shape: tuple[int, ...]) -> bool:
        return any("n" in self.size(size) for size in shape)

    # The Relax function

    def main(self) -> list[str]:
        program = self.program
        params = ", ".join(
            f'{p.name}: R.Tensor({self.shape(p.shape, chr(34))}, "{p.dtype}")'
            for p in program.params
        )
        head = ["n = T.int64()"] if any(self.is_symbolic(p.shape) for p in program.params) else []
        lines = [line for step in program.steps for line in self.step(step)]
        names = ", ".join(program.results)
        if program.is_dataflow:
            lines = ["with R.dataflow():", *_indented([*lines, f"R.output({names})"], 1)]
        result = names if len(program.results) == 1 else f"({names})"
        body = [*head, "cls = Module", *lines, f"return {result}"]
        # What writes in place is pure to Relax.
        return ["@R.function", f"def {self.prefix}({params}):", *_indented(body, 1)]

    def step(self, step: ir.Call | ir.Operator) -> list[str]:
        if isinstance(step, ir.Operator):
            attributes = [
                self.shape(each) if step.name == "reshape" else repr(each)
                for each in step.attributes
            ]
            text = OPERATORS[step.name].text.format(*step.operands, *attributes)
            return [f"{step.results[0].name} = {text}"]
        operands = f"({', '.join(step.operands)}{',' if len(step.operands) == 1 else ''})"
        kinds = [f'R.Tensor({self.shape(r.shape)}, "{r.dtype}")' for r in step.results]
        kind = kinds[0] if len(kinds) == 1 else f"[{', '.join(kinds)}]"
        callee = f"cls.{self.prefix}_{step.function}"
        if any(index >= 0 for index in step.inplace):
            indices = f"inplace_indices={list(step.inplace)}"
            text = f"R.call_tir_inplace({callee}, {operands}, {indices}, out_ty={kind})"
        else:
            text = f"R.call_tir({callee}, {operands}, out_ty={kind})"
        if len(step.results) == 1:
            return [f"{step.results[0].name} = {text}"]
        whole = f"t_{step.results[0].name}"
        elements = [f"{r.name} = {whole}[{i}]" for i, r in enumerate(step.results)]
        return [f"{whole} = {text}", *elements]

    # Functions

    def function(self, function: ir.PrimFunc) -> list[str]:
        params, matched, is_symbolic = [], [], False
        for buffer in (*function.inputs, *function.outputs):
            if self.is_symbolic(buffer.shape):
                is_symbolic = True
                params.append(f"p_{buffer.name}: T.handle")
                matched.append(
                    f"{buffer.name} = T.match_buffer(p_{buffer.name}, "
                    f'{self.shape(buffer.shape)}, "{buffer.dtype}")'
                )
            else:
                params.append(
                    f'{buffer.name}: T.Buffer({self.shape(buffer.shape)}, "{buffer.dtype}")'
                )
        body = ["n = T.int64()"] if is_symbolic else []
        body += [*matched, *self.allocated(function.allocated), *self.body(function.body)]
        return [
            "@T.prim_func(private=True, s_tir=True)",
            f"def {self.prefix}_{function.name}({', '.join(params)}):",
            *_indented(body, 1),
        ]

    def allocated(self, buffers: tuple[ir.Buffer, ...]) -> list[str]:
        return [
            f'{b.name} = T.sblock_alloc_buffer({self.shape(b.shape)}, "{b.dtype}")' for b in buffers
        ]

    def body(self, statements: tuple) -> list[str]:
        lines = [line for statement in statements for line in self.statement(statement)]
        return lines or ["T.evaluate(0)"]

    def statement(self, statement) -> list[str]:
        return getattr(self, f"write_{type(statement).__name__.lower()}")(statement)

    def write_store(self, store: ir.Store) -> list[str]:
        return [*_variables(store), f"{self.access(store)} = {self.expr(store.value)}"]

    def write_bind(self, bind: ir.Bind) -> list[str]:
        return [*_variables(bind), f"{bind.name}: T.let = {self.expr(bind.value)}"]

    def write_if(self, statement: ir.If) -> list[str]:
        lines = [f"if {self.expr(statement.condition)}:", *_indented(self.body(statement.body), 1)]
        if statement.otherwise:
            lines += ["else:", *_indented(self.body(statement.otherwise), 1)]
        return lines

    def write_while(self, loop: ir.While) -> list[str]:
        return [f"while {self.expr(loop.condition)}:", *_indented(self.body(loop.body), 1)]

    def write_for(self, loop: ir.For) -> list[str]:
        start, extent = self.expr(loop.start), self.expr(loop.extent)
        ends = extent if start == "0" else f"{start}, {start} + {extent}"
        return [f"for {loop.name} in T.{loop.kind}({ends}):", *_indented(self.body(loop.body), 1)]

    def write_block(self, block: ir.Block) -> list[str]:
        lines = [f"{axis.name} = {self.axis(axis)}" for axis in block.axes]
        if block.where is not None:
            lines.append(f"T.where({self.expr(block.where)})")
        lines += self.allocated(block.allocated)
        if block.init:
            lines += ["with T.init():", *_indented(self.body(block.init), 1)]
        lines += self.body(block.body)
        return [f'with T.sblock("{block.name}"):', *_indented(lines, 1)]

    def axis(self, axis: ir.Axis) -> str:
        start, extent = self.expr(axis.start), self.expr(axis.extent)
        domain = extent if start == "0" else f"({start}, {start} + {extent})"
        return f"T.axis.{axis.kind}({domain}, {self.expr(axis.value)})"

    def access(self, access: ir.Store | ir.Load) -> str:
        indices = ", ".join(map(self.expr, access.indices))
        return f"{access.buffer}[{indices or '()'}]"

    # Expressions

    def expr(self, expr) -> str:
        if isinstance(expr, ir.Const):
            value = bool(expr.value) if expr.dtype == "bool" else expr.value
            return str(value) if expr.dtype == ir.INDEX else f"T.{expr.dtype}({value})"
        if isinstance(expr, ir.Size):
            text = self.size(expr.size)
            return f"({text})" if " " in text else text
        if isinstance(expr, ir.Name):
            return expr.name
        if isinstance(expr, ir.Load):
            return self.access(expr)
        if isinstance(expr, ir.Let):
            value, body = self.expr(expr.value), self.expr(expr.body)
            return f"T.Let({body}, where={{{expr.name}: {value}}})"
        args = list(map(self.expr, expr.args))
        if expr.name == CAST:
            return f'T.Cast("{expr.dtype}", {args[0]})'
        if expr.name == CHOICE:
            return f"T.if_then_else({', '.join(args)})"
        return OPERATIONS[expr.name].text.format(*args)


def _variables(statement: ir.Store | ir.Bind) -> list[str]:
    """Return the declarations of the names that the expressions of a statement bind."""
    lets = [node for node in ir.nodes(statement) if isinstance(node, ir.Let)]
    return [f"{let.name} = T.{let.value.dtype}()" for let in lets]


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
