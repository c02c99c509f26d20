"""Bad input for every public function: an exception of a documented type within a second, and
nothing changed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
import tvm
from backward_calls import builder_of, own_operators
from programs import build
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op
from tvm.relax.backend.pattern_registry import get_patterns_with_prefix

import relax_grad
from relax_grad import GradientCheckError, GradientError, registry, testing, training, transform
from relax_grad.op import checkpoint, stop_gradient
from relax_grad.testing.samples import sampled_operators

from .bad_calls import bad_calls

X = relax.Var("x", relax.TensorType((3,), "float32"))
ONES = [np.ones(3)]


def module(body=lambda _, x: op.sum(op.exp(x)), dtype="float32"):
    return build([relax.Var("x", relax.TensorType((3,), dtype))], body)


SCALAR = module()
VECTOR = module(lambda _, x: op.exp(x))
NAMESAKES = build(
    [relax.Var("x", X.ty), relax.Var("x", X.ty)], lambda _, x, y: op.sum(op.multiply(x, y))
)
INTEGERS = module(lambda _, x: op.sum(x), "int32")
TO_INTEGER = module(lambda _, x: op.astype(x, "int32"))
UNDEFINED = tvm.IRModule({"main": relax.Function([X], relax.Var("q", X.ty), X.ty)})
NO_RELAX = tvm.IRModule({"main": tirx.PrimFunc([], tirx.Evaluate(0))})
EXTERNAL = tvm.IRModule({"main": relax.ExternFunc("f")})

#: Values that are not modules.
NO_MODULES = [None, "main", 3, SCALAR["main"], object()]

#: Values that name no parameter of main.
NO_PARAMETERS = ["y", 7, -2, 1.5, True, X, {"x": 1}, ["x", "y"], [None]]

#: Values that name no function of the module.
NO_FUNCTIONS = ["other", 3, None, ""]

#: Values that are not an operator's function.
NO_FUNCTION = [None, 3, [], "text"]


def state() -> list:
    """Return the registrations and the other state of the whole process."""
    declared = registry.declarations()
    return [
        declared,
        [Op.get(d.op_name).get_attr(d.attr) for d in declared],
        [registry.classify(name) for name in ("relax.exp", "relax.assert_op", "relax.nn.softplus")],
        sampled_operators(),
        sorted(relax.pipeline.PIPELINE_MAP),
        [pattern.name for pattern in get_patterns_with_prefix("b.")],
        relax_grad.get_num_threads(),
        dict(os.environ),
        tvm.target.Target.current(),
    ]


def check(expected, message: str | None, call) -> None:
    """Assert that a call fails as expected, soon, and without a change of state."""
    before = state()
    start = time.perf_counter()
    with pytest.raises(expected, match=message):
        call()
    assert time.perf_counter() - start < 5  # one second suffices on an idle machine
    assert state() == before


TRANSFORMATIONS = {
    "value_and_grad": relax_grad.value_and_grad,
    "vjp": relax_grad.vjp,
    "jvp": relax_grad.jvp,
    "hvp": relax_grad.hvp,
    "derivatives": lambda mod, func="main", wrt=None: relax_grad.derivatives(
        mod, func, order=2, wrt=wrt
    ),
    "missing_gradients": relax_grad.missing_gradients,
}
each_transformation = pytest.mark.parametrize("name", TRANSFORMATIONS)


@each_transformation
@pytest.mark.parametrize("mod", NO_MODULES, ids=lambda value: type(value).__name__)
def test_other_objects_than_modules_are_refused(name, mod):
    check(TypeError, "must be a tvm.IRModule, but it is", lambda: TRANSFORMATIONS[name](mod))


@each_transformation
@pytest.mark.parametrize("function", NO_FUNCTIONS)
def test_unknown_function_names_are_refused(name, function):
    message = "the module has no function .*; it has main"
    check(ValueError, message, lambda: TRANSFORMATIONS[name](SCALAR, function))


@each_transformation
@pytest.mark.parametrize("mod", [NO_RELAX, EXTERNAL], ids=["PrimFunc", "ExternFunc"])
def test_functions_outside_of_relax_are_refused(name, mod):
    check(TypeError, "main must be a Relax function", lambda: TRANSFORMATIONS[name](mod))


@each_transformation
def test_a_function_that_is_not_well_formed(name):
    message = r"main is not well-formed: it uses q, .*; TVM: \w+"
    check(ValueError, message, lambda: TRANSFORMATIONS[name](UNDEFINED))


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "jvp", "hvp", "derivatives"])
@pytest.mark.parametrize("wrt", NO_PARAMETERS, ids=repr)
def test_unknown_parameters_are_refused(name, wrt):
    message = "wrt: main has no parameter (.*; there are x|x; it is a different variable)"
    check(ValueError, message, lambda: TRANSFORMATIONS[name](SCALAR, "main", wrt))


@pytest.mark.parametrize("name", ["value_and_grad", "vjp", "jvp", "hvp", "derivatives"])
@pytest.mark.parametrize("wrt", ["x", 0, None])
def test_functions_without_floats_are_refused(name, wrt):
    with pytest.raises((ValueError, GradientError)):
        TRANSFORMATIONS[name](INTEGERS, "main", wrt)


@pytest.mark.parametrize("order", [0, -1, "2", 1.5, True, None])
def test_invalid_orders_are_refused(order):
    is_integer = type(order) is int
    error = ValueError if is_integer else TypeError
    domain = "a positive integer" if is_integer else "an integer"
    check(error, f"order must be {domain}", lambda: relax_grad.derivatives(SCALAR, order=order))


CASES = {
    "wrt twice": (
        ValueError,
        "wrt: x appears more than once",
        lambda: relax_grad.value_and_grad(SCALAR, wrt=["x", 0]),
    ),
    "wrt of another function": (
        ValueError,
        "it is a different variable with the name x, so give the name or a position",
        lambda: relax_grad.value_and_grad(SCALAR, wrt=X),
    ),
    "wrt of a name of two": (
        ValueError,
        "wrt: 'x' is ambiguous, as 2 parameters of main have this name; give a position",
        lambda: relax_grad.vjp(NAMESAKES, wrt="x"),
    ),
    "no scalar": (
        GradientError,
        "must be a scalar or have one element, .* reduce it, .*; relax_grad.vjp",
        lambda: relax_grad.value_and_grad(VECTOR),
    ),
    "no scalar, hvp": (
        GradientError,
        "must be a scalar or have one element",
        lambda: relax_grad.hvp(VECTOR),
    ),
    "no floats": (
        GradientError,
        "must be one floating-point tensor, .*; relax_grad.vjp",
        lambda: relax_grad.value_and_grad(TO_INTEGER),
    ),
    "no floats, vjp": (
        GradientError,
        "must hold floating-point tensors",
        lambda: relax_grad.vjp(TO_INTEGER),
    ),
    "target_index too large": (
        ValueError,
        "2 is out of range in the result of main",
        lambda: relax_grad.value_and_grad(SCALAR, target_index=2),
    ),
    "target_index of text": (
        TypeError,
        "target_index must be an integer",
        lambda: relax_grad.value_and_grad(SCALAR, target_index="a"),
    ),
    "target_index of a boolean": (
        TypeError,
        "target_index must be an integer",
        lambda: relax_grad.value_and_grad(SCALAR, target_index=True),
    ),
    "allow_zero of an unknown operator": (
        ValueError,
        "no operator named relax.nothing",
        lambda: relax_grad.value_and_grad(SCALAR, allow_zero=["relax.nothing"]),
    ),
    "allow_zero of a number": (
        TypeError,
        "allow_zero must be names",
        lambda: relax_grad.value_and_grad(SCALAR, allow_zero=3),
    ),
    "allow_zero of numbers": (
        ValueError,
        "no operator named 3",
        lambda: relax_grad.value_and_grad(SCALAR, allow_zero=[3]),
    ),
    "allow_zero of lists": (
        ValueError,
        r"no operator named \[1\]",
        lambda: relax_grad.value_and_grad(SCALAR, allow_zero=[[1]]),
    ),
    "cotangent of another shape": (
        ValueError,
        r"cotangents\[0\] has the type .*\(4,\)",
        lambda: transform.Gradient("main", cotangents=np.ones(4, "float32"))(SCALAR),
    ),
    "cotangent of another dtype": (
        ValueError,
        r"cotangents\[0\] has the type .*int32",
        lambda: transform.Gradient("main", cotangents=np.ones((), "int32"))(SCALAR),
    ),
    "cotangent of another kind": (
        TypeError,
        r"cotangents\[0\] must be the name",
        lambda: transform.Gradient("main", cotangents=object())(SCALAR),
    ),
    "the name of the adjoint is taken": (
        ValueError,
        "has a function main_adjoint already",
        lambda: relax_grad.value_and_grad(relax_grad.value_and_grad(SCALAR)),
    ),
    "stop_gradient of a number": (
        TypeError,
        "data must be a Relax expression",
        lambda: stop_gradient(3),
    ),
    "checkpoint of no function": (
        TypeError,
        "function must be callable",
        lambda: checkpoint(3, X),
    ),
    "the pipeline without a target": (
        ValueError,
        "needs a target",
        lambda: relax_grad.pipeline()(SCALAR),
    ),
    "threads": (TypeError, "must be an int", lambda: relax_grad.set_num_threads("two")),
    "an operator that is not classified": (
        ValueError,
        "no operator named",
        lambda: registry.classify("relax.nothing"),
    ),
    "SetupTrainer without types": (
        TypeError,
        "loss_args must be a list of the types",
        lambda: training.SetupTrainer(None, None, None),
    ),
    "PyTorch's function of another shape": (
        GradientCheckError,
        r"output 0 has the shape \(3,\), but PyTorch's has the shape \(2,\)",
        lambda: testing.check_against_torch("relax.exp", ONES, lambda torch, x: torch.exp(x)[:2]),
    ),
    "PyTorch's function of another type": (
        TypeError,
        "torch_function must return tensors",
        lambda: testing.check_against_torch("relax.exp", ONES, lambda torch, x: 3),
    ),
    "no function of PyTorch": (
        TypeError,
        "torch_function must be callable",
        lambda: testing.check_against_torch("relax.exp", ONES, None),
    ),
    "no cases for PyTorch": (
        TypeError,
        "must be of type TorchCase",
        lambda: testing.check_many_against_torch([3]),
    ),
    "no list of cases for PyTorch": (
        TypeError,
        "cases must be a list",
        lambda: testing.check_many_against_torch(None),
    ),
    "a tolerance for PyTorch": (
        TypeError,
        "rtol must be a number",
        lambda: testing.check_many_against_torch([], rtol="x"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_input(name):
    if "PyTorch" in name:
        pytest.importorskip("torch")
    check(*CASES[name])


@pytest.mark.parametrize("function", NO_FUNCTION, ids=repr)
@pytest.mark.parametrize(
    "register",
    [
        registry.register_gradient,
        registry.register_legalize,
        registry.register_infer_layout,
        lambda op_name: registry.register_infer_type(op_name, corrects="nothing"),
    ],
    ids=["gradient", "legalize", "infer_layout", "infer_type"],
)
def test_a_rule_that_is_not_a_function_is_refused(register, function):
    check(TypeError, "must be a function", lambda: register("relax.assert_op")(function))


@pytest.mark.parametrize("op_name", ["relax.nothing", "conv2d", "", None, 3])
@pytest.mark.parametrize(
    "register",
    [registry.register_gradient, registry.register_legalize],
    ids=["gradient", "legalize"],
)
def test_no_operator(register, op_name):
    check(ValueError, "this TVM has no operator", lambda: register(op_name)(lambda *_: []))


#: Settings of check_gradients that are refused.
SETTINGS = {
    "through": ({"through": "jax"}, ValueError, "through must be one of"),
    "order 0": ({"order": 0}, ValueError, "order must be a positive integer"),
    "order of text": ({"order": "a"}, TypeError, "order must be an integer"),
    "target": ({"target": "nonsense"}, ValueError, "nonsense"),
    "wrt": ({"wrt": [3]}, ValueError, "wrt names x3"),
    "wrt of text": ({"wrt": ["y"]}, ValueError, "wrt names y"),
    "order of a boolean": ({"order": True}, TypeError, "order must be an integer"),
    "dtypes": ({"dtypes": ["q"]}, ValueError, "dtypes must be among float64, .* one is 'q'"),
    "dtypes of text": ({"dtypes": "q"}, ValueError, "dtypes must be among float64, .* one is 'q'"),
    "dtypes of a number": ({"dtypes": 3}, TypeError, "dtypes must be names of dtypes"),
    "rtol of text": ({"rtol": "x"}, TypeError, "rtol must be a number, but it is 'x'"),
    "atol of a list": ({"atol": [1.0]}, TypeError, "atol must be a number"),
    "negative rtol": ({"rtol": -1.0}, ValueError, "rtol must not be negative"),
    "symbolic name": ({"symbolic": {0: "n"}}, TypeError, "symbolic must give names to axes"),
    "symbolic text": ({"symbolic": "n"}, TypeError, "symbolic must give names to axes"),
    "symbolic list": ({"symbolic": [1]}, TypeError, "symbolic must give names to axes"),
    "symbolic input by name": ({"symbolic": {"x0": {0: "n"}}}, TypeError, "symbolic must give"),
    "symbolic axis of a number": ({"symbolic": {0: {0: 3}}}, TypeError, "symbolic must give"),
    "attribute": ({"nothing": 2}, TypeError, "nothing"),
    "symbolic input": ({"symbolic": {3: {0: "n"}}}, ValueError, None),
    "symbolic axis": ({"symbolic": {0: {5: "n"}}}, ValueError, None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_check(name):
    settings, error, message = SETTINGS[name]
    check(error, message, lambda: testing.check_gradients(op.exp, ONES, **settings))


INPUTS = {
    "none": (None, TypeError, "inputs must be a list"),
    "an array": (np.ones(3), TypeError, "inputs must be a list"),
    "too few": ([], TypeError, "missing 1 required positional argument"),
    "too many": ([*ONES, *ONES], TypeError, "takes 1 positional argument"),
    "text": (["a"], TypeError, "to be a tensor"),
    "integers": ([np.ones(3, "int32")], TypeError, "float dtype"),
    "complex numbers": ([np.ones(3, complex)], ValueError, "dtype"),
    "objects": ([np.array([object()])], ValueError, "dtype"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_check(name):
    inputs, error, message = INPUTS[name]
    check(error, message, lambda: testing.check_gradients(op.exp, inputs))


RESULTS = {
    "None": lambda x: None,
    "a number": lambda x: 3.0,
    "a shape": op.shape_of,
    "integers": lambda x: op.astype(x, "int32"),
    "a tuple of integers": lambda x: relax.Tuple([op.argmax(x)]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_checks_of_functions_without_floating_results_are_refused(name):
    message = "the function must return floating-point tensors"
    check(TypeError, message, lambda: testing.check_gradients(RESULTS[name], ONES))


@pytest.mark.parametrize("function", [None, 3, []], ids=repr)
def test_checks_of_other_objects_are_refused(function):
    check(TypeError, "name of an operator or a", lambda: testing.check_gradients(function, ONES))


@pytest.mark.parametrize("target", ["nonsense", 5, {"kind": "nonsense"}, {"mcpu": "haswell"}])
@pytest.mark.parametrize(
    "use",
    [
        lambda target: transform.DispatchKernels(target)(SCALAR),
        lambda target: transform.ScheduleLoops(target)(SCALAR),
        lambda target: relax_grad.pipeline(target)(SCALAR),
        relax_grad.target.CPU.of,
    ],
    ids=["DispatchKernels", "ScheduleLoops", "pipeline", "CPU"],
)
def test_invalid_targets_are_refused(use, target):
    check((ValueError, TypeError), None, lambda: use(target))


PASSES = {
    "Gradient": lambda: transform.Gradient("main"),
    "DispatchKernels": lambda: transform.DispatchKernels("llvm"),
    "ScheduleLoops": lambda: transform.ScheduleLoops("llvm"),
    "pipeline": lambda: relax_grad.pipeline("llvm"),
}


@pytest.mark.parametrize("mod", [None, "module", 3], ids=repr)
@pytest.mark.parametrize("name", PASSES)
def test_passes_refuse_other_objects_than_modules(name, mod):
    """TVM itself refuses these."""
    check((TypeError, tvm.error.InternalError), None, lambda: PASSES[name]()(mod))


BAD_CALLS = {bad.name: bad for bad in bad_calls()}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name):
    bad = BAD_CALLS[name]
    check(bad.error, bad.message, bad.call)


@pytest.mark.parametrize("name", own_operators())
def test_builder_of_a_backward_operator(name):
    """TVM takes any object for a pointer to an expression. Some of these objects have ended the
    process."""
    build = builder_of(name)
    parameters = inspect.signature(build).parameters.values()
    count = sum(p.default is p.empty and p.kind != p.VAR_KEYWORD for p in parameters)
    check(TypeError, "missing", build)
    for value in (None, 3, "text", [None], np.ones(3), relax.Tuple([])):

        def call(value=value):
            relax.BlockBuilder().normalize(build(*[value] * count))

        check((TypeError, ValueError), None, call)


#: Exceptions: users do not call these classes.
NO_CALLS = {
    "relax_grad.transform.Rematerialize",  # it takes no argument
    "relax_grad.GradientError",
    "relax_grad.GradientCheckError",
    *(
        f"relax_grad.errors.{name}"
        for name in (
            *("GradientError", "GradientCheckError", "NotWellFormedError", "ScheduleWarning"),
            *("BrokenTrainerError", "UnsupportedOperatorError"),
        )
    ),
    # The values that static_plan returns.
    *(f"relax_grad.static.plan.{name}" for name in ("Plan", "Function", "Call", "Move", "Tensor")),
    "relax_grad.frontend.onnx.UnsupportedOperatorError",
    "relax_grad.frontend.torch.UnsupportedOperatorError",
}


def public_callables() -> set[str]:
    """Return the names of the functions and classes that the modules of docs/api make public."""
    pages = sorted(Path(__file__).parents[1].joinpath("docs", "api").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    names = set(re.findall(r"auto(?:function|class):: (\S+)", text))
    if importlib.util.find_spec("torch") is None:
        text = re.sub(r"auto\w+:: relax_grad\.frontend\.torch\S*", "", text)
        names = {name for name in names if not name.startswith("relax_grad.frontend.torch.")}
    for module, members in re.findall(r"automodule:: (\S+)\n(?:   :members: (.*))?", text):
        public = members.split(", ") if members else importlib.import_module(module).__all__
        names |= {f"{module}.{name}" for name in public}
    return {name for name in names if callable(resolve(name))}


def resolve(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_public_callable_has_a_case():
    called = {bad.function for bad in BAD_CALLS.values()} | NO_CALLS
    assert public_callables() - called == set(), "add bad calls to tests/bad_calls/"
    assert len(BAD_CALLS) > 250
