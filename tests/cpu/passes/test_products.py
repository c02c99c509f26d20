"""Sums of matrix products that become one product, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import HOST, run_both
from in_place import add_to
from programs import build, is_sound, run, tensor
from sums import check_random, in_any_order, names_in, total_of
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad.transform import JoinProducts

RNG = np.random.default_rng(0)


def joined(module, name="main"):
    """Return a function after the pass."""
    result = JoinProducts()(module)
    is_sound(result)
    return result[name]


def is_left(module) -> None:
    tvm.ir.assert_structural_equal(JoinProducts()(module), module)


class Random:
    """A sum of products and other terms, in random order, with its expected value."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.dtype = str(self.rng.choice(["float32", "float64"]))
        self.rows, self.columns = (int(extent) for extent in self.rng.integers(2, 8, 2))
        self.params, self.values, self.makers, self.terms = [], [], [], []
        for form in ("NN", "NT", "TN", "TT"):
            for _ in range(int(self.rng.integers(0, 7))):
                self.add_product(form)
        for _ in range(int(self.rng.integers(0, 3)) or not self.terms):
            param, value = self.parameter((self.rows, self.columns))
            self.terms.append(-value)
            self.makers.append(lambda bb, param=param: bb.emit(op.negative(param)))

    def parameter(self, shape):
        # Sums of products of these integers are exact.
        self.values.append(self.rng.integers(-9, 9, shape).astype(self.dtype))
        self.params.append(tensor(f"x{len(self.params)}", shape, self.dtype))
        return self.params[-1], self.values[-1]

    def add_product(self, form):
        depth = int(self.rng.integers(1, 4))
        pairs = []
        for letter, shape in zip(form, [(self.rows, depth), (depth, self.columns)], strict=True):
            param, value = self.parameter(shape if letter == "N" else shape[::-1])
            pairs.append((param, value, letter == "T"))

        def make(bb):
            factors = [bb.emit(op.permute_dims(p)) if turn else p for p, _, turn in pairs]
            return bb.emit(op.matmul(*factors))

        self.makers.append(make)
        self.terms.append(np.matmul(*(v.T if turn else v for _, v, turn in pairs)))

    def module(self):
        order = self.rng.permutation(len(self.makers))

        def body(bb, *_):
            terms = [self.makers[i](bb) for i in order]
            return in_any_order(bb, self.rng, terms)

        return build(self.params, body)

    def total(self):
        return sum(self.terms)


def test_random_sums():
    check_random(list(map(Random, range(30))), joined, 15)


def products(count=6, rows=8, columns=8, depth=2, dtype="float32", **attrs):
    params = [tensor(f"a{i}", (depth, rows), dtype) for i in range(count)]
    params += [tensor(f"b{i}", (depth, columns), dtype) for i in range(count)]

    def body(bb, *tensors):
        pairs = zip(tensors[:count], tensors[count:], strict=True)
        terms = [bb.emit(op.matmul(bb.emit(op.permute_dims(a)), b, **attrs)) for a, b in pairs]
        return total_of(bb, terms)

    return build(params, body)


def test_products():
    assert names_in(joined(products())) == ["concat", "permute_dims", "concat", "matmul"]


def test_products_that_cost_less_one_by_one_are_left():
    """Few products, factors that are larger than the products, half precision, and symbolic
    extents."""
    is_left(products(3))
    is_left(products(depth=5))
    is_left(products(dtype="float16"))
    is_left(products(dtype="float16", out_dtype="float32"))
    is_left(products(rows=tirx.Var("n", "int64")))
    is_left(products(depth=tirx.Var("n", "int64")))


def test_products_of_more_axes_are_left():
    def body(bb, *tensors):
        return total_of(bb, [bb.emit(op.matmul(x, x)) for x in tensors])

    is_left(build([tensor(f"x{i}", (2, 8, 8), "float32") for i in range(6)], body))
    vectors = [tensor(f"x{i}", (8,), "float32") for i in range(6)]
    is_left(build(vectors, body))


