"""Check the gradient of a whole network against finite differences."""

from __future__ import annotations

import numpy as np
import tvm
from _compile import compile_module
from _network import Network, draw_all
from _training import loss_module

from relax_grad.errors import GradientCheckError

# Few parameters move the inputs of a relu across 0 in a step this small, and float64 resolves it.
_STEP = 1e-6
_TOLERANCE = 1e-5


def check_gradient(
    network: Network,
    layout: str,
    images: np.ndarray,
    labels: np.ndarray,
    target: tvm.target.Target,
    seed: int,
    directions: int = 3,
) -> float:
    """Compare the gradient of one batch with central differences of the loss, in float64.

    All parameters move at once, each up or down at random.

    Returns
    -------
    error : float
        The largest error of the slope along a direction, relative to the length of the gradient,
        which is the slope to expect along a random direction.

    Raises
    ------
    GradientCheckError
        If the two disagree.
    """
    module, layers = loss_module(network, len(labels), layout, "float64")
    machine = compile_module(module, target)
    device = tvm.runtime.Device(target.get_target_device_type(), 0)
    parameters = draw_all(layers.parameters, seed)
    statistics = draw_all(layers.statistics, seed)

    def run(function, values):
        arrays = [images.astype("float64"), labels, *values, *statistics]
        return machine[function](*(tvm.runtime.tensor(array, device) for array in arrays))

    gradients = [gradient.numpy() for gradient in run("loss_adjoint", parameters)[1]]
    length = sum(float(np.sum(gradient**2)) for gradient in gradients) ** 0.5
    rng = np.random.default_rng(seed)
    largest = 0.0
    for _ in range(directions):
        signs = [rng.choice([-1.0, 1.0], value.shape) for value in parameters]
        above, below = (
            float(
                run("loss", [p + step * s for p, s in zip(parameters, signs, strict=True)])[
                    0
                ].numpy()
            )
            for step in (_STEP, -_STEP)
        )
        expected = (above - below) / (2 * _STEP)
        found = sum(float(np.sum(g * s)) for g, s in zip(gradients, signs, strict=True))
        largest = max(largest, abs(found - expected) / length)
        if not largest <= _TOLERANCE:
            raise GradientCheckError(
                f"the gradient gives a slope of {found:.9g}, but finite differences of the loss "
                f"give {expected:.9g}"
            )
    return largest
