"""The work of every pass is linear in the number of layers, measured in executed lines and in
comparisons of TVM's objects instead of seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import tvm
from programs import build, tensor
from sums import total_of
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.cpu.target import host
from relax_grad.ir.bindings import bindings_of, without_unused
from relax_grad.op.index_slice import strided_slice_backward_data
from relax_grad.transform import DivideSlices, JoinProducts, JoinSlices

PACKAGE = str(Path(relax_grad.__file__).parent)
#: Sources that make functions for the shapes of a network instead of for each layer.
OF_SHAPES = tuple(str(Path(PACKAGE, name)) for name in ("cpu/kernel", "cpu/schedule", "topi"))

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
benchmark = importlib.import_module("passes")

#: Multiples of the least number of layers; each step is twice the step before.
LAYERS = (1, 2, 4)

#: The largest ratio of the added lines of the second step to the first: 2, with room for a
#: logarithmic factor.
MOST = 2.3

#: Growth of fewer lines is not judged: lines that occur once would weigh too much.
FEW = 500

#: TVM's functions that compare two objects: the operator of variables and expressions, which lists
#: use, and the comparison of structures.
COMPARISONS = {"__eq__", "__ne__", "structural_equal", "assert_structural_equal"}

#: Growth of fewer comparisons is not judged.
FEW_COMPARISONS = 50


class Work(NamedTuple):
    """The lines of the package that a run executes, and the comparisons of TVM's objects."""

    lines: int
    comparisons: int


