"""The recurrences of recurrent layers over time, and their gradient.

The weight is packed into panels once. A task computes all steps of a block of sequences, so that no
thread waits for another one between two steps, and the states of the block stay in its cache.

In half precision, states, sums and gradients of states are carried in float32 from step to step,
and rounded once where they are results. Where the processor multiplies pairs or tiles (AMX) of
bfloat16, the first factors of the products with the weight are rounded too: the states, and the
gradients of the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from ...target import CPU
from ..language import builder as b
from ..language.builder import Extent, bind, const
from ..language.halves import Tensor
from ._backward import Backward
from ._forward import Forward
from ._parts import factors_of
from .layer import Layer
from .plan import Factors, recurrent_plan


def recurrence(of: Layer, cpu: CPU, *, unread: Sequence[int] = ()) -> tirx.PrimFunc:
    """Return the kernel of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.
    unread : Sequence[int]
        The indices of the results that the kernel does not write: most of its memory traffic is
        for the slopes, which only gradients read.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of the operator of this name, and its results.
    """
    taken = {
        "data": of.shape(of.gates),
        "hidden": of.initial(),
        **({"cell": of.initial()} if of.kind == "lstm" else {}),
        "weight": of.weight(),
        **({"bias": [of.size]} if of.kind == "gru" else {}),
    }
    results = {
        "lstm": [of.shape(), of.shape(), of.shape(6)],
        "gru": [of.shape(), of.shape(4), of.shape()],
        "gru_reset": [of.shape(), of.shape(5)],
    }.get(of.kind, [of.shape()])
    made = {f"result{i}": shape for i, shape in enumerate(results)}

    def emit(factors: Factors, weight: Tensor, inputs: Sequence, outputs: Sequence) -> None:
        plan = recurrent_plan(of, cpu, factors)
        Forward(plan, weight, inputs=inputs, results=outputs, unread=unread).emit()

    return _function(of.kind, cpu, taken, made, emit)


def recurrent_backward(
    of: Layer, cpu: CPU, *, has_cells_grad: bool = False, unread: Sequence[int] = ()
) -> tirx.PrimFunc:
    """Return the kernel of the gradient of a layer.

    Parameters
    ----------
    of : Layer
        The sizes.
    cpu : CPU
        The target CPU.
    has_cells_grad : bool
        Whether there is a gradient with respect to the cells of an LSTM.
    unread : Sequence[int]
        The indices of results that nothing reads. Those of the states are not written.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of ``relax.grad.recurrent_backward``, and its results.
    """
    taken = {
        "output_grad": of.shape(),
        "slopes": of.shape(of.slopes),
        "weight": of.weight(),
        **({"cells_grad": of.shape()} if has_cells_grad else {}),
    }
    results = {
        "gates": of.shape(of.gates),
        "states": of.shape(),
        "hidden": of.initial(),
        **({"cell": of.initial()} if of.kind == "lstm" else {}),
    }

    def emit(factors: Factors, weight: Tensor, inputs: Sequence, outputs: Sequence) -> None:
        plan = recurrent_plan(of, cpu, factors, is_turned=False)
        Backward(plan, weight, inputs=inputs, results=outputs, unread=unread).emit()

    return _function("recurrent_backward", cpu, taken, results, emit)


def _function(
    name: str,
    cpu: CPU,
    taken: Mapping[str, Sequence],
    results: Mapping[str, Sequence],
    emit: Callable,
) -> tirx.PrimFunc:
    """Return a function of operands and results, by their names and shapes, whose body
    ``emit(factors, weight, operands, results)`` emits."""
    place, count = list(taken).index("weight"), len(taken)

    def body(*tensors: Tensor) -> None:
        with factors_of(cpu, tensors[place], tensors[count]) as factors:
            emit(factors, tensors[place], tensors[:count], tensors[count:])

    shapes = [*taken.values(), *results.values()]
    return b.prim_func(name, b.floats([*taken, *results], shapes), body)


def previous_steps(shape: Sequence[Extent]) -> tirx.PrimFunc:
    """Return the kernel that moves values to the next step, with initial ones before them.

    Parameters
    ----------
    shape : Sequence[int or tirx.PrimExpr]
        The shape of the values: the steps, and the extents of a step.

    Returns
    -------
    function : tirx.PrimFunc
        Takes the arguments of ``relax.grad.previous_steps``, and its result.
    """
    steps, *own = shape

    def body(data: Tensor, initial: Tensor, result: Tensor) -> None:
        size = b.count(own)
        with b.parallel(0, steps) as t:
            b.either(
                t > 0,
                lambda: b.copy(result, bind(t * size), data, bind((t - 1) * size), size),
                lambda: b.copy(result, const(0), initial, const(0), size),
            )

    return b.prim_func(
        "previous_steps", b.floats(["data", "initial", "result"], [shape, own, shape]), body
    )
