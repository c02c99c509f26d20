"""Steps that write new parameters to the memory of the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter

import tvm
from tvm import relax
from tvm.ir import GlobalVar
from tvm.relax import op

from ..ir.bindings import renamed, used
from ..ir.compat import dtype_of
from ..ir.dataflow import in_dataflow
from ..ir.module import DONATED, normalized, with_functions
from ._functions import StepFunctions
from ._slots import SCALE_SLOTS
from ._tensors import finite


def donating(step: StepFunctions, is_chained: bool = False) -> tvm.IRModule:
    """Return the module of a ``TrainStep`` whose functions take the memory of parameters, states
    and optimizer state.

    The caller gives up these arguments, and uses the results instead. If the loss is not
    finite, the results are the arguments, except a dynamic loss scale and its count of steps. These
    two have separate memory: the caller may still reject the step.

    Parameters
    ----------
    step : TrainStep
        The step.
    is_chained : bool
        Whether a step may be called before the results of earlier ones are known. The functions
        then take one more argument, a truth value, and return one more result: whether the argument
        is true, the loss is finite and the step was applied. If the argument is false, the donated
        tensors keep their values. With the result of one call as the argument of the next, no step
        after one that is not finite changes anything.
    """
    module = step.module
    names = {variable.name_hint for variable in module.get_global_vars()}
    kept, is_skipped = kept_results(step)
    applied = step.metrics.index("applied") if is_skipped else None
    functions = {
        name: _donating(module, name, applied, kept, is_chained)
        for name in ("step", "accumulate")
        if name in names
    }
    return with_functions(module, functions)


def kept_results(step: StepFunctions) -> tuple[list[int], bool]:
    """Return what :func:`donating` reads of a step besides its module: the places in the
    optimizer's state that keep separate memory, and whether the step itself leaves all as it
    was if a value is not finite."""
    kept = [i for i, name in enumerate(step.optimizer_state) if name in SCALE_SLOTS]
    return kept, "applied" in step.metrics


def _donating(
    module: tvm.IRModule, name: str, applied: int | None, kept: list[int], is_chained: bool
) -> relax.Function:
    """Return a function that takes the memory of its arguments. ``applied`` is the place of a
    metric: the step itself leaves everything as it was if a value is not finite."""
    function = module[name]
    # ``step`` and ``accumulate`` end with these groups; their results are the last fields.
    count = len(function.params)
    donated = [[count - 4, 3], [count - 2, 4], [count - 1, 5, *kept]]
    if applied is None or is_chained:
        function = _guarded(function, donated, applied, is_chained)
    return function.with_attrs({"global_symbol": name, DONATED: donated})


def _guarded(
    function: relax.Function, donated: list[list[int]], applied: int | None, is_chained: bool
) -> relax.Function:
    """Return a function that returns its arguments if the loss is not finite, or if an earlier step
    of its chain was not.

    The selection of a tensor comes directly after its new value. Selections at the end would keep
    all new values alive beside the old ones, and no loop could compute both a new value and its
    selection, in the memory of the old value.
    """
    is_whole = _is_whole(function, donated)
    if not is_whole:
        variable = GlobalVar("guarded")
        plain = relax.transform.ToNonDataflow()(tvm.IRModule({variable: function}))
        function = plain[variable]
    bindings = [binding for block in function.body.blocks[:] for binding in block.bindings[:]]
    values = {binding.var: binding.value for binding in bindings}
    places = {binding.var: i for i, binding in enumerate(bindings)}
    names = _names(values)
    fields = _fields(function.body.body, values)
    guard = _Guard(places, is_whole and not is_chained)
    params, selections = list(function.params), donated
    condition = is_finite = guard.bind("is_finite", _is_finite(fields[0]), used(fields[0]))
    if is_chained:
        goes_on = relax.Var("goes_on", relax.TensorType((), "bool"))
        params.append(goes_on)
        if applied is None:
            condition = guard.bind("goes_on_after", op.logical_and(goes_on, is_finite), [is_finite])
            fields.append(condition)
        else:
            # The step selects its results already.
            selections = []
            chosen = values[_fields(fields[1], values)[applied]].args[0]
            own = relax.Var("is_applied", chosen.ty)
            bindings[places[chosen]] = relax.VarBinding(own, values[chosen])
            guard.put(places[chosen], chosen, op.logical_and(goes_on, own))
            after = op.logical_and(is_finite, chosen)
            fields.append(guard.bind("goes_on_after", after, [is_finite, chosen]))
    for at, i, *_ in selections:
        old, selected = function.params[at], []
        for k, value in enumerate(_fields(fields[i], values)):
            if not _is_field(values.get(value, value), old, k):
                before = names.get((old, k), relax.TupleGetItem(old, k))
                selection = op.where(condition, value, before)
                operands = [condition, *used(value), *used(before)]
                value = relax.Var(f"{old.name}_{k}", old.ty.fields[k])
                guard.add(value, selection, operands)
            selected.append(value)
        fields[i] = relax.Tuple(selected)
    ordered = sorted([*enumerate(bindings), *guard.added], key=itemgetter(0))
    result = relax.Tuple(fields)
    block: relax.BindingBlock
    if is_whole:
        block = _outputs([binding for _, binding in ordered], result)
    else:
        block = relax.BindingBlock([binding for _, binding in ordered])
    body = normalized(params, relax.SeqExpr([block], result))
    guarded = relax.Function(
        params, body, None if is_chained else function.ret_ty, function.is_pure, function.attrs,
        function.span,
    )  # fmt: skip
    return guarded if is_whole else in_dataflow(guarded)


class _Guard:
    """Bindings that are added to a function, each after its operands."""

    def __init__(self, places: Mapping[relax.Var, int], is_local: bool):
        self._places, self._is_local = dict(places), is_local
        self.added: list[tuple[int, relax.Binding]] = []

    def bind(self, name: str, value: relax.Expr, operands: Iterable[relax.Expr]) -> relax.Var:
        """Bind a truth value."""
        kind = relax.DataflowVar if self._is_local else relax.Var
        variable = kind(name, relax.TensorType((), "bool"))
        self.add(variable, value, operands)
        return variable

    def add(self, variable: relax.Var, value: relax.Expr, operands: Iterable[relax.Expr]) -> None:
        place = max((self._places.get(operand, -1) for operand in operands), default=-1)
        self.put(place, variable, value)

    def put(self, place: int, variable: relax.Var, value: relax.Expr) -> None:
        """Bind a variable after the binding at a place."""
        self._places[variable] = place
        self.added.append((place, relax.VarBinding(variable, value)))


def _is_finite(loss: relax.Expr) -> relax.Expr:
    return op.reshape(finite(loss), ()) if loss.ty.ndim else finite(loss)


def _is_whole(function: relax.Function, donated: list[list[int]]) -> bool:
    """Tell whether a function is one dataflow block, to which the selections can be added as they
    are: its loss is a scalar that needs no cast, and it has names for all old tensors."""
    blocks = function.body.blocks[:]
    if len(blocks) != 1 or type(blocks[0]) is not relax.DataflowBlock:
        return False
    values = {binding.var: binding.value for binding in blocks[0].bindings[:]}
    names, fields = _names(values), _fields(function.body.body, values)
    loss = fields[0]
    olds = [(function.params[at], fields[i]) for at, i, *_ in donated]
    return (
        isinstance(loss, relax.Var)
        and loss.ty.ndim == 0
        and dtype_of(loss.ty) != "bfloat16"
        and all(isinstance(field, relax.Tuple) for _, field in olds)
        and all((old, k) in names for old, field in olds for k in range(len(field.fields)))
    )


def _names(values: Mapping[relax.Var, relax.Expr]) -> dict[tuple[relax.Expr, int], relax.Var]:
    """Return the variables of the fields of tuples.

    A merged loop takes a tensor once, if it has one name.
    """
    return {
        (value.tuple_value, value.index): variable
        for variable, value in reversed(list(values.items()))  # the first name counts
        if type(value) is relax.TupleGetItem
    }


def _outputs(bindings: list[relax.Binding], result: relax.Expr) -> relax.DataflowBlock:
    """Return a dataflow block whose outputs are the variables of a result."""
    kept = set(relax.analysis.free_vars(result))
    local = {
        binding.var: relax.DataflowVar(binding.var.name, binding.var.ty)
        for binding in bindings
        if type(binding.var) is relax.Var and binding.var not in kept
    }
    return relax.DataflowBlock(
        [
            renamed(binding, local)
            if binding.var in local or any(operand in local for operand in used(binding.value))
            else binding
            for binding in bindings
        ]
    )


def _fields(expr: relax.Expr, values: Mapping[relax.Expr, relax.Expr]) -> list[relax.Expr]:
    """Return the fields of a tuple, which variables may be bound to."""
    while isinstance(values.get(expr), relax.Var | relax.Tuple):
        expr = values[expr]
    if isinstance(expr, relax.Tuple):
        return list(expr.fields)
    return [relax.TupleGetItem(expr, i) for i in range(len(expr.ty.fields))]


def _is_field(value: relax.Expr, of: relax.Expr, index: int) -> bool:
    return (
        isinstance(value, relax.TupleGetItem)
        and value.tuple_value.same_as(of)
        and value.index == index
    )
