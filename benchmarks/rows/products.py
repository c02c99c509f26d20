"""Matrix products: square matrices, and the products of GPT-2 with a batch of 4 x 256 tokens."""

from __future__ import annotations

from tvm import relax

from ._form import Row

_SIZES = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 2304, 768),
    (1024, 768, 768),
    (1024, 3072, 768),
    (1024, 768, 3072),
]

#: Whether the first and the second factor are transposed.
_FORMS = [(False, False), (False, True), (True, False)]


def product(rows: int, columns: int, depth: int, turn_a: bool, turn_b: bool) -> Row:
    def in_relax(bb, a, b):
        a = bb.emit(relax.op.permute_dims(a)) if turn_a else a
        b = bb.emit(relax.op.permute_dims(b)) if turn_b else b
        return relax.op.matmul(a, b)

    def elsewhere(a, b):
        return (a.T if turn_a else a) @ (b.T if turn_b else b)

    return Row(
        "matmul",
        f"{'T' if turn_a else 'N'}{'T' if turn_b else 'N'} {rows} x {columns} x {depth}",
        [
            (depth, rows) if turn_a else (rows, depth),
            (columns, depth) if turn_b else (depth, columns),
        ],
        in_relax,
        elsewhere,
        flops=2 * rows * columns * depth,
    )


def _attention(name: str, shapes: list, turn_b: bool) -> Row:
    def in_relax(bb, a, b):
        return relax.op.matmul(a, bb.emit(relax.op.permute_dims(b, [0, 2, 1])) if turn_b else b)

    return Row(
        "matmul",
        f"{name} " + " @ ".join("x".join(map(str, shape)) for shape in shapes),
        shapes,
        in_relax,
        lambda a, b: a @ (b.transpose(1, 2) if turn_b else b),
    )


ROWS = [
    *(product(*sizes, *form) for sizes in _SIZES for form in _FORMS),
    product(512, 512, 512, True, True),
    product(1000, 1000, 1000, False, False),
    _attention("attention scores", [(48, 256, 64), (48, 256, 64)], True),
    _attention("attention values", [(48, 256, 256), (48, 256, 64)], False),
]
