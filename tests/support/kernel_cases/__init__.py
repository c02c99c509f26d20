"""Calls of every operator with kernels, in odd sizes that leave partial vectors, tiles and
blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tvm import relax

from relax_grad.cpu.dispatch import operators_with_kernels
from relax_grad.op import norm, norm_statistics, recurrent
from relax_grad.op.activation import log_softmax_backward, softmax_backward
from relax_grad.op.index import gather_elements_backward_data, take_backward
from relax_grad.op.index_nd import gather_nd_backward_data, index_tensor_backward_data
from relax_grad.op.quantized import quantized_matmul, quantized_matmul_backward_data

from .attention import attention_cases
from .case import KernelCase, N
from .windows import window_cases


@functools.cache
def cases() -> list[KernelCase]:
    """Return the cases of all operators with kernels."""
    known = set(operators_with_kernels())
    return [case for case in _cases() if case.op in known]


def _cases() -> Iterator[KernelCase]:
    yield from _products()
    yield from window_cases()
    yield from _norms()
    yield from _softmaxes()
    yield from attention_cases()
    yield from _recurrences()
    yield from _quantized()
    yield from _sums()
    yield from _takes()
    yield from _points()
    yield from _concats()


def _products() -> Iterator[KernelCase]:
    matmul, turn = relax.op.matmul, relax.op.permute_dims
    yield KernelCase("relax.matmul", [(N, 70), (70, 45)], lambda _, a, b: matmul(a, b))
    yield KernelCase("relax.matmul", [(N, 13, 7), (N, 7, 37)], lambda _, a, b: matmul(a, b))
    yield KernelCase("relax.matmul", [(3, N), (N, 5)], lambda _, a, b: matmul(a, b))
    yield KernelCase(
        "relax.matmul", [(N, 70), (45, 70)], lambda _, a, b: matmul(a, turn(b)), detail="NT"
    )
    for columns in (24, 48, 96):  # an odd number of whole panels for one of the targets each
        yield KernelCase(
            "relax.matmul",
            [(N, 70), (70, columns)],
            lambda _, a, b: matmul(a, b),
            detail=f"{columns} columns",
        )
    yield KernelCase(
        "relax.matmul", [(N, 21), (N, 45)], lambda _, a, b: matmul(turn(a), b), detail="TN"
    )
    yield KernelCase(
        "relax.matmul", [(21, 33), (N, 21)], lambda _, a, b: matmul(turn(a), turn(b)), detail="TT"
    )
    for form, shapes in (("NN", [(65, 1001), (1001, 70)]), ("TN", [(1001, 65), (1001, 70)])):
        yield KernelCase(
            "relax.matmul",
            shapes,
            lambda _, a, b, form=form: matmul(turn(a) if form == "TN" else a, b),
            detail=f"{form} in parts of k",
        )
    for form, shapes in (("NN", [(70, 300), (300, 230)]), ("NT", [(70, 45), (230, 45)])):
        yield KernelCase(
            "relax.matmul",
            shapes,
            lambda _, a, b, form=form: matmul(a, turn(b) if form == "NT" else b),
            detail=f"{form} whose panels threads take from each other",
        )
    for form, shapes in (("TN", [(270, 400), (270, 45)]), ("NT", [(400, 65), (45, 65)])):
        yield KernelCase(
            "relax.matmul",
            shapes,
            lambda _, a, b, form=form: matmul(
                turn(a) if form == "TN" else a, turn(b) if form == "NT" else b
            ),
            detail=f"{form} whose rows threads take from each other",
        )
    for form, shapes in (("NN", [(61, 5), (5, 150)]), ("NT", [(61, 5), (150, 5)])):
        yield KernelCase(
            "relax.matmul",
            shapes,
            lambda _, a, b, form=form: matmul(a, turn(b) if form == "NT" else b),
            detail=f"{form} of few steps",
        )
    # The factors change places.
    turned = {
        "TN": [(40, 130), (40, 5)],
        "TT": [(40, 130), (9, 40)],
        "NT": [(400, 1000), (6, 1000)],
        "NN": [(130, 40), (40, 3)],
        "TN of long sums": [(1030, 130), (1030, 10)],
    }
    for detail, shapes in turned.items():
        yield KernelCase(
            "relax.matmul",
            shapes,
            lambda _, a, b, form=detail[:2]: matmul(
                turn(a) if form[0] == "T" else a, turn(b) if form[1] == "T" else b
            ),
            detail=f"{detail} turned",
        )
    # With static shapes, the first of several products of one factor packs it for the others.
    for place, role in enumerate(("packs a shared factor", "reads packed panels")):
        for form, shape in (("NN", (70, 45)), ("NT", (45, 70))):
            yield KernelCase(
                "relax.matmul",
                [*[(N, 13, 70)] * 4, shape],
                lambda _, *a, form=form: relax.Tuple(
                    [matmul(x, turn(a[-1]) if form == "NT" else a[-1]) for x in a[:-1]]
                ),
                detail=f"{form} {role}",
                kernels=(4, place),
            )
    # Rows at multiples of 2 KB are copied before the multiplication.
    yield KernelCase(
        "relax.matmul", [(N, 512), (512, 70)], lambda _, a, b: matmul(a, b), detail="a is copied"
    )
    yield KernelCase(
        "relax.matmul",
        [(3, 45, 512), (N, 512)],
        lambda _, a, b: matmul(a, turn(b)),
        detail="a is copied, NT",
    )
    # The first processors with AVX-512 copy it transposed.
    yield KernelCase(
        "relax.matmul", [(385, 771), (771, 515)], lambda _, a, b: matmul(a, b), detail="large"
    )
    # In half precision, the kernel adds the bias.
    for detail, rows in (("few rows", 3), ("tiles", 50)):
        yield KernelCase(
            "relax.matmul",
            [(rows, N, 70), (45, 70), (45,)],
            lambda _, a, b, bias: relax.op.add(matmul(a, turn(b)), bias),
            detail=f"{detail} and a bias",
            differs_in_halves=True,
        )


def _norms() -> Iterator[KernelCase]:
    data, small = (N, 6, 5, 7), (6,)
    op = relax.op.nn
    yield KernelCase(
        "relax.nn.batch_norm", [data, *[small] * 4], lambda _, *a: op.batch_norm(*a, axis=1)
    )
    # The kernels apply the ReLU.
    yield KernelCase(
        "relax.nn.batch_norm",
        [data, *[small] * 4],
        lambda _, *a: op.relu(op.batch_norm(*a, axis=1)[0]),
        detail="ReLU",
    )
    yield KernelCase(
        "relax.nn.group_norm",
        [data, small, small],
        lambda _, *a: op.relu(op.group_norm(*a, 3, 1, [2, 3])),
        detail="ReLU",
    )
    yield KernelCase(
        "relax.grad.batch_norm_backward_data",
        [data, data, *[small] * 5],
        lambda _, *a: norm.batch_norm_backward_data(*a, axis=1),
    )
    yield KernelCase(
        "relax.grad.batch_norm_backward_gamma",
        [data, data, small, small],
        lambda _, *a: norm.batch_norm_backward_gamma(*a, axis=1),
    )
    yield KernelCase(
        "relax.grad.batch_norm_statistics",
        [data],
        lambda _, x: norm_statistics.batch_norm_statistics(x, axis=1),
    )
    for last in (7, 37):
        wide = (N, 3, last)
        row = (N, 3, 1)
        yield KernelCase(
            "relax.nn.layer_norm",
            [wide, (last,), (last,)],
            lambda _, *a: op.layer_norm(*a, axes=-1),
        )
        yield KernelCase(
            "relax.grad.layer_norm_backward_data",
            [wide, wide, (last,), row, row],
            lambda _, *a: norm.layer_norm_backward_data(*a, axes=[-1]),
        )
        yield KernelCase(
            "relax.grad.layer_norm_backward_gamma",
            [wide, wide, row, row],
            lambda _, *a: norm.layer_norm_backward_gamma(*a, axes=[-1]),
        )
        if last > 7:
            longer = (N, 11, 133)
            yield KernelCase(
                "relax.grad.layer_norm_backward_gamma",
                [longer, longer, (N, 11, 1), (N, 11, 1)],
                lambda _, *a: norm.layer_norm_backward_gamma(*a, axes=[-1]),
                detail="in cache",
            )
        yield KernelCase(
            "relax.nn.rms_norm", [wide, (last,)], lambda _, *a: op.rms_norm(*a, axes=-1)
        )
        for statistics in (
            norm_statistics.layer_norm_statistics,
            norm_statistics.rms_norm_statistics,
        ):
            yield KernelCase(
                f"relax.grad.{statistics.__name__}",
                [wide],
                lambda _, x, statistics=statistics: statistics(x, axes=[-1]),
            )
        yield KernelCase(
            "relax.grad.rms_norm_backward_data",
            [wide, wide, (last,), row],
            lambda _, *a: norm.rms_norm_backward_data(*a, axes=[-1]),
        )
        yield KernelCase(
            "relax.grad.rms_norm_backward_weight",
            [wide, wide, row],
            lambda _, *a: norm.rms_norm_backward_weight(*a, axes=[-1]),
        )
    attrs = {"channel_axis": 1, "axes": [2, 3]}
    rows = (N, 6, 1, 1)
    yield KernelCase(
        "relax.nn.group_norm",
        [data, small, small],
        lambda _, *a: op.group_norm(*a, num_groups=2, **attrs),
    )
    yield KernelCase(
        "relax.nn.instance_norm",
        [data, small, small],
        lambda _, *a: op.instance_norm(*a, **attrs),
    )
    yield KernelCase(
        "relax.grad.group_norm_statistics",
        [data],
        lambda _, x: norm_statistics.group_norm_statistics(x, num_groups=2, **attrs),
    )
    yield KernelCase(
        "relax.grad.instance_norm_statistics",
        [data],
        lambda _, x: norm_statistics.instance_norm_statistics(x, **attrs),
    )
    yield KernelCase(
        "relax.grad.instance_norm_backward_data",
        [data, data, small, *[rows] * 4],
        lambda _, *a: norm.instance_norm_backward_data(*a, **attrs),
    )
    yield KernelCase(
        "relax.grad.instance_norm_backward_gamma",
        [data, data, rows, rows],
        lambda _, *a: norm.instance_norm_backward_gamma(*a, **attrs),
    )


def _softmaxes() -> Iterator[KernelCase]:
    for shape in ((N, 3, 21), (3, N)):
        yield KernelCase("relax.nn.softmax", [shape], lambda _, x: relax.op.nn.softmax(x))
        yield KernelCase("relax.nn.log_softmax", [shape], lambda _, x: relax.op.nn.log_softmax(x))
        for backward in (softmax_backward, log_softmax_backward):
            yield KernelCase(
                f"relax.grad.{backward.__name__}",
                [shape, shape],
                lambda _, dy, y, backward=backward: backward(dy, y),
            )


def _recurrences() -> Iterator[KernelCase]:
    for size, steps in ((19, 3), (5, N)):
        states, initial = (steps, N, size), (N, size)
        for name, gates, others in (
            ("lstm", 4, [initial, initial, (4 * size, size)]),
            ("gru", 3, [initial, (3 * size, size), (size,)]),
            ("gru", 3, [initial, (3 * size, size)]),
            ("rnn_tanh", 1, [initial, (size, size)]),
            ("rnn_relu", 1, [initial, (size, size)]),
        ):
            function = getattr(recurrent, name)
            yield KernelCase(
                f"relax.grad.{name}",
                [(steps, N, gates * size), *others],
                lambda _, *tensors, function=function: function(*tensors),
                detail=f"{len(others)} operands",
            )
        yield KernelCase(
            "relax.grad.previous_steps",
            [states, initial],
            lambda _, *tensors: recurrent.previous_steps(*tensors),
        )
        parts = (6, 4, True), (6, 4, False), (5, 3, False), (4, 3, False), (1, 1, False)
        for slopes, gates, cells in parts:
            yield KernelCase(
                "relax.grad.recurrent_backward",
                [states, (steps, N, slopes * size), (gates * size, size), *[states] * cells],
                lambda _, *tensors: recurrent.recurrent_backward(*tensors),
                detail=f"{slopes} {cells}",
            )


def _quantized() -> Iterator[KernelCase]:
    # Incomplete groups, tiles and panels; three stretches of the sum.
    for outputs, inputs, groups, size, dtype, zeros in (
        (45, 70, 3, 32, "uint8", None),
        (19, 33, 3, 16, "int8", "float32"),
        (35, 515, 9, 64, "uint8", "uint8"),
        (515, 35, 3, 16, "int8", "int8"),
    ):
        of_groups = (outputs, groups)
        weight = (*of_groups, size if dtype == "int8" else size // 2)
        operands = [weight, of_groups, *([of_groups] if zeros else [])]
        integers = {1: dtype, **({3: zeros} if zeros else {})}
        detail = f"{outputs} {dtype} {zeros}"
        yield KernelCase(
            "relax.grad.quantized_matmul",
            [(N, inputs), *operands],
            lambda _, *tensors: quantized_matmul(*tensors),
            integers,
            detail,
        )
        yield KernelCase(
            "relax.grad.quantized_matmul_backward_data",
            [(N, outputs), *operands],
            lambda n, grad, *weight, inputs=inputs: quantized_matmul_backward_data(
                grad, (n, inputs), *weight
            ),
            integers,
            detail,
        )


def _sums() -> Iterator[KernelCase]:
    shape = (N, 6, 5, 7)
    for axes in ([0, 2, 3], [2, 3], [0], [1, 2]):
        for name in ("sum", "mean"):
            yield KernelCase(
                f"relax.{name}",
                [shape],
                lambda _, x, name=name, axes=axes: getattr(relax.op, name)(x, axes),
                detail=str(axes),
            )
    yield KernelCase("relax.sum", [(N, 67)], lambda _, x: relax.op.sum(x, [0]))
    yield KernelCase("relax.sum", [(N, 133)], lambda _, x: relax.op.sum(x, [0]), detail="in cache")
    yield KernelCase("relax.sum", [(67, N)], lambda _, x: relax.op.sum(x, [1]))
    for result in ((7,), (5, 7), (6, 1, 1)):
        yield KernelCase(
            "relax.collapse_sum_to",
            [shape],
            lambda _, x, s=result: relax.op.collapse_sum_to(x, relax.ShapeExpr(s)),
            detail=str(result),
        )
        yield KernelCase(
            "relax.collapse_sum_like",
            [shape, result],
            lambda _, x, y: relax.op.collapse_sum_like(x, y),
        )


def _takes() -> Iterator[KernelCase]:
    for mode in ("fast", "clip", "wrap", "nan"):
        for dtype in ("int32", "int64", "int8"):
            for shape, axis in (((5, 21), 0), ((2, 5, 70), 1)):
                result = (*shape[:axis], N, *shape[axis + 1 :])
                yield KernelCase(
                    "relax.grad.take_backward",
                    [result, shape, (N,)],
                    lambda _, dy, x, i, axis=axis, mode=mode: take_backward(
                        dy, x, i, axis=axis, mode=mode
                    ),
                    dtype,
                    mode,
                )
        yield KernelCase(
            "relax.take",
            [(2, N, 13), (9,)],
            lambda _, x, i, mode=mode: relax.op.take(x, i, axis=-1, mode=mode),
            "int64",
            mode,
        )
    yield KernelCase(
        "relax.grad.take_backward",
        [(4, 21), (N, 21), (4,)],
        lambda _, dy, x, i: take_backward(dy, x, i, axis=0, mode="wrap"),
        "int64",
        "symbolic rows",
    )


def _points() -> Iterator[KernelCase]:
    for dtype in ("int32", "int64", "int8"):
        yield KernelCase(
            "relax.grad.gather_elements_backward_data",
            [(N, 9), (N, 9)],
            lambda n, dy, i: gather_elements_backward_data(dy, (n, 13), i, axis=1),
            dtype,
        )
        yield KernelCase(
            "relax.grad.gather_nd_backward_data",
            [(N, 21), (N, 2)],
            lambda _, dy, i: gather_nd_backward_data(dy, (3, 5, 21), i),
            dtype,
        )
        yield KernelCase(
            "relax.grad.index_tensor_backward_data",
            [(N, 21), (N,)],
            lambda _, dy, i: index_tensor_backward_data(dy, (5, 21), [i]),
            dtype,
        )


def _concats() -> Iterator[KernelCase]:
    whole, rows = [(N, extent, 7) for extent in (1, 5, 70)], [(N, 7), (3, 7), (40, 7)]
    for shapes, axis in ((whole * 2, 1), (rows * 2, 0), ([(N, 1, 5000)] * 6, 1)):
        for integers in ("", "int8"):
            last = [shapes[-1]] if integers else []
            yield KernelCase(
                "relax.concat",
                [*shapes, *last],
                lambda _, *xs, a=axis, i=integers: relax.op.concat(
                    [xs[-1]] * 6 if i else list(xs), a
                ),
                integers,
                f"axis {axis}",
            )
    for shape, where in (((N, 76, 7), [*range(1, 16), 20, 75]), ((N, 30000), 16)):
        yield KernelCase(
            "relax.split", [shape], lambda _, x, w=where: relax.op.split(x, w, 1), detail=str(where)
        )
