"""The differentiation pass: accepted programs, refused programs, and agreement with TVM's pass."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import bindings_in, build, check, is_sound, run, tensor
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from relax_grad import GradientError
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve, select_wrt
from relax_grad.testing.samples import sampled_operators, samples
from relax_grad.transform import Gradient

X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


# Comparison with TVM's pass


def program_of(sample):
    """Return the first-order program of a sample, and the names of the variables to differentiate
    with respect to."""
    _, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(sample.inputs, "float64", {})
    program = _program.first_order(function, arguments, sample.attrs, np.random.default_rng(0))
    return program, select_wrt(program.arguments, sample.wrt)


def by_both(sample):
    """Return a sample's program, and its derivatives by our pass and by TVM's."""
    program, wrt = program_of(sample)
    return program, *(_program.differentiate(program, wrt, through) for through in _program.PASSES)


@pytest.mark.parametrize("op_name", sampled_operators())
def test_type_and_size_beside_tvm(op_name):
    sample = samples(op_name)[0]
    with sample.within():
        _, ours, stock = by_both(sample)
    assert relax.analysis.check_well_formed(ours)
    assert tvm_ffi.structural_equal(ours["main_adjoint"].ret_ty, stock["main_adjoint"].ret_ty)
    assert bindings_in(ours["main_adjoint"]) <= bindings_in(stock["main_adjoint"])


@pytest.mark.slow
@pytest.mark.parametrize("op_name", sampled_operators())
def test_values_beside_tvm(op_name):
    """Compare all samples of the operator. Samples with the same surroundings compile together."""
    within = {sample.within: None for sample in samples(op_name)}
    for surroundings in within:
        chosen = [sample for sample in samples(op_name) if sample.within is surroundings]
        with surroundings(), _program.without_assertions():
            programs, ours, stock = zip(*map(by_both, chosen), strict=True)
            call = _program.compile_together([*ours, *stock], TARGET)
            for i, program in enumerate(programs, start=1):
                results, wanted = (
                    call(f"main_{number}_adjoint", program.values())
                    for number in (i, i + len(programs))
                )
                np.testing.assert_array_equal(results[0], wanted[0])
                for gradient, expected in zip(results[1], wanted[1], strict=True):
                    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


# Symbolic shapes, match_cast


def test_symbolic_shapes_anywhere():
    n = tirx.Var("n", "int64")

    def body(bb, x):
        y = bb.emit(op.reshape(x, (n * 2, 2)))
        y = bb.emit(op.multiply(op.exp(y), op.broadcast_to(op.sum(y, [0]), (n * 2, 2))))
        return op.sum(op.add(y, op.zeros((n * 2, 2), "float64")))

    (gradient,) = check(build([tensor("x", (n, 4))], body), X)
    assert gradient.shape == X.shape


def test_match_cast():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=2))

    def body(bb, x):
        y = bb.match_cast(x, relax.TensorType((n, 4), "float64"))
        return op.sum(op.multiply(op.exp(y), op.reshape(y, (n, 4))))

    check(build([x], body), X)


@pytest.mark.parametrize("name", ["multiply", "maximum", "matmul"])
@pytest.mark.parametrize("known", [True, False])
def test_an_error_of_an_unknown_shape_names_the_argument(name, known):
    unknown = relax.TensorType(None, "float64", ndim=2)
    params = [tensor("x", (3, 3)) if known else relax.Var("x", unknown), relax.Var("y", unknown)]
    module = build(params, lambda bb, x, y: op.sum(bb.emit(getattr(op, name)(x, y))))
    message = "the shapes of all arguments must" if known else "the shape of x must"
    with pytest.raises(GradientError, match=f"{message} be known, .* with relax.match_cast"):
        Gradient("main")(module)


@pytest.mark.parametrize("dataflow", [True, False])
def test_match_cast_to_extents_unknown_to_the_type(dataflow):
    """The check stays in the adjoint function. The original extents hold again after it."""
    n = tirx.Var("n", "int64")
    params = [tensor("x", (n, 4)), tensor("w", (4, 4)), tensor("b", (4,))]

    def body(bb, x, w, b):
        y = bb.emit(op.add(op.matmul(x, w), b))
        return op.sum(op.exp(bb.match_cast(y, relax.TensorType((3, 4), "float64"))))

    module = build(params, body, dataflow=dataflow)
    values = X / 4, np.eye(4), np.ones(4)
    check(module, *values, at=(0, 1, 2))
    with pytest.raises(RuntimeError):
        run(Gradient("main")(module), "main_adjoint", X[:2], *values[1:])


def test_a_cast_beside_transposes_is_kept():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=2))

    def body(bb, x):
        y = bb.match_cast(x, relax.TensorType((n, 4), "float64"))
        product = bb.emit(op.matmul(y, bb.emit(op.permute_dims(y))))
        return op.sum(bb.emit(op.multiply(product, product)))

    check(build([x], body), X)


# Blocks, tuples, call_tir_with_grad


def test_binding_blocks_beside_dataflow_blocks():
    x = tensor("x", (3, 4))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        y = bb.emit(op.exp(x))
        with bb.dataflow():
            z = bb.emit(op.multiply(x, y))
            z = bb.emit_output(op.multiply(z, y))
        w = bb.emit(op.add(z, y))
        with bb.dataflow():
            loss = bb.emit_output(op.sum(op.multiply(w, z)))
        bb.emit_func_output(loss)
    check(bb.get(), X / 4)


def test_elements_of_tuples_of_symbolic_shape_to_second_order():
    """TVM's pass writes zeros of a symbolic shape for unused parts, and fails there."""
    n = tirx.Var("n", "int64")

    def body(bb, x):
        parts = bb.emit(op.split(x, 2, axis=1))
        part = bb.emit(relax.TupleGetItem(parts, 0))
        return op.sum(op.multiply(part, op.multiply(part, part)))

    first = Gradient("main")(build([tensor("x", (n, 4))], body))
    second = Gradient("main_adjoint", target_index=(1, 0), cotangents=True)(first)
    is_sound(second)
    _, (grad,) = run(second, "main_adjoint_adjoint", X, np.ones_like(X))
    np.testing.assert_allclose(grad, np.concatenate([6 * X[:, :2], 0 * X[:, 2:]], 1))


