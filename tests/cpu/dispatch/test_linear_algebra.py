"""Which matrix products become kernels, and that the numbers do not change."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST, check_dispatch, kernels_in, run_both
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.ir import GlobalVar
from tvm.relax import op
from tvm.script import tirx as T

import relax_grad
from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.compat import constant_value
from relax_grad.ir.shapes import static_extents
from relax_grad.training import SGD, Trainer, lora, train_step

RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")
KERNEL = "matmul_kernel"


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def product(a, b, transpose=()):
    """Return the module of a product of two parameters; ``transpose`` names those to transpose
    first."""

    def body(bb, *factors):
        swapped = []
        for i, factor in enumerate(factors):
            axes = list(range(factor.ty.ndim))
            axes[-2:] = axes[:-3:-1]
            swapped.append(bb.emit(op.permute_dims(factor, axes)) if i in transpose else factor)
        return op.matmul(*swapped)

    return build([tensor("a", a, "float32"), tensor("b", b, "float32")], body)


@pytest.mark.parametrize("transpose", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((17, 17), (17, 17)),
        ((2, 3, 9, 9), (2, 3, 9, 9)),
        ((2, 3, 9, 9), (9, 9)),
        ((9, 9), (4, 9, 9)),
        ((N, 9, 9), (N, 9, 9)),
        ((N, 9, 9), (9, 9)),
    ],
)
def test_products(a, b, transpose):
    values = [normal(*(5 if d is N else d for d in shape)) for shape in (a, b)]
    check_dispatch(product(a, b, transpose), "main", values, [KERNEL])


@pytest.mark.parametrize(
    ("a", "b"),
    [((5,), (5, 3)), ((3, 5), (5,)), ((2, 3, 5), (1, 5, 4)), ((0, 5), (5, 4)), ((4, 0), (0, 4))],
)
def test_vectors_broadcast_batches_and_empty_matrices_have_no_kernel(a, b):
    check_dispatch(product(a, b), "main", [normal(*a), normal(*b)], [])


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_dtypes_have_no_kernel(dtype):
    module = build([tensor(n, (3, 3), dtype) for n in "ab"], lambda bb, a, b: op.matmul(a, b))
    assert kernels_in(module) == []


def test_a_gradient_step():
    """Forward and both gradients of a linear layer with a symbolic batch: three kernels, no
    transposes."""
    params = [tensor("x", (N, 20), "float32"), tensor("w", (7, 20), "float32")]

    def body(bb, x, w):
        y = bb.emit(op.linear(x, w))
        return op.sum(bb.emit(op.multiply(y, y)))

    module = relax_grad.value_and_grad(build(params, body))
    del module["main"]
    check_dispatch(module, "main_adjoint", [normal(5, 20), normal(7, 20)], [KERNEL] * 3)
    dispatched = relax_grad.transform.DispatchKernels(relax_grad.target.host())(module)
    assert "permute_dims" not in dispatched["main_adjoint"].script()


def test_equal_calls_share_a_kernel():
    def body(bb, a, b):
        first = bb.emit(op.matmul(a, b))
        return op.matmul(bb.emit(op.matmul(b, first)), a)

    module = build([tensor(name, (8, 8), "float32") for name in "ab"], body)
    assert len(set(kernels_in(module))) == 1
    assert len(kernels_in(module)) == 3


def test_a_target_that_llvm_does_not_compile_for():
    module = product((4, 4), (4, 4))
    assert kernels_in(module, "c") == []
    assert isinstance(module["main"], relax.Function)


@T.prim_func(private=True, s_tir=True)
def clear(A: T.Buffer((40, 40), "float32")):
    for i, j in T.grid(40, 40):
        with T.sblock("clear"):
            vi, vj = T.axis.remap("SS", [i, j])
            A[vi, vj] = T.float32(0)


def with_one_factor(rows, transpose=False, written=None, dtype="float32"):
    """Return the module of products of tensors with these rows and one factor, which is overwritten
    before the product of number ``written``."""
    shapes = [(*(extent if isinstance(extent, tuple) else (extent,)), 40) for extent in rows]
    params = [tensor(f"x{i}", shape, dtype) for i, shape in enumerate([*shapes, (40, 40)])]

    def body(bb, *tensors):
        *data, factor = tensors
        factor = bb.emit(op.add(factor, relax.const(1, dtype)))
        results = []
        for i, x in enumerate(data):
            if i == written:
                cleared = op.call_tir_inplace(
                    bb.add_func(clear, "clear"), relax.Tuple([factor]), [0], factor.ty
                )
                results.append(bb.emit(cleared))
            turned = bb.emit(op.permute_dims(factor)) if transpose else factor
            results.append(bb.emit(op.matmul(x, turned)))
        return bb.emit(relax.Tuple(results))

    return build(params, body)


def panels_of(module, name="main"):
    """Return the calls of kernels that also return panels."""
    dispatched = relax_grad.transform.DispatchKernels(HOST)(module)
    values = [binding.value for binding in bindings_of(dispatched[name].body)]
    calls = [value for value in values if isinstance(value, relax.Call)]
    return [call for call in calls if isinstance(call.ty, relax.TupleType)]


SHARING = {
    "equal rows": [64] * 4,
    "other rows": [64, (3, 21), 40, 128, (5, 2, 11)],
    "few rows between": [64, 3, 64, 64, 200, 64],
}


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows", SHARING.values(), ids=SHARING)
def test_products_of_one_factor_pack_it_once(rows, transpose):
    module = with_one_factor(rows, transpose)
    assert len(panels_of(module)) == 1
    values = [normal(*map(int, param.ty.shape.values)) for param in module["main"].params]
    check_dispatch(module, "main", values, [KERNEL] * len(rows))
    assert "permute_dims" not in relax_grad.transform.DispatchKernels(HOST)(module).script()


def test_products_that_pack_their_own_factor():
    """Too few products, symbolic rows, half precision."""
    for module in (
        with_one_factor([64] * 3),
        with_one_factor([N] * 4),
        with_one_factor([64] * 4, dtype="float16"),
    ):
        assert panels_of(module) == []


@pytest.mark.parametrize("transpose", [False, True])
def test_an_overwritten_factor_is_packed_again(transpose):
    module = with_one_factor([64] * 6, transpose, written=4)
    assert panels_of(module) == []
    values = [normal(64, 40) for _ in range(6)] + [normal(40, 40)]
    results = run(module, "main", *values, target=HOST, pipeline="relax_grad")
    factor = values[-1] + 1
    for result, x in zip(results[:4], values, strict=False):
        np.testing.assert_allclose(result, x @ (factor.T if transpose else factor), 1e-4, 1e-4)
    assert not any(result.any() for result in results[4:])


def test_steps_of_a_cell_share_panels_forward_and_backward():
    """Forward and data gradient need panels of their own: of columns, and of rows of the weight."""

    def body(bb, x, weight):
        for _ in range(6):
            x = bb.emit(op.tanh(bb.emit(op.linear(x, weight))))
        return op.sum(x)

    params = [tensor("x", (64, 40), "float32"), tensor("weight", (40, 40), "float32")]
    module = relax_grad.value_and_grad(build(params, body))
    del module["main"]
    assert len(panels_of(module, "main_adjoint")) == 2
    values = [normal(64, 40), 0.1 * normal(40, 40)]
    (loss, ours), (wanted, stock) = run_both(module, "main_adjoint", values)
    np.testing.assert_allclose(loss, wanted, 1e-4)
    for gradient, other in zip(ours, stock, strict=True):
        np.testing.assert_allclose(gradient, other, 1e-4, 1e-5)


@pytest.mark.parametrize(("batches", "packed"), [(2, 0), (4, 3)])
def test_frozen_weights_with_adapters(batches, packed):
    """Two layers that a step applies to several batches. Each frozen weight is packed once for the
    forward pass, and that of the second layer once for the gradients of its data. Two products take
    less time if each packs its own."""
    values = {name: 0.2 * normal(48, 48) for name in "vw"}
    inputs = [normal(64, 48) for _ in range(batches)]

    def body(bb, v, w, *batches):
        outputs = []
        for x in batches:
            hidden = bb.emit(op.tanh(bb.emit(op.linear(x, v))))
            outputs.append(bb.emit(op.sum(op.tanh(bb.emit(op.linear(hidden, w))))))
        return op.sum(op.stack(outputs))

    params = [tensor(name, (48, 48), "float32") for name in "vw"]
    params += [tensor(f"x{i}", (64, 48), "float32") for i in range(batches)]
    module = build(params, body)
    module = tvm.IRModule({"loss": module["main"].with_attr("global_symbol", "loss")})
    step = train_step(lora(module, 2, ["v", "w"], values=values), SGD(0.1))
    calls = [call for call in panels_of(step.module, "step") if KERNEL in str(call.args[0])]
    # The factors of the adapters have two rows or two columns.
    factors = [static_extents(call.args[1][1].ty) for call in calls]
    assert factors.count([48, 48]) == packed
    outputs = [np.tanh(np.tanh(x @ values["v"].T) @ values["w"].T) for x in inputs]
    trainer = Trainer(step, target=HOST)
    np.testing.assert_allclose(trainer.step(*inputs).loss, sum(map(np.sum, outputs)), 1e-4, 1e-3)


def with_constants(rows, transpose=False, uses=1, is_written=False):
    """Return the module of products of parameters and one constant matrix, and the matrix; a call
    may overwrite another constant."""
    matrix = normal(40, 40)
    constant = relax.const(matrix)
    params = [tensor(f"x{i}", (rows, 40), "float32") for i in range(uses)]

    def body(bb, *data):
        factor = bb.emit(op.permute_dims(constant)) if transpose else constant
        results = [bb.emit(op.matmul(x, factor)) for x in data]
        if is_written:
            other = bb.emit(op.add(data[0], data[0]))
            args = relax.Tuple([other])
            results.append(
                bb.emit(op.call_tir_inplace(bb.add_func(clear, "clear"), args, [0], other.ty))
            )
        return relax.Tuple(results)

    return build(params, body), matrix


def constants_in(module):
    """Return the different constants that kernels of a module read."""
    found = relax_grad.transform.DispatchKernels(HOST)(module)
    values = [binding.value for binding in bindings_of(found["main"].body)]
    calls = [value for value in values if isinstance(value, relax.Call)]
    arguments = [call.args[1].fields for call in calls if isinstance(call.args[0], GlobalVar)]
    constants = {argument for fields in arguments for argument in fields}
    return [value for value in map(constant_value, constants) if value is not None]


@pytest.mark.parametrize("transpose", [False, True])
def test_constants_are_packed_once(transpose):
    """Three products of 64 rows would pack their factor themselves."""
    module, matrix = with_constants(64, transpose, 3)
    (panels,) = constants_in(module)
    assert panels.ndim == 3
    columns = panels.transpose(1, 0, 2).reshape(40, -1)
    np.testing.assert_array_equal(columns[:, :40], matrix.T if transpose else matrix)
    assert not columns[:, 40:].any()
    check_dispatch(module, "main", [normal(64, 40) for _ in range(3)], [KERNEL] * 3)


@pytest.mark.parametrize(("rows", "is_written"), [(3, False), (200, False), (40, True)])
def test_constants_that_kernels_read_in_place(rows, is_written):
    """Few and many rows; a module with calls that may overwrite constants."""
    module, matrix = with_constants(rows, is_written=is_written)
    (constant,) = constants_in(module)
    assert constant.shape == matrix.shape
    x = normal(rows, 40)
    found = run(module, "main", x, target=HOST, pipeline="relax_grad")
    np.testing.assert_allclose(found[0], x @ matrix, 1e-4, 1e-4)
