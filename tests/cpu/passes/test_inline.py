"""Inlining of functions with a single call: their symbolic extents become those of the caller."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import is_sound, run
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from versions import SCALAR_PARAMETERS

from relax_grad.cpu.passes.inline import _recursive
from relax_grad.ir.inlining import write_out_calls
from relax_grad.transform import InlineSingleUse

X = np.arange(12, dtype="float32").reshape(3, 4)
PIPELINES = ("default", "relax_grad")


def calls(function: relax.Function) -> list[relax.Call]:
    """Return the calls of module functions in a function, including those in branches."""
    calls_found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            calls_found.append(expr)

    relax.analysis.post_order_visit(function.body, visit)
    return calls_found


def check(module: tvm.IRModule, values, wanted, tensor_functions: int = 0) -> relax.Function:
    """Inline the calls of ``step`` and compare its result under each pipeline; return the
    function."""
    inlined = InlineSingleUse()(module)
    is_sound(inlined)
    step = inlined["step"]
    assert not calls(step)
    assert not relax.analysis.free_symbolic_vars(step)
    assert len(inlined.get_global_vars()) == 1 + tensor_functions
    for pipeline in PIPELINES:
        np.testing.assert_array_equal(run(inlined, "step", *values, pipeline=pipeline), wanted)
        np.testing.assert_array_equal(run(module, "step", *values, pipeline=pipeline), wanted)
    return step


def test_shapes():
    """Symbolic extents in arguments, in products of extents, and in the annotated types of
    bindings."""

    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
            n = T.int64()
            flat = R.reshape(x, R.shape([n * 4]))
            wide: R.Tensor((2, n * 2), "float32") = R.reshape(flat, R.shape([2, n * 2]))
            ones = R.ones(R.shape([n, 4]), "float32")
            return R.add(R.reshape(wide, R.shape([n, 4])), ones)

        @R.function
        def step(x: R.Tensor(("m", 4), "float32")):
            m = T.int64()
            cls = Module
            y = cls.callee(x)
            z: R.Tensor((m, 4), "float32") = R.multiply(y, y)
            return z

    check(Module, [X], (X + 1) ** 2)


def test_scalars():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            numbers = R.arange(R.prim_value(0), R.prim_value(n), R.prim_value(1), dtype="float32")
            return R.multiply(x, R.reshape(numbers, R.shape([n, 1])))

        @R.function
        def step(x: R.Tensor(("m", 4), "float32")):
            m = T.int64()
            cls = Module
            y: R.Tensor((m, 4), "float32") = cls.callee(x)
            return y

    check(Module, [X], X * np.arange(3)[:, None])


@SCALAR_PARAMETERS
def test_arguments_of_tensor_functions():
    """Inlining substitutes the extents that a tensor function takes, and those in the type of its
    result."""

    def rows(x, number):
        return te.compute((number, 4), lambda i, j: x[j] + number.astype("float32"))

    bb = relax.BlockBuilder()
    n, m = (tvm.tirx.Var(name, "int64") for name in "nm")
    x, w = (
        relax.Var("x", relax.TensorType((n, 4), "float32")),
        relax.Var("w", relax.TensorType((4,), "float32")),
    )
    with bb.function("callee", [x, w], private=True):
        with bb.dataflow():
            y = bb.emit_te(rows, w, n)  # the extent is in no tensor argument
            y = bb.emit_output(relax.op.add(x, y))
        bb.emit_func_output(y)
    callee = bb.get().get_global_var("callee")
    x, w = (
        relax.Var("x", relax.TensorType((m, 4), "float32")),
        relax.Var("w", relax.TensorType((4,), "float32")),
    )
    with bb.function("step", [x, w]):
        with bb.dataflow():
            y = bb.emit_output(relax.Call(callee, [x, w]))
        bb.emit_func_output(y)
    check(bb.get(), [X, X[1]], X + X[1] + 3, tensor_functions=1)


def test_types_of_packed_calls():
    @tvm_ffi.register_global_func("relax_grad.tests.inline_twice", override=True)
    def twice(x):
        return tvm.runtime.tensor(x.numpy() * 2)

    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            y = R.call_pure_packed(
                "relax_grad.tests.inline_twice", x, ty_args=R.Tensor((n, 4), "float32")
            )
            return R.reshape(y, R.shape([4, n]))

        @R.function
        def step(x: R.Tensor(("m", 4), "float32")):
            m = T.int64()
            cls = Module
            y: R.Tensor((4, m), "float32") = cls.callee(x)
            return y

    check(Module, [X], (X * 2).reshape(4, 3))


def test_branches():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n", 4), "float32"), c: R.Tensor((), "bool")):
            n = T.int64()
            if c:
                y: R.Tensor((n * 4,), "float32") = R.reshape(x, R.shape([n * 4]))
            else:
                y: R.Tensor((n * 4,), "float32") = R.zeros(R.shape([n * 4]), "float32")
            return y

        @R.function
        def step(x: R.Tensor(("m", 4), "float32"), c: R.Tensor((), "bool")):
            m = T.int64()
            cls = Module
            y: R.Tensor((m * 4,), "float32") = cls.callee(x, c)
            return y

    for taken in (True, False):
        inlined = InlineSingleUse()(Module)
        is_sound(inlined)
        assert not calls(inlined["step"])
        wanted = X.reshape(12) * taken
        for pipeline in PIPELINES:
            result = run(inlined, "step", X, np.array(taken), pipeline=pipeline)
            np.testing.assert_array_equal(result, wanted)


def test_local_functions():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()

            @R.function
            def inner(y: R.Tensor((n, 4), "float32")) -> R.Tensor((4, n), "float32"):
                z: R.Tensor((4, n), "float32") = R.reshape(y, R.shape([4, n]))
                return z

            r: R.Tensor((4, n), "float32") = inner(x)
            return r

        @R.function
        def step(x: R.Tensor(("m", 4), "float32")):
            m = T.int64()
            cls = Module
            y: R.Tensor((4, m), "float32") = cls.callee(x)
            return y

    inlined = InlineSingleUse()(Module)
    assert not calls(inlined["step"])
    assert not relax.analysis.free_symbolic_vars(inlined["step"])
    assert relax.analysis.check_well_formed(inlined)


@pytest.mark.parametrize(
    ("extent", "rows"),
    [("4", 4), ("2 * m", 6), ("m // 2", 1), ("m + 1", 4), ("m * m", 9)],
)
def test_extents_of_the_caller(extent, rows):
    """The caller's values replace the callee's variable and the expressions of it."""
    m = tvm.tirx.Var("m", "int64")
    extent = eval(extent, {"m": m})
    bb = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), "float32"))
    w = relax.Var("w", relax.TensorType((n * 2, 2), "float32"))
    with bb.function("callee", [x, w], private=True):
        with bb.dataflow():
            y = bb.emit(relax.op.reshape(x, (n * 2, 2)))
            y = bb.emit_output(relax.op.add(y, w))
        bb.emit_func_output(y)
    callee = bb.get().get_global_var("callee")
    x = relax.Var("x", relax.TensorType((extent, 4), "float32"))
    w = relax.Var("w", relax.TensorType((extent * 2, 2), "float32"))
    other = relax.Var("other", relax.TensorType((m,), "float32"))
    with bb.function("step", [x, w, other]):
        with bb.dataflow():
            y = bb.emit_output(relax.Call(callee, [x, w]))
        bb.emit_func_output(y)
    values = np.ones((rows, 4), "float32"), np.ones((2 * rows, 2), "float32"), np.ones(3, "float32")
    step = check(bb.get(), values, values[1] * 2)
    assert not any(isinstance(b, relax.MatchCast) for b in step.body.blocks[0].bindings)


def test_variables_of_a_tuple():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(
            pair: R.Tuple(R.Tensor(("n", 4), "float32"), R.Tuple(R.Tensor(("k",), "float32"))),
        ):
            n = T.int64()
            k = T.int64()
            x = pair[0]
            y = pair[1][0]
            return R.concat([R.reshape(x, R.shape([n * 4])), R.reshape(y, R.shape([k]))])

        @R.function
        def step(x: R.Tensor(("m", 4), "float32"), y: R.Tensor(("l",), "float32")):
            cls = Module
            z = cls.callee((x, (y,)))
            return z

    check(Module, [X, X[0]], np.concatenate([X.reshape(12), X[0]]))


def test_a_variable_that_a_later_parameter_binds():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("2 * n",), "float32"), y: R.Tensor(("n",), "float32")):
            n = T.int64()
            rows: R.Tensor((2, n), "float32") = R.reshape(x, R.shape([2, n]))
            return R.add(rows, y)

        @R.function
        def step(x: R.Tensor(("2 * m",), "float32"), y: R.Tensor(("m",), "float32")):
            m = T.int64()
            cls = Module
            z: R.Tensor((2, m), "float32") = cls.callee(x, y)
            return z

    check(Module, [X[0], X[1, :2]], X[0].reshape(2, 2) + X[1, :2])


def test_variables_of_a_shape():
    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n * k",), "float32"), shape: R.Shape(["n", "k"])):
            n = T.int64()
            k = T.int64()
            y: R.Tensor((n, k), "float32") = R.reshape(x, shape)
            return R.add(y, R.ones(R.shape([n, k]), "float32"))

        @R.function
        def step(x: R.Tensor(("m * 4",), "float32"), y: R.Tensor(("m",), "float32")):
            m = T.int64()
            cls = Module
            z: R.Tensor((m, 4), "float32") = cls.callee(x, R.shape([m, 4]))
            return z

    check(Module, [X.reshape(12), X[0, :3]], X + 1)


def test_functions_within_functions():
    """Two nested callees use variables of the same name for different extents."""

    @I.ir_module
    class Module:
        @R.function(private=True)
        def inner(x: R.Tensor(("n",), "float32")):
            n = T.int64()
            return R.reshape(x, R.shape([n // 2, 2]))

        @R.function(private=True)
        def outer(x: R.Tensor(("n", 4), "float32")):
            n = T.int64()
            cls = Module
            flat: R.Tensor((n * 4,), "float32") = R.reshape(x, R.shape([n * 4]))
            pairs: R.Tensor((n * 4 // 2, 2), "float32") = cls.inner(flat)
            return R.reshape(pairs, R.shape([2, n * 2]))

        @R.function
        def step(x: R.Tensor(("m", 4), "float32")):
            cls = Module
            y = cls.outer(x)
            return y

    check(Module, [X], X.reshape(2, 6))


def test_extents_that_differ_are_checked():
    """A call whose arguments need a check is not inlined. If it is inlined anyway, a cast does the
    check."""

    @I.ir_module
    class Module:
        @R.function(private=True)
        def callee(x: R.Tensor(("n",), "float32"), y: R.Tensor(("n",), "float32")):
            n = T.int64()
            return R.add(R.reshape(x, R.shape([n])), y)

        @R.function
        def step(x: R.Tensor(("a",), "float32"), y: R.Tensor(("b",), "float32")):
            cls = Module
            z = cls.callee(x, y)
            return z

    assert len(calls(InlineSingleUse()(Module)["step"])) == 1
    callees = {v: f for v, f in Module.functions_items() if v.name_hint == "callee"}
    written = tvm.IRModule({"step": write_out_calls(Module["step"], callees)})
    assert relax.analysis.check_well_formed(written)
    assert any(isinstance(b, relax.MatchCast) for b in written["step"].body.blocks[0].bindings)
    np.testing.assert_array_equal(run(written, "step", X[0], X[1]), X[0] + X[1])


def test_recursive_calls_stay():
    @I.ir_module
    class Module:
        @R.function
        def step(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
            n = T.int64()
            cls = Module
            y: R.Tensor((n,), "float32") = cls.other(R.exp(x))
            return y

        @R.function
        def other(x: R.Tensor(("n",), "float32")) -> R.Tensor(("n",), "float32"):
            n = T.int64()
            cls = Module
            y: R.Tensor((n,), "float32") = cls.step(R.sin(x))
            return y

    functions = dict(Module.functions_items())
    (step,) = (v for v in functions if v.name_hint == "step")
    written = write_out_calls(Module["step"], functions)
    # Each function is inlined once: the second call of `step` would start the cycle again.
    assert [call.op.name_hint for call in calls(written)] in (["other"], ["step"])
    tvm.ir.assert_structural_equal(InlineSingleUse()(Module)["step"], Module[step])


@pytest.mark.parametrize("seed", range(20))
def test_recursive_functions_are_those_that_tvm_finds(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 12))
    names = [tvm.ir.GlobalVar(f"f{i}") for i in range(count)]
    kind = relax.TensorType((2,), "float32")
    functions = {}
    for name in names:
        x = relax.Var("x", kind)
        bindings = [
            relax.VarBinding(relax.Var("y", kind), relax.Call(callee, [x]))
            for callee in names
            if rng.random() < 1.2 / count
        ]
        body = relax.SeqExpr([relax.BindingBlock(bindings)], x)
        functions[name] = relax.Function([x], body, kind)
    groups = relax.analysis.detect_recursion(tvm.IRModule(functions))
    assert _recursive(functions) == {name for group in groups for name in group}


def variables(function: relax.Function) -> list[relax.Var]:
    """Return the parameters and the bound variables of a function."""
    bound = [binding.var for block in function.body.blocks for binding in block.bindings]
    return [*function.params, *bound]


@pytest.mark.parametrize("is_private", [True, False], ids=["private", "public"])
def test_no_variable_belongs_to_two_functions(is_private):
    """A public callee stays, so its own callee is inlined twice: into it and into its caller."""

    @I.ir_module
    class Module:
        @R.function(private=True)
        def inner(x: R.Tensor((3, 4), "float32")) -> R.Tensor((3, 4), "float32"):
            return R.add(x, x)

        @R.function
        def middle(x: R.Tensor((3, 4), "float32")) -> R.Tensor((3, 4), "float32"):
            y: R.Tensor((3, 4), "float32") = Module.inner(x)
            return R.multiply(y, y)

        @R.function
        def step(x: R.Tensor((3, 4), "float32")) -> R.Tensor((3, 4), "float32"):
            y: R.Tensor((3, 4), "float32") = Module.middle(x)
            return R.subtract(y, x)

    module = Module
    if is_private:
        module = tvm.IRModule(dict(Module.functions_items()))
        module["middle"] = module["middle"].without_attr("global_symbol")
    inlined = InlineSingleUse()(module)
    is_sound(inlined)
    functions = [f for f in inlined.functions.values() if isinstance(f, relax.Function)]
    assert len(functions) == (1 if is_private else 2)
    assert not any(calls(function) for function in functions)
    all_variables = [variable for function in functions for variable in variables(function)]
    assert len(all_variables) == len(set(all_variables))
    for pipeline in PIPELINES:
        np.testing.assert_array_equal(run(inlined, "step", X, pipeline=pipeline), 4 * X * X - X)
