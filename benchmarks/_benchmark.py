"""The form of a benchmark, the facts of the machine, files of results, and processes."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEASURED = HERE.parent / "docs" / "_measured"

#: Rows or their figures, by name.
Rows = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """The place of rows in the contents of a file.

    Attributes
    ----------
    pack : Callable
        Takes the head and the figures of rows, and returns the contents.
    unpack : Callable, optional
        Takes the contents, and returns the figures of rows. Without it, a file has the rows of one
        run only.
    """

    pack: Callable[[dict, Rows], Any]
    unpack: Callable[[Any], Rows] | None = None


def listed(name: str) -> Layout:
    """Return the layout with a list ``rows``, in which the key ``name`` has the name of a row."""
    return Layout(
        lambda head, rows: {**head, "rows": [{name: key, **row} for key, row in rows.items()]},
        lambda contents: {
            row[name]: {key: value for key, value in row.items() if key != name}
            for row in contents["rows"]
        },
    )


def named(key: str) -> Layout:
    """Return the layout with a dictionary of rows at a key."""
    return Layout(lambda head, rows: {**head, key: rows}, lambda contents: contents[key])


@dataclass(frozen=True)
class Benchmark:
    """The rows of a benchmark, and the function that measures one.

    Attributes
    ----------
    rows : Callable
        Takes the options, and returns the rows by name.
    measure : Callable
        Takes a row and the options, and returns its figures.
    json : str
        The file of ``--json`` in docs/_measured. A name without suffix is a folder with a file for
        each machine.
    head : Callable
        Takes the options, and returns the entries of the file before the rows: machine, versions
        and units.
    layout : Layout
        The place of the rows.
    draw : Callable, optional
        Takes the contents of the file, and draws them for the documentation.
    summary : Callable, optional
        Takes the figures of rows, and returns a text.
    repeats, seconds, jobs : int, float, int
        The defaults of the options.
    options : Mapping
        The arguments of ``argparse`` for further options, by their names.
    """

    rows: Callable[[Namespace], Mapping[str, Any]]
    measure: Callable[[Any, Namespace], dict]
    json: str = ""
    head: Callable[[Namespace], dict] = lambda args: {}
    layout: Layout = field(default_factory=lambda: listed("name"))
    draw: Callable[[dict], None] | None = None
    summary: Callable[[Rows], str] | None = None
    repeats: int = 7
    seconds: float = 20.0
    jobs: int = 1
    options: Mapping[str, dict] = field(default_factory=dict)


#: The facts that :func:`facts` knows besides versions of packages.
_FACTS: dict[str, Callable[[], object]] = {
    "date": lambda: date.today().isoformat(),
    "recorded": lambda: date.today().isoformat(),
    "processor": lambda: processor(),
    "target": lambda: _host(),
    "threads": lambda: int(os.environ["TVM_NUM_THREADS"]),
    "cores": lambda: len(os.sched_getaffinity(0)),
    "python": platform.python_version,
    "machine": platform.machine,
    "load": lambda: round(os.getloadavg()[0], 1),
    "busy": lambda: _busy(),
}

#: The facts of a head that all rows of a file share.
_SHARED = ("processor", "target", "threads", "clock", "python", "tvm", "numpy", "torch", "jax")


def facts(*names: str) -> dict[str, object]:
    """Return facts of this machine and versions of packages, by name."""
    return {name: _FACTS[name]() if name in _FACTS else _version(name) for name in names}


def processor() -> str:
    """Return the name of the processor, or of its architecture if the system does not report it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _host() -> str:
    import relax_grad

    return str(relax_grad.target.host().attrs["mcpu"])


def _version(package: str) -> str:
    try:
        return importlib.import_module(package).__version__
    except ImportError:
        return "not installed"


def _busy(seconds: float = 3.0) -> float:
    """Return the share of the processors that other programs take now, or 0 where the system does
    not report it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        own = [int(count) for count in stat.read_text().splitlines()[0].split()[1:]]
        return sum(own), own[3] + own[4]  # idle, and idle in wait for disks

    before = ticks()
    time.sleep(seconds)
    total, idle = (b - a for a, b in zip(before, ticks(), strict=True))
    return round(1 - idle / total, 3)


def file_of_machine(processor: str, target: str) -> str:
    """Return the name of the file for a machine: ``amd-epyc-znver5.json``."""
    return re.sub(r"[^a-z0-9]+", "-", f"{processor} {target}".lower()).strip("-") + ".json"


def text(value: object, depth: int = 0, margin: str = "") -> str:
    """Return JSON with a line for each row: for each list or dictionary that has only plain values,
    or, below the rows, less than 1000 characters."""
    line = json.dumps(value, ensure_ascii=False)
    entries = list(value.values()) if isinstance(value, dict) else value
    is_plain = not isinstance(entries, list) or not any(isinstance(e, dict | list) for e in entries)
    if depth and (is_plain or (depth > 1 and len(line) < 1000)):
        return line
    inner = f"\n{margin} "
    if isinstance(value, dict):
        lines = [f"{json.dumps(k)}: {text(v, depth + 1, inner[1:])}" for k, v in value.items()]
    else:
        lines = [text(entry, depth + 1, inner[1:]) for entry in entries]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{inner}{f',{inner}'.join(lines)}\n{margin}{last}"


def shares_machine(contents: dict, head: dict, path: Path) -> None:
    """Raise an error if the rows of a file are of another machine, other versions or another number
    of threads."""
    for key in _SHARED:
        old, new = ((part.get("about", part)).get(key) for part in (contents, head))
        if old != new:
            raise SystemExit(
                f"{path} has rows with {key} {old}, and the new ones have {new}: measure all rows, "
                "or write them to another file with --json FILE"
            )


def shown(name: str, figures: Mapping[str, object]) -> str:
    """Return the lines of a row: the name, and the figures."""
    if figures and all(isinstance(value, dict) for value in figures.values()):
        return "\n".join(shown(f"{name}, {key}", value) for key, value in figures.items())
    cells = [f"{key} {_cell(value)}" for key, value in figures.items() if value != name]
    return f"{name}: {'; '.join(cells)}"


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(own)}" for key, own in value.items())
    if isinstance(value, list):
        return " / ".join(map(_cell, value)) if len(value) < 20 else f"{len(value)} values"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_process(
    module: str,
    function: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Any:
    """Return the result of a function of a module of this folder in a process of its own.

    Arguments and results are values of JSON.

    Raises
    ------
    RuntimeError
        If the function fails; with the text that it printed as an error.
    subprocess.TimeoutExpired
        If it takes longer than ``seconds``.
    """
    code = (
        "import importlib, json, sys; module, function, arguments = json.loads(sys.argv[1]); "
        "function = getattr(importlib.import_module(module), function); "
        "print('\\n' + json.dumps(function(*arguments)))"
    )
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([module, function, arguments])],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function}{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def beginning(names: Sequence[str], rows: Mapping[str, Any]) -> Rows:
    """Return the rows whose names begin with these texts, in their order."""
    return {row: rows[row] for name in names for row in rows if row.startswith(name)}
