"""The vocabulary of random programs: smooth operators, and a few that block gradients.

Each entry takes a :class:`.pen.Pen`, chooses operands and writes a statement. It returns None if no
operand fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .pen import LARGE, Pen
from .script import BATCH, Tensor, Value, shape_text


def _elementwise(pen: Pen) -> Value | None:
    x = pen.pick()
    template, compute, bound = pen.rng.choice(_ELEMENTWISE)
    return pen.try_bind(template, compute, [x], x.kind, bound(x.bound))


_ELEMENTWISE = [
    ("R.tanh({0})", lambda t, x: t.tanh(x), lambda b: 1.0),
    ("R.sin({0})", lambda t, x: t.sin(x), lambda b: 1.0),
    ("R.cos({0})", lambda t, x: t.cos(x), lambda b: 1.0),
    ("R.sigmoid({0})", lambda t, x: t.sigmoid(x), lambda b: 1.0),
    ("R.atan({0})", lambda t, x: t.atan(x), lambda b: 1.6),
    ("R.erf({0})", lambda t, x: t.erf(x), lambda b: 1.0),
    ("R.exp(R.tanh({0}))", lambda t, x: t.tanh(x).exp(), lambda b: 2.8),
    ("R.negative({0})", lambda t, x: -x, lambda b: b),
    ("R.square({0})", lambda t, x: x * x, lambda b: b * b),
    (
        'R.sqrt(R.add(R.square({0}), R.const(1.0, "float64")))',
        lambda t, x: (x * x + 1).sqrt(),
        lambda b: b + 1,
    ),
    (
        'R.log(R.add(R.exp(R.sin({0})), R.const(0.5, "float64")))',
        lambda t, x: (x.sin().exp() + 0.5).log(),
        lambda b: 1.2,
    ),
    (
        'R.multiply({0}, R.const(-0.75, "float64"))',
        lambda t, x: x * -0.75,
        lambda b: 0.75 * b,
    ),
    ("R.nn.silu({0})", lambda t, x: t.nn.functional.silu(x), lambda b: b),
    ("R.nn.gelu({0})", lambda t, x: t.nn.functional.gelu(x), lambda b: b),
]


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape of an element-wise result; None if the shapes do not broadcast."""
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    if any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(max(pair) for pair in zip(a, b, strict=True))


def _binary(pen: Pen) -> Value | None:
    x = pen.pick()
    fitting = pen.leaves(lambda tensor: _broadcast(x.tensor.shape, tensor.shape) is not None)
    y = pen.choose(fitting)  # x fits
    template, compute, bound = pen.rng.choice(_BINARY)
    shape = _broadcast(x.tensor.shape, y.tensor.shape)
    assert shape is not None
    return pen.try_bind(template, compute, [x, y], Tensor(shape), bound(x.bound, y.bound))


_BINARY = [
    ("R.add({0}, {1})", lambda t, x, y: x + y, lambda a, b: a + b),
    ("R.subtract({0}, {1})", lambda t, x, y: x - y, lambda a, b: a + b),
    ("R.multiply({0}, {1})", lambda t, x, y: x * y, lambda a, b: a * b),
    (
        'R.divide({0}, R.add(R.square({1}), R.const(1.0, "float64")))',
        lambda t, x, y: x / (y * y + 1),
        lambda a, b: a,
    ),
]


def _with_constant(pen: Pen) -> Value | None:
    """Add or multiply an operand with a one-dimensional constant."""
    x = pen.pick_where(lambda tensor: tensor.shape and tensor.shape[-1] < BATCH)
    if x is None:
        return None
    numbers = [round(pen.rng.uniform(-1, 1), 2) for _ in range(x.tensor.shape[-1])]
    name, compute, bound = pen.rng.choice(
        [
            ("add", lambda t, x: x + t.tensor(numbers, dtype=t.float64), x.bound + 1),
            ("multiply", lambda t, x: x * t.tensor(numbers, dtype=t.float64), x.bound),
        ]
    )
    return pen.try_bind(
        f'R.{name}({{0}}, R.const({numbers}, "float64"))', compute, [x], x.kind, bound
    )


