"""Check the gradient of a whole network against finite differences."""

from __future__ import annotations

import numpy as np
import tvm
from _compile import compile_module
from _network import Network, draw_all
from _training import loss_module

from relax_grad.errors import GradientCheckError

# A step that moves the input of some relu across 0 does not measure the slope. A smaller step does,
# until rounding dominates the difference. A wrong gradient disagrees at all of them.
_STEPS = (1e-7, 1e-8, 1e-9)
_TOLERANCE = 1e-6


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
        slope = sum(float(np.sum(g * s)) for g, s in zip(gradients, signs, strict=True))
        for step in _STEPS:
            above, below = (
                run("loss", [p + h * s for p, s in zip(parameters, signs, strict=True)])[0].numpy()
                for h in (step, -step)
            )
            expected = float(above - below) / (2 * step)
            error = abs(slope - expected) / length
            if error <= _TOLERANCE:
                break
        else:
            raise GradientCheckError(
                f"the gradient gives a slope of {slope:.9g}, but finite differences of the loss "
                f"give {expected:.9g}"
            )
        largest = max(largest, error)
    return largest
