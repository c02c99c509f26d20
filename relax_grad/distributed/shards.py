"""How parameters are divided among workers, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .._validation import check_integer
from ..ir.arrays import as_array


@dataclass(frozen=True)
class Shard:
    """The annotation of a parameter that is divided among workers along one axis.

    :func:`column`, :func:`row` and :func:`along` make it.

    Attributes
    ----------
    kind : str
        ``"column"``, ``"row"`` or ``"along"``.
    axis : int or None
        The axis, or None if the use of the parameter tells it.
    parts : int
        The number of equal parts along the axis, each of which is divided among the workers.
    """

    kind: str
    axis: int | None = None
    parts: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", check_integer("parts", self.parts, 1))

    def __str__(self) -> str:
        arguments = [str(self.axis)] if self.kind == "along" else []
        arguments += [f"parts={self.parts}"] if self.parts > 1 else []
        return f"{self.kind}({', '.join(arguments)})"


def column(parts: int = 1) -> Shard:
    """Divide the output features of a linear layer, of its weight or of its bias.

    Parameters
    ----------
    parts : int
        The number of layers that are joined in the weight, such as 3 for queries, keys and values.
        Each is divided within itself.

    Returns
    -------
    shard : Shard
        The annotation.

    Examples
    --------
    >>> from relax_grad.distributed import column
    >>> str(column(parts=3))
    'column(parts=3)'
    """
    return Shard("column", None, parts)


def row(parts: int = 1) -> Shard:
    """Divide the input features of a linear layer's weight. The layer's bias stays whole.

    Parameters
    ----------
    parts : int
        The number of parts along the input features, each of which is divided within itself.

    Returns
    -------
    shard : Shard
        The annotation.

    Examples
    --------
    >>> from relax_grad.distributed import row
    >>> str(row())
    'row()'
    """
    return Shard("row", None, parts)


def along(axis: int, parts: int = 1) -> Shard:
    """Divide a parameter of any kind along an axis.

    Parameters
    ----------
    axis : int
        The axis. Negative numbers count from the last one.
    parts : int
        The number of equal parts along the axis, each of which is divided within itself.

    Returns
    -------
    shard : Shard
        The annotation.

    Examples
    --------
    >>> from relax_grad.distributed import along
    >>> str(along(1))
    'along(1)'
    """
    return Shard("along", check_integer("axis", axis), parts)


def shard_values(
    values: Mapping[str, object], shards: Mapping[str, Shard], num_workers: int
) -> list[dict[str, np.ndarray]]:
    """Return each worker's values.

    Parameters
    ----------
    values : Mapping[str, array or tensor]
        Whole values by their names.
    shards : Mapping[str, Shard]
        The annotations of the values that are divided, each with its axis, such as
        :meth:`relax_grad.distributed.transform.TensorParallel.shards_of` returns. Other values are
        the same on all workers.
    num_workers : int
        The number of workers.

    Returns
    -------
    shares : list[dict[str, numpy.ndarray]]
        For each worker, the values by their names.

    Raises
    ------
    ValueError
        If a name is unknown, an annotation has no axis, or the workers do not divide an extent.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import along, shard_values
    >>> first, second = shard_values({"w": np.arange(4)}, {"w": along(0, parts=2)}, 2)
    >>> first["w"].tolist(), second["w"].tolist()
    ([0, 2], [1, 3])
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping of names to arrays, but it is {values!r}")
    num_workers = check_integer("num_workers", num_workers, 1)
    _check_known(values, shards)
    arrays = {name: as_array(value) for name, value in values.items()}
    parts = {
        name: split(name, array, shards[name], num_workers)
        for name, array in arrays.items()
        if name in shards
    }
    return [
        {name: parts[name][rank] if name in parts else array for name, array in arrays.items()}
        for rank in range(num_workers)
    ]