def _matmul(pen: Pen) -> Value | None:
    """Write a matrix product, with the second operand transposed if its shape needs it, or at
    random."""
    x = pen.pick_where(lambda tensor: len(tensor.shape) >= 1)
    if x is None:
        return None
    inner = x.tensor.shape[-1]
    y = pen.pick_where(lambda tensor: len(tensor.shape) == 2 and inner in tensor.shape)
    if y is None:
        return None
    bound = x.bound * y.bound * inner
    if y.tensor.shape[0] == inner and (y.tensor.shape[1] != inner or pen.rng.random() < 0.5):
        kind = Tensor((*x.tensor.shape[:-1], y.tensor.shape[1]))
        return pen.try_bind("R.matmul({0}, {1})", lambda t, x, y: x @ y, [x, y], kind, bound)
    kind = Tensor((*x.tensor.shape[:-1], y.tensor.shape[0]))
    template = "R.matmul({0}, R.permute_dims({1}))"
    return pen.try_bind(template, lambda t, x, y: x @ y.T, [x, y], kind, bound)


def _axes(pen: Pen, shape: Sequence[int]) -> list[int]:
    count = pen.rng.randint(1, len(shape))
    return sorted(pen.rng.sample(range(len(shape)), count))


def _reduce(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: len(tensor.shape) >= 1)
    if x is None:
        return None
    axes, keepdims = _axes(pen, x.tensor.shape), pen.rng.random() < 0.5
    shape = tuple(
        1 if axis in axes else size
        for axis, size in enumerate(x.tensor.shape)
        if keepdims or axis not in axes
    )
    count = math.prod(x.tensor.shape[axis] for axis in axes)
    name, compute, bound = pen.rng.choice(
        [
            ("sum", lambda t, x: x.sum(axes, keepdims), count * x.bound),
            ("mean", lambda t, x: x.mean(axes, keepdims), x.bound),
            ("variance", lambda t, x: x.var(axes, correction=0, keepdim=keepdims), x.bound**2),
        ]
    )
    template = f"R.{name}({{0}}, axis={axes}, keepdims={keepdims})"
    return pen.try_bind(template, compute, [x], Tensor(shape), bound)


def _along_an_axis(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: tensor.shape and tensor.shape[-1] < BATCH)
    if x is None:
        return None
    template, compute, bound = pen.rng.choice(
        [
            ("R.nn.softmax({0}, axis=-1)", lambda t, x: x.softmax(-1), 1.0),
            ("R.nn.log_softmax({0}, axis=-1)", lambda t, x: x.log_softmax(-1), 2 * x.bound + 2),
            ("R.cumsum({0}, axis=-1)", lambda t, x: x.cumsum(-1), 4 * x.bound),
        ]
    )
    return pen.try_bind(template, compute, [x], x.kind, bound)


def _permute(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: len(tensor.shape) >= 2)
    if x is None:
        return None
    axes = list(range(len(x.tensor.shape)))
    pen.rng.shuffle(axes)
    kind = Tensor(tuple(x.tensor.shape[axis] for axis in axes))
    template = f"R.permute_dims({{0}}, axes={axes})"
    return pen.try_bind(template, lambda t, x: x.permute(axes), [x], kind, x.bound)


