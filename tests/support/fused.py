"""Attentions with moves of their tensors, and the gradients of programs before and after the fusion
of attentions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from programs import build, tensor
from sweep import TARGET
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.testing import _program
from relax_grad.transform import FuseAttention


def before_and_after(programs: Mapping[str, tuple[tvm.IRModule, Sequence[str]]]) -> dict:
    """Return the functions of the values and the gradients, by ``("before", name)`` and
    ``("after", name)``, compiled as one module.

    Parameters
    ----------
    programs : Mapping
        By name, a module with a function ``main``, and the names of the parameters whose gradients
        are taken.
    """
    adjoints, names = [], []
    for name, (module, wrt) in programs.items():
        for when, mod in (("before", module), ("after", FuseAttention()(module))):
            program = relax_grad.value_and_grad(mod, "main", wrt)
            del program["main"]
            adjoints.append(program)
            names.append((when, name))
    executable = tvm.compile(_program.merge(adjoints), TARGET, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return {name: machine[f"main_{i}_adjoint"] for i, name in enumerate(names, start=1)}


def moved(bb, x, *steps):
    """Return a tensor after reshapes, to tuples, and permutations, by lists."""
    for step in steps:
        move = op.permute_dims if isinstance(step, list) else op.reshape
        x = bb.emit(move(x, step))
    return x


def by_moves(shapes, queries, keys, values, scores, weights, result, *steps):
    """Return the module of an attention with moves of its operands, scores, weights and result."""
    params = [tensor(name, shape, "float32") for name, shape in zip("qkv", shapes, strict=True)]

    def body(bb, q, k, v):
        s = bb.emit(op.matmul(moved(bb, q, *queries), moved(bb, k, *keys)))
        s = moved(bb, s, *scores)
        for step in steps:
            s = bb.emit(step(bb, s))
        w = moved(bb, bb.emit(op.nn.softmax(s, -1)), *weights)
        y = moved(bb, bb.emit(op.matmul(w, moved(bb, v, *values))), *result)
        return bb.emit(op.sum(bb.emit(op.multiply(y, bb.emit(op.sin(y))))))

    return build(params, body), shapes
