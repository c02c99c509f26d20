"""Operators in graphs of torch.export, which never run: for gradients, and for the recurrences of
layers."""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("relax_grad", "DEF")
_LIBRARY.define("cotangent(Tensor like, int number) -> Tensor")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents) -> Tensor[]")
_LIBRARY.define(
    "with_backward(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, Tensor[] cotangents, "
    "int number, bool once) -> Tensor[]"
)
_LIBRARY.define("lstm(Tensor data, Tensor hidden, Tensor cell, Tensor weight) -> (Tensor, Tensor)")
_LIBRARY.define("gru(Tensor data, Tensor hidden, Tensor weight, Tensor bias) -> Tensor")
_LIBRARY.define("rnn_tanh(Tensor data, Tensor hidden, Tensor weight) -> Tensor")
_LIBRARY.define("rnn_relu(Tensor data, Tensor hidden, Tensor weight) -> Tensor")
_LIBRARY.define("previous_steps(Tensor data, Tensor initial) -> Tensor")
_KIND = "CompositeExplicitAutograd"
_LIBRARY.impl("cotangent", lambda like, number: torch.empty_like(like), _KIND)
_LIBRARY.impl("gradient", lambda outputs, inputs, _: list(map(torch.empty_like, inputs)), _KIND)
_LIBRARY.impl("with_backward", lambda outputs, *_: list(map(torch.empty_like, outputs)), _KIND)


def _states(data: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return data.new_empty((data.shape[0], *hidden.shape))


_LIBRARY.impl("lstm", lambda x, h, c, w: (_states(x, h), _states(x, h)), _KIND)
_LIBRARY.impl("gru", lambda x, h, *_: _states(x, h), _KIND)
for _name in ("rnn_tanh", "rnn_relu"):
    _LIBRARY.impl(_name, lambda x, h, w: _states(x, h), _KIND)
_LIBRARY.impl("previous_steps", lambda x, _: torch.empty_like(x), _KIND)


def _refused(ctx: Any, *_: object) -> None:
    raise RuntimeError("the gradient of a traced gradient is not computed by PyTorch")


# A gradient makes the results tensors that need one.
for _name in (
    *("gradient", "with_backward", "lstm", "gru", "rnn_tanh", "rnn_relu", "previous_steps"),
):
    torch.library.register_autograd(f"relax_grad::{_name}", _refused, lib=_LIBRARY)

#: The cotangent of an output in the backward function of a call with a number.
COTANGENT = torch.ops.relax_grad.cotangent.default

#: The vector-Jacobian product of the computation of the outputs.
GRADIENT = torch.ops.relax_grad.gradient.default

#: The outputs of a call, whose gradients a backward function computes.
JOIN = torch.ops.relax_grad.with_backward.default

#: The recurrences of layers over time, as in ``relax_grad.op.recurrent``.
LSTM = torch.ops.relax_grad.lstm.default
GRU = torch.ops.relax_grad.gru.default
RNN = {
    torch.tanh: torch.ops.relax_grad.rnn_tanh.default,
    torch.relu: torch.ops.relax_grad.rnn_relu.default,
}

#: The value of the step before each step.
PREVIOUS = torch.ops.relax_grad.previous_steps.default
