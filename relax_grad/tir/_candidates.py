"""Operators that a tensor function may compute, with attributes that are read from its blocks.

A candidate is a guess: its legalization decides. Therefore nothing here needs to be complete or
exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import tvm_ffi
from tvm import relax, tirx

from ..ir.compat import Analyzer, SBlockRealize, detect_linear_equation, loaded_buffer
from ..ir.expressions import loads, variables

_CONVOLUTIONS = {3: relax.op.nn.conv1d, 4: relax.op.nn.conv2d, 5: relax.op.nn.conv3d}
_MAX_POOLS = {3: relax.op.nn.max_pool1d, 4: relax.op.nn.max_pool2d, 5: relax.op.nn.max_pool3d}
_AVG_POOLS = {3: relax.op.nn.avg_pool1d, 4: relax.op.nn.avg_pool2d, 5: relax.op.nn.avg_pool3d}
_ADAPTIVE_POOLS = {
    3: relax.op.nn.adaptive_avg_pool1d,
    4: relax.op.nn.adaptive_avg_pool2d,
    5: relax.op.nn.adaptive_avg_pool3d,
}
_REDUCTIONS = (
    *(relax.op.sum, relax.op.mean, relax.op.max, relax.op.min, relax.op.prod),
    *(relax.op.variance, relax.op.std),
)

#: Makes the call of an operator from its arguments.
Candidate = Callable[..., relax.Call]


@dataclass(frozen=True)
class _Block:
    """A block that stores one value.

    Attributes
    ----------
    reduced : list[tirx.IterVar]
        Its axes that are reduced.
    store : tirx.BufferStore
        The store.
    """

    reduced: list[tirx.IterVar]
    store: tirx.BufferStore

    @property
    def reads(self) -> list:
        """The loads of the value, except loads of the stored element."""
        read = loads(self.store.value)
        return [load for load in read if not loaded_buffer(load).same_as(self.store.buffer)]


@dataclass(frozen=True)
class _Window:
    """A window that moves over the dimensions of an image.

    Attributes
    ----------
    size, strides, dilation, before, after : list
        Its size, steps and distances in each dimension, and the padding on both sides.
    """

    size: list[int]
    strides: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]


def candidates(function: tirx.PrimFunc) -> Iterator[Candidate]:
    """Yield the operators that a function may compute.

    Parameters
    ----------
    function : tirx.PrimFunc
        A function of tensors, with one result.
    """
    *inputs, output = function.params
    blocks = _blocks(function)
    reducing = [block for block in blocks if block.reduced]
    if not reducing:
        return
    first = reducing[0]
    if len(inputs) == 1:
        yield from _reductions(inputs[0], output, first)
        yield from _pools(inputs[0], output, blocks, first)
    elif len(inputs) == 2:
        yield from _convolutions(inputs, output, blocks, first)
    yield from _normalizations(function, inputs, output, first)


def _blocks(function: tirx.PrimFunc) -> list[_Block]:
    """Return the blocks whose bodies are one store, in order."""
    realized: list = []
    tvm_ffi.structural_walk(function.body, (SBlockRealize, realized.append), order="pre")
    return [
        _Block(
            [axis for axis in realize.block.iter_vars if axis.iter_type == 2], realize.block.body
        )
        for realize in realized
        if isinstance(realize.block.body, tirx.BufferStore)
    ]


def _reduced_axes(tensor: tirx.Var, block: _Block) -> list[int] | None:
    """Return the dimensions of a tensor over which a block reduces it."""
    own = [region for region in block.reads if loaded_buffer(region).same_as(tensor)]
    if not own:
        return None
    axes = {axis.var for axis in block.reduced}
    return [place for place, index in enumerate(own[0].indices) if index in axes]


def _reductions(tensor: tirx.Var, output: tirx.Var, block: _Block) -> Iterator[Candidate]:
    """Yield reductions, and operators that normalize along an axis."""
    axes = _reduced_axes(tensor, block)
    if not axes:
        return
    if len(axes) == 1 and len(output.shape) == len(tensor.shape):
        for operator in (relax.op.nn.softmax, relax.op.nn.log_softmax):
            yield partial(operator, axis=axes[0])
    if len(output.shape) in (len(tensor.shape), len(tensor.shape) - len(axes)):
        keepdims = len(output.shape) == len(tensor.shape)
        for operator in _REDUCTIONS:
            yield partial(operator, axis=axes, keepdims=keepdims)


def _normalizations(
    function: tirx.PrimFunc, inputs: Sequence[tirx.Var], output: tirx.Var, block: _Block
) -> Iterator[Candidate]:
    """Yield normalizations with each constant of the function as epsilon."""
    axes = _reduced_axes(inputs[0], block)
    if not axes or len(output.shape) != len(inputs[0].shape):
        return
    constants: list[tirx.FloatImm] = []
    tvm_ffi.structural_walk(function.body, (tirx.FloatImm, constants.append))
    epsilons = sorted({float(constant) for constant in constants if 0 < float(constant) < 0.1})
    for epsilon in epsilons:
        if len(inputs) == 3:
            yield partial(relax.op.nn.layer_norm, axes=axes, epsilon=epsilon)
        elif len(inputs) == 2:
            yield partial(relax.op.nn.rms_norm, axes=axes, epsilon=epsilon)


def _pools(
    image: tirx.Var, output: tirx.Var, blocks: Sequence[_Block], block: _Block
) -> Iterator[Candidate]:
    rank = len(image.shape)
    if rank not in _MAX_POOLS or len(output.shape) != rank:
        return
    for layout, dims in _layouts(rank):
        window = _window(image, blocks, block, dims, block.reduced)
        if window is not None:
            yield from _pools_of(rank, layout, window)
    for layout, dims in _layouts(rank):
        sizes = [_integer(output.shape[dim]) for dim in dims]
        if None not in sizes:
            yield partial(_ADAPTIVE_POOLS[rank], output_size=sizes, layout=layout)


def _pools_of(rank: int, layout: str, window: _Window) -> Iterator[Candidate]:
    common = {"pool_size": window.size, "strides": window.strides, "dilation": window.dilation}
    for ceil_mode in (False, True):
        # With ceil_mode the definition pads by a step less one at the end.
        after = [
            end - (step - 1) * ceil_mode
            for end, step in zip(window.after, window.strides, strict=True)
        ]
        if min(after) < 0:
            continue
        more = {
            **common,
            "padding": [*window.before, *after],
            "ceil_mode": ceil_mode,
            "layout": layout,
        }
        for inside in (False, True):
            for table in (_MAX_POOLS, _AVG_POOLS):
                yield partial(table[rank], **more, count_include_pad=inside)


def _convolutions(
    inputs: Sequence[tirx.Var], output: tirx.Var, blocks: Sequence[_Block], block: _Block
) -> Iterator[Candidate]:
    image, weight = inputs
    rank = len(image.shape)
    if rank not in _CONVOLUTIONS or {len(weight.shape), len(output.shape)} != {rank}:
        return
    taps = [region for region in block.reads if loaded_buffer(region).same_as(weight)]
    if not taps:
        return
    axes = {axis.var: axis for axis in block.reduced}
    spatial = "DHW"[5 - rank :]
    for (layout, dims), kernel in itertools.product(
        _layouts(rank), (f"OI{spatial}", f"{spatial}IO", f"O{spatial}I")
    ):
        indices = [taps[0].indices[kernel.index(dim)] for dim in spatial]
        if not all(index in axes for index in indices):
            continue
        window = _window(image, blocks, block, dims, [axes[index] for index in indices])
        channels = _integer(image.shape[layout.index("C")])
        of_group = _integer(weight.shape[kernel.index("I")])
        if window is None or not channels or not of_group:
            continue
        attributes = {
            "strides": window.strides,
            "padding": [*window.before, *window.after],
            "dilation": window.dilation,
            "groups": channels // of_group,
            "data_layout": layout,
            "kernel_layout": kernel,
        }
        yield partial(_CONVOLUTIONS[rank], **attributes)


def _layouts(rank: int) -> list[tuple[str, range]]:
    """Return the layouts of images of a rank, each with its spatial dimensions."""
    spatial = "DHW"[5 - rank :]
    return [(f"NC{spatial}", range(2, rank)), (f"N{spatial}C", range(1, rank - 1))]


def _window(
    image: tirx.Var,
    blocks: Sequence[_Block],
    block: _Block,
    dims: Sequence[int],
    axes: Sequence[tirx.IterVar],
) -> _Window | None:
    """Return the window by which a block reads an image or its padded copy, given the axes within
    the window."""
    copies = {other.store.buffer: other for other in blocks if other is not block}
    reads = [load for load in block.reads if len(load.indices) == len(image.shape)]
    read = next(
        (
            load
            for load in reads
            if loaded_buffer(load).same_as(image) or loaded_buffer(load) in copies
        ),
        None,
    )
    if read is None or len(axes) != len(dims):
        return None
    size = [_integer(axis.dom.extent) for axis in axes]
    moving = [block.store.indices[dim] for dim in dims]
    inner = [axis.var for axis in axes]
    strides = [_coefficient(read.indices[dim], var) for dim, var in zip(dims, moving, strict=True)]
    dilation = [_coefficient(read.indices[dim], var) for dim, var in zip(dims, inner, strict=True)]
    before: list[int] = [0] * len(dims)
    after: list[int | None] = [0] * len(dims)
    buffer = loaded_buffer(read)
    if not buffer.same_as(image):
        padding = copies[buffer]
        sources = [load for load in padding.reads if loaded_buffer(load).same_as(image)]
        if not sources:
            return None
        offsets = _all_known(_offset(sources[0].indices[dim]) for dim in dims)
        if offsets is None:
            return None
        before = [-offset for offset in offsets]
        analyzer = Analyzer()
        after = [
            _integer(analyzer.simplify(buffer.shape[dim] - image.shape[dim] - start))
            for dim, start in zip(dims, before, strict=True)
        ]
    numbers = _all_known([*size, *strides, *dilation, *before, *after])
    if numbers is None or min(numbers, default=0) < 0 or 0 in (*strides, *dilation):
        return None
    count = len(dims)
    return _Window(*(numbers[i * count : (i + 1) * count] for i in range(5)))


def _all_known(numbers: Iterable[int | None]) -> list[int] | None:
    """Return numbers as a list, or None if one is unknown."""
    known = []
    for number in numbers:
        if number is None:
            return None
        known.append(number)
    return known


def _coefficient(index: tirx.PrimExpr, var: tirx.PrimExpr) -> int | None:
    """Return the factor of a variable in an index."""
    if not isinstance(var, tirx.Var):
        return None
    coefficients = detect_linear_equation(index, [var])
    return _integer(coefficients[0]) if coefficients else None


def _offset(index: tirx.PrimExpr) -> int | None:
    """Return the constant term of an index."""
    coefficients = detect_linear_equation(index, list(variables(index)))
    return _integer(coefficients[-1]) if coefficients else None


def _integer(expr: tirx.PrimExpr) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None


__all__ = ["candidates"]
