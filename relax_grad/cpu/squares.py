"""A function in LLVM IR that transposes squares of float32, which the kernels of a program share.

The shuffles of a transposed square are many instructions, and kernels of products and convolutions
copy their factors in several places. Each of them calls this function.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

#: The numbers of lanes for which the function exists. The squares of fewer lanes are short.
LANES = (8, 16)

#: The start of the name of the function, before the number of lanes.
NAME = "relax_grad_turn_"

#: The function, which copies ``extent`` elements of each row. Row i begins at ``from``,
#: ``step * min(i, last)`` elements on; rows from ``exist`` on are 0. A column, the k-th elements of
#: all rows, is stored to the first ``stored`` lanes of a vector, if ``every`` divides k. The place
#: is ``apart`` elements after the one before, or ``jump`` elements after each ``run`` columns.
#:
#: A line with an asterisk is repeated for each lane, whose number replaces ``#``; ``LANES``,
#: ``VECTOR``, ``MASK`` and ``WIDTH`` are replaced too. A square is loaded at once where all rows
#: exist, and row by row otherwise. Its columns are stored at once where their places are equally
#: far apart, and one by one otherwise.
_TEXT = """
define linkonce_odr hidden i32 @NAME(ptr %from, i64 %step, i32 %last, i32 %exist, i64 %extent,
    i64 %every, ptr %to, i64 %apart, i64 %run, i64 %jump, i32 %stored) alwaysinline nounwind {
entry:
  %square = alloca [LANES x VECTOR], align 16
  %last.long = sext i32 %last to i64
  %exist.long = sext i32 %exist to i64
  %last.all = icmp sge i32 %last, LAST
  %exist.all = icmp sge i32 %exist, LANES
  %rows.all = and i1 %last.all, %exist.all
  %store.all = icmp sge i32 %stored, LANES
  %is.run = icmp sge i64 %run, %extent
  %is.each = icmp eq i64 %every, 1
  %is.straight = and i1 %is.run, %is.each
  %stored.first = insertelement INTS poison, i32 %stored, i64 0
  %stored.each = shufflevector INTS %stored.first, INTS poison, INTS zeroinitializer
  %stored.mask = icmp slt INTS ORDER, %stored.each
  br label %head
head:
  %k = phi i64 [ 0, %entry ], [ %k.next, %plain ], [ %k.next, %masked ], [ %k.next, %columns ]
  %out = phi ptr [ %to, %entry ], [ %out.next, %plain ], [ %out.next, %masked ],
    [ %place, %columns ]
  %in.run = phi i64 [ 0, %entry ], [ 0, %plain ], [ 0, %masked ], [ %in, %columns ]
  %first = phi i64 [ 0, %entry ], [ %k.next, %plain ], [ %k.next, %masked ], [ %at, %columns ]
  %left = sub i64 %extent, %k
  %k.next = add i64 %k, LANES
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %load, label %end
load:
  %in.row = getelementptr float, ptr %from, i64 %k
  %is.long = icmp sge i64 %left, LANES
  %size = select i1 %is.long, i64 LANES, i64 %left
  %size.int = trunc i64 %size to i32
  %size.first = insertelement INTS poison, i32 %size.int, i64 0
  %size.each = shufflevector INTS %size.first, INTS poison, INTS zeroinitializer
  %size.mask = icmp slt INTS ORDER, %size.each
  br i1 %rows.all, label %all.rows, label %some
all.rows:
  br i1 %is.long, label %all, label %short
all:
PLACES from %in.row step
* %all# = load VECTOR, ptr %from#, align 4
  br label %turn
short:
PLACES part %in.row step
* %short# = call VECTOR @llvm.masked.load.WIDTH(ptr %part#, i32 4, MASK %size.mask, VECTOR ZERO)
  br label %turn
some:
  %i = phi i64 [ 0, %load ], [ %i.next, %some ]
  %is.row = icmp slt i64 %i, %last.long
  %read = select i1 %is.row, i64 %i, i64 %last.long
  %offset = mul i64 %read, %step
  %row = getelementptr float, ptr %in.row, i64 %offset
  %exists = icmp slt i64 %i, %exist.long
  %mask = select i1 %exists, MASK %size.mask, MASK ZERO
  %one = call VECTOR @llvm.masked.load.WIDTH(ptr %row, i32 4, MASK %mask, VECTOR ZERO)
  %kept.row = getelementptr VECTOR, ptr %square, i64 %i
  store VECTOR %one, ptr %kept.row, align 4
  %i.next = add i64 %i, 1
  %are.rows = icmp slt i64 %i.next, LANES
  br i1 %are.rows, label %some, label %read.rows
read.rows:
* %from.kept# = getelementptr VECTOR, ptr %square, i64 #
* %some# = load VECTOR, ptr %from.kept#, align 4
  br label %turn
turn:
* %row# = phi VECTOR [ %all#, %all ], [ %short#, %short ], [ %some#, %read.rows ]
SHUFFLES
  br i1 %is.straight, label %direct, label %scattered
direct:
  %across = mul i64 %apart, LANES
  %out.next = getelementptr float, ptr %out, i64 %across
  br i1 %store.all, label %whole, label %part
whole:
  br i1 %is.long, label %plain, label %one0
ONES
part:
  br i1 %is.long, label %masked, label %scattered
plain:
PLACES to %out apart
* store VECTOR %column#, ptr %to#, align 4
  br label %head
masked:
PLACES place %out apart
* call void @llvm.masked.store.WIDTH(VECTOR %column#, ptr %place#, i32 4, MASK %stored.mask)
  br label %head
scattered:
* %kept# = getelementptr VECTOR, ptr %square, i64 #
* store VECTOR %column#, ptr %kept#, align 4
  br label %columns
columns:
  %at = phi i64 [ %first, %scattered ], [ %at.next, %next ]
  %place = phi ptr [ %out, %scattered ], [ %place.next, %next ]
  %in = phi i64 [ %in.run, %scattered ], [ %in.next, %next ]
  %c = sub i64 %at, %k
  %is.column = icmp slt i64 %c, %size
  br i1 %is.column, label %column, label %head
column:
  %kept = getelementptr VECTOR, ptr %square, i64 %c
  %value = load VECTOR, ptr %kept, align 4
  br i1 %store.all, label %store.whole, label %store.part
store.whole:
  store VECTOR %value, ptr %place, align 4
  br label %next
store.part:
  call void @llvm.masked.store.WIDTH(VECTOR %value, ptr %place, i32 4, MASK %stored.mask)
  br label %next
next:
  %at.next = add i64 %at, %every
  %in.one = add i64 %in, 1
  %is.over = icmp eq i64 %in.one, %run
  %in.next = select i1 %is.over, i64 0, i64 %in.one
  %move = select i1 %is.over, i64 %jump, i64 %apart
  %place.next = getelementptr float, ptr %place, i64 %move
  br label %columns
end:
  ret i32 0
}
declare VECTOR @llvm.masked.load.WIDTH(ptr, i32, MASK, VECTOR)
declare void @llvm.masked.store.WIDTH(VECTOR, ptr, i32, MASK)
"""


@lru_cache
def definition(lanes: int) -> str:
    """Return the function for a number of lanes, in LLVM IR."""
    lines: list[str] = []
    for line in _TEXT.split("\n"):
        if line.startswith("*"):
            lines += [line.replace("*", " ", 1).replace("#", str(i)) for i in range(lanes)]
        elif line == "SHUFFLES":
            lines += _shuffles(lanes)
        elif line == "ONES":
            lines += _first_columns(lanes)
        elif line.startswith("PLACES"):
            lines += _places(lanes, *line.split()[1:])
        else:
            lines.append(line)
    words = {
        "NAME": f"{NAME}{lanes}",
        "LANES": str(lanes),
        "LAST": str(lanes - 1),
        "ORDER": _order(range(lanes)),
        "VECTOR": f"<{lanes} x float>",
        "MASK": f"<{lanes} x i1>",
        "INTS": f"<{lanes} x i32>",
        "WIDTH": f"v{lanes}f32.p0",
        "ZERO": "zeroinitializer",
    }
    text = "\n".join(lines)
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def _shuffles(lanes: int) -> list[str]:
    """Return the instructions that transpose a square of rows to columns.

    The first two rounds transpose blocks of 4 x 4 within the parts of 128 bits, in which processors
    shuffle fastest; the others move whole parts.
    """
    groups, lines = lanes // 4, list[str]()

    def shuffle(name: str, first: str, second: str, order: list[int]) -> None:
        lines.append(
            f"  %{name} = shufflevector VECTOR %{first}, VECTOR %{second}, INTS {_order(order)}"
        )

    for group in range(groups):
        # Of two rows, elements 0 and 1 of each part in turns, or 2 and 3.
        for i in (0, 2):
            for end in (0, 2):
                order = [
                    4 * p + end + e + lanes * r
                    for p in range(groups)
                    for e in (0, 1)
                    for r in (0, 1)
                ]
                rows = f"row{4 * group + i}", f"row{4 * group + i + 1}"
                shuffle(f"half{group}.{i}.{end}", *rows, order)
        # Of these, the pairs of one element: column i of each block of the group.
        for i in range(4):
            end, pair = i // 2 * 2, i % 2 * 2
            order = [
                4 * p + pair + e + lanes * r for p in range(groups) for r in (0, 1) for e in (0, 1)
            ]
            shuffle(f"block{group}.{i}", f"half{group}.0.{end}", f"half{group}.2.{end}", order)

    def parts(chosen: tuple[int, ...]) -> list[int]:
        """Return the order of some parts of two vectors."""
        return [4 * p + e + lanes * r for r in (0, 1) for p in chosen for e in range(4)]

    for i in range(4):
        if groups == 2:
            for p in (0, 1):
                shuffle(f"column{4 * p + i}", f"block0.{i}", f"block1.{i}", parts((p,)))
            continue
        for odd in (0, 1):
            for g in (0, 2):
                blocks = f"block{g}.{i}", f"block{g + 1}.{i}"
                shuffle(f"pair{i}.{odd}.{g}", *blocks, parts((odd, odd + 2)))
        for p in range(4):
            pairs = f"pair{i}.{p % 2}.0", f"pair{i}.{p % 2}.2"
            shuffle(f"column{4 * p + i}", *pairs, parts((p // 2, p // 2 + 2)))
    return lines


def _places(lanes: int, name: str, start: str, step: str) -> list[str]:
    """Return the instructions that compute equally distant places, with few registers: each fourth
    one is a sum, and those after it are addresses of x86."""
    lines = [
        f"  %{name}.2 = shl i64 %{step}, 1",
        f"  %{name}.3 = add i64 %{name}.2, %{step}",
        f"  %{name}.4 = shl i64 %{step}, 2",
        f"  %{name}0 = getelementptr float, ptr {start}, i64 0",
    ]
    for i in range(1, lanes):
        before, by = (i - 4, f"{name}.4") if i % 4 == 0 else (i - i % 4, f"{name}.{i % 4}")
        by = step if i % 4 == 1 else by
        lines.append(f"  %{name}{i} = getelementptr float, ptr %{name}{before}, i64 %{by}")
    return lines


def _first_columns(lanes: int) -> list[str]:
    """Return the instructions that store the first columns of a square, fewer than there are
    lanes."""
    lines = ["one0:", "  %one.0 = getelementptr float, ptr %out, i64 0"]
    for i in range(lanes - 1):
        lines += [
            f"  store VECTOR %column{i}, ptr %one.{i}, align 4",
            f"  %is.one{i + 1} = icmp sgt i64 %left, {i + 1}",
            f"  br i1 %is.one{i + 1}, label %one{i + 1}, label %end",
            f"one{i + 1}:",
            f"  %one.{i + 1} = getelementptr float, ptr %one.{i}, i64 %apart",
        ]
    return [*lines[:-3], "  br label %end"]


def _order(numbers: Iterable[int]) -> str:
    """Return a constant vector of integers."""
    return f"<{', '.join(f'i32 {number}' for number in numbers)}>"
