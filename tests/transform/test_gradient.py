"""The differentiation pass: what it takes, what it refuses, and that it agrees with TVM's."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import build, check, is_sound, run, tensor, to_numpy
from sweep import TARGET
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_grad import GradientError, missing_gradients
from relax_grad.testing import _program
from relax_grad.testing.check import resolve, select_wrt
from relax_grad.testing.samples import sampled_operators, samples
from relax_grad.transform import Gradient

X = np.array([[0.5, -1.5, 2.0, 0.25], [1.0, -0.75, 0.125, 3.0], [-2.0, 0.3, 0.7, -0.1]])


def size(module, name="main_adjoint"):
    return sum(len(block.bindings) for block in module[name].body.blocks)


def program_of(sample):
    """The first-order program of a sample, and the names of what it is differentiated with respect to."""
    _, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(sample.inputs, "float64", {})
    program = _program.first_order(function, arguments, sample.attrs, np.random.default_rng(0))
    return program, select_wrt(program.arguments, sample.wrt)


def by_both(sample):
    """A sample's program, differentiated by our pass and by TVM's."""
    program, wrt = program_of(sample)
    return program, *(_program.differentiate(program, wrt, through) for through in _program.PASSES)


# Beside TVM's pass


@pytest.mark.parametrize("op_name", sampled_operators())
def test_type_and_size_beside_tvm(op_name):
    sample = samples(op_name)[0]
    with sample.within():
        _, ours, stock = by_both(sample)
    assert relax.analysis.check_well_formed(ours)
    assert tvm_ffi.structural_equal(ours["main_adjoint"].ret_ty, stock["main_adjoint"].ret_ty)
    assert size(ours) <= size(stock)


@pytest.mark.slow
@pytest.mark.parametrize("op_name", sampled_operators())
def test_values_beside_tvm(op_name):
    """Of every sample of the operator; those that ask for the same surroundings compile together."""
    within = {sample.within: None for sample in samples(op_name)}
    for surroundings in within:
        chosen = [sample for sample in samples(op_name) if sample.within is surroundings]
        with surroundings(), tvm.transform.PassContext(config={"tirx.disable_assert": True}):
            programs, ours, stock = zip(*map(by_both, chosen), strict=True)
            call = _program.compile_together([*ours, *stock], TARGET)
            for i, program in enumerate(programs, start=1):
                found, wanted = (
                    call(f"main_{number}_adjoint", program.values())
                    for number in (i, i + len(programs))
                )
                np.testing.assert_array_equal(found[0], wanted[0])
                for gradient, expected in zip(found[1], wanted[1], strict=True):
                    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


def test_many_bindings_for_each_binding():
    """Linear: what a binding adds does not depend on how many there are."""

    def chain(count):
        def body(bb, x):
            y = x
            for i in range(count):
                y = bb.emit([op.tanh(y), op.add(y, x), op.multiply(y, y), op.matmul(y, x)][i % 4])
            return op.sum(y)

        return size(Gradient("main")(build([tensor("x", (2, 2))], body)))

    def parts(count):
        def body(bb, x):
            split = bb.emit(op.split(x, count))
            total = bb.emit(relax.TupleGetItem(split, 0))
            for i in range(1, count):
                total = bb.emit(op.add(total, bb.emit(relax.TupleGetItem(split, i))))
            return op.sum(total)

        return size(Gradient("main")(build([tensor("x", (count, 2))], body)))

    for measure in (chain, parts):
        small, middle, large = (measure(count) for count in (16, 32, 48))
        assert large - middle == middle - small


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


@pytest.mark.parametrize("dataflow", [True, False])
def test_match_cast_to_what_the_type_does_not_know(dataflow):
    """The check stays in the adjoint function, and behind it are the extents of before."""
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


def test_elements_of_tuples_of_symbolic_shape_to_second_order():
    """TVM's pass writes zeros of a symbolic shape for the parts that nothing uses, and stops at them."""
    n = tirx.Var("n", "int64")

    def body(bb, x):
        parts = bb.emit(op.split(x, 2, axis=1))
        part = bb.emit(relax.TupleGetItem(parts, 0))
        return op.sum(op.multiply(part, op.multiply(part, part)))

    first = Gradient("main")(build([tensor("x", (n, 4))], body))
    second = Gradient("main_adjoint", target_index=(1, 0), cotangents=True)(first)
    is_sound(second)
    _, (found,) = run(second, "main_adjoint_adjoint", X, np.ones_like(X))
    np.testing.assert_allclose(found, np.concatenate([6 * X[:, :2], 0 * X[:, 2:]], 1))


