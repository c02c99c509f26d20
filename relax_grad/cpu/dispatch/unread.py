"""Results of calls that nothing reads."""

from __future__ import annotations

from tvm import relax

from ...ir.bindings import used


class UnreadResults:
    """The elements of tuples in a dataflow block that no binding takes.

    Parameters
    ----------
    block : relax.DataflowBlock
        The block.
    """

    def __init__(self, block: relax.DataflowBlock):
        self._read: dict[relax.Var, set[int]] = {}
        #: The variables that are used as a whole.
        self._whole: set[relax.Var] = set()
        for binding in block.bindings[:]:
            value = binding.value
            if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
                self._read.setdefault(value.tuple_value, set()).add(int(value.index))
            else:
                self._whole.update(used(value))

    def of(self, var: relax.Var | None) -> tuple[int, ...]:
        """Return the indices of the elements of a tuple that nothing reads; none of a tuple that
        may be used outside the block."""
        if not isinstance(var, relax.DataflowVar) or var in self._whole:
            return ()
        if not isinstance(var.ty, relax.TupleType):
            return ()
        read = self._read.get(var, set())
        return tuple(i for i in range(len(var.ty.fields)) if i not in read)
