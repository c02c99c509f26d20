"""The products that an update or another element-wise function consumes: the results of a training
step are those of a step that stores its gradients, bit for bit."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tvm
from processes import run_python
from programs import run
from tvm import relax
from tvm.ir import GlobalVar
from tvm.relax import op
from tvm.relax.backend.cpu_generic import pipeline as stages

from relax_grad.cpu.passes import siblings
from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.module import DONATED
from relax_grad.target import host
from relax_grad.training import SGD, AdamW, train_step
from relax_grad.training._donation import donating
from relax_grad.transform import DispatchKernels, FuseSiblings

from .stored_steps import run_steps

OPTIMIZERS = {
    "sgd": SGD(0.1),
    "momentum": SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": SGD(0.1, momentum=0.5, nesterov=True),
    "adamw": AdamW(0.01),
}


def network(widths, batch, *, shared=False, dtype="float32", seed=0):
    """Return a function of the loss and values for its batch and weights. The weights have either
    layout; ``shared``: the last one is also that of the layer before."""
    rng = np.random.default_rng(seed)
    turned = [bool(rng.integers(2)) for _ in widths[1:]]
    shapes = [(b, a) if t else (a, b) for a, b, t in zip(widths, widths[1:], turned, strict=False)]
    weights = [relax.Var(f"w{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    x = relax.Var("x", relax.TensorType((batch, widths[0]), dtype))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *weights]):
        with bb.dataflow():
            y = x
            pairs = [*zip(weights, turned, strict=True)]
            for i, (weight, is_turned) in enumerate([*pairs, *pairs[-1:]] if shared else pairs):
                factor = bb.emit(op.permute_dims(weight)) if is_turned else weight
                y = bb.emit(op.matmul(y, factor))
                y = bb.emit((op.nn.relu, op.tanh)[i % 2](y))
            loss = bb.emit_output(op.mean(op.square(y)))
        bb.emit_func_output(loss)
    values = {w.name: rng.normal(size=s, scale=0.1) for w, s in zip(weights, shapes, strict=True)}
    data = rng.normal(size=(batch, widths[0]))
    return bb.get(), data.astype(dtype), {k: v.astype(dtype) for k, v in values.items()}


def built(case, optimizer, donated=False):
    """Return a compiled step, and its first arguments in groups."""
    module, x, values = network(**case)
    step = train_step(module, OPTIMIZERS[optimizer], wrt=list(values))
    module = donating(step) if donated else step.module
    executable = tvm.compile(module, host(), relax_pipeline="relax_grad")
    scalars = [np.array(number) for number in step.hyperparameters.values()]
    groups = [[tensor.numpy() for tensor in group.values()] for group in step.initial(values)]
    return executable, [x, *scalars], groups


def trained(*step, **settings):
    """Return the tensors after some steps."""
    executable, first, groups = built(*step, **settings)
    return run_steps(relax.VirtualMachine(executable, tvm.cpu()), first, groups)


@pytest.fixture
def consumed(monkeypatch):
    """The results of the search for functions of products: True for each one."""
    found = []
    search = siblings.schedule_consumer

    def schedule_consumer(*arguments):
        function = search(*arguments)
        found.append(function is not None)
        return function

    monkeypatch.setattr(siblings, "schedule_consumer", schedule_consumer)
    return found


def same(own, wanted):
    assert len(own) == len(wanted)
    for array, other in zip(own, wanted, strict=True):
        np.testing.assert_array_equal(array, other)


CASES = {
    "sgd": {"widths": (70, 129, 40), "batch": 33},
    "momentum": {"widths": (64, 120, 64), "batch": 60, "seed": 1},
    "nesterov": {"widths": (41, 2100, 131, 131), "batch": 16, "shared": True, "seed": 3},
}


@pytest.mark.parametrize(
    ("optimizer", "donated"), [("sgd", False), ("momentum", True), ("nesterov", True)]
)
def test_the_bits_of_a_step_with_stored_gradients(optimizer, donated, consumed, monkeypatch):
    own = trained(CASES[optimizer], optimizer, donated=donated)
    assert True in consumed
    monkeypatch.setattr(siblings, "schedule_consumer", lambda *_: None)
    same(own, trained(CASES[optimizer], optimizer, donated=donated))


def test_updates_that_divide_read_stored_gradients(consumed):
    """Adam's divisions take longer than the memory that would be saved."""
    trained({"widths": (64, 120, 64), "batch": 60}, "adamw", donated=True)
    assert True not in consumed != []


