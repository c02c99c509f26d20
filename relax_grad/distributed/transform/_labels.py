"""The axes of operators by labels: axes of operands and results with the same label have the same
positions.

An operator whose result at a position of a label depends only on the operands at that position can
run on a worker's part of the axis. The rules here tell the labels of operators for
:mod:`._propagation`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tvm import relax

from ._layouts import as_int

Labels = Sequence[Hashable]


@dataclass
class Axes:
    """The labels of a call.

    Attributes
    ----------
    operands, results : Sequence[Labels]
        The label of each axis of each tensor among the arguments, and among the results.
    whole : set
        The labels of axes that the operator needs whole.
    sums, means : set
        The labels of axes over which the operator takes a sum that is linear in the divided
        operands, or a mean.
    repeats : dict[tuple[int, Hashable], int]
        How many consecutive positions of a label share one of an operand, by the number of the
        operand and the label.
    """

    operands: Sequence[Labels]
    results: Sequence[Labels]
    whole: set = field(default_factory=set)
    sums: set = field(default_factory=set)
    means: set = field(default_factory=set)
    repeats: dict[tuple[int, Hashable], int] = field(default_factory=dict)


#: Takes a call and the types of its operands and of its result as whole tensors.
AxesRule = Callable[[relax.Call, list[relax.TensorType], relax.Type], Axes]

RULES: dict[str, AxesRule] = {}

#: The rules of operators whose arguments are extents or positions, by their names; see
#: :mod:`._shapes`.
SHAPES: dict[str, Callable] = {}


def rule(*names: str) -> Callable[[AxesRule], AxesRule]:
    """Register the axes of operators."""

    def register(function: AxesRule) -> AxesRule:
        RULES.update({f"relax.{name}": function for name in names})
        return function

    return register


_UNARY = """abs acos acosh asin asinh astype atan atanh bitwise_not ceil clip cos cosh erf exp floor
isfinite isinf isnan log logical_not negative nn.dropout nn.gelu nn.gelu_tanh nn.leakyrelu nn.relu
nn.selu nn.silu nn.softplus ones_like round rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc
zeros_like grad.stop_gradient grad.start_checkpoint grad.end_checkpoint"""

_BROADCASTING = """add atan2 bitwise_and bitwise_or bitwise_xor divide equal ewise_fma floor_divide
floor_mod full_like greater greater_equal left_shift less less_equal log_add_exp logical_and
logical_or logical_xor maximum minimum mod multiply not_equal power right_shift subtract where"""


@rule(*_UNARY.split(), *_BROADCASTING.split())
def _elementwise(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    results = result.fields if isinstance(result, relax.TupleType) else [result]
    ndim = results[0].ndim
    return Axes(
        [list(range(ndim - operand.ndim, ndim)) for operand in operands],
        [list(range(ndim)) for _ in results],
    )


@rule("matmul")
def _matmul(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    a, b = operands

    def batch(ndim: int) -> list:
        return [("batch", i) for i in range(max(ndim - 2, 0), 0, -1)]

    first = ["contracted"] if a.ndim == 1 else [*batch(a.ndim), "row", "contracted"]
    second = ["contracted"] if b.ndim == 1 else [*batch(b.ndim), "contracted", "column"]
    product = [
        *batch(max(a.ndim, b.ndim)),
        *(["row"] if a.ndim > 1 else []),
        *(["column"] if b.ndim > 1 else []),
    ]
    return Axes([first, second], [product], sums={"contracted"})


@rule("einsum")
def _einsum(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    subscripts = str(call.attrs.subscripts).replace(" ", "")
    terms, arrow, wanted = subscripts.partition("->")
    labels = [list(term) for term in terms.split(",")]
    letters = {letter for some in labels for letter in some}
    if not arrow or "." in subscripts or any(len(set(term)) < len(term) for term in labels):
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    return Axes(labels, [list(wanted)], sums=letters - set(wanted))


def labels_of(kinds: Sequence[relax.TensorType]) -> list[Labels]:
    """Return labels that differ on each axis of each tensor."""
    return [[(i, axis) for axis in range(kind.ndim)] for i, kind in enumerate(kinds)]


def _all(kinds: Sequence[relax.TensorType]) -> set:
    return {label for labels in labels_of(kinds) for label in labels}


@rule("permute_dims")
def _permute_dims(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim = operands[0].ndim
    axes = call.attrs.axes
    axes = range(ndim)[::-1] if axes is None else [int(axis) % ndim for axis in axes]
    return Axes([list(range(ndim))], [list(axes)])


@rule("nn.softmax", "nn.log_softmax", "cumsum", "cumprod", "flip")
def _along_an_axis(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    """One axis is needed whole, or all without an axis."""
    ndim = operands[0].ndim
    axis = call.attrs.axis
    if axis is None:
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    return Axes([list(range(ndim))], [list(range(ndim))], whole={int(axis) % ndim})


@rule("tril", "triu")
def _triangle(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim = operands[0].ndim
    return Axes([list(range(ndim))], [list(range(ndim))], whole={ndim - 2, ndim - 1})


@rule("nn.layer_norm", "nn.rms_norm")
def _norm(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim = operands[0].ndim
    axes = [int(axis) % ndim for axis in call.attrs.axes]
    return Axes(
        [list(range(ndim)), *(axes for _ in operands[1:])], [list(range(ndim))], whole=set(axes)
    )


@rule("sum", "mean", "max", "min", "prod", "variance", "std")
def _reduction(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim, axes, name = operands[0].ndim, call.attrs.axis, call.op.name
    reduced = set(range(ndim)) if axes is None else {int(axis) % ndim for axis in axes}
    left = [
        ("one", i) if i in reduced else i
        for i in range(ndim)
        if i not in reduced or call.attrs.keepdims
    ]
    axes_of = Axes([list(range(ndim))], [left])
    linear = {"relax.sum": axes_of.sums, "relax.mean": axes_of.means}
    linear.get(name, axes_of.whole).update(reduced)
    return axes_of


@rule("argmax", "argmin")
def _position(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim, axis = operands[0].ndim, call.attrs.axis
    if axis is None:
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    axis = int(axis) % ndim
    left = ["one" if i == axis else i for i in range(ndim) if i != axis or call.attrs.keepdims]
    return Axes([list(range(ndim))], [left], whole={axis})


@rule("concat")
def _concat(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim = operands[0].ndim
    if call.attrs.axis is None:
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    axis = int(call.attrs.axis) % ndim
    return Axes([list(range(ndim)) for _ in operands], [list(range(ndim))], whole={axis})


@rule("stack")
def _stack(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    ndim = operands[0].ndim
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % (ndim + 1)
    axes = list(range(ndim))
    return Axes([axes for _ in operands], [[*axes[:axis], "stacked", *axes[axis:]]])


@rule("take")
def _take(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    table, *indices = operands
    if call.attrs.axis is None:
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    axis, names = int(call.attrs.axis) % table.ndim, list(range(table.ndim))
    places = [("index", i) for index in indices for i in range(index.ndim)]
    labels = [*names[:axis], *places, *names[axis + 1 :]]
    return Axes([names, *([places] if indices else [])], [labels], whole={axis})


@rule("repeat")
def _repeat(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    """Consecutive positions of the result share one of the operand."""
    if call.attrs.axis is None:
        return Axes(labels_of(operands), labels_of([result]), whole=_all(operands))
    names = list(range(operands[0].ndim))
    axis = int(call.attrs.axis) % len(names)
    return Axes([names], [names], repeats={(0, axis): int(call.attrs.repeats)})


@rule("gather_elements")
def _gather_elements(
    call: relax.Call, operands: list[relax.TensorType], result: relax.Type
) -> Axes:
    ndim = operands[0].ndim
    axis = int(call.attrs.axis) % ndim
    places = ["place" if i == axis else i for i in range(ndim)]
    return Axes([list(range(ndim)), places], [places], whole={axis})


@rule("nn.attention", "nn.attention_bias", "grad.attention_dropout")
def _attention(call: relax.Call, operands: list[relax.TensorType], result: relax.Type) -> Axes:
    """Queries (batch, place, head, feature), and a bias (batch, head, place, key). Seed and stream
    are scalars; :mod:`._dropout` gives each worker a stream. Consecutive heads of queries
    may share one of keys."""
    generator: list[Labels] = [[], []] if call.op.name == "relax.grad.attention_dropout" else []
    others = operands[3 + len(generator) :]
    bias = [["batch", "head", "place", "key"][-operand.ndim :] for operand in others]
    labels = [
        ["batch", "place", "head", "feature"],
        ["batch", "key", "head", "feature"],
        ["batch", "key", "head", "value"],
        *generator,
        *bias,
    ]
    query, *keys = (as_int(operand.shape.values[2]) for operand in operands[:3])
    repeats: dict[tuple[int, Hashable], int] = {
        (i, "head"): query // heads
        for i, heads in enumerate(keys, start=1)
        if query and heads and heads > 1
    }
    return Axes(
        labels,
        [["batch", "place", "head", "value"]],
        whole={"place", "key", "feature"},
        repeats=repeats,
    )
