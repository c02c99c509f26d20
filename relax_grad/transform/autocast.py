"""Mixed precision: products in a half precision, with parameters and losses in float32."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm.relax import op

from .._validation import described
from ..ir.compat import constant_value, dtype_of
from ..ir.dataflow import in_dataflow
from ..ir.dtypes import HALVES
from ..ir.module import ModulePass, normalized, relax_function, with_functions
from ._precision import Precision, dtype_in, is_product, precision_of


@tvm.transform.module_pass(opt_level=0, name="relax_grad.Autocast")
class Autocast(ModulePass):
    """Compute matrix products, convolutions, attention and recurrent layers of float32 in a half
    precision, and what needs the range or the digits of float32 in float32.

    The operators have the dtypes of ``torch.autocast`` for CPUs, but for a few that Relax writes
    out: :ref:`the table <mixed-precision>` has all. Parameters and results of the function keep
    their types, so that parameters, their gradients and the loss are in float32. A function that
    the function calls keeps its dtypes, and so do tensors of float64. Run the pass before
    differentiation; ``train_step(..., precision="bf16")`` does.

    Parameters
    ----------
    dtype : str
        ``"bfloat16"`` or ``"float16"``.
    func_names : Sequence[str], optional
        The functions; by default all functions of Relax in the module.

    Raises
    ------
    ValueError
        If the dtype is another one, or the module has no such function.
    TypeError
        If the names are no list of strings.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    >>> w = relax.Var("w", relax.TensorType((8, 2), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x, w]):
    ...     with bb.dataflow():
    ...         y = bb.emit_output(relax.op.nn.relu(bb.emit(relax.op.matmul(x, w))))
    ...     _ = bb.emit_func_output(y)
    >>> main = transform.Autocast()(bb.get())["main"]
    >>> [str(binding.var.ty.dtype) for binding in main.body.blocks[0].bindings]
    ['bfloat16', 'bfloat16', 'bfloat16', 'bfloat16', 'float32']
    """

    def __init__(self, dtype: str = "bfloat16", func_names: Sequence[str] | None = None):
        if not isinstance(dtype, str) or dtype not in HALVES:
            raise ValueError(f'dtype must be "bfloat16" or "float16", but it is {described(dtype)}')
        is_list = isinstance(func_names, list | tuple) and all(
            isinstance(name, str) for name in func_names
        )
        if func_names is not None and not is_list:
            raise TypeError(
                'func_names must be a list of names of functions, such as ["main"], but it is '
                f"{described(func_names)}"
            )
        self._dtype, self._names = dtype, func_names

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        names = self._names
        if names is None:
            names = [
                variable.name_hint
                for variable, function in mod.functions_items()
                if isinstance(function, relax.Function)
            ]
        functions = {name: relax_function(mod, name) for name in names}
        cast = {name: _Caster(mod, self._dtype).cast(f) for name, f in functions.items()}
        return with_functions(mod, cast)


@relax.expr_functor.mutator
class _Caster(relax.PyExprMutator):
    """Casts the operands of the operators in a function.

    Parameters
    ----------
    mod : tvm.IRModule
        The module of the function.
    half : str
        The half precision.
    """

    def __init__(self, mod: tvm.IRModule, half: str):
        super().__init__(mod)
        self._half = half
        #: The casts of variables in the block, and in those around it.
        self._casts: dict[tuple[relax.Var, str], relax.Var] = {}

    def cast(self, function: relax.Function) -> relax.Function:
        """Return a function with the same parameters and the same type of the result."""
        body = _with_fixed_ends(function.body, function.params)
        seq = normalized(function.params, self.visit_expr(body))
        cast = relax.Function(
            function.params, seq, function.ret_ty, function.is_pure, function.attrs
        )
        return in_dataflow(cast)

    def visit_seq_expr_(self, seq: relax.SeqExpr) -> relax.Expr:
        outer, self._casts = self._casts, dict(self._casts)
        result = super().visit_seq_expr_(seq)
        self._casts = outer
        return result

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        outer, self._casts = self._casts, dict(self._casts)
        result = super().visit_dataflow_block_(block)
        self._casts = outer  # variables of the block end with it
        return result

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        value = self._of_dtype(self.visit_expr(binding.value), dtype_in(binding.value.ty))
        if not value.same_as(binding.value):
            binding = relax.MatchCast(binding.var, value, binding.ty)
        super().visit_match_cast_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        operands = [self._with_fields(self.visit_expr(operand)) for operand in call.args]
        precision = precision_of(call)
        if precision is Precision.KEPT:
            return self._call(call, list(map(self._restored, operands, call.args)))
        if _is_cast(call):
            return self._of_dtype(operands[0], dtype_of(call.ty))
        dtypes = _dtypes(operands)
        if not dtypes or "float64" in dtypes:
            return self._call(call, operands)
        if precision is Precision.HALF:
            return self._call(call, self._in(operands, self._half))
        if precision is Precision.DATA:
            others = list(map(self._restored, operands[1:], call.args[1:]))
            return self._call(call, [self._of_dtype(operands[0], self._half), *others])
        if precision is Precision.FLOAT32:
            return self._call(call, self._in(operands, "float32"))
        if precision is Precision.ROUNDED:
            return self._rounded(call, operands)
        return self._call(call, self._in(operands, self._widest(operands)))

    def _with_fields(self, operand: relax.Expr) -> relax.Expr:
        """Return a variable of a tuple as a tuple, whose fields can be cast."""
        if not isinstance(operand, relax.Var) or not isinstance(operand.ty, relax.TupleType):
            return operand
        count = range(len(operand.ty.fields))
        return relax.Tuple([self.builder_.emit(relax.TupleGetItem(operand, i)) for i in count])

    def _call(self, call: relax.Call, operands: Sequence[relax.Expr]) -> relax.Expr:
        return relax.Call(call.op, operands, call.attrs, call.ty_args, call.span)

    def _rounded(self, call: relax.Call, operands: list[relax.Expr]) -> relax.Expr:
        first = next(filter(None, (dtype_in(operand.ty) for operand in operands)), None)
        wide = self._call(call, self._in(operands, "float32"))
        if first not in HALVES:
            return wide
        result = self.builder_.emit(wide)
        if not isinstance(result.ty, relax.TupleType):  # cumsum may have another dtype
            return op.astype(result, first) if dtype_in(result.ty) == "float32" else result
        data, *others = (
            self.builder_.emit(relax.TupleGetItem(result, i)) for i in range(len(result.ty.fields))
        )
        return relax.Tuple([self._of_dtype(data, first), *others])  # statistics stay

    def _widest(self, operands: Sequence[relax.Expr]) -> str:
        """Return the dtype that operands are promoted to.

        Scalars beside tensors, and the vector that a model adds to a product, take the dtype of the
        tensors.
        """
        leaves = [leaf for operand in operands for leaf in _leaves(operand)]
        leaves = [leaf for leaf in leaves if dtype_in(leaf.ty)]
        tensors = [leaf for leaf in leaves if leaf.ty.ndim != 0] or leaves
        if len(tensors) == 2 and any(map(self._is_product, tensors)):
            tensors = [leaf for leaf in tensors if not _is_vector(leaf.ty)] or tensors
        dtypes = {dtype_in(leaf.ty) for leaf in tensors}
        return "float32" if "float32" in dtypes or len(dtypes) > 1 else str(dtypes.pop())

    def _is_product(self, expr: relax.Expr) -> bool:
        return isinstance(expr, relax.Var) and is_product(self.lookup_binding(expr))

    def _in(self, operands: Sequence[relax.Expr], dtype: str) -> list[relax.Expr]:
        """Return operands with all tensors of float32 and half precision in a dtype."""
        return [self._of_dtype(operand, dtype) for operand in operands]

    def _of_dtype(self, expr: relax.Expr, dtype: str | None) -> relax.Expr:
        if isinstance(expr.ty, relax.TupleType) and isinstance(expr, relax.Tuple):
            return relax.Tuple([self._of_dtype(field, dtype) for field in expr.fields])
        if dtype is None or dtype_in(expr.ty) in (None, dtype, "float64"):
            return expr
        value = constant_value(expr) if expr.ty.ndim == 0 else None
        if value is not None:
            return relax.const(float(value), dtype)
        if not isinstance(expr, relax.Var):
            return self.builder_.emit(op.astype(expr, dtype))
        key = expr, dtype
        if key not in self._casts:
            self._casts[key] = self.builder_.emit(op.astype(expr, dtype))
        return self._casts[key]

    def _restored(self, new: relax.Expr, old: relax.Expr) -> relax.Expr:
        """Return an operand in the dtypes that it has in the original function."""
        if isinstance(new, relax.Tuple):
            fields = old.fields if isinstance(old, relax.Tuple) else old.ty.fields
            return relax.Tuple(list(map(self._restored, new.fields, fields)))
        return self._of_dtype(new, dtype_in(old.ty if isinstance(old, relax.Expr) else old))


def _with_fixed_ends(seq: relax.SeqExpr, params: Sequence[relax.Var]) -> relax.SeqExpr:
    """Return a body with a cast of each result, and of each result of a branch, to the dtype that
    it has."""

    def changed(seq: relax.SeqExpr) -> relax.SeqExpr:
        blocks = [
            type(block)([of_binding(b) for b in block.bindings[:]]) for block in seq.blocks[:]
        ]
        bindings: list[relax.Binding] = []
        body = _cast_to_itself(seq.body, bindings)
        return relax.SeqExpr([*blocks, relax.BindingBlock(bindings)], body)

    def of_binding(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if not isinstance(value, relax.If):
            return binding
        branches = map(changed, (value.true_branch, value.false_branch))
        return relax.VarBinding(binding.var, relax.If(value.cond, *branches, value.span))

    return normalized(params, changed(seq))


def _cast_to_itself(expr: relax.Expr, bindings: list[relax.Binding]) -> relax.Expr:
    """Return a result with a cast of each tensor to its own dtype, and add the bindings."""

    def bound(value: relax.Expr, ty: relax.Type) -> relax.Var:
        bindings.append(relax.VarBinding(relax.Var("result", ty), value))
        return bindings[-1].var

    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_cast_to_itself(field, bindings) for field in expr.fields])
    if isinstance(expr.ty, relax.TupleType):
        fields = [bound(relax.TupleGetItem(expr, i), ty) for i, ty in enumerate(expr.ty.fields)]
        return relax.Tuple([_cast_to_itself(field, bindings) for field in fields])
    dtype = dtype_in(expr.ty)
    return expr if dtype is None else bound(op.astype(expr, dtype), expr.ty)


def _leaves(expr: relax.Expr) -> list[relax.Expr]:
    """Return the operands in an operand, which may be a tuple."""
    if isinstance(expr, relax.Tuple):
        return [leaf for field in expr.fields for leaf in _leaves(field)]
    return [expr]


def _dtypes(operands: Sequence[relax.Expr]) -> set[str]:
    """Return the dtypes of the floating-point tensors in operands."""
    found: set[str] = set()

    def visit(ty: relax.Type) -> None:
        if isinstance(ty, relax.TupleType):
            for field in ty.fields:
                visit(field)
        elif (dtype := dtype_in(ty)) is not None:
            found.add(dtype)

    for operand in operands:
        visit(operand.ty)
    return found


def _is_vector(ty: relax.TensorType) -> bool:
    """Tell whether at most one extent of a tensor is not 1."""
    if not isinstance(ty.shape, relax.ShapeExpr):
        return False
    return sum(not _is_one(extent) for extent in ty.shape.values) <= 1


def _is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _is_cast(call: relax.Call) -> bool:
    return call.op.name == "relax.astype" and dtype_in(call.args[0].ty) == dtype_of(call.ty)
