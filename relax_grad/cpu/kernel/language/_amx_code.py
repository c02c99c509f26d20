"""The functions of :mod:`.amx` as text of LLVM."""

from __future__ import annotations

#: The rows of the sums that are computed at once, the columns of a tile, and its pairs of k.
ROWS, LANES, STEPS = 32, 16, 16

#: The columns of the sums, which are the elements from one row to the next.
COLUMNS = 2 * LANES

#: The system call of Linux for x86-64, its request for permission, and the state of the tiles.
_ARCH_PRCTL, REQUEST, _TILE_DATA = 158, 0x1023, 18

#: Numbers of tiles: sums of [rows][columns], rows of A, columns of B.
_SUMS, _A, _B = ((0, 1), (2, 3)), (4, 5), (6, 7)


def _real_product(rows: int, columns: int) -> str:
    """Return the loop over k of a product by tiles, for tiles of rows and of columns."""
    name = f"tiles{rows}{columns}"
    lines = [
        f"{name}:",
        f"  %{name}.i = phi i64 [0, %real], [%{name}.next, %{name}]",
        f"  %{name}.at = mul i64 %{name}.i, 64",
        f"  %{name}.a0 = getelementptr i8, ptr %a, i64 %{name}.at",
        f"  %{name}.a1 = getelementptr i8, ptr %{name}.a0, i64 %below",
        f"  %{name}.row = mul i64 %{name}.i, %panel",
        f"  %{name}.b0 = getelementptr i8, ptr %b, i64 %{name}.row",
        f"  %{name}.b1 = getelementptr i8, ptr %{name}.b0, i64 64",
    ]
    lines += [
        f"  call void @llvm.x86.tileloadd64(i8 {_B[i]}, ptr %{name}.b{i}, i64 %width)"
        for i in range(columns)
    ]
    for i in range(rows):
        lines.append(f"  call void @llvm.x86.tileloadd64(i8 {_A[i]}, ptr %{name}.a{i}, i64 %pitch)")
        lines += [
            f"  call void @llvm.x86.tdpbf16ps(i8 {_SUMS[i][j]}, i8 {_A[i]}, i8 {_B[j]})"
            for j in range(columns)
        ]
    lines += [
        f"  %{name}.next = add nuw i64 %{name}.i, 1",
        f"  %{name}.more = icmp ult i64 %{name}.next, %steps",
        f"  br i1 %{name}.more, label %{name}, label %end",
    ]
    return "\n".join(lines)


#: The rows that are emulated at once: their sums fit in the registers of AVX-512.
_EMULATED_ROWS = 4


