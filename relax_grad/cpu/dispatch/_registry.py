"""Which operators have kernels, and what a kernel takes the place of a call with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import relax, tirx

from ...ir.compat import dtype_of
from ..target import CPU
from ._declaration import Extents
from ._identity import key_of, text_of

#: Elements that an index of int32 reaches.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Kernel:
    """A function that computes a call, and its arguments.

    Attributes
    ----------
    generator : functools.partial
        Returns the function, which takes the arguments, then the results. It is called only if no kernel of the
        module has an equal :attr:`key`, because generating takes much longer than choosing.
    arguments : Sequence[relax.Expr]
        The arguments of the call.
    name : str, optional
        The name of an operator that it computes; by default that of the call.
    shapes : Sequence, optional
        The shapes that the function declares for its arguments and results, in this order; by default those of the
        call. They are given where the function serves calls of other shapes too.
    """

    generator: partial[tirx.PrimFunc]
    arguments: Sequence[relax.Expr]
    name: str | None = None
    shapes: Sequence[Sequence[int | tirx.PrimExpr]] | None = None

    @property
    def key(self) -> tuple:
        """The generator and its arguments as a key of a dictionary; equal for kernels with equal functions.

        Symbolic extents are compared by their text: the variables of a site have different names.
        """
        return key_of(self.generator)

    @property
    def identity(self) -> str | None:
        """The key as a text that is the same in each process; None if it has parts that no text stands for.

        It stands for the function as long as the sources of the package are the same, so that there is none for a
        generator of another package.
        """
        return text_of(self.key)


class Site:
    """A call that a kernel may take the place of, and what is known about it.

    Parameters
    ----------
    call : relax.Call
        The call.
    cpu : CPU
        What the kernel will run on.
    lookup : Callable
        Returns the value that a variable is bound to; None where that is unknown, and where the variable or an
        operand of the value may have been overwritten since: all that it returns may be read at the call.
    winograd_tile : int
        The side of the squares of Winograd's convolutions; 0 where there shall be none.
    """

    def __init__(
        self,
        call: relax.Call,
        cpu: CPU,
        lookup: Callable[[relax.Var], relax.Expr | None] = lambda _: None,
        winograd_tile: int = 2,
    ):
        self.call, self.cpu, self.lookup = call, cpu, lookup
        self.winograd_tile = winograd_tile
        self._extents = Extents()

    def shape(self, expr: relax.Expr, dtype: str = "float32") -> list[int | tirx.Var] | None:
        """Return the extents of a tensor of a dtype; None where there is no kernel for it.

        A symbolic extent becomes a variable of int32, one for each expression: a kernel gets its value from
        the tensors that it is called with. There is none for tensors of unknown shape, of other dtypes, without
        elements, and of more elements than int32 counts.
        """
        kind = expr.ty
        if not isinstance(kind, relax.TensorType) or kind.dtype is None:
            return None
        if not isinstance(kind.shape, relax.ShapeExpr) or dtype_of(kind) != dtype:
            return None
        extents = [self._extents.of(extent) for extent in kind.shape.values]
        size = 1
        for extent in extents:
            size *= extent if isinstance(extent, int) else 1
        return extents if 0 < size <= _LARGEST else None


_KERNELS: dict[str, Callable[[Site], Kernel | None]] = {}


def kernel_for(*op_names: str):
    """Register what makes the kernel of a call of operators, or returns None where there is none for it."""

    def register(make: Callable[[Site], Kernel | None]):
        for op_name in op_names:
            if op_name in _KERNELS:
                raise ValueError(f"{op_name} has a kernel already, by {_KERNELS[op_name].__name__}")
            _KERNELS[op_name] = make
        return make

    return register


def find_kernel(op_name: str, site: Site) -> Kernel | None:
    """Return the kernel of a call, if there is one."""
    make = _KERNELS.get(op_name)
    return None if make is None else make(site)


def operators_with_kernels() -> list[str]:
    """Return the names of the operators of which some calls have kernels, in order.

    Examples
    --------
    >>> from relax_grad.cpu.dispatch import operators_with_kernels
    >>> "relax.matmul" in operators_with_kernels()
    True
    """
    return sorted(_KERNELS)
