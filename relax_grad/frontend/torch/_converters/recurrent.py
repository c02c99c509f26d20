"""Converters of the recurrences of layers, which the trace makes of PyTorch's recurrent
networks."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from tvm import relax

from ....op import recurrent
from ._support import Importer


def _converter(name: str, count: int) -> Callable:
    """Return the converter of an operator of the trace with a number of results."""

    def convert(importer: Importer, node: fx.Node) -> relax.Expr | tuple[relax.Expr, relax.Expr]:
        result = importer.emit(getattr(recurrent, name)(*importer.args(node)))
        if isinstance(result.ty, relax.TensorType):
            return result
        results = tuple(importer.emit(relax.TupleGetItem(result, i)) for i in range(count))
        return results if count > 1 else results[0]

    return convert


RECURRENT = {
    f"{name}.default": _converter(name, count)
    for name, count in {
        "lstm": 2,
        "gru": 1,
        "rnn_tanh": 1,
        "rnn_relu": 1,
        "previous_steps": 1,
    }.items()
}
