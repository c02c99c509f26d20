"""Kernels of recurrent layers and of their gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import relax

from ..kernel.recurrent.layer import MOST_UNITS, PARTS, Layer
from ..kernel.recurrent.recurrence import previous_steps, recurrence, recurrent_backward
from .registry import CallSite, Kernel, all_known, decompose, kernel_for

_LAYERS = ("relax.grad.lstm", "relax.grad.gru", "relax.grad.rnn_tanh", "relax.grad.rnn_relu")
_BACKWARD = "relax.grad.recurrent_backward"


@kernel_for(*_LAYERS, takes_uncast=False)
def layer(site: CallSite) -> Kernel | None:
    """Return the kernel of a layer."""
    call = site.call
    kind = call.op.name.removeprefix("relax.grad.")
    resets_first = kind == "gru" and len(call.args) == 3
    of = _layer(site, "gru_reset" if resets_first else kind, call.args)
    if of is None:
        return None
    return Kernel(partial(recurrence, of, site.cpu, unread=site.unread), call.args)


@kernel_for(_BACKWARD, takes_uncast=False)
def gradient(site: CallSite) -> Kernel | None:
    """Return the kernel of the gradient of a layer."""
    args = site.call.args
    shapes = site.shapes(*args)
    if shapes is None or not isinstance(shapes[0][2], int) or shapes[0][2] == 0:
        return None
    kinds = {parts[0]: kind for kind, parts in PARTS.items()}
    of = _layer(site, kinds[shapes[1][2] // shapes[0][2]], args)
    if of is None:
        return None
    generator = partial(recurrent_backward, of, site.cpu, has_cells_grad=len(args) == 4)
    return Kernel(partial(generator, unread=site.unread), args)


@kernel_for("relax.grad.previous_steps", takes_uncast=False)
def previous(site: CallSite) -> Kernel | None:
    """Return the kernel of the values of the step before each step, which copies whole steps."""
    shapes = site.shapes(*site.call.args)
    if shapes is None or len(shapes[0]) < 2:
        return None
    return Kernel(partial(previous_steps, shapes[0]), site.call.args)


# Without a kernel, half precision consists of casts, and of the operator in float32.
decompose(*_LAYERS, _BACKWARD)


def _layer(site: CallSite, kind: str, args: Sequence) -> Layer | None:
    """Return the sizes of a layer; None if no kernel supports it."""
    shapes, kind_of = site.shapes(*args), site.call.ty
    results = kind_of.fields if isinstance(kind_of, relax.TupleType) else [kind_of]
    # The slopes have more elements than the arguments.
    if shapes is None or all_known(map(site.extents, results)) is None:
        return None
    steps, batch, _ = shapes[0]
    size = next(shape[1] for shape in shapes if len(shape) == 2)
    if not isinstance(size, int) or not 0 < size <= MOST_UNITS:
        return None
    return Layer(kind, steps, batch, size)
