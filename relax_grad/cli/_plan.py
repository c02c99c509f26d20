"""The product of ``relax-grad doctor --plan``, and its plan as text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm

#: The largest extent of a tensor that kernels take: they count elements in int32.
_MOST = 2**31 - 1

_FORM = re.compile(r"(\d+)x(\d+)x(\d+)(?::([NT][NT]))?", re.ASCII)


def product_of(text: str) -> tuple[int, int, int, bool, bool]:
    """Return the rows, columns and steps of a product, and whether its factors are transposed.

    Parameters
    ----------
    text : str
        ``"128x768x3072"``, or with the layouts of both factors ``"128x768x3072:NT"``.

    Raises
    ------
    ValueError
        If the text has another form, an extent is 0, or a tensor has more than 2**31 - 1 elements.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"a product must be ROWSxCOLUMNSxSTEPS, such as 128x768x3072 or 128x768x3072:NT, "
            f"but it is {text!r}"
        )
    rows, columns, steps = (int(number) for number in found.groups()[:3])
    if 0 in (rows, columns, steps):
        raise ValueError(f"each extent of a product must be at least 1, but it is {text!r}")
    if max(rows * columns, rows * steps, columns * steps) > _MOST:
        raise ValueError(
            f"each matrix of a product must have at most {_MOST} elements, but it is {text!r}"
        )
    form = found[4] or "NN"
    return rows, columns, steps, form[0] == "T", form[1] == "T"


def lines_of(text: str, target: tvm.target.Target) -> dict[str, str]:
    """Return the plan of a product, a line for each decision.

    Raises
    ------
    ValueError
        If :func:`product_of` fails, or LLVM does not compile for the target.
    """
    from ..cpu.kernel.matmul.matmul import Matmul
    from ..cpu.kernel.matmul.plan import plan
    from ..target import CPU

    product = Matmul(*product_of(text))
    cpu = CPU.of(target)
    if cpu is None:
        raise ValueError(f"--plan needs a target that LLVM compiles for, but it is {target}")
    return plan(product, cpu).lines()