def _emulated_product() -> str:
    """Return the function that adds the product of four rows to sums, with vectors.

    TVM inlines all functions of this text, so that there is one, for all shapes: rows that do not
    exist repeat the last one, and so does a second vector of columns. Their sums are not read.
    """
    cells = [(i, j) for i in range(_EMULATED_ROWS) for j in range(2)]
    both = [(i, j, odd) for i, j in cells for odd in (0, 1)]
    lines = [
        "define linkonce_odr hidden void @relax_grad_tiles_rows(ptr %sums, ptr %a, i64 %pitch, "
        "i64 %last, ptr %b, i64 %width, i64 %second, i64 %steps) alwaysinline nounwind {",
        "entry:",
    ]
    for i in range(_EMULATED_ROWS):
        lines += [
            f"  %own{i} = call i64 @llvm.umin.i64(i64 {i}, i64 %last)",
            f"  %skip{i} = mul i64 %pitch, %own{i}",
            f"  %line{i} = getelementptr i8, ptr %a, i64 %skip{i}",
        ]
    for i, j in cells:
        lines.append(f"  %at{i}{j} = getelementptr float, ptr %sums, i64 {i * COLUMNS + j * LANES}")
        lines.append(f"  %old{i}{j} = load <16 x float>, ptr %at{i}{j}, align 4")
    lines += ["  br label %outer", "outer:"]
    lines.append("  %i = phi i64 [0, %entry], [%i.next, %sum]")
    for i, j in cells:
        lines.append(f"  %c{i}{j} = phi <16 x float> [%old{i}{j}, %entry], [%new{i}{j}, %sum]")
    lines += ["  %first = mul i64 %i, 16", "  br label %inner", "inner:"]
    lines.append("  %k = phi i64 [0, %outer], [%k.next, %inner]")
    for i, j, odd in both:
        lines.append(
            f"  %t{i}{j}{odd} = phi <16 x float> [zeroinitializer, %outer], [%u{i}{j}{odd}, %inner]"
        )
    lines += [
        "  %pair = add i64 %first, %k",
        "  %row = mul i64 %pair, %width",
        "  %b0 = getelementptr i8, ptr %b, i64 %row",
        "  %b1 = getelementptr i8, ptr %b0, i64 %second",
    ]
    for j in range(2):
        lines += [
            f"  %bits{j} = load <16 x i32>, ptr %b{j}, align 4",
            f"  %even{j} = shl <16 x i32> %bits{j}, splat (i32 16)",
            f"  %odd{j} = and <16 x i32> %bits{j}, splat (i32 -65536)",
            f"  %f{j}0 = bitcast <16 x i32> %even{j} to <16 x float>",
            f"  %f{j}1 = bitcast <16 x i32> %odd{j} to <16 x float>",
        ]
    for i in range(_EMULATED_ROWS):
        lines += [
            f"  %place{i} = getelementptr i32, ptr %line{i}, i64 %pair",
            f"  %a{i} = load i32, ptr %place{i}, align 2",
            f"  %low{i} = shl i32 %a{i}, 16",
            f"  %high{i} = and i32 %a{i}, -65536",
        ]
        for odd, part in enumerate(("low", "high")):
            lines += [
                f"  %x{i}{odd} = bitcast i32 %{part}{i} to float",
                f"  %y{i}{odd} = insertelement <16 x float> poison, float %x{i}{odd}, i32 0",
                f"  %s{i}{odd} = shufflevector <16 x float> %y{i}{odd}, <16 x float> poison, "
                "<16 x i32> zeroinitializer",
            ]
        lines += [
            f"  %u{i}{j}{odd} = call <16 x float> @llvm.fma.v16f32(<16 x float> %s{i}{odd}, "
            f"<16 x float> %f{j}{odd}, <16 x float> %t{i}{j}{odd})"
            for j in range(2)
            for odd in (0, 1)
        ]
    lines += [
        "  %k.next = add nuw i64 %k, 1",
        "  %k.more = icmp ult i64 %k.next, 16",
        "  br i1 %k.more, label %inner, label %sum",
        "sum:",
    ]
    for i, j in cells:
        lines.append(f"  %both{i}{j} = fadd <16 x float> %u{i}{j}0, %u{i}{j}1")
        lines.append(f"  %new{i}{j} = fadd <16 x float> %c{i}{j}, %both{i}{j}")
    lines += [
        "  %i.next = add nuw i64 %i, 1",
        "  %i.more = icmp ult i64 %i.next, %steps",
        "  br i1 %i.more, label %outer, label %done",
        "done:",
    ]
    lines += [f"  store <16 x float> %new{i}{j}, ptr %at{i}{j}, align 4" for i, j in cells]
    return "\n".join([*lines, "  ret void", "}"])


_EMULATED_LOOP = f"""
  ; Tiles take denormal numbers as zero, and give zero for them, whatever the mode of the thread.
  call void @llvm.x86.sse.stmxcsr(ptr %before)
  %mode = load i32, ptr %before, align 4
  %flushing = or i32 %mode, 32832
  store i32 %flushing, ptr %during, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %during)
  %offset = sub i64 %columns, 1
  %second = mul i64 %offset, 64
  br label %each
each:
  %r = phi i64 [0, %emulated], [%r.next, %each]
  %r.left = sub i64 %rows, %r
  %r.last = sub i64 %r.left, 1
  %r.skip = mul i64 %r, %pitch
  %r.a = getelementptr i8, ptr %a, i64 %r.skip
  %r.sum = mul i64 %r, {4 * COLUMNS}
  %r.c = getelementptr i8, ptr %sums, i64 %r.sum
  call void @relax_grad_tiles_rows(ptr %r.c, ptr %r.a, i64 %pitch, i64 %r.last, ptr %b, i64 %width,
                                   i64 %second, i64 %steps)
  %r.next = add nuw i64 %r, {_EMULATED_ROWS}
  %r.more = icmp ult i64 %r.next, %rows
  br i1 %r.more, label %each, label %restore
restore:
  call void @llvm.x86.sse.ldmxcsr(ptr %before)
  br label %end"""


