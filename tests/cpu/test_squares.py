"""The function that transposes squares, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from machines import Run, run_kernels
from tvm.target import Target

from relax_grad.cpu import squares
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language.turned import turn

#: A processor for each number of lanes.
PROCESSORS = {8: "haswell", 16: "skylake-avx512"}

#: The elements that a case reads and writes at most.
SIZE = 6000


def draw(rng: np.random.Generator, lanes: int) -> dict[str, int]:
    """Return the arguments of a call: any of them is often the simplest one."""

    def often(value: int, low: int, high: int) -> int:
        return value if rng.random() < 0.5 else int(rng.integers(low, high))

    extent = int(rng.integers(0, 3 * lanes + 2))
    stored = often(lanes, 0, lanes + 1)
    return {
        "step": often(64, 1, 90),
        "last": often(lanes - 1, 0, lanes),
        "exist": often(lanes, 0, lanes + 1),
        "extent": extent,
        "every": often(1, 1, 5),
        "apart": often(lanes, 1, 40),
        "run": often(max(extent, 1), 1, 20),
        "jump": often(lanes, 0, 50),
        "stored": stored,
    }


def wanted(case: dict[str, int], lanes: int, x: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the memory after a call: one column after the other."""
    y, place, inside = before.copy(), 0, 0
    for k in range(0, case["extent"], case["every"]):
        for i in range(case["stored"]):
            at = min(i, case["last"]) * case["step"] + k
            y[place + i] = x[at] if i < case["exist"] else 0
        inside += 1
        if inside == case["run"]:
            place, inside = place + case["jump"] - (case["run"] - 1) * case["apart"], 0
        else:
            place += case["apart"]
    return y


@pytest.mark.parametrize("lanes", squares.LANES)
def test_columns_of_rows(lanes):
    """Rows that do not exist, short and strided rows, runs of columns, and parts of vectors."""
    rng = np.random.default_rng(lanes)
    x = rng.standard_normal(SIZE).astype("float32")
    x[rng.integers(0, SIZE, 200)] = np.nan
    fields = list(draw(rng, lanes))
    cases = [draw(rng, lanes) for _ in range(300)]
    for case in cases:  # runs must not lead before the buffer
        case["jump"] += (case["run"] - 1) * case["apart"]
    start = 16

    def body(x, numbers, y):
        step, last, exist, extent, every, apart, run, jump, stored = (
            b.bind(numbers[i]) for i in range(len(fields))
        )
        turn(
            lanes,
            (x, b.const(0), step),
            (last, exist),
            extent,
            (y, b.const(start), apart),
            (run, jump),
            stored,
            every=every,
        )

    function = b.prim_func(
        "turned",
        [("x", (SIZE,), "float32"), ("numbers", (9,), "int32"), ("y", (SIZE,), "float32")],
        body,
    )
    runs = [Run(function, [x, np.array(list(case.values()), "int32")], [(SIZE,)]) for case in cases]
    before = np.full(SIZE - start, np.nan, "float32")
    target = Target({"kind": "llvm", "mcpu": PROCESSORS[lanes]})
    for case, (y,) in zip(cases, run_kernels(runs, target), strict=True):
        expected = wanted(case, lanes, x, before)
        assert y[start:].tobytes() == expected.tobytes(), case
        assert np.isnan(y[:start]).all(), case