def test_the_bits_with_one_thread_and_two(tmp_path):
    executable, first, groups = built(CASES["momentum"], "momentum", donated=True)
    executable.export_library(str(tmp_path / "step.so"))
    with open(tmp_path / "step.pickle", "wb") as file:
        pickle.dump((first, groups), file)
    printed = [
        run_python(
            f"import os, sys\nos.environ['TVM_NUM_THREADS'] = '{threads}'\n"
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import stored_steps\nstored_steps.main({str(tmp_path)!r})\n"
        )
        for threads in (1, 2)
    ]
    assert printed[0] == printed[1] != ""


def consumers(body, params):
    """Return the numbers of results of the calls of products with further functions."""
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            outputs = body(bb, *params)
        bb.emit_func_output(relax.Tuple(outputs))
    with host():
        module = DispatchKernels(host())(bb.get())
        module = FuseSiblings(host())(
            tvm.transform.Sequential(stages.legalize_passes(host()))(module)
        )
    assert relax.analysis.check_well_formed(module)
    return [
        len(call.ty.fields) if isinstance(call.ty, relax.TupleType) else 1
        for call in (binding.value for binding in bindings_of(module["main"].body))
        if isinstance(call, relax.Call)
        and isinstance(call.args[0], GlobalVar)
        and call.args[0].name_hint.startswith("matmul_")
        and "kernel" not in call.args[0].name_hint
    ]


def updated(bb, x, y, w, rate, *, scale=None, seen=False, in_tuple=False):
    """Return an update of w by the product of x and y; ``seen``: and the product; ``in_tuple``: as
    the field of a tuple."""
    product = op.matmul(bb.emit(op.permute_dims(x)), y)
    gradient = bb.emit_output(product) if seen else bb.emit(product)
    size = bb.emit(op.multiply(rate, relax.const(0.5)))
    if scale is not None:
        size = bb.emit(scale(w))
    new = op.subtract(w, op.multiply(gradient, size))
    if in_tuple:
        return (bb.emit_output(relax.Tuple([bb.emit(new)])),)
    new = bb.emit_output(new)
    return (new, gradient) if seen else (new,)


def params_of(rows, columns, depth):
    shapes = {"x": (depth, rows), "y": (depth, columns), "w": (rows, columns), "rate": ()}
    return [relax.Var(name, relax.TensorType(s, "float32")) for name, s in shapes.items()]


@pytest.mark.parametrize(
    ("options", "sizes", "wanted"),
    [
        ({}, (64, 48, 32), [1]),
        ({"in_tuple": True}, (64, 48, 32), [1]),
        ({"scale": op.sum}, (64, 48, 32), [1]),  # a scalar that is computed behind the product
        ({"scale": lambda w: op.sum(op.exp(w), [0])}, (64, 48, 32), []),  # a vector
        ({"seen": True}, (64, 48, 32), []),
        ({}, (400, 500, 300), []),
        ({}, (64, 48, 60), []),  # whose factors take more memory
    ],
)
def test_which_products_are_consumed(options, sizes, wanted):
    assert consumers(partial(updated, **options), params_of(*sizes)) == wanted


def test_a_product_of_the_weight_itself_is_not_computed_in_its_place(consumed):
    """Each element of the update needs all of the old weight."""
    kind = relax.TensorType((96, 96), "float32")
    x, w = relax.Var("x", kind), relax.Var("w", kind)
    bb = relax.BlockBuilder()
    with bb.function("step", [x, w]):
        with bb.dataflow():
            product = bb.emit(op.matmul(op.permute_dims(w), x))
            new = bb.emit_output(op.subtract(w, op.multiply(product, relax.const(0.1))))
        bb.emit_func_output(relax.Tuple([new]))
    mod = bb.get()
    mod["step"] = mod["step"].with_attr(DONATED, [[1, 0]])
    values = [np.random.default_rng(i).normal(size=(96, 96)).astype("float32") for i in range(2)]
    (own,) = run(mod, "step", *values, target=host(), pipeline="relax_grad")
    assert consumed == [True]
    np.testing.assert_allclose(own, values[1] - 0.1 * values[1].T @ values[0], rtol=1e-4, atol=1e-4)
