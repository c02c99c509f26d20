"""The importer of PyTorch programs drops detach.

Gradients flow through a tensor that the model has detached.

Seen: AssertionError
"""

import numpy as np
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program


class Model(torch.nn.Module):
    def forward(self, x):
        return (x * x.detach()).sum()


program = torch.export.export(Model(), (torch.ones(3),))
module = from_exported_program(program, unwrap_unit_return_tuple=True)
module = relax.transform.Gradient("main")(module)
machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
x = np.array([1, 2, 3], "float32")
_, (gradient,) = machine["main_adjoint"](tvm.runtime.tensor(x))
np.testing.assert_allclose(gradient.numpy(), x)