def _configuration() -> str:
    """Return the stores of the 64 bytes that configure the tiles."""
    lines = []

    def put(offset: int, type_: str, value: str) -> None:
        lines.append(f"  %p{offset} = getelementptr i8, ptr %config, i64 {offset}")
        lines.append(f"  store {type_} {value}, ptr %p{offset}, align 1")

    lines.append("  store <64 x i8> zeroinitializer, ptr %config, align 64")
    put(0, "i8", "1")
    for tile in range(8):
        put(16 + 2 * tile, "i16", "64")
    for number, tiles_ in (("%upper", (*_SUMS[0], _A[0])), ("%lower", (*_SUMS[1], _A[1]))):
        for tile in tiles_:
            put(48 + tile, "i8", number)
    for tile in _B:
        put(48 + tile, "i8", str(STEPS))
    return "\n".join(lines)


def _moved(name: str, instruction: str) -> str:
    """Return the function that loads or stores all sums; vectors have them in the buffer."""
    lines = [
        f"define linkonce_odr hidden i32 @relax_grad_tiles_{name}(",
        "    ptr %sums, i64 %rows) alwaysinline nounwind {",
        f"entry:{_IS_REAL}real:",
        "  %two = icmp ugt i64 %rows, 16",
    ]
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        offset = 4 * (i * LANES * COLUMNS + j * LANES)
        lines.append(f"  %c{i}{j} = getelementptr i8, ptr %sums, i64 {offset}")
    moves = [
        [
            f"  call void @llvm.x86.{instruction}(i8 {tile}, ptr %c{i}{j}, i64 128)"
            for j, tile in row
        ]
        for i, row in enumerate(map(list, map(enumerate, _SUMS)))
    ]
    lines += [*moves[0], "  br i1 %two, label %second, label %end", "second:", *moves[1]]
    lines += ["  br label %end", "emulated:", "  br label %end", "end:", "  ret i32 0", "}"]
    return "\n".join(lines)


_IS_REAL = """
  %state = load atomic i32, ptr @relax_grad_tiles_state monotonic, align 4
  %is_real = icmp eq i32 %state, 1
  br i1 %is_real, label %real, label %emulated
"""

