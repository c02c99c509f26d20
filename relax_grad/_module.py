"""Looking things up in modules."""

from __future__ import annotations

import tvm
from tvm import relax


def relax_function(mod: tvm.IRModule, name: str) -> relax.Function:
    """Return a Relax function of a module.

    Raises
    ------
    TypeError, ValueError
        Says what there is instead.
    """
    if not isinstance(mod, tvm.IRModule):
        raise TypeError(f"mod must be a tvm.IRModule, but it is {type(mod).__name__}")
    names = [variable.name_hint for variable in mod.get_global_vars()]
    if name not in names:
        raise ValueError(
            f"the module has no function {name!r}; it has {', '.join(sorted(names)) or 'none'}"
        )
    function = mod[name]
    if not isinstance(function, relax.Function):
        raise TypeError(f"{name} must be a Relax function, but it is a {type(function).__name__}")
    return function
