"""The properties of a CPU target: vector width, registers, cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm
from tvm.target import codegen

from .._validation import alternatives, check_integer
from .threads import default_threads
from .tiles import FEATURES, Permission, flags, permission
from .tuning import ROWS, Tuning, default_row

#: The levels of x86-64 of its ABI, from the lowest. Each has the instructions of all before it.
X86_64_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")

#: The architecture of WebAssembly with addresses of 32 bits, in triples.
WASM32 = "wasm32"

#: The instruction sets of microcontrollers with a floating-point unit, as triples name them.
_CORTEX_M = {
    "cortex-m4": "thumbv7em",
    "cortex-m7": "thumbv7em",
    "cortex-m33": "thumbv8m.main",
    "cortex-m52": "thumbv8.1m.main",
    "cortex-m55": "thumbv8.1m.main",
    "cortex-m85": "thumbv8.1m.main",
}

#: The instruction sets that decide which kernels a machine runs, and Linux's names of them.
_DECISIVE = {"avx2": "avx2", "fma": "fma", "avx512f": "avx512f", "avx512bf16": "avx512_bf16"}

#: Processors that LLVM compiles for, but does not list.
_UNLISTED = ("apple-m1", "apple-m2", "apple-m3")


@dataclass(frozen=True)
class CPU:
    """The properties of a target that kernels are generated for.

    Attributes
    ----------
    lanes : int
        The number of float32 elements in a vector register: 16 with AVX-512, 8 with AVX2, 4
        otherwise.
    registers : int
        The number of vector registers: 32 with AVX-512 and on ARM, 16 with AVX2 and SSE.
    cores : int
        The number of threads that share the work. More threads at run time do no harm. The results
        do not depend on the number of threads at run time.
    bfloat16 : bool
        Whether kernels multiply pairs of bfloat16 (AVX512-BF16).
    tuning : Tuning
        The sizes and limits that kernels are generated with: by default, the values for
        processors with such vectors of any maker.
    tiles : bool
        Whether kernels multiply tiles of bfloat16 (AMX), for which Linux gives permission.
    rounds : bool
        Whether the processor rounds to bfloat16 in one instruction (AVX512-BF16).

    Raises
    ------
    ValueError
        If the lanes or the registers differ from the tuning's.
    """

    lanes: int
    registers: int
    cores: int
    bfloat16: bool = field(default=False, repr=False)
    # None stands for the row of these lanes and registers, which __post_init__ sets.
    tuning: Tuning = field(default=None, repr=False)  # type: ignore[assignment]
    tiles: bool = field(default=False, repr=False)
    rounds: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.tuning is None:
            object.__setattr__(self, "tuning", default_row(self.lanes, self.registers))
        found = self.tuning.lanes, self.tuning.registers
        if found != (self.lanes, self.registers):
            raise ValueError(
                f"tuning must be of {self.lanes} lanes and {self.registers} registers, but it is "
                f"of {found[0]} and {found[1]}; pass another row of relax_grad.cpu.tuning.ROWS"
            )

    @staticmethod
    def current(target: tvm.target.Target | str | dict | None = None) -> CPU | None:
        """Return the properties of a target, by default of the current one; None if LLVM does not
        compile for it."""
        target = tvm.target.Target.current() if target is None else target
        return None if target is None else CPU.of(target)

    @staticmethod
    def of(target: tvm.target.Target | str | dict) -> CPU | None:
        """Return the properties of a target; None if LLVM does not compile for it.

        Raises
        ------
        ValueError
            If TVM has no such target, or its number of cores is negative.

        Examples
        --------
        >>> from relax_grad.target import CPU
        >>> CPU.of({"kind": "llvm", "mcpu": "haswell", "num-cores": 4})
        CPU(lanes=8, registers=16, cores=4)
        """
        target = tvm.target.Target(target)
        if target.kind.name != "llvm":
            return None
        cores = int(target.attrs.get("num-cores", 0)) or default_threads()
        if cores < 0:
            raise ValueError(f"num-cores of the target must be positive, but it is {cores}")
        row = next(row for row in ROWS if _fits(row, target))
        has_pairs = row.lanes == 16 and _has(target, "avx512bf16")
        multiplies, has_tiles = has_pairs and row.multiplies_pairs, _has_tiles(row, target)
        return CPU(
            row.lanes,
            row.registers,
            cores,
            bfloat16=multiplies,
            tuning=row,
            tiles=has_tiles,
            rounds=has_pairs,
        )


def host() -> tvm.target.Target:
    """Return the target of this machine, with the name of its processor and its number of cores.

    The attribute ``mattr`` has instructions that Linux shows and the name lacks, or the reverse, as
    on virtual machines.

    The plain target ``"llvm"`` means the baseline processor of the architecture, with vectors of 4
    elements and without fused multiply-add. Code for it is many times slower.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.host().kind.name
    'llvm'
    """
    own = {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": default_threads()}
    target = tvm.target.Target(own)
    differences = _differences(target)
    return tvm.target.Target({**own, "mattr": differences}) if differences else target


def _differences(target: tvm.target.Target) -> list[str]:
    """Return the features of this machine that its processor's name gets wrong, with their signs.

    LLVM names a processor by its model. A virtual machine may hide instructions of that model, or
    show an older model that lacks some.
    """
    if architecture(target) != "x86_64":
        return []
    shown = {name: flag in flags() for name, flag in _DECISIVE.items()} if flags() else {}
    shown.update(dict.fromkeys(FEATURES, permission() is Permission.GRANTED))
    return [
        f"{'+' if exists else '-'}{name}"
        for name, exists in shown.items()
        if exists != _has(target, name)
    ]


def arm(name: str, num_cores: int = 4) -> tvm.target.Target:
    """Return the target of an AArch64 processor that runs Linux.

    Kernels use the vectors of NEON: 4 elements of float32 in each of 32 registers. LLVM may use SVE
    in other loops, if the processor has it.

    Parameters
    ----------
    name : str
        LLVM's name of the processor, such as ``"cortex-a53"``, ``"cortex-a76"``, ``"neoverse-n1"``
        or ``"apple-m1"``; ``"generic"`` stands for any AArch64 processor.
    num_cores : int
        The number of cores that the work is divided for. Any number of threads may run the program.

    Raises
    ------
    TypeError
        If the name is not a string, or the number of cores is not an integer.
    ValueError
        If LLVM does not know the name, or the number of cores is less than 1.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.CPU.of(relax_grad.target.arm("cortex-a76"))
    CPU(lanes=4, registers=32, cores=4)
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, but it is {name!r}")
    triple = "aarch64-linux-gnu"
    listed = codegen.llvm_get_cpu_archlist(tvm.target.Target({"kind": "llvm", "mtriple": triple}))
    known = [*map(str, listed), *_UNLISTED]
    if name not in known:
        raise ValueError(
            f"name must be a processor of AArch64, but it is {name!r}; {alternatives(name, known)}"
        )
    return _named(triple, name, num_cores)