# Blocks, conditionals, calls


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


@I.ir_module
class Branches:
    @R.function
    def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
        y: R.Tensor((3, 4), "float64") = R.multiply(x, x)
        if c:
            z = R.add(y, y)
        else:
            e = R.exp(y)
            z = R.multiply(e, x)
        s: R.Tensor((), "float64") = R.sum(z)
        return s


@pytest.mark.parametrize("taken", [True, False])
def test_the_branch_that_is_taken(taken):
    condition = np.array(taken)
    check(Branches, X, condition)
    first = Gradient("main")(Branches)
    second = Gradient("main_adjoint", [first["main_adjoint"].params[0]], (1, 0), cotangents=True)(
        first
    )
    is_sound(second)
    _, (found,) = run(second, "main_adjoint_adjoint", X, condition, np.ones_like(X))
    e = np.exp(X * X)
    wanted = 4 * np.ones_like(X) if taken else e * (6 * X + 4 * X**3)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_conditionals_within_each_other_and_in_a_row():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool"), d: R.Tensor((), "bool")):
            if c:
                if d:
                    y = R.exp(x)
                else:
                    y = R.sin(x)
            else:
                y = R.multiply(x, x)
            if d:
                z = R.multiply(y, x)
            else:
                z = x
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    for c in (True, False):
        for d in (True, False):
            _, (found,) = run(adjoint, "main_adjoint", X, np.array(c), np.array(d))
            y, dy = (np.exp(X), np.exp(X)) if c else (X * X, 2 * X)
            np.testing.assert_allclose(found, y + X * dy if d else np.ones_like(X), rtol=1e-12)


def test_a_conditional_over_symbolic_shapes():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float64"), c: R.Tensor((), "bool")):
            n = T.int64()
            y: R.Tensor((n * 4,), "float64") = R.reshape(x, R.shape([n * 4]))
            if c:
                z = R.multiply(y, y)
            else:
                z = R.exp(y)
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    for taken in (True, False):
        check(Module, X, np.array(taken))


def test_calls_of_other_functions():
    @I.ir_module
    class Module:
        @R.function
        def cube(x: R.Tensor(("n", "m"), "float64")) -> R.Tensor(("n", "m"), "float64"):
            n, m = T.int64(), T.int64()
            with R.dataflow():
                square = R.multiply(x, x)
                y = R.multiply(square, x)
                R.output(y)
            return y

        @R.function
        def twice(x: R.Tensor(("n", 4), "float64")) -> R.Tensor(("n", 4), "float64"):
            n = T.int64()
            cls = Module
            y: R.Tensor((n, 4), "float64") = cls.cube(x)
            z: R.Tensor((n, 4), "float64") = cls.cube(y)
            return z

        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.twice(x)
            z: R.Tensor((3, 4), "float64") = cls.cube(x)
            s: R.Tensor((), "float64") = R.sum(R.add(y, z))
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    _, (found,) = run(adjoint, "main_adjoint", X)
    np.testing.assert_allclose(found, 9 * X**8 + 3 * X**2, rtol=1e-12)


