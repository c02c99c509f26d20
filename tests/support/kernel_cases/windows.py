"""The calls of convolutions and pools whose kernels tests compile and run."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import relax

from .case import KernelCase, N


def window_cases() -> Iterator[KernelCase]:
    """Yield the calls of convolutions and pools."""
    for attrs, data, weight, out in _CONVOLUTIONS:
        yield from _convolutions(attrs, data, weight, out)
    yield from _transposed_convolutions()
    yield from _biased_convolutions()
    for attrs, data, out in _POOLS:
        yield from _pools(attrs, data, out)


#: Attributes and shapes of data, weight and result; the results have a batch axis too.
_CONVOLUTIONS = [
    ({"padding": 1}, (19, 9, 11), (21, 19, 3, 3), (21, 9, 11)),
    ({"padding": 1}, (35, 7, 9), (33, 35, 3, 3), (33, 7, 9)),
    ({"padding": 1}, (33, 26, 27), (35, 33, 3, 3), (35, 26, 27)),
    ({"padding": 2}, (5, 9, 8), (18, 5, 5, 5), (18, 9, 8)),
    ({"padding": 2}, (17, 9, 8), (21, 17, 5, 5), (21, 9, 8)),
    ({"padding": 2, "dilation": 2}, (19, 17, 18), (17, 19, 3, 3), (17, 17, 18)),
    ({}, (9, 23, 25), (13, 9, 1, 1), (13, 23, 25)),
    ({"strides": 2}, (17, 9, 7), (35, 17, 1, 1), (35, 5, 4)),
    ({"strides": (2, 1), "padding": (0, 1, 2, 1)}, (8, 9, 8), (12, 8, 2, 3), (12, 5, 8)),
    ({"strides": 2, "padding": 3}, (3, 21, 23), (20, 3, 7, 7), (20, 11, 12)),
    ({"padding": 1}, (1, 9, 11), (40, 1, 3, 3), (40, 9, 11)),
    ({"groups": 3, "dilation": 2}, (9, 9, 9), (12, 3, 3, 3), (12, 5, 5)),
    ({"groups": 21, "padding": 1}, (21, 19, 37), (21, 1, 3, 3), (21, 19, 37)),
    ({"groups": 21, "padding": 1, "strides": 2}, (21, 9, 5), (21, 1, 3, 3), (21, 5, 3)),
    ({"groups": 7, "padding": 2}, (7, 5, 6), (7, 1, 5, 5), (7, 5, 6)),
    ({"strides": 2, "padding": (1, 3)}, (6, 20), (10, 6, 5), (10, 10)),
    ({"padding": 2}, (35, 61), (33, 35, 5), (33, 61)),
    ({"padding": 1}, (5, 4, 5, 6), (7, 5, 3, 3, 3), (7, 4, 5, 6)),
    # The data of the first one, and the gradient of the second one's result, are copied in parts.
    ({"padding": 1, "strides": 2}, (440, 9, 9), (40, 440, 3, 3), (40, 5, 5)),
    ({"padding": (2, 3), "dilation": 2}, (40, 6, 7), (480, 40, 3, 4), (480, 6, 7)),
    ({"padding": 1, "strides": (2, 1, 1)}, (13, 5, 7, 9), (19, 13, 3, 3, 3), (19, 3, 7, 9)),
]


def _convolutions(attrs, data, weight, out) -> Iterator[KernelCase]:
    rank = len(data) - 1
    forward = getattr(relax.op.nn, f"conv{rank}d")
    data_gradient = getattr(relax.op.grad, f"conv{rank}d_backward_data")
    weight_gradient = getattr(relax.op.grad, f"conv{rank}d_backward_weight")
    detail = f"{weight} {attrs}"
    yield KernelCase(
        f"relax.nn.conv{rank}d",
        [(N, *data), weight],
        lambda _, x, w: forward(x, w, **attrs),
        detail=detail,
    )
    yield KernelCase(
        f"relax.grad.conv{rank}d_backward_data",
        [(N, *out), weight],
        lambda n, dy, w: data_gradient(dy, (n, *data), w, **attrs),
        detail=detail,
    )
    yield KernelCase(
        f"relax.grad.conv{rank}d_backward_weight",
        [(N, *out), (N, *data)],
        lambda _, dy, x: weight_gradient(dy, x, weight, **attrs),
        detail=detail,
    )


def _transposed_convolutions() -> Iterator[KernelCase]:
    """They have the kernels of data gradients."""
    for attrs, data, weight in [
        ({"strides": 3, "output_padding": 1}, (9, 7), (9, 5, 4)),
        ({"strides": 2}, (21, 5, 7), (21, 13, 2, 2)),
        ({"strides": (1, 2, 1), "padding": 1}, (5, 3, 4, 5), (5, 6, 3, 3, 2)),
    ]:
        rank = len(data) - 1
        function = getattr(relax.op.nn, f"conv{rank}d_transpose")
        yield KernelCase(
            f"relax.nn.conv{rank}d_transpose",
            [(N, *data), weight],
            lambda _, x, w, function=function, attrs=attrs: function(x, w, **attrs),
            detail=f"{weight} {attrs}",
        )


def _biased_convolutions() -> Iterator[KernelCase]:
    """In half precision, their kernels add the bias and apply ReLU."""
    nn = relax.op.nn
    for name, attrs, data, weight in [
        ("conv2d", {"padding": 1}, (35, 7, 9), (33, 35, 3, 3)),
        ("conv2d", {}, (9, 23, 25), (13, 9, 1, 1)),
        ("conv2d", {"groups": 21, "padding": 1}, (21, 5, 37), (21, 1, 3, 3)),
        ("conv2d", {"strides": 2, "padding": 3}, (3, 21, 23), (20, 3, 7, 7)),
        ("conv2d_transpose", {"strides": 2}, (21, 5, 7), (21, 13, 2, 2)),
        ("conv3d", {"padding": 1}, (5, 4, 5, 6), (7, 5, 3, 3, 3)),
    ]:
        channels = weight["transpose" in name]
        for rectifies in (False, True):

            def body(_, x, w, bias, name=name, attrs=attrs, rectifies=rectifies):
                y = relax.op.add(getattr(nn, name)(x, w, **attrs), bias)
                return nn.relu(y) if rectifies else y

            yield KernelCase(
                f"relax.nn.{name}",
                [(N, *data), weight, (channels,) + (1,) * (len(data) - 1)],
                body,
                detail=f"{weight} {attrs}, a bias{', ReLU' if rectifies else ''}",
                differs_in_halves=True,
            )


#: Attributes and shapes of data and result.
_POOLS = [
    ({"pool_size": (3, 3), "strides": (2, 2), "padding": (1, 1)}, (5, 19, 37), (5, 10, 19)),
    ({"pool_size": (2, 2), "strides": (2, 2)}, (3, 12, 34), (3, 6, 17)),
    # Rows of whole cache lines, which large tensors store past the caches.
    ({"pool_size": (3, 3), "strides": (2, 2), "padding": (1, 1)}, (2, 7, 32), (2, 4, 16)),
    (
        {"pool_size": (2, 3), "strides": (2, 1), "padding": (0, 1, 1, 0), "ceil_mode": True},
        (3, 9, 41),
        (3, 5, 40),
    ),
    ({"pool_size": (3,), "strides": (2,), "padding": (1,)}, (5, 37), (5, 19)),
    ({"pool_size": (2, 2, 2), "strides": (2, 2, 2)}, (3, 4, 6, 34), (3, 2, 3, 17)),
]


def _pools(attrs, data, out) -> Iterator[KernelCase]:
    rank = len(data) - 1
    for kind, more in (
        ("max", {}),
        ("avg", {"count_include_pad": True}),
        ("avg", {"count_include_pad": False}),
    ):
        forward = getattr(relax.op.nn, f"{kind}_pool{rank}d")
        backward = getattr(relax.op.grad, f"{kind}_pool{rank}d_backward")
        every = {**attrs, **more}
        yield KernelCase(
            f"relax.nn.{kind}_pool{rank}d",
            [(N, *data)],
            lambda _, x, f=forward, a=every: f(x, **a),
            detail=str(every),
        )
        yield KernelCase(
            f"relax.grad.{kind}_pool{rank}d_backward",
            [(N, *out), (N, *data)],
            lambda _, dy, x, f=backward, a=every: f(dy, x, **a),
            detail=str(every),
        )
