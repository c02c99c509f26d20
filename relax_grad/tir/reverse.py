"""Reverse mode for tensor functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tvm import s_tir, tirx

from ..errors import GradientError
from ..ir.compat import loaded_buffer
from ..ir.dtypes import accumulation_dtype
from ..ir.expressions import loads, substitute, variables
from . import emit, products, sums
from .access import Range, renamed
from .bits import from_bits
from .derivatives import Contribution, derivative, widened
from .flat import ASSIGN, EXTREMA, MAXIMUM, PRODUCT, Item, Nest, elements_of, nests
from .general import General
from .int64_loops import with_int64_loops
from .primal import Primal
from .program import Part, Program, parse, unsupported
from .statements import (
    Bind,
    Store,
    cast,
    conjunction,
    dtype_of,
    has_gradient,
    is_buffer_var,
    is_float,
    mapped,
    new_buffer,
    stores,
    walk,
)


@dataclass(frozen=True)
class Adjoint:
    """The adjoint of a tensor function.

    Attributes
    ----------
    function : tirx.PrimFunc
        Takes the arguments ``takes``, then a buffer for the gradient of each of ``wrt``.
    takes : tuple[tuple[str, int], ...]
        The arguments: ``("input", i)``, ``("output", i)`` or ``("cotangent", i)``, with an index
        among the inputs or the outputs of the original function.
    wrt : tuple[int, ...]
        The indices of the inputs whose gradients the function returns.
    """

    function: tirx.PrimFunc
    takes: tuple[tuple[str, int], ...]
    wrt: tuple[int, ...]


def adjoint(
    function: tirx.PrimFunc,
    wrt: Sequence[int] | None = None,
    num_outputs: int | None = None,
    cotangents: Sequence[int] | None = None,
    keep_all: bool = False,
    inplace: Sequence[int] | None = None,
) -> Adjoint:
    """Return the adjoint of a function.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function, before schedules bind its loops to threads.
    wrt : Sequence[int], optional
        The indices of the inputs to differentiate with respect to; by default all of floating-point
        numbers.
    num_outputs : int, optional
        The number of results, the last buffers; by default the buffers that the function writes to.
    cotangents : Sequence[int], optional
        The indices of the outputs with a cotangent; by default all of floating-point numbers.
    keep_all : bool
        Whether the adjoint takes all inputs, outputs and cotangents, used or not.
    inplace : Sequence[int], optional
        For each result the index of the buffer that it overwrites, or -1, as for
        ``relax.call_tir_inplace``.

    Raises
    ------
    GradientError
        If a part of the function has no derivative; the error names the block.
    """
    program = with_int64_loops(parse(function, num_outputs, inplace))
    return _Reverse(program, wrt, cotangents).adjoint(keep_all)


class _Gradient:
    """The buffer in which the adjoint of a buffer is accumulated."""

    def __init__(self, of: tirx.Var, buffer: tirx.Var, is_argument: bool = False):
        self.of, self.buffer = of, buffer
        #: Whether the buffer is an argument, which may not be written to.
        self.is_argument = is_argument
        self.dtype = accumulation_dtype(dtype_of(of))


class _Reverse:
    def __init__(
        self, program: Program, wrt: Sequence[int] | None, cotangents: Sequence[int] | None
    ):
        self.program = program
        if wrt is None:
            wrt = [i for i, tensor in enumerate(program.inputs) if has_gradient(tensor)]
        if cotangents is None:
            cotangents = [i for i, tensor in enumerate(program.outputs) if has_gradient(tensor)]
        self._wrt = tuple(wrt)
        self._statements = [part.statement for part in program.parts]
        self._active = self._find_active([program.inputs[i] for i in wrt], cotangents)
        self._emitted: list[tirx.Stmt] = []
        self._allocated: list[tirx.Var] = []
        self._gradients: dict[tirx.Var, _Gradient] = {}
        self._cotangents: dict[int, tirx.Var] = {}
        for i in cotangents:
            output = program.outputs[i]
            buffer = new_buffer(output.shape, dtype_of(output), f"{output.name}_grad")
            self._cotangents[i] = buffer
            self._gradients[output] = _Gradient(output, buffer, is_argument=True)
        self._results = [
            new_buffer(tensor.shape, dtype_of(tensor), f"{tensor.name}_grad")
            for tensor in (program.inputs[i] for i in wrt)
        ]
        self._primal = Primal(program, self._allocate)
        self._value = self._primal.value

    # The result

    def adjoint(self, keep_all: bool) -> Adjoint:
        for number in range(len(self.program.parts) - 1, -1, -1):
            self._part(number, self.program.parts[number])
        for i, result in zip(self._wrt, self._results, strict=True):
            self._finish(self.program.inputs[i], result)
        used = {var for statement in self._emitted for var in variables(statement)}
        forward, shadows = self._primal.statements(used)
        body = [*forward, *(substitute(statement, shadows) for statement in self._emitted)]
        body = emit.without_copies(body, self._allocated)
        used = {var for statement in body for var in variables(statement)}
        candidates = [
            (kind, i, buffer)
            for kind, buffers in (
                ("input", enumerate(self.program.inputs)),
                ("output", enumerate(self.program.outputs)),
                ("cotangent", self._cotangents.items()),
            )
            for i, buffer in buffers
        ]
        taken = {
            buffer
            for kind, _, buffer in candidates
            if keep_all or (buffer in used and not (kind == "output" and buffer in shadows))
        }
        taken |= self._defining([buffer for *_, buffer in candidates], taken, used)
        takes = [(kind, i) for kind, i, buffer in candidates if buffer in taken]
        params = [buffer for *_, buffer in candidates if buffer in taken]
        allocated = [*self.program.allocated, *shadows.values(), *self._allocated]
        made = emit.function(
            [*params, *self._results],
            body,
            [buffer for buffer in allocated if buffer in used],
        )
        # The original function and its adjoint are in one module, where no variable may be defined
        # twice.
        made = s_tir.renew_defs(made)
        return Adjoint(made, tuple(takes), self._wrt)

    def _defining(
        self, candidates: Sequence[tirx.Var], taken: set[tirx.Var], used: set[tirx.Var]
    ) -> set[tirx.Var]:
        """Return more arguments, whose shapes define the symbolic extents that the adjoint
        needs."""
        known = {*taken, *self._results}
        extents = {var for buffer in candidates for var in _symbols(buffer)}
        allocated = {buffer for buffer in self._allocated if buffer in used}
        needed = (used & extents) | {
            var for buffer in (*known, *allocated) for var in _symbols(buffer)
        }
        defined = {var for buffer in known for var in _defined(buffer)}
        more: set[tirx.Var] = set()
        for buffer in candidates:
            if _defined(buffer) & (needed - defined):
                more.add(buffer)
                defined |= _defined(buffer)
        return more

    def _find_active(self, sources: Sequence[tirx.Var], cotangents: Iterable[int]) -> set[tirx.Var]:
        """Return the buffers on a path from the sources to the outputs."""
        own = list(self._all_stores())
        flows = [
            (store.buffer, {loaded_buffer(load) for load in loads(store.value)}) for store in own
        ]
        flows = [(to, {buffer for buffer in of if is_float(dtype_of(buffer))}) for to, of in flows]
        varied = _closure(set(sources), [(of, to) for to, of in flows])
        targets = {self.program.outputs[i] for i in cotangents}
        useful = _closure(targets, [({to}, buffer) for to, of in flows for buffer in of])
        for store in from_bits(own, varied):
            if store.buffer in useful:
                raise unsupported(
                    self._block_of(store.buffer),
                    "a value is computed from the bits of a number, which has no derivative: "
                    f"{store.value}",
                )
        return {buffer for buffer in varied & useful if is_float(dtype_of(buffer))}

    def _block_of(self, buffer: tirx.Var) -> str:
        """Return the name of the first block that writes to a buffer."""
        names = (
            part.name
            for part in self.program.parts
            if any(store.buffer.same_as(buffer) for store in stores([part.statement]))
        )
        return next(names, "")

    def _all_stores(self) -> Iterable:
        bound: dict[tirx.Var, tirx.PrimExpr] = {}
        for statement in walk(self._statements):
            if isinstance(statement, Bind):
                bound[statement.var] = substitute(statement.value, bound)
            elif isinstance(statement, Store):
                yield Store(statement.buffer, statement.indices, substitute(statement.value, bound))

    # Parts

    def _part(self, number: int, part: Part) -> None:
        written = {store.buffer for store in stores([part.statement])}
        if not any(buffer in self._active and buffer in self._gradients for buffer in written):
            return
        try:
            recognised = nests(part.statement)
            if recognised is None:
                self._general(number, part)
                return
            for nest in reversed(recognised):
                self._nest(number, part, nest)
        except GradientError as error:
            message = str(error)
            if part.name and not message.startswith("block "):
                raise unsupported(part.name, message) from error
            raise

    def _nest(self, number: int, part: Part, nest: Nest) -> None:
        items = [
            item
            for item in nest.items
            if item.buffer in self._active and item.buffer in self._gradients
        ]
        contributions: list[Contribution] = []
        for item in items:
            contributions += self._contributions(number, nest, item)
        by_buffer: dict[tirx.Var, list[Contribution]] = {}
        for contribution in contributions:
            by_buffer.setdefault(loaded_buffer(contribution.source), []).append(contribution)
        for buffer, own in by_buffer.items():
            self._accumulate(number, part.name, nest.loops, buffer, sums.merged(own))
        for item in items:
            if item.kind == ASSIGN:
                self._clear(number, part.name, nest, item)

    def _contributions(self, number: int, nest: Nest, item: Item) -> list[Contribution]:
        """Return the contributions of a store to the loads of active buffers."""
        cotangent = widened(emit.load(self._gradients[item.buffer].buffer, item.indices))
        guards, value = [self._value(number, guard) for guard in item.guards], item.value
        undefined = None
        if item.kind == PRODUCT:
            cotangent = self._other_factors(number, nest, item, cotangent)
        elif item.kind in EXTREMA:
            candidate = value
            if _is_least(item.init):
                kind = tirx.Max if item.kind == MAXIMUM else tirx.Min
                candidate = kind(value, item.init)
            here = self._value(number, emit.load(item.buffer, item.indices), after=True)
            is_equal = self._value(number, candidate) == here
            share, undefined = self._shares(number, nest, item, is_equal)
            guards, always = [*guards, is_equal], guards
            cotangent = emit.load(share, item.indices)
        contributions = []
        for partial in derivative(value, cotangent, self._active):
            known = [self._value(number, guard) for guard in partial.guards]
            source = emit.load(
                loaded_buffer(partial.source),
                [self._value(number, index) for index in partial.source.indices],
            )
            contributions.append(
                Contribution(source, (*guards, *known), self._value(number, partial.value))
            )
            if undefined is not None:
                term = self._value(number, emit.load(undefined, item.indices))
                contributions.append(Contribution(source, (*always, *known), term))
        return contributions

    def _other_factors(
        self, number: int, nest: Nest, item: Item, cotangent: tirx.PrimExpr
    ) -> tirx.PrimExpr:
        """Emit the product of a cotangent and all factors but one, and return the load of it."""
        elements = elements_of(item, nest.loops)
        reduced = [loop for loop in nest.loops if loop not in elements]
        value = widened(self._value(number, item.value))
        if item.guards:
            condition = conjunction([self._value(number, guard) for guard in item.guards])
            value = tirx.if_then_else(condition, value, tirx.const(1.0, dtype_of(value)))
        seed = cotangent * cast(item.init, dtype_of(cotangent))
        factors = products.Factors(tuple(elements), tuple(reduced), value, seed)
        statement, load = products.others(item.buffer.name, factors, self._allocate)
        self._emitted.append(statement)
        return load

    def _shares(
        self, number: int, nest: Nest, item: Item, is_equal: tirx.PrimExpr
    ) -> tuple[tirx.Var, tirx.Var]:
        """Emit the gradient of each element that is equal to its extremum, and return its buffer
        and another.

        As for the operators, the elements that are equal share the cotangent, and all gradients are
        NaN if the extremum is. The other buffer holds 0 or that NaN, which is added to the
        gradients of all elements.
        """
        gradient = self._gradients[item.buffer]
        name, dtype = item.buffer.name, accumulation_dtype(dtype_of(item.buffer))
        count, share, undefined = (
            self._allocate(item.buffer.shape, dtype, f"{name}_{kind}")
            for kind in ("count", "share", "undefined")
        )
        guards = [self._value(number, guard) for guard in item.guards]
        source = emit.load(count, [self._value(number, index) for index in item.indices])
        occurrence = Contribution(source, (*guards, is_equal), tirx.const(1.0, dtype))
        self._emitted += sums.added("count", nest.loops, count, False, [occurrence])

        def mapped_to(
            target: tirx.Var, value_at: Callable[[Sequence[tirx.PrimExpr]], tirx.PrimExpr]
        ) -> None:
            axes = sums.axes_of(item.buffer)
            indices = [axis.var for axis in axes]
            store = tirx.BufferStore(target, value_at(indices), indices)
            self._emitted.append(
                emit.block(target.name, [(axis, emit.SPATIAL) for axis in axes], store)
            )

        def nan_at(indices: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
            here = widened(self._value(number, emit.load(item.buffer, indices), after=True))
            return tirx.Select(tirx.isnan(here), here, tirx.const(0.0, dtype))

        mapped_to(share, lambda at: widened(emit.load(gradient.buffer, at)) / emit.load(count, at))
        mapped_to(undefined, nan_at)
        return share, undefined

    def _clear(self, number: int, name: str, nest: Nest, item: Item) -> None:
        """Emit the gradient of an element before it is overwritten: 0. Nothing before the first
        write uses it."""
        if not self._primal.is_written_before(item.buffer, number):
            return
        gradient = self._own(item.buffer)
        fresh, names = renamed(nest.loops)
        indices = [substitute(self._value(number, index), names) for index in item.indices]
        store = tirx.BufferStore(gradient.buffer, tirx.const(0.0, gradient.dtype), indices)
        guards = [substitute(self._value(number, guard), names) for guard in item.guards]
        body = sums.under(guards, store)
        self._emitted.append(
            emit.block(f"{name}_clear", [(loop, emit.SPATIAL) for loop in fresh], body)
        )

    def _accumulate(
        self,
        number: int,
        name: str,
        loops: Sequence[Range],
        buffer: tirx.Var,
        contributions: Sequence[Contribution],
    ) -> None:
        """Emit the sum of contributions to the gradient of a buffer."""
        gradient = self._gradients.get(buffer)
        is_first = gradient is None
        if gradient is None:
            gradient = self._gradients[buffer] = self._new_gradient(buffer)
        elif gradient.is_argument:
            gradient = self._own(buffer)
        self._emitted += sums.added(
            f"{name}_grad", loops, gradient.buffer, not is_first, contributions
        )

    def _new_gradient(self, buffer: tirx.Var) -> _Gradient:
        """Return the gradient of a buffer, without a value: the result for an input, if it has
        the dtype of sums."""
        own = self._direct_result(buffer)
        if own is None:
            dtype = accumulation_dtype(dtype_of(buffer))
            own = self._allocate(buffer.shape, dtype, f"{buffer.name}_grad")
        return _Gradient(buffer, own)

    def _direct_result(self, buffer: tirx.Var) -> tirx.Var | None:
        """Return the result that the gradient of an input is accumulated in; None for half
        precision."""
        for i, result in zip(self._wrt, self._results, strict=True):
            if self.program.inputs[i].same_as(buffer):
                dtype = dtype_of(buffer)
                return result if accumulation_dtype(dtype) == dtype else None
        return None

    def _own(self, buffer: tirx.Var) -> _Gradient:
        """Return the gradient of a buffer with a value that may be written to."""
        gradient = self._gradients.get(buffer)
        if gradient is not None and not gradient.is_argument:
            return gradient
        own = self._new_gradient(buffer)
        if gradient is None:
            self._emitted += sums.added("zero", [], own.buffer, False, [])
        else:
            self._emitted.append(sums.copied(gradient.buffer, own.buffer))
        self._gradients[buffer] = own
        return own

    def _allocate(self, shape: Sequence, dtype: str, name: str) -> tirx.Var:
        buffer = new_buffer(shape, dtype, name)
        self._allocated.append(buffer)
        return buffer

    def _finish(self, buffer: tirx.Var, result: tirx.Var) -> None:
        """Emit the gradient of an input in its dtype, where it was not accumulated in the
        result."""
        gradient = self._gradients.get(buffer)
        if gradient is None:
            self._emitted += sums.added("zero", [], result, False, [])
        elif not gradient.buffer.same_as(result):
            self._emitted.append(sums.copied(gradient.buffer, result))

    # Other statements

    def _general(self, number: int, part: Part) -> None:
        """Emit the reverse of a statement whose iterations depend on each other, one after
        another."""
        general = General(part, self._active, self._allocate)
        for buffer in general.buffers:
            self._own(buffer)
        gradients = {buffer: self._gradients[buffer].buffer for buffer in general.buffers}
        taped, reverse = general.reversed(gradients)
        if general.has_tapes:
            self._primal.taped[number] = taped
        # Values that the statement itself overwrites are saved ones already.
        reverse = [
            mapped(statement, lambda expr: self._value(number, expr)) for statement in reverse
        ]
        self._emitted.append(emit.general_block(f"{part.name}_grad", reverse))


def _is_least(init: tirx.PrimExpr) -> bool:
    """Tell whether an extremum starts from the largest finite number, which an infinite element
    does not exceed."""
    largest = float(tirx.max_value(str(init.ty.dtype)).value)
    return isinstance(init, tirx.FloatImm) and abs(float(init.value)) >= largest


def _closure(reached: set, edges: Sequence[tuple[set, object]]) -> set:
    """Return the nodes that follow from those found; an edge leads from any of some nodes to
    one."""
    reached = set(reached)
    while True:
        more = {to for of, to in edges if to not in reached and of & reached}
        if not more:
            return reached
        reached |= more


def _symbols(param: tirx.Var) -> set[tirx.Var]:
    """Return the variables in the extents of a buffer; for a number, itself."""
    if not is_buffer_var(param):
        return {param}
    return {var for extent in param.shape for var in variables(extent)}


def _defined(param: tirx.Var) -> set[tirx.Var]:
    """Return the variables that a parameter defines: a number itself, and a buffer those that are
    its extents."""
    if not is_buffer_var(param):
        return {param}
    return {extent for extent in param.shape if isinstance(extent, tirx.Var)}
