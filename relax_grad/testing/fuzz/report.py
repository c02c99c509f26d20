"""Findings as text: a summary, TVMScript, and a self-contained script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checks import Settings
from .script import Program
from .session import Finding

_SCRIPT = '''\
"""{title}

{message}

Found by: python -m relax_grad fuzz --seed {seed} (program {number}). Run this file with
Python: it prints
{prints}.
"""

import numpy as np
import tvm
from tvm import relax
from tvm.script import from_source

import relax_grad.target  # registers the gradients
from relax_grad.transform import Gradient, LiftBranches  # noqa: F401  (programs may use either)

SOURCE = """\\
{source}"""

WRT = {wrt}
TARGET = {target}

rng = np.random.default_rng({values})


def tensor(*shape):
    return rng.uniform(-1, 1, shape).astype("{dtype}")


def boolean():
    return np.array(rng.integers(2), "bool")


def runtime(value):
    if isinstance(value, list):
        return [runtime(item) for item in value]
    return tvm.runtime.tensor(value)


def to_numpy(value):
    return value.numpy() if hasattr(value, "numpy") else [to_numpy(item) for item in value]


def flat(value):
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


values = [{arguments}]
module = from_source(SOURCE)
main = module["main"]
names = [param.name for param in main.params]
found = {{b.var.name: b.var for block in main.body.blocks for b in block.bindings}}
found.update(zip(names, main.params))
adjoint = {gradient}
'''

_DIFFERENCES = """\
machine = relax.VirtualMachine(tvm.compile(LiftBranches()(adjoint), target="llvm"), tvm.cpu())


def moved(value, direction, step):
    if isinstance(value, list):
        return [moved(*pair, step) for pair in zip(value, direction)]
    return value if direction is None else value + step * direction


def direction_of(value):
    if isinstance(value, list):
        return [direction_of(item) for item in value]
    return rng.uniform(-1, 1, value.shape) if value.dtype == "float64" else None


def run(name, arguments):
    return to_numpy(machine[name](*map(runtime, arguments)))


def loss(arguments):
    result = run("main", arguments)
    for index in TARGET:
        result = result[index]
    return float(result)


result, gradients = run("main_adjoint", values)
for gradient, name in zip(gradients, WRT):
    print("gradient of", name, gradient)
if all(name in names for name in WRT):
    for _ in range(3):
        directions = {{name: direction_of(values[names.index(name)]) for name in WRT}}

        def at(step):
            return loss(
                [
                    moved(v, directions[n], step) if n in directions else v
                    for n, v in zip(names, values)
                ]
            )

        parts = [
            (g * d).sum()
            for g, name in zip(gradients, WRT)
            for g, d in zip(flat(g), flat(directions[name]))
            if d is not None
        ]
        print("along a direction:", sum(parts), "differences:", (at(1e-5) - at(-1e-5)) / 2e-5)
"""

_PIPELINES = """\
adjoint = tvm.IRModule({{v: f for v, f in adjoint.functions_items() if v.name_hint != "main"}})


def run(target, pipeline):
    machine = relax.VirtualMachine(tvm.compile(adjoint, target, relax_pipeline=pipeline), tvm.cpu())
    return flat(to_numpy(machine["main_adjoint"](*map(runtime, values))))


wanted = run("llvm", "default")
for found, other in zip(run(relax_grad.target.host(), "relax_grad"), wanted):
    print("largest difference:", abs(found - other).max(initial=0))
"""


#: Descriptions of a script's output, without and with the pipeline.
_PRINTS = (
    "the gradient along random directions, from the adjoint and from central differences",
    "the largest differences between the results of the pipeline and those of TVM's",
)


def summary(finding: Finding, size: Callable) -> str:
    """Return a summary of a finding in one line; ``size`` returns the number of statements of a
    program."""
    before, after = map(size, (finding.original, finding.program))
    failure = finding.failure
    text = failure.message
    if not failure.kind.startswith(("error: ", "crash: ")):
        text = f"{failure.kind}: {text}"
    return f"program {finding.number}: {text} ({before} statements, made smaller to {after})"


def source(finding: Finding[Program]) -> str:
    """Return the shrunk program in TVMScript, with the names of the differentiated variables."""
    program = finding.program
    wrt = ", ".join(value.name for value in program.wrt)
    return f"{program.source('main')}# differentiated with respect to {wrt}"


def script(finding: Finding[Program], seed: int, settings: Settings) -> str:
    """Return a script that reproduces a finding without this sub-package."""
    program = finding.program
    wrt = "[found[name] for name in WRT]"
    gradient = f'Gradient("main", {wrt}, {program.target or 0})(module)'
    if settings.through == "tvm":
        gradient = f'relax.transform.Gradient("main", {wrt})(module)'
    is_pipeline = finding.failure.stage == "pipeline"
    dtype = "float32" if is_pipeline else "float64"
    text = _SCRIPT + (_PIPELINES if is_pipeline else _DIFFERENCES)
    return text.format(
        title=f"{finding.failure.kind}.",
        message=finding.failure.message.replace("\\", "/").replace('"""', "'''"),
        seed=seed,
        number=finding.number,
        prints=_PRINTS[is_pipeline],
        source=program.source("main").replace("float64", dtype).replace("\\", "\\\\"),
        dtype=dtype,
        wrt=[value.name for value in program.wrt],
        target=tuple(program.target),
        values=program.seed,
        arguments=", ".join(_argument(param.kind) for param in program.main.params),
        gradient=gradient,
    )


def _argument(kind: Any) -> str:
    if isinstance(kind, tuple):
        return f"[{', '.join(map(_argument, kind))}]"
    if kind.dtype == "bool":
        return "boolean()"
    return f"tensor({', '.join(map(str, kind.shape))})"
