"""Programs of PyTorch that write to tensors, views and detached tensors, and their graphs held
against PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import fx, nn

from relax_grad.errors import UnsupportedOperatorError
from relax_grad.frontend.torch.export.program import Program
from relax_grad.frontend.torch.export.trace import export
from relax_grad.frontend.torch.inputs.extents import DynamicShapes
from relax_grad.frontend.torch.inputs.names import Inputs

DATA = torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=torch.float64)

_VIEWS = (
    *("{}[0:2]", "{}.view(4)", "{}[1:]", "{}.view(2, 2).t().reshape(4)", "{}.flip(0)"),
    *("{}.unsqueeze(0).squeeze(0)", "{}.reshape(4)", "{}[0]", "{}.contiguous()", "{}.expand(4)"),
)
_DETACHED = ("{}.detach()", "{}.data", "{}.detach()[0:2]")
_WRITES = (
    *("{0}.mul_({1})", "{0}.add_({1})", "{0}.copy_({0} * {1})", "{0}.zero_()", "{0}[0] = 3.0"),
    *("{0}.clamp_(0, 2)", "{0}[0:1] *= 2.0", "{0}.sigmoid_()", "{0}.relu_()", "{0}.fill_(1.5)"),
    *("{0}[torch.tensor([0, 1])] += 1.0", "{0}.data.mul_(2.0)", "{0}.data.add_({0})"),
    *("{0}.data.copy_({0} * {1})", "{0}.detach()[0].add_({1})", "{0}.t_()", "{0}.squeeze_()"),
)


def program(seed: int) -> str:
    """Return the source of a random function ``f(w, x, b)`` of a parameter, an input and a
    buffer."""
    draw = random.Random(seed)
    lines = ["y = w * x", "z = torch.zeros(4, dtype=x.dtype)", "p = w + b", "q = x.clone()"]
    names, indent = ["y", "z", "p", "q", *["b"] * (draw.random() < 0.3)], ""
    for i in range(draw.randint(3, 8)):
        kind, name, new = draw.random(), draw.choice(names), f"v{i}"
        if kind < 0.45:
            form = draw.choice(_VIEWS if kind < 0.25 else _DETACHED)
            lines.append(f"{indent}{new} = {form.format(name)}")
            names.append(new)
        elif kind < 0.5:
            lines.append(f"{indent}{name}.detach_()")
        elif kind < 0.75:
            other = draw.choice(["w", "x", "(b * w)", "(x * 2)", draw.choice(names)])
            lines.append(indent + draw.choice(_WRITES).format(name, f"{other}.sum()"))
        elif kind < 0.87 and len(indent) < 8:
            region = draw.choice(["no_grad", "no_grad", "inference_mode", "enable_grad"])
            lines.append(f"{indent}with torch.{region}():")
            indent += "    "
            lines.append(f"{indent}{new} = {name} * 1.5")
            names.append(new)
        elif kind < 0.95:
            indent = indent[4:]
        else:
            lines.append(f"{indent}{new} = {name} * {draw.choice(names)}.sum()")
            names.append(new)
    read = draw.sample(names, min(len(names), draw.randint(2, 4)))
    lines.append(
        "return " + " + ".join(f"{tensor}.sin().sum()" for tensor in read) + " + (w * w).sum()"
    )
    return "def f(w, x, b):\n" + "\n".join(f"    {line}" for line in lines)


class Module(nn.Module):
    """A function of a parameter, an input and a buffer as a module."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.tensor([0.5, -1.2, 0.7, 1.9], dtype=torch.float64))
        self.register_buffer("b", torch.tensor([0.3, 0.4, -0.5, 0.6], dtype=torch.float64))

    def forward(self, x):
        return self.function(self.w, x, self.b)


def outcome(function: Callable) -> str:
    """Compare loss, gradient and buffer of a graph with PyTorch's.

    Returns
    -------
    outcome : str
        ``"equal"``; ``"refused"`` with the reasons; ``"invalid"`` if PyTorch raises an error; or
        the difference.
    """
    module = Module(function)
    buffer = module.b.clone()
    try:
        loss = module(DATA.clone())
        loss.backward()
    except (RuntimeError, IndexError):
        return "invalid"
    wanted = loss.detach(), module.w.grad, module.b.detach()
    module = Module(function)
    try:
        inputs = Inputs.of(module, (DATA,), {})
        graph = export(module, inputs, None, DynamicShapes(None, inputs), ())
    except UnsupportedOperatorError as error:
        return f"refused {error}"
    if graph.problems:
        return f"refused {graph.problems}"
    weight = module.w.detach().clone().requires_grad_()
    outputs = _run(graph, {"w": weight, "b": buffer})
    loss = outputs[graph.loss]
    (gradient,) = torch.autograd.grad(loss + 0 * weight.sum(), [weight])
    buffer = outputs[graph.states["b"]].detach() if "b" in graph.states else buffer
    names = ("loss", "gradient", "buffer")
    for name, result, other in zip(names, (loss.detach(), gradient, buffer), wanted, strict=True):
        if not torch.allclose(result, other):
            return f"{name} is {result.tolist()}, but PyTorch's is {other.tolist()}"
    return "equal"


def _run(graph: Program, tensors: dict[str, torch.Tensor]) -> tuple:
    """Return the results of a graph, which PyTorch computes."""
    module = graph.exported.graph_module
    inputs = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            key = graph.tensors.get(node.name)
            constant = graph.constants.get(node.name, DATA)
            inputs.append(constant.clone() if key is None else tensors[key])
        elif node.target is torch.ops.aten.copy.default:  # PyTorch has no derivative of it
            node.target = _copy
    return fx.Interpreter(module).run(*inputs)


def _copy(target: torch.Tensor, source: torch.Tensor, *_) -> torch.Tensor:
    return source.expand_as(target).to(target.dtype).clone()
