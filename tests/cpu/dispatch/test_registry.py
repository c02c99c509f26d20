"""The facts about a call that kernel rules use, and the registry of these rules."""

from __future__ import annotations

import pytest
from dispatched import kernels_in
from programs import build, tensor
from tvm import relax, tirx

from relax_grad.cpu.dispatch import (
    CallSite,
    kernel_for,
    operators_with_kernels,
    registry,
    residuals,
)
from relax_grad.cpu.dispatch.registry import find_kernel
from relax_grad.cpu.dispatch.residuals import find_residuals, residuals_for
from relax_grad.cpu.target import CPU

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def site():
    return CallSite(None, CPU(16, 32, 2))


def test_static_shapes():
    assert site().shape(tensor("x", (2, 3), "float32")) == [2, 3]
    assert site().shape(tensor("x", (), "float32")) == []
    assert site().shape(tensor("x", (2, 3), "int64"), "int64") == [2, 3]


def test_symbolic_extents():
    """Each distinct extent expression becomes one int32 variable, shared by all shapes of a
    call."""
    at = site()
    n, again, m, both = at.shape(tensor("x", (N, N, M, N * M), "float32"))
    assert n is again
    assert len({n.name, m.name, both.name}) == 3
    assert all(
        isinstance(extent, tirx.Var) and str(extent.ty.dtype) == "int32" for extent in (n, m, both)
    )
    assert at.shape(tensor("y", (M, 2, N * M), "float32")) == [m, 2, both]
    assert site().shape(tensor("x", (N,), "float32")) != [n]


@pytest.mark.parametrize(
    "kind",
    [
        relax.TensorType((2, 3), "float64"),
        relax.TensorType((2, 3), "float16"),
        relax.TensorType((2, 0), "float32"),
        relax.TensorType((N, 0), "float32"),
        relax.TensorType((2**16, 2**15), "float32"),
        relax.TensorType((N, 2**16, 2**15), "float32"),
        relax.TensorType(dtype="float32", ndim=2),
        relax.TensorType(ndim=2),
        relax.TupleType([relax.TensorType((2, 3), "float32")]),
    ],
    ids=str,
)
def test_unsupported_types_have_no_kernel_shape(kind):
    assert site().shape(relax.Var("x", kind)) is None


def test_the_largest():
    assert site().shape(tensor("x", (2**31 - 1,), "float32")) == [2**31 - 1]


def test_one_kernel_for_an_operator(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", {})

    @kernel_for("relax.b", "relax.a")
    def make(at):
        return at

    assert operators_with_kernels() == ["relax.a", "relax.b"]
    assert find_kernel("relax.a", "site") == "site"
    assert find_kernel("relax.c", "site") is None
    with pytest.raises(ValueError, match=r"relax\.a already has a kernel factory, make"):
        kernel_for("relax.a")(make)


def test_one_saving_for_an_operator(monkeypatch):
    monkeypatch.setattr(residuals, "_RESIDUALS", {})

    @residuals_for("relax.b", "relax.a")
    def make(site, var, calls):
        return site

    assert find_residuals("relax.a", "site", None, None) == "site"
    assert find_residuals("relax.c", "site", None, None) is None
    with pytest.raises(
        ValueError, match=r"relax\.a already has a factory of residual kernels, make"
    ):
        residuals_for("relax.a")(make)


@pytest.mark.parametrize(
    ("shapes", "body"),
    [
        ([(2**16, 2**15)], relax.op.nn.softmax),
        ([(2**16, 2**15)], lambda x: relax.op.sum(x, [0])),
        ([(2**17, 2), (2, 2**15)], relax.op.matmul),
        ([(2**9, 4, 2**10, 2**10), (8, 4, 3, 3)], relax.op.nn.conv2d),
        ([(1, 2**9, 2**12, 2**10)], lambda x: relax.op.nn.max_pool2d(x, (2, 2), (2, 2))),
    ],
    ids=["softmax", "sum", "matmul", "conv2d", "max_pool2d"],
)
def test_more_elements_than_an_index_of_int32_reaches(shapes, body):
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    assert kernels_in(build(params, lambda _, *arguments: body(*arguments))) == []
