"""The assignment of tensors to shared storage."""

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
    """Let tensors with disjoint lifetimes share storage.

    ``relax.transform.StaticPlanBlockMemory`` goes through a function in order. It gives each tensor a storage that is
    free at that time and not much smaller or larger. Here the largest tensors are assigned first, so that each storage
    is as large as one of them. The total storage of a network is then about its peak memory.

    A tensor that the function returns has a storage of its own. TVM assigns it one too, but in quadratic time in the
    number of returned tensors.

    Tensors of unknown size, and tensors with uses other than calls of tensor functions, are left to TVM.
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
    """Return the lifetimes, as first and last binding, of the tensors that are allocated in a block and die there.

    A tensor is left out if one of its names is used outside the block, or has a use other than a call of a tensor
    function.
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
    """Return a block in which tensors with known lifetimes share storages, and returned ones have their own."""
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
    """Return the number and the size of the storage of each tensor: the smallest storage that is free for it."""
    sizes = {variable: size_in_bytes(variable.ty) for variable in lifetimes}
    # Two lifetimes overlap if and only if one begins within the other, so that only the beginnings matter.
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
    """The times at which storages are taken: a segment tree of sets, each an integer with a bit for each storage.

    Both methods visit a number of sets that is logarithmic in the number of times. With a list of lifetimes for each
    storage, the search for a free storage would be linear in the number of storages.
    """

    def __init__(self, times: int):
        self._half = 1 << max(0, times - 1).bit_length()
        #: For each node, the storages that are taken at any of the times below it, and at all of them.
        self._at_any, self._at_all = ([0] * (2 * self._half) for _ in range(2))

    def within(self, first: int, last: int) -> int:
        """Return the storages that are taken at any time from first to last."""
        found = 0
        for node in self._parts(first, last):
            found |= self._at_any[node]
        for node in self._above(first, last):
            found |= self._at_all[node]
        return found

    def add(self, first: int, last: int, storage: int) -> None:
        """Take a storage at all times from first to last."""
        bit = 1 << storage
        for node in self._parts(first, last):
            self._at_all[node] |= bit
            self._at_any[node] |= bit
        for node in self._above(first, last):
            self._at_any[node] |= bit

    def _parts(self, first: int, last: int) -> Iterator[int]:
        """Yield the fewest nodes that cover exactly the times from first to last."""
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
        """Yield the ancestors of the first and the last time. They include all ancestors of the nodes of ``_parts``."""
        for time in {first, last}:
            node = (time + self._half) >> 1
            while node:
                yield node
                node >>= 1


def _is_alloc(value: relax.Expr) -> bool:
    """Tell whether a value allocates a tensor of known size in the main memory of the first device."""
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
    """Tell whether a value is a call of a tensor function, which keeps no reference to its arguments."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, GlobalVar)):
        return False
    return isinstance(mod[value.op], tirx.PrimFunc)


def _variables(value: relax.Expr) -> set[relax.Var]:
    """Return all variables in a value, including those in branches and functions."""
    found: set[relax.Var] = set()
    relax.analysis.post_order_visit(
        value, lambda expr: found.add(expr) if isinstance(expr, relax.Var) else None
    )
    return found