def _reshape(pen: Pen) -> Value | None:
    """Write a reshape that merges two axes, splits one, or adds or removes one of extent 1."""
    x = pen.pick()
    shape = list(x.tensor.shape)
    ways = [[*shape[:i], 1, *shape[i:]] for i in range(len(shape) + 1)]
    for i, size in enumerate(shape):
        ways += [[*shape[:i], *shape[i + 1 :]]] if size == 1 else []
        ways += [[*shape[:i], size // 2, 2, *shape[i + 1 :]]] if size % 2 == 0 else []
        ways += [[*shape[:i], size * shape[i + 1], *shape[i + 2 :]]] if i + 1 < len(shape) else []
    new = tuple(pen.rng.choice([way for way in ways if len(way) <= 3] or [shape]))
    template = f"R.reshape({{0}}, {shape_text(new)})"
    return pen.try_bind(template, lambda t, x: x.reshape(new), [x], Tensor(new), x.bound)


def _broadcast_to(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: len(tensor.shape) <= 2)
    if x is None:
        return None
    new = (pen.rng.choice([2, BATCH]), *x.tensor.shape)
    template = f"R.broadcast_to({{0}}, {shape_text(new)})"
    return pen.try_bind(template, lambda t, x: x.expand(new), [x], Tensor(new), x.bound)


def _split(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: any(size in (2, 3, 4) for size in tensor.shape))
    if x is None:
        return None
    shape = x.tensor.shape
    axis = pen.rng.choice([axis for axis, size in enumerate(shape) if size in (2, 3, 4)])
    parts = pen.rng.choice([n for n in (2, 3, 4) if shape[axis] % n == 0])
    size = shape[axis] // parts
    part = Tensor((*shape[:axis], size, *shape[axis + 1 :]))
    return pen.try_bind(
        f"R.split({{0}}, {parts}, axis={axis})",
        lambda t, x: x.split(size, axis),
        [x],
        (part,) * parts,
        x.bound,
    )


def _concat(pen: Pen) -> Value | None:
    """Write a concatenation of the elements of a tuple, or of two tensors."""
    tuples = [value for value in pen.values if _can_concat(value.kind)]
    if tuples and pen.rng.random() < 0.5:
        whole = pen.rng.choice(tuples)
        elements = list(whole.elements())
        shape, count = elements[0].tensor.shape, len(elements)
        operands, text, bound = [whole], "{0}", whole.bound
        axis = pen.rng.randrange(len(shape))

        def compute(t: Any, *x: Any) -> Any:
            return t.concat(list(x[0]), axis)
    else:
        x = pen.pick_where(lambda tensor: len(tensor.shape) >= 1)
        if x is None:
            return None
        y = pen.pick_like(x.tensor)
        shape, count = x.tensor.shape, 2
        operands, text, bound = [x, y], "({0}, {1})", max(x.bound, y.bound)
        axis = pen.rng.randrange(len(shape))

        def compute(t: Any, *x: Any) -> Any:
            return t.concat(x, axis)

    kind = Tensor((*shape[:axis], count * shape[axis], *shape[axis + 1 :]))
    return pen.try_bind(f"R.concat({text}, axis={axis})", compute, operands, kind, bound)


def _can_concat(kind: Any) -> bool:
    return (
        isinstance(kind, tuple)
        and isinstance(kind[0], Tensor)
        and kind[0].is_float
        and len(kind[0].shape) > 0
        and all(element == kind[0] for element in kind)
    )


def _tuple(pen: Pen) -> Value | None:
    """Write a tuple of arbitrary values, including tuples."""
    chosen = [pen.rng.choice(pen.values) for _ in range(pen.rng.randint(1, 3))]
    chosen = [pen.rng.choice([v, *v.elements()]) for v in chosen]
    if any(_depth(value.kind) > 2 for value in chosen):
        return None
    text = ", ".join(f"{{{i}}}" for i in range(len(chosen)))
    bound = max(value.bound for value in chosen)
    kind = tuple(value.kind for value in chosen)
    return pen.try_bind(f"({text},)", lambda t, *x: x, chosen, kind, bound)


def _depth(kind: Any) -> int:
    return 1 + max(map(_depth, kind), default=0) if isinstance(kind, tuple) else 0


def _alias(pen: Pen) -> Value | None:
    value = pen.rng.choice(pen.values)
    value = pen.rng.choice([value, *value.elements()])
    return pen.try_bind("{0}", lambda t, x: x, [value], value.kind, value.bound)


def _take(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: tensor.shape and min(tensor.shape) < BATCH)
    if x is None:
        return None
    shape = x.tensor.shape
    axis = pen.rng.choice([axis for axis, size in enumerate(shape) if size < BATCH])
    places = [pen.rng.randrange(shape[axis]) for _ in range(pen.rng.randint(2, 3))]
    kind = Tensor((*shape[:axis], len(places), *shape[axis + 1 :]))
    return pen.try_bind(
        f'R.take({{0}}, R.const({places}, "int64"), axis={axis})',
        lambda t, x: x.index_select(axis, t.tensor(places)),
        [x],
        kind,
        x.bound,
    )


def _slice(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: any(size in (3, 4) for size in tensor.shape))
    if x is None:
        return None
    shape = x.tensor.shape
    axis = pen.rng.choice([axis for axis, size in enumerate(shape) if size in (3, 4)])
    kind = Tensor((*shape[:axis], 2, *shape[axis + 1 :]))
    return pen.try_bind(
        f"R.strided_slice({{0}}, axes=[{axis}], begin=[1], end=[3])",
        lambda t, x: x.narrow(axis, 1, 2),
        [x],
        kind,
        x.bound,
    )


def _where(pen: Pen) -> Value | None:
    x = pen.pick()
    y = pen.pick_like(x.tensor)
    z = pen.pick_like(x.tensor)
    return pen.try_bind(
        'R.where(R.greater({0}, R.const(0.1234567, "float64")), {1}, {2})',
        lambda t, x, y, z: t.where(x > 0.1234567, y, z),
        [x, y, z],
        x.kind,
        max(y.bound, z.bound),
    )


# The operators below block gradients.


def _floor(pen: Pen) -> Value | None:
    x = pen.pick()
    template = 'R.floor(R.multiply({0}, R.const(3.1415926, "float64")))'

    def compute(_torch: Any, x: Any) -> Any:
        # PyTorch's gradient is zero, which later rules may multiply by infinity. Here the result is
        # a constant.
        return (x * 3.1415926).floor().detach()

    return pen.try_bind(template, compute, [x], x.kind, 3 * x.bound)


#: Added to the operand of an argmax to avoid ties.
_UNEVEN = [0.1, 0.37, 0.0, 0.51]


def _argmax(pen: Pen) -> Value | None:
    x = pen.pick_where(lambda tensor: tensor.shape and tensor.shape[-1] in (2, 3, 4))
    if x is None:
        return None
    uneven = _UNEVEN[: x.tensor.shape[-1]]
    return pen.try_bind(
        f'R.argmax(R.add({{0}}, R.const({uneven}, "float64")), axis=-1)',
        lambda t, x: (x + t.tensor(uneven, dtype=t.float64)).argmax(-1),
        [x],
        Tensor(x.tensor.shape[:-1], "int64"),
        4.0,
    )


def _of_integers(pen: Pen) -> Value | None:
    """Write a conversion of integers back to floating-point numbers."""
    leaves = [
        leaf for value in pen.values for leaf in value.leaves() if leaf.tensor.dtype == "int64"
    ]
    if not leaves:
        return _argmax(pen)
    x = pen.rng.choice(leaves)
    shape = x.tensor.shape
    if len(shape) < 3 and pen.rng.random() < 0.6:
        return pen.try_bind(
            "R.one_hot({0}, T.float64(1.0), T.float64(0.0), 4, axis=-1)",
            lambda t, x: t.nn.functional.one_hot(x, 4).double(),
            [x],
            Tensor((*shape, 4)),
            1.0,
        )
    return pen.try_bind(
        'R.astype({0}, "float64")', lambda t, x: x.double(), [x], Tensor(shape), 4.0
    )


#: The entries with their weights.
VOCABULARY: list[tuple[Callable[[Pen], Value | None], int]] = [
    (_elementwise, 8),
    (_binary, 9),
    (_with_constant, 2),
    (_matmul, 4),
    (_reduce, 2),
    (_along_an_axis, 2),
    (_permute, 2),
    (_reshape, 2),
    (_broadcast_to, 1),
    (_split, 3),
    (_concat, 3),
    (_tuple, 3),
    (_alias, 1),
    (_take, 1),
    (_slice, 1),
    (_where, 1),
    (_floor, 1),
    (_argmax, 1),
    (_of_integers, 1),
]


def in_float32(pen: Pen) -> Value | None:
    """Write a sequence of up to four operators in float32, between casts."""
    return _in_steps(pen, ["float32"], _ELEMENTWISE)


def in_halves(pen: Pen) -> Value | None:
    """Write a sequence of up to four operators in half precision, between casts; some steps cast to
    another dtype of at most 32 bits."""
    return _in_steps(pen, ["bfloat16", "float16"], [*_ELEMENTWISE, *_ALONG_ROWS])


#: Operators that combine the elements of a row, and keep the shape.
_ALONG_ROWS = [
    ("R.nn.softmax({0})", lambda t, x: t.softmax(x, -1), lambda b: 1.0),
    (
        "R.subtract({0}, R.mean({0}, axis=[-1], keepdims=True))",
        lambda t, x: x - x.mean(-1, keepdim=True),
        lambda b: 2 * b,
    ),
    (
        "R.multiply({0}, R.tanh(R.sum({0}, axis=[-1], keepdims=True)))",
        lambda t, x: x * x.sum(-1, keepdim=True).tanh(),
        lambda b: b,
    ),
    ("R.cumsum({0}, axis=-1)", lambda t, x: x.cumsum(-1, dtype=x.dtype), lambda b: 4 * b),
]


def _in_steps(pen: Pen, dtypes: Sequence[str], operators: Sequence) -> Value | None:
    """Write a sequence of operators between casts.

    Parameters
    ----------
    dtypes : Sequence[str]
        The dtypes of the sequence. With more than one, half of its steps begin with a cast to one
        of them or to float32.
    operators : Sequence
        Templates, functions of PyTorch, and bounds. They keep the shape.
    """
    x = pen.pick()
    operators = operators if x.tensor.shape else _ELEMENTWISE
    dtype = pen.rng.choice(dtypes)
    lines, steps = [f'R.astype({{0}}, "{dtype}")'], [_cast(dtype)]
    bound = x.bound
    for _ in range(pen.rng.randint(1, 4)):
        if len(dtypes) > 1 and pen.rng.random() < 0.5:
            dtype = pen.rng.choice([*dtypes, "float32"])
            lines.append(f'R.astype({{name}}_{len(lines) - 1}, "{dtype}")')
            steps.append(_cast(dtype))
        template, compute, bound_of = pen.rng.choice(operators)
        if bound_of(bound) > LARGE:
            continue
        before = f"{{name}}_{len(lines) - 1}"
        lines.append(template.replace("{0}", before).replace("float64", dtype))
        steps.append(compute)
        bound = bound_of(bound)
    lines.append(f'R.astype({{name}}_{len(lines) - 1}, "float64")')
    heads = [*(f"{{name}}_{i} = " for i in range(len(lines) - 1)), ""]
    text = "\n".join(map("".join, zip(heads, lines, strict=True)))

    def compute_all(t: Any, x: Any) -> Any:
        for step in steps:
            x = step(t, x)
        return x.double()

    return pen.try_bind(text, compute_all, [x], x.kind, bound)


def _cast(dtype: str) -> Callable:
    return lambda t, x: x.to(getattr(t, dtype))


def write(pen: Pen) -> Value | None:
    """Write one random statement."""
    entries, weights = zip(*pen.vocabulary, strict=True)
    return pen.rng.choices(entries, weights)[0](pen)
