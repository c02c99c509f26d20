"""The kernels of ``relax-grad doctor --plan``, and their plans as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, TypeAlias

from ._specs import MOST, Form, Spec

if TYPE_CHECKING:
    import tvm

    from ..cpu.kernel.conv.geometry import Conv2d, Conv3d
    from ..cpu.kernel.language.plans import Plan
    from ..target import CPU

#: Returns the plan of a call for a processor; None if no kernel computes it.
_Make: TypeAlias = "Callable[[CPU], Plan | None]"

_PRODUCT = re.compile(r"(\d+)x(\d+)x(\d+)(?::([NT][NT]))?", re.ASCII)

#: Of windows: the options and their defaults, which are their least values.
_STEPS = {"stride": "1", "padding": "0", "dilation": "1"}

#: The masks of attention by their names.
_MASKS = {"none": None, "top_left": "TopLeft", "bottom_right": "BottomRight"}

_FORMS = {
    "conv": Form(
        "convolution",
        "conv:DATA,WEIGHT with the shapes of 3 to 5 axes, such as conv:8x64x56x56,64x64x3x3, and "
        "stride=, padding=, dilation= or of= (data, weight) after them",
        ((3, 5), (3, 5)),
        {**_STEPS, "of": "result"},
        {"of": ("result", "data", "weight")},
    ),
    "attention": Form(
        "attention",
        "attention:QUERY,KEY with two shapes of batch, positions, heads and features, such as "
        "attention:8x128x12x64,8x128x12x64, and mask= (none, top_left, bottom_right) after them",
        ((4, 4), (4, 4)),
        {"mask": "none"},
        {"mask": tuple(_MASKS)},
    ),
    "pool": Form(
        "pooling",
        "pool:DATA,WINDOW with the shape of 3 to 5 axes and the window, such as "
        "pool:8x64x112x112,3x3, and stride=, padding= or dilation= after them",
        ((3, 5), (1, 3)),
        _STEPS,
    ),
    "sum": Form(
        "sum", "sum:ROWSxCOLUMNS or sum:OUTERxROWSxCOLUMNS, such as sum:512x768", ((2, 3),)
    ),
    "norm": Form("normalisation", "norm:ROWSxCOLUMNS, such as norm:512x768", ((2, 2),)),
    "softmax": Form(
        "softmax",
        "softmax:SHAPE, such as softmax:8x21x64x64, and axis= after it",
        ((1, 8),),
        {"axis": "-1"},
    ),
    "recurrent": Form(
        "recurrent layer",
        "recurrent:STEPSxSEQUENCESxUNITS, such as recurrent:35x20x512, and layer= (lstm, gru, "
        "gru_reset, rnn_tanh, rnn_relu) or of= (data) after them",
        ((3, 3),),
        {"layer": "lstm", "of": "result"},
        {
            "layer": ("lstm", "gru", "gru_reset", "rnn_tanh", "rnn_relu"),
            "of": ("result", "data"),
        },
    ),
}


def lines_of(text: str, target: tvm.target.Target) -> dict[str, str]:
    """Return the plan of a kernel, a line for each decision.

    Parameters
    ----------
    text : str
        A product, ``"128x768x3072"``, or with the layouts of both factors ``"128x768x3072:NT"``;
        or another call, as :data:`_FORMS` has them.
    target : tvm.target.Target
        The target of the kernel.

    Raises
    ------
    ValueError
        If the text has another form, an extent is 0, a tensor has more than 2**31 - 1 elements, no
        kernel computes the call, or LLVM does not compile for the target.
    """
    from ..cpu.kernel.language.plans import processor_as_text
    from ..target import CPU

    kind, cpu = text.partition(":")[0], CPU.of(target)
    make = partial(_call, kind) if kind in _FORMS else _product
    plan_for = make(text)
    if cpu is None:
        raise ValueError(f"--plan needs a target that LLVM compiles for, but it is {target}")
    found = plan_for(cpu)
    if found is None:
        raise ValueError(f"no kernel computes {text!r}: TVM compiles its definition")
    processor = {
        "processor": processor_as_text(cpu),
        "measured": cpu.tuning.measured,
        "threads": str(cpu.cores),
    }
    lines = found.lines()
    return lines if processor.keys() <= lines.keys() else processor | lines


def _call(kind: str, text: str) -> _Make:
    """Return the function that plans a call of a kind."""
    return _MAKE[kind](_FORMS[kind].parse(text))


def _product(text: str) -> _Make:
    from ..cpu.kernel.matmul.plan import plan
    from ..cpu.kernel.matmul.product import Matmul

    product = Matmul(*product_of(text))
    return lambda cpu: plan(product, cpu)


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
    found = _PRODUCT.fullmatch(text)
    if found is None:
        raise ValueError(
            "a product must be ROWSxCOLUMNSxSTEPS, such as 128x768x3072 or 128x768x3072:NT, and "
            f"another kernel begins with {', '.join(f'{kind}:' for kind in _FORMS)}, but it is "
            f"{text!r}"
        )
    rows, columns, steps = (int(number) for number in found.groups()[:3])
    if 0 in (rows, columns, steps):
        raise ValueError(f"each extent of a product must be at least 1, but it is {text!r}")
    if max(rows * columns, rows * steps, columns * steps) > MOST:
        raise ValueError(
            f"each matrix of a product must have at most {MOST} elements, but it is {text!r}"
        )
    form = found[4] or "NN"
    return rows, columns, steps, form[0] == "T", form[1] == "T"


def _convolution(spec: Spec) -> _Make:
    from ..cpu.kernel.conv import plan as conv

    convolution = convolution_of(spec)
    results = {"result": conv.FORWARD, "data": conv.DATA, "weight": conv.WEIGHT}
    return lambda cpu: conv.plan(convolution, results[spec.options["of"]], cpu)


def convolution_of(spec: Spec) -> Conv2d | Conv3d:
    """Return a convolution.

    Raises
    ------
    ValueError
        If there is no such convolution.
    """
    from ..cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows

    (data, weight), text = spec.shapes, spec.text
    if len(data) != len(weight):
        raise _FORMS["conv"].error(text)
    groups, rest = divmod(data[1], weight[1])
    axes = [
        Windows(size, kernel, stride, padding, padding, dilation)
        for size, kernel, stride, padding, dilation in _windows(spec, data[2:], weight[2:])
    ]
    if rest or weight[0] % groups:
        raise ValueError(
            f"the weight of {text!r} has {weight[1]} input channels for each group, which must "
            f"divide {data[1]} channels of the data into groups that divide {weight[0]} channels "
            "of the result"
        )
    if min(axis.number for axis in axes) < 1:
        raise ValueError(f"the kernel of {text!r} is larger than the data with its padding")
    *depth, height, width = [Windows(1, 1, 1, 0, 0, 1), *axes][-max(2, len(axes)) :]
    conv = Conv2d(
        *(data[0], data[1], weight[0], (height.size, width.size), (height.kernel, width.kernel)),
        strides=(height.stride, width.stride),
        padding=(height.before, width.before) * 2,
        dilation=(height.dilation, width.dilation),
        groups=groups,
    )
    spec.check_sizes([data, weight, [data[0], weight[0], *(axis.number for axis in axes)]])
    volumes = Conv3d(conv, *depth) if depth else conv
    of_two_axes = volumes.of_two_axes if isinstance(volumes, Conv3d) else None
    return of_two_axes or volumes


def _windows(
    spec: Spec, sizes: Sequence[int], kernel: Sequence[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Return the size, the taps, the stride, the padding and the dilation of each axis."""
    steps = [spec.each_axis(name, len(sizes), int(least)) for name, least in _STEPS.items()]
    return zip(sizes, kernel, *steps, strict=True)


