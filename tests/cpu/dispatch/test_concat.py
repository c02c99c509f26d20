"""Concatenations and splits that become kernels: of many tensors, of any supported dtype."""

from __future__ import annotations

import numpy as np
import pytest
from dispatched import HOST, check_dispatch, kernels_in, run_both
from in_place import add_to
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.relax import op

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def some(shape, dtype="float32"):
    return (RNG.normal(size=shape) * 9).astype(dtype)


def module(shapes, axis, dtype="float32"):
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    return build(params, lambda bb, *xs: op.concat(xs, axis))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("axis", [1, -3, None])
def test_dtypes_and_axes(dtype, axis):
    shapes = [(2, 3, 4)] * 6 if axis is not None else [(3,), (1,), (5,), (2,), (9,), (4,)]
    values = [some(shape, dtype) for shape in shapes]
    check_dispatch(module(shapes, axis, dtype), "main", values, ["concat_kernel"])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_symbolic_batch(axis):
    shapes = [(N, 3)] * 7
    values = [some((5, 3)) for _ in shapes]
    check_dispatch(module(shapes, axis), "main", values, ["concat_kernel"])


def test_a_tuple_that_is_bound():
    params = [tensor(f"x{i}", (2, 3), "float32") for i in range(6)]
    built = build(params, lambda bb, *xs: op.concat(bb.emit(relax.Tuple(xs)), 1))
    check_dispatch(built, "main", [some((2, 3)) for _ in params], ["concat_kernel"])


def test_empty_operands():
    shapes = [(2, i % 2) for i in range(12)]
    values = [some(shape) for shape in shapes]
    check_dispatch(module(shapes, 1), "main", values, ["concat_kernel"])
    assert kernels_in(module([(0, 3)] * 8, 1)) == []
    assert kernels_in(module([(2, 0)] * 8, 1)) == []


def test_zeros():
    """The kernel takes no argument for an operand of zeros."""
    params = [tensor(f"x{i}", (2, 3), "float32") for i in range(6)]

    def body(bb, *xs):
        zeros = bb.emit(op.zeros((2, 5), "float32"))
        return op.concat([zeros, *xs[:3], zeros, *xs[3:]], 1)

    check_dispatch(build(params, body), "main", [some((2, 3)) for _ in params], ["concat_kernel"])


def test_overwritten_zeros_are_not_concatenated_as_zeros():
    kind = relax.TensorType((4, 4), "float32")
    bb = relax.BlockBuilder()
    callee = bb.add_func(add_to, "add_to")
    params = [relax.Var(f"x{i}", kind) for i in range(6)]
    with bb.function("main", params):
        with bb.dataflow():
            zeros = bb.emit(op.zeros((4, 4), "float32"))
            written = bb.emit(
                op.call_tir_inplace(callee, relax.Tuple([zeros, params[0]]), [0], kind)
            )
            result = bb.emit_output(relax.Tuple([op.concat([zeros, *params], 0), written]))
        bb.emit_func_output(result)
    values = [some((4, 4)) for _ in params]
    results = run(bb.get(), "main", *values, target=HOST, pipeline="relax_grad")
    np.testing.assert_array_equal(results[0], np.concatenate([values[0], *values]))


def test_few_tensors_tuple_parameters_and_bfloat16_have_no_kernel():
    """No kernel for few tensors, which fuse with their consumers, a tuple parameter, or
    bfloat16."""
    assert kernels_in(module([(2, 3)] * 5, 1)) == []
    pair = relax.Var("xs", relax.TupleType([relax.TensorType((2, 3), "float32")] * 6))
    assert kernels_in(build([pair], lambda bb, xs: op.concat(xs, 1))) == []
    assert kernels_in(module([(2, 3)] * 6, 1, "bfloat16")) == []


def test_its_gradient():
    params = [tensor(f"x{i}", (2, 3), "float32") for i in range(6)]
    built = build(params, lambda bb, *xs: op.sum(bb.emit(op.tanh(bb.emit(op.concat(xs, 1))))))
    differentiated = relax.transform.Gradient("main", [params[0]])(built)
    values = [some((2, 3)) for _ in params]
    (ours, (mine,)), (stock, (theirs,)) = run_both(differentiated, "main_adjoint", values)
    np.testing.assert_allclose(ours, stock, rtol=1e-5)
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
@pytest.mark.parametrize("where", [[1, 2, 4, 9, *range(10, 22)], 17])
def test_divisions(dtype, where):
    """By indices, and into parts of equal size."""
    built = build([tensor("x", (3, 34, 2), dtype)], lambda bb, x: op.split(x, where, -2))
    check_dispatch(built, "main", [some((3, 34, 2), dtype)], ["split_kernel"])


def test_a_division_of_a_symbolic_batch():
    built = build([tensor("x", (N, 32), "float32")], lambda bb, x: op.split(x, 16, 1))
    check_dispatch(built, "main", [some((3, 32))], ["split_kernel"])


def test_divisions_into_few_or_empty_parts_have_no_kernel():
    """No kernel for few parts, for empty parts, or for one part, which is no tuple."""
    for where in (1, 15, list(range(20)), [*range(1, 20), 19]):
        built = build([tensor("x", (3, 30), "float32")], lambda bb, x, w=where: op.split(x, w, 1))
        assert kernels_in(built) == []
