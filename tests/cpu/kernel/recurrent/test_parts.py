"""The products of recurrent layers by tiles (AMX), beside NumPy in the order of Intel's manual."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import tvm
from machines import compile_kernels, of_halves
from tile_sums import in_order
from tvm import tirx

from relax_grad.cpu import tiles
from relax_grad.cpu.kernel.language import amx
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.builder import Vectors, const
from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.kernel.recurrent._parts import Rows, TiledWeight
from relax_grad.cpu.kernel.recurrent.plan import Factors, weight_plan
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tiles import Permission

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: Rows of one tile and of two, columns, and k: partial tiles of each. The weight of every other
#: case is stored as [columns, k].
CASES = [(1, 7, 9), (17, 40, 64), (32, 33, 70), (6, 64, 33)]

#: The number that the sums of a case are added to; None: they are set.
ADDED = [None, None, 0.5, 0.25]


def product(number: int, cpu: CPU) -> tirx.PrimFunc:
    """Return a function of rows, a weight, and the sums of their product."""
    (rows, columns, depth), added, is_turned = CASES[number], ADDED[number], number % 2 == 1
    plan = weight_plan(columns, depth, cpu, Factors.TILES, is_turned=is_turned, rows=rows)

    def body(data, matrix, sums) -> None:
        left = Rows(Vectors(cpu.lanes), rows, depth, Factors.TILES, exact=False)
        left.begin(data, const(0), const(rows))
        with amx.imported():
            weight = TiledWeight(plan, matrix)
            with b.serial(0, rows * plan.pitch) as i:
                b.store(sums, i, tirx.const(added or np.nan, "float32"))
            weight.multiply(left.left(), sums, const(rows), add=added is not None)

    shapes = [rows, depth], [columns, depth] if is_turned else [depth, columns]
    params = b.floats("abc", [*shapes, [rows, plan.pitch]])
    make = partial(b.prim_func, "product", params, body)
    return stored_as(["bfloat16", "bfloat16", "float32"], 1, make)


def test_sums_are_in_the_order_of_the_manual():
    target, rng = of_halves("amx"), np.random.default_rng(0)
    functions = {f"f{i}": product(i, CPU.of(target)) for i in range(len(CASES))}
    library = compile_kernels(functions, target)
    for number, (rows, columns, depth) in enumerate(CASES):
        shape = (columns, depth) if number % 2 else (depth, columns)
        arrays = [rng.normal(size=size).astype(BFLOAT16) for size in ((rows, depth), shape)]
        result = tvm.runtime.empty((rows, -(-columns // 32) * 32), "float32")
        if columns <= 16:
            result = tvm.runtime.empty((rows, 16), "float32")
        library[f"f{number}"](*map(tvm.runtime.tensor, arrays), result)
        steps = -(-depth // 32)
        left, right = np.zeros((rows, 32 * steps)), np.zeros((32 * steps, columns))
        left[:, :depth] = arrays[0]
        right[:depth] = arrays[1].T if number % 2 else arrays[1]
        wanted = in_order(left, right, np.zeros((rows, columns), "float32"), steps)
        wanted += np.float32(ADDED[number] or 0)
        # Whether the processor's own tiles give these bits is not known.
        atol = 1e-5 if tiles.permission() is Permission.GRANTED else 0
        result = result.numpy()[:, :columns]
        np.testing.assert_allclose(result, wanted, rtol=0, atol=atol, err_msg=str(number))
