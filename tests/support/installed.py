"""A use of the installed package, out of the reach of the sources: ``make test-wheel`` copies and
runs it in an environment that has nothing but the wheel."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import relax_grad

home = Path(relax_grad.__file__).parent
assert Path(sys.prefix) in home.parents, f"{home} is not in {sys.prefix}"
assert (home / "py.typed").is_file()
assert (home / "runtime/CMakeLists.txt").is_file()
distribution = metadata.distribution("relax_grad")
assert distribution.version == relax_grad.__version__
assert {path.parts[0] for path in distribution.files or () if path.suffix == ".py"} == {
    "relax_grad"
}

data = relax.Var("data", relax.TensorType((4, 6), "float32"))
weight = relax.Var("weight", relax.TensorType((6, 3), "float32"))
bb = relax.BlockBuilder()
with bb.function("main", [data, weight]):
    with bb.dataflow():
        product = bb.emit(relax.op.nn.relu(relax.op.matmul(data, weight)))
        loss = bb.emit_output(relax.op.sum(product))
    bb.emit_func_output(loss)
module = relax_grad.value_and_grad(bb.get(), wrt="weight")
executable = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
run = relax.VirtualMachine(executable, tvm.cpu())["main_adjoint"]
rng = np.random.default_rng(0)
values = [rng.normal(size=shape).astype("float32") for shape in ((4, 6), (6, 3))]
loss, (gradient,) = run(*map(tvm.runtime.tensor, values))
wanted = values[0].T @ (values[0] @ values[1] > 0).astype("float32")
np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-5)

assert importlib.util.find_spec("torch") is None
message = ""
try:
    importlib.import_module("relax_grad.frontend.torch")
except ImportError as error:
    message = str(error)
assert "pip install 'torch>=" in message, message
print(f"relax_grad {relax_grad.__version__} in {home}")
