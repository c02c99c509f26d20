"""Read the machine code of CUDA kernels, as nvcc writes it (PTX), for loads that can be stale."""

from __future__ import annotations

import re

_KERNEL = re.compile(r"\.entry (\w+)\((.*?)\n\}\n", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@!?%\w+ )?([\w.]+)\s+(.*);$")
_OPERAND = re.compile(r"%\w+|\w+_param_\d+")
_ADDRESS = re.compile(r"\[(%\w+)")


def stale_loads(ptx: str) -> dict[str, list[str]]:
    """Return, for each kernel, the parameters that it writes and also loads as memory that no one
    writes (``ld.global.nc``).

    Such a load can return an old value. nvcc chooses it for parameters that are ``__restrict__``
    and that it takes for unwritten; it is wrong about an address that is one of two parameters.
    """
    found = {}
    for name, body in _KERNEL.findall(ptx):
        origins: dict[str, set[str]] = {}
        copies: list[tuple[str, list[str]]] = []
        written: list[str] = []
        loaded: list[str] = []
        addresses: list[str] = []
        for line in body.splitlines():
            instruction = _INSTRUCTION.match(line.strip())
            if instruction is None:
                continue
            kind, operands = instruction.groups()
            if kind.startswith("ld.param"):
                register, *parameter = _OPERAND.findall(operands)
                origins[register] = set(parameter)  # none for the result of a call
            elif kind.startswith(("st.global", "atom.global", "red.global")):
                written += _ADDRESS.findall(operands)
            elif kind.startswith("ld.global.nc"):
                loaded += _ADDRESS.findall(operands)
            elif not kind.startswith(("ld.", "st.", "bra")):
                register, *others = _OPERAND.findall(operands) or [""]
                copies.append((register, others))
                if kind.startswith("cvta.to.global"):
                    addresses += others
        _spread(origins, copies)
        pointers = _of(origins, addresses)
        stale = _of(origins, written) & _of(origins, loaded) & pointers
        if stale:
            found[name] = sorted(stale)
    return found


def _of(origins: dict[str, set[str]], registers: list[str]) -> set[str]:
    """Return the parameters from which registers are computed."""
    return set().union(*(origins.get(register, set()) for register in registers))


def _spread(origins: dict[str, set[str]], copies: list[tuple[str, list[str]]]) -> None:
    """Add to each register the parameters from which its operands are computed, until nothing
    changes."""
    grows = True
    while grows:
        grows = False
        for register, operands in copies:
            more = _of(origins, operands) - origins.get(register, set())
            if more:
                origins.setdefault(register, set()).update(more)
                grows = True
