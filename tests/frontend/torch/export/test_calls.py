"""Graphs that are decomposed call by call are those of run_decompositions; the work is linear."""

from __future__ import annotations

import operator
import sys
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import relax_grad  # noqa: E402
from relax_grad.frontend.torch import from_exported_program, from_module  # noqa: E402
from relax_grad.frontend.torch.export import calls, decompose  # noqa: E402
from relax_grad.frontend.torch.export.calls import NotPlain, decompose_calls  # noqa: E402
from relax_grad.training import AdamW, train_step  # noqa: E402
from relax_grad.training._donation import donating  # noqa: E402

fx, nn, F = torch.fx, torch.nn, torch.nn.functional


class Function(nn.Module):
    """A function of layers and an input as a module."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


def _conv(x, conv, norm):
    return F.relu(norm(conv(x)), inplace=True).flatten(1) + 1


def _attention(x, layer, norm):
    x = norm(x.flatten(2))
    q, k, v = layer(x).chunk(3, -1)
    y = F.scaled_dot_product_attention(q, k, v).contiguous().to(torch.float32)
    return F.dropout(y, 0.5).reshape(-1), F.cross_entropy(y[:, 0], y[:, 1].argmax(-1))


def _unused(x, layer):
    F.dropout(x, 0.5)
    torch.multinomial(x.flatten(1).exp(), 1)
    torch.rand(2)
    return F.dropout(layer(x), 0.5)


def _in_place(x, conv):
    y = conv(x).add_(x).mul_(2)
    return y.exp() * y.detach()


MODULES = {
    "convolution": (_conv, nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)),
    "frozen": (_conv, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4).eval()),
    "plain_norm": (_conv, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
    "instances": (_conv, nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)),
    "attention": (_attention, nn.Linear(9, 27), nn.LayerNorm(9)),
    "in_place": (_in_place, nn.Conv2d(4, 4, 1)),
    "unused": (_unused, nn.Conv2d(4, 4, 1)),
    "view": (lambda x: x.clone().view(-1).mul_(x.view(-1)).view(3, 4, 9).sum(1),),
    "recurrent": (lambda x, layer: layer(x.flatten(2))[0], nn.LSTM(9, 2)),
}


def _text(graph: fx.Graph, signature) -> list[str]:
    """Return the calls and the results of a graph, without the names of nodes."""
    names, lines = {}, []
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.get)
        if node.op == "placeholder":
            names[node] = node.name
        elif node.target is operator.getitem:
            names[node] = f"{args[0]}[{args[1]}]"
        elif node.op == "output":
            lines.append(str(args))
        elif node.target is not calls._METADATA:
            names[node] = f"%{len(lines)}"
            value = node.meta["val"]
            kind = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
            lines.append(f"{node.target} {args} {kwargs} {kind}")
    kinds = [(spec.kind, spec.target) for spec in signature.output_specs]
    return [*lines, str([kind for kind in kinds if "MUTATION" in str(kind)])]


@pytest.mark.parametrize("name", MODULES)
def test_same_graph_as_that_of_run_decompositions(name, monkeypatch):
    graphs = []

    def noting(exported, kept, has_memory):
        program, signature = original(exported, kept, has_memory)
        graphs.append(_text(program.graph, signature))
        return program, signature

    original = decompose._with_core_operators
    monkeypatch.setattr(decompose, "_with_core_operators", noting)
    function, *layers = MODULES[name]
    module, x = Function(function, *layers), torch.ones(3, 4, 3, 3)
    with mock.patch.object(decompose, "decompose_calls", wraps=decompose_calls) as plain:
        from_module(module, (x,))
    with mock.patch.object(decompose, "decompose_calls", side_effect=NotPlain) as refused:
        from_module(module, (x,))
    assert plain.call_count == refused.call_count == 2
    assert "\n".join(graphs[0]) == "\n".join(graphs[2])
    assert "\n".join(graphs[1]) == "\n".join(graphs[3])


def test_inputs_with_names_of_functions_of_python():
    """A copy of the graph renames such inputs, as ``input`` of ``nn.Linear``."""
    program = torch.export.export(nn.Linear(3, 2), (torch.rand(4, 3),))
    assert list(from_exported_program(program).inputs) == ["input"]


def test_equal_calls_are_decomposed_once(monkeypatch):
    monkeypatch.setattr(calls, "_KNOWN", {})
    counts = []

    def noting(program, table):
        counts.append(sum(node.op == "call_function" for node in program.graph.nodes))
        return original(program, table)

    original = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noting)
    with mock.patch.object(decompose, "decompose_calls", wraps=decompose_calls) as whole:
        from_module(_deep(6), (torch.ones(2, 4, 3, 3),))
    assert whole.call_count == len(counts) == 2
    assert counts == [4, 1]  # convolution, count of batches, statistics, mean; then normalisation


def _deep(depth: int) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(depth)]
    return Function(lambda x, *layers: nn.Sequential(*layers)(x).square().mean(), *layers)


def _work(depth: int) -> list[int]:
    """Return the number of calls that the package makes, itself and of others, to import a network,
    to differentiate it, and to make its step."""
    package = str(Path(relax_grad.__file__).parent)
    counts = []

    def counted(function, *args):
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            is_call = event in ("call", "c_call")
            count += is_call and frame.f_code.co_filename.startswith(package)

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            result = function(*args)
        finally:
            sys.setprofile(before)
        counts.append(count)
        return result

    imported = counted(from_module, _deep(depth), (torch.ones(2, 4, 3, 3),))
    donated = counted(donating, counted(train_step, imported, AdamW()))
    assert donated["step"]
    return counts


def test_the_work_is_linear_in_the_depth():
    _work(1)
    few, more, most = map(_work, (4, 8, 16))
    for n, twice, fourfold in zip(few, more, most, strict=True):
        assert (fourfold - twice) / (twice - n) == pytest.approx(2, rel=0.02)
