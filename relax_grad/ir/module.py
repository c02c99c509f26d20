"""Common helpers for modules, functions and expressions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import tvm
from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, PrimType

from ..errors import NotWellFormedError
from .bindings import bindings_of
from .compat import MAPS_FUNCTIONS, structural_map, structural_walk

#: The operator of a conditional expression of numbers, which may also occur in extents.
IF_THEN_ELSE = tirx.if_then_else(tirx.Var("x", "bool"), 0, 0).op

#: The attribute of a tensor function with final loops, which no pass schedules.
IS_SCHEDULED = "tirx.is_scheduled"

#: The attribute of a tensor function that lets LLVM assume that its pointers are no aliases.
NO_ALIASES = "tirx.noalias"

#: The ``op_pattern`` kOpaque, of a tensor function that is not fused because it is scheduled.
OPAQUE = 8

#: The attribute of a generated kernel: statements without blocks, ready to be lowered.
IS_KERNEL = "relax_grad.is_kernel"

#: The attribute of a kernel of one product of matrices of float32: its rows, columns and depth, and
#: whether the first and the second factor are stored transposed.
PRODUCT = "relax_grad.product"

#: The attribute of a function that draws random numbers: their form, and its parameter.
DRAWN = "relax_grad.drawn"

#: The attribute of a function whose result is the first elements of its argument, in order.
FIRST_ELEMENTS = "relax_grad.first_elements"

#: The attributes of a scheduled tensor function. They also keep TVM's passes from changing it.
SCHEDULED_ATTRS = {IS_SCHEDULED: True, "op_pattern": OPAQUE}

#: The characters that identifiers do not have.
_NO_IDENTIFIER = re.compile(r"[^A-Za-z0-9]")


class ModulePass:
    """The base of a class that ``tvm.transform.module_pass`` decorates, which makes a pass of it
    that takes and returns a module. A type checker does not see that."""

    if TYPE_CHECKING:

        def __call__(self, mod: tvm.IRModule) -> tvm.IRModule: ...


#: The attribute of a function whose caller gives up arguments: pairs of the position of a parameter
#: and of a field of the result, and perhaps places in them. Each tensor of the field may take the
#: memory of the tensor at its place in the parameter, except those at these places.
DONATED = "relax_grad.donated"

#: The end of the name of a function that takes the memory of another one, with its arguments.
MEMORY = "_memory"

#: The beginning of the names of a library's functions. They read their operands, and write results
#: to other memory, the last arguments.
LIBRARY = "relax_grad.library."

#: The attribute of a scheduled function: the positions of a parameter that is read and of one that
#: is written, which may share memory.
IN_PLACE = "relax_grad.in_place"

#: The attribute of a scheduled function whose parameters share memory: these positions, before the
#: parameters of results were removed.
SHARED = "relax_grad.shared"


@contextlib.contextmanager
def ending_blocks(builder: relax.BlockBuilder) -> Iterator[None]:
    """End the blocks that an error leaves open, of which TVM would warn when the builder is
    freed."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            while True:
                builder._end_block()
        raise


def relax_function(mod: tvm.IRModule, name: str) -> relax.Function:
    """Return a Relax function of a module.

    Raises
    ------
    TypeError
        If ``mod`` is no module, or the function is no Relax function.
    ValueError
        If the module has no function of this name.
    """
    if not isinstance(mod, tvm.IRModule):
        remedy = ""
        if isinstance(getattr(mod, "module", None), tvm.IRModule):
            remedy = "; pass its module: imported.module"
        elif isinstance(mod, relax.Function):
            remedy = '; pass tvm.IRModule({"main": function})'
        elif hasattr(mod, "named_parameters"):  # a module of PyTorch
            remedy = "; pass from_module(model, (x,), loss=loss, targets=(y,)).module"
        elif isinstance(mod, tvm.runtime.Executable | tvm.runtime.Module):
            remedy = "; differentiate the module first, and then compile the result"
        elif isinstance(mod, str):
            remedy = "; the module comes first, and then the name of its function"
        raise TypeError(f"mod must be a tvm.IRModule, but it is {type(mod).__name__}{remedy}")
    names = [variable.name_hint for variable in mod.get_global_vars()]
    if not isinstance(name, str) or name not in names:
        remedy = f': write func_name="{names[0]}"' if len(names) == 1 else ""
        raise ValueError(
            f"the module has no function {name!r}; it has {', '.join(sorted(names)) or 'none'}"
            f"{remedy}"
        )
    function = mod[name]
    if not isinstance(function, relax.Function):
        raise TypeError(f"{name} must be a Relax function, but it is a {type(function).__name__}")
    return function


