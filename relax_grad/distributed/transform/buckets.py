"""Reductions of many tensors in few collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import tvm
from tvm import relax
from tvm.relax import op

from ...ir.aliases import may_write
from ...ir.asynchronous import is_start, start_allreduce, started_by, wait
from ...ir.bindings import bindings_of
from ...ir.compat import dtype_of
from ...ir.dataflow import in_dataflow
from ...ir.module import normalized
from ...ir.readiness import in_order_of_readiness
from ._emitter import Emitter

#: The size of a bucket in bytes, as in PyTorch's ``DistributedDataParallel``.
BUCKET_BYTES = 25 * 2**20

#: The largest size of the first bucket of collectives that overlap, as there.
_FIRST_BYTES = 2**20


def reduce_gradients(
    function: relax.Function,
    kind: str,
    bucket_bytes: int = BUCKET_BYTES,
    *,
    overlap: bool = False,
    of_peers: bool = False,
) -> relax.Function:
    """Return an adjoint function whose gradients are reduced over all workers.

    The gradients are joined to buckets of one dtype, in the order in which they are ready, up to a
    number of bytes. The collective of a bucket comes directly after the last of its gradients.
    Computations of single gradients come as soon as their operands are there: an adjoint may
    compute them at its end.

    Parameters
    ----------
    function : relax.Function
        A function that returns ``(result, (gradients...))``.
    kind : str
        ``"sum"`` or ``"avg"``.
    bucket_bytes : int
        The largest size of a bucket; a gradient that is larger has its own bucket. If
        collectives overlap, the first bucket has at most 1 MiB, as in PyTorch's
        ``DistributedDataParallel``, so that they begin early.
    overlap : bool
        Whether the collectives run beside the rest of the function, which waits for them at its
        end.
    of_peers : bool
        Whether gradients are reduced over the workers of the same place in each group, and not over
        all workers.

    Returns
    -------
    function : relax.Function
        The function with the same parameters and types.
    """
    plain = relax.transform.ToNonDataflow()(tvm.IRModule({"f": function}))["f"]
    bindings = list(_top_level(plain.body))
    values = {
        binding.var: binding.value for binding in bindings if isinstance(binding, relax.VarBinding)
    }
    whole = _resolved(plain.body.body, values)
    result, gradients = whole.fields[0], _resolved(whole.fields[1], values).fields[:]
    if not any(may_write(binding.value, ()) for binding in bindings):
        ready = [gradient for gradient in gradients if isinstance(gradient, relax.Var)]
        bindings = in_order_of_readiness(bindings, ready, relax.analysis.free_vars(result))
    defined = {binding.var: i for i, binding in enumerate(bindings)}
    emit = Emitter()
    reduced: dict[relax.Var, relax.Expr] = {}
    gradients = [
        gradient if isinstance(gradient, relax.Var) else emit(gradient, "gradient")
        for gradient in gradients
    ]
    # The gradient of several parameters counts once.
    places = {gradient: defined.get(gradient, -1) for gradient in gradients}
    pending: dict[int, list[list[relax.Var]]] = {}
    for bucket in _buckets(sorted(places, key=places.__getitem__), bucket_bytes, overlap):
        pending.setdefault(max(places[variable] for variable in bucket), []).append(bucket)
    started = []
    for i in range(-1, len(bindings)):
        if i >= 0:
            emit.bindings.append(bindings[i])
        for bucket in pending.get(i, []):
            if overlap:
                call = start_allreduce(bucket, kind, of_peers=of_peers)
                started.append((bucket, emit(call, "started")))
            else:
                totals = reduce_together(emit, bucket, kind, of_peers=of_peers)
                reduced.update(zip(bucket, totals, strict=True))
    for bucket, handle in started:
        total = emit(wait(handle), "bucket")
        reduced.update(
            (gradient, emit(relax.TupleGetItem(total, i))) for i, gradient in enumerate(bucket)
        )
    outputs = [reduced[gradient] for gradient in gradients]
    body = relax.SeqExpr(
        [relax.BindingBlock(emit.bindings)], relax.Tuple([result, relax.Tuple(outputs)])
    )
    return in_dataflow(
        relax.Function(
            plain.params, normalized(plain.params, body), None, plain.is_pure, plain.attrs
        )
    )


def reduce_together(
    emit: Callable[..., relax.Var],
    tensors: Sequence[relax.Var],
    kind: str,
    *,
    of_peers: bool = False,
) -> list[relax.Var]:
    """Emit one collective for tensors of one dtype, and return the reduced tensors.

    Parameters
    ----------
    emit : Callable
        Binds a value.
    tensors : Sequence[relax.Var]
        Tensors of constant shapes.
    kind : str
        ``"sum"`` or ``"avg"``.
    of_peers : bool
        As for :func:`reduce_gradients`.
    """
    total = reduction_of(emit, _joined(emit, tensors), kind, of_peers)
    return _divided(emit, emit(total, "bucket"), tensors)


def reduction_of(
    emit: Callable[..., relax.Var], value: relax.Expr, kind: str, of_peers: bool
) -> relax.Expr:
    """Return the expression whose result is a tensor reduced over all workers, or over the peers in
    other groups."""
    if of_peers:  # R.ccl has no reduction of peers
        started = emit(start_allreduce([value], kind, of_peers=True), "started")
        return relax.TupleGetItem(emit(wait(started)), 0)
    return op.ccl.allreduce(value, kind, False)


def _joined(emit: Callable[[relax.Expr], relax.Var], tensors: Sequence[relax.Var]) -> relax.Var:
    """Emit the vector of all elements of some tensors; a single tensor stays as it is."""
    if len(tensors) == 1:
        return tensors[0]
    flat = [emit(op.reshape(tensor, (math.prod(_shape(tensor)),))) for tensor in tensors]
    return emit(op.concat(flat, 0))


def _divided(
    emit: Callable[[relax.Expr], relax.Var], total: relax.Var, tensors: Sequence[relax.Var]
) -> list[relax.Var]:
    """Emit the parts of a vector of :func:`_joined` in the shapes of the tensors."""
    if len(tensors) == 1:
        return [total]
    shapes = [_shape(tensor) for tensor in tensors]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    parts = emit(op.split(total, ends[:-1], 0))
    return [
        emit(op.reshape(emit(relax.TupleGetItem(parts, i)), shape))
        for i, shape in enumerate(shapes)
    ]


def _shape(tensor: relax.Var) -> list[int]:
    return [int(extent) for extent in tensor.ty.shape.values]


def _buckets(
    variables: Sequence[relax.Var], bucket_bytes: int, is_first_small: bool
) -> list[list[relax.Var]]:
    """Return consecutive variables of one dtype together, up to a size."""
    buckets: list[list[relax.Var]] = []
    limit = min(bucket_bytes, _FIRST_BYTES) if is_first_small else bucket_bytes
    open_ones: dict[str, tuple[list[relax.Var], int]] = {}
    for variable in variables:
        dtype, size = dtype_of(variable.ty), _bytes(variable.ty)
        bucket, total = open_ones.get(dtype, (None, 0))
        if bucket is None or total + size > (limit if bucket is buckets[0] else bucket_bytes):
            bucket, total = [], 0
            buckets.append(bucket)
        bucket.append(variable)
        open_ones[dtype] = bucket, total + size
    return buckets


def _bytes(kind: relax.TensorType) -> int:
    count = math.prod(int(extent) for extent in kind.shape.values)
    return count * tvm.DataType(dtype_of(kind)).bits // 8


def _top_level(body: relax.SeqExpr) -> Iterator[relax.Binding]:
    return (binding for block in body.blocks[:] for binding in block.bindings[:])


def _resolved(value: relax.Expr, values: dict) -> relax.Tuple:
    while isinstance(value, relax.Var) and value in values:
        value = values[value]
    if not isinstance(value, relax.Tuple):
        raise ValueError("the function must return a tuple of its result and a tuple of gradients")
    return value


def reductions(function: relax.Function) -> list[relax.Call]:
    """Return the calls that reduce a tensor or start to do so, in their order."""
    allreduce = tvm.ir.Op.get("relax.ccl.allreduce")
    return [
        binding.value
        for binding in bindings_of(function.body)
        if isinstance(binding.value, relax.Call)
        and (binding.value.op == allreduce or is_start(binding.value))
    ]


def reduced_by(call: relax.Call) -> list[relax.Var]:
    """Return the tensors that a call of :func:`reductions` reduces."""
    return started_by(call) if is_start(call) else [call.args[0]]
