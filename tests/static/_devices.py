"""Processors on which exported steps train under emulators: their compilers, and their programs.

``make cross-tools`` installs the compilers and emulators.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import arm
import tvm

import relax_grad

HERE = Path(__file__).parent

#: The options of programs for microcontrollers: their own start, files of the host by semihosting.
_BARE = (
    *("-mthumb", "-mfloat-abi=hard", "-nostartfiles", "--specs=nosys.specs"),
    *("-T", str(HERE / "device.ld"), "-Wl,-z,noexecstack"),
)
_BOARD = (
    *("qemu-system-arm", "-display", "none", "-monitor", "none", "-serial", "none"),
    *("-semihosting-config", "enable=on,target=native"),
)


@dataclass(frozen=True)
class Device:
    """A processor.

    Attributes
    ----------
    target : tvm.target.Target
        What kernels are compiled for.
    compiler, emulator : tuple[str, ...]
        The commands that link a program, and that run one. The program's path comes last.
    packages : dict[str, str]
        Debian's package of each command.
    """

    target: tvm.target.Target
    compiler: tuple[str, ...]
    emulator: tuple[str, ...]
    packages: dict[str, str]

    def missing(self) -> str | None:
        """Return the reason why no program can be built or run; None if they can."""
        for tool, package in self.packages.items():
            if shutil.which(tool) is None:
                return f"{tool} is not installed (Debian's package {package}; make cross-tools)"
        return None

    def train(self, folder: Path, batches: bytes, rows: int, steps: int) -> bytes:
        """Train an exported folder by device.c, and return what the program writes."""
        (folder / "batches").write_bytes(batches)
        _run(
            *self.compiler, *("-std=gnu99", "-O2", "-Wall", "-Wextra"), f"-DROWS={rows}",
            *(f"-DSTEPS={steps}", "-I", folder, HERE / "device.c", *sorted(folder.glob("*.c"))),
            *(folder / "kernels.o", "-lm", "-o", folder / "device"), cwd=folder,
        )  # fmt: skip
        written = folder / "written"
        _run(*self.emulator, folder / "device", cwd=folder, written=written)
        return written.read_bytes()


def _run(*command: object, cwd: Path, written: Path | None = None) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd, timeout=120
    )
    reason = written.read_bytes() if written and written.exists() else b""
    assert done.returncode == 0, (
        f"{done.returncode}: {reason[-200:]!r}{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


def _microcontroller(name: str, machine: str, data: int) -> Device:
    places = f"-Wl,--defsym=CODE=0,--defsym=DATA={data:#x}"
    return Device(
        relax_grad.target.cortex_m(name),
        ("arm-none-eabi-gcc", f"-mcpu={name}", *_BARE, places),
        (*_BOARD, "-machine", machine, "-kernel"),
        {
            "arm-none-eabi-gcc": "gcc-arm-none-eabi with libnewlib-arm-none-eabi",
            "qemu-system-arm": "qemu-system-arm",
        },
    )


def devices() -> dict[str, Device]:
    """Return the processors by their names."""
    riscv = "qemu-riscv64" if shutil.which("qemu-riscv64") else "qemu-riscv64-static"
    return {
        "cortex-a53": Device(
            relax_grad.target.arm("cortex-a53", 1),
            ("aarch64-linux-gnu-gcc", "-static"),
            (arm.EMULATOR, "-cpu", "cortex-a53"),
            {"aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu", arm.EMULATOR: "qemu-user"},
        ),
        "cortex-m7": _microcontroller("cortex-m7", "mps2-an500", 0x20000000),
        "cortex-m55": _microcontroller("cortex-m55", "mps3-an547", 0x21000000),
        "riscv64": Device(
            relax_grad.target.riscv64(),
            ("riscv64-linux-gnu-gcc", "-static"),
            (riscv,),
            {"riscv64-linux-gnu-gcc": "gcc-riscv64-linux-gnu", riscv: "qemu-user"},
        ),
    }
