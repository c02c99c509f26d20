"""Calls of public functions with one invalid argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from tvm import relax, te, tirx
from tvm.relax import op

import relax_grad
from relax_grad import backend, cli, distributed, frontend, registry, testing, training
from relax_grad import transform as passes
from relax_grad.cpu import target
from relax_grad.frontend.onnx import from_model
from relax_grad.op import checkpoint, stop_gradient
from relax_grad.testing import samples

from .call import MODULE, ONES, OTHERS, SQUARE, BadCall, X


def bad_arguments() -> Iterator[BadCall]:
    """Yield calls with one invalid argument."""
    yield from _of_differentiation()
    yield from _of_compilation()
    yield from _of_registration()
    yield from _of_training()
    yield from _of_distributed()
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
        yield _bad(
            "transform.Autocast",
            what,
            lambda v=value: passes.Autocast(v)(MODULE),
            ValueError,
            'dtype must be "bfloat16" or "float16", but it is',
        )
        if what != "None":
            yield _bad(
                "transform.Autocast",
                f"func_names, {what}",
                lambda v=value: passes.Autocast(func_names=v)(MODULE),
                TypeError,
                "func_names must be a list of names",
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
        "main has no variable x; it is a different variable with the name x",
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
    for arguments in ({"wrt": 1.0}, {"wrt": b"x"}, {"num_outputs": "1"}, {"num_outputs": True}):
        yield _bad(
            "tir.vjp",
            str(arguments),
            lambda a=arguments: relax_grad.tir.vjp(SQUARE, **a),
            TypeError,
            f"^{next(iter(arguments))} must be",
        )
    for what, dtype in {"argument": "int32", "result": "float32"}.items():
        yield _bad(
            "tir.vjp",
            f"no floating-point {what}",
            lambda d=dtype: relax_grad.tir.vjp(_rounding(d)),
            ValueError,
            f"the function has no {what} of floating-point numbers",
        )


def _rounding(dtype: str) -> tirx.PrimFunc:
    """Return a function from numbers to integers."""
    x = te.placeholder((3,), dtype, "x")
    return te.create_prim_func([x, te.compute((3,), lambda i: tirx.Cast("int32", x[i]), "y")])


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
                "max_bytes must be a number of bytes",
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
            "target.wasm",
            f"relaxed_simd, {what}",
            lambda v=value: target.wasm(v),
            TypeError,
            "relaxed_simd must be True or False",
        )
        yield _bad(
            "target.cortex_m",
            f"a name, {what}",
            lambda v=value: target.cortex_m(v),
            TypeError,
            "name must be a string",
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
        "max_bytes must be a number of bytes or None, but it is -1",
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
            "number must be an integer from 1 to",
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
            "backend.DispatchLibrary",
            what,
            lambda v=value: backend.DispatchLibrary(v),
            (TypeError, ValueError),
            "library must be one of 'torch'",
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
            "training.static_plan",
            what,
            lambda v=value: training.static_plan(v),
            TypeError,
            "step must be a result of train_step",
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
    for argument, values in {
        "batch": ("4", 1.5),
        "constants": (["x"], {3: 1}),
        "dropout": ("no", None),
        "dynamic_shapes": (["x"], {"x": ["n"]}, {"x": {0: 3}}, {"x": {"0": "n"}}),
        "shapes": ([1, 2], {"x": 3}, {"x": "abcd"}),
        "tied": (None, "w", {"w": 3}),
    }.items():
        for value in values:
            yield _bad(
                "frontend.onnx.from_model",
                f"{argument}, {value!r}",
                lambda a=argument, v=value: from_model(b"", **{a: v}),
                TypeError,
                f"^{argument}(:.*)? must",
            )
    yield _bad(
        "frontend.lift_constants",
        "a mapping from numbers",
        lambda: frontend.lift_constants(MODULE, {3: np.ones(3)}),
        TypeError,
        "select must map names",
    )
    yield _bad(
        "frontend.onnx.from_model",
        "a file of another kind",
        lambda: from_model(__file__),
        ValueError,
        "model is no ONNX model",
    )
    for what, model in {"no bytes": b"", "other bytes": b"abc"}.items():
        yield _bad(
            "frontend.onnx.from_model",
            what,
            lambda m=model: from_model(m),
            ValueError,
            "model is no ONNX model",
        )


def _of_distributed() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        if what != "a number":
            yield _bad(
                "distributed.session",
                what,
                lambda v=value: distributed.session(v),
                TypeError,
                "num_workers must be an integer",
            )
        if what != "a tensor":  # Relax's may be called
            yield _bad(
                "distributed.run",
                what,
                lambda v=value: distributed.run(v, 2),
                TypeError,
                "program must be a function of a session",
            )
        yield _bad(
            "distributed.data_parallel",
            what,
            lambda v=value: distributed.data_parallel(MODULE, v),
            TypeError,
            "session must be a result of",
        )
        yield _bad(
            "distributed.transform.DataParallel",
            what,
            lambda v=value: distributed.transform.DataParallel(v)(MODULE),
            ValueError,
            "the module has no function",
        )

        yield from _of_tensor_parallelism(what, value)


def _of_tensor_parallelism(what: str, value) -> Iterator[BadCall]:
    none = {"w": distributed.along(0)}
    calls = {
        "tensor_parallel": (
            lambda: distributed.tensor_parallel(MODULE, value, shards={}),
            TypeError,
            "session must be a result of",
        ),
        "transform.TensorParallel": (
            lambda: distributed.transform.TensorParallel("main", value, 2),
            TypeError,
            "shards must be a mapping of names or patterns",
        ),
        "shard_values": (
            lambda: distributed.shard_values(value, none, 2),
            TypeError,
            "values must be a mapping",
        ),
        "join_values": (
            lambda: distributed.join_values(value, none),
            TypeError,
            "shares must be a list of mappings",
        ),
    }
    if what != "a number":
        calls["column"] = lambda: distributed.column(value), TypeError, "parts must be an integer"
        calls["row"] = lambda: distributed.row(value), TypeError, "parts must be an integer"
        calls["along"] = lambda: distributed.along(value), TypeError, "axis must be an integer"
    for name, (call, error, message) in calls.items():
        yield _bad(f"distributed.{name}", what, call, error, message)


def _of_testing() -> Iterator[BadCall]:
    for what, value in OTHERS.items():
        yield _bad(
            "testing.check_gradients",
            f"attribute, {what}",
            lambda v=value: testing.check_gradients(op.exp, ONES, attrs=v),
            (TypeError, ValueError),
            ".",
        )
        for name, cases in {"cases": value, "a case": [value]}.items():
            yield _bad(
                "testing.check_many_gradients",
                f"{name}, {what}",
                lambda v=cases: testing.check_many_gradients(v),
                TypeError,
                "cases must be",
            )
        if what != "a number":
            yield _bad(
                "testing.GradientCase",
                f"order, {what}",
                lambda v=value: testing.check_many_gradients(
                    [testing.GradientCase("relax.exp", ONES, order=v)]
                ),
                TypeError,
                "order must be an integer",
            )
    for argv in (
        ["nothing"],
        ["check", "relax.nothing"],
        ["check", "--order", "none"],
        ["check", "--nothing"],
        ["coverage", "--nothing"],
        ["doctor", "--nothing"],
        ["doctor", "--plan", "128x768"],
        [],
    ):
        yield BadCall(
            "relax_grad.cli.main", repr(argv), lambda a=argv: cli.main(a), SystemExit, None
        )
