"""An order of bindings with short lifetimes of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import tvm
from tvm import relax, tirx
from tvm.ir import GlobalVar

from ...ir.aliases import is_name, leaves, may_write, named_by, writing_functions
from ...ir.asynchronous import is_start, is_wait
from ...ir.bindings import bindings_of, used
from ...ir.compat import Analyzer, dtype_of
from ...ir.module import DONATED
from ...ir.readiness import in_order_of_readiness
from ...ir.shapes import known_extents

#: The value that a symbolic extent counts as.
_NOMINAL = 64


class Place(NamedTuple):
    """A tensor that a variable is bound to: itself, or the element of its tuple by the indices."""

    variable: relax.Var
    path: tuple[int, ...]


@relax.expr_functor.mutator
class _Reorder(relax.PyExprMutator):
    def __init__(
        self, mod: tvm.IRModule, writers: Collection[GlobalVar], in_arguments: Sequence[Place]
    ):
        super().__init__(mod)
        self._writers, self._in_arguments = writers, in_arguments

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        bindings = list(block.bindings)
        if any(has_place(binding, self._writers) for binding in bindings):
            return block
        best = reordered(Tensors(bindings, self._in_arguments))
        starts = [binding.var for binding in bindings if is_start(binding.value)]
        if best:
            bindings = [bindings[i] for i in best]
        if starts:
            kept = [v for b in bindings if not isinstance(v := b.var, relax.DataflowVar)]
            bindings = in_order_of_readiness(bindings, starts, kept)
        return relax.DataflowBlock(bindings, block.span) if best or starts else block


@tvm.transform.module_pass(opt_level=0, name="relax_grad.ReorderForPeakMemory")
class ReorderForPeakMemory:
    """Reorder the bindings of dataflow blocks to reduce peak memory.

    Differentiation computes the gradients of parameters after all others, and the new parameters
    after all gradients. Until then all their operands are live. In the new order they are computed
    as soon as this frees more memory than it takes. The results are the same. A block with casts or
    with calls that write to their arguments stays as it is, and so does a block whose peak memory
    would increase. No call that waits for a collective comes earlier, and a call that starts one
    comes as early as possible.

    Examples
    --------
    >>> from tvm import relax
    >>> from relax_grad import transform
    >>> x = relax.Var("x", relax.TensorType((8, 16), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         parts = [bb.emit(each(x)) for each in (relax.op.exp, relax.op.sin)]
    ...         sums = bb.emit_output(relax.Tuple([bb.emit(relax.op.sum(part)) for part in parts]))
    ...     _ = bb.emit_func_output(sums)
    >>> module = transform.ReorderForPeakMemory()(relax.transform.LegalizeOps()(bb.get()))
    >>> [binding.value.args[0].name_hint for binding in module["main"].body.blocks[0].bindings[:4]]
    ['tir_exp', 'sum', 'tir_sin', 'sum']
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        writers = writing_functions(mod)
        functions = {
            variable: _Reorder(mod, writers, in_arguments(function)).visit_expr(function)
            if isinstance(function, relax.Function)
            else function
            for variable, function in mod.functions_items()
        }
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def has_place(binding: relax.Binding, writers: Collection[GlobalVar]) -> bool:
    """Tell whether a binding must keep its place in its block."""
    value = binding.value
    if isinstance(binding, relax.MatchCast) or isinstance(value, (relax.If, relax.Function)):
        return True
    return may_write(value, writers)


def reordered(tensors: Tensors) -> list[int] | None:
    """Return the numbers of bindings in an order with a lower peak memory; None if their own is
    lower."""
    best = _Order(tensors).made()
    return best if tensors.peak(best) <= tensors.peak(range(len(best))) else None


class Tensors:
    """The tensors that bindings define and use.

    Tensors have numbers. A binding with a computation defines tensors, other bindings only name
    existing ones. A binding is ready when all producers of its operands are done.

    Parameters
    ----------
    bindings : Sequence[relax.Binding]
        The bindings.
    in_arguments : Iterable[Place]
        The results that may take the memory of arguments; see :func:`in_arguments`. Their size
        counts as 0.

    Attributes
    ----------
    sizes : list[int]
        The size of each tensor in bytes.
    kept : set[int]
        The tensors that are live after the bindings.
    makes, takes : list
        The tensors that each binding defines, and those that it uses.
    needs, serves : list
        The producers of the operands of each binding, and the consumers of its variable.
    only_names : list[bool]
        Whether a binding only names existing tensors.
    waits : set[int]
        The bindings that wait for a collective, before which as much as possible is to be computed.
    named : dict
        The tensors of each variable: a number, or nested lists of them.
    """

    def __init__(self, bindings: Sequence[relax.Binding], in_arguments: Iterable[Place] = ()):
        self.sizes: list[int] = []
        self.kept: set[int] = set()
        self.makes: list[list[int]] = []
        self.takes: list[set[int]] = []
        self.needs: list[set[int]] = []
        self.serves: list[list[int]] = [[] for _ in bindings]
        self.only_names: list[bool] = []
        self.waits = {i for i, binding in enumerate(bindings) if is_wait(binding.value)}
        named: dict[relax.Var, object] = {}
        self.named = named
        bound: dict[relax.Var, int] = {}
        for i, binding in enumerate(bindings):
            value = binding.value
            is_nested = isinstance(value, (relax.If, relax.Function))
            variables = relax.analysis.free_vars(value) if is_nested else used(value)
            self.needs.append({bound[v] for v in variables if v in bound})
            for maker in self.needs[i]:
                self.serves[maker].append(i)
            only_names = is_name(value)
            self.only_names.append(only_names)
            first = len(self.sizes)
            tensors = named_by(value, named) if only_names else self._new(binding.var.ty)
            self.makes.append(list(range(first, len(self.sizes))))
            self.takes.append(
                set() if only_names else {t for v in variables for t in leaves(named.get(v))}
            )
            named[binding.var], bound[binding.var] = tensors, i
            if not isinstance(binding.var, relax.DataflowVar):
                self.kept.update(leaves(tensors))
        for variable, path in in_arguments:
            if variable in named:
                for tensor in leaves(_element(named[variable], path)):
                    self.sizes[tensor] = 0

    def _new(self, kind: relax.Type) -> int | list:
        """Return new tensors for a type: a number, or a list for a tuple."""
        if isinstance(kind, relax.TupleType):
            return [self._new(field) for field in kind.fields[:]]
        self.sizes.append(size_in_bytes(kind))
        return len(self.sizes) - 1

    def peak(self, order: Iterable[int]) -> int:
        """Return the peak memory of the tensors in bytes for an order of the bindings.

        A symbolic extent counts as 64. Parameters do not count, and a reshaped tensor counts once.
        """
        left = self.users()
        now = most = 0
        for i in order:
            now += sum(self.sizes[t] for t in self.makes[i])
            most = max(most, now)
            for tensor in (*self.takes[i], *self.makes[i]):
                left[tensor].discard(i)
                if not left[tensor] and tensor not in self.kept:
                    now -= self.sizes[tensor]
        return most

    def users(self) -> list[set[int]]:
        """Return the bindings that use each tensor."""
        users: list[set[int]] = [set() for _ in self.sizes]
        for i, takes in enumerate(self.takes):
            for tensor in takes:
                users[tensor].add(i)
        return users


class _Order:
    """The new order during its construction: the old order, except that bindings that free memory
    come earlier."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._left = tensors.users()
        self._missing = [len(needs) for needs in tensors.needs]
        self._is_done = [False] * len(tensors.needs)
        self._order: list[int] = []

    def made(self) -> list[int]:
        """Return the numbers of the bindings in the new order."""
        for i in range(len(self._is_done)):
            changed = self._do([i])
            while changed:
                tensor = changed.pop()
                group = self._freeing(tensor)
                if group:
                    changed |= self._do(sorted(group))
        return self._order

    def _do(self, bindings: Iterable[int]) -> set[int]:
        """Append bindings and the names of their results; return the tensors whose users may have
        become ready."""
        tensors = self._tensors
        changed: set[int] = set()
        todo = deque(bindings)
        while todo:
            i = todo.popleft()
            if self._is_done[i]:
                continue
            self._is_done[i] = True
            self._order.append(i)
            changed.update(tensors.makes[i], tensors.takes[i])
            for tensor in tensors.takes[i]:
                self._left[tensor].discard(i)
            names = []
            for user in tensors.serves[i]:
                self._missing[user] -= 1
                if not self._missing[user]:
                    changed.update(tensors.takes[user])
                    if tensors.only_names[user]:
                        names.append(user)
            todo.extendleft(reversed(names))
        return changed

    def _freeing(self, tensor: int) -> set[int]:
        """Return the remaining users of a tensor if all are ready and free more memory than they
        take, else none."""
        tensors, group = self._tensors, self._left[tensor]
        if tensor in tensors.kept or not group or any(self._missing[i] for i in group):
            return set()
        if not tensors.waits.isdisjoint(group):
            return set()
        made = {t for i in group for t in tensors.makes[i]}
        taken = {t for i in group for t in tensors.takes[i]}
        freed = [t for t in taken - tensors.kept if self._left[t] <= group]
        gain = sum(tensors.sizes[t] for t in freed) - sum(tensors.sizes[t] for t in made)
        # The results of the block must be computed at some time, so that now is as good as later.
        is_worthwhile = gain > 0 or (gain == 0 and made <= tensors.kept)
        return set(group) if is_worthwhile else set()


def in_arguments(function: relax.Function) -> list[Place]:
    """Return the results of a function that may take the memory of its donated arguments."""
    donated = (function.attrs or {}).get(DONATED, [])
    if not donated:
        return []
    names: dict[relax.Var, object] = {}
    for binding in bindings_of(function.body):
        value = binding.value
        names[binding.var] = (
            named_by(value, names) if is_name(value) else _places(binding.var, binding.var.ty)
        )
    results = named_by(function.body.body, names)
    if not isinstance(results, list):
        return []
    places = []
    for _, at, *kept in donated:
        fields = results[int(at)]
        fields = fields if isinstance(fields, list) else [fields]
        places += leaves([field for i, field in enumerate(fields) if i not in kept])
    return places


def _places(variable: relax.Var, kind: relax.Type, path: tuple[int, ...] = ()) -> object:
    if isinstance(kind, relax.TupleType):
        return [_places(variable, field, (*path, i)) for i, field in enumerate(kind.fields[:])]
    return Place(variable, path)


def _element(tensors: object, path: Iterable[int]) -> object:
    for i in path:
        tensors = tensors[i] if isinstance(tensors, list) else tensors
    return tensors


def size_in_bytes(kind: relax.Type) -> int:
    """Return the size in bytes of a tensor of a type; 0 if it is unknown. A symbolic extent counts
    as 64."""
    extents = known_extents(kind)
    if extents is None or kind.dtype is None:
        return 0
    return prod(map(_extent, extents)) * _bits(dtype_of(kind)) // 8


@cache
def _bits(dtype: str) -> int:
    return tvm.DataType(dtype).bits


def _extent(extent: tirx.PrimExpr) -> int:
    if type(extent) is tirx.IntImm:
        return extent.value
    analyzer = Analyzer()
    for variable in tirx.analysis.undefined_vars(extent):
        analyzer.bind(variable, tirx.IntImm("int64", _NOMINAL))
    value = analyzer.simplify(extent)
    return max(int(value), 0) if isinstance(value, tirx.IntImm) else _NOMINAL
