"""Which tensors share storage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ...ir.aliases import is_name, leaves, named_by
from ...ir.module import normalized
from .reorder import size_in_bytes

_ALLOC = Op.get("relax.builtin.alloc_tensor")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ShareStorage")
class ShareStorage:
    """Let tensors share storage that are not in use at the same time.

    ``relax.transform.StaticPlanBlockMemory`` goes through a function and takes, for each tensor, what is free
    at that time and not much smaller or larger. Here the largest tensors choose first, so that each
    storage is as large as one of them; networks take about as much as is in use at the same time at most.

    A tensor that the function returns has a storage of its own. TVM gives it one too, in time that grows with the
    square of the tensors that are returned.

    Tensors of unknown size, and those that are used by something else than tensor functions, are left to TVM.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for variable, function in functions.items():
            if isinstance(function, relax.Function):
                functions[variable] = _shared(function, mod)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _shared(function: relax.Function, mod: tvm.IRModule) -> relax.Function:
    blocks = function.body.blocks
    variables = [
        set().union(*(_variables(binding.value) for binding in block.bindings)) for block in blocks
    ]
    users = Counter(variable for each in variables for variable in each)
    users.update(_variables(function.body.body))
    lifetimes = [
        _lifetimes(block, mod, lambda variable, own=own: users[variable] > (variable in own))
        for block, own in zip(blocks, variables, strict=True)
    ]
    returned = _returned(function)
    if not any(lifetimes) and not returned:
        return function
    blocks = [_planned(*each, returned) for each in zip(blocks, lifetimes, strict=True)]
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return relax.Function(
        function.params, body, function.ret_ty, function.is_pure, function.attrs, function.span
    )


def _returned(function: relax.Function) -> set[relax.Var]:
    """Return the variables of the tensors that a function allocates and returns."""
    found: set[relax.Var] = set()
    names: dict[relax.Var, object] = {}
    for block in function.body.blocks:
        for binding in block.bindings:
            if _is_alloc(binding.value):
                found.add(binding.var)
                names[binding.var] = binding.var
            elif is_name(binding.value) and isinstance(binding, relax.VarBinding):
                names[binding.var] = named_by(binding.value, names)
    return found.intersection(leaves(named_by(function.body.body, names)))


def _lifetimes(
    block: relax.BindingBlock, mod: tvm.IRModule, is_used_outside: Callable[[relax.Var], bool]
) -> dict[relax.Var, tuple[int, int]]:
    """Return from which binding to which the tensors are in use that are allocated in a block and die there.

    Those that others know by any name, outside the block or within, are left out.
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
        if is_used_outside(variable):
            for owner in leaves(owners):
                found.pop(owner, None)
    return found


def _planned(
    block: relax.BindingBlock,
    lifetimes: dict[relax.Var, tuple[int, int]],
    returned: Collection[relax.Var],
) -> relax.BindingBlock:
    """Return a block in which tensors with known lifetimes are parts of storages, and returned ones have their own."""
    storages = _assign(lifetimes)
    variables: dict[object, relax.Var] = {}
    bb = relax.BlockBuilder()
    bindings = []
    for binding in block.bindings:
        if binding.var in returned:
            key, size = binding.var, size_in_bytes(binding.var.ty)
        elif binding.var in storages:
            key, size = storages[binding.var]
        else:
            bindings.append(binding)
            continue
        shape, dtype, device, scope = binding.value.args
        if key not in variables:
            storage = relax.op.memory.alloc_storage(relax.ShapeExpr([size]), device, scope, dtype)
            storage = bb.normalize(storage)
            variables[key] = relax.Var(f"storage{len(variables)}", storage.ty)
            bindings.append(relax.VarBinding(variables[key], storage))
        tensor = relax.op.memory.alloc_tensor(variables[key], 0, shape, dtype)
        bindings.append(relax.VarBinding(binding.var, bb.normalize(tensor)))
    return type(block)(bindings)


def _assign(lifetimes: dict[relax.Var, tuple[int, int]]) -> dict[relax.Var, tuple[int, int]]:
    """Return for each tensor the number and the size of its storage: the smallest that is free for it."""
    sizes = {variable: size_in_bytes(variable.ty) for variable in lifetimes}
    # Lifetimes have a binding in common if and only if one begins within the other: other times do not matter.
    beginnings = sorted(first for first, _ in lifetimes.values())
    taken = _Taken(len(beginnings))
    extents: list[int] = []
    found: dict[relax.Var, tuple[int, int]] = {}
    for variable in sorted(lifetimes, key=lambda each: (-sizes[each], lifetimes[each])):
        first, last = lifetimes[variable]
        lifetime = bisect_left(beginnings, first), bisect_right(beginnings, last) - 1
        free = ((1 << len(extents)) - 1) & ~taken.within(*lifetime)
        # Storages are numbered from the largest to the smallest.
        index = free.bit_length() - 1 if free else len(extents)
        if not free:
            extents.append(sizes[variable])
        taken.add(*lifetime, index)
        found[variable] = index, extents[index]
    return found


class _Taken:
    """Which storages are taken from when to when: a segment tree of sets, each an integer with a bit for a storage.

    Both methods go through a number of sets that is logarithmic in the number of times. With the lifetimes in a list
    for each storage, the time to find one that is free would grow with the number of storages.
    """

    def __init__(self, times: int):
        self._half = 1 << max(0, times - 1).bit_length()
        #: Of the times below each node: the storages that are taken at any of them, and at all of them.
        self._at_any, self._at_all = ([0] * (2 * self._half) for _ in range(2))

    def within(self, first: int, last: int) -> int:
        """Return the storages that are taken at any of some times."""
        found = 0
        for node in self._parts(first, last):
            found |= self._at_any[node]
        for node in self._above(first, last):
            found |= self._at_all[node]
        return found

    def add(self, first: int, last: int, storage: int) -> None:
        """Take a storage at some times."""
        bit = 1 << storage
        for node in self._parts(first, last):
            self._at_all[node] |= bit
            self._at_any[node] |= bit
        for node in self._above(first, last):
            self._at_any[node] |= bit

    def _parts(self, first: int, last: int) -> Iterator[int]:
        """Yield the fewest nodes that some times are below, and no others."""
        left, right = first + self._half, last + self._half + 1
        while left < right:
            if left & 1:
                yield left
                left += 1
            if right & 1:
                right -= 1
                yield right
            left, right = left >> 1, right >> 1

    def _above(self, first: int, last: int) -> Iterator[int]:
        """Yield the nodes above the first and the last time, which are all that are above the parts of the times."""
        for time in {first, last}:
            node = (time + self._half) >> 1
            while node:
                yield node
                node >>= 1


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
