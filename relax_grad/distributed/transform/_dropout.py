"""Attention with dropout along a divided axis: workers drop the weights that one with all heads
drops."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from ._labels import RULES
from ._layouts import Divided, as_int
from ._propagation import Operand, Propagation
from ._shapes import shape_rule

#: The index of the stream among the tensors of attention with dropout.
_STREAM = 4


@shape_rule("grad.attention_dropout")
def _attention_dropout(
    propagation: Propagation, variable: relax.Var, call: relax.Call, operands: list[Operand]
) -> bool:
    """The stream becomes one of a part of the heads. The rule by labels divides the tensors."""
    axes = RULES[call.op.name](call, [operand.kind for operand in operands], variable.ty)
    label, layout = propagation.divided_label(call.op.name, axes, operands)
    if label not in ("batch", "head"):
        return False
    stream = operands[_STREAM]
    if stream.kind.ndim:
        propagation.refuse(
            call.op.name,
            f"the heads are a part of other workers' heads already: {stream.name} must be an "
            f"int64 tensor of shape (), but its type is {stream.kind}",
        )
    heads = as_int(operands[0].kind.shape.values[2])
    size = _size_of_part(propagation, call, label, layout)
    if heads is None:
        propagation.refuse(
            call.op.name,
            "the number of heads must be constant, so that workers draw the random numbers of "
            f"their heads, but the type of {operands[0].name} is {operands[0].kind}",
        )
    emit, workers = propagation.emit, propagation.num_workers
    step = size * heads if label == "batch" else size
    numbers: np.ndarray = np.arange(workers) * step
    first = relax.const(numbers.astype("int64"), "int64")
    first = emit(op.distributed.redistribute_replica_to_shard(first, workers, 0))
    parts = [
        emit(op.reshape(stream.value, (1,))),
        first,
        relax.const(np.array([heads]), "int64"),
    ]
    stream.value = emit(op.concat(parts, 0))
    return False


def _size_of_part(
    propagation: Propagation, call: relax.Call, label: object, layout: Divided
) -> int:
    """Return the extent of a worker's part of the heads or of the batch, which follow each
    other."""
    size = as_int(layout.size)
    if as_int(layout.parts) != 1 or size is None:
        extent = f"{layout.parts} parts of {layout.size} for a worker"
        propagation.refuse(
            call.op.name,
            f"the axis of the {label} must have a constant extent and be divided within one part, "
            f"so that workers draw the random numbers of their part, but it has {extent}; annotate "
            "the weights of heads that are not joined with parts=1",
        )
    return size
