"""Drawn loop nests of tensor functions, in the common part of TVMScript and Python."""

from __future__ import annotations

import random

import numpy as np
import tvm

SIZE = 6

_MODULE = """
@I.ir_module
class M:
    @T.prim_func(private=True, s_tir=True)
    def f(A: T.Buffer((6, 6), "float64"), Y: T.Buffer((6, 6), "float64")):
        with T.sblock("fill"):
            for i, j in T.grid(6, 6):
                Y[i, j] = A[i, j]
{loops}
    @R.function
    def main(A: R.Tensor((6, 6), "float64")) -> R.Tensor((), "float64"):
        cls = M
        y = R.call_tir(cls.f, (A,), out_ty=R.Tensor((6, 6), "float64"))
        s = R.sum(R.multiply(y, y))
        return s
"""


class LoopNest:
    """A nest of one to three loops around a store.

    Attributes
    ----------
    lines : list[str]
        The loops, conditions and the store, each within the line before it.
    has_axes : bool
        Whether axes of a block are bound to the loops.
    """

    def __init__(self, seed: int):
        rng = random.Random(seed)
        names, self.lines = ["i", "j", "k"][: rng.randint(2, 3)], []
        known: list[str] = []
        for name in names:
            self.lines.append(f"for {name} in {_range(rng, known)}:")
            known.append(name)
            if rng.random() < 0.25:
                self.lines.append(f"if {_condition(rng, known)}:")
        last = known[-1]
        self.has_axes = rng.random() < 0.4
        self._store(rng, known[0], known[1], last)

    def _store(self, rng: random.Random, i: str, j: str, last: str) -> None:
        self.axes = {"vi": i, "vj": j, "vk": last}
        i, j, last = ("vi", "vj", "vk") if self.has_axes else (i, j, last)
        value = rng.choice(
            [f"Y[{i}, {j}] * A[{last}, {i}]", f"Y[{i}, {j}] + A[{j}, {last}] * A[{i}, {last}]",
             f"Y[{i}, {j}] * 0.5 + A[5 - {i}, {last}]", f"A[{j}, {last}] * Y[{i}, {j}]"]
        )  # fmt: skip
        self.store = f"Y[{i}, {j}] = {value}"

    def module(self) -> tvm.IRModule:
        """Return the module that sums the squares of the result."""
        lines = list(self.lines)
        depth = 8
        if self.has_axes:
            lines.append('with T.sblock("use"):')
            body = [f"{axis} = T.axis.opaque(6, {name})" for axis, name in self.axes.items()]
        else:
            lines.insert(0, 'with T.sblock("use"):')
            body = []
        text = [" " * (depth + 4 * k) + line for k, line in enumerate(lines)]
        indent = " " * (depth + 4 * len(lines))
        region = [f"{indent}T.reads(Y[0:6, 0:6], A[0:6, 0:6])", f"{indent}T.writes(Y[0:6, 0:6])"]
        if self.has_axes:
            text += [*(indent + line for line in body), *region]
        else:
            text[1:1] = [" " * (depth + 4) + line.strip() for line in region]
        text.append(indent + self.store)
        script = "\n".join(text).replace(" range(", " T.serial(")
        return tvm.script.from_source(_MODULE.format(loops=script))

    def result(self, value: np.ndarray) -> np.ndarray:
        """Return the result for a value of A."""
        lines = list(self.lines)
        if self.has_axes:
            lines.append("if True:")
        text = ["    " * (k + 1) + line.replace("step=", "") for k, line in enumerate(lines)]
        indent = "    " * (len(lines) + 1)
        if self.has_axes:
            text += [f"{indent}{axis} = {name}" for axis, name in self.axes.items()]
        text.append(indent + self.store)
        space: dict = {}
        exec("def f(A):\n    Y = A.copy()\n" + "\n".join(text) + "\n    return Y", space)
        return space["f"](value)


def _range(rng: random.Random, known: list[str]) -> str:
    outer = rng.choice(known) if known and rng.random() < 0.8 else None
    forms = [f"range({rng.randint(1, 2)}, 5)", "range(2, 6)", "range(6)"]
    if outer is not None:
        forms = [f"range({outer}, 6)", f"range(0, {outer})", f"range(0, {outer} + 1)",
                 f"range({outer} // 2, {outer} + 1)", f"range(5 - {outer}, 6)"]  # fmt: skip
    form = rng.choice(forms)
    if rng.random() < 0.3:
        if form == "range(6)":
            form = "range(0, 6)"
        form = form.removesuffix(")") + f", step={rng.randint(2, 3)})"
    return form


def _condition(rng: random.Random, known: list[str]) -> str:
    name, other = rng.choice(known), rng.choice(known)
    return rng.choice([f"{name} < 4", f"{name} + {other} > 3", f"{name} % 2 == 1"])
