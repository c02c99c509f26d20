"""Element-wise functions: sums of layers, changes of layout, and updates of parameters in place."""

from __future__ import annotations

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from tvm import relax
from tvm.relax.training.optimizer import SGD, Adam, MomentumSGD, Optimizer

from ._form import Row, normal, positive

_IMAGE, _PARAMETER = (8, 64, 56, 56), (4096, 1024)
_RATE, _MOMENTUM, _BETAS, _EPSILON = 0.01, 0.9, (0.9, 0.999), 1e-8


_TORCH_SGD = {
    "weight_decay": 0.0,
    "lr": _RATE,
    "dampening": 0.0,
    "foreach": False,
    "nesterov": False,
    "maximize": False,
}


def _update(bb, optimizer: Optimizer, p, g, state):
    """Apply the function of an optimizer to one parameter; return the new parameter and state."""
    function = optimizer.init(p).get_function()
    update = bb.add_func(function, optimizer.name)
    arguments = [relax.Tuple([p]), relax.Tuple([g]), relax.Tuple(state)]
    both = bb.emit(relax.Call(update, arguments))
    params, state = (bb.emit(relax.TupleGetItem(both, i)) for i in range(2))
    fields = range(len(state.ty.fields))
    kept = [bb.emit(relax.TupleGetItem(state, i)) for i in fields if state.ty.fields[i].ndim]
    return relax.Tuple([bb.emit(relax.TupleGetItem(params, 0)), *kept])


def _adam(bb, p, g, first, second):
    unit = relax.const(1.0)
    state = [relax.const(0, "int64"), unit, unit, first, second]
    return _update(bb, Adam(_RATE, _BETAS, _EPSILON), p, g, state)


def _torch_adam(p, g, first, second):
    steps = [torch.tensor(0.0)]
    how = {"amsgrad": False, "beta1": _BETAS[0], "beta2": _BETAS[1], "lr": _RATE}
    how |= {"weight_decay": 0.0, "eps": _EPSILON, "maximize": False}
    adam([p], [g], [first], [second], [], steps, foreach=False, **how)
    return p, first, second


def _momentum(bb, p, g, velocity):
    return _update(bb, MomentumSGD(_RATE, _MOMENTUM), p, g, [relax.const(0, "int64"), velocity])


def _torch_sgd(p, g):
    sgd([p], [g], [None], momentum=0.0, **_TORCH_SGD)
    return (p,)


def _torch_momentum(p, g, velocity):
    sgd([p], [g], [velocity], momentum=_MOMENTUM, **_TORCH_SGD)
    return p, velocity


def _small(rng, _known):
    # A parameter that is updated in place thousands of times stays finite.
    return normal(rng, _PARAMETER) * 1e-3


ROWS = [
    Row(
        "memory",
        "add and relu 8x64x56²",
        [_IMAGE, _IMAGE],
        lambda bb, x, y: relax.op.nn.relu(bb.emit(relax.op.add(x, y))),
        lambda x, y: torch.relu(x + y),
    ),
    Row(
        "memory",
        "NCHW to NHWC 8x64x56²",
        [_IMAGE],
        lambda _, x: relax.op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.permute(0, 2, 3, 1).contiguous(),
    ),
    Row(
        "memory",
        "SGD update in place 4096x1024",
        [_PARAMETER, _small],
        lambda bb, p, g: _update(bb, SGD(_RATE), p, g, [relax.const(0, "int64")]),
        _torch_sgd,
        replaced=(0,),
    ),
    Row(
        "memory",
        "momentum SGD update in place 4096x1024",
        [_PARAMETER, _small, _PARAMETER],
        _momentum,
        _torch_momentum,
        replaced=(0, 2),
    ),
    Row(
        "memory",
        "Adam update in place 4096x1024",
        [_PARAMETER, _small, _PARAMETER, positive(*_PARAMETER)],
        _adam,
        _torch_adam,
        replaced=(0, 2, 3),
    ),
]
