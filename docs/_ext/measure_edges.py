"""The results of relax_grad, PyTorch and JAX at edge cases of operators.

``python docs/_ext/measure_edges.py`` runs all three and writes the results to
docs/_measured/edges.json, the source of the tables on the page on semantics. tests/test_edges.py
runs them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tvm
from edge import Edge, written
from edges import edges
from tvm import relax
from tvm.relax import op

import relax_grad

RESULTS = Path(__file__).parents[1] / "_measured" / "edges.json"


def show(value: np.ndarray, gradients: Sequence[np.ndarray]) -> dict[str, str]:
    """Return the value and the gradients in the format of the page."""
    shown = {"value": written(np.asarray(value))}
    for number, gradient in enumerate(gradients):
        shown[f"gradient {number}"] = written(np.asarray(gradient))
    return shown


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


def _refused(error: Exception) -> dict[str, str]:
    return {"refused": type(error).__name__}


def of_relax_grad(asked: Sequence[Edge]) -> list[dict[str, str]]:
    """Return the results of relax_grad for some edges, which are compiled together."""
    functions = {
        f"edge{number}": _adjoint(edge).with_attr("global_symbol", f"edge{number}")
        for number, edge in enumerate(asked)
    }
    machine = relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), "llvm"), tvm.cpu())
    rows = []
    for name, edge in zip(functions, asked, strict=True):
        (_, value), gradients = machine[name](*map(tvm.runtime.tensor, edge.inputs))
        rows.append(show(value.numpy(), [gradient.numpy() for gradient in gradients]))
    return rows


def _adjoint(edge: Edge) -> relax.Function:
    """Return the function that returns ``((sum, value), gradients of the sum)``."""
    params = [
        relax.Var(f"x{i}", relax.TensorType(array.shape, str(array.dtype)))
        for i, array in enumerate(edge.inputs)
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            value = bb.emit_output(edge.relax(*params))
            total = bb.emit_output(op.sum(value))
        bb.emit_func_output(relax.Tuple([total, value]))
    wrt = [param for param, array in zip(params, edge.inputs, strict=True) if _is_float(array)]
    return relax_grad.value_and_grad(bb.get(), wrt=wrt)["main_adjoint"]


def of_torch(edge: Edge) -> dict[str, str] | None:
    """Return the result of PyTorch for an edge, or None if it has no such function."""
    import torch

    if edge.torch is None:
        return None
    tensors = [torch.from_numpy(array.copy()) for array in edge.inputs]
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    try:
        value = edge.torch(torch, *tensors)
        gradients = torch.autograd.grad(
            value.sum(), leaves, allow_unused=True, materialize_grads=True
        )
    except Exception as error:  # the page shows any error as a refusal
        return _refused(error)
    return show(value.detach().numpy(), [gradient.numpy() for gradient in gradients])


def of_jax(edge: Edge) -> dict[str, str] | None:
    """Return the result of JAX for an edge, or None if it has no such function."""
    import jax

    if edge.jax is None:
        return None
    floats = [i for i, array in enumerate(edge.inputs) if _is_float(array)]
    with jax.enable_x64(True):
        arrays = [jax.numpy.asarray(array) for array in edge.inputs]
        try:
            value = edge.jax(jax, *arrays)
            gradients = jax.grad(lambda *a: edge.jax(jax, *a).sum(), floats)(*arrays)
        except Exception as error:  # as above
            return _refused(error)
        return show(np.asarray(value), [np.asarray(gradient) for gradient in gradients])


def main() -> None:
    import jax
    import torch

    asked = edges()
    rows = [
        {
            "section": edge.section,
            "call": edge.call,
            "relax_grad": ours,
            "torch": of_torch(edge),
            "jax": of_jax(edge),
        }
        for edge, ours in zip(asked, of_relax_grad(asked), strict=True)
    ]
    about = {"tvm": tvm.__version__, "torch": torch.__version__, "jax": jax.__version__}
    RESULTS.write_text(json.dumps({"about": about, "edges": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
