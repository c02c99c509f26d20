"""The choice between Winograd's filtering and direct kernels, and that dispatch follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dispatched import HOST
from programs import build, tensor
from tvm import relax, tirx
from tvm_ffi import structural_equal

from relax_grad.cpu.kernel.conv._winograd_choice import winograd_square
from relax_grad.cpu.kernel.conv.geometry import Conv2d, Conv3d, Windows
from relax_grad.transform import DispatchKernels

IMAGES = Conv2d(8, 64, 64, (28, 28), (3, 3), padding=(1, 1, 1, 1))
FIVE = replace(IMAGES, kernel=(5, 5), padding=(2, 2, 2, 2))
DILATED = replace(IMAGES, dilation=(2, 2), padding=(2, 2, 2, 2))
ROWS = replace(IMAGES, size=(1, 1024), kernel=(1, 3), padding=(0, 1, 0, 1))
DEPTH = Windows(8, 3, 1, 1, 1, 1)
FEW = {"in_channels": 8, "out_channels": 64}


@pytest.mark.parametrize(
    ("conv", "is_fast"),
    {
        "images": (IMAGES, True),
        "images, few channels": (replace(IMAGES, in_channels=31), False),
        "5x5": (FIVE, True),
        "5x5, 16 channels": (replace(FIVE, out_channels=16), True),
        "5x5, few channels": (replace(FIVE, **FEW), False),
        "dilated": (DILATED, True),
        "dilated, tiles of padding": (
            replace(IMAGES, dilation=(12, 12), padding=(12, 12, 12, 12)),
            False,
        ),
        "one axis": (ROWS, True),
        "one axis of 5": (replace(ROWS, kernel=(1, 5)), True),
        "one axis, few channels": (replace(ROWS, in_channels=16), False),
        "one axis, few tasks": (replace(ROWS, batch=1), False),
        "one axis, long": (replace(ROWS, size=(1, 16384)), False),
        "5x5, few tiles": (replace(FIVE, batch=2, size=(9, 9)), False),
        "symbolic batch": (replace(FIVE, batch=tirx.Var("n", "int32")), True),
        "volumes": (Conv3d(replace(IMAGES, batch=1, **FEW), DEPTH), True),
        "volumes, few channels": (Conv3d(replace(IMAGES, in_channels=7), DEPTH), False),
        "strides": (replace(IMAGES, strides=(2, 1)), False),
    }.values(),
)
def test_kernels_that_save_time_are_by_winograd(conv, is_fast):
    for square in (2, 4):
        assert winograd_square(conv, square) == (square if is_fast else 0)
    assert winograd_square(conv, 0) == 0
    assert winograd_square(conv, 2, of_pairs=True) == 0


def test_weight_gradients_of_volumes_need_more_channels():
    for channels, square in ((8, 0), (12, 2)):
        conv = Conv3d(replace(IMAGES, in_channels=channels), DEPTH)
        assert winograd_square(conv, 2) == 2
        assert winograd_square(conv, 2, of_weight=True) == square


def test_weight_gradients_of_volumes_with_5_taps_are_direct():
    conv = Conv3d(FIVE, DEPTH)
    assert (winograd_square(conv, 2), winograd_square(conv, 2, of_weight=True)) == (2, 0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dispatch_follows_the_choice(rank):
    data, weight = (8, 32, *[26] * rank), (32, 32, *[3] * rank)
    attrs = {"padding": 2, "dilation": 2} if rank == 2 else {"padding": 1}
    forward = getattr(relax.op.nn, f"conv{rank}d")
    backward_data = getattr(relax.op.grad, f"conv{rank}d_backward_data")
    backward_weight = getattr(relax.op.grad, f"conv{rank}d_backward_weight")
    for operands, body in [
        ([data, weight], lambda x, w: forward(x, w, **attrs)),
        ([data, weight], lambda dy, w: backward_data(dy, data, w, **attrs)),
        ([data, data], lambda dy, x: backward_weight(dy, x, weight, **attrs)),
    ]:
        params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(operands)]
        module = build(params, lambda _, *arguments, body=body: body(*arguments))
        kernels = [DispatchKernels(HOST, winograd_tile=tile)(module) for tile in (0, 2, 4)]
        assert not structural_equal(kernels[0], kernels[1])
        assert not structural_equal(kernels[1], kernels[2])
