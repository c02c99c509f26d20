"""The element of the data for each element of an update, and the loops over these pairs.

Operators that read or write at indices only differ in this mapping. :class:`Elements` has one index
for each update (scatter_elements). :class:`Points` has a vector of indices for each slice
(scatter_nd, index_put, gather_nd, index_tensor). A negative index counts from the end; an
out-of-bounds index never becomes an address.

One task writes all updates of an element, in the order of the updates (row-major), as TVM's loops
on a CPU do. So "update" always leaves the last one. :class:`Chunks` describes the partition into
tasks, on a CPU and on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ..ir.dtypes import accumulation_dtype
from ._loops import Chunks, extern, loops, once, tasks
from .position import position
from .util import Shape, analyzer_of_extents, broadcast_index, cast, is_one, on_gpu

Reader = Callable[..., "tirx.PrimExpr"]

#: The indices of the axes before the indexed ones, and a chunk, as :meth:`Chunks.tasks` yields
#: them.
Task = tuple[Sequence["tirx.PrimExpr"], Sequence["tirx.PrimExpr"]]


class Elements:
    """The mapping of ``updates[.., k, ..]`` to ``data[.., indices[.., k, ..], ..]``.

    A task owns the elements along the axis for one element of the leading axes and one chunk of the
    trailing axes.
    """

    def __init__(self, data_shape: Shape, index_shape: Shape, axis: int):
        self.data_shape = data_shape
        self.update_shape = index_shape
        self._axis = axis % len(data_shape)
        before, behind = data_shape[: self._axis], data_shape[self._axis + 1 :]
        self.chunks = Chunks(behind, [data_shape[self._axis]], before)

    def outside(self, at: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """Return conditions under which no task visits an update: the data has no such row."""
        return _beyond(*map(self._others, (at, self.update_shape, self.data_shape)))

    @contextlib.contextmanager
    def own(self, task: Task) -> Iterator[list[tirx.PrimExpr]]:
        """Loop over the elements of the data that the task owns."""
        before, chunk = task
        with self.chunks.own(chunk) as at:
            yield [*before, *at]

    @contextlib.contextmanager
    def visit(self, task: Task, readers: Sequence[Reader], reverse: bool) -> Iterator[tuple]:
        """Loop over the indices of the task's elements.

        Yields the condition that the index is in bounds, and a function that opens loops over the
        pairs of update and data elements. An update with an out-of-bounds index belongs to one
        task, too.
        """
        before, chunk = task
        (read,) = readers
        with contextlib.ExitStack() as stack:
            k = stack.enter_context(loops([self.update_shape[self._axis]], reverse))
            behind = stack.enter_context(self.chunks.loops(chunk))
            at = [*before, *k, *behind]
            beyond = _beyond(*map(self._others, (at, self.data_shape, self.update_shape)))
            if beyond:
                stack.enter_context(T.If(tirx.Not(tirx.any(*beyond))))
                stack.enter_context(T.Then())
            where, inside = position(once(read(*at)), self.data_shape[self._axis], "fast")
            where = once(where)
            stack.enter_context(self.chunks.if_owned(chunk, [where]))

            @contextlib.contextmanager
            def pairs() -> Iterator[tuple[list, list]]:
                yield at, [*before, where, *behind]

            yield inside, pairs

    def _others(self, values: Sequence) -> list:
        return [*values[: self._axis], *values[self._axis + 1 :]]


class Points:
    """The mapping of ``updates[p, ..]`` to ``data[i, j, .., ..]`` with the indices ``i, j, ..`` of
    the point ``p``.

    Parameters
    ----------
    data_shape : Sequence[int or PrimExpr]
        The shape of the data: batch axes, ``count`` indexed axes, and further ones.
    point_shape : Sequence[int or PrimExpr]
        The shape of the points, which begins with the batch axes.
    count : int
        The number of indexed axes.
    index_of : Callable
        Takes readers of the index tensors, a point, and the number of an indexed axis; returns the
        index.
    batch_dims : int
        The number of leading batch axes that the data and the points share.

    A task owns the elements for one element of the batch and one chunk of the axes after the
    indexed ones.
    """

    def __init__(
        self,
        data_shape: Shape,
        point_shape: Shape,
        count: int,
        index_of: Callable[[Sequence[Reader], Sequence[tirx.PrimExpr], int], tirx.PrimExpr],
        batch_dims: int = 0,
    ):
        self.data_shape = data_shape
        self.update_shape = [*point_shape, *data_shape[batch_dims + count :]]
        self.point_dims = len(point_shape)
        self._batch = list(data_shape[:batch_dims])
        self._point_batch = list(point_shape[:batch_dims])
        self._points = list(point_shape[batch_dims:])
        self._indexed = list(data_shape[batch_dims : batch_dims + count])
        self._index_of = index_of
        behind = data_shape[batch_dims + count :]
        self.chunks = Chunks(behind, self._indexed, self._batch)

    def outside(self, at: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """Return conditions under which no task visits an update: the data has no such batch."""
        return _beyond(at[: len(self._batch)], self._point_batch, self._batch)

    @contextlib.contextmanager
    def own(self, task: Task) -> Iterator[list[tirx.PrimExpr]]:
        """Loop over the elements of the data that the task owns."""
        batch, chunk = task
        with self.chunks.own(chunk) as at:
            yield [*batch, *at]

    @contextlib.contextmanager
    def visit(self, task: Task, readers: Sequence[Reader], reverse: bool) -> Iterator[tuple]:
        """Loop over the points; see :meth:`Elements.visit`."""
        batch, chunk = task
        with contextlib.ExitStack() as stack:
            if beyond := _beyond(batch, self._batch, self._point_batch):
                stack.enter_context(T.If(tirx.Not(tirx.any(*beyond))))
                stack.enter_context(T.Then())
            point = [*batch, *stack.enter_context(loops(self._points, reverse))]
            where, inside = self.locate([_reading_once(read) for read in readers], point)
            where = list(map(once, where))
            stack.enter_context(self.chunks.if_owned(chunk, where[len(batch) :]))

            @contextlib.contextmanager
            def pairs() -> Iterator[tuple[list, list]]:
                with self.chunks.loops(chunk) as behind:
                    yield [*point, *behind], [*where, *behind]

            yield inside, pairs

    def locate(
        self, readers: Sequence[Reader], point: Sequence[tirx.PrimExpr]
    ) -> tuple[list[tirx.PrimExpr], tirx.PrimExpr]:
        """Return the indices of the batch and indexed axes for a point, and whether they are in
        bounds."""
        batch = list(point[: len(self._batch)])
        places = [
            position(self._index_of(readers, point, i), extent, "fast")
            for i, extent in enumerate(self._indexed)
        ]
        inside = tirx.all(tirx.const(True, "bool"), *(condition for _, condition in places))
        return [*batch, *(where for where, _ in places)], inside


Places = Elements | Points


def nd_points(data_shape: Shape, index_shape: Shape, batch_dims: int = 0) -> Points:
    """Return the mapping of gather_nd and scatter_nd: the last axis of the indices holds the
    vectors."""

    def index_of(
        readers: Sequence[Reader], point: Sequence[tirx.PrimExpr], i: int
    ) -> tirx.PrimExpr:
        (read,) = readers
        return read(*point, i)

    return Points(data_shape, index_shape[:-1], int(index_shape[-1]), index_of, batch_dims)


def tensor_points(data_shape: Shape, index_shapes: Sequence[Shape]) -> Points:
    """Return the mapping of index_tensor and index_put: index tensors that are broadcast."""

    def index_of(
        readers: Sequence[Reader], point: Sequence[tirx.PrimExpr], i: int
    ) -> tirx.PrimExpr:
        return readers[i](*broadcast_index(index_shapes[i], point))

    return Points(data_shape, broadcast_shape(index_shapes), len(index_shapes), index_of)


def broadcast_shape(shapes: Sequence[Shape]) -> list:
    """Return the shape to which shapes are broadcast.

    Raises
    ------
    ValueError
        If two extents are neither provably equal nor is one of them 1.
    """
    analyzer = analyzer_of_extents([extent for shape in shapes for extent in shape])
    result = [tirx.const(1, "int64")] * max(map(len, shapes))
    for shape in shapes:
        for i, extent in enumerate(shape, len(result) - len(shape)):
            if is_one(result[i]):
                result[i] = extent
            elif not is_one(extent) and not analyzer.can_prove_equal(extent, result[i]):
                raise ValueError(
                    f"the shapes {[list(shape) for shape in shapes]} cannot be broadcast: "
                    f"{extent} and {result[i]} are not known to be equal"
                )
    return result


def scatter(
    data: te.Tensor | None,
    indices: Sequence[te.Tensor],
    updates: te.Tensor,
    places: Places,
    reduction: str,
    element: Callable[[Sequence[tirx.PrimExpr]], Sequence[tirx.PrimExpr]] = lambda at: at,
) -> te.Tensor:
    """Write updates into a copy of the data, one after the other.

    Parameters
    ----------
    data : te.Tensor or None
        The tensor to update; None for zeros of the matching shape and dtype.
    indices : Sequence[te.Tensor]
        The index tensors, with any values; an update with an out-of-bounds index is not written.
    updates : te.Tensor
        The values to write.
    places : Elements or Points
        The element of the data for each update.
    reduction : str
        The combination of an update with the previous value: a key of :data:`REDUCTIONS`.
    element : Callable, optional
        Returns the index into ``updates`` for an index into ``places.update_shape``.

    Returns
    -------
    result : te.Tensor
        A tensor of the shape of the data and the dtype of the updates; sums and products of half
        precision are accumulated in float32.
    """
    combine = REDUCTIONS[reduction]
    rounds = reduction in ("add", "mul", "mean")
    dtype = accumulation_dtype(updates.dtype) if rounds else str(updates.dtype)

    def body(*buffers: tirx.Buffer) -> None:
        *source, out = buffers
        old = source.pop(0) if data is not None else None
        *index, new = source

        def start(at: Sequence[tirx.PrimExpr]) -> None:
            value = tirx.const(0, dtype) if old is None else old[tuple(at)].astype(dtype)
            T.buffer_store(out, value, at)

        def write(task: Task) -> None:
            with (
                places.visit(task, _readers(index), False) as (inside, pairs),
                T.If(inside),
                T.Then(),
                pairs() as (at, where),
            ):
                value = new[tuple(element(at))].astype(dtype)
                T.buffer_store(out, combine(out[tuple(where)], value), where)

        _run(places, start, write)

    inputs = [*([] if data is None else [data]), *indices, updates]
    name = f"scatter_{reduction}"
    return cast(extern(body, inputs, places.data_shape, dtype, name), updates.dtype)


def scan(
    start: te.Tensor,
    indices: Sequence[te.Tensor],
    factors: te.Tensor | float,
    terms: te.Tensor | None,
    places: Places,
    reverse: bool,
) -> te.Tensor:
    """Run ``state[place] = factors[k] * state[place] + terms[k]`` for each update ``k`` in order.

    Parameters
    ----------
    start : te.Tensor
        The initial state, of the shape of the data.
    indices : Sequence[te.Tensor]
        The index tensors.
    factors : te.Tensor or float
        A tensor of ``places.update_shape``, or one number for all updates.
    terms : te.Tensor or None
        A tensor of ``places.update_shape``; None for zeros.
    places : Elements or Points
        The element of the state that each update changes.
    reverse : bool
        Whether to begin with the last update.

    Returns
    -------
    result : te.Tensor
        For each update, the state at its element before the update, and 0 for an out-of-bounds
        index; in the dtype of ``start``, computed in float32 at least.
    """
    tensors = [t for t in (factors, terms) if isinstance(t, te.Tensor)]
    # Values that are only copied are not rounded, so they need no wider dtype.
    dtype = str(start.dtype) if factors == 0 else accumulation_dtype(start.dtype)

    def body(first: tirx.Buffer, *buffers: tirx.Buffer) -> None:
        *source, state, out = buffers
        index, values = source[: len(indices)], source[len(indices) :]

        def begin(at: Sequence[tirx.PrimExpr]) -> None:
            T.buffer_store(state, first[tuple(at)].astype(dtype), at)

        def step(at: Sequence[tirx.PrimExpr], where: Sequence[tirx.PrimExpr]) -> None:
            T.buffer_store(out, state[tuple(where)], at)
            read = [buffer[tuple(at)].astype(dtype) for buffer in values]
            if isinstance(factors, te.Tensor):
                value = read.pop(0) * state[tuple(where)]
            elif factors == 0:
                value = tirx.const(0, dtype)
            else:
                value = state[tuple(where)] * tirx.const(factors, dtype)
            T.buffer_store(state, value + read[0] if read else value, where)

        def run(task: Task) -> None:
            with places.visit(task, _readers(index), reverse) as (inside, pairs), T.If(inside):
                with T.Then(), pairs() as (at, where):
                    step(at, where)
                with T.Else(), pairs() as (at, _):
                    T.buffer_store(out, tirx.const(0, dtype), at)

        _run(places, begin, run)

    shape = places.update_shape
    inputs = [start, *indices, *tensors]
    states = extern(body, inputs, shape, dtype, "scan", state=(places.data_shape, dtype))

    def known(*at: tirx.PrimExpr) -> tirx.PrimExpr:
        outside = places.outside(at)
        value = states(*at).astype(start.dtype)
        return (
            tirx.if_then_else(tirx.any(*outside), tirx.const(0, start.dtype), value)
            if outside
            else value
        )

    untouched = not places.outside([tirx.const(0, "int64")] * len(shape))
    return cast(states, start.dtype) if untouched else te.compute(shape, known, name="scan_or_zero")


def _mean(old: tirx.PrimExpr, new: tirx.PrimExpr) -> tirx.PrimExpr:
    total = old + new
    if "float" in str(total.ty.dtype):
        return total * tirx.const(0.5, str(total.ty.dtype))
    return tirx.truncdiv(total, tirx.const(2, str(total.ty.dtype)))


#: The combination of an update with the previous value. TVM's mean is the mean of these two, for
#: each update.
REDUCTIONS: dict[str, Callable[[tirx.PrimExpr, tirx.PrimExpr], tirx.PrimExpr]] = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "mean": _mean,
    "min": tirx.min,
    "max": tirx.max,
}


def _run(places: Places, start: Callable, work: Callable) -> None:
    """Let every task initialise its elements and then do its work."""
    if places.chunks.is_one_task:
        # Only one task exists. One loop around both parts makes them one statement.
        with T.serial(1):
            first, rest = places.data_shape[:1], places.data_shape[1:]
            with tasks(first or [1]) as at, loops(rest) as behind:
                start([*at[: len(first)], *behind])
            work(([], []))
        return
    if on_gpu():
        # One kernel each, with a thread for every element. Two kernels keep a scratch buffer
        # outside of both: within a single kernel, TVM would allocate it inside.
        with T.serial(1):
            with tasks(places.data_shape) as at:
                start(at)
            with places.chunks.tasks() as task:
                work(task)
        return
    with places.chunks.tasks() as task:
        with places.own(task) as at:
            start(at)
        work(task)


def _readers(buffers: Sequence[tirx.Buffer]) -> list[Reader]:
    return [lambda *at, buffer=buffer: buffer[tuple(at)] for buffer in buffers]


def _reading_once(read: Reader) -> Reader:
    return lambda *at: once(read(*at))


def _beyond(
    at: Sequence[tirx.PrimExpr], extents: Sequence, limits: Sequence
) -> list[tirx.PrimExpr]:
    """Return the conditions that indices, which are below the extents, exceed the limits."""
    analyzer = analyzer_of_extents([*extents, *limits])
    return [
        i >= limit
        for i, extent, limit in zip(at, extents, limits, strict=True)
        if not analyzer.can_prove(extent <= limit)
    ]