def check_defined(mod: tvm.IRModule, function: relax.Function, name: str) -> None:
    """Check that a function and its module define all names that it uses, and that it binds each
    variable once.

    Raises
    ------
    NotWellFormedError
        If the function is not well-formed. The message names the function and the variables.
    """
    free = relax.analysis.free_vars(function)
    functions = {variable.name_hint for variable in mod.get_global_vars()}
    missing = {variable.name_hint for variable in referred_to([function])} - functions
    if free or missing:
        names = ", ".join(sorted({variable.name for variable in free} | missing))
        raise NotWellFormedError(
            f"{name} is not well-formed: it uses {names}, defined by no binding, "
            f"parameter or function of the module{diagnosis(mod)}"
        )
    twice = _bound_twice(function)
    if twice:
        raise NotWellFormedError(
            f"{name} is not well-formed: it binds {', '.join(sorted(v.name for v in twice))} "
            f"more than once{diagnosis(mod)}"
        )


def diagnosis(mod: tvm.IRModule) -> str:
    """Return TVM's reason why a module is not well-formed, after a colon; nothing if TVM finds no
    fault."""
    try:
        relax.analysis.well_formed(mod)
    except Exception as error:  # its class depends on the fault
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"; TVM: {lines[-1]}" if lines else ""
    return ""


def _bound_twice(function: relax.Function) -> set[relax.Var]:
    """Return the variables that occur more than once among the parameters and bindings of a
    function."""
    bound: set[relax.Var] = set()
    twice: set[relax.Var] = set()
    functions = [function]
    while functions:
        current = functions.pop()
        bindings = list(bindings_of(current.body))
        for variable in [*current.params, *(binding.var for binding in bindings)]:
            (twice if variable in bound else bound).add(variable)
        functions += [
            binding.value for binding in bindings if isinstance(binding.value, relax.Function)
        ]
    return twice


def adjoint_name(variable: relax.Var) -> str:
    """Return the name of the adjoint of a variable, an identifier.

    TVM's code for GPUs takes names of variables over, and parameters of a ``torch.nn.Sequential``
    begin with a digit.
    """
    return f"{identifier(variable.name)}_adjoint"


def identifier(name: str) -> str:
    """Return a name with an underscore for each character that identifiers do not have."""
    name = _NO_IDENTIFIER.sub("_", name)
    return name if name[:1].isalpha() else f"_{name.removeprefix('_')}"


def unused(name: str, taken: Collection[str]) -> str:
    """Return the name, or a variant of it that is not taken."""
    while name in taken:
        name += "_"
    return name


def with_changed_functions(
    mod: tvm.IRModule,
    kind: type[tvm.ir.BaseFunc],
    change: Callable[[tvm.ir.BaseFunc], tvm.ir.BaseFunc],
) -> tvm.IRModule:
    """Return a module with changed functions of a kind; the same module if none changes."""
    result = mod
    for variable, function in mod.functions_items():
        if isinstance(function, kind):
            changed = change(function)
            if not changed.same_as(function):
                result = mod.clone() if result.same_as(mod) else result
                result.update_func(variable, changed)
    return result


def with_body(function: tirx.PrimFunc, body: tirx.Stmt) -> tirx.PrimFunc:
    """Return a function with another body; the same function if the body is the same."""
    if body.same_as(function.body):
        return function
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs, function.span)


def with_functions(
    mod: tvm.IRModule, functions: Mapping[str, tvm.ir.BaseFunc], without: Collection[str] = ()
) -> tvm.IRModule:
    """Return a copy of a module with some functions added or replaced by name, and others
    removed."""
    variables = {variable.name_hint: variable for variable in mod.get_global_vars()}
    kept = {
        variable: function
        for variable, function in mod.functions_items()
        if variable.name_hint not in without
    }
    for name, function in functions.items():
        variable = variables.get(name) or GlobalVar(name)
        kept[variable] = function.with_attr("global_symbol", name)
    return tvm.IRModule(kept, attrs=mod.attrs, global_infos=mod.global_infos)


def normalized(
    params: Sequence[relax.Var], body: relax.Expr, bb: relax.BlockBuilder | None = None
) -> relax.Expr:
    """Return the body of a function with these parameters in normal form, with types for its
    bindings."""
    bb = relax.BlockBuilder() if bb is None else bb
    bb.begin_scope(list(params))
    body = bb.normalize(body)
    bb.end_scope()
    return body


