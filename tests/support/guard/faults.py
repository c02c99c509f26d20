"""Functions with faulty kernels, which the guard pages must detect.

Each takes a vector of four elements, and most also take four indices.
"""

from __future__ import annotations

from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from relax_grad.topi._loops import extern


def _call(name, kernel, *tensors):
    # Programs that are compiled together must not share a name.
    return relax.BlockBuilder.current().emit_te(kernel, *tensors, primfunc_name_hint=name)


def _elements(x: te.Tensor, element, name: str = "faulty") -> te.Tensor:
    return te.compute(x.shape, element, name=name)


def reads_behind(x):
    return _call("reads_behind", lambda x: _elements(x, lambda i: x[i + 1]), x)


def reads_before(x):
    return _call("reads_before", lambda x: _elements(x, lambda i: x[i - 1]), x)


def reads_behind_a_workspace(x):
    def kernel(x):
        twice = _elements(x, lambda i: x[i] * 2, "twice")
        return _elements(x, lambda i: twice[i + 1])

    return _call("reads_behind_a_workspace", kernel, x)


def reads_at_index(x, index):
    return _call("reads_at_index", lambda x, index: _elements(x, lambda i: x[index[i]]), x, index)


def reads_at_number(x):
    def kernel(x):
        return _elements(x, lambda i: x[tirx.floor(x[i]).astype("int64")])

    return _call("reads_at_number", kernel, x)


def divides(x, index):
    def kernel(x, index):
        return _elements(x, lambda i: x[i] * tirx.floordiv(6, index[i]))

    return _call("divides", kernel, x, index)


def writes_behind(x):
    def body(x, out):
        with T.serial(4) as i:
            T.buffer_store(out, x[i], [i + 1])

    return _call("writes_behind", lambda x: extern(body, [x], x.shape, x.dtype, "faulty"), x)


def leaves_an_element_out(x):
    def body(x, out):
        with T.serial(3) as i:
            T.buffer_store(out, x[i], [i])

    return _call(
        "leaves_an_element_out", lambda x: extern(body, [x], x.shape, x.dtype, "faulty"), x
    )


def counts_to(x, index):
    def body(x, index, out):
        with T.serial(4) as i:
            T.buffer_store(out, x[i], [i])
            with T.serial(index[i]):
                T.buffer_store(out, out[i] + x[i], [i])

    def kernel(x, index):
        return extern(body, [x, index], x.shape, x.dtype, "faulty")

    return _call("counts_to", kernel, x, index)
