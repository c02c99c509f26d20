"""Operators that stand for gradients in graphs of torch.export, which never run."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("relax_grad", "DEF")
_LIBRARY.define("cotangent(Tensor like, int number) -> Tensor")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents) -> Tensor[]")
_LIBRARY.define(
    "with_backward(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, Tensor[] cotangents, int number, bool once)"
    " -> Tensor[]"
)
_KIND = "CompositeExplicitAutograd"
_LIBRARY.impl("cotangent", lambda like, number: torch.empty_like(like), _KIND)
_LIBRARY.impl("gradient", lambda outputs, inputs, _: list(map(torch.empty_like, inputs)), _KIND)
_LIBRARY.impl("with_backward", lambda outputs, *_: list(map(torch.empty_like, outputs)), _KIND)


def _refused(ctx, *_):
    raise RuntimeError("the gradient of a traced gradient is not computed by PyTorch")


# A gradient makes the results tensors that need one.
for _name in ("gradient", "with_backward"):
    torch.library.register_autograd(f"relax_grad::{_name}", _refused, lib=_LIBRARY)

#: The cotangent of an output in the backward function of a call with a number.
COTANGENT = torch.ops.relax_grad.cotangent.default

#: The vector-Jacobian product of the computation of the outputs.
GRADIENT = torch.ops.relax_grad.gradient.default

#: The outputs of a call, whose gradients a backward function computes.
JOIN = torch.ops.relax_grad.with_backward.default
