"""What kernels do to a result in half precision before they round it: add a bias, and apply ReLU.

The generators of kernels know nothing of it. The result's buffer adds the number of a channel, and
takes the greater of a sum and 0, when an element is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import tvm.tirx.script.builder as T
from tvm import tirx

from .extents import Extent, count
from .halves import Half, Tensor
from .statements import computed

#: The shape of the bias that a kernel adds to its result, or None.
_BIAS: ContextVar[Sequence[Extent] | None] = ContextVar("bias", default=None)

#: Whether a kernel applies ReLU to its result.
_RECTIFIES: ContextVar[bool] = ContextVar("rectifies", default=False)


def with_bias(shape: Sequence[Extent], make: Callable[[], tirx.PrimFunc]) -> tirx.PrimFunc:
    """Return the kernel that a generator makes, which also adds a bias to its result, in half
    precision, before it rounds.

    The bias is a parameter before the result, and has a number for each index of the second axis of
    the result. The kernel stores vectors of elements with the same first two indices.

    Parameters
    ----------
    shape : Sequence[int or tirx.PrimExpr]
        The shape of the bias.
    make : Callable
        Returns the kernel, which has one result.
    """
    return _made_with(_BIAS, shape, make)


def rectified(make: Callable[[], tirx.PrimFunc]) -> tirx.PrimFunc:
    """Return the kernel that a generator makes, which applies ReLU to its result in half precision;
    NaN stays NaN.

    Parameters
    ----------
    make : Callable
        Returns the kernel, which has one result.
    """
    return _made_with(_RECTIFIES, True, make)


def _made_with(
    variable: ContextVar, value: object, make: Callable[[], tirx.PrimFunc]
) -> tirx.PrimFunc:
    token = variable.set(value)
    try:
        return make()
    finally:
        variable.reset(token)


def with_bias_param(params: Sequence[tuple[str, Sequence, str]]) -> tuple[list[tuple], bool]:
    """Return the parameters of a kernel with the bias of :func:`with_bias`, if there is one, and
    whether there is."""
    shape = _BIAS.get()
    if shape is None:
        return list(params), False
    return [*params[:-1], ("bias", shape, "float32"), params[-1]], True


def finish(target: Half, shape: Sequence[Extent], bias: Tensor | None) -> None:
    """Let the buffer of a kernel's result, of a shape, add a bias and apply ReLU, as
    :func:`with_bias` and :func:`rectified` ask for."""
    if bias is not None:
        target.bias = ChannelBias(bias, shape[1], count(shape[2:]))
    target.rectifies = _RECTIFIES.get()


@dataclass(frozen=True)
class ChannelBias:
    """The numbers that are added to the elements of a tensor: one for each index of its second
    axis.

    Attributes
    ----------
    numbers : tirx.Buffer or Half
        The numbers.
    channels : int or tirx.PrimExpr
        The extent of the second axis.
    plane : int or tirx.PrimExpr
        The number of elements for each index of the first two axes.
    """

    numbers: Tensor
    channels: Extent
    plane: Extent

    def __call__(self, index: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of an element."""
        return self.of_channel(self.channel(index))

    def channel(self, index: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the channel of an element."""
        # Unsigned divisions by constants need no corrections of signs.
        return self._channel(tirx.truncdiv(_unsigned(index), _unsigned(self.plane)))

    def of_channel(self, channel: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of a channel."""
        return T.Bind(self.numbers[channel])

    def of_plane(self, plane: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the number of the elements of a plane."""
        return self.of_channel(self._channel(_unsigned(plane)))

    def _channel(self, plane: tirx.PrimExpr) -> tirx.PrimExpr:
        return computed(tirx.Cast("int32", tirx.truncmod(plane, _unsigned(self.channels))))


def biases_from(target: Tensor, index: tirx.PrimExpr) -> Callable[[int], object]:
    """Return a function from c to the number that is added to the c-th channel from an element of a
    result on, of the same image; to None if no bias is added.

    Stores of many channels divide one index for all of them.
    """
    bias = target.bias if isinstance(target, Half) else None
    if not isinstance(bias, ChannelBias):
        return lambda c: None
    first = bias.channel(index)
    return lambda c: bias.of_channel(first + c)


def _unsigned(value: Extent) -> tirx.PrimExpr:
    return tirx.const(value, "uint32") if isinstance(value, int) else tirx.Cast("uint32", value)
