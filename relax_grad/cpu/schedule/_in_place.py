"""Functions that write results to the memory of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx
from tvm_ffi import structural_equal

from ...ir.compat import BufferLoad, SBlockRealize, loaded_buffer, structural_walk
from ...ir.module import IN_PLACE, IS_SCHEDULED, SHARED, sharing
from ..kernel.language.streams import without_streams
from ._dependence import are_disjoint, is_pure, touched
from ._fuse import Group
from ._nest import Nest, loops_of


def in_place(function: tirx.PrimFunc, pairs: Sequence[tuple[int, int]]) -> tirx.PrimFunc | None:
    """Return a function that writes results to the memory of arguments.

    Parameters
    ----------
    function : tirx.PrimFunc
        A function of loop nests, or a scheduled one that names the pairs of :func:`in_place_pairs`.
    pairs : Sequence[tuple[int, int]]
        The positions of a parameter that the function reads, and of one that it writes. Several
        parameters that are read are the same tensor if they have the same result.

    Returns
    -------
    function : tirx.PrimFunc or None
        A function with one parameter for each result, at the position of the first that is read.
        None unless it is proved to have the same results, see :class:`Shareable`.
    """
    if not pairs:
        return function
    if not Shareable(function).has(pairs):
        return None
    made = sharing(function, pairs)
    body = without_streams(made.body)
    made = tirx.PrimFunc(made.params, body, made.ret_type, attrs=made.attrs)
    if not (function.attrs or {}).get(IS_SCHEDULED, False):
        return made
    return made.without_attr(IN_PLACE).with_attr(SHARED, list(map(list, pairs)))


class Shareable:
    """The parameters of a function that may share memory.

    The function has the same results in place if each nest that reads the argument comes before the
    nest that writes the result, or it is that nest, and no two of its iterations touch the same
    element.

    Parameters
    ----------
    function : tirx.PrimFunc
        The function of :func:`in_place`.
    """

    def __init__(self, function: tirx.PrimFunc):
        attrs = function.attrs or {}
        self._params = function.params[:]
        self._known: set[tuple[int, ...]] | None = None
        self._nests: list[tirx.Stmt] = []
        if attrs.get(IS_SCHEDULED, False):
            self._known = {tuple(map(int, pair[:])) for pair in attrs.get(IN_PLACE, [])[:]}
        elif is_pure(function.body):
            self._nests = _nests(function)

    def has(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Tell whether :func:`in_place` is proved to have the same results."""
        if len({read for read, _ in pairs}) < len(pairs):
            return False
        if self._known is not None:
            return self._known.issuperset(pairs)
        return all(self._may_share(self._params[i], self._params[j]) for i, j in pairs)

    def _may_share(self, source: tirx.Buffer, result: tirx.Buffer) -> bool:
        return _have_same_type(source, result) and _may_share(self._nests, source, result)


def for_in_place(group: Group) -> Group:
    """Return a group whose results may share memory with inputs that other nests read.

    A nest may write to the memory of an input if no later nest reads it. In an optimizer's update,
    the new parameter depends on the old moments, and the moments on the old parameter. If a later
    nest reads an input that a result could replace, all results of an element are computed before
    the first is stored.
    """
    nests = group.nests
    has_vectors = any(axis.size != 1 for axis in nests[0].axes)
    if any(nest.combine or (has_vectors and _has_flags(nest)) for nest in nests):
        return group
    later: set[tirx.Buffer] = set()
    for nest in reversed(nests):
        own = {operand for operand in nest.operands if _have_same_type(operand, nest.buffer)}
        if own & later and nest.buffer in group.stored:
            return replace(group, stores_last=True)
        later |= nest.operands
    return group


def _has_flags(nest: Nest) -> bool:
    """Tell whether a nest computes booleans, or casts more than one: TVM has no variables for
    vectors of them."""
    nodes: list[tirx.Cast] = []
    structural_walk(nest.value, (tirx.Cast, nodes.append))
    return str(nest.buffer.dtype) == "bool" or any(
        str(node.value.ty.dtype) == "bool"
        and not (isinstance(node.value, BufferLoad) and not len(node.value.indices))
        for node in nodes
    )


def in_place_pairs(
    group: Group, inputs: Sequence[tirx.Buffer], results: Sequence[tirx.Buffer]
) -> list[tuple[int, int]]:
    """Return the positions of inputs and results that may share memory, where one loop computes a
    group.

    The results come after the inputs. An iteration reads the element of the input before it writes
    the element of the result.
    """
    nests, pairs = group.nests, []
    reads: dict[tirx.Buffer, list[tuple[int, BufferLoad]]] = {}
    writers: dict[tirx.Buffer, list[int]] = {}
    for k, nest in enumerate(nests):
        writers.setdefault(nest.buffer, []).append(k)
        for load in nest.loads:
            reads.setdefault(loaded_buffer(load), []).append((k, load))
    for j, result in enumerate(results, len(inputs)):
        if len(writers.get(result, [])) != 1 or nests[writers[result][0]].combine:
            continue
        (writer,) = writers[result]
        indices = list(nests[writer].indices)
        for i, source in enumerate(inputs):
            if _have_same_type(source, result) and all(
                (k <= writer or group.stores_last) and structural_equal(list(load.indices), indices)
                for k, load in reads.get(source, [])
            ):
                pairs.append((i, j))
    return pairs


def _nests(function: tirx.PrimFunc) -> list[tirx.Stmt]:
    body = function.body
    if isinstance(body, SBlockRealize):
        body = body.block.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _have_same_type(source: tirx.Buffer, result: tirx.Buffer) -> bool:
    return structural_equal(source.ty, result.ty)


def _may_share(nests: Sequence[tirx.Stmt], source: tirx.Buffer, result: tirx.Buffer) -> bool:
    reads = [i for i, nest in enumerate(nests) if touched(nest, source)]
    writes = [i for i, nest in enumerate(nests) if touched(nest, result)]
    if not writes or max(reads, default=-1) > writes[0]:
        return False
    return writes[0] not in reads or _is_element_wise(nests[writes[0]], source, result)


def _is_element_wise(nest: tirx.Stmt, source: tirx.Buffer, result: tirx.Buffer) -> bool:
    """Tell whether no two iterations of a nest touch one element of two tensors in the same
    memory."""
    loops = loops_of(nest)
    if loops is None or loops[1]:
        return False
    axes, _, block = loops
    return are_disjoint([*touched(block, source), *touched(block, result)], axes)
