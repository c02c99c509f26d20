"""The tasks of a worker that trains: its replica of the step, its tensors, and its share of each
batch."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import tvm
from tvm import relax

from ..ir.signature import GROUPS
from ._tasks import Worker, task
from .shards import along, join, split

#: How the workers keep a tensor. None: all have the whole. ``[axis, parts, sharing]``: each has the
#: part of its place in its group, as in ``along(axis, parts)``, or the whole if the axis is None.
#: If ``sharing`` is more than 1, so many workers of the same place have equal shares of its
#: elements, with zeros after the last ones.
Layout = None | list

#: The fields of a step's result that take the place of groups.
_NEW = {"params": 3, "states": 4, "optimizer_state": 5}


class Replica:
    """The compiled step of a worker, and its tensors. Those of worker 0 are the controller's
    own."""

    def __init__(self, path: str):
        self.machine = relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())
        self.groups: dict[str, list[tvm.runtime.Tensor]] = {}
        #: How the workers keep the tensors of each group.
        self.layouts: dict[str, list[Layout]] = {}
        #: The groups before the last step, for a controller that rejects it.
        self.before: dict[str, list[tvm.runtime.Tensor]] = {}


@task
def replica(worker: Worker, name: str, library: str) -> None:
    """Load the library of a step, which ``share_file`` has kept."""
    worker.kept[name] = Replica(str(worker.kept[library]))


def _replica_of(worker: Worker, name: str) -> Replica:
    """Return the replica that :func:`replica` has kept."""
    kept = worker.kept[name]
    if not isinstance(kept, Replica):
        raise TypeError(f"{name} must be the name of a replica, but it names {kept!r}")
    return kept


@task
def share_tensors(
    worker: Worker, name: str, types: dict[str, list], layouts: dict[str, list[Layout]]
) -> None:
    """Give the tensors of the controller to all replicas.

    Parameters
    ----------
    types : dict[str, list]
        The shapes and dtypes of the tensors of each group.
    layouts : dict[str, list[Layout]]
        How the workers keep them.
    """
    own_replica, groups = _replica_of(worker, name), worker.inbox.get("groups")
    own_replica.layouts = layouts
    for group, kinds in types.items():
        own_replica.groups[group] = [
            _received(worker, None if groups is None else groups[group][i], shape, dtype, layout)
            for i, ((shape, dtype), layout) in enumerate(zip(kinds, layouts[group], strict=True))
        ]
    if groups is not None:
        worker.inbox["groups"], own_replica.groups = own_replica.groups, {}


def _received(
    worker: Worker, whole: tvm.runtime.Tensor | None, shape: list[int], dtype: str, layout: Layout
) -> tvm.runtime.Tensor:
    """Return a tensor of the controller, or the worker's part of it."""
    call = worker.communicator.call
    if layout is None:
        tensor = whole if whole is not None else tvm.runtime.empty(shape, dtype)
        call("broadcast_from_worker0", (tensor, False, tensor))
        return tensor
    part = tvm.runtime.empty(_part_shape(shape, layout, worker), dtype)
    send = None
    if whole is not None:
        send = tvm.runtime.tensor(np.stack(_divided(whole.numpy(), layout, worker)))
    call("scatter_from_worker0", (send, False, part))
    return part


def _places(layout: list, worker: Worker) -> int:
    """Return the number of places in a group, whose workers have different parts."""
    return worker.num_workers // layout[2] if layout[2] > 1 else worker.group_size


