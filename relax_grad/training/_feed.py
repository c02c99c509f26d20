"""The copies between the host and a device while steps run there.

TVM's runtime copies in the default stream of a device only (``TVMTensorCopyFromTo`` takes no
stream), in which the kernels of a step run too. A copy between the device and pinned memory lets
the host go on; a copy of other memory waits until the earlier steps have ended. So each batch goes
through a buffer of pinned memory, and the loss and the metrics come back through another. A stream
for each buffer has no work but to wait for the step: the host waits for that stream, and not for
the steps that follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm_ffi import DLDeviceType

from ._moment import Call

#: Makes the second stream of a device wait for the work that the first one has now.
_wait_for = tvm_ffi.get_global_func("runtime.Device_StreamSyncFromTo")

#: The default stream.
_DEFAULT = 0

#: The kinds of devices with a host memory of their kind, which they read and write by themselves.
_PINNED = {DLDeviceType.kDLCUDA: DLDeviceType.kDLCUDAHost}


def host_of(device: tvm.runtime.Device) -> tvm.runtime.Device:
    """Return the device of TVM for host memory that a device reads and writes by itself: pinned
    memory for CUDA."""
    kind = _PINNED.get(device.dlpack_device_type())
    return tvm.cpu() if kind is None else tvm.device(kind, 0)


class _Slot:
    """Buffers for the arguments and results of one step, which the next step of the slot takes
    again.

    Attributes
    ----------
    buffers : dict[int, tuple[Tensor, Tensor]]
        Memory of the host and of the device by the position of the argument.
    scalars : list[Tensor]
        Memory of the host for the loss and the metrics.
    """

    def __init__(self, stream: int):
        self.stream = stream
        self.buffers: dict[int, tuple[tvm.runtime.Tensor, tvm.runtime.Tensor]] = {}
        self.scalars: list[tvm.runtime.Tensor] = []


class Feed:
    """Copies the arguments of steps to a device, and their losses and metrics back, while earlier
    steps run.

    Parameters
    ----------
    device : tvm.Device
        The device.
    ahead : int
        The number of steps that begin before the results of the step before them are read.
    """

    def __init__(self, device: tvm.runtime.Device, ahead: int):
        self.ahead = ahead
        self._device, self._host = device, host_of(device)
        streams = [device.create_raw_stream() for _ in range(ahead + 1)]
        weakref.finalize(self, _free, device, streams)
        self._slots = [_Slot(stream) for stream in streams]
        self._next = 0

    def staged(self, arguments: Sequence) -> list:
        """Return arguments with copies on the device of tensors of the host. The tensors may change
        afterwards, even before the copies have arrived.

        The copies are in the memory of an earlier step, which has ended. No tensor of a state is in
        this memory: a donated result is a selection between two tensors.
        """
        slot = self._slots[self._next % len(self._slots)]
        staged: list = []
        for i, argument in enumerate(arguments):
            is_single = isinstance(argument, tvm.runtime.Tensor)
            if is_single and argument.device != self._device:
                argument = self._copied(slot, i, argument)
            staged.append(argument)
        return staged

    def _copied(self, slot: _Slot, i: int, tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        buffers = slot.buffers.get(i)
        if buffers is None or not _is_like(buffers[0], tensor):
            here, there = (_empty(tensor, device) for device in (self._host, self._device))
            slot.buffers[i] = buffers = here, there
        here, there = buffers
        tensor.copyto(here)
        here.copyto(there)
        return there

    def follow(self, call: Call) -> None:
        """Begin to copy the loss and the metrics of a step, which was called with the arguments of
        :meth:`staged`."""
        slot = self._slots[self._next % len(self._slots)]
        self._next += 1
        arguments = [slot.buffers[i][0] for i in sorted(slot.buffers)]
        scalars = call.scalars
        if len(slot.scalars) != len(scalars) or not all(map(_is_like, slot.scalars, scalars)):
            slot.scalars = [_empty(tensor, self._host) for tensor in scalars]
        for tensor, here in zip(scalars, slot.scalars, strict=True):
            tensor.copyto(here)
        _wait_for(self._device, _DEFAULT, slot.stream)
        call.reading = _Reading(self._device, slot.stream, slot.scalars, arguments)

    def batch(self, call: Call, count: int) -> list[tvm.runtime.Tensor]:
        """Return copies on the CPU of the first arguments of a step that is under way."""
        assert isinstance(call.reading, _Reading)
        return [here.copyto(tvm.cpu()) for here in call.reading.arguments[:count]]


class _Reading:
    """The loss and the metrics of a step, on their way to the host."""

    def __init__(
        self,
        device: tvm.runtime.Device,
        stream: int,
        scalars: Sequence[tvm.runtime.Tensor],
        arguments: Sequence[tvm.runtime.Tensor],
    ):
        self._device, self._stream, self._scalars = device, stream, scalars
        #: Memory of the host with the arguments, until the next step of the slot.
        self.arguments = arguments

    def wait(self) -> None:
        """Wait until the step has ended."""
        self._device.sync(self._stream)

    def arrays(self) -> list[np.ndarray]:
        """Wait until the step has ended, and return its loss and metrics."""
        self.wait()
        return list(map(_array, self._scalars))


def _empty(tensor: tvm.runtime.Tensor, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    return tvm.runtime.empty(tensor.shape, tensor.dtype, device)


def _array(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """Return a copy of a tensor of the host. ``Tensor.numpy`` would wait for the default stream."""
    try:
        return np.from_dlpack(tensor).copy()
    except (BufferError, RuntimeError, TypeError):  # bfloat16, which NumPy lacks
        return tensor.numpy()


def _is_like(one: tvm.runtime.Tensor, other: tvm.runtime.Tensor) -> bool:
    return one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape)


def _free(device: tvm.runtime.Device, streams: Sequence[int]) -> None:
    for stream in streams:
        device.free_raw_stream(stream)
