"""PyTorch modules imported to train: values, gradients and states beside PyTorch's own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

F, nn = torch.nn.functional, torch.nn
checkpoint = torch.utils.checkpoint.checkpoint

from torch_models import Of, check, close, compiled, perceptron, tensor_of  # noqa: E402
from tvm import relax  # noqa: E402

from relax_grad.frontend.torch import (  # noqa: E402
    UnsupportedOperatorError,
    from_exported_program,
    from_module,
)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def loss_of(function, x=None, **options):
    """Check a loss that is a function of a module and a tensor."""
    members = options.pop("members", {})
    return check(Of(function, **members), (torch.randn(3, 4) if x is None else x,), **options)


def markers(imported, name="loss"):
    """Return the names of the operators of a function."""
    names = []

    def visit(expr):
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            names.append(expr.op.name)

    relax.analysis.post_order_visit(imported.module[name], visit)
    return names


# Networks


def test_a_perceptron_with_cross_entropy():
    labels = torch.tensor([0, 2, 1, 2])
    imported = check(
        perceptron(5, 7, 3),
        (torch.randn(4, 5),),
        loss=F.cross_entropy,
        targets=(labels,),
        steps=2,
    )
    assert list(imported.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(imported.inputs) == ["input"]
    assert list(imported.targets) == ["target"]
    assert list(imported.outputs) == ["output"]
    loss, forward = imported.module["loss"], imported.module["forward"]
    assert [param.name for param in loss.params] == ["seed", "input", "target", *imported.params]
    assert [param.name for param in forward.params] == ["input", *imported.params]
    assert int(loss.attrs["num_input"]) == 3
    assert int(forward.attrs["num_input"]) == 1


def test_a_convolutional_network_with_batch_norm():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    )
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(4 * 9, 2))
    data, labels = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 1, 0])
    imported = check(model, (data,), loss=nn.CrossEntropyLoss(), targets=(labels,), steps=3)
    assert list(imported.states) == [
        "0.1.running_mean",
        "0.1.running_var",
        "0.1.num_batches_tracked",
    ]


# Gradients that stop


def test_detached_values_are_constants():
    loss_of(lambda m, x: (m.dense(x).detach() * m.dense(x) * m.scale.data).sum(), forward=False)


def test_regions_without_gradients():
    def function(m, x):
        with torch.no_grad():
            target = m.dense(x)
            with torch.enable_grad():
                other = m.dense(x * m.scale)
        with torch.inference_mode():
            factor = m.dense(x).mean()
        return ((m.dense(x) - target) ** 2 + other * m.scale + factor).sum()

    loss_of(function, forward=False)


def test_a_straight_through_estimator():
    def function(m, x):
        y = m.dense(x)
        return ((y + (y.sign() - y).detach()) * m.scale).sum()

    loss_of(function, forward=False)


def test_the_whole_loss_of_a_full_slice_has_its_gradient():
    loss_of(lambda m, x: (m.dense(x)[:] * m.scale).sum(), forward=False)


# States


class Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class Own(nn.BatchNorm1d):
    def forward(self, x):
        statistics = self.running_mean, self.running_var
        return 2 * F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.25)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm1d(4, momentum=None), (3, 4, 2)),
        (nn.BatchNorm2d(4, affine=False, eps=0.1, momentum=0.3), (2, 4, 2, 3)),
        (nn.BatchNorm3d(4, track_running_stats=False), (2, 4, 1, 2, 2)),
        (nn.BatchNorm1d(4).eval(), (5, 4)),
        (Activated(4, momentum=None), (5, 4)),
        (Own(4, momentum=None), (5, 4)),
    ],
    ids=["matrix", "average", "plain", "without statistics", "evaluation", "activated", "own"],
)
def test_running_statistics(layer, shape):
    model = Of(lambda m, x: (m.norm(x) * m.weight).sum(), norm=layer)
    model.weight = nn.Parameter(torch.randn(shape))
    if layer.running_mean is not None:
        layer.running_mean.uniform_()
    check(model, (torch.randn(shape) + 1,), steps=3)


def test_frozen_batch_norm():
    model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 1))
    model[1].running_mean.uniform_()
    model[1].running_var.uniform_(0.5, 1)
    model[1].eval()
    data = torch.randn(2, 2, 4)
    wanted = check(model, (data,), loss=lambda y: y.square().mean())
    model.train()
    imported = from_module(model, (data,), loss=lambda y: y.square().mean(), batch_norm="frozen")
    assert all(part.training for part in model.modules())
    assert not imported.states
    assert "1.running_mean" in imported.frozen
    assert markers(imported) == markers(wanted)


def test_written_buffers_are_states():
    def function(m, x):
        y = m.dense(x)
        with torch.no_grad():
            m.average.mul_(0.9).add_(0.1 * y.mean(0))
        m.count += 1
        m.buffer = 0.5 * m.buffer + y.detach().mean(0)
        return (y * m.average * m.buffer).sum() / m.count

    model = Of(function)
    model.register_buffer("average", torch.ones(4))
    model.register_buffer("count", torch.tensor(0))
    with pytest.warns(UserWarning, match=r"does not return the buffers .* average, count"):
        imported = check(model, (torch.randn(3, 4),), steps=3)
    assert sorted(imported.states) == ["average", "buffer", "count"]


def test_spectral_norm():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    imported = loss_of(lambda m, x: (m.layer(x) ** 2).sum(), members={"layer": layer}, steps=3)
    assert "layer.parametrizations.weight.0._u" in imported.states
    assert "layer.parametrizations.weight.original" in imported.params


def test_a_compiled_module_is_the_one_that_it_was_made_of():
    """``torch.compile`` returns a module that compiles at its first call."""
    from relax_grad.frontend.torch import wrap

    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    made, x = torch.compile(network), torch.randn(5, 4)
    imported = from_module(made, (x,), loss=F.mse_loss, targets=(torch.zeros(5, 3),))
    assert [*imported.params] == [name for name, _ in network.named_parameters()]
    result = wrap(made, (x,))(x)
    torch.testing.assert_close(result, network(x))
    result.sum().backward()
    assert network[0].weight.grad is not None


# Parameters


def test_tied_parameters_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens).tanh())

    tokens = torch.tensor([[0, 3, 5], [1, 1, 2]])
    imported = check(
        Tied(),
        (tokens,),
        loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        targets=(tokens,),
        steps=2,
    )
    assert list(imported.params) == ["embedding.weight"]
    assert imported.aliases == {"head.weight": "embedding.weight"}


def test_one_tensor_in_two_places_is_two_inputs():
    """torch.export takes it for one input: the other argument would be ignored."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, factor, other):
            return self.weight * factor - other

    module, data = Scaled(), torch.ones(3)
    for data in (torch.ones(3), module.weight):
        imported = from_module(module, (data, data), loss=F.mse_loss, targets=(data,))
        function = imported.module["loss"]
        read = {var.name for var in relax.analysis.free_vars(function.body)}
        assert {"factor", "other", "target", "weight"} <= read


