"""The changes that the import makes to TVM, and their complete reversal."""

from __future__ import annotations

import pytest
from processes import run_file, run_python

SNAPSHOT = """
import tvm
from tvm import relax
from tvm.ir import Op
NAMES = list(Op.list_op_names())
ATTRS = ["FPrimalGradient", "FLegalize", "FInferType", "FRelaxInferLayout", "FPurity"]
def snapshot():
    return {(name, attr): Op.get(name).get_attr(attr) for name in NAMES for attr in ATTRS}
def differing(one, two):
    return [key for key in one if not (one[key] == two[key])]
def gradient_of(op, *shapes):
    types = [relax.TensorType(shape, "float32") for shape in shapes]
    params = [relax.Var(f"x{i}", kind) for i, kind in enumerate(types)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(op(*params))))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main")(bb.get())
def mine(orig_var, orig_call, output_grad, ctx):
    return [relax.op.zeros_like(arg) for arg in orig_call.args]
stock = snapshot()
"""


def test_a_round_trip_leaves_nothing():
    code = """
import relax_grad
changed = differing(stock, snapshot())
assert all(attr in ATTRS[:4] for _, attr in changed)
print(len(changed) > 200)
for _ in range(2):
    relax_grad.uninstall()
    print(differing(stock, snapshot()))
try:
    gradient_of(lambda x: relax.op.tile(x, (2,)), (3,))
except Exception as error:
    print("relax.tile" in str(error))
for _ in range(2):
    relax_grad.install()
    print(differing(stock, snapshot()) == changed)
tvm.compile(gradient_of(relax.op.nn.conv2d, (1, 2, 5, 5), (3, 2, 3, 3)), "llvm")
"""
    assert run_python(SNAPSHOT + code).split("\n") == ["True", "[]", "[]", "True", "True", "True"]


def test_differentiated_modules_compile_after_uninstall():
    """The backward operators are relax_grad's own, and compile without the registrations that were
    taken back."""
    code = """
import relax_grad
module = gradient_of(relax.op.nn.conv2d, (1, 2, 5, 5), (3, 2, 3, 3))
relax_grad.uninstall()
tvm.compile(module, "llvm")
print("compiled")
"""
    assert run_python(SNAPSHOT + code) == "compiled"


def test_operators_are_classified_as_tvms_after_uninstall():
    code = """
import relax_grad
classify = relax_grad.registry.classify
names = ["relax.nn.conv2d", "relax.nn.relu", "relax.tile", "relax.exp", "relax.argmax"]
before = [classify(name) for name in names]
relax_grad.uninstall()
print(*((classify(name).kind, classify(name).rule) for name in names), sep="\\n")
relax_grad.install()
print([classify(name) for name in names] == before)
"""
    unclassified = "('unclassified', None)"
    tvms = "('differentiable', 'TVM')"
    expected = [tvms, tvms, unclassified, tvms, unclassified, "True"]
    assert run_python(SNAPSHOT + code).split("\n") == expected


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("op", "level"), [("relax.tile", 10), ("relax.nn.conv2d", 11), ("relax.nn.conv2d", 30)]
)
def test_a_users_rule_stays(op, level, first):
    code = f"""
register = lambda: relax.op.register_gradient({op!r}, mine, level={level})
if {first}:
    register()
import relax_grad
if not {first}:
    register()
theirs = Op.get({op!r}).get_attr("FPrimalGradient")
relax_grad.uninstall()
print(differing(stock, snapshot()) == [({op!r}, "FPrimalGradient")])
print(Op.get({op!r}).get_attr("FPrimalGradient") == theirs)
relax_grad.install()
print(Op.get({op!r}).get_attr("FPrimalGradient") == theirs)
print(relax_grad.registry.classify({op!r}).rule)
"""
    assert run_python(SNAPSHOT + code).split() == ["True", "True", "True", "user"]


def test_imports_and_installs_from_threads():
    code = """
import threading
def run_in_threads(function):
    errors = []
    def guarded():
        try:
            function()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=guarded) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(errors)
def load():
    import relax_grad
    relax_grad.registry.classify("relax.tile")
run_in_threads(load)
import relax_grad
before = snapshot()
def flip():
    for _ in range(3):
        relax_grad.uninstall()
        relax_grad.install()
run_in_threads(flip)
relax_grad.install()
print(differing(before, snapshot()))
"""
    assert run_python(SNAPSHOT + code).split("\n") == ["[]", "[]", "[]"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_are_started_later(method, tmp_path, monkeypatch):
    """Each process differentiates, compiles and runs. Threads do not survive a fork, so TVM uses
    one."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing
import numpy as np
import tvm
from tvm import relax
import relax_grad

def gradient(value):
    x = relax.Var("x", relax.TensorType((40, 50), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.multiply(x, x))))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(y, y))))
        bb.emit_func_output(loss)
    module = relax_grad.value_and_grad(bb.get())
    executable = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    _, (found,) = machine["main_adjoint"](tvm.runtime.tensor(np.full((40, 50), value, "float32")))
    return float(np.abs(found.numpy()).sum())

if __name__ == "__main__":
    here = gradient(0.5)
    with multiprocessing.get_context(METHOD).Pool(2) as pool:
        there = pool.map_async(gradient, [0.5, 0.5]).get(timeout=120)
    assert there == [here, here], (there, here)
    print("equal")
""".replace("METHOD", repr(method))
    )
    assert run_file(script) == "equal"
