"""A training step by TVM alone, in a process that does not import relax_grad."""

from __future__ import annotations

import re
import time

import numpy as np
import torch
import tvm
from _models import STEPS
from tvm import relax
from tvm.relax.frontend import detach_params
from tvm.relax.frontend.torch import from_exported_program
from tvm.relax.training import SetupTrainer, Trainer
from tvm.relax.training.loss import CrossEntropyLoss
from tvm.relax.training.optimizer import SGD

#: The learning rate of all contestants.
_RATE = 0.1

#: The seconds of samples after which no further one is taken.
_ENOUGH = 5.0


class _Scores(torch.nn.Module):
    def __init__(self, network: torch.nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network.scores(x)


def measured(name: str, repeats: int) -> dict:
    """Return the least seconds of a step, or the reason why TVM cannot train the network."""
    (step,) = (step for step in STEPS if step.name == name)
    torch.manual_seed(0)
    network, (x, targets) = step.network().train(), step.inputs()
    exported = torch.export.export(_Scores(network), (x,))
    module = from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    module, values = detach_params(module)
    backbone = module["main"].with_attr("global_symbol", "backbone")
    module = tvm.IRModule({"backbone": backbone})
    count = len(backbone.params) - 1
    module = module.with_attrs({"param_num": count, "state_num": 0})
    scores = backbone.ret_ty
    labels = relax.TensorType((int(scores.shape[0]),), "int64")
    try:
        module = SetupTrainer(CrossEntropyLoss("mean"), SGD(_RATE), [scores, labels])(module)
    except tvm.error.InternalError as error:
        missing = re.search(r"FPrimalGradient has not been registered for (\S+)", str(error))
        if missing is None:
            raise
        return {"reason": f"no gradient of {missing[1]}"}
    executable = tvm.compile(module, tvm.target.Target("llvm"), relax_pipeline="default")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    trainer = Trainer(module, machine, tvm.cpu(), zero_init_param_state=False)
    trainer.load_params([np.asarray(value.numpy()) for value in values["main"]])
    arrays = x.numpy(), targets.numpy().reshape(-1)
    samples: list[float] = []
    while len(samples) <= repeats and sum(samples) < _ENOUGH:
        start = time.perf_counter()
        trainer.update(*arrays)
        samples.append(time.perf_counter() - start)
    return {"seconds": min(samples)}
