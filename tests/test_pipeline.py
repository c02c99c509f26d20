"""The pipeline: how it is found, what it leaves to others, and what it exports."""

from __future__ import annotations

import doctest
import subprocess
import sys

import numpy as np
import pytest
import tvm
from dispatched import HOST, flat, run_both
from programs import build, tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op

import relax_grad
from relax_grad import _pipeline

RNG = np.random.default_rng(0)
SHAPES = [(6, 8), (8, 5), (5,)]


def classifier(rows=6):
    """The loss of a linear classifier and its gradients, with an optimizer's step."""

    def body(bb, x, w, b):
        scores = bb.emit(op.add(op.matmul(x, w), b))
        probabilities = bb.emit(op.nn.log_softmax(bb.emit(op.nn.gelu(scores))))
        return op.negative(op.mean(bb.emit(op.multiply(probabilities, probabilities))))

    shapes = [(rows, 8), *SHAPES[1:]]
    params = [tensor(name, shape, "float32") for name, shape in zip("xwb", shapes, strict=True)]
    return relax_grad.value_and_grad(build(params, body), wrt=["w", "b"])


def values():
    return [RNG.normal(size=shape).astype("float32") for shape in SHAPES]


@pytest.mark.parametrize("rows", [6, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_numbers_of_a_training_step(rows):
    ours, stock = map(flat, run_both(classifier(rows), "main_adjoint", values()))
    for found, wanted in zip(ours, stock, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["llvm", {"kind": "llvm", "opt-level": 0}])
def test_other_targets(target):
    run_both(classifier(), "main_adjoint", values(), tvm.target.Target(target))


def test_as_an_object():
    found = []
    for pipeline in (relax_grad.pipeline(), relax_grad.pipeline(HOST), "relax_grad"):
        executable = tvm.compile(classifier(), HOST, relax_pipeline=pipeline)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        arrays = [np.full(shape, 0.5, "float32") for shape in SHAPES]
        found.append(flat(to_numpy(machine["main_adjoint"](*map(tvm.runtime.tensor, arrays)))))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_without_a_target():
    with pytest.raises(ValueError, match="the pipeline needs a target"):
        relax_grad.pipeline()(classifier())


def test_targets_of_other_compilers_keep_their_pipeline():
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    with target:
        module = relax_grad.pipeline()(classifier())
    names = [variable.name_hint for variable in module.get_global_vars()]
    assert not any("kernel" in name and "matmul" in name for name in names)


def test_what_is_exported_runs_without_relax_grad(tmp_path):
    executable = tvm.compile(classifier(), HOST, relax_pipeline="relax_grad")
    executable.export_library(str(tmp_path / "step.so"))
    arrays = values()
    np.savez(tmp_path / "arrays.npz", *arrays)
    script = """
import sys
import numpy as np, tvm
from tvm import relax
folder = sys.argv[1]
machine = relax.VirtualMachine(tvm.runtime.load_module(folder + "/step.so"), tvm.cpu())
arrays = np.load(folder + "/arrays.npz")
loss, gradients = machine["main_adjoint"](*(tvm.runtime.tensor(arrays[n]) for n in arrays.files))
assert "relax_grad" not in sys.modules
np.savez(folder + "/found.npz", loss.numpy(), *(g.numpy() for g in gradients))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    wanted = flat(to_numpy(machine["main_adjoint"](*map(tvm.runtime.tensor, arrays))))
    found = np.load(tmp_path / "found.npz")
    for name, each in zip(found.files, wanted, strict=True):
        np.testing.assert_array_equal(found[name], each)


def test_examples():
    assert doctest.testmod(_pipeline).failed == 0
    assert doctest.testmod(_pipeline).attempted > 0
