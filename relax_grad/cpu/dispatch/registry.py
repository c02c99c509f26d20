"""The registry of kernels by operator, and the rewrite of a call to a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, final

from tvm import relax, tirx

from ...ir.compat import dtype_of
from ...ir.dtypes import HALVES
from ...ir.shapes import known_extents
from ..kernel.language.halves import stored_as
from ..kernel.matmul.matmul import Matmul
from ..target import CPU
from ._identity import key_of, text_of
from .declare import Extents

#: The most elements that an index of int32 can address.
_LARGEST = 2**31 - 1

#: The extents of a tensor.
Shape: TypeAlias = "list[int | tirx.Var]"


@final
@dataclass(frozen=True)
class Kernel:
    """A function that computes a call, and its arguments.

    Attributes
    ----------
    generator : functools.partial
        Returns the function, which takes the arguments, then the results. It is called only if no
        kernel of the module has an equal :attr:`key`, because generation takes much longer than
        dispatch.
    arguments : Sequence[relax.Expr]
        The arguments of the call.
    name : str, optional
        The name of the operator that the kernel computes; by default the operator of the call.
    shapes : Sequence, optional
        The shapes that the function declares for its arguments and results, in this order; by
        default the shapes of the call. They are given if calls of other shapes share the function.
    exchangeable : Sequence[int]
        The indices, among the arguments and then the results, of the tensors that may have their
        second and third axes exchanged in memory.
    turnable : Sequence[int]
        The indices of those that may have the second and third axes exchanged, then the last two:
        positions, heads and features become heads, features and positions.
    product : Matmul, optional
        The product that the kernel computes, of its two arguments.
    in_place : Sequence[tuple[int, int]]
        The indices of arguments and results that may share memory: the kernel reads an element of
        the argument for the last time before it writes the element of the result.
    rectifiable : bool
        Whether the generator takes ``rectifies=True``, so that the kernel applies ReLU to its first
        result.
    """

    generator: partial[tirx.PrimFunc]
    arguments: Sequence[relax.Expr]
    name: str | None = None
    shapes: Sequence[Sequence[int | tirx.PrimExpr]] | None = None
    exchangeable: Sequence[int] = ()
    turnable: Sequence[int] = ()
    product: Matmul | None = None
    in_place: Sequence[tuple[int, int]] = ()
    rectifiable: bool = False

    def with_orders(
        self, arguments: Sequence[relax.Expr], exchanged: Sequence[int], turned: Sequence[int]
    ) -> Kernel:
        """Return the kernel for arguments, of which some have other orders of axes.

        Parameters
        ----------
        arguments : Sequence[relax.Expr]
            The arguments.
        exchanged, turned : Sequence[int]
            The indices of the tensors of :attr:`exchangeable` and :attr:`turnable` that have these
            orders, among the arguments and then the results.
        """
        generator = self.generator
        if exchanged:
            generator = partial(generator, exchanged=tuple(exchanged))
        if turned:
            generator = partial(generator, turned=tuple(turned))
        return replace(self, generator=generator, arguments=arguments)

    def stored_as(self, types: Sequence[relax.Type], results: int) -> Kernel:
        """Return the kernel for arguments and results of these types, which may be in half
        precision.

        Parameters
        ----------
        types : Sequence[relax.Type]
            The types of the arguments, then of the results.
        results : int
            The number of results.
        """
        if not all(isinstance(kind, relax.TensorType) for kind in types):
            return self
        dtypes = tuple(map(dtype_of, types))
        if not any(dtype in HALVES for dtype in dtypes):
            return self
        generator = partial(stored_as, dtypes, results, self.generator)
        return replace(self, generator=generator, product=None)

    @property
    def key(self) -> tuple:
        """A hashable key of the generator and its arguments. Kernels with equal keys have equal
        functions.

        Symbolic extents are compared by their text, because the variables of one site have
        different names.
        """
        return key_of(self.generator)

    @property
    def identity(self) -> str | None:
        """The key as a text that is the same in every process; None if a part of it has no such
        text.

        The text identifies the function as long as the sources of the package are the same.
        Therefore it is None for a generator of another package.
        """
        return text_of(self.key)


class CallSite:
    """A call that a kernel may replace, and the context of this call.

    Parameters
    ----------
    call : relax.Call
        The call.
    cpu : CPU
        The processor that the kernel runs on.
    lookup : Callable
        Returns the value that a variable is bound to. It returns None if the value is unknown, or
        if the variable or an operand of the value may have been overwritten since. All that it
        returns may be read at the call.
    winograd_tile : int
        The side of the output tiles of Winograd's convolutions; 0 to use none.
    packed : dict, optional
        The copies of constants that kernels of the module read in their place, by the constant and
        its layout. None if a call may overwrite constants, so that kernels must read the constants
        themselves.
    unread : Sequence[int]
        The indices of the results of the call that nothing reads: the kernel may leave them as they
        are.
    """

    def __init__(
        self,
        call: relax.Call,
        cpu: CPU,
        lookup: Callable[[relax.Var], relax.Expr | None] = lambda _: None,
        winograd_tile: int = 2,
        packed: dict[tuple, relax.Expr] | None = None,
        unread: Sequence[int] = (),
    ):
        self.call, self.cpu, self.lookup = call, cpu, lookup
        self.winograd_tile, self.packed, self.unread = winograd_tile, packed, tuple(unread)
        self._extents = Extents()
        self._takes_halves = call is not None and call.op.name in _IN_HALVES

    def shape(self, expr: relax.Expr, dtype: str = "float32") -> Shape | None:
        """Return the extents of a tensor of a dtype; None if no kernel supports the tensor.

        Each symbolic expression becomes one variable of int32. A kernel gets the value of the
        variable from its arguments. The result is None for tensors of unknown shape, of other
        dtypes, without elements, or with more elements than int32 can count. Tensors of float32 may
        be stored in half precision, if the operator's kernels take them.
        """
        return self.extents(expr.ty, dtype)

    def shapes(self, *exprs: relax.Expr) -> list[Shape] | None:
        """Return the extents of tensors of float32, as :meth:`shape` does for one; None if no
        kernel supports one of them."""
        return all_known(map(self.shape, exprs))

    def is_of(self, kind: relax.TensorType, dtype: str = "float32") -> bool:
        """Tell whether tensors of a type have a dtype, or are stored in half precision instead of
        float32."""
        if dtype == "float32" and self._takes_halves and dtype_of(kind) in HALVES:
            return True
        return dtype_of(kind) == dtype

    def extents(self, kind: relax.Type, dtype: str = "float32") -> Shape | None:
        """Return the extents of tensors of a type, as :meth:`shape` does for a tensor."""
        values = known_extents(kind)
        if values is None or kind.dtype is None or not self.is_of(kind, dtype):
            return None
        extents = [self._extents.of(extent) for extent in values]
        size = 1
        for extent in extents:
            size *= extent if isinstance(extent, int) else 1
        return extents if 0 < size <= _LARGEST else None


def all_known(shapes: Iterable[Shape | None]) -> list[Shape] | None:
    """Return shapes, or None if one of them is None."""
    known = []
    for shape in shapes:
        if shape is None:
            return None
        known.append(shape)
    return known


#: Returns the kernel of a call, or None.
KernelFactory = Callable[[CallSite], "Kernel | None"]

_KERNELS: dict[str, KernelFactory] = {}


#: The operators whose kernels also take tensors in half precision instead of float32.
_IN_HALVES: set[str] = set()

#: Those of them whose kernels take the operands of a call before casts to float32.
_UNCAST: set[str] = set()


def kernel_for(
    *op_names: str, in_halves: bool = True, takes_uncast: bool = True
) -> Callable[[KernelFactory], KernelFactory]:
    """Register a kernel factory for operators. It returns None for calls that it does not support.

    With ``in_halves``, each tensor of float32 may instead be stored in float16 or bfloat16. The
    factory is the same: the kernel computes in float32, widens what it reads, and rounds what it
    stores. With ``takes_uncast`` too, the kernel takes operands that are cast to float32 as they
    were before. It is False for operators with products: a product of elements in half precision
    is another kernel.
    """
    if in_halves:
        _IN_HALVES.update(op_names)
        if takes_uncast:
            _UNCAST.update(op_names)

    def register(make: KernelFactory) -> KernelFactory:
        for op_name in op_names:
            if op_name in _KERNELS:
                raise ValueError(
                    f"{op_name} already has a kernel factory, {_KERNELS[op_name].__name__}"
                )
            _KERNELS[op_name] = make
        return make

    return register


def find_kernel(op_name: str, site: CallSite) -> Kernel | None:
    """Return the kernel of a call, if there is one."""
    make = _KERNELS.get(op_name)
    return None if make is None else make(site)


#: The operators that are replaced by their legalization where no kernel supports the call.
_DECOMPOSED: set[str] = set()


def decompose(*op_names: str) -> None:
    """Register operators to be replaced by their legalization where no kernel supports the call.

    The legalization consists of other operators, which may have kernels. Operators that are not
    registered are legalized after the dispatch.
    """
    _DECOMPOSED.update(op_names)


def is_decomposed(op_name: str, site: CallSite) -> bool:
    """Tell whether a call is replaced by its legalization.

    A legalization needs the shapes and dtypes of its arguments.
    """
    if op_name not in _DECOMPOSED or not all(map(_is_known, site.call.args)):
        return False
    return find_kernel(op_name, site) is None


def _is_known(expr: relax.Expr) -> bool:
    """Tell whether the shape and the dtype of an argument are known, if it is a tensor."""
    kind = expr.ty
    if not isinstance(kind, relax.TensorType):
        return True
    return known_extents(kind) is not None and kind.dtype is not None


def takes_halves(op_name: str) -> bool:
    """Tell whether the kernels of an operator take tensors in half precision in place of
    float32."""
    return op_name in _IN_HALVES


def takes_uncast(op_name: str) -> bool:
    """Tell whether the kernels of an operator take operands before casts to float32."""
    return op_name in _UNCAST


def operators_in_halves() -> list[str]:
    """Return the sorted names of the operators whose kernels also take tensors in half
    precision."""
    return sorted(_IN_HALVES)


def operators_with_kernels() -> list[str]:
    """Return the sorted names of the operators that have kernels for some of their calls.

    Examples
    --------
    >>> from relax_grad.cpu.dispatch import operators_with_kernels
    >>> "relax.matmul" in operators_with_kernels()
    True
    """
    return sorted(_KERNELS)
