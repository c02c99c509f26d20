"""PyTorch's operators (ATen) as functions of TVM, through DLPack.

A function takes the operands, the numbers of :mod:`relax_grad.backend.primitives`, the place of the
precision, and the results, whose memory TVM plans. Products and softmax write to this memory. The
others have no such form, and their results are copied.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tvm_ffi

from .._packages import load
from ..ir.module import LIBRARY
from ..op.rank import RANKS
from . import _torch_attention, _torch_losses, _torch_norms
from ._torch_function import Function

__all__ = ["PREFIX", "register"]

#: The prefix of the names of the functions.
PREFIX = LIBRARY + "torch."

#: The places of the precisions.
_TF32, _BFLOAT16 = 1, 2


@functools.cache
def register() -> None:
    """Register the functions with TVM.

    Raises
    ------
    ImportError
        If PyTorch is missing, cannot be imported or is too old.
    """
    torch = load("torch", 'the library "torch"')
    for name, function in _functions().items():
        run = functools.partial(_run, torch, function)
        tvm_ffi.register_global_func(PREFIX + name, run, override=True)


def _run(torch: Any, function: Function, *arguments: Any) -> None:
    """Call a function with tensors of PyTorch instead of TVM's."""
    views = [
        # The capsule, since PyTorch would ask the tensor for its device first, which takes longer.
        torch.utils.dlpack.from_dlpack(each.__dlpack__()) if hasattr(each, "__dlpack__") else each
        for each in arguments
    ]
    *given, precision = views[: -function.results]
    results = views[-function.results :]
    with torch.no_grad(), _on_device(torch, views[0].device, precision == _TF32):
        if precision == _BFLOAT16 and function.is_product:
            _in_bfloat16(torch, function, given, results)
        else:
            function.compute(torch, given, results)


def _in_bfloat16(torch: Any, function: Function, given: Sequence, results: Sequence) -> None:
    """Compute with operands of float32 rounded to bfloat16."""

    def lowered(tensor: Any, place: int, kept: Sequence[int]) -> bool:
        is_float = getattr(tensor, "dtype", None) == torch.float32
        return is_float and place not in kept

    operands = [
        each.to(torch.bfloat16) if lowered(each, place, function.kept_operands) else each
        for place, each in enumerate(given)
    ]
    own = [
        torch.empty_like(each, dtype=torch.bfloat16)
        if lowered(each, place, function.kept_results)
        else each
        for place, each in enumerate(results)
    ]
    function.compute(torch, operands, own)
    for result, value in zip(results, own, strict=True):
        if value is not result:
            result.copy_(value)


#: PyTorch's settings that let a product in half precision add the parts of its sums in it.
_REDUCED_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


@contextlib.contextmanager
def _on_device(torch: Any, device: Any, tf32: bool) -> Iterator[None]:
    """Use TVM's stream of a GPU, with these operands of tensor cores, deterministic algorithms, and
    sums of half precision in float32."""
    if device.type != "cuda":
        yield
        return
    stream = tvm_ffi.get_raw_stream(tvm_ffi.device(f"cuda:{device.index}"))
    settings = (
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn.conv, "fp32_precision", "tf32" if tf32 else "ieee"),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32" if tf32 else "ieee"),
        *((torch.backends.cuda.matmul, name, False) for name in _REDUCED_SUMS),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream, device)))
        for module, name, value in settings:
            before = getattr(module, name)
            if before != value:
                setattr(module, name, value)
                stack.callback(setattr, module, name, before)
        yield


def _functions() -> dict[str, Function]:
    """Return the functions by their names; functions of one operator have its name."""
    functions: dict[str, Function] = {
        "matmul": Function(_matmul, is_product=True),
        "matmul_bias": Function(_matmul_bias, is_product=True),
        **_torch_attention.FUNCTIONS,
        **_torch_losses.FUNCTIONS,
        **_torch_norms.FUNCTIONS,
    }
    for rank in RANKS:
        convolutions: dict[str, Callable] = {
            f"nn.conv{rank}d": functools.partial(_conv, False),
            f"nn.conv{rank}d_transpose": functools.partial(_conv, True),
            f"grad.conv{rank}d_backward_data": _conv_backward_data,
            f"grad.conv{rank}d_backward_weight": _conv_backward_weight,
        }
        for name, compute in convolutions.items():
            functions[name] = Function(compute, is_product=True)
    return functions


# Products.


def _factors(given: Sequence) -> list:
    """Return the factors of a product, with the last two axes exchanged where a flag says so."""
    *operands, first, second = given
    flags = (first, second)
    return [each.mT if is_turned else each for each, is_turned in zip(operands, flags, strict=True)]


def _matmul(torch: Any, given: Sequence, results: Sequence) -> None:
    torch.matmul(*_factors(given), out=results[0])


def _matmul_bias(torch: Any, given: Sequence, results: Sequence) -> None:
    x1, x2, bias, *flags = given
    first, second = _factors([x1, x2, *flags])
    (result,) = results
    rows = first.reshape(-1, first.shape[-1])
    torch.addmm(bias, rows, second, out=result.view(-1, result.shape[-1]))


# Convolutions.


def _settings(numbers: Sequence[int], transposed: bool) -> tuple[tuple, list[tuple[int, ...]]]:
    """Return the arguments of aten's convolution after the bias, and the orders of the axes of
    data, kernel and result."""
    rank = (len(numbers) - 7) // 7
    strides, padding, dilation, output = (numbers[i * rank : (i + 1) * rank] for i in range(4))
    groups, *orders = numbers[4 * rank :]
    axes = rank + 2
    data, kernel, result = (tuple(orders[i * axes : (i + 1) * axes]) for i in range(3))
    return (strides, padding, dilation, transposed, output, groups), [data, kernel, result]


def _conv(transposed: bool, torch: Any, given: Sequence, results: Sequence) -> None:
    data, weight, *numbers = given
    settings, orders = _settings(numbers, transposed)
    data, weight, result = (
        each.permute(order) for each, order in zip((data, weight, results[0]), orders, strict=True)
    )
    result.copy_(torch.ops.aten.convolution(data, weight, None, *settings))


def _conv_backward_data(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, weight, *numbers = given
    settings, orders = _settings(numbers, False)
    data, weight, output_grad = (
        each.permute(order)
        for each, order in zip((results[0], weight, output_grad), orders, strict=True)
    )
    gradient, _, _ = torch.ops.aten.convolution_backward(
        output_grad, data, weight, None, *settings, [True, False, False]
    )
    data.copy_(gradient)


def _conv_backward_weight(torch: Any, given: Sequence, results: Sequence) -> None:
    output_grad, data, *numbers = given
    settings, orders = _settings(numbers, False)
    data, weight, output_grad = (
        each.permute(order)
        for each, order in zip((data, results[0], output_grad), orders, strict=True)
    )
    _, gradient, _ = torch.ops.aten.convolution_backward(
        output_grad, data, weight, None, *settings, [False, True, False]
    )
    weight.copy_(gradient)