def copy_with_new_vars(function: relax.Function, kept: Collection[tirx.Var] = ()) -> relax.Function:
    """Return a copy of a function with new variables, also for symbolic extents, except those in
    ``kept``.

    TVM's function of this name cannot keep variables, and does not support extents with a
    condition, such as those of ``x[:n - 1]``.
    """
    if not kept and not has_conditions(function):
        return relax.utils.copy_with_new_vars(function)
    copies = {v: v for v in (*kept, *relax.analysis.free_vars(function))}

    def copy(variable: relax.Var) -> relax.Var:
        if variable not in copies:
            if isinstance(variable.ty, PrimType):
                new = tirx.Var(variable.name, str(variable.ty.dtype))
            else:
                kind = structural_map(variable.ty, rule, order="pre")
                is_dataflow = isinstance(variable, relax.DataflowVar)
                new = (relax.DataflowVar if is_dataflow else relax.Var)(variable.name, kind)
            copies[variable] = copies[new] = new  # the mapping visits the copy too
        return copies[variable]

    rule = ((tirx.Var, relax.Var, relax.DataflowVar), copy)
    return structural_map(function, rule, order="pre")


def has_conditions(function: tvm.ir.BaseFunc) -> bool:
    """Tell whether the extents or values of a function have conditions; False if TVM cannot map
    Relax functions."""
    if not MAPS_FUNCTIONS:
        return False
    selections = []
    structural_walk(function, (Call, lambda call: selections.append(call.op.same_as(IF_THEN_ELSE))))
    return any(selections)


def is_known(actual: relax.Type, wanted: relax.Type) -> bool:
    """Tell whether each value of the found type is known to have the wanted type."""
    check = relax.analysis.type_base_check(wanted, actual)
    return check == relax.analysis.BaseCheckResult.PASS


def is_buffer(param: tirx.Var) -> bool:
    """Tell whether a parameter of a tensor function is a tensor, not a number."""
    return isinstance(param.ty, tirx.buffer.BufferType)


def short_name(call: relax.Call) -> str:
    """Return the last part of the name of a call's operator, such as ``conv2d`` for
    ``relax.nn.conv2d``."""
    return call.op.name.rpartition(".")[2]


def tuple_fields(expr: relax.Expr) -> list[relax.Expr]:
    """Return the elements of a tuple, which may be a literal tuple or another expression."""
    if isinstance(expr, relax.Tuple):
        return list(expr.fields)
    return [relax.TupleGetItem(expr, i) for i in range(len(expr.ty.fields))]


def referred_to(functions: Iterable[tvm.ir.BaseFunc]) -> set[GlobalVar]:
    """Return the functions that the given Relax functions refer to. Other functions are ignored."""
    called: set[GlobalVar] = set()
    for function in functions:
        if isinstance(function, relax.Function):
            called.update(relax.analysis.all_global_vars(function))
    return called


def with_only(mod: tvm.IRModule, names: Iterable[str]) -> tvm.IRModule:
    """Return a module with some functions and those that they refer to; the same module if these
    are all.

    ``DeadCodeElimination`` keeps every function that has a global symbol too.
    """
    left = [mod.get_global_var(name) for name in names]
    kept = set(left)
    while left:
        function = mod[left.pop()]
        if isinstance(function, tirx.PrimFunc):
            found: set[GlobalVar] = set()
            structural_walk(function.body, (GlobalVar, found.add))
        else:
            found = referred_to([function])
        left += found - kept
        kept |= found
    functions = {variable: f for variable, f in mod.functions_items() if variable in kept}
    if len(functions) == len(mod.functions):
        return mod
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def sharing(function: tirx.PrimFunc, pairs: Sequence[tuple[int, int]]) -> tirx.PrimFunc:
    """Return a function with one parameter for each argument that is read and the result in its
    memory."""
    params = function.params[:]
    shared: dict[tirx.Var, tirx.Var] = {}
    for read, written in pairs:
        first = shared.setdefault(params[written], params[read])
        if not first.same_as(params[read]):
            shared[params[read]] = first

    # A parameter is the variable of its buffer.
    rule = (tirx.Var, lambda variable: shared.get(variable, variable))
    body = structural_map(function.body, rule)
    left = [param for param in params if param not in shared]
    return tirx.PrimFunc(left, body, function.ret_type, attrs=function.attrs)