def x86_64(level: str, num_cores: int = 8, *, tiles: bool = False) -> tvm.target.Target:
    """Return the target of all processors with a level of x86-64, as its ABI defines them.

    Parameters
    ----------
    level : str
        ``"v4"`` (AVX-512), ``"v3"`` (AVX2 and fused multiply-add), ``"v2"`` (SSE4.2) or ``"v1"``,
        the baseline.
    num_cores : int
        The number of cores that the work is divided for. Any number of threads may run the program.
    tiles : bool
        Whether kernels of bfloat16 use the tiles of Intel's servers (AMX) where a processor has
        them. On other processors, vectors compute the same sums, which takes longer than float32,
        so that this is for programs that mostly run on such servers. Only for ``"v4"``.

    Raises
    ------
    TypeError
        If the level is not a string, the number of cores is not an integer, or tiles is not a bool.
    ValueError
        If there is no such level, the number of cores is less than 1, or the level has no tiles.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.CPU.of(relax_grad.target.x86_64("v3"))
    CPU(lanes=8, registers=16, cores=8)
    """
    if not isinstance(level, str):
        raise TypeError(f"level must be a string, but it is {level!r}")
    levels = {f"v{number}": name for number, name in enumerate(X86_64_LEVELS, start=1)}
    if level not in levels:
        raise ValueError(f"level must be one of {', '.join(levels)}, but it is {level!r}")
    if not isinstance(tiles, bool):
        raise TypeError(f"tiles must be True or False, but it is {tiles!r}")
    if tiles and level != "v4":
        raise ValueError(f'tiles need level "v4", but the level is {level!r}; leave tiles out')
    features = [f"+{name}" for name in FEATURES] if tiles else []
    return _named("x86_64-linux-gnu", levels[level], num_cores, features)


def wasm(relaxed_simd: bool = False) -> tvm.target.Target:
    """Return the target of WebAssembly with vectors of 128 bits (SIMD128), for pages and Node.

    Kernels run in one thread. ``Trainer.export(folder, target=wasm())`` writes a step for it.

    Parameters
    ----------
    relaxed_simd : bool
        Whether vectors fuse multiplications and additions, where the processor does. Results then
        differ in their last bits between processors, and the engine must have relaxed SIMD, as
        Chromium since version 114; Node 20 lacks it.

    Raises
    ------
    TypeError
        If the option is not a bool.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.CPU.of(relax_grad.target.wasm())
    CPU(lanes=4, registers=16, cores=1)
    """
    if not isinstance(relaxed_simd, bool):
        raise TypeError(f"relaxed_simd must be True or False, but it is {relaxed_simd!r}")
    return tvm.target.Target(
        {
            "kind": "llvm",
            # The last part is the format of object files.
            "mtriple": f"{WASM32}-unknown-unknown-wasm",
            "mattr": ["+simd128", "+bulk-memory", *(["+relaxed-simd"] if relaxed_simd else [])],
            "num-cores": 1,
            "vector-width": 128,
        }
    )


