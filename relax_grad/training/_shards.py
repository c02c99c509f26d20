"""The parts of the optimizer's state that workers have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax import op

from ..ir.asynchronous import gather_of_peers, part_of_peer
from ..ir.compat import dtype_of
from ._tensors import Emit, shape_of


@dataclass(frozen=True)
class Shards:
    """A division of tensors among workers: vectors of equal length, with zeros after the last
    elements.

    Attributes
    ----------
    count : int
        The number of workers; with 1, tensors stay whole.
    of_peers : bool
        Whether they are the workers of the same place in each group, and not all.
    """

    count: int
    of_peers: bool = False

    def type_of_part(self, whole: relax.TensorType) -> relax.TensorType:
        """Return the type of a worker's part of a tensor."""
        size = math.prod(shape_of(whole))
        return relax.TensorType((-(-size // self.count),), dtype_of(whole))

    def part(self, emit: Emit, value: relax.Expr) -> relax.Expr:
        """Return the worker's part of a tensor."""
        size = math.prod(shape_of(value.ty))
        padding = shape_of(self.type_of_part(value.ty))[0] * self.count - size
        flat = emit(op.reshape(value, (size,)))
        if padding:
            zeros = relax.const(np.zeros(padding, dtype_of(value.ty)))
            flat = emit(op.concat([flat, zeros], 0))
        if self.of_peers:
            return emit(part_of_peer(flat, self.count))
        return emit(op.distributed.redistribute_replica_to_shard(flat, self.count, 0))

    def whole(self, emit: Emit, part: relax.Expr, ty: relax.TensorType) -> relax.Expr:
        """Return the tensor of a type whose parts the workers have."""
        if self.of_peers:
            flat = emit(gather_of_peers(part, self.count))
        else:
            flat = emit(op.ccl.allgather(part, self.count, False))
        size = math.prod(shape_of(ty))
        if shape_of(flat.ty)[0] > size:
            flat = emit(op.strided_slice(flat, [0], [0], [size]))
        return emit(op.reshape(flat, ty.shape))
