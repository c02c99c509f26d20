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
* %step# = mul i64 %step, #
* %apart# = mul i64 %apart, #
  %across = mul i64 %apart, LANES
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
* %from# = getelementptr float, ptr %in.row, i64 %step#
  br i1 %is.long, label %all, label %short
all:
* %all# = load VECTOR, ptr %from#, align 4
  br label %turn
short:
* %short# = call VECTOR @llvm.masked.load.WIDTH(ptr %from#, i32 4, MASK %size.mask, VECTOR ZERO)
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
* %row0.# = phi VECTOR [ %all#, %all ], [ %short#, %short ], [ %some#, %read.rows ]
SHUFFLES
  %is.direct = and i1 %is.straight, %is.long
  br i1 %is.direct, label %direct, label %scattered
direct:
  %out.next = getelementptr float, ptr %out, i64 %across
* %to# = getelementptr float, ptr %out, i64 %apart#
  br i1 %store.all, label %plain, label %masked
plain:
* store VECTOR %rowN.#, ptr %to#, align 4
  br label %head
masked:
* call void @llvm.masked.store.WIDTH(VECTOR %rowN.#, ptr %to#, i32 4, MASK %stored.mask)
  br label %head
scattered:
* %kept# = getelementptr VECTOR, ptr %square, i64 #
* store VECTOR %rowN.#, ptr %kept#, align 4
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
        else:
            lines.append(line)
    words = {
        "rowN": f"row{lanes.bit_length() - 1}",
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
    """Return the instructions that transpose a square, as
    :meth:`.vectors.Vectors.transpose` does: the rows of each round have its number."""
    half = lanes // 2
    low = [lane for i in range(half) for lane in (i, lanes + i)]
    orders = _order(low), _order(lane + half for lane in low)
    return [
        f"  %row{r + 1}.{2 * i + part} = shufflevector VECTOR %row{r}.{i}, "
        f"VECTOR %row{r}.{i + half}, INTS {order}"
        for r in range(lanes.bit_length() - 1)
        for i in range(half)
        for part, order in enumerate(orders)
    ]


def _order(numbers: Iterable[int]) -> str:
    """Return a constant vector of integers."""
    return f"<{', '.join(f'i32 {number}' for number in numbers)}>"
