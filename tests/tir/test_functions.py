"""Gradients of single tensor functions, written in TVMScript."""

from __future__ import annotations

import numpy as np
import pytest
from tensor_functions import check, numbers, run, tensor
from tvm.script import tirx as T

from relax_grad.tir import adjoint

pytestmark = pytest.mark.core


@T.prim_func(s_tir=True)
def several_stores(
    A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4, 3), "float64"), Z: T.Buffer((3, 4), "float64")
):
    for i, j in T.grid(4, 3):
        with T.sblock("both"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = T.exp(A[vi, vj])
            Z[vj, vi] = A[vi, vj] * A[3 - vi, vj]


@T.prim_func(s_tir=True)
def branches(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4, 3), "float64")):
    for i, j in T.grid(4, 3):
        with T.sblock("branch"):
            vi, vj = T.axis.remap("SS", [i, j])
            if A[vi, vj] > 0.0:
                Y[vi, vj] = T.sqrt(A[vi, vj])
            else:
                Y[vi, vj] = A[vi, vj] * 3.0


@T.prim_func(s_tir=True)
def predicate(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4, 3), "float64")):
    for k in range(16):
        with T.sblock("split"):
            vi = T.axis.spatial(4, k // 3)
            vj = T.axis.spatial(3, k % 3)
            T.where(k < 12)
            Y[vi, vj] = A[vi, vj] * A[vi, vj]


@T.prim_func(s_tir=True)
def ping_pong(A: T.Buffer((5,), "float64"), Y: T.Buffer((5,), "float64")):
    B = T.sblock_alloc_buffer((5,), "float64")
    C = T.sblock_alloc_buffer((5,), "float64")
    for i in range(5):
        with T.sblock("first"):
            vi = T.axis.spatial(5, i)
            B[vi] = A[vi] * A[vi]
    for i in range(5):
        with T.sblock("second"):
            vi = T.axis.spatial(5, i)
            C[vi] = T.sin(B[4 - vi])
    for i in range(5):
        with T.sblock("third"):
            vi = T.axis.spatial(5, i)
            B[vi] = C[vi] * B[vi] * A[vi]
    for i in range(5):
        with T.sblock("last"):
            vi = T.axis.spatial(5, i)
            Y[vi] = B[vi] * C[vi]


@T.prim_func(s_tir=True)
def overwritten(A: T.Buffer((5,), "float64"), Y: T.Buffer((5,), "float64")):
    for i in range(5):
        with T.sblock("all"):
            vi = T.axis.spatial(5, i)
            Y[vi] = A[vi] * 2.0
    for i in range(3):
        with T.sblock("some"):
            vi = T.axis.spatial(3, i)
            Y[vi + 1] = T.exp(A[vi])


@T.prim_func(s_tir=True)
def output_read_again(
    A: T.Buffer((5,), "float64"), Y: T.Buffer((5,), "float64"), Z: T.Buffer((5,), "float64")
):
    for i in range(5):
        with T.sblock("first"):
            vi = T.axis.spatial(5, i)
            Y[vi] = T.tanh(A[vi])
    for i in range(5):
        with T.sblock("second"):
            vi = T.axis.spatial(5, i)
            Z[vi] = Y[vi] * Y[4 - vi]


@T.prim_func(s_tir=True)
def recurrence(
    A: T.Buffer((4, 3), "float64"), B: T.Buffer((4, 3), "float64"), Y: T.Buffer((3,), "float64")
):
    for j, k in T.grid(3, 4):
        with T.sblock("horner"):
            vj, vk = T.axis.remap("SR", [j, k])
            with T.init():
                Y[vj] = 0.5
            Y[vj] = Y[vj] * A[vk, vj] + B[vk, vj]


@T.prim_func(s_tir=True)
def scan(A: T.Buffer((6,), "float64"), Y: T.Buffer((6,), "float64")):
    with T.sblock("start"):
        Y[0] = A[0]
    for i in range(5):
        with T.sblock("step"):
            vi = T.axis.opaque(6, i + 1)
            Y[vi] = T.tanh(Y[vi - 1]) * A[vi] + A[vi // 2]


@T.prim_func(s_tir=True)
def cumulative_max(A: T.Buffer((6,), "float64"), Y: T.Buffer((6,), "float64")):
    with T.sblock("start"):
        Y[0] = A[0]
    for i in range(5):
        with T.sblock("step"):
            vi = T.axis.opaque(6, i + 1)
            Y[vi] = T.max(Y[vi - 1], A[vi])


@T.prim_func(s_tir=True)
def argmax(
    A: T.Buffer((3, 5), "float64"), Y: T.Buffer((3,), "float64"), P: T.Buffer((3,), "int32")
):
    for i, k in T.grid(3, 5):
        with T.sblock("argmax"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                P[vi] = -1
                Y[vi] = T.float64(-1e30)
            best: T.let[T.float64] = Y[vi]
            is_new: T.let[T.bool] = A[vi, vk] > best
            P[vi] = T.Select(is_new, vk, P[vi])
            Y[vi] = T.Select(is_new, A[vi, vk], best)


@T.prim_func(s_tir=True)
def welford(
    A: T.Buffer((3, 5), "float64"), M: T.Buffer((3,), "float64"), S: T.Buffer((3,), "float64")
):
    for i, k in T.grid(3, 5):
        with T.sblock("welford"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                M[vi] = 0.0
                S[vi] = 0.0
            mean: T.let[T.float64] = M[vi]
            delta: T.let[T.float64] = A[vi, vk] - mean
            M[vi] = mean + delta / (T.Cast("float64", vk) + 1.0)
            S[vi] = S[vi] + delta * (A[vi, vk] - M[vi])


@T.prim_func(s_tir=True)
def log_sum_exp(A: T.Buffer((3, 5), "float64"), Y: T.Buffer((3,), "float64")):
    P = T.sblock_alloc_buffer((3,), "float64")
    S = T.sblock_alloc_buffer((3,), "float64")
    for i, k in T.grid(3, 5):
        with T.sblock("online"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                P[vi] = T.float64(-1e30)
                S[vi] = 0.0
            old: T.let[T.float64] = P[vi]
            new: T.let[T.float64] = T.max(old, A[vi, vk])
            P[vi] = new
            S[vi] = S[vi] * T.exp(old - new) + T.exp(A[vi, vk] - new)
    for i in range(3):
        with T.sblock("log"):
            vi = T.axis.spatial(3, i)
            Y[vi] = P[vi] + T.log(S[vi])


@T.prim_func(s_tir=True)
def inner_buffer(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    C = T.sblock_alloc_buffer((4,), "float64")
    for i in range(4):
        with T.sblock("first"):
            vi = T.axis.spatial(4, i)
            C[vi] = A[vi] * A[vi]
    for i in range(4):
        with T.sblock("second"):
            vi = T.axis.spatial(4, i)
            K = T.sblock_alloc_buffer((2,), "float64")
            K[0] = 0.25
            K[1] = (C[vi] + C[3 - vi]) * 0.5
            Y[vi] = T.max(K[0], K[1])


@T.prim_func(s_tir=True)
def divided(A: T.Buffer((5,), "float64"), Y: T.Buffer((8,), "float64")):
    for i in range(8):
        with T.sblock("start"):
            vi = T.axis.spatial(8, i)
            Y[vi] = 1.0
    for i in range(8):
        with T.sblock("step"):
            Y[i // 3] = Y[i // 3] * A[i % 5]


@T.prim_func(s_tir=True)
def divided_twice(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4, 3), "float64")):
    for k in range(24):
        with T.sblock("sum"):
            vi = T.axis.spatial(4, k // 6)
            vj = T.axis.spatial(3, k // 2 % 3)
            vk = T.axis.reduce(2, k % 2)
            with T.init():
                Y[vi, vj] = 0.5
            Y[vi, vj] = Y[vi, vj] * A[vi, vj] + A[3 - vi, vk]


@T.prim_func(s_tir=True)
def negative_stride(A: T.Buffer((6,), "float64"), Y: T.Buffer((3, 2), "float64")):
    for i, j in T.grid(3, 2):
        with T.sblock("product"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = A[5 - vi * 2] * A[vi]


@T.prim_func(s_tir=True)
def with_let(A: T.Buffer((4,), "float64"), Y: T.Buffer((), "float64")):
    with T.sblock("let"):
        x = T.float64()
        Y[()] = T.Let(T.max(A[0], x) * x + A[3], where={x: A[1] * A[2]})


@T.prim_func(s_tir=True)
def reduced_let(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    for i, k in T.grid(4, 4):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = 0.0
            x = T.float64()
            Y[vi] = Y[vi] + T.max(
                T.min(T.Let(A[vk] * (x + x * A[3 - vk]), where={x: A[vi] + 2.0}), 8.0), -8.0
            )


@T.prim_func(s_tir=True)
def maximum_of_one(A: T.Buffer((3, 4), "float64"), Y: T.Buffer((3,), "float64")):
    for i, k in T.grid(3, 4):
        with T.sblock("max"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = 0.25
            Y[vi] = T.max(Y[vi], A[vi, vk])


@T.prim_func(s_tir=True)
def loops_in_a_block(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4,), "float64")):
    with T.sblock("all"):
        for i in range(4):
            Y[i] = 0.0
            for j in range(3):
                Y[i] = Y[i] + A[i, j] * A[i, j] * A[3 - i, j]


@T.prim_func(s_tir=True)
def bound_at_the_root(
    A: T.Buffer((), "float64"), B: T.Buffer((), "float64"), Y: T.Buffer((), "float64")
):
    with T.sblock("scalar"):
        x: T.let[T.float64] = A[()] * B[()]
        Y[()] = x * x


@T.prim_func(s_tir=True)
def bound_between_blocks(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    C = T.sblock_alloc_buffer((4,), "float64")
    for i in range(4):
        with T.sblock("squares"):
            vi = T.axis.spatial(4, i)
            C[vi] = A[vi] * A[vi]
    first: T.let[T.float64] = C[0]
    for i in range(4):
        with T.sblock("products"):
            vi = T.axis.spatial(4, i)
            Y[vi] = first * A[vi]


@T.prim_func(s_tir=True)
def compared_inner_buffer(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    C = T.sblock_alloc_buffer((4,), "float64")
    for i in range(4):
        with T.sblock("first"):
            vi = T.axis.spatial(4, i)
            K = T.sblock_alloc_buffer((1,), "float64")
            K[0] = A[vi] * A[vi]
            C[vi] = K[0] + K[0]
    for i in range(4):
        with T.sblock("second"):
            vi = T.axis.spatial(4, i)
            if C[vi] < 0.5:
                Y[vi] = A[vi] * 3.0
            else:
                Y[vi] = A[vi] * A[vi]


@T.prim_func(s_tir=True)
def carried_minimum(A: T.Buffer((6, 4), "float64"), Y: T.Buffer((4,), "float64")):
    """The outer of two reduction loops lies outside the loop over the elements."""
    for k, i, m in T.grid(3, 4, 2):
        with T.sblock("min"):
            vi = T.axis.spatial(4, i)
            vk = T.axis.reduce(6, k * 2 + m)
            with T.init():
                Y[vi] = T.float64(1e6)
            Y[vi] = T.min(Y[vi], A[vk, vi] * A[vk, vi])


@T.prim_func(s_tir=True)
def carried_product(
    A: T.Buffer((3, 4), "float64"), Y: T.Buffer((4,), "float64"), Z: T.Buffer((3, 4), "float64")
):
    """A result that is carried from one iteration of bare loops to the next is a workspace in the
    adjoint."""
    with T.sblock("all"):
        for i in range(4):
            Y[i] = 1.0
        for k, i in T.grid(3, 4):
            Y[i] = Y[i] * A[k, i] + 0.5
            Z[k, i] = Y[i] * Y[i]


@T.prim_func(s_tir=True)
def fused_multiply_add(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4, 3), "float64")):
    for i, j in T.grid(4, 3):
        with T.sblock("fma"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = T.fma(A[vi, vj], A[3 - vi, vj], T.exp(A[vi, vj]))


@T.prim_func(s_tir=True)
def power_of_two(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    """The bits of integers that a number is rounded to are constants; a comparison of bits has no
    derivative."""
    for i in range(4):
        with T.sblock("scale"):
            vi = T.axis.spatial(4, i)
            exponent: T.let[T.int64] = T.Cast("int64", T.floor(A[vi] * 4.0)) + T.int64(1023)
            if T.reinterpret("int64", A[vi]) < T.int64(0):
                Y[vi] = A[vi] * T.reinterpret("float64", T.shift_left(exponent, T.int64(52)))
            else:
                Y[vi] = A[vi] * A[vi]


@T.prim_func(s_tir=True)
def cholesky(A: T.Buffer((4, 4), "float64"), L: T.Buffer((4, 4), "float64")):
    """Differences in steps, in which an element keeps its cotangent."""
    with T.sblock("all"):
        for i, j in T.grid(4, 4):
            L[i, j] = 0.0
        for j in range(4):
            for i in range(4):
                if i >= j:
                    L[i, j] = A[i, j] * A[j, i] + T.if_then_else(i == j, 4.0, 0.5)
                    for k in range(j):
                        L[i, j] = L[i, j] - L[i, k] * L[j, k]
                    if i == j:
                        L[i, j] = T.sqrt(L[i, j])
                    else:
                        L[i, j] = L[i, j] / L[j, j]


@T.prim_func(s_tir=True)
def sum_with_itself(A: T.Buffer((4, 3), "float64"), Y: T.Buffer((4,), "float64")):
    """The term of a sum reads the element, and elements of earlier iterations."""
    for i in range(4):
        with T.sblock("step"):
            vi = T.axis.opaque(4, i)
            Y[vi] = A[vi, 0]
            for k in range(3):
                Y[vi] = Y[vi] + Y[vi] * A[vi, k] + Y[T.max(vi - 1, 0)] * A[3 - vi, k]


@T.prim_func(s_tir=True)
def windows(
    A: T.Buffer((13,), "float64"), Y: T.Buffer((4,), "float64"), Z: T.Buffer((4,), "float64")
):
    """Windows that share one element, and windows that share none."""
    for i, k in T.grid(4, 4):
        with T.sblock("overlap"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = 0.0
            Y[vi] = Y[vi] + T.exp(A[vi * 3 + vk]) * T.Cast("float64", vk + 1)
    for i, k in T.grid(4, 3):
        with T.sblock("apart"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Z[vi] = 0.0
            Z[vi] = Z[vi] + T.sin(A[vi * 3 + vk]) * T.Cast("float64", vk + 1)


ROW, MATRIX = (5,), (4, 3)

FUNCTIONS = {
    "several stores": (several_stores, [MATRIX], [tensor(4, 3), tensor(3, 4)]),
    "branches": (branches, [MATRIX], [tensor(4, 3)]),
    "predicate": (predicate, [MATRIX], [tensor(4, 3)]),
    "ping-pong": (ping_pong, [ROW], [tensor(5)]),
    "overwritten": (overwritten, [ROW], [tensor(5)]),
    "output read again": (output_read_again, [ROW], [tensor(5), tensor(5)]),
    "recurrence": (recurrence, [MATRIX, MATRIX], [tensor(3)]),
    "scan": (scan, [(6,)], [tensor(6)]),
    "cumulative max": (cumulative_max, [(6,)], [tensor(6)]),
    "argmax": (argmax, [(3, 5)], [tensor(3), tensor(3, dtype="int32")]),
    "welford": (welford, [(3, 5)], [tensor(3), tensor(3)]),
    "log-sum-exp": (log_sum_exp, [(3, 5)], [tensor(3)]),
    "inner buffer": (inner_buffer, [(4,)], [tensor(4)]),
    "divided": (divided, [ROW], [tensor(8)]),
    "divided twice": (divided_twice, [MATRIX], [tensor(4, 3)]),
    "negative stride": (negative_stride, [(6,)], [tensor(3, 2)]),
    "let": (with_let, [(4,)], [tensor()]),
    "let in a sum": (reduced_let, [(4,)], [tensor(4)]),
    "maximum with a bound": (maximum_of_one, [(3, 4)], [tensor(3)]),
    "loops in a block": (loops_in_a_block, [MATRIX], [tensor(4)]),
    "bound at the root": (bound_at_the_root, [(), ()], [tensor()]),
    "bound between blocks": (bound_between_blocks, [(4,)], [tensor(4)]),
    "compared inner buffer": (compared_inner_buffer, [(4,)], [tensor(4)]),
    "carried minimum": (carried_minimum, [(6, 4)], [tensor(4)]),
    "fused multiply-add": (fused_multiply_add, [MATRIX], [tensor(4, 3)]),
    "power of two": (power_of_two, [(4,)], [tensor(4)]),
    "cholesky": (cholesky, [(4, 4)], [tensor(4, 4)]),
    "sum with itself": (sum_with_itself, [MATRIX], [tensor(4)]),
    "windows": (windows, [(13,)], [tensor(4), tensor(4)]),
    "carried product": (carried_product, [(3, 4)], [tensor(4), tensor(3, 4)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    function, shapes, out = FUNCTIONS[name]
    check(function, numbers(*shapes), *out)


@T.prim_func(s_tir=True)
def products_of_rows(
    A: T.Buffer((8,), "float64"), P: T.Buffer((4,), "int32"), Y: T.Buffer((3,), "float64")
):
    for i in range(3):
        with T.sblock("row"):
            vi = T.axis.spatial(3, i)
            Y[vi] = 1.0
            for k in range(T.min(P[vi + 1] - P[vi], 8)):
                Y[vi] = Y[vi] * A[P[vi] + k]


def test_a_loop_whose_extent_is_data_with_a_bound():
    check(products_of_rows, [*numbers((8,)), np.array([0, 2, 2, 7], "int32")], tensor(3))


@T.prim_func(s_tir=True)
def sums_of_rows(
    A: T.Buffer((8,), "float64"), P: T.Buffer((4,), "int32"), Y: T.Buffer((3,), "float64")
):
    for i in range(3):
        with T.sblock("start"):
            vi = T.axis.spatial(3, i)
            Y[vi] = 1.0
    for i in range(3):
        with T.sblock("row"):
            vi = T.axis.spatial(3, i)
            for k in range(P[vi + 1] - P[vi]):
                Y[vi] = A[P[vi] + k] * A[P[vi] + k] + Y[vi]


def test_a_sum_in_steps_saves_nothing():
    """The element keeps its cotangent, so that the second order needs no bound of the number of
    steps."""
    check(sums_of_rows, [*numbers((8,)), np.array([0, 2, 2, 7], "int32")], tensor(3))


@pytest.mark.parametrize("name", ["ping-pong", "divided"])
def test_third_order(name):
    function, shapes, out = FUNCTIONS[name]
    check(function, numbers(*shapes), *out, order=3)


def test_cotangent_of_one_output():
    derivative = adjoint(several_stores, num_outputs=2, cotangents=[1])
    assert ("cotangent", 0) not in derivative.takes
    assert ("cotangent", 1) in derivative.takes


@T.prim_func(s_tir=True)
def table_in_a_recurrence(
    A: T.Buffer((4,), "float64"), C: T.Buffer((3,), "float64"), Y: T.Buffer((4,), "float64")
):
    with T.sblock("b"):
        Y[0] = A[0]
        for i in range(3):
            Y[i + 1] = (
                T.tanh(Y[i]) * A[i + 1]
                + C[T.max(T.min(T.Cast("int32", A[i] * T.float64(2.0)), 2), 0)]
            )


def test_a_table_at_an_index_of_data():
    """The index has no derivative, and the table none that is wanted."""
    a, c = np.array([0.3, 0.7, -0.4, 1.2]), np.array([0.1, -0.5, 0.8])
    (gradient,) = run(table_in_a_recurrence, a, c, num_outputs=1, wrt=[0])

    def value(a):
        y = [a[0]]
        for i in range(3):
            y.append(np.tanh(y[i]) * a[i + 1] + c[max(min(int(a[i] * 2), 2), 0)])
        return sum(y)

    steps = 1e-6 * np.eye(4)
    expected = [(value(a + step) - value(a - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@T.prim_func(s_tir=True)
def contradictory_conditions(A: T.Buffer((4,), "float64"), Y: T.Buffer((4,), "float64")):
    with T.sblock("a"):
        for i in range(4):
            Y[i] = A[3 - i]
    with T.sblock("b"):
        for i in range(4):
            if T.Or(i > 0, A[i] > -0.5):
                Y[i] = T.tanh(Y[i])
            else:
                Y[i] = Y[i] + T.max(T.if_then_else(i < 2, A[i], Y[i]), T.tanh(A[i]))


def test_contradictory_conditions():
    """TVM takes the region of an access that never happens for one of a negative extent."""
    check(contradictory_conditions, [np.array([-0.8, 0.3, 0.6, 0.2])], tensor(4))
