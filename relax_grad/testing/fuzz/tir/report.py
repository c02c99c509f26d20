"""Findings of TIR programs as self-contained scripts."""

from __future__ import annotations

from typing import Any

from ..session import Finding
from . import language as ir
from .build import source
from .interpret import Run, expected

_SCRIPT = '''\
"""{title}.

{message}

Found by: python -m relax_grad fuzz --tir --seed {seed} (program {number}). Run this file with
Python: it prints the
tensors that differ from NumPy's, for relax_grad's pipeline and for TVM's.
"""

import ml_dtypes  # gives NumPy the dtype bfloat16
import numpy as np
import tvm
from tvm import relax
from tvm.script import from_source

import relax_grad.target

SOURCE = """\\
{source}"""

# The values of the parameters, and of parameters and results after the run; None is not written.
RUNS = [
{runs}]
RTOL = {{"float16": 2e-2, "bfloat16": 0.15}}


def array(value, dtype):
    numbers, shape = value
    return np.array([0 if x is None else x for x in numbers], dtype).reshape(shape)


def show(pipeline, target):
    try:
        machine = relax.VirtualMachine(
            tvm.compile(from_source(SOURCE), target, relax_pipeline=pipeline), tvm.cpu()
        )
    except Exception as error:
        print(pipeline, "does not compile:", str(error)[-300:])
        return
    for inputs, wanted in RUNS:
        arguments = [tvm.runtime.tensor(array(value, dtype)) for _, value, dtype in inputs]
        results = machine["main"](*arguments)
        results = [results] if hasattr(results, "numpy") else list(results)
        for (name, value, dtype), found in zip(wanted, [*arguments, *results]):
            known = np.array([x is not None for x in value[0]]).reshape(value[1])
            expected = array(value, dtype)
            found = np.where(known, found.numpy(), expected)
            pair = found.astype("float64"), expected.astype("float64")
            if not np.allclose(*pair, rtol=RTOL.get(dtype, 2e-5)):
                print(pipeline, name, "is", found.tolist(), "not", expected.tolist())
    print(pipeline, "has run")


show("default", tvm.target.Target("llvm"))
show("relax_grad", relax_grad.target.host())
'''


def script(finding: Finding[ir.Program], seed: int) -> str:
    """Return a script that reproduces a finding without this sub-package."""
    program = finding.program
    message = finding.failure.message.replace("\\", "/").replace('"""', "'''")
    return _SCRIPT.format(
        title=finding.failure.kind,
        message=message,
        seed=seed,
        number=finding.number,
        source=source(program),
        runs="".join(f"    {_run(program, run)},\n" for run in expected(program)),
    )


def _run(program: ir.Program, run: Run) -> str:
    """Return the inputs and the outputs of a run, as Python literals."""
    arguments = [
        (param.name, (value.ravel().tolist(), value.shape), param.dtype)
        for param, value in zip(program.params, run.inputs, strict=True)
    ]
    wanted = [
        _known(name, run.wanted[name])
        for name in (*(p.name for p in program.params), *program.results)
    ]
    return repr((arguments, wanted))


def _known(name: str, array: Any) -> tuple:
    pairs = zip(array.values.ravel().tolist(), array.written.ravel().tolist(), strict=True)
    numbers = [value if is_written else None for value, is_written in pairs]
    return name, (numbers, array.values.shape), str(array.values.dtype)
