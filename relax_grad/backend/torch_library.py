"""PyTorch's operators (ATen) as functions of TVM, through DLPack.

A function takes the operands, the numbers of :mod:`relax_grad.backend.primitives`, whether tf32 is
allowed, and the results, whose memory TVM plans. Products write to this memory. The others have no
such form, and their results are copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm_ffi

from .._packages import load
from ..op.rank import RANKS

__all__ = ["PREFIX", "register"]

#: The prefix of the names of the functions.
PREFIX = "relax_grad.library.torch."


@functools.cache
def register() -> None:
    """Register the functions with TVM.

    Raises
    ------
    ImportError
        If PyTorch is missing, cannot be imported or is too old.
    """
    torch = load("torch", 'the library "torch"')
    for name, (function, operands) in _functions().items():
        run = functools.partial(_run, torch, function, operands)
        tvm_ffi.register_global_func(PREFIX + name, run, override=True)


def _run(torch: Any, function: Callable, results: int, *arguments: Any) -> None:
    """Call a function with tensors of PyTorch instead of TVM's."""
    views = [
        # The capsule, since PyTorch would ask the tensor for its device first, which takes longer.
        torch.utils.dlpack.from_dlpack(each.__dlpack__()) if hasattr(each, "__dlpack__") else each
        for each in arguments
    ]
    *given, tf32 = views[:-results]
    with torch.no_grad(), _on_device(torch, views[0].device, bool(tf32)):
        function(torch, given, views[-results:])


@contextlib.contextmanager
def _on_device(torch: Any, device: Any, tf32: bool) -> Iterator[None]:
    """Use TVM's stream of a GPU, with these operands of tensor cores, and deterministic
    algorithms."""
    if device.type != "cuda":
        yield
        return
    stream = tvm_ffi.get_raw_stream(tvm_ffi.device(f"cuda:{device.index}"))
    settings = (
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn.conv, "fp32_precision", "tf32" if tf32 else "ieee"),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32" if tf32 else "ieee"),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream, device)))
        for module, name, value in settings:
            before = getattr(module, name)
            if before != value:
                setattr(module, name, value)
                stack.callback(setattr, module, name, before)
        yield


def _functions() -> dict[str, tuple[Callable, int]]:
    """Return the functions by the names of their operators, and the number of their results."""
    functions: dict[str, tuple[Callable, int]] = {
        "matmul": (_matmul, 1),
        "nn.attention": (_attention, 1),
        "nn.attention_bias": (_attention, 1),
        "grad.attention_backward": (_attention_backward, 3),
    }
    for rank in RANKS:
        functions[f"nn.conv{rank}d"] = functools.partial(_conv, False), 1
        functions[f"nn.conv{rank}d_transpose"] = functools.partial(_conv, True), 1
        functions[f"grad.conv{rank}d_backward_data"] = _conv_backward_data, 1
        functions[f"grad.conv{rank}d_backward_weight"] = _conv_backward_weight, 1
    return functions


def _matmul(torch: Any, given: Sequence, results: Sequence) -> None:
    torch.matmul(*given, out=results[0])


def _settings(numbers: Sequence[int], transposed: bool) -> tuple:
    """Return the arguments of aten's convolution after the bias."""
    rank = (len(numbers) - 1) // 4
    strides, padding, dilation, output = (numbers[i * rank : (i + 1) * rank] for i in range(4))
    return strides, padding, dilation, transposed, output, numbers[-1]


def _conv(transposed: bool, torch: Any, given: Sequence, results: Sequence) -> None:
    data, weight, *numbers = given
    results[0].copy_(
        torch.ops.aten.convolution(data, weight, None, *_settings(numbers, transposed))
    )


def _conv_backward_data(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, weight, *numbers = given
    (data,) = results
    gradient, _, _ = torch.ops.aten.convolution_backward(
        output_grad, data, weight, None, *_settings(numbers, False), [True, False, False]
    )
    data.copy_(gradient)


def _conv_backward_weight(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, data, *numbers = given
    (weight,) = results
    _, gradient, _ = torch.ops.aten.convolution_backward(
        output_grad, data, weight, None, *_settings(numbers, False), [False, True, False]
    )
    weight.copy_(gradient)


def _attend(torch: Any, operands: Sequence, scale: float, causal: int) -> Any:
    """Return the attention of operands of shape (batch, length, heads, channels)."""
    query, key, value, *bias = operands
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=bias[0] if bias else None, is_causal=bool(causal), scale=scale
    )
    return attended.transpose(1, 2)


def _attention(torch: Any, given: Sequence, results: Sequence) -> None:
    *operands, scale, causal = given
    results[0].copy_(_attend(torch, operands, scale, causal))


def _attention_backward(torch: Any, given: Sequence, results: Sequence) -> None:
    """Attend again, and differentiate: the operator keeps no residual of the forward pass."""
    output_grad, query, key, value, *rest, scale, causal = given
    wrt = [each.detach().requires_grad_() for each in (query, key, value)]
    with torch.enable_grad():
        attended = _attend(torch, [*wrt, *rest], scale, causal)
    for result, gradient in zip(
        results, torch.autograd.grad(attended, wrt, output_grad), strict=True
    ):
        result.copy_(gradient)