def test_elements_of_tuples_that_are_written_out():
    def body(bb, x):
        pair = relax.Tuple([bb.emit(op.exp(x)), relax.Tuple([x])])
        inner = relax.TupleGetItem(relax.TupleGetItem(pair, 1), 0)
        y = bb.emit(op.multiply(bb.emit(relax.TupleGetItem(pair, 0)), bb.emit(inner)))
        return op.sum(y)

    _, (grad,) = run(Gradient("main")(build([tensor("x", (3, 4))], body)), "main_adjoint", X)
    np.testing.assert_allclose(grad, np.exp(X) * (1 + X))


def test_a_tuple_within_one_that_is_written_out():
    """The outer tuple holds a variable that is itself a tuple."""

    def body(bb, x):
        inner = bb.emit(relax.Tuple([bb.emit(op.exp(x)), x]))
        outer = bb.emit(relax.Tuple([inner]))
        return op.sum(bb.emit(relax.TupleGetItem(bb.emit(relax.TupleGetItem(outer, 0)), 0)))

    check(build([tensor("x", (3, 4))], body), X)


def test_call_tir_with_grad():
    from tvm import te
    from tvm.relax.training.utils import register_te_gradient

    def square(x):
        return te.compute(x.shape, lambda *i: x(*i) * x(*i), name="square")

    def square_grad(output_grad, x):
        return te.compute(x.shape, lambda *i: 2.0 * x(*i) * output_grad(*i), name="square_grad")

    register_te_gradient("relax_grad_test_square", square_grad)

    def body(bb, x):
        call = bb.call_te_with_grad(square, x, te_grad_name="relax_grad_test_square")
        return op.sum(op.exp(bb.emit(call)))

    adjoint = Gradient("main")(build([tensor("x", (3, 4))], body))
    is_sound(adjoint)
    assert "call_tir_with_grad" not in adjoint["main_adjoint"].script()
    functions = {v: f for v, f in adjoint.functions_items() if v.name_hint != "main"}
    _, (grad,) = run(tvm.IRModule(functions), "main_adjoint", X / 2)
    np.testing.assert_allclose(grad, X * np.exp(X * X / 4), rtol=1e-12)


# Activity, missing gradients


