"""Gradients that a model computes itself, as for gradient penalties and energies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._operators import GRADIENT, JOIN

#: The names of the nodes in PyTorch's graph of gradients of operators whose own gradients are not
#: known there.
_TRACED = {
    f"GeneratedBackwardFor_{operator.namespace}_{operator._opname}_defaultBackward"
    for operator in (GRADIENT, JOIN)
}


def grad(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool | None = None,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Trace ``torch.autograd.grad``, whose arguments these are."""
    if is_grads_batched:
        raise NotImplementedError(
            "torch.autograd.grad with is_grads_batched is not imported; use torch.func.jacfwd"
        )
    outputs, inputs = _sequence(outputs), _sequence(inputs)
    cotangents = [None] * len(outputs) if grad_outputs is None else _sequence(grad_outputs)
    cotangents = [_cotangent(*pair) for pair in zip(outputs, cotangents, strict=True)]
    reached = _reached(outputs)
    if allow_unused and any(node.name() in _TRACED for node, _ in reached):
        raise NotImplementedError(
            "torch.autograd.grad with allow_unused is imported for first derivatives only; "
            "leave the unused tensors out, or use torch.func.jvp and torch.func.hessian"
        )
    uses = [_edge(tensor) in reached for tensor in inputs]
    if not all(uses) and not allow_unused and not materialize_grads:
        raise RuntimeError(
            "one of the differentiated tensors is not used in the graph; set allow_unused=True"
        )
    wanted = [tensor for tensor, use in zip(inputs, uses, strict=True) if use]
    gradients = GRADIENT(outputs, wanted, cotangents) if wanted else []
    computed = iter(gradients if create_graph else [gradient.detach() for gradient in gradients])
    rest = torch.zeros_like if materialize_grads else lambda _: None
    return tuple(
        next(computed) if use else rest(tensor) for tensor, use in zip(inputs, uses, strict=True)
    )


def grad_and_value(
    function: Callable, argnums: int | tuple[int, ...], has_aux: bool, args: tuple, kwargs: dict
) -> tuple[object, object]:
    """Trace ``torch.func.grad_and_value(function, argnums, has_aux)(*args, **kwargs)``."""
    places = [argnums] if isinstance(argnums, int) else argnums
    places = [place % len(args) for place in places]
    operands = [_fresh(arg) if i in places else arg for i, arg in enumerate(args)]
    with torch.enable_grad():
        result = function(*operands, **kwargs)
        output = result[0] if has_aux else result
        chosen = (
            operands[argnums] if isinstance(argnums, int) else tuple(operands[i] for i in places)
        )
        leaves, spec = pytree.tree_flatten(chosen)
        gradients = grad(output, leaves, create_graph=True, materialize_grads=True)
    return pytree.tree_unflatten(gradients, spec), result


def vjp(
    function: Callable,
    *primals: object,
    has_aux: bool = False,
) -> tuple:
    """Trace ``torch.func.vjp(function, *primals, has_aux=has_aux)``."""
    primals = tuple(map(_fresh, primals))
    with torch.enable_grad():
        result = function(*primals)
    output, *aux = result if has_aux else (result,)
    leaves, spec = pytree.tree_flatten(primals)

    def pulled(
        *cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None
    ) -> tuple | torch.Tensor:
        grad_outputs = cotangents[0] if len(cotangents) == 1 else cotangents
        with torch.enable_grad():
            gradients = grad(
                pytree.tree_leaves(output),
                leaves,
                pytree.tree_leaves(grad_outputs),
                create_graph=True,
                materialize_grads=True,
            )
        return pytree.tree_unflatten(gradients, spec)

    return output, pulled, *aux


def leaves_of(inputs: tuple, create_graph: bool, need_graph: bool) -> tuple:
    """Return the tensors with respect to which ``torch.autograd.functional`` differentiates.

    PyTorch detaches inputs that need no gradient, but a later call may need it.
    """
    if create_graph:
        return tuple(map(_fresh, inputs))
    return tuple(tensor.detach().requires_grad_(need_graph) for tensor in inputs)


def linearize(function: Callable, *primals: object) -> tuple:
    """Refuse ``torch.func.linearize``."""
    raise NotImplementedError("torch.func.linearize is not imported; use torch.func.jvp")


def functionalize(function: Callable, *, remove: str = "mutations") -> Callable:
    """Refuse ``torch.func.functionalize``."""
    raise NotImplementedError(
        "torch.func.functionalize is not imported; call the function, whose writes are traced"
    )


def _fresh(value: Any) -> Any:
    """Return a value with separate tensors, which need a gradient."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.clone()
        return tensor if tensor.requires_grad else tensor.requires_grad_()

    return pytree.tree_map_only(torch.Tensor, fresh, value)


def _sequence(value: Any) -> list:
    tensors = [value] if isinstance(value, torch.Tensor) else list(value)
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise NotImplementedError(
                f"torch.autograd.grad of {type(tensor).__name__} is not imported"
            )
    return tensors


def _cotangent(output: torch.Tensor, grad_output: torch.Tensor | None) -> torch.Tensor:
    if grad_output is not None:
        if grad_output.shape != output.shape:
            raise RuntimeError(
                f"grad_outputs has shape {grad_output.shape}, the output {output.shape}"
            )
        return grad_output
    if output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return torch.ones_like(output)


def _edge(tensor: torch.Tensor) -> tuple:
    """Return the node of PyTorch's graph of gradients that takes the gradient of a tensor."""
    if not tensor.requires_grad:
        raise RuntimeError("one of the differentiated tensors does not require grad")
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _reached(outputs: Sequence[torch.Tensor]) -> set[tuple]:
    """Return the nodes that take a gradient from outputs."""
    pending = list(map(_edge, outputs))
    reached, nodes = set(pending), set()
    while pending:
        node, _ = pending.pop()
        if node in nodes:
            continue
        nodes.add(node)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        reached.update(edges)
        pending += edges
    return reached