def join_values(
    shares: Sequence[Mapping[str, object]], shards: Mapping[str, Shard]
) -> dict[str, np.ndarray]:
    """Return whole values from all workers' values, the reverse of :func:`shard_values`.

    Parameters
    ----------
    shares : Sequence[Mapping[str, array or tensor]]
        For each worker, its values by their names. Worker 0 gives those that are not divided.
    shards : Mapping[str, Shard]
        As for :func:`shard_values`.

    Returns
    -------
    values : dict[str, numpy.ndarray]
        The whole values.

    Raises
    ------
    ValueError
        If a name is unknown, or an annotation has no axis.

    Examples
    --------
    >>> import numpy as np
    >>> from relax_grad.distributed import along, join_values
    >>> shares = [{"w": np.array([0, 2])}, {"w": np.array([1, 3])}]
    >>> join_values(shares, {"w": along(0, parts=2)})["w"].tolist()
    [0, 1, 2, 3]
    """
    if not isinstance(shares, list | tuple) or not all(isinstance(e, Mapping) for e in shares):
        raise TypeError(
            f"shares must be a list of mappings of names to arrays, but it is {shares!r}"
        )
    if not shares:
        raise ValueError("shares must have the values of at least one worker, but it is empty")
    _check_known(shares[0], shards)
    return {
        name: join(name, [as_array(share[name]) for share in shares], shards[name])
        if name in shards
        else as_array(first)
        for name, first in shares[0].items()
    }


def split(name: str, whole: np.ndarray, shard: Shard, num_workers: int) -> list[np.ndarray]:
    """Return each worker's part of a value."""
    axis, parts = axis_of(name, shard, whole.ndim), shard.parts
    check_extent(name, axis, whole.shape[axis], parts, num_workers)
    before, behind = whole.shape[:axis], whole.shape[axis + 1 :]
    inner = whole.shape[axis] // (parts * num_workers)
    spread = whole.reshape(*before, parts, num_workers, inner, *behind)
    return [
        np.ascontiguousarray(spread.take(rank, axis + 1)).reshape(*before, parts * inner, *behind)
        for rank in range(num_workers)
    ]


def join(name: str, pieces: Sequence[np.ndarray], shard: Shard) -> np.ndarray:
    """Return the whole of a value from each worker's part."""
    first = pieces[0]
    axis, parts = axis_of(name, shard, first.ndim), shard.parts
    before, behind = first.shape[:axis], first.shape[axis + 1 :]
    inner = first.shape[axis] // parts
    spread = [piece.reshape(*before, parts, inner, *behind) for piece in pieces]
    return np.stack(spread, axis + 1).reshape(*before, first.shape[axis] * len(pieces), *behind)


def axis_of(name: str, shard: Shard, ndim: int) -> int:
    """Return the axis of an annotation, counted from the first one."""
    axis = 0 if shard.kind == "column" and ndim == 1 else shard.axis
    if axis is None:
        raise ValueError(
            f"{name}: {shard} has no axis, which the use of a parameter tells; take the "
            "annotations that TensorParallel.shards_of returns, or along(axis)"
        )
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} has {ndim} axes, but {shard} names axis {axis}")
    return axis % ndim


def check_extent(name: str, axis: int, extent: int, parts: int, num_workers: int) -> None:
    """Check that the workers divide an extent."""
    if extent % (parts * num_workers):
        prefix = f"{parts} parts, each for " if parts > 1 else ""
        raise ValueError(
            f"{name}: axis {axis} has the extent {extent}, which cannot be divided equally into "
            f"{prefix}{num_workers} workers; it must be a multiple of {parts * num_workers}"
        )


def _check_known(values: Mapping, shards: Mapping[str, Shard]) -> None:
    if not isinstance(shards, Mapping):
        raise TypeError(f"shards must be a mapping of names to annotations, but it is {shards!r}")
    for name, shard in shards.items():
        if name not in values:
            raise ValueError(f"shards: there is no value {name!r}; there are {', '.join(values)}")
        if not isinstance(shard, Shard):
            raise TypeError(
                f"shards: {name} must have column(), row() or along(), but it has {shard!r}"
            )
