"""Small programs that keep many values live until their end, as training steps do."""

from __future__ import annotations

from programs import build, tensor
from tvm import relax
from tvm.relax import op

import relax_grad

DEPTH, WIDTH = 6, 8


def layers(rows=64):
    """Return the module of a loss of several layers, and its gradients."""

    def body(bb, x, *weights):
        for weight in weights:
            x = bb.emit(op.matmul(x, weight))
        return op.sum(x)

    names = [f"w{i}" for i in range(DEPTH)]
    params = [tensor(name, (WIDTH, WIDTH), "float32") for name in names]
    module = build([tensor("x", (rows, WIDTH), "float32"), *params], body)
    return relax_grad.value_and_grad(module, wrt=names)


def step_of(module):
    """Add a function that calls the gradient function and updates the weights."""
    adjoint = module.get_global_var("main_adjoint")
    params = list(relax.utils.copy_with_new_vars(module["main_adjoint"]).params)
    bb = relax.BlockBuilder(module)
    with bb.function("step", params):
        with bb.dataflow():
            both = bb.emit(relax.Call(adjoint, params))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            news = [relax.TupleGetItem(both, 0)]
            for i, param in enumerate(params[1:]):
                change = bb.emit(
                    op.multiply(relax.TupleGetItem(gradients, i), relax.const(0.1, "float32"))
                )
                news.append(bb.emit(op.subtract(param, change)))
            result = bb.emit_output(relax.Tuple(news))
        bb.emit_func_output(result)
    return bb.get()


def late(rows=64):
    """Return a module whose products of forward and backward values all come at the end."""

    def body(bb, x):
        forward, backward = [x], []
        for _ in range(DEPTH):
            forward.append(bb.emit(op.tanh(forward[-1])))
        last = forward[-1]
        for value in forward[::-1]:
            last = bb.emit(op.multiply(last, value))
            backward.append(last)
        products = [
            bb.emit(op.sum(bb.emit(op.multiply(first, other)), [0]))
            for first, other in zip(forward[::-1], backward, strict=True)
        ]
        return relax.Tuple(products)

    return build([tensor("x", (rows, WIDTH), "float32")], body)