def test_parameters_in_the_same_memory_are_refused():
    model = Of(lambda m, x: (m.dense(x) * m.other).sum())
    model.other = nn.Parameter(model.scale.data)
    with pytest.raises(
        ValueError, match="scale and other are different tensors in the same memory"
    ):
        from_module(model, (torch.randn(3, 4),))


def test_trainable_parameters():
    def imported(trainable, model):
        return from_module(model, (torch.randn(2, 3),), loss=torch.sum, trainable=trainable)

    model = perceptron(3, 2, 2)
    model[0].weight.requires_grad_(False)
    assert list(imported(None, model).params) == ["0.bias", "2.weight", "2.bias"]
    assert list(imported(None, model).frozen) == ["0.weight"]
    assert list(imported("0.*", model).params) == ["0.weight", "0.bias"]
    assert list(imported(["2.bias", "0.weight"], model).params) == ["0.weight", "2.bias"]
    assert list(imported(lambda name: name.endswith("bias"), model).params) == ["0.bias", "2.bias"]
    with pytest.raises(ValueError, match=r"trainable: no parameter matches 'x'; there are "):
        imported("x", model)


def test_unused_parameters_have_zero_gradients():
    imported = check(Of(lambda m, x: m.dense(x).sum()), (torch.randn(3, 4),))
    assert list(imported.params) == ["scale", "dense.weight", "dense.bias"]
    assert not imported.frozen  # the buffer is not read


def test_values_are_copies():
    model = perceptron(3, 2)
    imported = from_module(model, (torch.randn(2, 3),), loss=torch.sum)
    before = imported.params["0.weight"].numpy().copy()
    with torch.no_grad():
        model[0].weight += 1
    assert (imported.params["0.weight"].numpy() == before).all()


