"""Training steps of imported PyTorch models with a symbolic batch: one function, run at several
batches."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from programs import to_numpy
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.transform import InlineSingleUse

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no models to import")

from tvm.relax.frontend.torch import from_exported_program  # noqa: E402

F, nn = torch.nn.functional, torch.nn
CLASSES, RATE = 3, 0.1


class CNN(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(6 * 2 * 2, CLASSES),
        )


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        steps, _ = self.gru(x)
        return self.head(steps[:, -1])


MODELS = {"cnn": (CNN, (1, 8, 8)), "gru": (GRU, (4, 5))}


def train_step(model: nn.Module, shape: tuple[int, ...]) -> tvm.IRModule:
    """Return a module whose ``step`` maps data, parameters and labels to the loss and the new
    parameters."""
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(model, (torch.randn(4, *shape),), dynamic_shapes=({0: batch},))
    imported, _ = relax.frontend.detach_params(
        from_exported_program(exported, keep_params_as_input=True, unwrap_unit_return_tuple=True)
    )
    main = imported["main"]
    extent = main.params[0].ty.shape.values[0]
    labels = relax.Var("labels", relax.TensorType((extent,), "int64"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [*main.params, labels], private=True):
        with bb.dataflow():
            for binding in main.body.blocks[0].bindings:
                bb.emit_normalized(binding)
            scores = bb.emit(op.nn.log_softmax(main.body.body))
            loss = bb.emit_output(op.nn.nll_loss(scores, labels))
        bb.emit_func_output(loss)
    names = [param.name for param in main.params[1:]]
    module = relax_grad.value_and_grad(bb.get(), "loss", wrt=names)

    adjoint = module.get_global_var("loss_adjoint")
    params = list(relax.utils.copy_with_new_vars(module["loss_adjoint"]).params)
    bb = relax.BlockBuilder(module)
    with bb.function("step", params):
        with bb.dataflow():
            both = bb.emit(relax.Call(adjoint, params))
            results = [bb.emit(relax.TupleGetItem(both, 0))]
            for i, param in enumerate(params[1:-1]):
                gradient = relax.TupleGetItem(bb.emit(relax.TupleGetItem(both, 1)), i)
                change = bb.emit(op.multiply(bb.emit(gradient), relax.const(RATE, "float32")))
                results.append(bb.emit(op.subtract(param, change)))
            result = bb.emit_output(relax.Tuple(results))
        bb.emit_func_output(result)
    return relax.transform.DeadCodeElimination(["step"])(bb.get())


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("cnn", "relax_grad"),
        ("gru", "relax_grad"),
        ("cnn", "default"),
        pytest.param("gru", "default", marks=pytest.mark.slow),
    ],
)
def test_steps_of_any_batch(name, pipeline):
    """Three steps of SGD at batches of 1, 7 and 32 agree with PyTorch's."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    module = train_step(model, shape)
    machine = relax.VirtualMachine(tvm.compile(module, "llvm", relax_pipeline=pipeline), tvm.cpu())
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    params = [param.detach().numpy().copy() for param in model.parameters()]
    for batch in (1, 7, 32):
        data, labels = torch.randn(batch, *shape), torch.randint(0, CLASSES, (batch,))
        loss = F.cross_entropy(model(data), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        arrays = data.numpy(), *params, labels.numpy()
        loss_found, *params = to_numpy(machine["step"](*map(tvm.runtime.tensor, arrays)))
        np.testing.assert_allclose(loss_found, loss.item(), rtol=1e-5)
        for param, wanted in zip(params, model.parameters(), strict=True):
            np.testing.assert_allclose(param, wanted.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_inlined(name):
    """The step contains no call of another function and no undefined extent."""
    make, shape = MODELS[name]
    inlined = InlineSingleUse()(train_step(make(), shape))
    assert relax.analysis.check_well_formed(inlined)
    assert not relax.analysis.all_global_vars(inlined["step"])
