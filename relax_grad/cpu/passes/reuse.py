"""Results in the memory of operands that no later call reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ...ir.aliases import is_name, leaves, named_by
from ...ir.bindings import with_function_body
from ...ir.module import IS_SCHEDULED, normalized, referred_to
from ..schedule import in_place
from .storage import Content, Lifetime, block_lifetimes, storages_of


@tvm.transform.module_pass(opt_level=0, name="relax_grad.WriteToLastRead")
class WriteToLastRead:
    """Write results to the memory of operands that the call is the last to read, where the most
    memory is live.

    A kernel that computes an element of its result from the same element of an operand can write to
    the memory of the operand, and says so: the logarithm of softmax, and the gradient of the cross
    entropy. Loops over elements stay as they are, because their schedules are slower in place: a
    step of a ViT took a fifth longer. Calls at the peak of the live tensors are changed until no
    call there can be; other calls of the same functions are changed too, so that no function is
    compiled in two forms.

    The pass runs after ``CallTIRRewrite``, and before schedules.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bb = relax.BlockBuilder(mod)
        made = _Variants(mod, bb)
        functions = {}
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                changed = _changed(function, mod, made)
                if changed is not None:
                    functions[variable] = changed
        if not functions:
            return mod
        functions = {**dict(bb.get().functions_items()), **functions}
        left = referred_to([f for f in functions.values() if isinstance(f, relax.Function)])
        for callee in made.replaced - set(left):
            del functions[callee]
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


class _Reuse(NamedTuple):
    """A result that a call can write to the memory of an operand.

    Attributes
    ----------
    call : int
        The place of the call in its block.
    operand, result : relax.Var
        The two tensors.
    argument : relax.Var
        The name of the operand in the call.
    reads : tuple[int, ...]
        The positions of the arguments that are the operand.
    written : int
        The position of the result.
    """

    call: int
    operand: relax.Var
    result: relax.Var
    argument: relax.Var
    reads: tuple[int, ...]
    written: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(read, self.written) for read in self.reads]


class _Variants:
    """Variants of tensor functions that write results to arguments."""

    def __init__(self, mod: tvm.IRModule, bb: relax.BlockBuilder):
        self._mod, self._bb = mod, bb
        self._made: dict[tuple, tirx.PrimFunc | None] = {}
        self._added: dict[tuple, GlobalVar] = {}
        self.replaced: set[GlobalVar] = set()

    def exists(self, callee: GlobalVar, pairs: Sequence[tuple[int, int]]) -> bool:
        """Tell whether a variant is known to have the same results."""
        return self._variant(callee, pairs) is not None

    def _variant(self, callee: GlobalVar, pairs: Sequence[tuple[int, int]]) -> tirx.PrimFunc | None:
        key = (callee, *pairs)
        if key not in self._made:
            function = self._mod[callee]
            is_kernel = function.attrs is not None and function.attrs.get(IS_SCHEDULED, False)
            self._made[key] = in_place(function, pairs) if is_kernel else None
        return self._made[key]

    def added(self, callee: GlobalVar, pairs: Sequence[tuple[int, int]]) -> GlobalVar:
        """Add a variant to the module."""
        key = (callee, *pairs)
        if key not in self._added:
            variant = self._variant(callee, pairs)
            self._added[key] = self._bb.add_func(variant, f"{callee.name_hint}_in_place")
            self.replaced.add(callee)
        return self._added[key]


def _changed(
    function: relax.Function, mod: tvm.IRModule, variants: _Variants
) -> relax.Function | None:
    """Return a function in which calls write to operands; None if there are no such calls."""
    contents, lifetimes = block_lifetimes(function, mod)
    chosen = [
        _chosen(content, own, mod, variants) if own else []
        for content, own in zip(contents, lifetimes, strict=True)
    ]
    if not any(chosen):
        return None
    blocks = [
        type(block)(_bindings(content, reuses, variants)) if reuses else block
        for block, content, reuses in zip(function.body.blocks, contents, chosen, strict=True)
    ]
    body = normalized(function.params, relax.SeqExpr(blocks, function.body.body))
    return with_function_body(function, body)


