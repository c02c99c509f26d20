"""The inner loops of products and convolutions for NEON keep their sums in registers."""

from __future__ import annotations

import re

import pytest
import tvm
from kernel_cases.case import KernelCase, kernel_of
from tvm import relax

import relax_grad
from relax_grad.testing._program import without_assertions

CASES = {
    "matmul": KernelCase(
        "relax.matmul", [(96, 256), (256, 252)], lambda _, a, b: relax.op.matmul(a, b)
    ),
    "1x1": KernelCase(
        "relax.nn.conv2d",
        [(4, 64, 28, 28), (64, 64, 1, 1)],
        lambda _, x, w: relax.op.nn.conv2d(x, w),
    ),
    "2x2": KernelCase(
        "relax.nn.conv2d",
        [(4, 64, 29, 29), (64, 64, 2, 2)],
        lambda _, x, w: relax.op.nn.conv2d(x, w),
    ),
}


def inner_loop(assembly: str) -> list[str]:
    """Return the instructions of the basic block with the most multiply-adds."""
    blocks: list[list[str]] = [[]]
    for line in assembly.splitlines():
        if re.match(r"\S+:", line):
            blocks.append([])
        elif re.match(r"\t[a-z]", line):
            blocks[-1].append(line.strip())
            if re.match(r"\t(b|b\.\w+|cbn?z|tbn?z|ret)\s", line):
                blocks.append([])
    return max(blocks, key=lambda block: sum("fmla" in line for line in block))


@pytest.mark.parametrize("processor", ["cortex-a53", "cortex-a55", "cortex-a72", "cortex-a76"])
@pytest.mark.parametrize("name", CASES)
def test_inner_loops(name, processor):
    """No register is spilled, and two of three instructions multiply and add."""
    function = kernel_of(CASES[name], relax_grad.target.arm(processor), 4).function
    module = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
    with without_assertions():
        compiled = tvm.compile(module, relax_grad.target.arm(processor)).mod
    loop = inner_loop(compiled.inspect_source("asm"))
    sums = sum("fmla" in line for line in loop)
    assert sums >= 20
    assert not [line for line in loop if "[sp" in line]
    assert sums > 0.6 * len(loop)
