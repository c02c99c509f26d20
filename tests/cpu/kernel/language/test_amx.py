"""The processor's unit for tiles of bfloat16: its functions, beside NumPy in the order of Intel's
manual, and its permission."""

from __future__ import annotations

import ctypes
import itertools

import ml_dtypes
import numpy as np
import pytest
import tvm
from machines import compile_kernels, of_halves
from tile_sums import in_order
from tvm import tirx

import relax_grad
from relax_grad.cpu import tiles
from relax_grad.cpu.kernel.language import amx
from relax_grad.cpu.kernel.language import builder as b
from relax_grad.cpu.kernel.language._amx_code import LLVM, REQUEST
from relax_grad.cpu.kernel.language.builder import const
from relax_grad.cpu.target import CPU
from relax_grad.cpu.tiles import Permission

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: Rows, tiles of columns, and steps of 16 pairs of k.
CASES = [*itertools.product((1, 3, 16, 17, 31, 32), (1, 2), (1, 5)), (7, 2, 0)]


def product(rows: int, wide: int, steps: int, text: str | None = None) -> tirx.PrimFunc:
    """Return a function of A, a panel of B and C, which adds their product to C."""

    def body(a, panel, c) -> None:
        frame = amx.imported() if text is None else b.T.attr(0, "pragma_import_llvm", text)
        with frame:
            sums = amx.scratch()
            with b.serial(0, rows * 32) as i:
                b.store(sums, i, c[i])
            with amx.tiles(rows):
                amx.load(sums, rows)
                factors = (a, const(0), 64 * steps), (panel, const(0), 64 * wide)
                amx.add(sums, *factors, steps, rows, wide)
                amx.store(sums, rows)
            with b.serial(0, rows * 32) as i:
                b.store(c, i, sums[i])

    shapes = (rows, max(steps, 1) * 16), (max(steps, 1) * 16, 16 * wide), (rows, 32)
    return b.prim_func("product", b.floats("abc", shapes), body)


