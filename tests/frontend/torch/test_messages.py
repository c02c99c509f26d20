"""Errors of the importer name the cause and the way out."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

from relax_grad.frontend.torch import UnsupportedOperatorError, from_module, wrap  # noqa: E402

nn, F = torch.nn, torch.nn.functional
Normal = torch.distributions.Normal
DATA = torch.zeros(2, 4)


class Of(nn.Module):
    """A function of a layer, a buffer and the input."""

    def __init__(self, function, buffer=None):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.register_buffer("state", buffer)

    def forward(self, x):
        return self.function(self, x)


def kept(module, x):
    module.state = module.layer(x).detach()
    return module.layer(x).sum()


def copied(module, x):
    module.state.copy_(module.layer(x).detach())
    return module.layer(x).sum()


def summed(module, x):
    return module.layer(x).sum()


def complex_scaled(module, x):
    return (module.layer(x) * module.state.abs()).sum()


def branching(module, x):
    return module.layer(x).sum() if x.sum() > 0 else module.layer(x).mean()


BATCH = {"dynamic_shapes": {"x": {0: "batch"}}}

CASES = {
    "shape": (
        lambda: from_module(nn.Linear(5, 3), (DATA,), loss=F.mse_loss, targets=(torch.ones(2, 3),)),
        [
            "cannot trace the module: RuntimeError",
            "input is a tensor of shape (2, 4)",
            "target is a",
        ],
    ),
    "shape of a target": (
        lambda: from_module(
            nn.Linear(4, 3), (DATA,), loss=F.cross_entropy, targets=(torch.zeros(5).long(),)
        ),
        ["batch_size (2) to match target batch_size (5)"],
    ),
    "dtype": (
        lambda: from_module(nn.Linear(4, 3).double(), (DATA,)),
        ["operands have the dtypes torch.float32, torch.float64", "give examples in the dtype"],
    ),
    "converted": (
        lambda: wrap(nn.Linear(4, 3), (DATA,)).double()(DATA.double()),
        ["input has dtype torch.float64, but the example", "wrap(module.to(dtype)"],
    ),
    "converted to bfloat16": (
        lambda: wrap(nn.Linear(4, 3), (DATA,)).to(torch.bfloat16)(DATA.bfloat16()),
        ["input has dtype torch.bfloat16, but the example", "wrap(module.to(dtype)"],
    ),
    "half without inputs in half": (
        lambda: wrap(nn.Linear(4, 3), (DATA,)).half()(DATA),
        ["operands have the dtypes torch.float16, torch.float32"],
    ),
    "sparse buffer": (
        lambda: from_module(Of(summed, torch.eye(4).to_sparse()), (DATA,)),
        ["the buffer state has the layout torch.sparse_coo", "register module.state.to_dense()"],
    ),
    "sparse input": (
        lambda: from_module(Of(summed), (torch.eye(4).to_sparse(),)),
        ["x has the layout torch.sparse_coo", "x.to_dense()"],
    ),
    "complex buffer": (
        lambda: from_module(Of(complex_scaled, torch.ones(4) * 1j), (DATA,)),
        ["state has the dtype torch.complex64", "torch.view_as_real"],
    ),
    "symbolic state": (
        lambda: from_module(Of(kept, torch.zeros(2, 4)), (DATA,), **BATCH),
        ["the buffer state of Of gets a tensor", "symbolic extents are none", "dynamic_shapes"],
    ),
    "write of a symbolic state": (
        lambda: from_module(Of(copied, torch.zeros(2, 4)), (DATA,), **BATCH),
        ["dynamic_shapes does not fit", "A write to a parameter or a buffer fixes extents, too"],
    ),
    "branch": (
        lambda: from_module(Of(branching), (DATA,)),
        ["Control flow that depends on the values", "if x.sum() > 0"],
    ),
    "item": (
        lambda: from_module(Of(lambda m, x: m.layer(x).sum() * x.max().item()), (DATA,)),
        ["it makes a number of Python of a value", "compute with the tensor"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_name_the_cause_and_the_way_out(name, capfd):
    call, parts = CASES[name]
    with pytest.raises((UnsupportedOperatorError, ValueError)) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert "converter fails" not in message
    assert ("Control flow" in message) == (name == "branch")
    assert message.count("\n    at ") <= 1
    output = capfd.readouterr()
    assert output.out + output.err == ""


LARGE = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_module(nn.Linear(3, 3), LARGE), "but it is a module Sequential"),
        (lambda: from_module([LARGE], (DATA,)), "but it is a list with a module Sequential"),
        (lambda: from_module(LARGE, DATA.expand(99, 2, 4)), "a tensor of shape (99, 2, 4)"),
        (lambda: from_module(LARGE, (DATA,), list(range(999))), "but it is a list with 0"),
        (lambda: from_module(LARGE, (DATA,), loss="x" * 999), "xxx..."),
        (lambda: wrap(nn.Linear(3, 3), (LARGE,))(DATA), "but a module Sequential was given"),
    ],
)
def test_messages_show_no_whole_modules_and_tensors(call, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def _interrupting(node, importer):
    raise KeyboardInterrupt


def test_an_interrupted_import_prints_nothing(capfd):
    """TVM warns of blocks of a builder that are not ended."""
    with pytest.raises(KeyboardInterrupt):
        from_module(nn.Linear(4, 3), (DATA,), custom_convert_map={"linear.default": _interrupting})
    gc.collect()
    output = capfd.readouterr()
    assert output.out + output.err == ""


@pytest.mark.parametrize("checks", [{}, {"validate_args": True}, {"validate_args": False}])
def test_distributions_with_and_without_checks(checks, capfd):
    function = lambda m, x: -Normal(m.layer(x), 1.0, **checks).log_prob(x).mean()  # noqa: E731
    assert list(from_module(Of(function), (DATA,)).outputs) == ["output"]
    output = capfd.readouterr()
    assert output.out + output.err == ""


def test_inference_mode(capfd):
    """The first call of a wrapped module, its later calls with gradients, and examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.inference_mode():
        example = torch.randn(2, 4)
        wrapped = wrap(model, (example,))
        result = wrapped(example)
        assert torch.is_inference_mode_enabled()
    assert model[1].num_batches_tracked == 1
    data = torch.randn(2, 4)
    wrapped(data).square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    torch.testing.assert_close(result, model(example.clone()))
    output = capfd.readouterr()
    assert output.out + output.err == ""
