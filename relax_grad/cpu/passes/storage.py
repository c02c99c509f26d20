"""The assignment of tensors to shared storage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar, Op

from ...ir.aliases import is_name, leaves, named_by
from ...ir.bindings import used, with_function_body
from ...ir.module import normalized
from .reorder import size_in_bytes

_ALLOC = Op.get("relax.builtin.alloc_tensor")

#: Values in normal form whose variables are all operands.
_WITHOUT_BODY = {relax.Call, relax.Tuple, relax.TupleGetItem, relax.Var, relax.DataflowVar}


class Lifetime(NamedTuple):
    """The first and the last binding of the lifetime of a tensor, and its size in bytes."""

    first: int
    last: int
    size: int


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ShareStorage")
class ShareStorage:
    """Let tensors with disjoint lifetimes share storage.

    ``relax.transform.StaticPlanBlockMemory`` goes through a function in order. It gives each tensor
    a storage that is free at that time and not much smaller or larger. Here the largest tensors are
    assigned first, so that each storage is as large as one of them. The total storage of a network
    is then about its peak memory.

    A tensor that the function returns has its own storage. TVM assigns it one too, but in
    quadratic time in the number of returned tensors.

    Tensors of unknown size, and tensors with uses other than calls of tensor functions, are left to
    TVM.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit(relax.op.exp(bb.emit(relax.op.sin(x))))
    ...         z = bb.emit_output(relax.op.tanh(bb.emit(relax.op.cos(y))))
    ...     _ = bb.emit_func_output(z)
    >>> module = relax.transform.LegalizeOps()(bb.get())
    >>> module = relax.transform.ToNonDataflow()(module)
    >>> module = transform.ShareStorage()(relax.transform.CallTIRRewrite()(module))
    >>> module.script().count("R.memory.alloc_storage")  # of four tensors
    3
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        for variable, function in functions.items():
            if isinstance(function, relax.Function):
                functions[variable] = _shared(function, mod)
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _shared(function: relax.Function, mod: tvm.IRModule) -> relax.Function:
    contents, lifetimes = block_lifetimes(function, mod)
    returned = _returned(function, contents)
    if not any(lifetimes) and not returned:
        return function
    blocks = [
        type(block)(_planned(content, own, returned))
        for block, content, own in zip(function.body.blocks, contents, lifetimes, strict=True)
    ]
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return with_function_body(function, body)


class Content(NamedTuple):
    """A binding, the variables in its value, and the size in bytes of the tensor that it allocates,
    or 0."""

    binding: relax.Binding
    variables: set[relax.Var]
    size: int

    @classmethod
    def of(cls, binding: relax.Binding) -> Content:
        return cls(binding, _variables(binding.value), allocated_bytes(binding.value))


def block_lifetimes(
    function: relax.Function, mod: tvm.IRModule
) -> tuple[list[list[Content]], list[dict[relax.Var, Lifetime]]]:
    """Return the contents of the blocks of a function, and the lifetimes of the tensors that are
    allocated in each block and die there.

    A tensor is left out if one of its names is used outside the block, or has a use other than a
    call of a tensor function.
    """
    contents = [
        [Content.of(binding) for binding in block.bindings[:]] for block in function.body.blocks[:]
    ]
    variables = [set().union(*(item.variables for item in content)) for content in contents]
    users = Counter(variable for own in variables for variable in own)
    users.update(_variables(function.body.body))

    def is_used_outside(own: set[relax.Var], variable: relax.Var) -> bool:
        return users[variable] > (variable in own)

    lifetimes = [
        _lifetimes(content, mod, partial(is_used_outside, own))
        for content, own in zip(contents, variables, strict=True)
    ]
    return contents, lifetimes


def _returned(function: relax.Function, contents: list[list[Content]]) -> set[relax.Var]:
    """Return the variables of the tensors that a function allocates and returns."""
    allocated: set[relax.Var] = set()
    names: dict[relax.Var, object] = {}
    for binding, _, size in chain.from_iterable(contents):
        if size:
            allocated.add(binding.var)
            names[binding.var] = binding.var
        elif is_name(binding.value) and isinstance(binding, relax.VarBinding):
            names[binding.var] = named_by(binding.value, names)
    return allocated.intersection(leaves(named_by(function.body.body, names)))


