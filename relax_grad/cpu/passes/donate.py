"""Results that are written to the memory of donated arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir import GlobalVar

from ...ir.aliases import is_name, leaves, named_by
from ...ir.bindings import used, with_function_body
from ...ir.compat import dtype_of
from ...ir.module import DONATED, LIBRARY, normalized
from ..schedule import Shareable, in_place
from .schedule import written_params
from .storage import allocated_bytes


@tvm.transform.module_pass(opt_level=0, name="relax_grad.WriteToDonated")
class WriteToDonated:
    """Write results to the memory of donated arguments, so that they take no further memory.

    A function with the attribute ``relax_grad.donated`` returns tensors that replace arguments,
    such as parameters after an update. If a tensor function computes such a result element by
    element, and no later call reads the argument, the function takes one buffer for both. Other
    results keep separate memory.

    The pass runs after ``CallTIRRewrite``, and before schedules, whose analysis of dependences sees
    the shared buffer.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bb = relax.BlockBuilder(mod)
        functions = {
            variable: _Donating(mod, bb, function).result()
            for variable, function in mod.functions_items()
            if isinstance(function, relax.Function) and DONATED in (function.attrs or {})
        }
        if not functions:
            return mod
        added = bb.get()
        return tvm.IRModule(
            {**dict(added.functions_items()), **functions},
            attrs=mod.attrs,
            global_infos=mod.global_infos,
        )


class _Place(NamedTuple):
    """A tensor that is given to the function: the parameter and, of a tuple, the field."""

    param: int
    field: int


class _Use(NamedTuple):
    """An argument of a call of a tensor function: the places of the binding and of the argument."""

    binding: int
    argument: int
    is_written: bool