def cortex_m(name: str) -> tvm.target.Target:
    """Return the target of an ARM microcontroller with a floating-point unit, without an operating
    system.

    Numbers go to functions in floating-point registers: the C compiler of the program needs
    ``-mfloat-abi=hard``. ``Trainer.export(folder, runtime="none", target=...)`` writes a step for
    it.

    Parameters
    ----------
    name : str
        ``"cortex-m4"``, ``"cortex-m7"``, ``"cortex-m33"``, or with the vectors of Helium
        ``"cortex-m52"``, ``"cortex-m55"`` or ``"cortex-m85"``.

    Raises
    ------
    TypeError
        If the name is not a string.
    ValueError
        If there is no such processor.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.CPU.of(relax_grad.target.cortex_m("cortex-m55"))
    CPU(lanes=4, registers=16, cores=1)
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, but it is {name!r}")
    if name not in _CORTEX_M:
        raise ValueError(f"name must be one of {', '.join(_CORTEX_M)}, but it is {name!r}")
    return _without_system(
        f"{_CORTEX_M[name]}-unknown-none-eabihf", name, {"mfloat-abi": "hard", "vector-width": 128}
    )


def riscv64() -> tvm.target.Target:
    """Return the target of all RISC-V processors of 64 bits with the instructions of ``rv64gc``,
    with or without an operating system.

    Numbers go to functions in floating-point registers: the C compiler of the program needs
    ``-mabi=lp64d``. ``Trainer.export(folder, runtime="none", target=...)`` writes a step for it.

    Examples
    --------
    >>> import relax_grad
    >>> relax_grad.target.CPU.of(relax_grad.target.riscv64())
    CPU(lanes=4, registers=16, cores=1)
    """
    extensions = [f"+{extension}" for extension in "mafdc"]
    return _without_system(
        "riscv64-unknown-elf", "generic-rv64", {"mattr": extensions, "mabi": "lp64d"}
    )


def _without_system(triple: str, name: str, more: dict) -> tvm.target.Target:
    return tvm.target.Target(
        {"kind": "llvm", "mtriple": triple, "mcpu": name, "num-cores": 1, **more}
    )


def check_convention(target: tvm.target.Target) -> None:
    """Raise an error if LLVM would call functions of the C library by another convention than the
    C compiler of the target.

    A triple of three parts, such as ``thumbv7em-none-eabihf``, has no environment for LLVM, which
    takes ``eabihf`` for the operating system.
    """
    first, _, rest = str(target.attrs.get("mtriple", "")).partition("-")
    system = rest.removeprefix("none-")
    if first.startswith(("arm", "thumb")) and system != rest and "-" not in system:
        raise ValueError(
            f"mtriple must have four parts, {first}-unknown-none-{system}, but it is "
            f"{first}-{rest}, in which LLVM finds no environment, and calls the C library by "
            'another convention; relax_grad.target.cortex_m("cortex-m55") is a complete target'
        )


def level_of(target: tvm.target.Target) -> str | None:
    """Return the level of x86-64 whose processors a target stands for; None for other targets."""
    name = str(target.attrs.get("mcpu", ""))
    return name if name in X86_64_LEVELS and architecture(target) == "x86_64" else None


def architecture(target: tvm.target.Target) -> str:
    """Return the architecture of a CPU target: the first part of its triple, and ``"aarch64"`` for
    ``"arm64"``."""
    triple = str(target.attrs.get("mtriple", "")) or codegen.llvm_get_system_triple()
    first = triple.partition("-")[0]
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(first, first)


def _fits(row: Tuning, target: tvm.target.Target) -> bool:
    """Tell whether a target is of a family of processors."""
    if not all(_has(target, feature) for feature in row.features):
        return False
    if row.is_named and not _names_processor(target):
        return False
    return not any(_has(target, feature) for feature in row.without)


def _has_tiles(row: Tuning, target: tvm.target.Target) -> bool:
    """Tell whether a target has tiles of bfloat16. Its programs ask Linux for them."""
    if row.lanes != 16 or not all(_has(target, name) for name in FEATURES):
        return False
    triple = str(target.attrs.get("mtriple", "")) or codegen.llvm_get_system_triple()
    return "linux" in triple and triple.startswith("x86_64")


def _has(target: tvm.target.Target, feature: str) -> bool:
    return bool(codegen.target_has_features(feature, target))


def _names_processor(target: tvm.target.Target) -> bool:
    """Tell whether a target names a processor, and not a level of x86-64."""
    is_named = str(target.attrs.get("mcpu", "")) not in {"", "generic"}
    return is_named and level_of(target) is None


def _named(
    triple: str, name: str, num_cores: int, features: Sequence[str] = ()
) -> tvm.target.Target:
    num_cores = check_integer("num_cores", num_cores, 1)
    named = {"kind": "llvm", "mtriple": triple, "mcpu": name, "num-cores": num_cores}
    return tvm.target.Target({**named, "mattr": [*features]} if features else named)