def operands(rows: int, wide: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A and B in bfloat16, and C."""
    rng = np.random.default_rng((rows, wide, steps))
    a, bb = (
        rng.normal(size=shape).astype(BFLOAT16)
        for shape in ((rows, 32 * max(steps, 1)), (32 * max(steps, 1), 16 * wide))
    )
    return a, bb, rng.normal(size=(rows, 32)).astype("float32")


def run(function, a: np.ndarray, bb: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the sums of a function, whose factors are given as pairs."""
    panel = np.stack([bb[::2], bb[1::2]], axis=-1).reshape(len(bb) // 2, -1)
    arrays = [np.ascontiguousarray(x).view("float32") for x in (a, panel)]
    result = tvm.runtime.tensor(c)
    function(*map(tvm.runtime.tensor, arrays), result)
    return result.numpy()


@pytest.fixture(scope="module")
def library():
    target = of_halves("amx")
    return compile_kernels({f"f{i}": product(*case) for i, case in enumerate(CASES)}, target)


def test_sums_are_in_the_order_of_the_manual(library):
    for i, case in enumerate(CASES):
        factors = operands(*case)
        result = run(library[f"f{i}"], *factors)[:, : 16 * case[1]]
        wanted = in_order(*factors, case[2])
        np.testing.assert_array_equal(result, wanted, err_msg=str(case))


def test_denormal_numbers_are_zero(library):
    """Those of a factor, and sums; the mode of the thread stays as it is."""
    a, bb, c = (np.zeros_like(x) for x in operands(*CASES[-2]))
    a[0, 0], bb[0, 0] = np.array([1e-39, 1e30], "float32").astype(BFLOAT16)
    a[1, 1], bb[1, 1] = np.array([1e-20, 1e-20], "float32").astype(BFLOAT16)
    a[2, 2], bb[2, 2] = 1, 3
    result = run(library[f"f{len(CASES) - 2}"], a, bb, c)
    assert result[2, 2] == 3
    assert np.count_nonzero(result) == 1
    assert np.float32(1e-39) * np.float32(2) > 0


def test_numbers_that_are_not_finite_stay_in_their_row_and_column(library):
    a, bb, c = operands(*CASES[-2])
    a[3, 5], bb[7, 9] = np.nan, np.inf
    result = run(library[f"f{len(CASES) - 2}"], a, bb, c)
    expected = np.zeros(result.shape, bool)
    expected[3], expected[:, 9] = True, True
    np.testing.assert_array_equal(~np.isfinite(result), expected)


@pytest.mark.skipif(
    tiles.permission() is not Permission.GRANTED, reason="this process has no tiles (AMX)"
)
def test_tiles_and_vectors_give_the_same_bits(library):
    """The functions that a process without permission calls, beside the processor's tiles."""
    refused = LLVM.replace(f"i64 {REQUEST}", "i64 0")
    assert refused != LLVM
    functions = {f"f{i}": product(*case, refused) for i, case in enumerate(CASES)}
    others = compile_kernels(functions, of_halves("amx"))
    for i, case in enumerate(CASES):
        factors, columns = operands(*case), 16 * case[1]
        both = [run(each[f"f{i}"], *factors)[:, :columns] for each in (library, others)]
        assert both[0].tobytes() == both[1].tobytes(), case


def test_the_code_multiplies_tiles():
    library = compile_kernels({"f": product(32, 2, 4)}, tvm.target.Target(_SERVER))
    text = library.inspect_source("asm")
    for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease", "syscall"):
        assert name in text


_SERVER = {"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2}


@pytest.mark.parametrize(
    ("target", "has_tiles"),
    [
        (_SERVER, True),
        ({**_SERVER, "mcpu": "graniterapids"}, True),
        ({**_SERVER, "mattr": ["-amx-bf16"]}, False),
        ({**_SERVER, "mtriple": "x86_64-apple-darwin"}, False),
        ({**_SERVER, "mcpu": "icelake-server"}, False),
        ({**_SERVER, "mcpu": "znver5"}, False),
        (relax_grad.target.x86_64("v4"), False),
        (relax_grad.target.x86_64("v4", tiles=True), True),
    ],
)
def test_targets_with_tiles(target, has_tiles):
    assert CPU.of(target).tiles == has_tiles


@pytest.mark.parametrize("answer", Permission)
def test_the_host_has_tiles_with_permission(monkeypatch, answer):
    """A virtual machine may hide the tiles of a processor that LLVM knows by name."""
    from relax_grad.cpu import target

    monkeypatch.setattr(target.codegen, "llvm_get_system_cpu", lambda: "sapphirerapids")
    monkeypatch.setattr(target, "permission", lambda: answer)
    assert CPU.of(target.host()).tiles == (answer is Permission.GRANTED)


@pytest.mark.parametrize(
    ("flags", "answer", "wanted"),
    [
        ("avx512f", 0, Permission.ABSENT),
        ("amx_tile", 0, Permission.ABSENT),
        ("amx_bf16 amx_tile amx_int8", 0, Permission.GRANTED),
        ("amx_bf16 amx_tile amx_int8", -1, Permission.REFUSED),
    ],
)
def test_permission(monkeypatch, flags, answer, wanted):
    class Library:
        @staticmethod
        def syscall(*arguments) -> int:
            assert [int(each.value) for each in arguments] == [158, 0x1023, 18]
            return answer

    monkeypatch.setattr(tiles, "flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    assert tiles.permission.__wrapped__() is wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "processor : 0\nflags\t\t: fpu amx_tile\n\nflags\t\t: fpu amx_tile\n",
            {"amx_tile", "fpu"},
        ),
        ("processor : 0\nFeatures : fp asimd\n", set()),
        (None, set()),
    ],
)
def test_flags_of_linux(monkeypatch, text, wanted):
    def read(*_, **__) -> str:
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(tiles.Path, "read_text", read)
    assert tiles.flags.__wrapped__() == wanted