def test_a_loss_with_parameters():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_variance = nn.Parameter(torch.zeros(2))

        def forward(self, y, first, other):
            losses = torch.stack([(y - first).square().mean(), (y - other).abs().mean()])
            return (losses * torch.exp(-self.log_variance) + self.log_variance).sum()

    targets = torch.randn(2, 3), torch.randn(2, 3)
    imported = check(perceptron(3, 3), (torch.randn(2, 3),), loss=Weighted(), targets=targets)
    assert list(imported.params) == ["0.weight", "0.bias", "loss.log_variance"]
    assert list(imported.targets) == ["target0", "target1"]


# Inputs and outputs


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, x, *more, pair, factor=2.0, options=None):
        hidden = self.dense(x["left"]) * factor + more[0] + pair[1]
        loss = (hidden * x["right"]).mean() if options is None else None
        return {"loss": loss, "states": (hidden, [hidden.sum(1)]), "name": "nested"}


def nested_arguments():
    x = {"right": torch.randn(3, 4), "left": torch.randn(3, 4)}
    return (x, torch.randn(4)), {"factor": 3.0, "pair": (torch.randn(4), torch.randn(4))}


def test_nested_inputs_and_outputs():
    imported = check(Nested(), *nested_arguments())
    assert list(imported.inputs) == ["x.right", "x.left", "more.0", "pair.0", "pair.1"]
    assert list(imported.outputs) == ["loss", "states.0", "states.1.0"]


def test_a_module_without_a_loss():
    imported = from_module(
        Nested(), *(nested_arguments()[0],), {**nested_arguments()[1], "options": 1}
    )
    names = {variable.name_hint for variable in imported.module.get_global_vars()}
    assert names == {"training", "forward"}


def test_flags_of_submodules_are_kept():
    model = perceptron(3, 2, 2).eval()
    model[1].train()
    from_module(model, (torch.randn(2, 3),), loss=torch.sum)
    assert [part.training for part in model.modules()] == [False, False, True, False]


# Control flow and recomputation


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_sections_are_recomputed(reentrant):
    def function(m, x):
        y = m.dense(x)
        z = checkpoint(lambda a: torch.sin(a * m.scale).exp(), y, use_reentrant=reentrant)
        return (z * m.scale).sum()

    imported = loss_of(function, forward=False)
    names = markers(imported)
    assert names.count("relax.grad.start_checkpoint") == 2
    assert names.count("relax.grad.end_checkpoint") == 1


def check_branches(function, *values):
    """Check a loss, its value in evaluation and its gradients at several values, with one
    import."""
    model = Of(function)
    imported = from_module(model, values[:1])
    run, constants = compiled(imported), [tensor_of(value) for value in imported.values]
    params = dict(model.named_parameters())
    params = [params[name] for name in imported.params]
    for x in values:
        (loss, _, _), grads = run("loss_adjoint", torch.tensor(0), x, *constants)
        wanted = model(x)
        close("loss", [loss, *run("forward", x, *constants)], [wanted, wanted])
        slopes = torch.autograd.grad(wanted, params, allow_unused=True)
        pairs = zip(params, slopes, strict=True)
        close("gradient", grads, [torch.zeros_like(p) if g is None else g for p, g in pairs])


def test_a_branch():
    def function(m, x):
        return torch.cond(
            x.sum() > 0, lambda a: m.dense(a).sum(), lambda a: (a * m.scale).exp().sum(), (x,)
        )

    check_branches(function, torch.ones(2, 4), -torch.ones(2, 4))


def test_a_branch_within_a_branch():
    def inner(m, a):
        return torch.cond(a[0, 0] > 0, lambda b: m.dense(b), lambda b: (b * m.scale).tanh(), (a,))

    def function(m, x):
        return torch.cond(x.sum() > 0, lambda a: inner(m, a), lambda a: a * m.scale, (x,)).sum()

    mixed = torch.ones(2, 4)
    mixed[0, 0] = -1
    check_branches(function, torch.ones(2, 4), mixed, -torch.ones(2, 4))


# Programs, values and files


