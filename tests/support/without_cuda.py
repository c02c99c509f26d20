"""Empty libraries in the place of those of CUDA, so that a PyTorch for GPUs is imported without
them: ``python tests/support/without_cuda.py``.

PyPI's PyTorch for x86-64 links to CUDA's libraries, which are several gigabytes. On a machine
without a GPU it calls none of their functions, but the loader resolves them. This writes a library
with these names for each library that is missing, beside PyTorch's own, by binutils and a C
compiler. The environment must be one for tests only.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path


def main() -> None:
    specification = importlib.util.find_spec("torch")
    if specification is None or specification.origin is None:
        sys.exit("PyTorch is not installed")
    written = write_libraries(Path(specification.origin).parent / "lib")
    print(f"empty libraries: {', '.join(written) or 'none'}")


def write_libraries(folder: Path) -> list[str]:
    """Write an empty library for each that the libraries of a folder miss, and return their
    names."""
    libraries = sorted(folder.glob("*.so*"))
    needed = {
        path: re.findall(r"NEEDED.*\[(.+)\]", _output("readelf", "-d", "-W", path))
        for path in libraries
    }
    found = {path.name for path in libraries}
    found |= set(re.findall(r"^\s*(\S+) ", _output("/sbin/ldconfig", "-p"), re.MULTILINE))
    missing = {
        name for names in needed.values() for name in names if not name.startswith("ld-linux")
    } - found
    versions: dict[str, set[str]] = defaultdict(set)  # by library
    symbols: dict[str, set[str]] = defaultdict(set)  # by version; "" for none
    defined: set[str] = set()
    for path in libraries:
        listed = _output("nm", "-D", "--defined-only", path).splitlines()
        defined |= {line.split()[-1].partition("@")[0] for line in listed}
        if missing.isdisjoint(needed[path]):
            continue
        sections = _output("readelf", "-V", "-W", path)
        for name, entries in re.findall(r"File: (\S+)\s+Cnt: \d+\n((?:.*Name: .*\n)*)", sections):
            if name in missing:
                versions[name].update(re.findall(r"Name: (\S+)", entries))
        for line in _output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if line.split()[0] == "U":
                symbols[version].add(symbol)
    # The library of a symbol without a version is unknown. Python has its own symbols.
    plain = {s for s in symbols[""] - defined if not re.match(r"_?Py|_Z", s)}
    for name in sorted(missing):
        _write(folder / name, {version: symbols[version] for version in versions[name]}, plain)
        plain = set()
    return sorted(missing)


def _write(path: Path, versions: dict[str, set[str]], plain: set[str]) -> None:
    functions = sorted({*plain, *(symbol for group in versions.values() for symbol in group)})
    source = "".join(f"void {symbol}(void) {{}}\n" for symbol in functions)
    with tempfile.NamedTemporaryFile("w", suffix=".map") as script:
        for version, group in versions.items():
            listed = f"global: {' '.join(f'{symbol};' for symbol in sorted(group))}" * bool(group)
            script.write(f"{version} {{ {listed} }};\n")
        script.flush()
        options = [f"-Wl,--version-script={script.name}"] if versions else []
        command = ["cc", "-w", "-shared", "-nostdlib", "-fno-builtin", f"-Wl,-soname,{path.name}"]
        subprocess.run(
            [*command, *options, "-o", path, "-x", "c", "-"], input=source, text=True, check=True
        )


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
