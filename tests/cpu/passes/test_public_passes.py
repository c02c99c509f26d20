"""Each public pass alone gives a module that both pipelines compile, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from dispatched import flat
from programs import tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op
from versions import SYMBOLIC_FUSION

import relax_grad
from relax_grad import transform

TARGET = relax_grad.target.host()
RNG = np.random.default_rng(0)
N = tirx.Var("n", "int64")


def convolution(bb, x, w, gamma):
    """Return a convolution followed by a normalization with its own statistics."""
    zeros = bb.emit(op.zeros((4,), "float32"))
    y = bb.emit(op.nn.conv2d(x, w, padding=1))
    y = bb.emit(op.nn.batch_norm(y, gamma, zeros, zeros, gamma, axis=1))
    y = bb.emit(op.nn.relu(bb.emit(relax.TupleGetItem(y, 0))))
    return bb.emit(op.sum(bb.emit(op.nn.max_pool2d(y, (2, 2), (2, 2)))))


def products(bb, a, b, c):
    """Return two products of different shapes, which need two kernels of one operator."""
    return bb.emit(op.sum(bb.emit(op.matmul(bb.emit(op.matmul(a, b)), c))))


def normalizations(bb, x, gamma):
    y = bb.emit(op.nn.layer_norm(x, gamma, gamma, axes=[-1]))
    y = bb.emit(op.nn.rms_norm(bb.emit(op.sin(y)), gamma, axes=[-1]))
    return bb.emit(op.sum(bb.emit(op.nn.log_softmax(bb.emit(op.multiply(y, y)), -1))))


def symbolic(bb, x, w):
    rows = bb.emit(op.reshape(x, (N * 2, 4)))
    y = bb.emit(op.nn.softmax(bb.emit(op.matmul(rows, w)), -1))
    constant = relax.const(np.arange(8, dtype="float32"), "float32")
    doubled = bb.emit(op.multiply(constant, relax.const(2.0, "float32")))
    return bb.emit(op.mean(bb.emit(op.multiply(y, doubled))))


def update(bb, p, g, m):
    """Return an optimizer's update, with several element-wise results of one tensor."""
    moment = bb.emit(op.add(bb.emit(op.multiply(m, relax.const(0.9))), g))
    new = bb.emit(op.subtract(p, bb.emit(op.multiply(moment, relax.const(0.1)))))
    return bb.emit(op.sum(bb.emit(op.add(bb.emit(op.exp(moment)), new))))


