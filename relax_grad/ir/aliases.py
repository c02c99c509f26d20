"""Alias analysis: tensors that share memory, and calls that write to memory that other bindings
read.

Relax values are immutable, except that some calls write to their arguments: ``call_tir_inplace``,
``call_inplace_packed``, calls of functions that do so, and calls of unknown functions. A pass that
moves a read or a write across such a call uses this analysis to check that the value stays the
same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import tvm
from tvm import relax
from tvm.ir import GlobalVar, Op

from .bindings import bindings_of, used
from .module import referred_to

# Names of operators instead of the operators: strings are compared several times as fast.
_CALL_TIR_INPLACE = "relax.call_tir_inplace"
_INPLACE = frozenset({_CALL_TIR_INPLACE, "relax.call_inplace_packed"})

#: Operators whose result is an alias of the first argument after lowering.
_RESHAPES = frozenset({"relax.reshape", "relax.memory.view"})

#: Operators whose result may be an alias of the first argument, immediately or after later passes.
_VIEWS = frozenset(
    f"relax.{name}"
    for name in (
        "reshape",
        "memory.view",
        "memory.ensure_zero_copy",
        "expand_dims",
        "squeeze",
        "flatten",
        "nn.batch_flatten",
        "to_vdevice",
        "hint_on_device",
        "builtin.stop_lift_params",
        "wrap_param",
        "grad.start_checkpoint",
        "grad.end_checkpoint",
        "grad.no_grad",
        "grad.stop_gradient",
        "grad.differentiable_once",
        "grad.with_backward",
    )
)

#: Operators that call unknown functions, which may return any of their arguments.
_UNKNOWN = frozenset(
    f"relax.{name}" for name in ("call_pure_packed", "make_closure", "invoke_pure_closure")
)

#: Impure operators that write to no tensor.
_HARMLESS = frozenset({"relax.print", "relax.assert_op"})

#: Operators that may write to their arguments although they count as pure.
_WRITING = _INPLACE | {"relax.invoke_pure_closure"}


def writes_in_place(value: relax.Expr) -> bool:
    """Tell whether a value is a call of an operator that writes to its arguments."""
    is_operator = type(value) is relax.Call and type(value.op) is Op
    return is_operator and value.op.name in _INPLACE


def may_write(value: relax.Expr, writers: Collection[GlobalVar] | None = None) -> bool:
    """Tell whether a value is a call that may write to memory that other bindings read.

    Parameters
    ----------
    value : relax.Expr
        The value of a binding.
    writers : Collection[GlobalVar], optional
        The functions that write to their arguments, see :func:`writing_functions`; by default all
        functions.
    """
    if type(value) is not relax.Call:
        return False
    callee = value.op
    if type(callee) is GlobalVar:
        return writers is None or callee in writers
    if type(callee) is not Op:  # a closure or an external function
        return True
    if callee.name in _WRITING:
        return True
    purity = callee.get_attr("FPurity")
    return purity is not None and not bool(purity) and callee.name not in _HARMLESS


def writing_functions(mod: tvm.IRModule) -> set[GlobalVar]:
    """Return the functions of a module that may write to their arguments when Relax functions call
    them directly.

    A tensor function writes to its results, which are arguments in a direct call.
    """
    functions = dict(mod.functions_items())
    writers = {v for v, f in functions.items() if not isinstance(f, relax.Function)}
    relax_functions = {v: f for v, f in functions.items() if isinstance(f, relax.Function)}
    if not any(
        may_write(binding.value, writers)
        for function in relax_functions.values()
        for binding in _all_bindings(function)
    ):
        return writers
    # By callee, the functions that write to their parameters if the callee writes to its arguments.
    through: dict[GlobalVar, set[GlobalVar]] = {}
    for variable, function in relax_functions.items():
        memory = Memory(function)
        callees = memory.writers_of(function.params)
        if any(callee is None or callee in writers for callee in callees):
            writers.add(variable)
        for callee in callees:
            if callee is not None:
                through.setdefault(callee, set()).add(variable)
    pending = list(writers)
    while pending:
        new = through.get(pending.pop(), set()) - writers
        writers |= new
        pending += new
    return writers


def kept_copies(mod: tvm.IRModule) -> dict[GlobalVar, Callable[[relax.Binding], bool]]:
    """Return, by function, a predicate that tells whether the result of a binding needs separate
    memory.

    If a view or a folded constant replaced a copy, a write to the copy would overwrite the source
    or the constant. A copy is kept if a call may write to the source or to the copy. If the module
    has such a call, a function that others call keeps all copies, because a caller may write to its
    results. Functions without a predicate have no restriction.
    """
    writers = writing_functions(mod)
    functions = {v: f for v, f in mod.functions_items() if isinstance(f, relax.Function)}
    kept: dict[GlobalVar, Callable[[relax.Binding], bool]] = {}
    for variable, function in functions.items():
        if any(may_write(binding.value, writers) for binding in _all_bindings(function)):
            memory = Memory(function, writers)
            kept[variable] = partial(_is_kept, memory)
    if kept:
        called = referred_to(functions.values()) & set(functions)
        kept.update(dict.fromkeys(called, lambda _: True))
    return kept


def _is_kept(memory: Memory, binding: relax.Binding) -> bool:
    return not (memory.is_settled(binding.var) and memory.is_settled(binding.value))


class Memory:
    """The memory of the tensors of one function, and the calls that write to it.

    Names, tuples, views and the results of in-place calls are aliases of their sources. Results of
    unknown functions may be aliases of each argument. The analysis takes linear time in the number
    of bindings, and a query takes logarithmic time.

    The analysis assumes that an argument that a call writes to is no alias of another parameter of
    the function. Relax requires this of callers.

    Parameters
    ----------
    function : relax.Function
        The function, with its branches and local functions.
    writers : Collection[GlobalVar], optional
        The functions that write to their arguments, see :func:`writing_functions`; by default all
        functions.
    """

    def __init__(self, function: relax.Function, writers: Collection[GlobalVar] | None = None):
        self._writers = writers
        self._parents: list[int] = []
        self._trees: dict[relax.Expr, object] = {}
        self._places: dict[relax.Var, tuple[int, int]] = {}
        self._scopes = 0
        self._written: list[tuple[int, int, GlobalVar | None]] = []
        self._bind(function.params)
        self._walk(function.body, 0)
        # Memory may become shared after a write to it, so that the alias classes are known only
        # here.
        self._writes: dict[int, list[int]] = {}
        for place, leaf, _ in self._written:
            self._writes.setdefault(self._find(leaf), []).append(place)

    @property
    def is_written(self) -> bool:
        """Whether a call of the function may write to its arguments."""
        return bool(self._writes)

    def is_settled(self, expr: relax.Expr) -> bool:
        """Tell whether no call of the function writes to the memory of the variables in an
        expression."""
        return not self._writes or self._are_unwritten(used(expr))

    def holds(self, variable: relax.Var, value: relax.Expr, at: relax.Var) -> bool:
        """Tell whether a variable and the operands of its value are unchanged at a later binding.

        Parameters
        ----------
        variable : relax.Var
            The variable.
        value : relax.Expr
            The value that it is bound to, perhaps rewritten.
        at : relax.Var
            The variable of the later binding.

        Returns
        -------
        bool
            True if a computation of the value at the later binding gives the value of the variable.
            False if a call may write to the variable or to an operand in between, or if a variable
            is unknown.
        """
        if not self._writes:
            return True
        operands = used(value)
        if variable not in self._places or at not in self._places:
            return False
        (scope, begin), (scope_at, end) = self._places[variable], self._places[at]
        if scope != scope_at:  # a local function runs after its binding
            return self._are_unwritten([variable, *operands])
        # The call that defines a variable may write to its operands, and to the variable itself.
        return self._are_unwritten([variable], begin + 1, end) and self._are_unwritten(
            operands, begin, end
        )

    def changed(self, variable: relax.Var, at: relax.Var) -> bool:
        """Tell whether a call may write to a variable between its binding and a later one."""
        return not self.holds(variable, relax.Tuple([]), at)

    def changed_later(self, variable: relax.Var) -> bool:
        """Tell whether a call may write to a variable after its binding."""
        if variable not in self._places:
            return bool(self._writes)
        return not self._are_unwritten([variable], self._places[variable][1] + 1)

    def shares(self, variable: relax.Var, other: relax.Var) -> bool:
        """Tell whether two variables may refer to the same memory."""
        places, two = (
            {self._find(leaf) for leaf in leaves(self._trees.get(value))}
            for value in (variable, other)
        )
        return bool(places & two)

    def writers_of(self, variables: Iterable[relax.Var]) -> set[GlobalVar | None]:
        """Return the functions whose calls may write to variables; None represents any other
        call."""
        if not self._written:
            return set()
        classes = {self._find(leaf) for v in variables for leaf in leaves(self._trees.get(v))}
        return {callee for _, leaf, callee in self._written if self._find(leaf) in classes}

    def _are_unwritten(
        self, variables: Iterable[relax.Var], begin: int = -1, end: int | None = None
    ) -> bool:
        """Tell whether all variables are known, and no call in a range of places writes to them."""
        for variable in variables:
            tree = self._trees.get(variable)
            if tree is None:
                return False
            for leaf in leaves(tree):
                places = self._writes.get(self._find(leaf), ())
                first = bisect_left(places, begin)
                if first < len(places) and (end is None or places[first] < end):
                    return False
        return True

    def _bind(self, params: Iterable[relax.Var]) -> None:
        for param in params:
            self._trees[param] = self._new(param.ty)
            self._places[param] = self._scopes, len(self._places)

    def _walk(self, body: relax.Expr, scope: int) -> object:
        """Record the bindings of a body, and return the memory of its result."""
        if not isinstance(body, relax.SeqExpr):
            return self._tree(body)
        for block in body.blocks[:]:
            for binding in block.bindings[:]:
                variable, value = binding.var, binding.value
                if isinstance(value, relax.If):
                    branches = value.true_branch, value.false_branch
                    tree = self._merged([self._walk(branch, scope) for branch in branches])
                elif isinstance(value, relax.Function):
                    # A call of a local function may write to all captured variables. The function
                    # may call itself.
                    tree = self._merged([self._tree(v) for v in relax.analysis.free_vars(value)])
                    self._trees[variable] = tree
                    self._scopes += 1
                    self._bind(value.params)
                    self._walk(value.body, self._scopes)
                else:
                    tree = None
                place = len(self._places)
                self._places[variable] = scope, place
                self._trees[variable] = self._of(value, place) if tree is None else tree
        return self._tree(body.body)

    def _of(self, value: relax.Expr, place: int) -> object:
        """Return the memory of a value, and record the writes of a call."""
        if type(value) is not relax.Call:
            return self._tree(value)
        name = value.op.name if type(value.op) is Op else None
        if name in _INPLACE:
            return self._in_place(value, place)
        callee = value.op if type(value.op) is GlobalVar else None
        operands = value.args[:] if name is not None else [value.op, *value.args[:]]
        writes = may_write(value, self._writers)
        if writes:
            for operand in operands:
                self._write(operand, place, callee)
        if name in _VIEWS:
            return self._tree(operands[0])
        if writes or name is None or name in _UNKNOWN:
            return self._merged([self._tree(operand) for operand in operands])
        return self._new(value.ty)

    def _in_place(self, call: relax.Call, place: int) -> object:
        arguments = call.args[1:]
        if call.op.name == _CALL_TIR_INPLACE:
            written_out = arguments[0]
            if not isinstance(written_out, relax.Tuple):
                self._write(written_out, place, None)
                return self._merged([self._tree(written_out)])
            arguments = list(written_out.fields)
        indices = [int(index) for index in call.attrs.inplace_indices]
        results = []
        for index in indices:
            if index >= 0:
                self._write(arguments[index], place, None)
                results.append(self._tree(arguments[index]))
            else:
                results.append(self._new(relax.TensorType()))
        return results[0] if len(results) == 1 else results

    def _write(self, expr: relax.Expr, place: int, callee: GlobalVar | None) -> None:
        self._written += [(place, leaf, callee) for leaf in leaves(self._tree(expr))]

    def _tree(self, expr: relax.Expr) -> object:
        """Return the memory of an expression: a number, or a list for a tuple."""
        if isinstance(expr, relax.Tuple):
            return [self._tree(field) for field in expr.fields[:]]
        if isinstance(expr, relax.TupleGetItem):
            whole = self._tree(expr.tuple_value)
            return whole[expr.index] if isinstance(whole, list) else whole
        # All uses of a constant refer to the same memory.
        if expr not in self._trees:
            self._trees[expr] = self._new(expr.ty)
        return self._trees[expr]

    def _new(self, kind: relax.Type) -> object:
        if isinstance(kind, relax.TupleType):
            return [self._new(field) for field in kind.fields[:]]
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def _merged(self, trees: Iterable[object]) -> int:
        """Merge all leaves of several trees into one memory, and return it."""
        (root,) = leaves(self._new(relax.TensorType()))
        for tree in trees:
            for leaf in leaves(tree):
                self._parents[self._find(leaf)] = root
        return root

    def _find(self, leaf: int) -> int:
        """Return the number of the memory that a leaf belongs to."""
        parents = self._parents
        while parents[leaf] != leaf:
            parents[leaf] = parents[parents[leaf]]
            leaf = parents[leaf]
        return leaf


def is_name(value: relax.Expr) -> bool:
    """Tell whether a value only names existing tensors: a variable, a tuple, an element of a tuple,
    or a reshape."""
    if type(value) is relax.Call:
        return _is_reshape(value)
    return isinstance(value, (relax.Var, relax.Tuple, relax.TupleGetItem))


def named_by(value: relax.Expr, named: dict) -> object:
    """Return the tensors of a value for which :func:`is_name` is true: one tensor, nested lists, or
    None."""
    if isinstance(value, relax.Var):
        return named.get(value)
    if isinstance(value, relax.Tuple):
        return [named_by(field, named) for field in value.fields[:]]
    if isinstance(value, relax.TupleGetItem):
        whole = named_by(value.tuple_value, named)
        return whole[value.index] if isinstance(whole, list) else whole
    if isinstance(value, relax.Call):
        return named_by(value.args[0], named) if _is_reshape(value) else None
    return None


def _is_reshape(call: relax.Call) -> bool:
    return type(call.op) is Op and call.op.name in _RESHAPES


def leaves(tensors: object) -> list:
    """Return the tensors in the nested lists that :func:`named_by` returns."""
    if isinstance(tensors, list):
        return [leaf for tensor in tensors for leaf in leaves(tensor)]
    return [] if tensors is None else [tensors]


def _all_bindings(function: relax.Function) -> Iterator[relax.Binding]:
    """Yield the bindings of a function, including branches and local functions."""
    for binding in bindings_of(function.body):
        if isinstance(binding.value, relax.Function):
            yield from _all_bindings(binding.value)
        yield binding
