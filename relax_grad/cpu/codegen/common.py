"""Functions that the kernels of a program share, compiled once.

A kernel has the definition of such a function, which TVM inlines at each call. Kernels that are
compiled to object files call the function by its name instead, and the program has it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tvm import tirx

from ...ir.compat import structural_map
from ..squares import LANES, NAME, definition
from .lower import loaded, written
from .objects import Embedded, embedded


@lru_cache(maxsize=1)
def _definitions() -> dict[str, str]:
    """Return the definitions of the functions, in LLVM IR, by their names."""
    return {f"{NAME}{lanes}": definition(lanes) for lanes in LANES}


def without_definitions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function without the definitions of the functions that it shares with others."""

    def plain(node: tirx.AttrStmt) -> tirx.Stmt:
        is_import = node.attr_key == "pragma_import_llvm"
        is_shared = is_import and node.value.value in _definitions().values()
        return node.body if is_shared else node

    return function.with_body(structural_map(function.body, (tirx.AttrStmt, plain)))


def units(objects: Iterable[Embedded], template: str) -> list[Embedded]:
    """Return the assembly of the shared functions that object files refer to.

    Parameters
    ----------
    objects : Iterable[Embedded]
        The assembly of the object files.
    template : str
        The LLVM IR of an empty module for their target.
    """
    named = {name for unit in objects for name in unit.external if name in _definitions()}
    return [_unit(name, template) for name in sorted(named)]


@lru_cache(maxsize=64)
def _unit(name: str, template: str) -> Embedded:
    """Return the assembly of a shared function, whose label is its name."""
    library = loaded(f"{template}\n{_with_attributes(_definitions()[name], template)}")
    return embedded(written(library), {name: name})


def _with_attributes(definition: str, template: str) -> str:
    """Return a definition with the processor and the features of a module's target, for a function
    that is not inlined."""
    found = re.search(r'^attributes #\d+ = \{[^}]*("target-cpu"[^}]*)\}', template, re.MULTILINE)
    attributes = found[1] if found else ""
    return definition.replace("linkonce_odr hidden ", "").replace(
        " alwaysinline nounwind {", f" noinline nounwind {attributes} {{"
    )
