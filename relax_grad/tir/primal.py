"""Values of the forward pass in an adjoint: what it computes again, and copies of buffers that
later parts overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import tirx

from ..ir.compat import BufferLoad, loaded_buffer
from ..ir.expressions import substitute
from . import emit, sums
from .flat import nests
from .program import Program
from .statements import dtype_of, new_buffer, reads, stores


class Primal:
    """The values of a program before and after each of its parts.

    Parameters
    ----------
    program : Program
        The program.
    allocate : Callable
        Returns a new buffer, given shape, dtype and name.
    """

    def __init__(self, program: Program, allocate: Callable[[Sequence, str, str], tirx.Var]):
        self._program, self._allocate = program, allocate
        self._statements = [part.statement for part in program.parts]
        #: The versions of buffers before later parts change them: (buffer, number of the part) ->
        #: copy.
        self._versions: dict[tuple[tirx.Var, int], tirx.Var] = {}
        #: Parts whose forward pass is emitted as another statement, which saves values.
        self.taped: dict[int, list] = {}
        self._writers: dict[tirx.Var, list[int]] = {}
        for i, statement in enumerate(self._statements):
            for buffer in dict.fromkeys(store.buffer for store in stores([statement])):
                self._writers.setdefault(buffer, []).append(i)

    def is_written_before(self, buffer: tirx.Var, number: int) -> bool:
        """Tell whether a part before this one writes to a buffer."""
        return any(writer < number for writer in self._writers[buffer])

    def value(self, number: int, expr: tirx.PrimExpr, after: bool = False) -> tirx.PrimExpr:
        """Return an expression with loads of the values before a part, or after it."""

        def change(load: BufferLoad) -> tirx.PrimExpr:
            buffer = loaded_buffer(load)
            version = self._version(buffer, number + after)
            return load if version is buffer else emit.load(version, load.indices)

        return tvm_ffi.structural_map(expr, (BufferLoad, change), order="post")

    def _version(self, buffer: tirx.Var, number: int) -> tirx.Var:
        """Return the buffer with the values before a part: a copy if that part or a later one
        changes them."""
        if not any(place >= number for place in self._writers.get(buffer, ())):
            return buffer
        writer = min(place for place in self._writers[buffer] if place >= number)
        key = buffer, writer
        if key not in self._versions:
            copy = self._allocate(buffer.shape, dtype_of(buffer), f"{buffer.name}_{writer}")
            self._versions[key] = copy
        return self._versions[key]

    def statements(self, used: set[tirx.Var]) -> tuple[list[tirx.Stmt], dict[tirx.Var, tirx.Var]]:
        """Return the statements that recompute values, and new buffers instead of outputs.

        Parameters
        ----------
        used : set[tirx.Var]
            The variables in the statements of the adjoint.
        """
        program = self._program
        copied = {old for old, _ in self._versions}
        taken = set(program.inputs)
        # The last values of a result come from the forward pass.
        final = set(program.outputs) - copied
        needed: set[tirx.Var] = (copied | (used & set(self._writers))) - taken - final
        for i in self.taped:
            needed |= {store.buffer for store in stores([self._statements[i]])}
        parts: set[int] = set()
        while True:
            more = {i for buffer in needed for i in self._writers.get(buffer, ())} - parts
            if not more:
                break
            parts |= more
            for i in more:
                needed |= reads([self._statements[i]]) - taken
                needed |= {store.buffer for store in stores([self._statements[i]])}
        shadows = {}
        for output in program.outputs:
            if output in needed:
                shadows[output] = new_buffer(output.shape, dtype_of(output), f"{output.name}_again")
        copies: dict[int, list[tuple[tirx.Var, tirx.Var]]] = {}
        for (old, writer), copy in self._versions.items():
            copies.setdefault(writer, []).append((old, copy))
        statements = []
        for i in sorted(parts):
            statements += [
                substitute(sums.copied(old, copy), shadows) for old, copy in copies.get(i, ())
            ]
            statements.append(substitute(self._part(i), shadows))
        return statements, shadows

    def _part(self, number: int) -> tirx.Stmt:
        part = self._program.parts[number]
        workspaces = [*self._program.outputs, *self._program.allocated]
        if number in self.taped:
            return emit.general_block(f"{part.name}_saved", self.taped[number], workspaces)
        written = {store.buffer for store in stores([part.statement])}
        # A block may rely on the results' being arguments, which they are not here.
        is_flat = not written & set(self._program.outputs) or nests(part.statement) is not None
        if part.source is not None and is_flat:
            return part.source
        return emit.general_block(part.name, [part.statement], workspaces)