class _Donation(NamedTuple):
    """A result that a call can write to the memory of a donated argument: the place of the
    argument, the result, and the positions of the call's arguments that read the one and take the
    other."""

    place: _Place
    result: relax.Var
    reads: list[int]
    written: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The positions of parameters that share memory, those that are read first."""
        return [(read, self.written) for read in self.reads]


@dataclass
class _Tensor:
    """The uses of one memory."""

    uses: list[_Use] = field(default_factory=list)
    has_other_uses: bool = False

    @property
    def writers(self) -> list[_Use]:
        return [use for use in self.uses if use.is_written]


class _Donating:
    """One function that may write results to its donated arguments."""

    def __init__(self, mod: tvm.IRModule, bb: relax.BlockBuilder, function: relax.Function):
        self._mod, self._bb, self._function = mod, bb, function
        self._params = function.params[:]
        self._donated = [tuple(map(int, numbers)) for numbers in function.attrs[DONATED]]
        self._made: dict[tuple, GlobalVar] = {}
        #: The results that are written to donated memory, and its places.
        self._taken: dict[object, _Place] = {}
        self._shareable: dict[GlobalVar, Shareable] = {}
        self._written: dict[GlobalVar, list[bool] | None] = {}

    def result(self) -> relax.Function:
        function = self._function
        # No block is a dataflow block any more, so that their order is the only rule.
        bindings = [binding for block in function.body.blocks[:] for binding in block.bindings[:]]
        self._analyse(bindings)
        bindings = self._sunk(bindings)
        bindings = self._with_donations(bindings)
        bindings, result = self._with_copies(bindings)
        body = normalized(function.params, relax.SeqExpr([relax.BindingBlock(bindings)], result))
        return with_function_body(function, body)

    def _analyse(self, bindings: Sequence[relax.Binding]) -> None:
        """Find the memory of each variable, and the uses of each memory."""
        self._names: dict[relax.Var, object] = {}
        for i, param in enumerate(self._params):
            places = self._places(i)
            self._names[param] = places if self._is_tuple(i) else places[0]
        self._tensors: dict[object, _Tensor] = {}
        self._is_pure = True
        for i, binding in enumerate(bindings):
            value = binding.value
            if type(binding) is not relax.VarBinding:
                self._escape(value)
            elif is_name(value):
                self._names[binding.var] = named_by(value, self._names)
            elif (written := self._writes(value)) is not None:
                for k, argument in enumerate(value.args[:]):
                    for owner in leaves(named_by(argument, self._names)):
                        self._use(owner, i, k, written)
            elif allocated_bytes(value):
                self._names[binding.var] = binding.var
            else:
                self._escape(value)

    def _is_tuple(self, param: int) -> bool:
        return isinstance(self._params[param].ty, relax.TupleType)

    def _places(self, param: int) -> list[_Place]:
        """Return the tensors of a parameter: one, or the fields of a tuple."""
        number = len(self._params[param].ty.fields) if self._is_tuple(param) else 1
        return [_Place(param, k) for k in range(number)]

    def _tensor(self, owner: object) -> _Tensor:
        tensor = self._tensors.get(owner)
        if tensor is None:
            tensor = self._tensors[owner] = _Tensor()
        return tensor

    def _use(self, owner: object, binding: int, argument: int, written: Sequence[bool]) -> None:
        # The first use of new memory writes to it, perhaps through a pointer.
        uses = self._tensor(owner).uses
        is_new = not uses and not isinstance(owner, _Place)
        is_written = is_new or written[argument]
        uses.append(_Use(binding, argument, is_written))
        self._is_pure &= is_new or not is_written

    def _escape(self, value: relax.Expr) -> None:
        for variable in (*used(value), *relax.analysis.all_vars(value)[:]):
            for owner in leaves(self._names.get(variable)):
                self._tensor(owner).has_other_uses = True

    def _writes(self, value: relax.Expr) -> Sequence[bool] | None:
        """Tell for each argument of a call of a tensor function whether the function writes to it.

        A function of a library writes to new memory only. None for any other value.
        """
        if type(value) is not relax.Call:
            return None
        if type(value.op) is relax.ExternFunc and value.op.global_symbol.startswith(LIBRARY):
            return [False] * len(value.args)
        if type(value.op) is not GlobalVar:
            return None
        callee = value.op
        if callee not in self._written:
            function = self._mod[callee]
            is_tensor_function = isinstance(function, tirx.PrimFunc)
            self._written[callee] = written_params(function) if is_tensor_function else None
        return self._written[callee]

    def _candidates(self) -> Iterator[tuple[_Place, relax.Var]]:
        """Yield the donated tensors with the results that may take their memory, which a function
        allocates."""
        if not self._is_pure:
            return
        returned = Counter(leaves(named_by(self._function.body.body, self._names)))
        for place, owner in self._replaced():
            is_new = isinstance(owner, relax.Var) and returned[owner] == 1
            if is_new and place not in returned:
                tensors = self._tensor(place), self._tensor(owner)
                if not any(tensor.has_other_uses for tensor in tensors):
                    yield place, owner

    def _replaced(self) -> Iterator[tuple[_Place, object]]:
        """Yield the donated tensors with the memory of the results that replace them, None for
        unknown memory."""
        result = named_by(self._function.body.body, self._names)
        for param, at, *kept in self._donated:
            donated = self._places(param)
            replacing = result[at] if isinstance(result, list) else None
            if self._is_tuple(param):
                pairs = zip(donated, replacing or [None] * len(donated), strict=True)
                yield from (pair for i, pair in enumerate(pairs) if i not in kept)
            else:
                yield donated[0], replacing

    def _sunk(self, bindings: list[relax.Binding]) -> list[relax.Binding]:
        """Move calls that write results after the last reads of the arguments that the results
        replace."""
        order = list(map(float, range(len(bindings))))
        for place, owner in self._candidates():
            writers, reads = self._tensor(owner).writers, self._tensor(place).uses
            if len(writers) != 1 or not reads:
                continue
            at, last = writers[0].binding, max(use.binding for use in reads)
            if last > at and self._may_move(bindings[at].value, at, last):
                order[at] = max(order[at], last + 0.5)
        moved = [bindings[i] for i in sorted(range(len(bindings)), key=order.__getitem__)]
        if any(new is not old for new, old in zip(moved, bindings, strict=True)):
            self._analyse(moved)
        return moved

    def _may_move(self, call: relax.Call, begin: int, end: int) -> bool:
        """Tell whether a call gives the same results at a later binding, and no result has a use
        before."""
        for argument in call.args[:]:
            for owner in leaves(named_by(argument, self._names)):
                tensor = self._tensor(owner)
                is_result = any(use.is_written and use.binding == begin for use in tensor.uses)
                is_used = is_result and any(begin < use.binding <= end for use in tensor.uses)
                if is_used or tensor.has_other_uses:
                    return False
        return True

    def _with_donations(self, bindings: list[relax.Binding]) -> list[relax.Binding]:
        chosen: dict[int, list[_Donation]] = {}
        for place, owner in self._candidates():
            writers, uses = self._tensor(owner).writers, self._tensor(place).uses
            if len(writers) != 1:
                continue
            at, argument, _ = writers[0]
            if not any(use.binding > at for use in uses):
                reads = [use.argument for use in uses if use.binding == at]
                chosen.setdefault(at, []).append(_Donation(place, owner, reads, argument))
        changed: dict[int, relax.Binding] = {}
        # A result is named where it was allocated: its other names may come before the call.
        named: dict[relax.Var, relax.Binding] = {}
        for at, donations in chosen.items():
            new = self._call(bindings[at], donations)
            if new is not None:
                changed[at], names = new
                named.update(names)
        return [
            named.get(binding.var, changed.get(i, binding)) for i, binding in enumerate(bindings)
        ]

    def _with_copies(self, bindings: list[relax.Binding]) -> tuple[list[relax.Binding], relax.Expr]:
        """Copy results whose memory the caller must not get: constants, other arguments, and memory
        that is returned twice.

        The next call writes to the memory of its donated arguments.
        """
        values = {
            binding.var: binding.value for binding in bindings if type(binding) is relax.VarBinding
        }
        result = _resolved(self._function.body.body, values)
        # A result that takes the memory of an argument has the argument's place.
        places = [self._taken.get(owner, owner) for owner in leaves(named_by(result, self._names))]
        returned = Counter(places)
        shared = set()
        for place, owner in self._replaced():
            owner = self._taken.get(owner, owner)
            if returned[owner] != 1 or (isinstance(owner, _Place) and owner != place):
                shared.add(place)
        if not shared:
            return bindings, result
        added: list[relax.Binding] = []
        fields = list(result.fields)
        for param, at, *_ in self._donated:
            is_tuple = self._is_tuple(param)
            old = _resolved(fields[at], values)
            parts = list(old.fields) if is_tuple else [old]
            for k, place in enumerate(self._places(param)):
                if place in shared:
                    parts[k] = self._copy(parts[k], added)
            fields[at] = relax.Tuple(parts) if is_tuple else parts[0]
        return [*bindings, *added], relax.Tuple(fields)

    def _copy(self, tensor: relax.Expr, added: list[relax.Binding]) -> relax.Var:
        """Add the bindings of a copy of a tensor in separate memory, and return its variable."""
        shape = tensor.ty.shape
        source = te.placeholder(list(shape.values), dtype_of(tensor.ty), "source")
        copied = te.compute(source.shape, lambda *index: source[index], "copied")
        callee = self._bb.add_func(te.create_prim_func([source, copied]), "copy_of_result")
        new = relax.op.builtin.alloc_tensor(shape, dtype_of(tensor.ty), runtime_device_index=0)
        variable = relax.Var("copied", tensor.ty)
        added.append(relax.VarBinding(variable, self._bb.normalize(new)))
        call = relax.Call(callee, [tensor, variable], ty_args=[relax.TupleType([])])
        added.append(
            relax.VarBinding(relax.Var("_", relax.TupleType([])), self._bb.normalize(call))
        )
        return variable

    def _call(
        self, binding: relax.VarBinding, donations: Sequence[_Donation]
    ) -> tuple[relax.Binding, dict[relax.Var, relax.Binding]] | None:
        """Return the binding of a call that writes to donated tensors, and the bindings of its
        results to these tensors."""
        call, callee = binding.value, binding.value.op
        if type(callee) is not GlobalVar:
            return None
        kept: list[_Donation] = []
        names: dict[relax.Var, relax.Binding] = {}
        for donation in donations:
            donor = self._donor(donation.place)
            has_its_type = tvm_ffi.structural_equal(donor.ty, donation.result.ty)
            if has_its_type and self._may_be_in_place(callee, donation.pairs):
                kept.append(donation)
                self._taken[donation.result] = donation.place
                names[donation.result] = relax.VarBinding(donation.result, donor)
        if not kept:
            return None
        pairs = [pair for donation in kept for pair in donation.pairs]
        if pairs:
            callee = self._in_place(callee, pairs)
        without = {i for d in kept if d.reads for i in (*d.reads[1:], d.written)}
        arguments = [argument for i, argument in enumerate(call.args[:]) if i not in without]
        new = relax.Call(callee, arguments, call.attrs, call.ty_args, call.span)
        return relax.VarBinding(binding.var, self._bb.normalize(new)), names

    def _donor(self, place: _Place) -> relax.Expr:
        param = self._params[place.param]
        if not self._is_tuple(place.param):
            return param
        return self._bb.normalize(relax.TupleGetItem(param, place.field))

    def _may_be_in_place(self, callee: GlobalVar, pairs: list[tuple[int, int]]) -> bool:
        if callee not in self._shareable:
            self._shareable[callee] = Shareable(self._mod[callee])
        return self._shareable[callee].has(pairs)

    def _in_place(self, callee: GlobalVar, pairs: list[tuple[int, int]]) -> GlobalVar:
        """Return the variant of a function that has one parameter for an argument and its
        result."""
        key = (callee, *pairs)
        if key not in self._made:
            made = in_place(self._mod[callee], pairs)
            self._made[key] = self._bb.add_func(made, f"{callee.name_hint}_in_place")
        return self._made[key]


def _resolved(expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Return the tuple that a variable is bound to, or else the expression."""
    value = expr
    while isinstance(value, relax.Var) and value in values:
        value = values[value]
    return value if isinstance(value, relax.Tuple) else expr
