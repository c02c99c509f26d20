"""The functions that read weights, and the ways in which they read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tvm
from tvm import relax

from ..ir.bindings import bindings_of

#: The number of spatial axes of each convolution.
CONVOLUTIONS = {f"relax.nn.conv{n}d": n for n in (1, 2, 3)}


@dataclass(frozen=True)
class Reader:
    """A function that reads weights.

    Attributes
    ----------
    name : str
        Its name.
    function : relax.Function
        The function.
    weights : dict[str, relax.Var]
        Its parameters that are weights, by the names of the weights.
    place : int
        The position before which the parameters of adapters stand.
    """

    name: str
    function: relax.Function
    weights: dict[str, relax.Var]
    place: int


class Use(NamedTuple):
    """A use of a weight.

    Attributes
    ----------
    binding : relax.Binding or None
        The binding that reads it; None for the result of the function.
    weight : str
        The name of the weight.
    kind : str or None
        The kind of the adapter that the use needs, or None if no adapter fits.
    """

    binding: relax.Binding | None
    weight: str
    kind: str | None

    @property
    def user(self) -> str:
        """The operator that reads the weight, for messages."""
        if self.binding is None or not isinstance(self.binding.value, relax.Call):
            return "the result"
        return _operator(self.binding.value).removeprefix("relax.")


def _operator(value: relax.Expr) -> str:
    is_call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
    return value.op.name if is_call else type(value).__name__


def _swaps_last_axes(call: relax.Call) -> bool:
    axes = call.attrs.axes
    return call.args[0].ty.ndim == 2 and (axes is None or [int(axis) for axis in axes] == [1, 0])


def uses_of(function: relax.Function, weights: Mapping[relax.Var, str]) -> Iterator[Use]:
    """Yield each use of weights, and of their casts and transposes."""
    return (use for use in reads(function, weights) if use.kind not in ("alias", "turn"))


def reads(function: relax.Function, weights: Mapping[relax.Var, str]) -> Iterator[Use]:
    """Yield what :func:`uses_of` does, and casts and transposes too: their kinds are ``"alias"``
    and ``"turn"``."""
    known = {variable: (name, False) for variable, name in weights.items()}
    for binding in bindings_of(function.body):
        value = binding.value
        read = [var for var in relax.analysis.free_vars(value) if var in known]
        for variable in read:
            name, is_turned = known[variable]
            kind = _kind(value, variable, is_turned)
            if kind in ("alias", "turn"):
                known[binding.var] = name, is_turned ^ (kind == "turn")
            yield Use(binding, name, kind)
    for variable in relax.analysis.free_vars(function.body.body):
        if variable in known:
            yield Use(None, known[variable][0], None)


def _kind(value: relax.Expr, variable: relax.Var, is_turned: bool) -> str | None:
    """Return the kind of a use of a weight, which may be transposed, or None."""
    name = _operator(value)
    if isinstance(value, relax.Var) or (name == "relax.astype"):
        return "alias"
    if name == "relax.permute_dims" and _swaps_last_axes(value):
        return "turn"
    places = [
        i for i, argument in enumerate(getattr(value, "args", [])) if argument.same_as(variable)
    ]
    if variable.ty.ndim == 2 and name == "relax.matmul" and places == [1]:
        return "linear" if is_turned else "transposed"
    if name == "relax.take" and places == [0] and not is_turned and variable.ty.ndim == 2:
        axis = value.attrs.axis
        return "embedding" if axis is not None and int(axis) == 0 else None
    if name in CONVOLUTIONS and places == [1]:
        letters = "WHD"[: CONVOLUTIONS[name]][::-1]
        is_usual = str(value.attrs.kernel_layout) == f"OI{letters}" and int(value.attrs.groups) == 1
        return "conv" if is_usual and str(value.attrs.data_layout) == f"NC{letters}" else None
    return None


def kinds_of(readers: Sequence[Reader], chosen: Sequence[str]) -> dict[str, str]:
    """Return the kind of each chosen weight, which all functions read in the same way."""
    kinds: dict[str, str] = {}
    for reader in readers:
        wanted = {reader.weights[name]: name for name in chosen}
        for use in uses_of(reader.function, wanted):
            _, name, kind = use
            if kind is None:
                raise ValueError(
                    f"targets: {name} is read by {use.user} in {reader.name}; an adapter needs a "
                    "weight of matmul, of take of rows, or of a convolution with one group"
                )
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(
                    f"targets: {name} is read in two ways, as a weight of {kinds[name]} and of "
                    f"{kind} layers; leave it out"
                )
    for name in chosen:
        if name not in kinds:
            raise ValueError(f"targets: no function reads {name}")
    return kinds