#: The functions, with the shapes of their parameters.
FUNCTIONS = {
    "convolution": (convolution, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "products": (products, [(4, 5), (5, 6), (6, 7)]),
    "normalizations": (normalizations, [(6, 16), (16,)]),
    "symbolic": (symbolic, [(N, 8), (4, 8)]),
    "update": (update, [(40,), (40,), (40,)]),
}


def branches(bb: relax.BlockBuilder) -> None:
    """Add a function with a conditional, and a function with a single caller."""
    x, cond = tensor("x", (4, 4), "float32"), tensor("cond", (), "bool")
    with bb.function("half", [x], private=True):
        with bb.dataflow():
            result = bb.emit_output(op.multiply(x, relax.const(0.5)))
        bb.emit_func_output(result)
    (half,) = [v for v in bb.get().get_global_vars() if v.name_hint == "half"]
    x = tensor("x", (4, 4), "float32")
    with bb.function("branches", [x, cond]):
        y = bb.emit(relax.Call(half, [x]))
        sides = []
        for build in (lambda v: op.exp(bb.emit(op.matmul(v, v))), op.sin):
            bb._begin_binding_block()
            side = bb.emit(build(y))
            sides.append(relax.SeqExpr([bb._end_block()], side))
        chosen = bb.emit(relax.If(cond, *sides))
        bb.emit_func_output(bb.emit(op.sum(chosen)))


def model() -> tvm.IRModule:
    """Return a module of all functions and their adjoints."""
    bb = relax.BlockBuilder()
    for name, (body, shapes) in FUNCTIONS.items():
        params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
        with bb.function(name, params):
            with bb.dataflow():
                result = bb.emit_output(body(bb, *params))
            bb.emit_func_output(result)
    branches(bb)
    module = bb.get()
    for name in (*FUNCTIONS, "branches"):
        module = transform.Gradient(name)(module)
    return module


def arguments() -> dict[str, list[np.ndarray]]:
    arrays = {
        name: [
            RNG.normal(size=[3 if extent is N else extent for extent in shape]).astype("float32")
            for shape in shapes
        ]
        for name, (_, shapes) in FUNCTIONS.items()
    }
    arrays["branches"] = [RNG.normal(size=(4, 4)).astype("float32") * 0.1, np.array(True)]
    return arrays | {f"{name}_adjoint": values for name, values in arrays.items()}


ARGUMENTS = arguments()

#: The cases of every run: kernels and schedules under another pipeline.
OFTEN = {
    ("DispatchKernels", False, "default"),
    ("DispatchKernels", False, "relax_grad"),
    ("FuseSiblings", True, "relax_grad"),
    ("ScheduleLoops", True, "default"),
}

#: The passes that need calls made by legalization, and change no module before it.
OF_LOOPS = {"FoldConstants", "FuseSiblings", "ScheduleLoops", "ShareStorage"}


def marks(name: str, is_legalized: bool, pipeline: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: slow cases, and cases that the oldest TVM does not compile."""
    applied = [] if (name, is_legalized, pipeline) in OFTEN else [pytest.mark.slow]
    # TVM does not fuse scheduled functions.
    if pipeline == "relax_grad" and name != "ScheduleLoops":
        applied.append(SYMBOLIC_FUSION)
    return applied


#: Each pass with each pipeline after it, on a fresh and on a legalized module; every run has some
#: of the cases.
CASES = [
    pytest.param(name, is_legalized, pipeline, marks=marks(name, is_legalized, pipeline))
    for name in transform.__all__
    if name not in ("Gradient", "ShareStorage")
    for is_legalized in (False, True)
    if is_legalized or name not in OF_LOOPS
    for pipeline in ("default", "relax_grad")
]


def results(module, pipeline):
    machine = relax.VirtualMachine(tvm.compile(module, TARGET, relax_pipeline=pipeline), tvm.cpu())
    return {
        name: flat(to_numpy(machine[name](*map(tvm.runtime.tensor, values))))
        for name, values in ARGUMENTS.items()
    }


@pytest.fixture(scope="module")
def reference():
    return results(model(), "default")


def passed(name: str, is_legalized: bool) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return the module before and after a pass."""
    module = relax.transform.LegalizeOps()(model()) if is_legalized else model()
    before = module.script()
    with TARGET:
        changed = getattr(transform, name)()(module)
    assert module.script() == before, "the pass has changed the module that it was given"
    assert relax.analysis.check_well_formed(changed)
    return module, changed


@pytest.mark.parametrize(("name", "is_legalized", "pipeline"), CASES)
def test_alone(name, is_legalized, pipeline, reference):
    _, changed = passed(name, is_legalized)
    outputs = results(changed, pipeline)
    for function, wanted in reference.items():
        for output, other in zip(outputs[function], wanted, strict=True):
            # The products of Autocast have 8 bits.
            rtol, atol = (5e-2, 5e-2 * np.abs(other).max()) if name == "Autocast" else (1e-3, 1e-4)
            np.testing.assert_allclose(output, other, rtol=rtol, atol=atol, err_msg=function)


@pytest.mark.parametrize("name", sorted(OF_LOOPS))
def test_passes_over_loops_keep_modules_before_legalization(name):
    tvm.ir.assert_structural_equal(*passed(name, False))


def test_share_storage_keeps_modules_without_allocations():
    tvm.ir.assert_structural_equal(*passed("ShareStorage", True))
