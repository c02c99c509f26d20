"""Invalid calls of public functions, keyed by the function's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import tvm
from programs import build
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad import backend, cli, coverage, registry, testing, training
from relax_grad import transform as passes
from relax_grad.cpu import dispatch, target
from relax_grad.op import checkpoint, stop_gradient
from relax_grad.testing import samples


@dataclass(frozen=True)
class BadCall:
    """A call that must fail, and the expected error."""

    function: str
    what: str
    call: Callable[[], object]
    error: type | tuple[type, ...]
    message: str | None

    @property
    def name(self) -> str:
        return f"{self.function}: {self.what}"


X = relax.Var("x", relax.TensorType((3,), "float32"))
ONES = [np.ones(3)]
MODULE = build([relax.Var("x", relax.TensorType((3,), "float32"))], lambda _, x: op.sum(op.exp(x)))

#: Values that are no string, no module and no function.
OTHERS = {"None": None, "a number": 3, "a list": [None], "a tensor": X, "an array": np.ones(3)}


def _function(body: relax.Expr, result: relax.Type = X.ty, *values: relax.Expr) -> relax.Function:
    """Return a public function that binds one variable to each value, and returns ``body`` or that variable."""
    bindings = []
    for value in values:
        y = bindings[0].var if bindings else relax.Var("y", value.ty)
        bindings.append(relax.VarBinding(y, value))
    blocks = [relax.BindingBlock(bindings)] if bindings else []
    body = relax.SeqExpr(blocks, bindings[0].var if body is None else body)
    return relax.Function([X], body, result).with_attr("global_symbol", "main")


def _typed(call: relax.Call) -> relax.Call:
    return relax.BlockBuilder().normalize(call)


def _free_variable() -> relax.Function:
    return _function(relax.Var("q", X.ty))


def _bound_twice() -> relax.Function:
    return _function(None, X.ty, _typed(op.exp(X)), _typed(op.sin(X)))


def _twice_a_parameter() -> relax.Function:
    call = _typed(op.exp(X))
    bound = relax.BindingBlock([relax.VarBinding(y := relax.Var("y", X.ty), call)])
    return relax.Function([X, X], relax.SeqExpr([bound], y), X.ty)


def _parameter_bound_again() -> relax.Function:
    bound = relax.BindingBlock([relax.VarBinding(X, _typed(op.exp(X)))])
    return relax.Function([X], relax.SeqExpr([bound], X), X.ty)


def _missing_callee() -> relax.Function:
    call = relax.Call(tvm.ir.GlobalVar("nowhere"), [X], ty_args=[X.ty])
    relax.expr._update_type(call, X.ty)
    return _function(None, X.ty, call)


def _unknown_extent() -> relax.Function:
    """Return a function whose body uses an extent that no parameter defines."""
    zeros = op.zeros(relax.ShapeExpr([tirx.Var("m", "int64")]), "float32")
    return _function(None, relax.TensorType(None, "float32", ndim=1), _typed(zeros))


#: Functions that are not well formed.
MALFORMED = {
    "a free variable": _free_variable,
    "a variable bound twice": _bound_twice,
    "a parameter twice": _twice_a_parameter,
    "a parameter bound again": _parameter_bound_again,
    "a call of a function that is missing": _missing_callee,
    "an extent that no parameter gives": _unknown_extent,
}


def bad_calls() -> Iterator[BadCall]:
    """Yield the invalid calls of all functions."""
    yield from _without_arguments()
    yield from _with_unknown_arguments()
    yield from _of_malformed_modules()
    yield from _of_no_text()
    yield from _others()


#: Functions without parameters.
_NOTHING = {
    "relax_grad.get_num_threads": relax_grad.get_num_threads,
    "relax_grad.install": relax_grad.install,
    "relax_grad.uninstall": relax_grad.uninstall,
    "relax_grad.target.host": target.host,
    "relax_grad.cpu.dispatch.operators_with_kernels": dispatch.operators_with_kernels,
    "relax_grad.registry.declarations": registry.declarations,
    "relax_grad.registry.install": registry.install,
    "relax_grad.registry.operators": registry.operators,
    "relax_grad.coverage.coverage": coverage.coverage,
    "relax_grad.testing.samples.sampled_operators": samples.sampled_operators,
    "relax_grad.transform.DivideSlices": passes.DivideSlices,
    "relax_grad.transform.FoldConstants": passes.FoldConstants,
    "relax_grad.transform.InlineSingleUse": passes.InlineSingleUse,
    "relax_grad.transform.JoinSlices": passes.JoinSlices,
    "relax_grad.transform.LiftBranches": passes.LiftBranches,
    "relax_grad.transform.ReorderForPeakMemory": passes.ReorderForPeakMemory,
    "relax_grad.transform.ShareStorage": passes.ShareStorage,
}


def _without_arguments() -> Iterator[BadCall]:
    for name, function in _NOTHING.items():
        for what, value in OTHERS.items():
            yield BadCall(
                name,
                what,
                lambda f=function, v=value: f(v),
                TypeError,
                "takes (0|no) (positional )?arguments",
            )


#: Functions and classes with parameters.
_SOMETHING = {
    "relax_grad.register_gradient": relax_grad.register_gradient,
    "relax_grad.register_legalize": relax_grad.register_legalize,
    "relax_grad.value_and_grad": relax_grad.value_and_grad,
    "relax_grad.vjp": relax_grad.vjp,
    "relax_grad.jvp": relax_grad.jvp,
    "relax_grad.hvp": relax_grad.hvp,
    "relax_grad.derivatives": relax_grad.derivatives,
    "relax_grad.pipeline": relax_grad.pipeline,
    "relax_grad.set_num_threads": relax_grad.set_num_threads,
    "relax_grad.missing_gradients": relax_grad.missing_gradients,
    "relax_grad.MissingGradient": relax_grad.MissingGradient,
    "relax_grad.transform.Gradient": passes.Gradient,
    "relax_grad.transform.DispatchKernels": passes.DispatchKernels,
    "relax_grad.transform.FuseSiblings": passes.FuseSiblings,
    "relax_grad.transform.ScheduleLoops": passes.ScheduleLoops,
    "relax_grad.target.CPU": target.CPU,
    "relax_grad.training.SetupTrainer": training.SetupTrainer,
    "relax_grad.training.append_loss": training.append_loss,
    "relax_grad.op.stop_gradient": stop_gradient,
    "relax_grad.registry.Classification": registry.Classification,
    "relax_grad.registry.Declaration": registry.Declaration,
    "relax_grad.registry.classify": registry.classify,
    "relax_grad.registry.register_infer_layout": registry.register_infer_layout,
    "relax_grad.registry.register_infer_type": registry.register_infer_type,
    "relax_grad.registry.register_nondifferentiable": registry.register_nondifferentiable,
    "relax_grad.coverage.OperatorCoverage": coverage.OperatorCoverage,
    "relax_grad.coverage.differentiable_arguments": coverage.differentiable_arguments,
    "relax_grad.testing.GradientReport": testing.GradientReport,
    "relax_grad.testing.check_against_torch": testing.check_against_torch,
    "relax_grad.testing.check_many_against_torch": testing.check_many_against_torch,
    "relax_grad.testing.TorchCase": testing.TorchCase,
    "relax_grad.testing.samples.Sample": samples.Sample,
    "relax_grad.testing.samples.register_samples": samples.register_samples,
    "relax_grad.testing.samples.samples": samples.samples,
    "relax_grad.backend.BackwardCall": backend.BackwardCall,
    "relax_grad.backend.register_backward_patterns": backend.register_backward_patterns,
    "relax_grad.backend.backward_patterns": backend.backward_patterns,
    "relax_grad.backend.make_backward_pattern": backend.make_backward_pattern,
}


def _with_unknown_arguments() -> Iterator[BadCall]:
    for name, function in _SOMETHING.items():
        yield BadCall(
            name,
            "an unknown argument",
            lambda f=function: f(nothing=1),
            TypeError,
            "nothing|missing",
        )


_ON_MODULES = {
    "relax_grad.value_and_grad": relax_grad.value_and_grad,
    "relax_grad.vjp": relax_grad.vjp,
    "relax_grad.jvp": relax_grad.jvp,
    "relax_grad.hvp": relax_grad.hvp,
    "relax_grad.derivatives": lambda mod: relax_grad.derivatives(mod, order=2),
    "relax_grad.missing_gradients": lambda mod: relax_grad.missing_gradients(mod, "main"),
    "relax_grad.transform.Gradient": lambda mod: passes.Gradient("main")(mod),
    "relax_grad.pipeline": lambda mod: relax_grad.pipeline("llvm")(mod),
}


def _of_malformed_modules() -> Iterator[BadCall]:
    for what, function in MALFORMED.items():
        for name, use in _ON_MODULES.items():

            def call(use=use, function=function):
                return use(tvm.IRModule({"main": function()}))

            yield BadCall(name, what, call, ValueError, "main is not well-formed: it (uses|binds)")


#: Functions that take the name of an operator or of another object.
_ON_NAMES = {
    "relax_grad.registry.classify": registry.classify,
    "relax_grad.registry.register_nondifferentiable": lambda name: (
        registry.register_nondifferentiable(name, "nothing")
    ),
    "relax_grad.registry.register_infer_layout": lambda name: registry.register_infer_layout(name)(
        print
    ),
    "relax_grad.registry.register_infer_type": lambda name: registry.register_infer_type(
        name, corrects="nothing"
    )(print),
    "relax_grad.coverage.differentiable_arguments": coverage.differentiable_arguments,
    "relax_grad.testing.check_gradients": lambda name: testing.check_gradients(name, ONES),
    "relax_grad.testing.samples.samples": samples.samples,
    "relax_grad.backend.make_backward_pattern": backend.make_backward_pattern,
    "relax_grad.backend.backward_patterns": lambda name: backend.backward_patterns("b", [name]),
    "relax_grad.backend.register_backward_patterns": lambda name: (
        backend.register_backward_patterns("b", [name])
    ),
}


def _of_no_text() -> Iterator[BadCall]:
    for name, use in _ON_NAMES.items():
        for what, value in {**OTHERS, "an unknown name": "relax.nothing"}.items():
            yield BadCall(
                name, what, lambda u=use, v=value: u(v), (TypeError, ValueError), "oper|name"
            )


def _others() -> Iterator[BadCall]:
    def bad(function, what, call, error, message):
        return BadCall(f"relax_grad.{function}", what, call, error, message)

    for what, value in OTHERS.items():
        if what != "None":
            yield bad(
                "transform.DispatchKernels",
                f"winograd_tile, {what}",
                lambda v=value: passes.DispatchKernels("llvm", v),
                ValueError,
                "winograd_tile",
            )
            yield bad(
                "pipeline",
                f"winograd_tile, {what}",
                lambda v=value: relax_grad.pipeline("llvm", v),
                ValueError,
                "winograd_tile",
            )
        yield bad(
            "backend.backward_patterns",
            f"backend, {what}",
            lambda v=value: backend.backward_patterns(v),
            (TypeError, ValueError),
            "backend",
        )
        yield bad(
            "backend.BackwardCall",
            what,
            lambda v=value: backend.BackwardCall.of(v),
            (TypeError, ValueError),
            "call",
        )
        if what != "None":
            yield bad(
                "cache", what, lambda v=value: relax_grad.cache(v), TypeError, "directory must be"
            )
        if what not in ("None", "a number"):
            yield bad(
                "cache",
                f"max_bytes, {what}",
                lambda v=value: relax_grad.cache(None, v),
                TypeError,
                "max_bytes must be an integer",
            )
        if what != "a tensor":
            yield bad(
                "op.stop_gradient",
                what,
                lambda v=value: stop_gradient(v),
                TypeError,
                "data must be",
            )
        yield bad(
            "op.checkpoint", what, lambda v=value: checkpoint(v, X), TypeError, "must be callable"
        )
        if what != "None":
            yield bad(
                "set_num_threads",
                what,
                lambda v=[] if what == "a number" else value: relax_grad.set_num_threads(v),
                TypeError,
                "number must be an int",
            )
        yield bad(
            "transform.Gradient",
            what,
            lambda v=value: passes.Gradient(v)(MODULE),
            ValueError,
            "main",
        )
        yield bad(
            "training.append_loss",
            what,
            lambda v=value: training.append_loss(MODULE["main"], v),
            TypeError,
            "loss",
        )
        yield bad(
            "training.SetupTrainer",
            what,
            lambda v=value: training.SetupTrainer(None, None, v),
            TypeError,
            "loss_args must be",
        )
        yield bad(
            "testing.check_gradients",
            f"attribute, {what}",
            lambda v=value: testing.check_gradients(op.exp, ONES, attrs=v),
            (TypeError, ValueError),
            ".",
        )
        yield bad(
            "testing.samples.register_samples",
            what,
            lambda v=value: samples.register_samples(v)(lambda rng: []),
            TypeError,
            "op must be the name",
        )
        if what != "a tensor":
            yield bad(
                "testing.samples.register_samples",
                f"{what} for a generator",
                lambda v=value: samples.register_samples("relax.assert_op")(v),
                (TypeError, ValueError),
                "relax.assert_op must be a function",
            )
    for what, value in {**OTHERS, "a class": training.SetupTrainer}.items():
        loss, optimizer = relax.training.loss.MSELoss(), relax.training.optimizer.SGD(0.1)
        yield bad(
            "training.SetupTrainer",
            f"loss, {what}",
            lambda v=value, o=optimizer: training.SetupTrainer(v, o, [X.ty, X.ty]),
            TypeError,
            "loss must be a relax.training.loss.Loss",
        )
        yield bad(
            "training.SetupTrainer",
            f"optimizer, {what}",
            lambda v=value, o=loss: training.SetupTrainer(o, v, [X.ty, X.ty]),
            TypeError,
            "optimizer must be a relax.training.optimizer.Optimizer",
        )
    for name in ("num_backbone_outputs", "num_states"):
        for error, value in ((ValueError, -1), (TypeError, "1"), (TypeError, True)):
            yield bad(
                "training.append_loss",
                f"{name} {value!r}",
                lambda n=name, v=value: training.append_loss(
                    MODULE["main"], MODULE["main"], **{n: v}
                ),
                error,
                f"{name} must",
            )
    for what, value in OTHERS.items():
        yield bad(
            "backend.BackwardCall",
            f"function, {what}",
            lambda v=value: backend.BackwardCall.of_function(v),
            TypeError,
            "function must be a Relax function",
        )
        if what != "a tensor":
            yield bad(
                "op.checkpoint",
                f"{what} for an input",
                lambda v=value: checkpoint(op.exp, X, v),
                TypeError,
                r"inputs\[1\] must be a Relax expression",
            )
            yield bad(
                "op.checkpoint",
                f"{what} returned",
                lambda v=value: checkpoint(lambda y: v, X),
                TypeError,
                "the result of function must be a Relax expression",
            )
    for what, value in {"a number": 3, "a module": MODULE, "a shape": op.shape_of(X)}.items():
        yield bad(
            "transform.Gradient",
            f"require_grads, {what}",
            lambda v=value: passes.Gradient("main", require_grads=v),
            TypeError,
            "require_grads must be variables or names",
        )
    yield bad(
        "transform.Gradient",
        "another variable of the same name",
        lambda: passes.Gradient("main", require_grads=X)(MODULE),
        ValueError,
        "x is no variable of main, but another one named x",
    )
    yield bad(
        "transform.Gradient",
        "a cotangent that is no float",
        lambda: passes.Gradient("main", cotangents=10**400)(MODULE),
        ValueError,
        r"cotangents\[0\] is an integer that no float32 comes near",
    )
    for cores in (-1, -8):
        yield bad(
            "target.CPU.of",
            f"num-cores {cores}",
            lambda n=cores: target.CPU.of({"kind": "llvm", "num-cores": n}),
            ValueError,
            "num-cores of the target must be positive",
        )
    yield bad(
        "testing.samples.register_samples",
        "an operator that has samples",
        lambda: samples.register_samples("relax.exp")(lambda rng: []),
        ValueError,
        "relax.exp has samples already",
    )
    yield bad(
        "registry.register_nondifferentiable",
        "an operator that has a rule",
        lambda: registry.register_nondifferentiable("relax.nn.softplus", "nothing"),
        ValueError,
        "of relax.nn.softplus is declared twice",
    )
    yield bad(
        "cache",
        "a size below 0",
        lambda: relax_grad.cache(None, -1),
        ValueError,
        "max_bytes must not be negative",
    )
    yield bad(
        "cache",
        "a file",
        lambda: relax_grad.cache(__file__),
        ValueError,
        "is a file",
    )
    for number in (0, -1, 10**6, 2**70):
        yield bad(
            "set_num_threads",
            str(number),
            lambda n=number: relax_grad.set_num_threads(n),
            ValueError,
            "number must be from 1 to",
        )
    for argv in (
        ["nothing"],
        ["check", "relax.nothing"],
        ["check", "--order", "none"],
        ["check", "--nothing"],
        ["coverage", "--nothing"],
        ["doctor", "--nothing"],
        [],
    ):
        yield BadCall(
            "relax_grad.cli.main", repr(argv), lambda a=argv: cli.main(a), SystemExit, None
        )
