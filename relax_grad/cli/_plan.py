"""The product or convolution of ``relax-grad doctor --plan``, and its plan as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm

    from ..cpu.kernel.conv.geometry import Conv2d, Conv3d
    from ..target import CPU

#: The largest extent of a tensor that kernels take: they count elements in int32.
_MOST = 2**31 - 1

#: The beginning of a convolution, its options with their least values, which are the defaults, and
#: the results of its kernels.
_CONV = "conv:"
_STEPS = (("stride", 1), ("padding", 0), ("dilation", 1))
_RESULTS = ("result", "data", "weight")

_NUMBERS = re.compile(r"[0-9]+(x[0-9]+)*")
_FORM = re.compile(r"(\d+)x(\d+)x(\d+)(?::([NT][NT]))?", re.ASCII)


def product_of(text: str) -> tuple[int, int, int, bool, bool]:
    """Return the rows, columns and steps of a product, and whether its factors are transposed.

    Parameters
    ----------
    text : str
        ``"128x768x3072"``, or with the layouts of both factors ``"128x768x3072:NT"``.

    Raises
    ------
    ValueError
        If the text has another form, an extent is 0, or a tensor has more than 2**31 - 1 elements.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"a product must be ROWSxCOLUMNSxSTEPS, such as 128x768x3072 or 128x768x3072:NT, "
            f"but it is {text!r}"
        )
    rows, columns, steps = (int(number) for number in found.groups()[:3])
    if 0 in (rows, columns, steps):
        raise ValueError(f"each extent of a product must be at least 1, but it is {text!r}")
    if max(rows * columns, rows * steps, columns * steps) > _MOST:
        raise ValueError(
            f"each matrix of a product must have at most {_MOST} elements, but it is {text!r}"
        )
    form = found[4] or "NN"
    return rows, columns, steps, form[0] == "T", form[1] == "T"


def convolution_of(text: str) -> tuple[Conv2d | Conv3d, str]:
    """Return a convolution, and the result that its kernel computes.

    Parameters
    ----------
    text : str
        The shapes of data and weight, ``"conv:8x64x56x56,64x64x3x3"``, with ``stride``,
        ``padding`` and ``dilation`` of each axis, or of all, and the result: ``of=data`` or
        ``of=weight`` for a gradient.

    Raises
    ------
    ValueError
        If the text has another form, or there is no such convolution.
    """
    from ..cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows

    shapes, options = _parts_of(text)
    data, weight = shapes
    rank = len(data) - 2
    steps = {name: _each_axis(text, options.get(name, str(of)), rank, of) for name, of in _STEPS}
    groups, rest = divmod(data[1], weight[1])
    if rest or weight[0] % groups:
        raise ValueError(
            f"the weight of {text!r} has {weight[1]} input channels for each group, which must "
            f"divide {data[1]} channels of the data into groups that divide {weight[0]} channels "
            "of the result"
        )
    axes = [
        Windows(size, kernel, stride, padding, padding, dilation)
        for size, kernel, stride, padding, dilation in zip(
            data[2:], weight[2:], *steps.values(), strict=True
        )
    ]
    if min(axis.number for axis in axes) < 1:
        raise ValueError(f"the kernel of {text!r} is larger than the data with its padding")
    *depth, height, width = [Windows(1, 1, 1, 0, 0, 1), *axes][-max(2, rank) :]
    conv = Conv2d(
        *(data[0], data[1], weight[0], (height.size, width.size), (height.kernel, width.kernel)),
        strides=(height.stride, width.stride),
        padding=(height.before, width.before) * 2,
        dilation=(height.dilation, width.dilation),
        groups=groups,
    )
    _check_sizes(text, [data, weight, [data[0], weight[0], *(axis.number for axis in axes)]])
    volumes = Conv3d(conv, *depth) if depth else conv
    of_two_axes = volumes.of_two_axes if isinstance(volumes, Conv3d) else None
    return of_two_axes or volumes, options.get("of", "result")


def _parts_of(text: str) -> tuple[list[list[int]], dict[str, str]]:
    """Return the shapes of data and weight, and the options."""
    parts = text.removeprefix(_CONV).split(",")
    shapes = [_numbers(part) for part in parts[:2]]
    options = dict(part.partition("=")[::2] for part in parts[2:])
    known = {name for name, _ in _STEPS} | {"of"}
    ranks = {len(shape or ()) for shape in shapes}
    is_formed = len(shapes) == 2 and ranks <= {3, 4, 5} and len(ranks) == 1
    if not is_formed or options.keys() - known or options.get("of", "data") not in _RESULTS:
        raise ValueError(
            "a convolution must be conv:DATA,WEIGHT with the shapes of 3 to 5 axes, such as "
            "conv:8x64x56x56,64x64x3x3, and stride=, padding=, dilation= or of= (data, weight) "
            f"after them, but it is {text!r}"
        )
    if any(0 in shape for shape in shapes if shape):
        raise ValueError(f"each extent of a convolution must be at least 1, but it is {text!r}")
    return [shape for shape in shapes if shape], options


def _numbers(text: str) -> list[int] | None:
    """Return the numbers of ``"3x4"``."""
    return [int(part) for part in text.split("x")] if _NUMBERS.fullmatch(text) else None


def _each_axis(text: str, value: str, rank: int, least: int) -> list[int]:
    """Return the numbers of an option for all axes."""
    numbers = _numbers(value) or []
    numbers = numbers * rank if len(numbers) == 1 else numbers
    if len(numbers) != rank or min(numbers) < least:
        raise ValueError(
            f"stride and dilation (1 or more) and padding must be one number or {rank}, such as "
            f"{'x'.join(['1'] * rank)}, but the convolution is {text!r}"
        )
    return numbers


def _check_sizes(text: str, shapes: Sequence[Sequence[int]]) -> None:
    if max(map(prod, shapes)) > _MOST:
        raise ValueError(
            f"each tensor of a convolution must have at most {_MOST} elements, but it is {text!r}"
        )


def lines_of(text: str, target: tvm.target.Target) -> dict[str, str]:
    """Return the plan of a product or a convolution, a line for each decision.

    Raises
    ------
    ValueError
        If :func:`product_of` or :func:`convolution_of` fails, no kernel computes the convolution,
        or LLVM does not compile for the target.
    """
    from ..cpu.kernel.conv import plan as conv
    from ..cpu.kernel.matmul.plan import plan
    from ..cpu.kernel.matmul.product import Matmul
    from ..target import CPU

    cpu = CPU.of(target)
    if not text.startswith(_CONV):
        product = Matmul(*product_of(text))
        return plan(product, _checked(cpu, target)).lines()
    convolution, of = convolution_of(text)
    results = {"result": conv.FORWARD, "data": conv.DATA, "weight": conv.WEIGHT}
    found = conv.plan(convolution, results[of], _checked(cpu, target))
    if found is None:
        raise ValueError(f"no kernel computes {text!r}: TVM compiles its definition")
    return found.lines()


def _checked(cpu: CPU | None, target: tvm.target.Target) -> CPU:
    if cpu is None:
        raise ValueError(f"--plan needs a target that LLVM compiles for, but it is {target}")
    return cpu
