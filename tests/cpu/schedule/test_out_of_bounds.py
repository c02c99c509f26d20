"""The kernels of relax_grad's pipeline for operators with integers stay in bounds.

The tests find the operators themselves: all operators whose samples hold integers, and all
operators without a gradient. Each operator without a gradient has a case here, or a reason for the
absence of one. The kernels are fused, merged and scheduled, and run between inaccessible pages with
integers at and beyond every limit.
"""

from __future__ import annotations

import numpy as np
import pytest
from guard import Case, SampleCase, check_out_of_bounds
from machines import TARGETS, runs_here
from tvm.ir import Op

from relax_grad import registry
from relax_grad.testing.samples import Sample, sampled_operators, samples

#: The vector widths of this machine, except the one that every machine has.
WIDE = [name for name in TARGETS if runs_here(name)][1:]
each_machine = pytest.mark.parametrize("machine", WIDE)

INT32 = np.iinfo("int32")
WILD = np.array([0, 4, 5, 6, -1, -5, -6, 10**6, INT32.max, INT32.min], "int64")
FLOATS = np.random.default_rng(0).normal(size=(5, 4))


def wild(dtype: str) -> np.ndarray:
    """Return integers at and beyond the bounds of an axis of 5, and at the bounds of a dtype."""
    info = np.iinfo(dtype)
    limits = np.array([info.max, info.max - 1], dtype)
    kept = WILD[(info.min <= WILD) & (info.max >= WILD)].astype(dtype)
    return np.concatenate([kept, limits, np.array([info.min], dtype)])


def has_integers(sample: Sample) -> bool:
    return any(
        array.dtype.kind in "iu"
        for value in sample.inputs
        for array in map(np.asarray, value if isinstance(value, (tuple, list)) else [value])
    )


def with_integers() -> dict[str, list[int]]:
    """Return, for each operator that has any, the numbers of its samples with integers."""
    numbers_of = {
        op: [number for number, sample in enumerate(samples(op)) if has_integers(sample)]
        for op in sampled_operators()
    }
    return {op: numbers for op, numbers in numbers_of.items() if numbers}


def forward(op: str, *inputs, **attrs) -> Case:
    return Case(f"{op} {attrs}", f"relax.{op}", inputs, attrs, order=0)


_PAIR = wild("int64"), wild("int64")[::-1].copy()
_TABLE = np.arange(20, dtype="int64").reshape(5, 4)
_BOXES = np.random.default_rng(0).uniform(size=(1, 5, 6)).astype("float32")
_COUNT, _ORDER = np.array([5], "int32"), np.arange(5, dtype="int32").reshape(1, 5)

#: Calls of operators without a gradient. These operators have no samples.
FORWARD = [
    *[
        forward(op, *_PAIR)
        for op in (
            *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
            *("bitwise_and", "bitwise_or", "bitwise_xor"),
        )
    ],
    forward("bitwise_not", _TABLE),
    forward("sign", _TABLE),
    *[
        forward(op, _PAIR[0], np.full(_PAIR[0].shape, 3))
        for op in ("floor_divide", "divide", "floor_mod")
    ],
    forward("left_shift", _TABLE, np.full(_TABLE.shape, 3)),
    forward("right_shift", _TABLE, np.full(_TABLE.shape, 3)),
    *[forward(op, FLOATS) for op in ("ceil", "floor", "round", "trunc")],
    *[forward(op, FLOATS) for op in ("isfinite", "isinf", "isnan")],
    *[forward(op, _TABLE > 3, _TABLE > 7) for op in ("logical_and", "logical_or", "logical_xor")],
    forward("logical_not", _TABLE > 3),
    *[forward(op, _TABLE) for op in ("ones_like", "zeros_like", "eye_like")],
    *[forward(op, _TABLE, axis=axis) for op in ("argmax", "argmin") for axis in (0, -1)],
    forward("argsort", _TABLE, axis=0, descending=True, dtype="int32"),
    forward("argsort", FLOATS),
    *[
        forward("bucketize", wild(dtype), np.sort(wild(dtype)), out_int32=right, right=right)
        for dtype, right in (("int32", False), ("int64", True))
    ],
    *[
        forward("one_hot", wild(dtype), on_value=1.0, off_value=0.0, depth=5, axis=axis)
        for dtype, axis in (("int32", -1), ("int64", 0))
    ],
    forward(
        "multinomial_from_uniform",
        np.full((2, 5), 0.2, "float32"),
        np.full((6, 1), 0.5, "float32"),
        np.arange(6, dtype="int64").reshape(6, 1) % 2,
    ),
    forward("vision.get_valid_counts", _BOXES, score_threshold=0.1),
    forward("vision.non_max_suppression", _BOXES, _COUNT, _ORDER),
]

#: Operators that take tensors but have no kernel, with the reason.
NO_KERNEL = {
    "nonzero": "a function of TVM's runtime",
    "vision.all_class_non_max_suppression": "TVM does not legalize consumers of its result, "
    "whose extents are unknown",
    "unique": "a function of TVM's runtime",
    "grad.differentiable_once": "its argument",
    "grad.stop_gradient": "its argument",
}
_NO_KERNEL_PREFIXES = ("inspect.", "builtin.", "memory.", "vm.", "dist.")


def without_samples() -> set[str]:
    """Return the names of the operators that take tensors but have no samples."""
    names = (op.removeprefix("relax.") for op in registry.operators() if op not in SAMPLED)
    return {
        name
        for name in names
        if not name.startswith(_NO_KERNEL_PREFIXES)
        and any("Tensor" in argument.type_info for argument in Op.get(f"relax.{name}").arguments)
    }


SAMPLED = set(sampled_operators())


def test_every_operator_has_a_case():
    cases = {case.op.removeprefix("relax.") for case in FORWARD}
    assert without_samples() <= cases | set(NO_KERNEL)
    assert not cases & set(NO_KERNEL)
    assert len(with_integers()) > 30


def first_samples() -> list[SampleCase]:
    return [SampleCase(op, numbers[0], order=1) for op, numbers in with_integers().items()]


def test_some_operators_with_integers():
    check_out_of_bounds(first_samples()[::4], machine=WIDE[-1])


@pytest.mark.slow
@each_machine
def test_operators_with_integers(machine):
    report = check_out_of_bounds(first_samples(), machine=machine)
    assert report.replays > 1000


@pytest.mark.slow
@pytest.mark.parametrize("machine", [None, *WIDE])
def test_operators_without_gradients(machine):
    check_out_of_bounds(FORWARD, machine=machine)
