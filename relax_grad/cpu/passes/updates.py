"""The place of updates: next to the gradients that they take."""

from __future__ import annotations

import tvm
from tvm import relax

from ...ir.aliases import leaves, named_by, writing_functions
from ...ir.bindings import with_function_body
from ...ir.module import DONATED, normalized
from .remat.forward import forward_pass
from .reorder import Tensors, has_place, in_arguments


@tvm.transform.module_pass(opt_level=0, name="relax_grad.PlaceUpdates")
def place_updates(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Move the calls that compute the new values of donated arguments directly after their
    operands.

    FuseOps orders calls by the results that they lead to. The moments of an optimizer then come
    with the gradient, and the selection by a finite loss at the end, because it needs the loss.
    In between, the new moments are alive beside the old ones, and they are too far from the
    selection to become one loop with it. Here the forward pass comes first, with the loss and the
    small values that follow from it, such as rates. Each new value then comes directly after its
    last operand.

    The first result of a function with donated arguments counts as the loss. A function with
    several blocks, or with a binding that must keep its place, stays as it is.
    """
    writers = writing_functions(mod)
    functions = {
        variable: _with_placed_updates(function)
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
        and DONATED in (function.attrs or {})
        and len(function.body.blocks) == 1
        and isinstance(function.body.blocks[0], relax.DataflowBlock)
        and not any(has_place(b, writers) for b in function.body.blocks[0].bindings[:])
    }
    if not functions:
        return mod
    return tvm.IRModule(
        {**dict(mod.functions_items()), **functions},
        attrs=mod.attrs,
        global_infos=mod.global_infos,
    )


def _with_placed_updates(function: relax.Function) -> relax.Function:
    (block,) = function.body.blocks
    bindings = list(block.bindings[:])
    tensors = Tensors(bindings)
    results = named_by(function.body.body, tensors.named)
    loss = leaves(results[0] if isinstance(results, list) and results else results)
    forward = forward_pass(tensors, loss)
    updated = {place.variable for place in in_arguments(function)}
    # The place of each binding: its number, after the forward pass, or an operand's.
    places: list[int] = []
    for i, binding in enumerate(bindings):
        place = i if i in forward else i + len(bindings)
        if binding.var in updated and i not in forward:
            place = max([len(bindings), *(places[operand] for operand in tensors.needs[i])])
        places.append(place)
    order = sorted(range(len(bindings)), key=lambda i: (places[i], i))
    placed = relax.DataflowBlock([bindings[i] for i in order], block.span)
    body = normalized(function.params, relax.SeqExpr([placed], function.body.body))
    return with_function_body(function, body)