def _chosen(
    content: Sequence[Content],
    lifetimes: dict[relax.Var, Lifetime],
    mod: tvm.IRModule,
    variants: _Variants,
) -> list[_Reuse]:
    """Return the results of a block that take the memory of operands; none if the storages would
    become larger."""
    left: dict[tuple, list[_Reuse]] = {}
    for reuse in _possible(content, lifetimes, mod):
        left.setdefault((content[reuse.call].binding.value.op, *reuse.pairs), []).append(reuse)
    merged = dict(lifetimes)
    #: The tensor whose memory a result takes, which may itself reuse the memory of another tensor.
    owners: dict[relax.Var, relax.Var] = {}
    chosen: dict[int, list[_Reuse]] = {}

    def is_taken(reuse: _Reuse) -> bool:
        """Let a result take the memory of an operand, if this is possible beside the others of the
        call."""
        others = chosen.get(reuse.call, [])
        if any(reuse.operand == o.operand or reuse.result == o.result for o in others):
            return False
        callee = content[reuse.call].binding.value.op
        if not variants.exists(callee, [*_pairs(others), *reuse.pairs]):
            return False
        owner = reuse.operand
        while owner in owners:
            owner = owners[owner]
        last = merged.pop(reuse.result).last
        merged[owner] = merged[owner]._replace(last=last)
        owners[reuse.result] = owner
        chosen.setdefault(reuse.call, []).append(reuse)
        return True

    while True:
        peak = _peak(merged.values(), len(content))
        at_peak = [
            (lifetimes[reuse.result].size, -reuse.call, key, reuse)
            for key, reuses in left.items()
            for reuse in reuses
            if lifetimes[reuse.result].first <= peak <= reuse.call
        ]
        if not at_peak:
            break
        *_, key, first = max(at_peak, key=itemgetter(0, 1))
        same = left.pop(key)
        if is_taken(first):
            for reuse in same:
                if reuse is not first:
                    is_taken(reuse)
    taken = [reuse for reuses in chosen.values() for reuse in reuses]
    return taken if _bytes(merged) < _bytes(lifetimes) else []


def _possible(
    content: Sequence[Content], lifetimes: dict[relax.Var, Lifetime], mod: tvm.IRModule
) -> Iterator[_Reuse]:
    """Yield the operands and results of calls that may share memory by their lifetimes and
    types."""
    names: dict[relax.Var, object] = {}
    places: dict[relax.Var, int] = {}
    used: set[relax.Var] = set()
    for i, (binding, _, size) in enumerate(content):
        value = binding.value
        places[binding.var] = i
        if size:
            names[binding.var] = binding.var
        elif is_name(value):
            names[binding.var] = named_by(value, names)
        elif isinstance(value, relax.Call):
            tensors = [leaves(named_by(argument, names)) for argument in value.args]
            new = {t for parts in tensors for t in parts if t in lifetimes and t not in used}
            used.update(t for parts in tensors for t in parts)
            callee = mod[value.op] if isinstance(value.op, GlobalVar) else None
            if isinstance(callee, tirx.PrimFunc):
                yield from _of_call(
                    i, value, callee, tensors, new, lifetimes=lifetimes, places=places
                )


def _of_call(
    i: int,
    call: relax.Call,
    callee: tirx.PrimFunc,
    tensors: Sequence[list],
    new: set[relax.Var],
    lifetimes: dict[relax.Var, Lifetime],
    places: dict[relax.Var, int],
) -> Iterator[_Reuse]:
    for written, parts in enumerate(tensors):
        if len(parts) != 1 or parts[0] not in new or sum(parts[0] in p for p in tensors) != 1:
            continue
        (result,) = parts
        # The first use of new memory writes to it.
        for read, others in enumerate(tensors):
            if len(others) != 1 or others[0] in new or others[0] not in lifetimes:
                continue
            (operand,) = others
            argument = call.args[read]
            reads = tuple(k for k, part in enumerate(tensors) if operand in part)
            if (
                read == reads[0]
                and lifetimes[operand].last == i
                and isinstance(argument, relax.Var)
                # The result is named where it was allocated.
                and places.get(argument, i) < lifetimes[result].first
                and tvm_ffi.structural_equal(argument.ty, result.ty)
                and tvm_ffi.structural_equal(callee.params[read].ty, callee.params[written].ty)
            ):
                yield _Reuse(i, operand, result, argument=argument, reads=reads, written=written)


def _pairs(reuses: Sequence[_Reuse]) -> list[tuple[int, int]]:
    return [pair for reuse in reuses for pair in reuse.pairs]


def _peak(lifetimes: Iterable[Lifetime], number: int) -> int:
    """Return the first place where the most bytes are live."""
    changes = [0] * (number + 1)
    for first, last, size in lifetimes:
        changes[first] += size
        changes[last + 1] -= size
    live = list(accumulate(changes))
    return live.index(max(live))


def _bytes(lifetimes: dict[relax.Var, Lifetime]) -> int:
    return sum(dict(storages_of(lifetimes).values()).values())


def _bindings(
    content: Sequence[Content], reuses: Sequence[_Reuse], variants: _Variants
) -> list[relax.Binding]:
    """Return the bindings of a block in which results take the memory of operands."""
    bindings = [binding for binding, _, _ in content]
    places = {binding.var: i for i, binding in enumerate(bindings)}
    of_call: dict[int, list[_Reuse]] = {}
    for reuse in reuses:
        of_call.setdefault(reuse.call, []).append(reuse)
        bindings[places[reuse.result]] = relax.VarBinding(reuse.result, reuse.argument)
    bb = relax.BlockBuilder()
    for i, own in of_call.items():
        call = bindings[i].value
        callee = variants.added(call.op, _pairs(own))
        without = {k for reuse in own for k in (*reuse.reads[1:], reuse.written)}
        arguments = [argument for k, argument in enumerate(call.args) if k not in without]
        new = relax.Call(callee, arguments, call.attrs, call.ty_args, call.span)
        bindings[i] = relax.VarBinding(bindings[i].var, bb.normalize(new))
    return bindings
