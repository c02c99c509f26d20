"""The devices where wrapped modules run: the CPU, and GPUs of CUDA."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax

from ....cpu import programs
from ....cpu.threads import let_torch_threads_sleep
from ....gpu import devices
from ....transform import PlainNames

#: The pipeline of compiled functions on every device.
PIPELINE = "relax_grad"


class Place:
    """The CPU.

    Attributes
    ----------
    device : torch.device
        PyTorch's name of the device.
    is_cpu : bool
        Whether it is the CPU, for whose kernels functions are differentiated.
    """

    def __init__(self, device: torch.device):
        self.device, self.is_cpu = device, device.type == "cpu"
        self.unused_seed = torch.zeros((), dtype=torch.int64, device=device)

    def __str__(self) -> str:
        return "the CPU"

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is in the memory of the device."""
        return tensor.is_cpu

    def check(self, traced_autocast: bool) -> None:
        """Raise ValueError if a module cannot run here now.

        Parameters
        ----------
        traced_autocast : bool
            Whether its trace has entered ``torch.autocast("cuda")``.
        """

    def seed(self) -> torch.Tensor:
        """Return a seed of PyTorch's generator."""
        return torch.randint(2**63 - 1, ())

    def machine(
        self, module: tvm.IRModule, target: tvm.target.Target, settings: Mapping[str, object]
    ) -> Callable[[str], Callable]:
        """Return a function that returns the compiled functions of a module by their names.

        Parameters
        ----------
        module : tvm.IRModule
            The module.
        target : tvm.target.Target
            The target on the CPU.
        settings : Mapping
            Further arguments of ``tvm.compile``.
        """
        let_torch_threads_sleep()
        machine = relax.VirtualMachine(programs.compiled(module, target, settings), tvm.cpu())
        return machine.__getitem__


class DevicePlace(Place):
    """A GPU of CUDA, on which functions run in PyTorch's current stream.

    TVM's allocator takes freed memory again at once, whichever stream its kernels run in. So each
    call begins after the work of the other streams in which calls have run.
    """

    def __init__(self, device: torch.device):
        remedy = "without a GPU, move the module by .cpu()"
        self._device = devices.present("cuda", device.index, f"a module on {device}", remedy)
        super().__init__(device)
        default = torch.cuda.default_stream(device)
        self._streams = {default.cuda_stream: default}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.device}, where the module is"

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def check(self, traced_autocast: bool) -> None:
        if torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "a wrapped module runs in the dtypes that it was traced with: call it outside of "
                "torch.autocast"
            )
        if traced_autocast:
            raise ValueError(
                'the module enters torch.autocast("cuda"), which has no effect in the trace, whose '
                'tensors are on the CPU; write torch.autocast("cpu", torch.bfloat16), or convert '
                "tensors by .to(dtype)"
            )
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a wrapped module cannot be captured in a CUDA graph: TVM allocates its memory at "
                "each call. Call it outside of torch.cuda.graph"
            )

    def seed(self) -> torch.Tensor:
        # The same numbers as on the CPU. A copy of the tensor would wait for the device.
        return torch.full((), super().seed().item(), dtype=torch.int64, device=self.device)

    def machine(
        self, module: tvm.IRModule, target: tvm.target.Target, settings: Mapping[str, object]
    ) -> Callable[[str], Callable]:
        target = tvm.target.Target.from_device(self._device).with_host("llvm")
        if settings["relax_pipeline"] == PIPELINE:
            settings = {
                **settings,
                "relax_pipeline": devices.scheduled(target, "Move it by .cpu()"),
            }
        remedy = "Call the module outside of this PassContext"
        executable = devices.compiled(PlainNames()(module), target, settings, remedy)
        with self._lock, torch.cuda.device(self.device):
            # Constants are copied in the default stream, to memory that other streams may have
            # freed, and calls do not wait for the copies.
            torch.cuda.synchronize(self.device)
            machine = relax.VirtualMachine(executable, self._device)
            self._device.sync()
        return lambda name: functools.partial(self._call, machine[name])

    def _call(self, function: Callable, *arguments: Any) -> Any:
        """Call a compiled function in PyTorch's current stream of the device."""
        with self._lock, torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device)
            self._streams[stream.cuda_stream] = stream
            for handle, other in self._streams.items():
                if handle != stream.cuda_stream:
                    stream.wait_stream(other)
            with tvm_ffi.use_raw_stream(self._device, stream.cuda_stream):
                return function(*arguments)


#: The CPU.
CPU = Place(torch.device("cpu"))


def place_of(tensor: torch.Tensor) -> Place:
    """Return the place of a module that has this tensor first.

    Raises
    ------
    ValueError
        If functions are compiled for no such device.
    RuntimeError
        If TVM cannot use the device.
    """
    return CPU if tensor.is_cpu else _place(tensor.device)


@functools.cache
def _place(device: torch.device) -> Place:
    check_kind(device)
    return DevicePlace(device)


def check_kind(device: torch.device) -> None:
    """Raise ValueError if wrapped modules cannot run on a device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"a wrapped module runs on the CPU and on GPUs of CUDA, and not on {device}: move it "
            "by .cpu() or .cuda()"
        )


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy on the CPU of a tensor on a GPU."""
    if tensor.is_cpu or tensor.is_meta:
        return tensor
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def traced_on_cpu(module: nn.Module) -> Iterator[None]:
    """Let a module have copies of its tensors on the CPU while it is traced: the graph is the same
    for all devices.

    Tensors that share memory have copies that do.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.untyped_storage()
        storage = storages.get(own.data_ptr())
        if storage is None:
            storage = torch.UntypedStorage(own.nbytes()).copy_(own, False)
            storages[own.data_ptr()] = storage
        view = tensor.storage_offset(), tensor.size(), tensor.stride()
        copy = torch.empty(0, dtype=tensor.dtype).set_(storage, *view)
        return nn.Parameter(copy, tensor.requires_grad) if _is_parameter(tensor) else copy

    moved = [
        (owner, name, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for name, tensor in table.items()
        if tensor is not None and not tensor.is_cpu and tensor.layout is torch.strided
        if not tensor.is_meta
    ]
    try:
        for owner, name, tensor in moved:
            if id(tensor) not in copies:
                copies[id(tensor)] = copied(tensor)
            # Recurrent layers have a list of their parameters, which an assignment changes too.
            setattr(owner, name, copies[id(tensor)])
        yield
    finally:
        for owner, name, tensor in moved:
            setattr(owner, name, tensor)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


@contextlib.contextmanager
def noting_autocast() -> Iterator[list[str]]:
    """Note the regions of ``torch.autocast`` for GPUs that are entered, which have no effect on
    tensors of the CPU."""
    noted: list[str] = []
    enter = torch.autocast.__enter__

    def noting(region: Any) -> Any:
        if region.device == "cuda" and region._enabled:
            noted.append(region.device)
        return enter(region)

    torch.autocast.__enter__ = noting
    try:
        yield noted
    finally:
        torch.autocast.__enter__ = enter