def test_extents_of_a_call():
    """A product of extents for a symbolic one, and a symbolic one for what is known."""

    @I.ir_module
    class Module:
        @R.function
        def shifted(x: R.Tensor(("m", 4), "float64"), b: R.Tensor((4,), "float64")):
            y = R.exp(R.add(x, b))
            return y

        @R.function
        def six(x: R.Tensor((6, 4), "float64"), b: R.Tensor((4,), "float64")):
            y = R.tanh(R.multiply(x, b))
            return y

        @R.function
        def main(x: R.Tensor(("n", 4), "float64"), b: R.Tensor((4,), "float64")):
            n = T.int64()
            cls = Module
            twice = R.concat([x, x])
            y: R.Tensor((2 * n, 4), "float64") = cls.shifted(twice, b)
            z: R.Tensor((6, 4), "float64") = cls.six(R.add(y, b), b)
            s: R.Tensor((), "float64") = R.sum(z)
            return s

    check(Module, X / 4, np.array([0.5, -0.25, 0.125, 1]), at=(0, 1))


def test_calls_within_a_branch():
    @I.ir_module
    class Module:
        @R.function
        def cube(x: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
            y: R.Tensor((3, 4), "float64") = R.multiply(R.multiply(x, x), x)
            return y

        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            cls = Module
            if c:
                y: R.Tensor((3, 4), "float64") = cls.cube(x)
            else:
                y: R.Tensor((3, 4), "float64") = R.exp(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    for taken in (True, False):
        check(Module, X, np.array(taken))


def test_local_functions():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            @R.function
            def scaled(y: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
                z: R.Tensor((3, 4), "float64") = R.multiply(y, R.exp(x))
                return z

            a: R.Tensor((3, 4), "float64") = scaled(x)
            b: R.Tensor((3, 4), "float64") = scaled(a)
            s: R.Tensor((), "float64") = R.sum(b)
            return s

    adjoint = Gradient("main")(Module)
    assert relax.analysis.check_well_formed(adjoint)
    alone = tvm.IRModule({"main_adjoint": adjoint["main_adjoint"]})
    _, (found,) = run(alone, "main_adjoint", X)
    np.testing.assert_allclose(found, np.exp(2 * X) * (1 + 2 * X), rtol=1e-12)


def test_recursion_is_refused():
    @I.ir_module
    class Module:
        @R.function
        def again(x: R.Tensor((3, 4), "float64")) -> R.Tensor((3, 4), "float64"):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.again(x)
            return y

        @R.function
        def main(x: R.Tensor((3, 4), "float64")):
            cls = Module
            y: R.Tensor((3, 4), "float64") = cls.again(x)
            s: R.Tensor((), "float64") = R.sum(y)
            return s

    with pytest.raises(GradientError, match=r"recursion .* again calls again"):
        Gradient("main")(Module)


# Targets, cotangents, parameters


def test_a_target_of_one_element():
    x = tensor("x", (3, 4))
    check(build([x], lambda bb, x: op.reshape(op.sum(op.exp(x)), (1,))), X)


def test_the_parameter_itself_as_target():
    x = tensor("x", ())
    _, (found,) = run(Gradient("main")(build([x], lambda bb, x: x)), "main_adjoint", np.array(2.0))
    assert found == 1


def test_an_element_of_a_tuple_of_tuples():
    def body(bb, x):
        inner = bb.emit(relax.Tuple([op.exp(x), bb.emit(op.sum(op.multiply(x, x)))]))
        return relax.Tuple([x, inner])

    module = build([tensor("x", (3, 4))], body)
    _, (found,) = run(Gradient("main", target_index=(1, 1))(module), "main_adjoint", X)
    np.testing.assert_allclose(found, 2 * X)
    adjoint = Gradient("main", target_index=(1, 0), cotangents=True)(module)
    _, (found,) = run(adjoint, "main_adjoint", X, X)
    np.testing.assert_allclose(found, X * np.exp(X))


def test_cotangents_of_the_whole_result():
    def body(bb, x):
        return relax.Tuple([op.exp(x), relax.Tuple([op.argmax(x), op.sum(x, [1])])])

    adjoint = Gradient("main", target_index=None, cotangents=True)(
        build([tensor("x", (3, 4))], body)
    )
    is_sound(adjoint)
    assert [param.name for param in adjoint["main_adjoint"].params[1:]] == [
        "cotangent0",
        "cotangent1",
    ]
    rows = np.array([1.0, 2.0, 3.0])
    _, (found,) = run(adjoint, "main_adjoint", X, X, rows)
    np.testing.assert_allclose(found, X * np.exp(X) + rows[:, None])


def weighted(rows=3):
    """Two tensors as results, one of them of a parameter's shape."""

    def body(bb, x, w):
        kept = bb.emit(op.exp(x), name_hint="kept")
        return relax.Tuple([op.multiply(kept, x), op.argmax(x), op.sum(x, [0])])

    return build([tensor("x", (rows, 4)), tensor("w", (rows, 4))], body)


@pytest.mark.parametrize("rows", [3, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_cotangents_as_values(rows):
    """Parameters, intermediate variables, numbers, arrays and names, in nested sequences."""
    module = weighted(rows)
    x, w = module["main"].params
    kept = module["main"].body.blocks[0].bindings[0].var
    y, e = X * np.exp(X) + np.exp(X), np.exp(X)
    row = np.array([1.0, 2.0, -3.0, 0.5])
    for cotangents, wanted in [
        ((w, 0.0), y * 2),
        ([kept, row], y * e + row),
        ((x, (relax.const(row, "float64"),)), y * X + row),
        (relax.Tuple([w, relax.const(row, "float64")]), y * 2 + row),
        ((-1.5, tvm.runtime.tensor(row)), -1.5 * y + row),
    ]:
        adjoint = Gradient("main", "x", None, cotangents=cotangents)(module)
        is_sound(adjoint)
        _, (found,) = run(adjoint, "main_adjoint", X, np.full_like(X, 2.0))
        np.testing.assert_allclose(found, wanted, rtol=1e-12)

    adjoint = Gradient("main", "x", None, cotangents=("dy", 1))(module)
    assert [param.name for param in adjoint["main_adjoint"].params] == ["x", "w", "dy"]
    _, (found,) = run(adjoint, "main_adjoint", X, X, X)
    np.testing.assert_allclose(found, X * y + 1)


@pytest.mark.parametrize(
    ("cotangents", "error", "match"),
    [
        ([1.0], ValueError, "holds 2 floating-point tensors, but there are 1 cotangents"),
        ((1.0, np.zeros(3)), ValueError, r"cotangents\[1\] has the type .*3,.*float64"),
        ((1.0, np.zeros(4, "float32")), ValueError, r"cotangents\[1\] has the type .*float32"),
        ((np.zeros((3, 4)), 1.0), ValueError, "of another shape in each call"),
        ((tensor("v", (3, 4)), 1.0), ValueError, "cotangents: v is no variable of main"),
        ((None, 1.0), TypeError, r"cotangents\[0\] must be the name of a new parameter"),
    ],
)
def test_cotangents_that_are_refused(cotangents, error, match):
    module = weighted(tirx.Var("n", "int64"))
    with pytest.raises(error, match=match):
        Gradient("main", target_index=None, cotangents=cotangents)(module)


def test_variables_by_name():
    module = weighted()
    x = module["main"].params[0]
    for wanted in ("x", ["x"], [x], x):
        found = Gradient("main", wanted, target_index=2, cotangents=1)(module)
        assert len(found["main_adjoint"].ret_ty.fields[1].fields) == 1
    both = Gradient("main", ["kept", "x"], target_index=0, cotangents=1)(module)
    _, (of_kept, _) = run(both, "main_adjoint", X, X)
    np.testing.assert_allclose(of_kept, X)
    with pytest.raises(ValueError, match="require_grads: nothing is no variable of main"):
        Gradient("main", "nothing")(module)
    with pytest.raises(ValueError, match="require_grads: x appears more than once"):
        Gradient("main", ["x", x])(module)


def test_a_name_of_two_variables():
    x = [tensor("x", ()), tensor("x", ())]
    module = build(x, lambda bb, x, y: op.multiply(x, y))
    with pytest.raises(ValueError, match="has 2 variables named 'x'; pass the variable itself"):
        Gradient("main", "x")(module)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "one floating-point tensor, but its type is .*Tuple"),
        ({"target_index": 0}, r"scalar or have one element, but its type is R.Tensor\(\(3, 4\)"),
        ({"target_index": 3}, "target_index: 3 is no element .* a tuple of 3 elements"),
        ({"target_index": (0, 0)}, "target_index: 0 is no element .* one value"),
        ({"target_index": 2}, "one floating-point tensor, but its type is R.Tensor.*int64"),
        ({"target_index": 2, "cotangents": True}, "must hold floating-point tensors"),
        ({"target_index": 1, "require_grads": tensor("y", ())}, "y is no variable of main"),
    ],
)
def test_targets_that_are_refused(settings, match):
    def body(bb, x):
        return relax.Tuple([op.exp(x), op.sum(x), op.argmax(x)])

    module = build([tensor("x", (3, 4))], body)
    if not settings:
        settings = {"target_index": None}
    with pytest.raises(ValueError, match=match):
        Gradient("main", **settings)(module)


def test_what_is_no_function_is_refused():
    module = build([tensor("x", ())], lambda bb, x: op.exp(x))
    with pytest.raises(ValueError, match="no function 'other'; it has main"):
        Gradient("other")(module)


def test_parameters_without_gradients():
    """Integers, shapes, scalars and objects stay parameters; floating-point tensors get gradients."""
    n = tirx.Var("n", "int64")
    params = [
        tensor("x", (n, 4)),
        tensor("index", (2,), "int64"),
        relax.Var("shape", relax.ShapeType([n])),
        relax.Var("pair", relax.TupleType([tensor("a", (4,)).ty, tensor("b", (2,), "int32").ty])),
        relax.Var("thing", relax.ObjectType()),
    ]

    def body(bb, x, index, shape, pair, thing):
        rows = bb.emit(op.take(x, index, axis=0))
        first = bb.emit(relax.TupleGetItem(pair, 0))
        return op.sum(op.multiply(op.exp(rows), first))

    module = build(params, body)
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    machine = relax.VirtualMachine(tvm.compile(adjoint, "llvm"), tvm.cpu())
    index, a, b = np.array([2, 0]), np.arange(4.0), np.zeros(2, "int32")
    pair = tvm.runtime.convert([tvm.runtime.tensor(a), tvm.runtime.tensor(b)])
    _, gradients = to_numpy(
        machine["main_adjoint"](
            tvm.runtime.tensor(X), tvm.runtime.tensor(index), tvm_ffi.Shape([3]), pair, pair
        )
    )
    wanted = np.exp(X) * a
    wanted[1] = 0
    np.testing.assert_allclose(gradients[0], wanted)
    np.testing.assert_allclose(gradients[1][0], np.exp(X[index]).sum(0))
    assert len(gradients) == 2


def test_unused_repeated_and_intermediate_variables():
    x, y = tensor("x", (3, 4)), tensor("y", (2,))
    kept = []

    def body(bb, x, y):
        kept.append(bb.emit(op.exp(x)))
        return op.sum(op.multiply(kept[0], op.multiply(x, kept[0])))

    module = build([x, y], body)
    _, (of_x, of_y, of_kept) = run(
        Gradient("main", [x, y, *kept])(module), "main_adjoint", X, np.zeros(2)
    )
    e = np.exp(X)
    np.testing.assert_allclose(of_kept, 2 * X * e)
    np.testing.assert_allclose(of_x, e * e + 2 * X * e * e)
    np.testing.assert_array_equal(of_y, [0, 0])


def test_bfloat16_parameters():
    import ml_dtypes

    x = tensor("x", (3, 4), "bfloat16")
    adjoint = Gradient("main")(build([x], lambda bb, x: op.sum(op.multiply(x, x))))
    is_sound(adjoint)
    assert "bfloat16" in str(adjoint["main_adjoint"].ret_ty)
    value = X.astype(ml_dtypes.bfloat16)
    bits = tvm.runtime.empty(value.shape, "bfloat16")
    bits.copyfrom(value)
    machine = relax.VirtualMachine(tvm.compile(adjoint, "llvm"), tvm.cpu())
    _, (found,) = machine["main_adjoint"](bits)
    np.testing.assert_allclose(
        found.numpy().astype("float64"), 2 * value.astype("float64"), rtol=1e-2
    )


# Activity, missing gradients


def test_operators_off_the_path_need_no_gradient():
    def body(bb, x):
        mask = bb.emit(op.call_pure_packed("mystery", op.floor(x), ty_args=x.ty))
        count = bb.emit(op.call_pure_packed("count", op.argmax(x), ty_args=tensor("n", ()).ty))
        loss = op.sum(op.multiply(op.exp(x), count))
        return relax.Tuple([loss, mask])

    adjoint = Gradient("main")(build([tensor("x", (3, 4))], body))
    assert relax.analysis.check_well_formed(adjoint)


def test_one_error_names_every_missing_gradient():
    def body(bb, x):
        first = bb.emit(op.call_pure_packed("mystery", x, ty_args=x.ty), name_hint="first")
        second = bb.emit(op.call_pure_packed("riddle", first, ty_args=x.ty), name_hint="second")
        return op.sum(second)

    module = build([tensor("x", (3, 4))], body)
    with pytest.raises(GradientError) as caught:
        Gradient("main")(module)
    message = str(caught.value)
    assert "2 of its bindings" in message
    assert "'first'" in message
    assert "'second'" in message
    assert "relax.call_pure_packed" in message
    assert "register_gradient" in message

    adjoint = Gradient("main", allow_zero=["relax.call_pure_packed"])(module)
    assert "zeros" in adjoint["main_adjoint"].script()


# Checkpoints, call_tir_with_grad


def test_checkpoints_are_computed_again():
    from relax_grad.op import checkpoint

    def plain(bb, x):
        y = bb.emit(op.exp(x))
        return op.sum(bb.emit(op.multiply(y, bb.emit(op.tanh(y)))))

    def marked(bb, x):
        def stretch(x):
            y = bb.emit(op.exp(x))
            return bb.emit(op.multiply(y, bb.emit(op.tanh(y))))

        return op.sum(bb.emit(checkpoint(stretch, x)))

    x = tensor("x", (3, 4))
    module = build([x], marked)
    adjoint = Gradient("main")(module)
    is_sound(adjoint)
    assert adjoint["main_adjoint"].script().count("R.exp") == 2
    stock = relax.transform.Gradient("main")(module)
    assert size(adjoint) <= size(stock)
    found, wanted = (
        run(each, "main_adjoint", X) for each in (adjoint, Gradient("main")(build([x], plain)))
    )
    np.testing.assert_allclose(found[1][0], wanted[1][0], rtol=1e-14)


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
    _, (found,) = run(tvm.IRModule(functions), "main_adjoint", X / 2)
    np.testing.assert_allclose(found, X * np.exp(X * X / 4), rtol=1e-12)


# Arguments of the pass, names, modules


@pytest.mark.parametrize("index", [np.int64(1), [1], (np.int32(1),)])
def test_indices_of_any_kind(index):
    module = build([tensor("x", (3, 4))], lambda bb, x: relax.Tuple([op.sum(x), op.sum(op.exp(x))]))
    adjoint = Gradient("main", target_index=index)(module)
    tvm.ir.assert_structural_equal(adjoint, Gradient("main", target_index=1)(module))


@pytest.mark.parametrize("index", [True, "0", 0.0, [False]])
def test_what_is_no_index(index):
    with pytest.raises(TypeError, match="target_index must be an integer"):
        Gradient("main", target_index=index)


def test_operators_that_count_as_constants():
    module = build([tensor("x", (3, 4))], lambda bb, x: op.sum(op.exp(x)))
    assert "zeros" in Gradient("main", allow_zero="relax.exp")(module)["main_adjoint"].script()
    with pytest.raises(ValueError, match=r"no operator named relax[.]nonsense"):
        Gradient("main", allow_zero=["relax.exp", "relax.nonsense"])


def test_an_adjoint_function_that_is_there_already():
    module = Gradient("main")(build([tensor("x", (3, 4))], lambda bb, x: op.sum(op.exp(x))))
    with pytest.raises(ValueError, match="has a function main_adjoint already"):
        Gradient("main")(module)


def test_without_a_variable_and_without_a_binding():
    module = build([tensor("x", ())], lambda bb, x: x, dataflow=False)
    adjoint = Gradient("main", [])(module)
    is_sound(adjoint)
    assert list(adjoint["main_adjoint"].ret_ty.fields[1].fields) == []


def test_a_cast_beside_transposes_is_kept():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType(dtype="float64", ndim=2))

    def body(bb, x):
        y = bb.match_cast(x, relax.TensorType((n, 4), "float64"))
        product = bb.emit(op.matmul(y, bb.emit(op.permute_dims(y))))
        return op.sum(bb.emit(op.multiply(product, product)))

    check(build([x], body), X)


def test_elements_of_tuples_that_are_written_out():
    def body(bb, x):
        pair = relax.Tuple([bb.emit(op.exp(x)), relax.Tuple([x])])
        inner = relax.TupleGetItem(relax.TupleGetItem(pair, 1), 0)
        y = bb.emit(op.multiply(bb.emit(relax.TupleGetItem(pair, 0)), bb.emit(inner)))
        return op.sum(y)

    _, (found,) = run(Gradient("main")(build([tensor("x", (3, 4))], body)), "main_adjoint", X)
    np.testing.assert_allclose(found, np.exp(X) * (1 + X))


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


def test_elements_of_tuples_that_nothing_needs_need_no_gradient():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            if c:
                u = R.call_pure_packed("mystery", x, ty_args=R.Tensor((3, 4), "float64"))
                r = (R.exp(x), (u, x))
            else:
                r = (x, (x, x))
            other = r
            a: R.Tensor((3, 4), "float64") = other[0]
            s: R.Tensor((), "float64") = R.sum(a)
            return s

    assert missing_gradients(Module, "main") == []
    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    assert "R.exp" in adjoint.script()


# What random programs found


def test_a_call_whose_argument_has_an_extent_that_is_an_expression():
    @I.ir_module
    class Module:
        @R.function
        def pairs(x: R.Tensor(("m", 2), "float64")) -> R.Tensor(("m * 2", 2), "float64"):
            m = T.int64()
            y: R.Tensor((m * 2, 2), "float64") = R.concat((x, R.sin(x)), axis=0)
            z: R.Tensor((m * 2, 2), "float64") = R.add(y, R.const([0.5, 1.0], "float64"))
            return z

        @R.function
        def main(x: R.Tensor(("n", 4), "float64")):
            n = T.int64()
            cls = Module
            y: R.Tensor((n * 4, 2), "float64") = cls.pairs(R.reshape(x, R.shape([n * 2, 2])))
            s: R.Tensor((), "float64") = R.sum(R.multiply(y, y))
            return s

    check(Module, X)


def test_a_local_function_that_takes_a_variable_from_outside():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            y: R.Tensor((3, 4), "float64") = R.exp(x)

            @R.function
            def outer(a: R.Tensor((), "float64")) -> R.Tensor((3, 4), "float64"):
                z: R.Tensor((3, 4), "float64") = R.multiply(y, a)
                return z

            if c:
                z: R.Tensor((3, 4), "float64") = outer(R.const(2.0, "float64"))
            else:
                z: R.Tensor((3, 4), "float64") = R.sin(x)
            w: R.Tensor((3, 4), "float64") = outer(R.const(3.0, "float64"))
            s: R.Tensor((), "float64") = R.sum(R.multiply(z, w))
            return s

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    del adjoint["main"]  # which TVM compiles only after LambdaLift
    for taken in (True, False):
        _, (found,) = run(adjoint, "main_adjoint", X, np.array(taken))
        y, z, dz = np.exp(X), np.sin(X), np.cos(X)
        wanted = 12 * y * y if taken else 3 * y * (z + dz)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_an_element_of_a_tuple_that_is_used_before_and_behind_a_conditional():
    """ConvertToDataflow replaces it by what the tuple was made of, and does not output that."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            with R.dataflow():
                y = R.exp(x)
                t = (c, y)
                u = t[1]
                R.output(t, u)
            if c:
                z = R.sin(x)
            else:
                z = R.cos(x)
            with R.dataflow():
                w = R.multiply(t[1], z)
                s = R.sum(w)
                R.output(s)
            return s

    check(Module, X, np.array(True))


def test_match_cast_of_an_element_beside_a_conditional():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            parts = R.split(x, 2, axis=1)
            part = R.match_cast(parts[1], R.Tensor((3, 2), "float64"))
            if c:
                y = R.exp(part)
            else:
                y = R.sin(part)
            s = R.sum(y)
            return s

    check(Module, X, np.array(True))


def test_a_conditional_between_checkpoints():
    """It is not written a second time; neither is a match_cast."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((3, 4), "float64"), c: R.Tensor((), "bool")):
            y = R.grad.start_checkpoint(x)
            z = R.exp(y)
            if c:
                e = R.multiply(z, z)
                w = R.sin(e)
            else:
                w = R.multiply(z, y)
            a = R.match_cast(R.multiply(w, z), R.Tensor((3, 4), "float64"))
            b = R.grad.end_checkpoint(R.multiply(a, w))
            s = R.sum(R.tanh(b))
            return s

    def elements(x, taken):
        z = np.exp(x)
        w = np.sin(z * z) if taken else z * x
        return np.tanh(w * z * w)

    adjoint = Gradient("main")(Module)
    is_sound(adjoint)
    del adjoint["main"]  # compiled alone, TVM's memory planning makes it crash
    for taken in (True, False):
        _, (found,) = run(adjoint, "main_adjoint", X / 4, np.array(taken))
        wanted = elements(X / 4 + 1e-30j, taken).imag / 1e-30
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_symbolic_extents_that_only_the_branch_of_a_conditional_uses():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 4), "float64"), y: R.Tensor((4,), "float64"), c: R.Tensor((), "bool")
        ):
            n = T.int64()
            if c:
                z: R.Tensor((n, 4), "float64") = R.broadcast_to(y, R.shape([n, 4]))
            else:
                z: R.Tensor((n, 4), "float64") = R.sin(x)
            s: R.Tensor((), "float64") = R.sum(R.multiply(z, z))
            return s

    assert "ndim=" not in Gradient("main")(Module).script()
    for taken in (True, False):
        check(Module, X, X[0], np.array(taken), at=(0, 1))


def test_the_result_itself_as_intermediate_variable():
    def body(bb, x):
        y = bb.emit(op.exp(x))
        return relax.Tuple([y, bb.emit(op.sum(y))])

    module = build([tensor("x", (3, 4))], body)
    result = module["main"].body.body
    adjoint = Gradient("main", [result], target_index=1)(module)
    is_sound(adjoint)
    _, ((first, second),) = run(adjoint, "main_adjoint", X)
    np.testing.assert_array_equal(first, np.zeros_like(X))
    np.testing.assert_array_equal(second, 1.0)


def test_an_intermediate_variable_of_what_has_no_gradient():
    """What it was computed from is not differentiated."""

    def body(bb, x):
        y = bb.emit(op.call_pure_packed("f", x, ty_args=[x.ty]))
        return op.sum(bb.emit(op.exp(y)))

    module = build([tensor("x", (3, 4))], body)
    (y, *_) = (binding.var for binding in module["main"].body.blocks[0].bindings)
    is_sound(Gradient("main", [y])(module))