def test_operators_off_the_path_need_no_gradient():
    def body(bb, x):
        mask = bb.emit(op.call_pure_packed("mystery", op.floor(x), ty_args=x.ty))
        count = bb.emit(op.call_pure_packed("count", op.argmax(x), ty_args=tensor("n", ()).ty))
        loss = op.sum(op.multiply(op.exp(x), count))
        return relax.Tuple([loss, mask])

    adjoint = Gradient("main")(build([tensor("x", (3, 4))], body))
    assert relax.analysis.check_well_formed(adjoint)


def test_operators_that_count_as_constants():
    module = build([tensor("x", (3, 4))], lambda bb, x: op.sum(op.exp(x)))
    assert "zeros" in Gradient("main", allow_zero="relax.exp")(module)["main_adjoint"].script()
    with pytest.raises(ValueError, match=r"no operator named relax[.]nonsense"):
        Gradient("main", allow_zero=["relax.exp", "relax.nonsense"])


def test_one_error_names_every_missing_gradient():
    def body(bb, x):
        first = bb.emit(op.call_pure_packed("mystery", x, ty_args=x.ty), name_hint="first")
        second = bb.emit(op.call_pure_packed("riddle", first, ty_args=x.ty), name_hint="second")
        return op.sum(second)

    module = build([tensor("x", (3, 4))], body)
    with pytest.raises(GradientError) as caught:
        Gradient("main")(module)
    message = str(caught.value)
    assert "2 bindings have no gradient" in message
    assert "'first'" in message
    assert "'second'" in message
    assert "relax.call_pure_packed" in message
    assert "register_gradient" in message

    adjoint = Gradient("main", allow_zero=["relax.call_pure_packed"])(module)
    assert "zeros" in adjoint["main_adjoint"].script()


def test_the_place_of_a_missing_gradient_is_named_once():
    @I.ir_module
    class Module:
        @R.function
        def f(x: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
            y = R.call_pure_packed("mystery", x, ty_args=R.Tensor((3, 4), "float64"))
            return y

        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            cls = Module
            s: R.Tensor((), "float64") = R.sum(cls.f(cls.f(x)))
            return s

    with pytest.raises(GradientError) as caught:
        Gradient("main")(Module)
    message = str(caught.value)
    assert message.count("binding 'y' at ") == 1
    assert "test_gradient.py:" in message


# Modules


def test_an_unknown_function_name_is_refused():
    module = build([tensor("x", ())], lambda bb, x: op.exp(x))
    with pytest.raises(ValueError, match="no function 'other'; it has main"):
        Gradient("other")(module)


def test_an_existing_adjoint_function_is_refused():
    module = Gradient("main")(build([tensor("x", (3, 4))], lambda bb, x: op.sum(op.exp(x))))
    with pytest.raises(ValueError, match="has a function main_adjoint already"):
        Gradient("main")(module)


def test_attributes_of_module_and_function():
    @I.ir_module
    class Module:
        I.module_attrs({"version": 1})
        I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

        @R.function(private=True)
        def main(x: R.Tensor((3, 4), "float64")):
            R.func_attr({"num_input": 1})
            s: R.Tensor((), "float64") = R.sum(R.exp(x))
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    assert adjoint.attrs["version"] == 1
    assert list(adjoint.global_infos) == ["vdevice"]
    assert dict(adjoint["main_adjoint"].attrs) == {"global_symbol": "main_adjoint", "num_input": 1}


def test_ones_and_zeros_that_change_nothing():
    """The adjoint of a sum has the shape of the operand from the start, and products do not keep it
    as a factor."""
    n = tirx.Var("n", "int64")

    def body(bb, x):
        return op.sum(bb.emit(op.multiply(x, bb.emit(op.exp(x)))))

    script = Gradient("main")(build([tensor("x", (n, 4))], body))["main_adjoint"].script()
    assert script.count("R.multiply") == 2  # the forward one, and y' = exp(x) x + exp(x)
    assert "R.broadcast_to" not in script
    check(build([tensor("x", (n, 4))], body), X)


def test_ones_that_broadcast_are_kept():
    def body(bb, x):
        rows = bb.emit(op.multiply(x, bb.emit(op.ones((3, 4), "float64"))))
        return op.sum(bb.emit(op.multiply(rows, rows)))

    check(build([tensor("x", (4,))], body), X[0])
