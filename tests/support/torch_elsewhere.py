"""A stand-in for a GPU of PyTorch: tensors of the CPU that claim to be on ``cuda:0``.

A mode of PyTorch notes the memory of tensors that have moved there. Their attributes and the
results of functions claim the device, and functions of tensors here and there fail as PyTorch's do.
TVM runs on the CPU. Streams have no order of their own; a call of a compiled function asserts that
its stream has waited for the work of all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch
import tvm
import tvm_ffi
from compile_cuda import TARGET
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from tvm import relax

import relax_grad
from relax_grad.frontend.torch.run import place, program
from relax_grad.gpu import devices

THERE = torch.device("cuda:0")

#: TVM's device, which the place of the CPU does not have.
_DEVICE = tvm.cpu()

#: The functions that take tensors of several devices.
_BETWEEN = ("copy_", "__set__", "_has_compatible_shallow_copy_type")


class Stream:
    """A stream, which counts the functions that were called in it."""

    def __init__(self, cuda_stream: int):
        self.cuda_stream, self.calls = cuda_stream, 0
        self.waited: dict[int, int] = {}

    def wait_stream(self, other: Stream) -> None:
        self.waited[other.cuda_stream] = other.calls


class Elsewhere(TorchFunctionMode):
    """The device.

    Attributes
    ----------
    stream : Stream
        PyTorch's current stream; ``default`` is the first one.
    called : list[str]
        The names of the compiled functions that were called.
    machines : int
        The number of programs that were compiled.
    """

    def __init__(self):
        super().__init__()
        self.default = self.stream = Stream(0)
        self.streams = {0: self.default}
        self.called: list[str] = []
        self.machines = 0
        # Memory that is not freed has an address of its own.
        self._claims: dict[int, tuple[torch.device, torch.UntypedStorage]] = {}

    def side_stream(self) -> Stream:
        stream = Stream(len(self.streams))
        self.streams[stream.cuda_stream] = stream
        return stream

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
                return tensor.device
            claim = self._claims.get(tensor.untyped_storage().data_ptr())
            return tensor.device if claim is None else claim[0]

    def claim(self, result: object, device: torch.device = THERE) -> object:
        with torch._C.DisableTorchFunction():
            for tensor in _tensors(result):
                if tensor.numel():
                    storage = tensor.untyped_storage()
                    self._claims.setdefault(storage.data_ptr(), (device, storage))
        return result

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._attribute(function.__self__.__name__, function, args)
        if name in ("cuda", "cpu", "to"):
            return self._moved(name, function, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            result = function(*args, **{**kwargs, "device": "cpu"})
            self.stream.calls += 1
            return self.claim(result, _indexed(device))
        found = {self.device_of(t) for t in _tensors((args, kwargs)) if t.ndim or name == "numpy"}
        if not any(device.type == "cuda" for device in found):
            return function(*args, **kwargs)
        assert name != "numpy", "memory of the device is read on the host"
        if len(found) > 1 and name not in _BETWEEN:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found}")
        self.stream.calls += 1
        return self.claim(function(*args, **kwargs), *found) if len(found) == 1 else function(*args)

    def _attribute(self, name: str, function: Callable, args: tuple) -> object:
        device = self.device_of(args[0])
        if name in ("is_cpu", "is_cuda"):
            return device.type == name[3:]
        if name == "device":
            return device
        result = function(*args)
        if name in ("grad", "data") and device.type == "cuda" and result is not None:
            self.claim(result, device)
        return result

    def _moved(self, name: str, function: Callable, args: tuple, kwargs: dict) -> object:
        tensor, *rest = args
        if name == "cpu":
            device = torch.device("cpu")
        elif name == "cuda":
            device = _indexed((rest or [None])[0] or THERE)
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
            tensor = tensor if dtype is None else function(tensor, dtype)
            device = self.device_of(args[0]) if device is None else _indexed(device)
        before = self.device_of(args[0])
        if device.type == "meta" or (tensor.is_meta and device.type == "cpu"):
            return function(*args, **kwargs)
        if before == device:
            return self.claim(tensor, device) if device.type == "cuda" else tensor
        with torch._C.DisableTorchFunction():
            moved = tensor.clone()
        return moved if device.type == "cpu" else self.claim(moved, device)


def _indexed(device: object) -> torch.device:
    device = torch.device(device)
    return THERE if device.type == "cuda" and device.index is None else device


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def elsewhere(compiled: Callable | None = None) -> Iterator[Elsewhere]:
    """Let ``cuda:0`` be the stand-in.

    Parameters
    ----------
    compiled : Callable, optional
        Replaces the last step of the compilation for CUDA; by default, the compilation is for the
        CPU.
    """
    there = Elsewhere()

    class Machine:
        """The functions of a module, with the checks of their calls."""

        def __init__(self, executable, device):
            self._machine = relax.VirtualMachine(executable, device)
            self._is_there = device is _DEVICE
            there.machines += self._is_there

        def __getitem__(self, name: str) -> Callable:
            if not self._is_there:
                return self._machine[name]
            return lambda *arguments: self._call(name, *arguments)

        def _call(self, name: str, *arguments):
            there.called.append(name)
            stream = there.stream
            assert tvm_ffi.get_raw_stream(tvm.cpu()) == stream.cuda_stream
            for other in there.streams.values():
                assert other is stream or stream.waited.get(other.cuda_stream, 0) == other.calls
            stream.calls += 1
            if name != "backward":  # PyTorch's own backward functions claim nothing
                assert all(there.device_of(each) == THERE for each in _tensors(arguments))
            with torch._C.DisableTorchFunction():
                result = self._machine[name](*arguments)
                there.claim(_leaves(result))
            return result

    def imported(module, inputs, *options):
        tensors = [*module.parameters(), *module.buffers(), *inputs.tensors.values()]
        assert all(tensor.is_cpu for tensor in tensors), "the trace is not on the CPU"
        with _pop_mode_temporarily():
            return import_for_wrap(module, inputs, *options)

    import_for_wrap = program.import_for_wrap
    place._place.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "present", lambda *_: _DEVICE)
        target = relax_grad.target.host() if compiled is None else TARGET
        chosen = SimpleNamespace(with_host=lambda _: target)
        patch.setattr(tvm.target.Target, "from_device", lambda _: chosen)
        if compiled is None:
            patch.setattr(devices, "scheduled", lambda target, _: relax_grad.pipeline(target))
        else:
            patch.setattr(devices, "compiled", compiled)
        patch.setattr(program, "import_for_wrap", imported)
        patch.setattr(place, "relax", SimpleNamespace(VirtualMachine=Machine))
        patch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(torch.cuda, "default_stream", lambda _: there.default)
        patch.setattr(torch.cuda, "current_stream", lambda _: there.stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        with there:
            yield there
    place._place.cache_clear()


def _leaves(result: object) -> list[torch.Tensor]:
    """Return the tensors of a result of TVM."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tvm_ffi.Array | list | tuple):
        return [leaf for each in result for leaf in _leaves(each)]
    if isinstance(result, Mapping):
        return _leaves(list(result.values()))
    return []


def train(model, x, y) -> list[float]:
    """Train a classifier for three steps, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
