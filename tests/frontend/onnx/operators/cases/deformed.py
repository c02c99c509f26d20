"""DeformConv for ONNX's evaluator, in float64: that of the package ``onnx`` rounds the places of
samples to float32."""

from __future__ import annotations

import itertools

import numpy as np
from onnx.reference.op_run import OpRun


def _sampled(image: np.ndarray, row: float, column: float) -> float:
    """Return the bilinear interpolation of an image, which is zero outside."""
    rows, columns = image.shape
    top, left = int(np.floor(row)), int(np.floor(column))
    total = 0.0
    for i, j in itertools.product((top, top + 1), (left, left + 1)):
        if 0 <= i < rows and 0 <= j < columns:
            total += image[i, j] * (1 - abs(row - i)) * (1 - abs(column - j))
    return total


class DeformConv(OpRun):
    op_domain = ""

    def _run(
        self, x, weight, offset, bias=None, mask=None, dilations=None, group=1, kernel_shape=None,
        offset_group=1, pads=None, strides=None,
    ):  # fmt: skip
        strides, dilations = strides or [1, 1], dilations or [1, 1]
        top, left = (pads or [0] * 4)[:2]
        batch, channels = x.shape[:2]
        filters, depth, *kernel = weight.shape
        out = offset.shape[2:]
        taps = list(np.ndindex(*kernel))
        offset = offset.reshape(batch, offset_group, len(taps), 2, *out)
        mask = np.ones(offset[:, :, :, 0].shape) if mask is None else mask
        mask = mask.reshape(batch, offset_group, len(taps), *out)
        # The samples of each channel, tap and place, then a product with the weight of each group.
        samples = np.zeros((batch, channels, len(taps), *out))
        for n, channel, t, i, j in np.ndindex(*samples.shape):
            part = channel // (channels // offset_group)
            down, right = offset[n, part, t, :, i, j]
            row = i * strides[0] - top + taps[t][0] * dilations[0] + down
            column = j * strides[1] - left + taps[t][1] * dilations[1] + right
            samples[n, channel, t, i, j] = _sampled(x[n, channel], row, column)
            samples[n, channel, t, i, j] *= mask[n, part, t, i, j]
        samples = samples.reshape(batch, group, depth, len(taps), *out)
        weight = weight.reshape(group, filters // group, depth, len(taps))
        result = np.einsum("ngdtij,gfdt->ngfij", samples, weight).reshape(batch, filters, *out)
        if bias is not None:
            result = result + bias[:, None, None]
        return (result.astype(x.dtype),)
