"""Models written in PyTorch and imported by TVM's front end: every parameter gets PyTorch's
gradient."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

import relax_grad
from relax_grad.testing import _program

torch = pytest.importorskip("torch", reason="PyTorch is not installed: no models to import")

from tvm.relax.frontend.torch import from_exported_program  # noqa: E402

F, nn = torch.nn.functional, torch.nn
Sequential = nn.Sequential


class Then(nn.Module):
    """A linear layer of width 6, followed by a function."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.silu(x + self.second(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        heads = self.project(self.norm(x)).chunk(3, -1)
        q, k, v = (head.unflatten(-1, (2, 4)).transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.norm = nn.GroupNorm(2, 4)
        self.last = nn.Conv2d(6, 1, 1)

    def forward(self, x):
        y = F.gelu(self.norm(self.up(self.down(x))))
        return self.last(torch.cat([x, y], 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 5)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 5)
        steps = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], -1)))
            steps.append(h)
        return torch.stack(steps, 1)


class Classifier(nn.Module):
    """A model from token ids to PyTorch's loss for hard labels."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 7)

    def forward(self, tokens):
        logits = self.linear(self.embedding(tokens))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten().flip(0))


LAYERS = {
    "attention": (Attention, (2, 3, 8)),
    "classifier": (Classifier, None),
    "conv1d": (
        lambda: Sequential(nn.Conv1d(2, 3, 3, dilation=2), nn.ELU(), nn.MaxPool1d(2)),
        (2, 2, 9),
    ),
    "conv3d": (
        lambda: Sequential(nn.Conv3d(1, 2, 2), nn.Sigmoid(), nn.MaxPool3d(2)),
        (1, 1, 5, 5, 5),
    ),
    "conv_transpose1d": (
        lambda: Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2), nn.Softplus()),
        (2, 2, 5),
    ),
    "depthwise": (
        lambda: Sequential(
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU6(), nn.Conv2d(4, 2, 1), nn.Hardswish()
        ),
        (2, 4, 5, 5),
    ),
    "dropout": (lambda: Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), (3, 6)),
    "instance_norm": (
        lambda: Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, affine=True)),
        (2, 1, 5, 5),
    ),
    "lenet": (
        lambda: Sequential(
            nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(18, 4)
        ),
        (2, 1, 8, 8),
    ),
    "pixel_shuffle": (lambda: Sequential(nn.Conv2d(1, 4, 3), nn.PixelShuffle(2)), (1, 1, 5, 5)),
    "prelu": (lambda: Sequential(nn.Linear(6, 6), nn.PReLU()), (3, 6)),
    "recurrent": (Recurrent, (2, 3, 3)),
    "reflection_pad": (lambda: Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 2, 3)), (1, 1, 4, 4)),
    "residual": (Residual, (2, 3, 6, 6)),
    "unet": (UNet, (2, 2, 6, 6)),
    "upsample": (
        lambda: Sequential(nn.Conv2d(1, 2, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        (1, 1, 5, 5),
    ),
}

ROWS = [[0, 5, 0], [1, 1, 2], [3, 4, 4]]

FUNCTIONS = {
    "clamp": lambda x: x.clamp(-0.2, 0.2) + x.abs(),
    "cumsum": lambda x: x.cumsum(1) * x,
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x),
    "expand": lambda x: x.unsqueeze(1).expand(3, 4, 6) * x[:, :4, None],
    "gather": lambda x: x.gather(1, torch.tensor(ROWS)),
    "glu": lambda x: F.glu(x) * F.mish(x)[:, :3],
    "index": lambda x: x[torch.tensor([0, 2, 2])],
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 0.0),
    "meshgrid": lambda x: torch.stack(torch.meshgrid(x[0], x[1], indexing="ij")),
    "minimum": lambda x: torch.minimum(x, x.flip(1)) + torch.maximum(x, x * 2),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "roll": lambda x: torch.roll(x, 2, 1) * x,
    "scatter": lambda x: x.scatter(1, torch.tensor([[0, 1, 2]] * 3), x[:, 3:]),
    "slices": lambda x: torch.flip(x[:, 1::2], [1]) * x[:, ::2],
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(-1)[0] * torch.arange(6, dtype=torch.float32),
    "split": lambda x: torch.cat([part * i for i, part in enumerate(x.split(2, 1))], 1),
    "std": lambda x: (x - x.mean(0)) / (x.std(0) + 1),
    "topk": lambda x: x.topk(2, -1)[0],
    "trigonometric": lambda x: torch.atan2(x.sin(), x.cosh()) + torch.erf(x),
    "tril": lambda x: torch.tril(x) @ x.t(),
    "where": lambda x: torch.where(x > 0, x.exp(), x * x),
}


def check(model, data):
    """Compare the gradient of ``sum(model(data) * cotangent)`` for every parameter, by both
    passes."""
    output = model(data)
    cotangent = torch.rand_like(output)
    names = [f"p_{name.replace('.', '_')}" for name, _ in model.named_parameters()]
    expected = torch.autograd.grad((output * cotangent).sum(), list(model.parameters()))

    exported = torch.export.export(model, (data,))
    imported = from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    imported, params = relax.frontend.detach_params(imported)
    main = imported["main"]
    weight = relax.Var("cotangent", relax.TensorType(tuple(output.shape), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [*main.params, weight]):
        with bb.dataflow():
            for binding in main.body.blocks[0].bindings:
                bb.emit_normalized(binding)
            product = bb.emit(relax.op.multiply(main.body.body, weight))
            loss = bb.emit_output(relax.op.sum(product))
        bb.emit_func_output(loss)
    module = bb.get()
    by_name = {param.name: param for param in module["main"].params}
    wrt = [by_name[name] for name in names]
    passes = relax.transform.Gradient, relax_grad.transform.Gradient
    stock, ours = differentiated = [gradient("main", wrt)(module) for gradient in passes]
    assert len(bindings_of(ours)) <= len(bindings_of(stock))
    run = _program.compile_together(differentiated, "llvm")
    values = [data.numpy(), *(value.numpy() for value in params["main"]), cotangent.numpy()]
    for number in (1, 2):
        gradients = run(f"main_{number}_adjoint", values)[1]
        for name, gradient, value in zip(names, gradients, expected, strict=True):
            np.testing.assert_allclose(
                gradient, value.numpy(), rtol=1e-3, atol=1e-5, err_msg=f"{number} {name}"
            )


def bindings_of(module):
    return [binding for block in module["main_adjoint"].body.blocks for binding in block.bindings]


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    data = torch.randint(0, 7, (2, 3)) if shape is None else torch.randn(shape)
    check(make().eval(), data)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    torch.manual_seed(0)
    check(Then(FUNCTIONS[name]), torch.randn(3, 6))
