"""The initial adjoints of a target that is not a scalar."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax

from ..ir.compat import constant_value, dtype_of, types_differ
from ..ir.module import unused

#: The accepted forms of cotangents; see :class:`relax_grad.transform.Gradient`.
Cotangents: TypeAlias = "bool | str | float | np.ndarray | relax.Expr | Sequence"


def seeds(
    leaves: Sequence[relax.Expr],
    types: Sequence[relax.TensorType],
    cotangents: Cotangents,
    resolve: Callable[[relax.Var], relax.Var],
    params: Collection[str],
) -> tuple[list[tuple[relax.Expr, relax.Expr]], list[relax.Var]]:
    """Return each tensor of the target with its cotangent, and the parameters that hold cotangents.

    Parameters
    ----------
    leaves : Sequence[relax.Expr]
        The floating-point tensors of the target.
    types : Sequence[relax.TensorType]
        Their types.
    cotangents : bool or str or float or array or relax.Expr or (nested) sequence of them
        True, or one for each tensor.
    resolve : Callable
        Maps a variable of the function to the variable of the flattened function; raises
        ValueError for any other.
    params : Collection[str]
        The names of the function's parameters; new parameters get other names.

    Raises
    ------
    TypeError
        If a cotangent is of another kind.
    ValueError
        If the number of cotangents, a dtype or a shape differs from the target's.
    """
    if cotangents is True:
        items = [unused(f"cotangent{i}", params) for i in range(len(leaves))]
    else:
        items = _flat(cotangents)
    if len(items) != len(leaves):
        raise ValueError(
            f"cotangents: the target holds {len(leaves)} floating-point tensors, but there are "
            f"{len(items)} cotangents"
        )
    parsed = [
        _cotangent(item, kind, resolve, f"cotangents[{i}]")
        for i, (item, kind) in enumerate(zip(items, types, strict=True))
    ]
    new = [c for c, item in zip(parsed, items, strict=True) if isinstance(item, str)]
    return list(zip(leaves, parsed, strict=True)), new


def _flat(cotangents: Cotangents) -> list:
    if isinstance(cotangents, (tuple, list)):
        return [leaf for item in cotangents for leaf in _flat(item)]
    if isinstance(cotangents, relax.Tuple):
        return [leaf for item in cotangents.fields for leaf in _flat(item)]
    return [cotangents]


def _cotangent(
    item: Any, kind: relax.TensorType, resolve: Callable[[relax.Var], relax.Expr], where: str
) -> relax.Expr:
    """Return the cotangent for a tensor of type ``kind``; a name becomes a new variable."""
    if isinstance(item, str):
        return relax.Var(item, kind)
    if isinstance(item, (int, float)) and not isinstance(item, bool):
        return _filled(item, kind, where)
    if isinstance(item, relax.Var):
        cotangent = resolve(item)
    elif isinstance(item, relax.Expr) and constant_value(item) is not None:
        cotangent = item
    elif isinstance(item, (np.ndarray, np.generic, tvm.runtime.Tensor)):
        # Without a dtype, relax.const narrows float64.
        cotangent = relax.const(item, str(item.dtype))
    else:
        raise TypeError(
            f"{where} must be the name of a new parameter, a number, an array, a constant or a "
            f"variable of the function, but it is {item!r}"
        )
    if types_differ(cotangent.ty, kind) or not isinstance(cotangent.ty, relax.TensorType):
        raise ValueError(
            f"{where} has the type {cotangent.ty}, but the differentiated tensor has {kind}"
        )
    if not isinstance(cotangent, relax.Var) and not _is_static(kind):
        raise ValueError(
            f"{where} has the shape {list(cotangent.ty.shape.values)}, but the differentiated "
            f"tensor has the type {kind}, whose shape is known at run time only; give a number, or "
            "a name for a new parameter"
        )
    return cotangent


def _filled(number: float, kind: relax.TensorType, where: str) -> relax.Expr:
    """Return a tensor of type ``kind`` filled with a number."""
    if not isinstance(kind.shape, relax.ShapeExpr):
        raise ValueError(
            f"{where} is a number, but the shape of the differentiated tensor is unknown: "
            f"{kind}; give a name for a new parameter"
        )
    try:
        number = float(number)
    except OverflowError:
        raise ValueError(f"{where} is an integer outside the range of {dtype_of(kind)}") from None
    dtype = dtype_of(kind)
    return relax.op.full(kind.shape, relax.const(number, dtype), dtype)


def _is_static(kind: relax.TensorType) -> bool:
    return isinstance(kind.shape, relax.ShapeExpr) and all(
        isinstance(dim, tvm.tirx.IntImm) for dim in kind.shape.values
    )
