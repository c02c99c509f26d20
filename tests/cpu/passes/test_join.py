"""Sums of gradients of slices that become concatenations, against NumPy."""

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
from relax_grad.op.index import take_backward
from relax_grad.op.index_slice import strided_slice_backward_data
from relax_grad.transform import Gradient, JoinSlices

RNG = np.random.default_rng(0)


def joined(module, name="main"):
    """Return a function after the pass."""
    result = JoinSlices()(module)
    is_sound(result)
    return result[name]


def is_left(module) -> None:
    tvm.ir.assert_structural_equal(JoinSlices()(module), module)


def backward(part, shape, axis, start, stop, stride=1):
    return strided_slice_backward_data(part, shape, [axis], [start], [stop], [stride])


def rows(count, extent=None, take=False):
    """Return the module of the sum of the gradients of x[i] for the first rows of a tensor, in
    descending order."""
    shape = (extent or count, 3)
    params = [tensor(f"x{i}", shape[1:] if take else (1, 3), "float32") for i in range(count)]
    data = tensor("data", shape, "float32")

    def body(bb, data, *parts):
        terms = []
        for i, part in reversed(list(enumerate(parts))):
            if take:
                terms.append(bb.emit(take_backward(part, data, relax.const(i), axis=0)))
            else:
                terms.append(bb.emit(backward(part, shape, 0, i, i + 1)))
        return total_of(bb, terms)

    return build([data, *params], body)


def test_rows():
    assert names_in(joined(rows(5))) == ["concat"]
    names = names_in(joined(rows(5, take=True)))
    assert sorted(names) == ["concat", *["expand_dims"] * 5]
    assert sorted(names_in(joined(rows(5, 8)))) == ["concat", "zeros"]


def test_few_slices_stay_a_sum():
    is_left(rows(3))
    is_left(rows(5, 20))
    assert "concat" in names_in(joined(rows(16, 200)))


