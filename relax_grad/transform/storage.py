"""Which tensors share storage."""

from __future__ import annotations

from bisect import bisect_left

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from .._aliases import is_name, leaves, named_by
from .._module import normalized
from .memory import size_in_bytes

_ALLOC = Op.get("relax.builtin.alloc_tensor")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ShareStorage")
class ShareStorage:
    """Let tensors share storage that are not in use at the same time.

    ``relax.transform.StaticPlanBlockMemory`` goes through a function and takes, for each tensor, what is free
    at that time and not much smaller or larger. Here the largest tensors choose first, so that each
    storage is as large as one of them; networks take about as much as is in use at the same time at most.

    Tensors of unknown size, and those that are used by something else than tensor functions, are left to TVM.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for variable, function in functions.items():
            if isinstance(function, relax.Function):
                functions[variable] = _shared(function, mod)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _shared(function: relax.Function, mod: tvm.IRModule) -> relax.Function:
    lifetimes = []
    for block in function.body.blocks:
        others = [
            each.value for b in function.body.blocks if not b.same_as(block) for each in b.bindings
        ]
        outside = {v for value in (*others, function.body.body) for v in _variables(value)}
        lifetimes.append(_lifetimes(block, mod, outside))
    if not any(lifetimes):
        return function
    blocks = [_planned(*each) for each in zip(function.body.blocks, lifetimes, strict=True)]
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def _lifetimes(
    block: relax.BindingBlock, mod: tvm.IRModule, outside: set[relax.Var]
) -> dict[relax.Var, tuple[int, int]]:
    """Return from which binding to which the tensors are in use that are allocated in a block and die there.

    Those that others know by any name, ``outside`` the block or within, are left out.
    """
    found: dict[relax.Var, tuple[int, int]] = {}
    names: dict[relax.Var, object] = {}
    for i, binding in enumerate(block.bindings):
        variable, value = binding.var, binding.value
        if _is_alloc(value):
            found[variable] = i, i
            names[variable] = variable
        elif is_name(value) and isinstance(binding, relax.VarBinding):
            names[variable] = named_by(value, names)
        else:
            is_known = _calls_tensor_function(value, mod)
            for owner in {each for v in _variables(value) for each in leaves(names.get(v))}:
                if not is_known:
                    found.pop(owner, None)
                elif owner in found:
                    found[owner] = found[owner][0], i
    for variable, owners in names.items():
        if variable in outside:
            for owner in leaves(owners):
                found.pop(owner, None)
    return found


def _planned(
    block: relax.BindingBlock, lifetimes: dict[relax.Var, tuple[int, int]]
) -> relax.BindingBlock:
    """Return a block in which tensors with known lifetimes are parts of storages."""
    storages = _assign(lifetimes)
    variables: dict[int, relax.Var] = {}
    bb = relax.BlockBuilder()
    bindings = []
    for binding in block.bindings:
        number = storages.get(binding.var)
        if number is None:
            bindings.append(binding)
            continue
        index, size = number
        shape, dtype, device, scope = binding.value.args
        if index not in variables:
            storage = relax.op.memory.alloc_storage(relax.ShapeExpr([size]), device, scope, dtype)
            storage = bb.normalize(storage)
            variables[index] = relax.Var(f"storage{index}", storage.ty)
            bindings.append(relax.VarBinding(variables[index], storage))
        tensor = relax.op.memory.alloc_tensor(variables[index], 0, shape, dtype)
        bindings.append(relax.VarBinding(binding.var, bb.normalize(tensor)))
    return type(block)(bindings)


def _assign(lifetimes: dict[relax.Var, tuple[int, int]]) -> dict[relax.Var, tuple[int, int]]:
    """Return for each tensor the number and the size of its storage: the smallest that is free for it."""
    sizes = {variable: size_in_bytes(variable.ty) for variable in lifetimes}
    taken: list[list[tuple[int, int]]] = []
    extents: list[int] = []
    found: dict[relax.Var, tuple[int, int]] = {}
    for variable in sorted(lifetimes, key=lambda each: (-sizes[each], lifetimes[each])):
        lifetime = lifetimes[variable]
        index = len(taken) - 1
        while index >= 0 and not _is_free(taken[index], lifetime):
            index -= 1
        if index < 0:
            index = len(taken)
            taken.append([])
            extents.append(sizes[variable])
        taken[index].insert(bisect_left(taken[index], lifetime), lifetime)
        found[variable] = index, extents[index]
    return found


def _is_free(taken: list[tuple[int, int]], lifetime: tuple[int, int]) -> bool:
    """Tell whether none of the lifetimes, which are in order and apart, has a binding of another."""
    place = bisect_left(taken, lifetime)
    before_ends = place == 0 or taken[place - 1][1] < lifetime[0]
    return before_ends and (place == len(taken) or lifetime[1] < taken[place][0])


def _is_alloc(value: relax.Expr) -> bool:
    """Tell whether a value is a new tensor of known size in the main memory of the first device."""
    if not _calls(value, [_ALLOC]):
        return False
    shape, _, device, scope = value.args
    extents = shape.values if isinstance(shape, relax.ShapeExpr) else [None]
    return (
        all(isinstance(extent, tirx.IntImm) for extent in extents)
        and getattr(scope, "value", None) == "global"
        and int(getattr(device, "value", device)) == 0
        and size_in_bytes(value.ty) > 0
    )


def _calls(value: relax.Expr, operators: list[Op]) -> bool:
    return isinstance(value, relax.Call) and value.op in operators


def _calls_tensor_function(value: relax.Expr, mod: tvm.IRModule) -> bool:
    """Tell whether a value is a call of a function that keeps nothing of its arguments."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, GlobalVar)):
        return False
    return isinstance(mod[value.op], tirx.PrimFunc)


def _variables(value: relax.Expr) -> set[relax.Var]:
    """Return all variables in a value, those in branches and functions too."""
    found: set[relax.Var] = set()
    relax.analysis.post_order_visit(
        value, lambda expr: found.add(expr) if isinstance(expr, relax.Var) else None
    )
    return found