def work_of(run) -> Work:
    """Return the work of a run, counting repeated lines and comparisons each time.

    The work of the sources that make kernels and schedules does not count.
    """
    lines = comparisons = 0

    def within(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return within

    def start(frame, event, argument):
        nonlocal comparisons
        file = frame.f_code.co_filename
        if frame.f_code.co_name in COMPARISONS:
            caller = frame.f_back.f_code.co_filename
            comparisons += not caller.startswith(OF_SHAPES)
        return within if file.startswith(PACKAGE) and not file.startswith(OF_SHAPES) else None

    before = sys.gettrace()
    sys.settrace(start)
    try:
        run()
    finally:
        sys.settrace(before)
    return Work(lines, comparisons)


def lines_of(run) -> int:
    return work_of(run).lines


def work_of_passes(network: str, layers: int) -> dict[str, Work]:
    """Return the work of each pass for a network."""
    works: dict[str, Work] = {}
    module = None

    def apply():
        nonlocal module
        module = run(module)

    with host():
        for label, transform in benchmark.passes(network, layers):
            run = transform
            before = works.get(label, Work(0, 0))
            works[label] = Work(*map(sum, zip(before, work_of(apply), strict=True)))
    return works


def growths(counts: Sequence[dict[str, int]], few: int) -> dict[str, float]:
    """Return the ratio of the added counts of the second step to those of the first, by label."""
    return {
        label: (most - more) / max(1, more - least)
        for label in counts[0]
        for least, more, most in [[count[label] for count in counts]]
        if most - more > few
    }


def test_lines_are_counted():
    function = build([tensor("x", (4,))], lambda bb, x: bb.emit(op.exp(x)))["main"]
    assert lines_of(lambda: None) == 0
    once = lines_of(lambda: without_unused(function))
    assert once > 10
    assert lines_of(lambda: [without_unused(function) for _ in range(3)]) == 3 * once


def test_comparisons_are_counted():
    variables = [tensor(f"x{i}", (4,)) for i in range(5)]
    assert work_of(lambda: variables[0].same_as(variables[4])).comparisons == 0
    # A list finds its last element after comparisons with all others.
    assert work_of(lambda: variables[4] in variables).comparisons == 4


@pytest.mark.parametrize(
    ("network", "least"),
    [
        ("residual", 1),
        # With fewer layers, one function computes the updates of several of them.
        pytest.param("norms", 10, marks=pytest.mark.slow),
        pytest.param("dense", 1, marks=pytest.mark.slow),
    ],
)
def test_passes_are_linear(network, least):
    """Of training steps whose parameters are donated."""
    benchmark.measure(network, least)  # fill the caches of the process first
    works = [work_of_passes(network, layers * least) for layers in LAYERS]
    counts = [{label: work.lines for label, work in each.items()} for each in works]
    assert sum(counts[-1].values()) > 10000
    ours = {label for label in counts[0] if label.startswith("relax_grad.")}
    assert [label for label in ours if not counts[0][label]] == []
    growth = growths(counts, FEW)
    names = ("DispatchKernels", "ShareStorage", "WriteToDonated")
    assert {f"relax_grad.{name}" for name in names} <= set(growth)
    assert "Gradient" in growth
    assert {label: ratio for label, ratio in growth.items() if ratio > MOST} == {}
    compared = growths(
        [{label: work.comparisons for label, work in each.items()} for each in works],
        FEW_COMPARISONS,
    )
    assert {label: ratio for label, ratio in compared.items() if ratio > MOST} == {}


@pytest.mark.parametrize("by", ["name", "variable"])
def test_variables_are_not_looked_up_in_lists(by):
    """Differentiation with respect to all of n parameters executes O(n) lines, not O(n^2)."""

    def lines(count):
        params = [tensor(f"x{i}", ()) for i in range(count)]
        module = build(params, lambda bb, *tensors: total_of(bb, tensors))
        wrt = [param.name if by == "name" else param for param in module["main"].params]
        return lines_of(lambda: relax_grad.value_and_grad(module, wrt=wrt))

    few, more, most = map(lines, (20, 40, 80))
    assert most - more <= 2.01 * (more - few)


@pytest.mark.parametrize("network", benchmark.NETWORKS)
def test_nothing_is_left_for_fuse_tir_to_remove(network):
    """TVM's FuseTIR removes second names and unused tuples, each in a time that is linear in the
    function."""
    module = None
    with host():
        for label, transform in benchmark.passes(network, 3):
            if label == "FuseTIR":
                break
            module = transform(module)
        cleaned = relax.transform.ExpandTupleArguments()(module)
    before, after = (len(list(bindings_of(mod["step"].body))) for mod in (module, cleaned))
    assert before == after


@pytest.mark.parametrize("make", [JoinSlices, DivideSlices])
def test_slices_are_joined_and_divided_in_linear_time(make):
    """The lines for n slices, and for their gradients, grow linearly with n."""

    def lines(count):
        params = [tensor(f"x{i}", (1, 3), "float32") for i in range(count)]
        shape = (count, 3)

        def body(bb, whole, *tensors):
            slices = [
                bb.emit(strided_slice_backward_data(grad, shape, [0], [i], [i + 1], [1]))
                for i, grad in enumerate(tensors)
            ]
            rows = [bb.emit(op.strided_slice(whole, [0], [i], [i + 1])) for i in range(count)]
            return relax.Tuple([total_of(bb, slices), *rows])

        module = build([tensor("whole", shape, "float32"), *params], body)
        return lines_of(lambda: make()(module))

    few, more, most = map(lines, (20, 40, 80))
    assert few > 20
    assert most - more <= MOST * (more - few)


def test_products_are_joined_in_linear_time():
    def lines(count):
        params = [tensor(f"{x}{i}", (1, 3), "float32") for x in "ab" for i in range(count)]

        def body(bb, *tensors):
            pairs = zip(tensors[:count], tensors[count:], strict=True)
            terms = [bb.emit(op.matmul(bb.emit(op.permute_dims(a)), b)) for a, b in pairs]
            return total_of(bb, terms)

        module = build(params, body)
        return lines_of(lambda: JoinProducts()(module))

    few, more, most = map(lines, (20, 40, 80))
    assert few > 20
    assert most - more <= MOST * (more - few)


@pytest.mark.parametrize(
    ("seconds", "layers", "growth"),
    [
        ([1.0], [100], {}),
        ([1.0, 2.0], [100, 200], {"growth": 2.0}),
        ([1.0, 2.4], [100, 200], {"growth": 2.4, "above": True}),
        ([1.0, 4.5], [100, 400], {"growth": 4.5}),
        ([1.0, 4.7], [100, 400], {"growth": 4.7, "above": True}),
        ([0.01, 0.09], [100, 200], {"growth": 9.0}),
    ],
)
def test_the_benchmark_marks_superlinear_passes(seconds, layers, growth):
    assert benchmark._figures(seconds, layers) == {"s": seconds, **growth}


def test_unused_bindings_go():
    """Unused bindings are removed as by TVM: in any block, with all bindings that only they use."""

    def body(bb, x):
        for _ in range(3):
            unused = bb.emit(op.tanh(bb.emit(op.exp(x))))
            bb.emit(relax.TupleGetItem(bb.emit(relax.Tuple([unused, x])), 0))
            x = bb.emit(op.sin(x))
        bb.match_cast(unused, relax.TensorType((tvm.tirx.Var("n", "int64"),), "float64"))
        return x

    for dataflow in (True, False):
        function = build([tensor("x", (4,))], body, dataflow=dataflow)["main"]
        wanted = relax.analysis.remove_all_unused(function)
        tvm.ir.assert_structural_equal(without_unused(function), wanted)
    module = benchmark.network("transformer", 1)
    adjoint = relax.transform.Gradient("main")(module)["main_adjoint"]
    wanted = relax.analysis.remove_all_unused(adjoint)
    tvm.ir.assert_structural_equal(without_unused(adjoint), wanted)
