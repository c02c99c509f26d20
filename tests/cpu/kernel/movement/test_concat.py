"""Concatenations and splits against NumPy, of every dtype."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from machines import compile_kernels, each_target
from sweep import at_length, batches
from tvm import tirx

from relax_grad.cpu.kernel.movement.concat import concat, split
from relax_grad.cpu.target import CPU

RNG = np.random.default_rng(0)

DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int16", "int64", "bool"]


def random(shape, dtype):
    return RNG.integers(0, 200, shape).astype(dtype)


def check(cases, target):
    """Check ``(shape, axis, extents, zeros, dtype, symbolic)``, compiled together; symbolic is an
    axis or None."""
    functions, runs = {}, []
    n = tirx.Var("n", "int32")
    for i, (shape, axis, extents, zeros, dtype, symbolic) in enumerate(cases):
        arrays = [random((*shape[:axis], e, *shape[axis + 1 :]), dtype) for e in extents]
        for k in zeros:
            arrays[k][...] = 0
        wanted = np.concatenate(arrays, axis)
        shapes = [list(array.shape) for array in (*arrays, wanted)]
        if symbolic == axis:
            # The last operand and the result have a symbolic extent.
            shapes[-2][axis] = n
            shapes[-1][axis] = sum(extents[:-1]) + n
        elif symbolic is not None:
            for extents_of in shapes:
                extents_of[symbolic] = n
        name = f"kernel{i}"
        function = concat(axis, shapes, zeros, dtype, CPU.of(target))
        functions[name] = function
        inputs = [array for k, array in enumerate(arrays) if k not in zeros]
        runs.append((name, inputs, [wanted]))
        name = f"split{i}"
        function = split(axis, shapes, dtype, CPU.of(target))
        functions[name] = function
        runs.append((name, [wanted], arrays))
    compiled = compile_kernels(functions, target)
    for name, arrays, wanted in runs:
        results = [tvm.runtime.tensor(np.ones_like(array)) for array in wanted]
        compiled[name](*map(tvm.runtime.tensor, arrays), *results)
        for result, expected in zip(results, wanted, strict=True):
            assert result.numpy().dtype == expected.dtype
            np.testing.assert_array_equal(result.numpy(), expected, err_msg=f"{name} of {cases}")


@each_target
def test_dtypes(target):
    check([((3, 4, 5), 1, (1, 7, 2, 30), (2,), dtype, None) for dtype in DTYPES], target)


@each_target
def test_sizes(target):
    """Few rows and many, short and long ones, with one thread and with several."""
    check(
        [
            ((1, 9), 0, (1, 1, 1), (), "float32", None),
            ((2, 30000), 1, (1, 30000, 7, 16), (), "float32", None),
            ((1, 3, 40), 0, (500, 400, 3), (1,), "float32", None),
            ((300, 3, 40), 1, (1, 1, 3), (0,), "float32", None),
            ((30000, 3), 1, (1, 2, 1), (), "int8", None),
            ((7, 3, 40), 1, (1, 1, 3), (), "float32", 0),
            ((7, 3, 40), 1, (1, 1, 3), (0,), "float32", 2),
            ((7, 40), 0, (11, 2, 900), (0,), "float64", 0),
            ((7, 4, 40), 1, (3, 2, 5), (1,), "bool", 1),
        ],
        target,
    )


@pytest.mark.slow
@each_target
@at_length(150)
@given(
    cases=batches(
        st.tuples(
            st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
            st.integers(0, 2),
            st.lists(st.integers(1, 3000), min_size=1, max_size=8).map(tuple),
            st.sets(st.integers(0, 7)),
            st.sampled_from(DTYPES),
            st.none() | st.integers(0, 2),
        )
    )
)
def test_any(target, cases):
    check(
        [
            (
                shape,
                axis % len(shape),
                extents,
                # The last operand, which may have the symbolic extent, is never zeros.
                tuple(k for k in zeros if k < len(extents) - 1),
                dtype,
                None if symbolic is None else symbolic % len(shape),
            )
            for shape, axis, extents, zeros, dtype, symbolic in cases
        ],
        target,
    )
