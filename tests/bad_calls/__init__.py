"""Invalid calls of public functions, keyed by the function's name."""

from __future__ import annotations

from collections.abc import Iterator

import tvm

import relax_grad
import relax_grad.frontend.random
import relax_grad.runtime
from relax_grad import backend, coverage, distributed, frontend, registry, testing, training
from relax_grad import transform as passes
from relax_grad.cpu import dispatch, target
from relax_grad.frontend.onnx import Imported, from_model
from relax_grad.op import stop_gradient
from relax_grad.testing import samples

from .arguments import bad_arguments
from .call import ONES, OTHERS, BadCall
from .malformed import MALFORMED
from .torch_calls import bad_torch_calls


def bad_calls() -> Iterator[BadCall]:
    """Yield the invalid calls of all functions."""
    yield from _without_arguments()
    yield from _with_unknown_arguments()
    yield from _of_malformed_modules()
    yield from _of_no_text()
    yield from bad_arguments()
    for name in ("bits", "uniform", "normal", "exponential", "bernoulli", "randint", "dropout"):
        yield BadCall(
            f"relax_grad.frontend.random.{name}",
            "no seed",
            getattr(relax_grad.frontend.random, name),
            TypeError,
            "missing .* 'seed'",
        )
    yield from (BadCall(f"relax_grad.{name}", *rest) for name, *rest in bad_torch_calls())


#: Functions without parameters.
_NOTHING = {
    "relax_grad.get_num_threads": relax_grad.get_num_threads,
    "relax_grad.install": relax_grad.install,
    "relax_grad.uninstall": relax_grad.uninstall,
    "relax_grad.target.host": target.host,
    "relax_grad.target.riscv64": target.riscv64,
    "relax_grad.cpu.dispatch.operators_with_kernels": dispatch.operators_with_kernels,
    "relax_grad.registry.declarations": registry.declarations,
    "relax_grad.registry.install": registry.install,
    "relax_grad.runtime.folder": relax_grad.runtime.folder,
    "relax_grad.registry.operators": registry.operators,
    "relax_grad.coverage.coverage": coverage.coverage,
    "relax_grad.testing.samples.sampled_operators": samples.sampled_operators,
    "relax_grad.transform.DivideSlices": passes.DivideSlices,
    "relax_grad.transform.FoldConstants": passes.FoldConstants,
    "relax_grad.transform.InlineSingleUse": passes.InlineSingleUse,
    "relax_grad.transform.PlainNames": relax_grad.transform.PlainNames,
    "relax_grad.transform.FuseAttention": passes.FuseAttention,
    "relax_grad.transform.JoinProducts": passes.JoinProducts,
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
    "relax_grad.frontend.lift_constants": frontend.lift_constants,
    "relax_grad.frontend.constants.Lifted": frontend.constants.Lifted,
    "relax_grad.frontend.onnx.Imported": Imported,
    "relax_grad.frontend.onnx.from_model": from_model,
    "relax_grad.transform.Gradient": passes.Gradient,
    "relax_grad.transform.DispatchKernels": passes.DispatchKernels,
    "relax_grad.transform.FuseSiblings": passes.FuseSiblings,
    "relax_grad.transform.ScheduleLoops": passes.ScheduleLoops,
    "relax_grad.target.CPU": target.CPU,
    **{f"relax_grad.training.{name}": getattr(training, name) for name in training.__all__},
    "relax_grad.distributed.transform.DataParallel": distributed.transform.DataParallel,
    "relax_grad.distributed.transform.TensorParallel": distributed.transform.TensorParallel,
    **{
        f"relax_grad.distributed.{name}": getattr(distributed, name)
        for name in distributed.__all__
        if name != "transform"
    },
    "relax_grad.op.stop_gradient": stop_gradient,
    "relax_grad.registry.Classification": registry.Classification,
    "relax_grad.registry.Declaration": registry.Declaration,
    "relax_grad.registry.classify": registry.classify,
    "relax_grad.registry.register_infer_layout": registry.register_infer_layout,
    "relax_grad.registry.register_infer_type": registry.register_infer_type,
    "relax_grad.registry.register_nondifferentiable": registry.register_nondifferentiable,
    "relax_grad.coverage.OperatorCoverage": coverage.OperatorCoverage,
    "relax_grad.coverage.coverage_of": coverage.coverage_of,
    "relax_grad.coverage.differentiable_arguments": coverage.differentiable_arguments,
    "relax_grad.testing.GradientReport": testing.GradientReport,
    "relax_grad.testing.check_against_torch": testing.check_against_torch,
    "relax_grad.testing.check_many_against_torch": testing.check_many_against_torch,
    "relax_grad.testing.check_many_gradients": testing.check_many_gradients,
    "relax_grad.testing.GradientCase": testing.GradientCase,
    "relax_grad.testing.TorchCase": testing.TorchCase,
    "relax_grad.testing.samples.Sample": samples.Sample,
    "relax_grad.testing.samples.register_samples": samples.register_samples,
    "relax_grad.testing.samples.samples": samples.samples,
    "relax_grad.backend.BackwardCall": backend.BackwardCall,
    "relax_grad.backend.DispatchLibrary": backend.DispatchLibrary,
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
    "relax_grad.coverage.coverage_of": coverage.coverage_of,
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
