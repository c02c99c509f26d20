"""Trainers whose steps are compiled for CUDA and run by the emulator of kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import tvm
from compile_cuda import Compiled, compile_for_cuda

from relax_grad.training import Trainer, TrainStep, _device
from relax_grad.training import trainer as trainer_module
from relax_grad.training._donation import donating
from relax_grad.training._moment import Call

#: The last argument of a step: the steps before it were applied.
GOES_ON = tvm.runtime.tensor(np.array(True))


class _Emulated(_device.Place):
    """The emulator, on tensors of the host."""

    def __init__(self):
        super().__init__(tvm.target.Target("llvm"), None)
        self.compiled: Compiled | None = None

    def step(self, step: TrainStep) -> tvm.runtime.Executable:
        if self.compiled is None:
            module = _device.prepared(donating(step, is_chained=True), _device.roots_of(step))
            self.compiled = compile_for_cuda(module, "relax_grad")
        return self.compiled.executable

    def goes_on(self, calls: Sequence[Call]) -> Sequence[tvm.runtime.Tensor]:
        return calls[-1].further if calls else [GOES_ON]


@contextlib.contextmanager
def emulated(step: TrainStep, **options) -> Iterator[tuple[Trainer, Trainer]]:
    """Yield two trainers of a step, whose threads run in ascending and in descending order."""
    place = _Emulated()
    with mock.patch.object(trainer_module, "place_of", return_value=place):
        first, second = Trainer(step, **options), Trainer(step, **options)
    compiled = place.compiled
    assert compiled is not None
    assert (compiled.on_host, compiled.serial) == ([], [])
    with compiled.emulate() as emulation:
        for trainer, descending in ((first, False), (second, True)):
            _follow(trainer, emulation, descending)
        yield first, second


def _follow(trainer: Trainer, emulation, descending: bool) -> None:
    """Set the order of threads at each step of a trainer."""
    step = trainer.step

    def ordered(*arguments, **options):
        emulation._descending = descending
        return step(*arguments, **options)

    trainer.step = ordered