class Random:
    """A sum of gradients of slices and of other terms, in random order, with its expected value."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        rank = int(self.rng.integers(1, 4))
        self.dtype = str(self.rng.choice(["float32", "float64", "int32", "int8"]))
        self.shape = tuple(int(size) for size in self.rng.integers(1, 5, rank))
        self.axis = int(self.rng.integers(rank))
        extent = int(self.rng.integers(4, 12))
        self.shape = (*self.shape[: self.axis], extent, *self.shape[self.axis + 1 :])
        self.params, self.values, self.makers, self.terms = [], [], [], []
        self.data = self.parameter(self.shape)
        for _ in range(int(self.rng.integers(1, 3))):
            self.cover(extent)
        for _ in range(int(self.rng.integers(0, 3))):
            self.add_other()

    def parameter(self, shape):
        self.values.append(self.rng.integers(-9, 9, shape).astype(self.dtype))
        self.params.append(tensor(f"x{len(self.params)}", shape, self.dtype))
        return self.params[-1], self.values[-1]

    def cover(self, extent):
        """Divide the axis into parts, and add the gradients of most of them."""
        bounds = np.unique([0, extent, *self.rng.integers(1, extent, 6)])
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if self.rng.random() < 0.9:
                kind = self.rng.choice(["slice", "take", "one", "turned"])
                getattr(self, f"add_{kind}")(start, stop)

    def place(self, start, stop, value):
        whole = np.zeros(self.shape, self.dtype)
        whole[(slice(None),) * self.axis + (slice(start, stop),)] = value
        self.terms.append(whole)

    def part(self, start, stop):
        return (*self.shape[: self.axis], stop - start, *self.shape[self.axis + 1 :])

    def add_slice(self, start, stop):
        param, value = self.parameter(self.part(start, stop))
        self.place(start, stop, value)
        extent, is_last = self.shape[self.axis], stop == self.shape[self.axis]
        start -= extent * int(self.rng.integers(2))
        stop += 5 if is_last else -extent * int(self.rng.integers(2))
        axis = self.axis - len(self.shape) * int(self.rng.integers(2))
        self.makers.append(lambda bb: bb.emit(backward(param, self.shape, axis, start, stop)))

    def add_turned(self, start, stop):
        """Add a transpose of the gradient of a slice."""
        axes = self.rng.permutation(len(self.shape)).tolist()
        inverse = np.argsort(axes).tolist()
        shape, part = (
            [extents[i] for i in inverse] for extents in (self.shape, self.part(start, stop))
        )
        param, value = self.parameter(part)
        self.place(start, stop, value.transpose(axes))

        def make(bb):
            whole = bb.emit(backward(param, shape, inverse.index(self.axis), start, stop))
            return bb.emit(op.permute_dims(whole, axes))

        self.makers.append(make)

    def add_take(self, start, stop):
        param, value = self.parameter(self.part(start, stop))
        self.place(start, stop, value)
        indices = relax.const(np.arange(start, stop, dtype="int64"))
        self.makers.append(
            lambda bb: bb.emit(take_backward(param, self.data[0], indices, axis=self.axis))
        )

    def add_one(self, start, stop):
        """Add the gradient of taking the first element of a part."""
        param, value = self.parameter((*self.shape[: self.axis], *self.shape[self.axis + 1 :]))
        self.place(start, start + 1, np.expand_dims(value, self.axis))
        index = start - self.shape[self.axis] * int(self.rng.integers(2))
        self.makers.append(
            lambda bb: bb.emit(
                take_backward(param, self.data[0], relax.const(index, "int64"), axis=self.axis)
            )
        )

    def add_other(self):
        param, value = self.parameter(self.shape)
        self.terms.append(-value)
        self.makers.append(lambda bb: bb.emit(op.negative(param)))

    def module(self):
        order = self.rng.permutation(len(self.makers))

        def body(bb, *_):
            terms = [self.makers[i](bb) for i in order]
            return in_any_order(bb, self.rng, terms) if terms else self.params[0]

        return build(self.params, body)

    def total(self):
        return sum(self.terms, np.zeros(self.shape, self.dtype)) if self.terms else self.values[0]


def test_random_sums():
    check_random(list(map(Random, range(40))), joined, 20)


def sliced(change):
    """Return the module of a sum of 6 rows; ``change`` overrides the shape, the bounds or the
    stride."""
    params = [tensor(f"x{i}", (1, 3), "float32") for i in range(6)]
    settings = {"shape": (6, 3), "bounds": [(i, i + 1) for i in range(6)], "stride": 1}
    settings.update(change)

    def body(bb, *parts):
        terms = [
            bb.emit(backward(part, settings["shape"], 0, *bounds, settings["stride"]))
            for part, bounds in zip(parts, settings["bounds"], strict=True)
        ]
        return total_of(bb, terms)

    return build(params, body)


N = tirx.Var("n", "int64")


def test_unsupported_slices_are_left():
    """Slices that overlap, have strides or symbolic shapes; gradients of taking indices that are no
    range."""
    assert "concat" in names_in(joined(sliced({})))
    is_left(sliced({"bounds": [(2, 3)] * 6}))
    is_left(sliced({"bounds": [(i, i + 2) for i in range(6)], "shape": (12, 3), "stride": 2}))
    data, others = tensor("data", (8, 3), "float32"), tensor("i", (), "int64")
    params = [data, others, *(tensor(f"x{i}", (2, 3), "float32") for i in range(4))]

    def scattered(bb, data, _, *parts):
        places = [[2 * i + 1, 2 * i] for i in range(4)]
        terms = [
            take_backward(part, data, relax.const(np.array(at)), axis=0)
            for part, at in zip(parts, places, strict=True)
        ]
        return total_of(bb, [bb.emit(term) for term in terms])

    is_left(build(params, scattered))

    def outside(bb, data, _, *parts):
        row = bb.emit(op.sum(parts[0], [0]))
        terms = [take_backward(row, data, relax.const(i), axis=0) for i in (8, 9, 10, -9, 11)]
        return total_of(bb, [bb.emit(term) for term in terms])

    is_left(build(params, outside))

    def unknown(bb, data, i, *parts):
        row = bb.emit(op.sum(parts[0], [0]))
        terms = [take_backward(row, data, i, axis=0) for _ in range(8)]
        return total_of(bb, [bb.emit(term) for term in terms])

    is_left(build(params, unknown))

    symbolic = tensor("data", (N, 3), "float32")

    def of_symbolic(bb, data, *parts):
        terms = [
            strided_slice_backward_data(p, (N, 3), [0], [i], [i + 1], [1], True)
            for i, p in enumerate(parts)
        ]
        return total_of(bb, [bb.emit(term) for term in terms])

    is_left(build([symbolic, *(tensor(f"x{i}", (1, 3), "float32") for i in range(6))], of_symbolic))


@pytest.mark.parametrize("symbolic", ["batch", "width"])
def test_a_symbolic_axis_that_is_not_sliced_is_left(symbolic):
    shape = (N, 6, 3) if symbolic == "batch" else (2, 6, N)
    part = (shape[0], 1, shape[2])

    def body(bb, *parts):
        return total_of(bb, [bb.emit(backward(p, shape, 1, i, i + 1)) for i, p in enumerate(parts)])

    is_left(build([tensor(f"x{i}", part, "float32") for i in range(6)], body))


def test_partial_sums_that_are_used_elsewhere_are_kept():
    """A partial sum that is an output, or that has two uses, begins a new sum."""
    shape = (12, 3)
    params = [tensor(f"x{i}", (1, 3), "float32") for i in range(12)]

    def body(is_output):
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            with bb.dataflow():
                terms = [bb.emit(backward(p, shape, 0, i, i + 1)) for i, p in enumerate(params)]
                first = total_of(bb, terms[:6])
                first = bb.emit_output(op.add(first, terms[6])) if is_output else first
                whole = total_of(bb, [first, *terms[7 if is_output else 6 :]])
                other = first if is_output else bb.emit(op.multiply(first, relax.const(2.0)))
                result = bb.emit_output(relax.Tuple([whole, other]))
            bb.emit_func_output(result)
        return bb.get()

    for is_output in (False, True):
        module = body(is_output)
        values = [RNG.normal(size=(1, 3)).astype("float32") for _ in params]
        function = joined(module)
        results = run(tvm.IRModule({"main": function}), "main", *values)
        wanted = run(module, "main", *values)
        for a, b in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        # The first 6 or 7 slices cover at least half of the rows. The other 6 do too, but 5 do not.
        assert names_in(function).count("concat") == (1 if is_output else 2)


def test_a_slice_that_is_used_twice_is_a_term():
    def body(bb, *parts):
        terms = [bb.emit(backward(p, (6, 3), 0, i, i + 1)) for i, p in enumerate(parts)]
        total = total_of(bb, terms)
        return relax.Tuple([total, bb.emit(op.exp(terms[2]))])

    module = build([tensor(f"x{i}", (1, 3), "float32") for i in range(6)], body)
    names = names_in(joined(module))
    assert sorted(names) == ["add", "concat", "exp", "grad.strided_slice_backward_data", "zeros"]
    values = [RNG.normal(size=(1, 3)).astype("float32") for _ in range(6)]
    for a, b in zip(*run_both(module, "main", values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("write_to", ["source", "other"])
def test_a_cotangent_is_added_before_it_is_overwritten(write_to):
    """A cotangent that is overwritten before the sum is complete is still added before the
    write."""
    kind = relax.TensorType((4, 4), "float32")
    bb = relax.BlockBuilder()
    callee = bb.add_func(add_to, "add_to")
    params = [relax.Var(f"x{i}", kind) for i in range(6)]
    with bb.function("main", params):
        with bb.dataflow():
            source = bb.emit(op.negative(params[0]))
            other = bb.emit(op.exp(params[1]))
            parts = [source, *params[1:]]
            shape = (24, 4)
            first = bb.emit(backward(source, shape, 0, 0, 4))
            written = source if write_to == "source" else other
            written = bb.emit(
                op.call_tir_inplace(callee, relax.Tuple([written, params[2]]), [0], kind)
            )
            rest = [
                bb.emit(backward(p, shape, 0, 4 * i, 4 * i + 4)) for i, p in enumerate(parts[1:], 1)
            ]
            total = total_of(bb, [first, *rest])
            result = bb.emit_output(relax.Tuple([total, written]))
        bb.emit_func_output(result)
    module = bb.get()
    names = names_in(JoinSlices()(module)["main"])
    slices = names.count("grad.strided_slice_backward_data")
    assert (names.count("concat"), slices) == (1, 1 if write_to == "source" else 0)
    values = [RNG.normal(size=(4, 4)).astype("float32") for _ in range(6)]
    wanted = np.concatenate([-values[0], *values[1:]])
    np.testing.assert_array_equal(
        run(module, "main", *values, target=HOST, pipeline="relax_grad")[0], wanted
    )


def steps(bb, x, weight, count):
    """Return the loss of a recurrent network without a bias."""
    h = bb.emit(op.multiply(weight, relax.const(0.0)))
    for t in range(count):
        part = bb.emit(op.strided_slice(x, [1], [t], [t + 1]))
        h = bb.emit(op.tanh(bb.emit(op.add(bb.emit(op.multiply(part, weight)), h))))
    return bb.emit(op.sum(h))


def test_second_order():
    """The gradient of a gradient is joined too, with the same numbers as without the pass."""
    params = [tensor("x", (2, 6, 3), "float32"), tensor("w", (2, 1, 3), "float32")]
    module = build(params, lambda bb, x, w: steps(bb, x, w, 6))
    first = Gradient("main", "x")(module)

    bb = relax.BlockBuilder(first)
    inner = list(relax.utils.copy_with_new_vars(first["main_adjoint"]).params)
    with bb.function("square", inner):
        with bb.dataflow():
            both = bb.emit(relax.Call(first.get_global_var("main_adjoint"), inner))
            gradient = bb.emit(relax.TupleGetItem(bb.emit(relax.TupleGetItem(both, 1)), 0))
            loss = bb.emit_output(op.sum(bb.emit(op.multiply(gradient, gradient))))
        bb.emit_func_output(loss)
    second = relax_grad.value_and_grad(
        relax_grad.transform.InlineSingleUse()(bb.get()), "square", wrt="w"
    )
    assert "concat" in names_in(joined(second, "square_adjoint"))
    values = [RNG.normal(size=shape).astype("float32") for shape in ((2, 6, 3), (2, 1, 3))]
    (ours, (ours_grad,)), (stock, (stock_grad,)) = run_both(second, "square_adjoint", values)
    np.testing.assert_allclose(ours, stock, rtol=1e-5)
    np.testing.assert_allclose(ours_grad, stock_grad, rtol=1e-4, atol=1e-5)


def recurrent(torch, how: str):
    """Return a network of steps along the second axis, read by index, by range, or from the
    transpose."""

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 4)

        def forward(self, x):
            y, h = self.layer(x), 0.0
            for t in range(x.shape[1]):
                if how == "index":
                    part = y[:, t]
                elif how == "range":
                    part = y[:, t : t + 1].squeeze(1)
                else:
                    part = y.transpose(0, 1)[t]
                h = torch.tanh(part + h)
            return h.sum()

    torch.manual_seed(0)
    return Recurrent(), torch.randn(2, 7, 3)


@pytest.mark.parametrize("how", ["index", "range", "transposed"])
def test_imported(how):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to import")
    from tvm.relax.frontend.torch import from_exported_program

    network, x = recurrent(torch, how)
    exported = torch.export.export(network, (x,))
    module = from_exported_program(
        exported, keep_params_as_input=True, unwrap_unit_return_tuple=True
    )
    module, _ = relax.frontend.detach_params(module)
    module = relax_grad.value_and_grad(module, "main", wrt=0)
    names = names_in(joined(module, "main_adjoint"))
    assert "concat" in names
    assert not any(
        name in ("grad.take_backward", "grad.strided_slice_backward_data") for name in names
    )
    values = [x.numpy(), *(param.detach().numpy() for param in network.parameters())]
    loss, (gradient,) = run(module, "main_adjoint", *values, target=HOST, pipeline="relax_grad")
    x.requires_grad_()
    wanted = network(x)
    wanted.backward()
    np.testing.assert_allclose(loss, wanted.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-4, atol=1e-6)