def test_an_exported_program():
    model = Of(lambda m, x: {"loss": (m.norm(m.dense(x)) * m.scale.detach()).sum(), "x": x * 2})
    model.norm = nn.BatchNorm1d(4)
    x = torch.randn(3, 4)
    wanted = from_module(model, (x,))
    program = torch.export.export(model, (x,))
    before = str(program.graph)
    imported = from_exported_program(program)
    assert str(program.graph) == before
    assert list(imported.params) == list(wanted.params)
    assert list(imported.states) == list(wanted.states)
    assert list(imported.outputs) == ["loss", "x"]
    assert markers(imported) == markers(wanted)
    with pytest.raises(ValueError, match="ep is decomposed, which drops detach and no_grad"):
        from_exported_program(program.run_decompositions())


def test_an_example_in_two_places_of_an_exported_program():
    """torch.export reads both operands from the second one."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, rest):
            return x * 2 + rest["y"] * self.weight

    x, model = torch.ones(2), Two()
    with pytest.raises(ValueError, match=r"argument 1\.y is the example argument 0 too, .*clone"):
        from_exported_program(torch.export.export(model, (x, {"y": x})))
    with pytest.raises(ValueError, match="argument 0 is the tensor weight of the module too"):
        from_exported_program(torch.export.export(model, (model.weight, {"y": x})))
    assert list(from_module(model, (x, {"y": x})).inputs) == ["x", "rest.y"]


def test_outputs_of_equal_names():
    model = Of(lambda m, x: {"a": {"b": m.dense(x)}, "a.b": x * 3, 1: x, "1": x + 1})
    assert list(from_module(model, (torch.randn(2, 4),)).outputs) == ["a.b", "a.b_", "1", "1_"]


def test_a_file_of_a_tensor_tied_three_times(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[1].weight = model[2].weight = model[0].weight
    imported = from_module(model, (torch.randn(2, 4),))
    for i in range(3):
        path = tmp_path / f"{i}.safetensors"
        safetensors.save_file({f"{i}.weight": torch.full((4, 4), float(i))}, path)
        assert (imported.load(path).params["0.weight"].numpy() == i).all()
    safetensors.save_file({"weight": torch.ones(4, 4)}, path)
    with pytest.raises(ValueError, match=r"no '0.weight', nor a tensor tied to it: 1.weight, 2"):
        imported.load(path)


def test_values_move_to_modules_and_files(tmp_path):
    pytest.importorskip("safetensors", reason="the package safetensors is not installed")
    x = torch.randn(2, 4)
    source, other = (Of(lambda m, x: (m.dense(x) * m.buffer).sum()) for _ in range(2))
    imported = from_module(source, (x,))
    imported.copy_to(other)
    for key, tensor in source.state_dict().items():
        if key != "scale":
            assert torch.equal(tensor, other.state_dict()[key])
    trained = {"dense.bias": torch.full((4,), 7.0)}
    imported.copy_to(other, trained)
    assert torch.equal(other.dense.bias, trained["dense.bias"])
    imported.save(tmp_path / "values.safetensors", trained)
    loaded = imported.load(tmp_path / "values.safetensors")
    for copy in (loaded, imported.copy_from(other)):
        assert (copy.params["dense.bias"].numpy() == 7).all()
        assert (
            copy.params["dense.weight"].numpy() == imported.params["dense.weight"].numpy()
        ).all()
    with pytest.raises(ValueError, match="has no parameter or buffer 'scale'"):
        imported.copy_to(nn.Linear(4, 4))


# Hooks and converters


def test_hooks_of_forward_are_imported():
    model = perceptron(3, 2, 2)
    model[0].register_forward_pre_hook(lambda module, args: (3 * args[0],))
    model.register_forward_hook(lambda module, args, result: result * args[0].sum())
    check(model, (torch.randn(2, 3),), loss=torch.sum)


def test_converters_of_ones_own_come_first():
    def negated(node, importer):
        return importer.block_builder.emit(relax.op.negative(importer.env[node.args[0]]))

    imported = from_module(
        perceptron(3, 2, 2),
        (torch.randn(2, 3),),
        loss=torch.sum,
        custom_convert_map={"gelu.default": negated},
    )
    assert "relax.negative" in markers(imported)
    assert "relax.nn.gelu" not in markers(imported)


def test_a_converter_of_another_shape_is_an_error():
    def summed(node, importer):
        return importer.block_builder.emit(relax.op.sum(importer.env[node.args[0]]))

    with pytest.raises(
        UnsupportedOperatorError, match=r"gelu.default: its converter returns .* but PyTorch's"
    ):
        from_module(
            perceptron(3, 2, 2),
            (torch.randn(2, 3),),
            loss=torch.sum,
            custom_convert_map={"gelu.default": summed},
        )
