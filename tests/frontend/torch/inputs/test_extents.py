"""Modules with symbolic extents: one step for batches and sequences of any size."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

F, nn = torch.nn.functional, torch.nn

from torch_models import compiled, tensor_of  # noqa: E402

from relax_grad.frontend.torch import from_module, wrap  # noqa: E402
from relax_grad.ir.extent_checks import extent_checks  # noqa: E402
from relax_grad.training import SGD, Trainer, train_step  # noqa: E402


def test_symbolic_extents():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    shapes = {"input": {0: "batch"}, "target": {0: "batch"}}
    imported = from_module(model, (x,), loss=F.cross_entropy, targets=(y,), dynamic_shapes=shapes)
    assert str(imported.inputs["input"].shape.values[0]) == "batch"
    run = compiled(imported, forward=True)
    for count in (5, 3):
        x, y = torch.randn(count, 4), torch.randint(0, 3, (count,))
        values = list(map(tensor_of, imported.values))
        (loss, (output,), states), gradients = run("loss_adjoint", torch.tensor(0), x, y, *values)
        copy = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        imported.copy_to(copy)
        wanted = F.cross_entropy(copy(x), y)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[1], copy[1].running_var)
        for grad, other in zip(gradients, copy.parameters(), strict=True):
            torch.testing.assert_close(grad, other.grad, rtol=1e-4, atol=1e-5)
        assert output.shape == (count, 3)


class OfTokens(nn.Module):
    """A classifier of sequences of tokens."""

    def __init__(self, body):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(20, 8), body, nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)).mean(1))


class Attention(nn.Module):
    """Self-attention of two heads, with a mask of the length, or causal."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.joined = is_causal, nn.Linear(8, 24)

    def forward(self, x):
        parts = self.joined(x).unflatten(-1, (3, 2, 4)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        length = x.shape[1]
        mask = None if self.is_causal else torch.ones(length, length, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(-2)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x):
        return F.gelu(self.inner(x.transpose(1, 2))).transpose(1, 2) + x


@pytest.mark.parametrize(
    "body",
    [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        Attention(is_causal=True),
        pytest.param(Attention(is_causal=False), marks=pytest.mark.slow),
        pytest.param(Convolution(), marks=pytest.mark.slow),
    ],
    ids=["encoder", "causal", "mask", "convolution"],
)
def test_batch_and_sequence_in_one_step(body):
    """One compiled step trains as PyTorch does, whatever the sizes of its batches."""
    torch.manual_seed(0)
    module = OfTokens(body)
    tokens, labels = torch.randint(0, 20, (4, 6)), torch.randint(0, 5, (4,))
    axes = {"tokens": {0: "batch", 1: "length"}, "target": {0: "batch"}}
    imported = from_module(
        module, (tokens,), loss=F.cross_entropy, targets=(labels,), dynamic_shapes=axes
    )
    trainer = Trainer(train_step(imported, SGD(lr=0.1)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch, length in ((4, 6), (1, 9), (7, 3), (2, 17)):
        tokens, labels = torch.randint(0, 20, (batch, length)), torch.randint(0, 5, (batch,))
        result = trainer.step(tokens, labels)
        optimizer.zero_grad()
        wanted = F.cross_entropy(module(tokens), labels)
        wanted.backward()
        optimizer.step()
        assert result.loss == pytest.approx(wanted.item(), rel=1e-5)
    for name, param in module.named_parameters():
        torch.testing.assert_close(
            torch.from_dlpack(trainer.params[name]), param.detach(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("way", ["Trainer", "wrap"])
def test_a_batch_of_one_row_is_refused_before_statistics_change(way):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    shapes = {"input": {0: "batch"}, "target": {0: "batch"}}
    if way == "Trainer":
        imported = from_module(
            model,
            (torch.randn(5, 4),),
            loss=F.mse_loss,
            targets=(torch.randn(5, 1),),
            dynamic_shapes=shapes,
        )
        trainer = Trainer(train_step(imported, SGD(lr=0.1)))

        def step(count):
            trainer.step(torch.randn(count, 4), torch.randn(count, 1))

        def state():
            values = [trainer.values[key].numpy().tolist() for key in sorted(trainer.values)]
            return values, trainer.steps, trainer.updates
    else:
        wrapped = wrap(model, (torch.randn(5, 4),), dynamic_shapes={"input": {0: "batch"}})

        def step(count):
            wrapped(torch.randn(count, 4))

        def state():
            return [tensor.tolist() for tensor in model.state_dict().values()]

    step(5)
    before = state()
    for count in (1, 0):
        with pytest.raises(ValueError, match=f"more than 1 value per channel.*batch = {count}$"):
            step(count)
    assert state() == before
    if way == "Trainer":
        trainer.predict(torch.randn(1, 4))
        one = torch.randn(1, 4), torch.randn(1, 1)
        trainer.evaluate([one], {"first": lambda output, target: float(output[0, 0])})
    step(2)
    assert state() != before


class Reduced(nn.Module):
    """Reductions over a batch, which have a value for no rows too."""

    def forward(self, x):
        return {
            "mean": x.mean(0),
            "std": x.std(0),
            "var": x.var(0, correction=2),
            "any": (x > 0).any(0),
            "all": (x > 0).all(0),
            "prod": x.prod(0),
        }


def test_reductions_of_few_rows():
    module = Reduced()
    wrapped = wrap(module, (torch.randn(5, 3),), dynamic_shapes={"x": {0: "batch"}})
    for count in (3, 2, 1, 0):
        x = torch.randn(count, 3)
        torch.testing.assert_close(wrapped(x), module(x), equal_nan=True)


@pytest.mark.parametrize(
    ("function", "allowed", "refused"),
    [
        (lambda x: x.amax(0), 1, 0),
        (lambda x: x.min(), 1, 0),
        (lambda x: x.max(0).values, 1, 0),
        (lambda x: x.argmax(0), 1, 0),
        (lambda x: x.median(0).values, 1, 0),
        (lambda x: x.norm(float("inf"), 0), 1, 0),
        (lambda x: F.batch_norm(x, None, None, training=True), 2, 1),
        (lambda x: F.instance_norm(x.T[None]), 2, 1),
        (lambda x: F.group_norm(x.T[None], 3), 2, 1),
    ],
    ids=["amax", "min", "max", "argmax", "median", "norm", "batch", "instance", "group"],
)
def test_extents_without_a_value_are_refused(function, allowed, refused):
    """As PyTorch refuses them."""

    class Called(nn.Module):
        def forward(self, x):
            return function(x)

    data = torch.randn(7, 3)
    imported = from_module(Called(), (data,), dynamic_shapes={"x": {0: "batch"}})
    names = {variable.name_hint for variable in imported.module.get_global_vars()}
    (name,) = names - {"forward"}  # loss or training
    check, *_ = extent_checks(imported.module, name)
    check.check({"batch": allowed})
    with pytest.raises(ValueError, match=f"batch = {refused}$"):
        check.check({"batch": refused})
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        function(data[:refused])


def _at_most_eight(x):
    torch._check(x.shape[0] <= 8)
    return x.sum()


def _even(x):
    torch._check(x.shape[0] % 2 == 0)
    return x.sum()


def _not_five(x):
    return x.sum() if x.shape[0] != 5 else x.mean()


@pytest.mark.parametrize(
    ("function", "extent", "allowed", "refused"),
    [
        (torch.sum, torch.export.Dim("n", min=4, max=9), (4, 9), (3, 10)),
        (torch.sum, torch.export.Dim("n"), (1, 2, 99), ()),
        (_at_most_eight, torch.export.Dim.AUTO, (1, 8), (9,)),
        (_even, torch.export.Dim.AUTO, (2, 4), (3,)),
        (_not_five, torch.export.Dim.AUTO, (4, 6), (5,)),
    ],
    ids=["range", "any", "check", "multiple", "branch"],
)
def test_extents_beyond_the_graph_are_refused(function, extent, allowed, refused):
    class Called(nn.Module):
        def forward(self, x):
            return function(x * 2)

    imported = from_module(Called(), (torch.randn(6, 3),), dynamic_shapes={"x": {0: extent}})
    names = {variable.name_hint for variable in imported.module.get_global_vars()}
    (name,) = names - {"forward"}  # loss or training
    checks = extent_checks(imported.module, name)
    assert bool(checks) == bool(refused)

    def call(number):
        for check in checks:
            check.check(dict.fromkeys(check.names, number))

    for number in allowed:
        call(number)
    for number in refused:
        with pytest.raises(ValueError, match=f"imported for .*= {number}$"):
            call(number)


class _Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.linspace(0.5, 1.5, 4)), function

    def forward(self, x):
        return self.function(x * self.weight)


@pytest.mark.parametrize(
    ("function", "allowed", "refused"),
    [
        (lambda x: x[0].sum(), 1, 0),
        (lambda x: x[-1].sum(), 1, 0),
        (lambda x: x[-2:].sum(), 2, 1),
        (lambda x: torch.cat([x, x[2:], torch.ones(1, 4)]).sum(), 2, 1),
        (lambda x: x[1:].sum() / x[1:].shape[0], 1, 0),
        (lambda x: x[[0, -3]].sum(), 3, 2),
        (lambda x: x[torch.tensor([0, 2]).detach()].sum(), 3, 2),
        (lambda x: x.topk(2, 0).values.sum(), 2, 1),
        (lambda x: F.pad(x.T[None], (2, 2), mode="circular").sum(), 2, 1),
    ],
    ids=["first", "last", "tail", "concatenation", "number", "list", "tensor", "topk", "circular"],
)
def test_elements_that_an_axis_lacks_are_refused(function, allowed, refused):
    axes = {"x": {0: torch.export.Dim.DYNAMIC}}
    module = from_module(_Called(function), (torch.randn(6, 4),), dynamic_shapes=axes).module
    (name,) = {variable.name_hint for variable in module.get_global_vars()} - {"forward"}
    checks = extent_checks(module, name)

    def call(number):
        for check in checks:
            check.check(dict.fromkeys(check.names, number))

    call(allowed)
    with pytest.raises(ValueError, match=f"elements .*= {refused}$"):
        call(refused)


def _holds(check, number):
    try:
        check.check(dict.fromkeys(check.names, number))
    except ValueError:
        return False
    return True


INDEX = torch.tensor([[2, 0], [1, 3]])
ROWS = torch.tensor([2, 0])


@pytest.mark.parametrize(
    "functions",
    [
        {
            "gather": lambda x: x.quantile(0.3, 0),
            "scatter": lambda x: x.scatter(1, INDEX, 2.0),
            "index_fill": lambda x: x.index_fill(0, ROWS, 1.0),
            "slice_scatter": lambda x: x.slice_scatter(torch.ones(2, 4), 0, 1, 3),
            "embedding": lambda x: F.embedding(ROWS, x),
            "avg_pool1d": lambda x: F.avg_pool1d(x.T[None], 2),
            "upsample_nearest1d": lambda x: F.interpolate(x.T[None], scale_factor=2),
        },
        {
            "gather": lambda x: x.gather(1, INDEX),
            "index_fill": lambda x: x.index_fill(0, torch.tensor([-2]), torch.tensor(1.0)),
            "_embedding_bag_forward_only": lambda x: F.embedding_bag(ROWS[None], x),
            "max_pool2d": lambda x: F.max_pool2d(x[None, None], (2, 1)),
            "upsample_linear1d": lambda x: F.interpolate(x.T[None], size=5, mode="linear"),
        },
        {"gather": lambda x: x.gather(0, x.detach().argmax(1, True) * 0)},
    ],
)
def test_batches_that_pytorch_refuses_are_refused(functions):
    module = _Called(lambda x: sum(function(x).sum() for function in functions.values()))
    axes = {"x": {0: torch.export.Dim.DYNAMIC}}
    imported = from_module(module, (torch.randn(6, 4),), dynamic_shapes=axes).module
    checks = extent_checks(imported, "loss")
    for rows in range(5):
        wrong = {check.reason.split()[0] for check in checks if not _holds(check, rows)}
        assert wrong <= set(functions)
        for name, function in functions.items():
            if name in wrong:
                with pytest.raises((IndexError, RuntimeError)):
                    function(torch.randn(rows, 4))
            else:
                function(torch.randn(rows, 4))


def _shifted(x):
    x = x.clone()
    x[1:] = x[:-1] * 2
    return x


class _Slices(_Called):
    """Slices that have no elements in a batch of few rows."""

    functions = (
        lambda x: x[1:].sin(),
        lambda x: x[2:] @ x[2:].T,
        lambda x: x[1:-1].T,
        lambda x: (x[:-1] - x[1:]).abs(),
        lambda x: x[1::2].softmax(1),
        lambda x: x[1:][1:] * x[:-1][:-1],
        lambda x: torch.cat([x, x[1:]]),
        lambda x: x[2:].mean(0),
        _shifted,
    )

    def forward(self, x):
        return [function(x * self.weight) for function in self.functions]


def test_slices_of_few_rows_are_python_s():
    module, axes = _Slices(None), {"x": {0: torch.export.Dim.DYNAMIC}}
    wrapped = wrap(module, (torch.randn(6, 4),), dynamic_shapes=axes)
    for rows in (6, 3, 2, 1, 0):
        x, results = torch.randn(rows, 4), []
        for called in (wrapped, module):
            parts = called(x)
            total = sum(part.square().sum() for part in parts[:-2]) + parts[-1].square().sum()
            results.append([*parts, *torch.autograd.grad(total, module.weight)])
        for result, wanted in zip(*results, strict=True):
            torch.testing.assert_close(result, wanted, equal_nan=True)


def test_slices_and_medians_of_symbolic_extents():
    """The extents of both slices are equal, but not provably so."""
    module = _Called(lambda x: (x[2:] * x[:-2]).sum() + x.median())
    axes = {"x": {0: torch.export.Dim.DYNAMIC}}
    wrapped = wrap(module, (torch.randn(6, 4),), dynamic_shapes=axes)
    for rows in (6, 3, 2):
        x = torch.randn(rows, 4)
        values = [called(x) for called in (wrapped, module)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(v, module.weight) for v in values))


def test_shapes_of_variadic_arguments():
    class Sum(nn.Module):
        def forward(self, *parts):
            return sum(part.sum() for part in parts)

    parts = torch.randn(6, 4), torch.randn(6, 4)
    for shapes in (({0: "n"},) * 2, [{0: "n"}] * 2):
        assert wrap(Sum(), parts, dynamic_shapes=(shapes,))(parts[0][:3], parts[1][:3]).ndim == 0
    with pytest.raises(TypeError, match=r"\*parts must be a sequence"):
        wrap(Sum(), parts, dynamic_shapes=({0: "n"},))(*parts)
    with pytest.raises(ValueError, match="2 entries for the inputs parts"):
        wrap(Sum(), parts, dynamic_shapes=(None, None))(*parts)