def _attention(spec: Spec) -> _Make:
    from ..cpu.kernel.attention.plan import attention_plan
    from ..cpu.kernel.attention.sizes import Attention

    query, key = spec.shapes
    if query[0] != key[0] or query[3] != key[3] or query[2] % key[2]:
        raise ValueError(
            "the query and the key of an attention must have one batch and the same features, and "
            "the number of heads of the key must divide the heads of the query, but it is "
            f"{spec.text!r}"
        )
    of = Attention(
        *(query[0], query[1], key[1]),
        heads=query[2],
        key_heads=key[2],
        features=query[3],
        value_features=key[3],
        scale=1 / sqrt(query[3]),
        causal_mask=_MASKS[spec.options["mask"]],
    )
    spec.check_sizes([query, key])
    return lambda cpu: attention_plan(of, cpu)


def _pooling(spec: Spec) -> _Make:
    from ..cpu.kernel.reduction.pool_geometry import Windows, pool_of
    from ..cpu.kernel.reduction.pool_plan import pool_plan

    data, window = spec.shapes
    if len(data) != len(window) + 2:
        raise _FORMS["pool"].error(spec.text)
    axes = []
    for size, taps, stride, padding, dilation in _windows(spec, data[2:], window):
        number = (size + 2 * padding - (taps - 1) * dilation - 1) // stride + 1
        axes.append(Windows(size, taps, stride, padding, number, padding, dilation))
    if min(axis.number for axis in axes) < 1:
        raise ValueError(f"the window of {spec.text!r} is larger than the data with its padding")
    spec.check_sizes([data, [*data[:2], *(axis.number for axis in axes)]])
    pool = pool_of(data[0], data[1], axes)
    return lambda cpu: None if pool is None else pool_plan(pool, cpu)


def _sums(spec: Spec) -> _Make:
    from ..cpu.kernel.reduction.sums_plan import column_sums_plan

    (shape,) = spec.shapes
    spec.check_sizes([shape])
    outer, rows, columns = [1, *shape][-3:]
    # Of a normalisation, gamma's gradient has sums: their terms are computed from dy and x.
    operands = 2 if spec.noun == _FORMS["norm"].noun else 1
    return lambda cpu: column_sums_plan((outer, rows, columns), cpu, operands)


def _softmax(spec: Spec) -> _Make:
    from ..cpu.kernel.reduction.lines import Lines, lines_plan

    (shape,) = spec.shapes
    spec.check_sizes([shape])
    axes = {str(axis): axis for axis in range(-len(shape), len(shape))}
    axis = axes.get(spec.options["axis"])
    if axis is None:
        raise ValueError(
            f"the axis must be one of {-len(shape)} to {len(shape) - 1}, but the softmax is "
            f"{spec.text!r}"
        )
    lines = Lines.along(shape, axis)
    return lambda cpu: None if lines is None else lines_plan(lines, cpu)


def _recurrent(spec: Spec) -> _Make:
    from ..cpu.kernel.recurrent.layer import MOST_UNITS, Layer
    from ..cpu.kernel.recurrent.plan import recurrent_plan

    ((steps, batch, size),) = spec.shapes
    layer = Layer(spec.options["layer"], steps, batch, size)
    spec.check_sizes([[steps, batch, max(layer.gates, layer.slopes) * size]])
    is_turned = spec.options["of"] == "result"
    if size > MOST_UNITS:
        return lambda _: None
    return lambda cpu: recurrent_plan(layer, cpu, is_turned=is_turned)


_MAKE: dict[str, Callable[[Spec], _Make]] = {
    "conv": _convolution,
    "attention": _attention,
    "pool": _pooling,
    "sum": _sums,
    "norm": _sums,
    "softmax": _softmax,
    "recurrent": _recurrent,
}
