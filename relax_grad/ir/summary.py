"""Imports, steps and models with adapters as text of a few lines, without their values."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from tvm import relax, tirx

from .compat import dtype_of

#: The tensors that are named; of more, the number is told.
_MOST = 6


def summary(kind: str, types: Mapping[str, Mapping], counts: Mapping[str, Sized]) -> str:
    """Return the names and types of some tensors, and the numbers of others.

    Parameters
    ----------
    kind : str
        The name of the class.
    types : Mapping[str, Mapping[str, relax.Type]]
        Groups of tensors that are named with their types.
    counts : Mapping[str, Sized]
        Groups of tensors that are only counted.
    """
    parts = [f"{name}: {_listed(group)}" for name, group in types.items() if group]
    parts += [f"{name}: {len(group)}" for name, group in counts.items() if len(group)]
    return f"{kind}({'; '.join(parts)})"


def _listed(group: Mapping[str, relax.Type]) -> str:
    named = [f"{name} {_text(ty)}" for name, ty in list(group.items())[:_MOST]]
    rest = len(group) - len(named)
    return ", ".join([*named, *([f"and {rest} more"] if rest > 0 else [])])


def _text(ty: relax.Type) -> str:
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return str(ty)
    extents = ", ".join(
        str(int(extent) if isinstance(extent, tirx.IntImm) else extent)
        for extent in ty.shape.values
    )
    return f"({extents}{',' if len(ty.shape.values) == 1 else ''}) {dtype_of(ty)}"
