"""Memory accesses of loop nests as affine functions, and joining of loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tvm_ffi
from tvm import tirx

from ...ir.compat import (
    Analyzer,
    BufferLoad,
    detect_linear_equation,
    loaded_buffer,
    structural_map,
    structural_walk,
)
from ...ir.expressions import substitute, variable_rule, variables
from ._nest import Axis, Nest, analyzer, is_one, is_zero


class Access:
    """The place of an element in memory: ``base`` plus a stride for each axis.

    Attributes
    ----------
    strides : dict[tirx.Var, tirx.PrimExpr]
        The stride of each axis that has a uniform, nonzero stride; it may be symbolic.
    base : tirx.PrimExpr
        The index of the element where all those axes are 0.
    opaque : set[tirx.Var]
        The axes that occur in the base, because an index is not linear in its axes.
    """

    def __init__(
        self,
        buffer: tirx.Buffer,
        indices: Sequence[tirx.PrimExpr],
        axes: Sequence[Axis],
        known: Analyzer,
    ):
        self.buffer = buffer
        self.strides: dict[tirx.Var, tirx.PrimExpr] = {}
        self.opaque: set[tirx.Var] = set()
        self.base = tirx.IntImm("int64", 0)
        if self._has_plain_places(indices, axes):
            return
        names = [axis.var for axis in axes]
        step = tirx.IntImm("int64", 1)
        for index, extent in zip(indices[::-1], buffer.shape[::-1], strict=True):
            parts = detect_linear_equation(index, names) if names else [index]
            if len(parts):
                for var, stride in zip(names, parts, strict=False):
                    if not is_zero(stride):
                        self.strides[var] = stride * step + self.strides.get(var, 0)
                self.base = self.base + parts[-1] * step
            else:
                self.opaque |= variables(index) & set(names)
                self.base = self.base + index * step
            step = step * extent
        self.base = known.simplify(self.base)
        self.strides = {var: known.simplify(stride) for var, stride in self.strides.items()}

    def _has_plain_places(self, indices: Sequence[tirx.PrimExpr], axes: Sequence[Axis]) -> bool:
        """Find the strides and the base without TVM's arithmetic; tell whether all indices are axes
        or constants and all extents are constants."""
        names = {axis.var for axis in axes}
        strides: dict[tirx.Var, int] = {}
        base, step = 0, 1
        for index, extent in zip(indices[::-1], self.buffer.shape[::-1], strict=True):
            if type(extent) is not tirx.IntImm:
                return False
            if type(index) is tirx.IntImm:
                base += index.value * step
            elif index in names:
                strides[index] = step + strides.get(index, 0)
            else:
                return False
            step *= extent.value
        self.base = tirx.IntImm("int64", base)
        self.strides = {var: tirx.IntImm("int64", stride) for var, stride in strides.items()}
        return True

    def stride(self, axis: Axis) -> int | None:
        """Return the stride of an axis, or None if it is opaque or its stride is symbolic."""
        if axis.var in self.opaque:
            return None
        stride = self.strides.get(axis.var, 0)
        if isinstance(stride, tirx.IntImm):
            return int(stride)
        return stride if isinstance(stride, int) else None

    def place(self, at: Mapping[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
        """Return the index of an element; axes in the base are not yet substituted."""
        index = self.base
        for var, stride in self.strides.items():
            index = index + at[var] * stride
        return index


class Accesses:
    """All accesses of nests with the same axes, and the axes that remain when neighbouring axes are
    joined.

    Parameters
    ----------
    nests : Sequence[Nest]
        The nests; they share the variables of their axes.
    """

    def __init__(self, nests: Sequence[Nest]):
        first = nests[0]
        axes = [*first.axes, *first.reduced]
        known = analyzer(axes)
        self.stores = [Access(nest.buffer, nest.indices, axes, known) for nest in nests]
        self.loads = {
            load: Access(loaded_buffer(load), load.indices, axes, known)
            for nest in nests
            for load in nest.loads
        }
        self.tested = set()  # variables that occur outside of the indices of loads
        for nest in nests:
            self.tested |= _tested(nest.value)
        self.zeros = {axis.var: tirx.IntImm("int64", 0) for axis in axes if is_one(axis.extent)}
        self.axes = self._joined(first.axes, known)
        self.reduced = self._joined(first.reduced, known)

    @property
    def all(self) -> list[Access]:
        return [*self.stores, *self.loads.values()]

    def is_opaque(self, axis: Axis) -> bool:
        """Tell whether an axis is used in any other way than by a stride."""
        return axis.var in self.tested or any(axis.var in access.opaque for access in self.all)

    def _joined(self, axes: Iterable[Axis], known: Analyzer) -> list[Axis]:
        """Return the axes, with neighbours joined if every access traverses both at one stride."""
        joined: list[Axis] = []
        for axis in axes:
            if is_one(axis.extent):
                continue
            if joined and self._are_one(joined[-1], axis, known):
                joined[-1] = self._join(joined[-1], axis, known)
            else:
                joined.append(axis)
        return joined

    def _are_one(self, outer: Axis, inner: Axis, known: Analyzer) -> bool:
        if self.is_opaque(outer) or self.is_opaque(inner):
            return False
        zero = tirx.IntImm("int64", 0)
        return all(
            known.can_prove_equal(
                access.strides.get(outer.var, zero),
                access.strides.get(inner.var, zero) * inner.extent,
            )
            for access in self.all
        )

    def _join(self, outer: Axis, inner: Axis, known: Analyzer) -> Axis:
        extent = known.simplify(outer.extent * inner.extent)
        both = Axis(tirx.Var(inner.var.name, str(inner.var.ty.dtype)), extent)
        for access in self.all:
            access.strides.pop(outer.var, None)
            if inner.var in access.strides:
                access.strides[both.var] = access.strides.pop(inner.var)
        return both

    def rewrite(
        self, expr: tirx.PrimExpr, at: Mapping, buffers: Mapping, values: Mapping
    ) -> tirx.PrimExpr:
        """Return an expression for one element.

        Parameters
        ----------
        expr : tirx.PrimExpr
            The value of one of the nests.
        at : Mapping[tirx.Var, tirx.PrimExpr]
            The values of the axes.
        buffers : Mapping[tirx.Buffer, tirx.Buffer]
            The flat buffers over the same memory.
        values : Mapping[tirx.Buffer, tirx.PrimExpr]
            Values already computed for this element, which replace loads.
        """
        at = {**self.zeros, **at}

        def load(old: tirx.PrimExpr) -> tirx.PrimExpr:
            buffer = loaded_buffer(old)
            if buffer in values:
                return values[buffer]
            if buffer not in buffers:
                return old
            access = self.loads.get(old)
            if access is None:  # a load in the index of another load
                access = Access(buffer, old.indices, [], Analyzer())
            return buffers[buffer][access.place(at)]

        rules = [(BufferLoad, load), (tirx.Var, variable_rule(at))]
        return structural_map(expr, rules, order="pre")

    def place(self, access: Access, at: Mapping) -> tirx.PrimExpr:
        """Return the index of an element, with all axes substituted."""
        at = {**self.zeros, **at}
        return substitute(access.place(at), at)


def _tested(expr: tirx.PrimExpr) -> set[tirx.Var]:
    """Return the variables that occur in an expression outside of the indices of loads."""
    tested: set[tirx.Var] = set()

    def enter(_load: tirx.PrimExpr) -> tvm_ffi.WalkResult:
        return tvm_ffi.WalkResult.SKIP

    structural_walk(expr, [(BufferLoad, enter), (tirx.Var, tested.add)], order="pre")
    return tested
