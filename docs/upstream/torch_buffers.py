"""The importer of PyTorch programs makes constants of buffers without a copy.

The constants of the compiled program are the memory of the module, so that PyTorch's next update of
a running statistic changes the program.

Seen: AssertionError
"""

import numpy as np
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        return x - self.mean


model = Model()
program = torch.export.export(model, (torch.ones(3),))
module = from_exported_program(program, unwrap_unit_return_tuple=True)
machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
x = tvm.runtime.tensor(np.ones(3, "float32"))
before = machine["main"](x).numpy()
model.mean.mul_(2)
np.testing.assert_array_equal(machine["main"](x).numpy(), before)