def test_a_product_and_a_transposition_with_other_uses_are_kept():
    count = 6
    params = [tensor(f"a{i}", (2, 8), "float32") for i in range(count)]
    params += [tensor(f"b{i}", (2, 8), "float32") for i in range(count)]

    def body(bb, *tensors):
        turned = [bb.emit(op.permute_dims(a)) for a in tensors[:count]]
        terms = [bb.emit(op.matmul(a, b)) for a, b in zip(turned, tensors[count:], strict=True)]
        return relax.Tuple([total_of(bb, terms), bb.emit(op.exp(turned[0])), terms[1]])

    module = build(params, body)
    names = names_in(joined(module))
    assert names.count("matmul") == 3  # four products are joined; the first two stand alone
    values = [RNG.normal(size=(2, 8)).astype("float32") for _ in params]
    for a, b in zip(*run_both(module, "main", values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("write_to", ["factor", "other"])
def test_a_factor_is_multiplied_before_it_is_overwritten(write_to):
    kind = relax.TensorType((4, 4), "float32")
    bb = relax.BlockBuilder()
    callee = bb.add_func(add_to, "add_to")
    params = [relax.Var(f"x{i}", kind) for i in range(6)]
    with bb.function("main", params):
        with bb.dataflow():
            factor = bb.emit(op.negative(params[0]))
            other = bb.emit(op.exp(params[1]))
            rows = [bb.emit(op.strided_slice(p, [1], [0], [1])) for p in params]
            columns = [bb.emit(op.strided_slice(p, [0], [0], [1])) for p in params]
            pairs = list(zip(rows, columns, strict=True))
            # The summed axis is short for all products but the first.
            first = bb.emit(op.matmul(factor, params[3]))
            written = factor if write_to == "factor" else other
            written = bb.emit(
                op.call_tir_inplace(callee, relax.Tuple([written, params[2]]), [0], kind)
            )
            total = total_of(bb, [first, *(bb.emit(op.matmul(*pair)) for pair in pairs)])
            result = bb.emit_output(relax.Tuple([total, written]))
        bb.emit_func_output(result)
    module = bb.get()
    names = names_in(JoinProducts()(module)["main"])
    assert names.count("matmul") == (2 if write_to == "factor" else 1)
    values = [RNG.normal(size=(4, 4)).astype("float32") for _ in range(6)]
    wanted = -values[0] @ values[3] + sum(v[:, :1] @ v[:1] for v in values)
    output = run(module, "main", *values, target=HOST, pipeline="relax_grad")[0]
    np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5)


def test_a_recurrent_network():
    """The gradient of the weight of all steps is one product."""
    steps, batch, width = 8, 3, 16
    params = [tensor("x", (steps, batch, width), "float32"), tensor("w", (width, width), "float32")]

    def body(bb, x, weight):
        h = bb.emit(op.zeros((batch, width), "float32"))
        for t in range(steps):
            part = bb.emit(op.squeeze(bb.emit(op.strided_slice(x, [0], [t], [t + 1])), [0]))
            h = bb.emit(op.tanh(bb.emit(op.add(part, bb.emit(op.matmul(h, weight))))))
        return bb.emit(op.sum(h))

    module = relax_grad.value_and_grad(build(params, body), wrt="w")
    before = names_in(module["main_adjoint"]).count("matmul")
    assert before - names_in(joined(module, "main_adjoint")).count("matmul") >= steps - 2
    values = [RNG.normal(size=shape).astype("float32") for shape in ((8, 3, 16), (16, 16))]
    (ours, (ours_grad,)), (stock, (stock_grad,)) = run_both(module, "main_adjoint", values)
    np.testing.assert_allclose(ours, stock, rtol=1e-4)
    np.testing.assert_allclose(ours_grad, stock_grad, rtol=1e-3, atol=1e-3)
