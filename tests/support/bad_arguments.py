"""Calls of public functions with one invalid argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bad_call import MODULE, ONES, OTHERS, SQUARE, BadCall, X
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad import backend, cli, registry, testing, training
from relax_grad import transform as passes
from relax_grad.cpu import target
from relax_grad.frontend.onnx import from_model
from relax_grad.op import checkpoint, stop_gradient
from relax_grad.testing import samples


def bad_arguments() -> Iterator[BadCall]:
    """Yield calls with one invalid argument."""
    yield from _of_differentiation()
    yield from _of_compilation()
    yield from _of_registration()
    yield from _of_training()
    yield from _of_testing()


def _bad(
    function: str,
    what: str,
    call: Callable[[], object],
    error: type | tuple[type, ...],
    message: str,
) -> BadCall:
    """Return a call of a function of ``relax_grad``."""
    return BadCall(f"relax_grad.{function}", what, call, error, message)


def _of_differentiation() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        yield _bad(
            "tir.vjp",
            what,
            lambda v=value: relax_grad.tir.vjp(v),
            TypeError,
            "must be a tensor function",
        )
        if what == "an array":
            yield _bad(
                "tir.vjp",
                f"wrt, {what}",
                lambda v=value: relax_grad.tir.vjp(SQUARE, v),
                TypeError,
                "wrt must be",
            )
        if what != "a tensor":
            yield _bad(
                "op.stop_gradient",
                what,
                lambda v=value: stop_gradient(v),
                TypeError,
                "data must be",
            )
        yield _bad(
            "op.checkpoint", what, lambda v=value: checkpoint(v, X), TypeError, "must be callable"
        )
        yield _bad(
            "transform.Gradient",
            what,
            lambda v=value: passes.Gradient(v)(MODULE),
            ValueError,
            "main",
        )
        if what != "a tensor":
            yield _bad(
                "op.checkpoint",
                f"{what} for an input",
                lambda v=value: checkpoint(op.exp, X, v),
                TypeError,
                r"inputs\[1\] must be a Relax expression",
            )
            yield _bad(
                "op.checkpoint",
                f"{what} returned",
                lambda v=value: checkpoint(lambda y: v, X),
                TypeError,
                "the result of function must be a Relax expression",
            )
    for what, value in {"a number": 3, "a module": MODULE, "a shape": op.shape_of(X)}.items():
        yield _bad(
            "transform.Gradient",
            f"require_grads, {what}",
            lambda v=value: passes.Gradient("main", require_grads=v),
            TypeError,
            "require_grads must be variables or names",
        )
    yield _bad(
        "transform.Gradient",
        "another variable of the same name",
        lambda: passes.Gradient("main", require_grads=X)(MODULE),
        ValueError,
        "x is not a variable of main; it is a different variable with the name x",
    )
    yield _bad(
        "transform.Gradient",
        "a cotangent that is no float",
        lambda: passes.Gradient("main", cotangents=10**400)(MODULE),
        ValueError,
        r"cotangents\[0\] is an integer outside the range of float32",
    )
    for what, arguments in {
        "an unknown name": {"wrt": "z"},
        "a position out of range": {"wrt": [5]},
        "a name given twice": {"wrt": ["x", 0]},
        "no argument": {"wrt": []},
        "too many results": {"num_outputs": 3},
        "no result": {"num_outputs": 0},
    }.items():
        yield _bad(
            "tir.vjp",
            what,
            lambda a=arguments: relax_grad.tir.vjp(SQUARE, **a),
            ValueError,
            f"^{next(iter(arguments))}",
        )


def _of_compilation() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        if what != "None":
            yield _bad(
                "transform.DispatchKernels",
                f"winograd_tile, {what}",
                lambda v=value: passes.DispatchKernels("llvm", v),
                ValueError,
                "winograd_tile",
            )
            yield _bad(
                "pipeline",
                f"winograd_tile, {what}",
                lambda v=value: relax_grad.pipeline("llvm", v),
                ValueError,
                "winograd_tile",
            )
            yield _bad(
                "cache", what, lambda v=value: relax_grad.cache(v), TypeError, "directory must be"
            )
            yield _bad(
                "set_num_threads",
                what,
                lambda v=[] if what == "a number" else value: relax_grad.set_num_threads(v),
                TypeError,
                "number must be an int",
            )
        if what not in ("None", "a number"):
            yield _bad(
                "cache",
                f"max_bytes, {what}",
                lambda v=value: relax_grad.cache(None, v),
                TypeError,
                "max_bytes must be an integer",
            )
        for name, function, known in (
            ("arm", target.arm, "generic"),
            ("x86_64", target.x86_64, "v3"),
        ):
            yield _bad(
                f"target.{name}",
                f"a name, {what}",
                lambda f=function, v=value: f(v),
                TypeError,
                "(name|level) must be a string",
            )
            if what != "a number":
                yield _bad(
                    f"target.{name}",
                    f"num_cores, {what}",
                    lambda f=function, k=known, v=value: f(k, v),
                    TypeError,
                    "num_cores must be an integer",
                )
        yield _bad(
            "pipeline",
            f"symbol_prefix, {what}",
            lambda v=value: relax_grad.pipeline(symbol_prefix=v),
            TypeError,
            "symbol_prefix must be a string",
        )
    for cores in (-1, -8):
        yield _bad(
            "target.CPU.of",
            f"num-cores {cores}",
            lambda n=cores: target.CPU.of({"kind": "llvm", "num-cores": n}),
            ValueError,
            "num-cores of the target must be positive",
        )
    yield _bad(
        "cache",
        "a size below 0",
        lambda: relax_grad.cache(None, -1),
        ValueError,
        "max_bytes must not be negative",
    )
    yield _bad(
        "cache",
        "a file",
        lambda: relax_grad.cache(__file__),
        ValueError,
        "is a file",
    )
    for number in (0, -1, 10**6, 2**70):
        yield _bad(
            "set_num_threads",
            str(number),
            lambda n=number: relax_grad.set_num_threads(n),
            ValueError,
            "number must be from 1 to",
        )


def _of_registration() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        yield _bad(
            "backend.backward_patterns",
            f"backend, {what}",
            lambda v=value: backend.backward_patterns(v),
            (TypeError, ValueError),
            "backend",
        )
        yield _bad(
            "backend.BackwardCall",
            what,
            lambda v=value: backend.BackwardCall.of(v),
            (TypeError, ValueError),
            "call",
        )
        yield _bad(
            "testing.samples.register_samples",
            what,
            lambda v=value: samples.register_samples(v)(lambda rng: []),
            TypeError,
            "op must be the name",
        )
        if what != "a tensor":
            yield _bad(
                "testing.samples.register_samples",
                f"{what} for a generator",
                lambda v=value: samples.register_samples("relax.assert_op")(v),
                (TypeError, ValueError),
                "relax.assert_op must be a function",
            )
        yield _bad(
            "backend.BackwardCall",
            f"function, {what}",
            lambda v=value: backend.BackwardCall.of_function(v),
            TypeError,
            "function must be a Relax function",
        )
    yield _bad(
        "testing.samples.register_samples",
        "an operator that has samples",
        lambda: samples.register_samples("relax.exp")(lambda rng: []),
        ValueError,
        "relax.exp has samples already",
    )
    yield _bad(
        "registry.register_nondifferentiable",
        "an operator that has a rule",
        lambda: registry.register_nondifferentiable("relax.nn.softplus", "nothing"),
        ValueError,
        "of relax.nn.softplus is declared twice",
    )


def _of_training() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        yield _bad(
            "frontend.onnx.from_model",
            what,
            lambda v=value: from_model(v),
            TypeError,
            "model must be a path",
        )
        if what in ("a number", "a list"):
            yield _bad(
                "frontend.onnx.from_model",
                f"trainable, {what}",
                lambda v=value: from_model(b"", trainable=v),
                TypeError,
                "trainable must be names",
            )
        yield _bad(
            "training.append_loss",
            what,
            lambda v=value: training.append_loss(MODULE["main"], v),
            TypeError,
            "loss",
        )
        yield _bad(
            "training.SetupTrainer",
            what,
            lambda v=value: training.SetupTrainer(None, None, v),
            TypeError,
            "loss_args must be",
        )
    for what, value in {**OTHERS, "a class": training.SetupTrainer}.items():
        loss, optimizer = relax.training.loss.MSELoss(), relax.training.optimizer.SGD(0.1)
        yield _bad(
            "training.SetupTrainer",
            f"loss, {what}",
            lambda v=value, o=optimizer: training.SetupTrainer(v, o, [X.ty, X.ty]),
            TypeError,
            "loss must be a relax.training.loss.Loss",
        )
        yield _bad(
            "training.SetupTrainer",
            f"optimizer, {what}",
            lambda v=value, o=loss: training.SetupTrainer(o, v, [X.ty, X.ty]),
            TypeError,
            "optimizer must be a relax.training.optimizer.Optimizer",
        )
    for name in ("num_backbone_outputs", "num_states"):
        for error, value in ((ValueError, -1), (TypeError, "1"), (TypeError, True)):
            yield _bad(
                "training.append_loss",
                f"{name} {value!r}",
                lambda n=name, v=value: training.append_loss(
                    MODULE["main"], MODULE["main"], **{n: v}
                ),
                error,
                f"{name} must",
            )
    for what, model in {"no bytes": b"", "other bytes": b"abc"}.items():
        yield _bad(
            "frontend.onnx.from_model",
            what,
            lambda m=model: from_model(m),
            ValueError,
            "model is no ONNX model",
        )


def _of_testing() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        yield _bad(
            "testing.check_gradients",
            f"attribute, {what}",
            lambda v=value: testing.check_gradients(op.exp, ONES, attrs=v),
            (TypeError, ValueError),
            ".",
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
