"""Composite operators in regions of autocast: recurrent networks and cells, einsum, losses.

Autocast casts the operands of the operators that a composite operator calls. A trace that
decomposes the composite operator does so below autocast: the results would have the dtypes before
the casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import fx

from .._converters import CONVERTERS

_METADATA = torch.ops.aten._assert_tensor_metadata.default


def decompose_under_autocast(module: fx.GraphModule, kept: Collection[str]) -> None:
    """Let the composite operators in regions of autocast be their decompositions, which the next
    trace of the graph calls within the region.

    Their results then have PyTorch's dtypes. The checks of dtypes that the export has
    recorded are of the dtypes before, and are removed.

    Parameters
    ----------
    module : fx.GraphModule
        The graph, which is changed.
    kept : Collection[str]
        The operators that are not decomposed, besides those with converters.
    """
    has_changed = False
    for region in _regions(module):
        for node in region.graph.nodes:
            if _is_decomposed(node.target) and node.target.__name__ not in {*CONVERTERS, *kept}:
                node.args, node.target = (node.target, *node.args), decomposition
                has_changed = True
    if not has_changed:
        return
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.find_nodes(op="call_function", target=_METADATA):
                inner.graph.erase_node(node)
            inner.recompile()


def decomposition(operator: torch._ops.OpOverload, *args: object, **kwargs: object) -> object:
    """Return the result of a composite operator by the operators that it calls."""
    # A mode of the trace would call the operator instead of its decomposition.
    with torch._C.DisableTorchFunction():
        return operator.decompose(*args, **kwargs)


def _is_decomposed(operator: object) -> bool:
    """Tell whether autocast casts the operands of the operators that an operator calls: it is
    composite, and autocast has no rule for it. Views keep their dtype."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        has_kernel(operator.name(), "CompositeImplicitAutograd")
        and not has_kernel(operator.name(), "AutocastCPU")
        and not any(result.alias_info for result in operator._schema.returns)
    )


def _regions(module: fx.GraphModule, is_enabled: bool = False) -> Iterator[fx.GraphModule]:
    """Yield the graphs within regions of autocast, and those that they call."""
    if is_enabled:
        yield module
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        enables = is_enabled
        if getattr(node.target, "__name__", "") == "wrap_with_autocast" and node.args[0] == "cpu":
            enables = bool(node.args[2])
        for operand in node.all_input_nodes:
            graph = getattr(module, operand.target, None) if operand.op == "get_attr" else None
            if isinstance(graph, fx.GraphModule):
                yield from _regions(graph, enables)