LLVM = f"""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.usub.sat.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)

; 0: not asked yet, 1: the process may use the tiles, 2: it may not, or there are none.
@relax_grad_tiles_state = internal global i32 0, align 4

define linkonce_odr hidden i32 @relax_grad_tiles_ask() alwaysinline nounwind {{
entry:
  %first = call {{ i32, i32, i32, i32 }} asm sideeffect "cpuid",
      "={{ax}},={{bx}},={{cx}},={{dx}},0,2,~{{dirflag}},~{{fpsr}},~{{flags}}"(i32 0, i32 0)
  %leaves = extractvalue {{ i32, i32, i32, i32 }} %first, 0
  %is_known = icmp uge i32 %leaves, 7
  br i1 %is_known, label %features, label %refused
features:
  %seventh = call {{ i32, i32, i32, i32 }} asm sideeffect "cpuid",
      "={{ax}},={{bx}},={{cx}},={{dx}},0,2,~{{dirflag}},~{{fpsr}},~{{flags}}"(i32 7, i32 0)
  %bits = extractvalue {{ i32, i32, i32, i32 }} %seventh, 3
  %tiles = and i32 %bits, {1 << 22 | 1 << 24}
  %has = icmp eq i32 %tiles, {1 << 22 | 1 << 24}
  br i1 %has, label %request, label %refused
request:
  %answer = call i64 asm sideeffect "syscall",
      "={{ax}},0,{{di}},{{si}},~{{rcx}},~{{r11}},~{{memory}},~{{dirflag}},~{{fpsr}},~{{flags}}"(
      i64 {_ARCH_PRCTL}, i64 {REQUEST}, i64 {_TILE_DATA})
  %granted = icmp eq i64 %answer, 0
  br i1 %granted, label %known, label %refused
refused:
  br label %known
known:
  %state = phi i32 [1, %request], [2, %refused]
  store atomic i32 %state, ptr @relax_grad_tiles_state monotonic, align 4
  ret i32 %state
}}

define linkonce_odr hidden i32 @relax_grad_tiles_begin(i64 %rows) alwaysinline nounwind {{
entry:
  %config = alloca [64 x i8], align 64
  %old = load atomic i32, ptr @relax_grad_tiles_state monotonic, align 4
  %unknown = icmp eq i32 %old, 0
  br i1 %unknown, label %ask, label %known
ask:
  %asked = call i32 @relax_grad_tiles_ask()
  br label %known
known:
  %state = phi i32 [%old, %entry], [%asked, %ask]
  %is_real = icmp eq i32 %state, 1
  br i1 %is_real, label %real, label %end
real:
  %above = call i64 @llvm.umin.i64(i64 %rows, i64 16)
  %left = call i64 @llvm.usub.sat.i64(i64 %rows, i64 16)
  %below = call i64 @llvm.umax.i64(i64 %left, i64 1)
  %upper = trunc i64 %above to i8
  %lower = trunc i64 %below to i8
{_configuration()}
  call void @llvm.x86.ldtilecfg(ptr %config)
  br label %end
end:
  ret i32 0
}}

define linkonce_odr hidden i32 @relax_grad_tiles_end() alwaysinline nounwind {{
entry:{_IS_REAL}
real:
  call void @llvm.x86.tilerelease()
  br label %emulated
emulated:
  ret i32 0
}}

define linkonce_odr hidden i32 @relax_grad_tiles_clear(
    ptr %sums, i64 %rows) alwaysinline nounwind {{
entry:{_IS_REAL}
real:
  call void @llvm.x86.tilezero(i8 0)
  call void @llvm.x86.tilezero(i8 1)
  call void @llvm.x86.tilezero(i8 2)
  call void @llvm.x86.tilezero(i8 3)
  br label %end
emulated:
  %size = mul i64 %rows, {4 * COLUMNS}
  call void @llvm.memset.p0.i64(ptr %sums, i8 0, i64 %size, i1 false)
  br label %end
end:
  ret i32 0
}}

{_moved("store", "tilestored64")}

{_moved("load", "tileloadd64")}

{_emulated_product()}

define linkonce_odr hidden i32 @relax_grad_tiles_add(ptr %sums, ptr %a, i64 %pitch, ptr %b,
    i64 %width, i64 %steps, i64 %rows, i64 %columns) alwaysinline nounwind {{
entry:
  %before = alloca i32, align 4
  %during = alloca i32, align 4
  %is_empty = icmp eq i64 %steps, 0
  br i1 %is_empty, label %end, label %any
any:{_IS_REAL}
real:
  %below = mul i64 %pitch, 16
  %panel = mul i64 %width, 16
  %two = icmp ugt i64 %rows, 16
  %wide = icmp eq i64 %columns, 2
  %low = zext i1 %two to i32
  %doubled = select i1 %wide, i32 2, i32 0
  %shape = or i32 %low, %doubled
  switch i32 %shape, label %tiles22 [ i32 0, label %tiles11 i32 1, label %tiles21
                                      i32 2, label %tiles12 ]
{_real_product(2, 2)}
{_real_product(2, 1)}
{_real_product(1, 2)}
{_real_product(1, 1)}
emulated:{_EMULATED_LOOP}
end:
  ret i32 0
}}
"""