def _part_shape(shape: list[int], layout: list, worker: Worker) -> list[int]:
    axis, _, sharing = layout
    if axis is not None:
        shape = [*shape[:axis], shape[axis] // _places(layout, worker), *shape[axis + 1 :]]
    return [-(-math.prod(shape) // sharing)] if sharing > 1 else shape


def _divided(whole: np.ndarray, layout: list, worker: Worker) -> list[np.ndarray]:
    """Return the part of each worker."""
    axis, parts, sharing = layout
    places = _places(layout, worker)
    pieces = [whole] * places
    if axis is not None:
        pieces = split("a tensor", whole, along(axis, parts), places)
    if sharing == 1:
        return [pieces[rank % places] for rank in range(worker.num_workers)]
    length = -(-pieces[0].size // sharing)
    rows = []
    for piece in pieces:
        padded = np.zeros(length * sharing, whole.dtype)
        padded[: piece.size] = piece.reshape(-1)
        rows.append(padded.reshape(sharing, length))
    return [rows[rank % places][rank // places] for rank in range(worker.num_workers)]


@task
def gather_tensors(worker: Worker, name: str, group: str, types: list) -> None:
    """Give a group of all workers to the controller, with whole tensors instead of parts."""
    is_first, own_replica = worker.rank == 0, _replica_of(worker, name)
    own = worker.inbox.pop("parts") if is_first else own_replica.groups[group]
    layouts, wholes = own_replica.layouts[group], []
    for tensor, (shape, dtype), layout in zip(own, types, layouts, strict=True):
        if layout is None:
            wholes.append(tensor)
            continue
        gathered = None
        if is_first:
            gathered = tvm.runtime.empty([worker.num_workers, *map(int, tensor.shape)], dtype)
        worker.communicator.call("gather_to_worker0", (tensor, False, gathered))
        if gathered is not None:
            wholes.append(tvm.runtime.tensor(_joined(gathered.numpy(), shape, layout, worker)))
    if is_first:
        worker.inbox["wholes"] = wholes


def _joined(gathered: np.ndarray, shape: list[int], layout: list, worker: Worker) -> np.ndarray:
    """Return the tensor of which the workers have parts."""
    axis, parts, sharing = layout
    places = _places(layout, worker)
    pieces = list(gathered[:places])
    if sharing > 1:
        own = _part_shape(shape, [axis, parts, 1], worker) if axis is not None else shape
        rows = (gathered[place::places].reshape(-1) for place in range(places))
        pieces = [row[: math.prod(own)].reshape(own) for row in rows]
    return pieces[0] if axis is None else join("a tensor", pieces, along(axis, parts))


@task
def step(
    worker: Worker,
    name: str,
    function: str,
    batch: list,
    scalars: list[str],
    seed: int,
    has_own_loss: bool,
    compare: bool,
    undo: bool,
) -> dict:
    """Run a step on the worker's share of a batch.

    Parameters
    ----------
    batch : list
        For each tensor: the shape of an element of its first axis, the dtype, and the begins and
        ends along the first axis of all workers' shares; or, for a tensor that all get, its shape,
        dtype and None.
    scalars : list[str]
        The hyperparameters, as ``float.hex`` writes them.
    has_own_loss : bool
        Whether the first metric is the loss of the worker's share. Otherwise all workers have the
        same loss.
    compare : bool
        Whether to return digests of all tensors after the step: of those that must be the same on
        all workers, and of those that must be the same on the workers of one place in their groups.
    undo : bool
        Whether the controller has rejected the last step, which left all as it was but a dynamic
        loss scale.

    Returns
    -------
    report : dict
        The worker's own loss, the digests, and the bytes, the time and the wait of the collectives
        within the step.
    """
    own_replica = _replica_of(worker, name)
    arrays = worker.inbox.pop("batch", None)
    tensors = [
        _share(worker, None if arrays is None else arrays[i], *kind) for i, kind in enumerate(batch)
    ]
    numbers = [tvm.runtime.tensor(np.array(float.fromhex(scalar), "float64")) for scalar in scalars]
    if undo:
        own_replica.groups = own_replica.before
    groups = worker.inbox.pop("groups") if worker.rank == 0 else own_replica.groups
    used = worker.communicator
    before = used.sent, used.seconds, used.waited
    result = own_replica.machine[function](
        *tensors,
        *numbers,
        tvm.runtime.tensor(np.array(seed, "int64")),
        *(groups[group] for group in GROUPS),
    )
    communication = used.sent - before[0], used.seconds - before[1], used.waited - before[2]
    own = float((result[1][0] if has_own_loss else result[0]).numpy().reshape(()))
    new = {group: list(result[i]) for group, i in _NEW.items()}
    if worker.rank == 0:
        worker.inbox["result"] = result
    else:
        own_replica.before = groups
        own_replica.groups = {**groups, **new}
    digests = _digests({**groups, **new}, own_replica.layouts) if compare else None
    return {
        "own": own if math.isfinite(own) else str(own),
        "digests": digests,
        "communication": communication,
    }


def _share(
    worker: Worker, whole: np.ndarray | None, shape: list[int], dtype: str, ranges: list | None
) -> tvm.runtime.Tensor:
    """Return the worker's share of a tensor of the controller."""
    call = worker.communicator.call
    if ranges is None:
        tensor = tvm.runtime.tensor(whole) if whole is not None else tvm.runtime.empty(shape, dtype)
        call("broadcast_from_worker0", (tensor, False, tensor))
        return tensor
    if whole is None:
        begin, end = ranges[worker.rank]
        tensor = tvm.runtime.empty((end - begin, *shape), dtype)
        call("recv_from_worker0", (tensor,))
        return tensor
    for rank in range(1, worker.num_workers):
        begin, end = ranges[rank]
        call("send_to_worker", (tvm.runtime.tensor(whole[begin:end]), rank))
    return tvm.runtime.tensor(whole[: ranges[0][1]])


def _digests(
    groups: dict[str, list[tvm.runtime.Tensor]], layouts: dict[str, list[Layout]]
) -> list[str]:
    """Return the digest of tensors that all workers have, and the digest of the worker's parts."""
    whole, parts = hashlib.sha256(), hashlib.sha256()
    for name in GROUPS:
        for tensor, layout in zip(groups[name], layouts[name], strict=True):
            if layout is None or layout[2] == 1:
                digest = whole if layout is None else parts
                digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return [whole.hexdigest(), parts.hexdigest()]