def _lifetimes(
    content: list[Content], mod: tvm.IRModule, is_used_outside: Callable[[relax.Var], bool]
) -> dict[relax.Var, Lifetime]:
    """Return the lifetimes of the tensors of a block; see :func:`block_lifetimes`."""
    lifetimes: dict[relax.Var, Lifetime] = {}
    names: dict[relax.Var, object] = {}
    for i, (binding, variables, size) in enumerate(content):
        variable, value = binding.var, binding.value
        if size:
            lifetimes[variable] = Lifetime(i, i, size)
            names[variable] = variable
        elif is_name(value) and isinstance(binding, relax.VarBinding):
            names[variable] = named_by(value, names)
        else:
            is_known = _calls_tensor_function(value, mod)
            for owner in {tensor for v in variables for tensor in leaves(names.get(v))}:
                if not is_known:
                    lifetimes.pop(owner, None)
                elif owner in lifetimes:
                    lifetimes[owner] = lifetimes[owner]._replace(last=i)
    for variable, owners in names.items():
        if is_used_outside(variable):
            for owner in leaves(owners):
                lifetimes.pop(owner, None)
    return lifetimes


def _planned(
    content: list[Content],
    lifetimes: dict[relax.Var, Lifetime],
    returned: Collection[relax.Var],
) -> list[relax.Binding]:
    """Return bindings in which tensors with known lifetimes share storages, and returned ones have
    their own."""
    storages = storages_of(lifetimes)
    variables: dict[object, relax.Var] = {}
    bb = relax.BlockBuilder()
    bindings = []
    for binding, _, size in content:
        if binding.var in returned:
            key = binding.var
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
    return bindings


def storages_of(lifetimes: dict[relax.Var, Lifetime]) -> dict[relax.Var, tuple[int, int]]:
    """Return the number and the size of the storage of each tensor: the smallest storage that is
    free for it."""
    # Two lifetimes overlap if and only if one begins within the other, so that only the beginnings
    # matter.
    beginnings = sorted(lifetime.first for lifetime in lifetimes.values())
    taken = _Taken(len(beginnings))
    extents: list[int] = []
    storages: dict[relax.Var, tuple[int, int]] = {}
    for variable, (first, last, size) in sorted(
        lifetimes.items(), key=lambda item: (-item[1].size, item[1])
    ):
        lifetime = bisect_left(beginnings, first), bisect_right(beginnings, last) - 1
        free = ((1 << len(extents)) - 1) & ~taken.within(*lifetime)
        # Storages are numbered from the largest to the smallest.
        index = free.bit_length() - 1 if free else len(extents)
        if not free:
            extents.append(size)
        taken.add(*lifetime, index)
        storages[variable] = index, extents[index]
    return storages


class _Taken:
    """The times at which storages are taken: a segment tree of sets, each an integer with a bit for
    each storage.

    Both methods visit a number of sets that is logarithmic in the number of times. With a list of
    lifetimes for each storage, the search for a free storage would be linear in the number of
    storages.
    """

    def __init__(self, times: int):
        self._half = 1 << max(0, times - 1).bit_length()
        #: For each node, the storages that are taken at any of the times below it, and at all of
        #: them.
        self._at_any, self._at_all = ([0] * (2 * self._half) for _ in range(2))

    def within(self, first: int, last: int) -> int:
        """Return the storages that are taken at any time from first to last."""
        taken = 0
        for node in self._parts(first, last):
            taken |= self._at_any[node]
        for node in self._above(first, last):
            taken |= self._at_all[node]
        return taken

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
        """Yield the ancestors of the first and the last time. They include all ancestors of the
        nodes of ``_parts``."""
        for time in {first, last}:
            node = (time + self._half) >> 1
            while node:
                yield node
                node >>= 1


def allocated_bytes(value: relax.Expr) -> int:
    """Return the size in bytes of a tensor of known size that a value allocates, or 0.

    Only the main memory of the first device counts.
    """
    if not (type(value) is relax.Call and value.op.same_as(_ALLOC)):
        return 0
    shape, _, device, scope = value.args[:]
    extents = shape.values[:] if type(shape) is relax.ShapeExpr else [None]
    is_known = (
        all(type(extent) is tirx.IntImm for extent in extents)
        and getattr(scope, "value", None) == "global"
        and int(getattr(device, "value", device)) == 0
    )
    return size_in_bytes(value.ty) if is_known else 0


def _calls_tensor_function(value: relax.Expr, mod: tvm.IRModule) -> bool:
    """Tell whether a value is a call of a tensor function, which keeps no reference to its
    arguments."""
    if not (isinstance(value, relax.Call) and isinstance(value.op, GlobalVar)):
        return False
    return isinstance(mod[value.op], tirx.PrimFunc)


def _variables(value: relax.Expr) -> set[relax.Var]:
    """Return all variables in a value, including those in branches and functions."""
    if type(value) in _WITHOUT_BODY:  # much faster than a visit of each node
        return set(used(value))
    variables: set[relax.Var] = set()
    relax.analysis.post_order_visit(
        value, lambda expr: variables.add(expr) if isinstance(expr, relax.Var) else None
    )
    return variables
