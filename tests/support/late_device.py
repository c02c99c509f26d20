"""A device whose copies come as late as CUDA allows, on a CPU: the second device of the CPU is the
GPU, and the third one is pinned memory.

The default stream is a list of operations. A copy from pinned memory is checked when the stream
gets there: its source must still be what it was. A copy to pinned memory leaves NaN until then.
Copies of other memory wait for the stream, as ``cudaMemcpyAsync`` does for memory that is not
pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tvm

import relax_grad
from relax_grad.gpu import devices
from relax_grad.training import _device, _feed

GPU, PINNED = tvm.cpu(1), tvm.cpu(2)

#: TVM's methods, which the stand-in replaces.
_copyto, _numpy = tvm.runtime.Tensor.copyto, tvm.runtime.Tensor.numpy


class LateDevice:
    """The stand-in for a GPU.

    Attributes
    ----------
    waits : int
        How often the host waited for the default stream.
    most : int
        The most steps that were called and not known to have ended.
    """

    def __init__(self):
        self.waits = self.most = 0
        self._operations: list[Callable[[], None]] = []
        self._done, self._marks, self._begun = 0, {}, []

    def reset(self) -> None:
        self.waits = self.most = 0

    def _run(self, until: int) -> None:
        for operation in self._operations[self._done : until]:
            operation()
        self._done = max(self._done, until)
        self._begun = [place for place in self._begun if place >= self._done]

    def _wait(self) -> None:
        self.waits += 1
        self._run(len(self._operations))

    def create(self, _device) -> int:
        self._marks[len(self._marks) + 1] = 0
        return len(self._marks)

    def free(self, _device, stream: int) -> None:
        assert stream in self._marks

    def wait_for(self, device, source: int, stream: int) -> None:
        assert (device, source) == (GPU, 0)
        self._marks[stream] = len(self._operations)

    def sync(self, device, stream: int | None = None) -> None:
        assert device == GPU
        if stream:
            self._run(self._marks[stream])
        else:
            self._wait()

    def numpy(self, tensor) -> np.ndarray:
        if tensor.device in (GPU, PINNED):
            self._wait()
        return _numpy(tensor)

    def copyto(self, tensor, target, mem_scope=None):
        if not isinstance(target, tvm.runtime.Tensor):
            target = tvm.runtime.empty(tensor.shape, tensor.dtype, target)
        pair = tensor.device, target.device
        assert pair != (PINNED, PINNED), "a batch must be on the CPU, but it is on cuda_host"
        if pair == (PINNED, GPU):
            bits = _numpy(tensor).tobytes()

            def check() -> None:
                assert _numpy(tensor).tobytes() == bits, "pinned memory was written too early"

            self._operations.append(check)
            return _copyto(tensor, target)
        if pair == (GPU, PINNED):
            late = tvm.runtime.tensor(_numpy(tensor))
            target.copyfrom(np.full(target.shape, np.nan, str(target.dtype)))
            self._operations.append(lambda: _copyto(late, target) and None)
            return target
        if GPU in pair and pair != (GPU, GPU):
            self._wait()
        return _copyto(tensor, target)

    def call(self, place, machine, name, arguments, feed):
        function, arguments = _call(place, machine, name, arguments, feed)
        for argument in arguments:
            single = argument if isinstance(argument, list | tuple) else [argument]
            assert all(tensor.device == GPU for tensor in single if hasattr(tensor, "device"))
        self._begun.append(len(self._operations))
        self._operations.append(lambda: None)
        self.most = max(self.most, len(self._begun))
        return function, arguments


_call = _device.DevicePlace.call


@contextlib.contextmanager
def late_device() -> Iterator[LateDevice]:
    """Let ``device="cuda"`` be a :class:`LateDevice`, with the pipeline for CPUs."""
    device, kind = LateDevice(), type(GPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "present", lambda *_: GPU)
        patch.setattr(_device, "_KINDS", {"cuda": "llvm"})
        patch.setattr(devices, "scheduled", relax_grad.pipeline)
        patch.setattr(_feed, "host_of", lambda _: PINNED)
        patch.setattr(_feed, "_wait_for", device.wait_for)
        for name, method in (
            ("create_raw_stream", device.create),
            ("free_raw_stream", device.free),
            ("sync", device.sync),
        ):
            patch.setattr(kind, name, _method(method))
        patch.setattr(tvm.runtime.Tensor, "numpy", _method(device.numpy))
        patch.setattr(tvm.runtime.Tensor, "copyto", _method(device.copyto))
        patch.setattr(_device.DevicePlace, "call", _method(device.call))
        yield device
        device._run(len(device._operations))


def _method(function: Callable) -> Callable:
    return lambda *arguments, **options: function(*arguments, **options)


#: The arguments of a trainer on the device.
OPTIONS = {"device": "cuda", "target": relax_grad.target.host()}
