"""Draw the time and the memory of training steps, as one SVG for light and for dark pages.

``python benchmarks/chart.py`` reads docs/_measured/steps.json for the times of all frameworks,
which benchmarks/frameworks.py writes, and benchmarks/results/memory.json for memory. It writes
docs/_measured/steps.svg. It needs the standard library only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from _pages import for_both

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks/results/memory.json"
FOLDER = ROOT / "docs/_measured"
TIMES = FOLDER / "steps.json"

#: The colours of text, of others' bars and of relax_grad's bars, on a light page.
TEXT, OTHERS, OURS = "#1f2328", "#b9c0c8", "#1f6feb"

#: The same on a dark page.
DARK = {TEXT: "#e6edf3", OTHERS: "#59636e", OURS: "#58a6ff"}

#: The names of the contestants in the chart.
LABELS = {"PyTorch": "PyTorch eager", "TVM": "TVM alone"}

#: Labels, bars and values fit a page 400 pixels wide: there, the text has 11 pixels.
_WIDTH, _LEFT, _BAR = 520, 96, 18

#: The pixels of a bar of length 1, and of the longest one: a longer bar is cut, and ends in a
#: point.
_UNIT, _LONGEST = 90, 230


class Bar(NamedTuple):
    """A bar: the contestant, and its length or the reason why there is none."""

    name: str
    length: float | None
    reason: str = ""


class Panel(NamedTuple):
    """Bars in groups: a title, and the bars by the labels of their steps."""

    title: str
    groups: dict[str, list[Bar]]


def steps(measured: dict) -> list[tuple[str, dict, dict]]:
    """Return the name of each step, its row without rematerialisation, and PyTorch's row."""
    rows = {(row["step"], row["remat"]): row for row in measured["rows"]}
    names = dict.fromkeys(row["step"] for row in measured["rows"])
    return [(name, rows[name, "none"], rows[name, "PyTorch"]) for name in names]


def _label(step: str) -> str:
    return step.partition(",")[0].partition(" ")[0]


def panels(measured: dict, times: dict) -> list[Panel]:
    """Return the panels of the chart: times relative to relax_grad's, and memory relative to
    PyTorch's."""
    groups = {}
    for row in times["rows"]:
        ours, reasons = row["ms"]["relax_grad"], row.get("reason", {})
        groups[_label(row["step"])] = [
            Bar(name, None if ms is None else ms / ours, reasons.get(name, ""))
            for name, ms in row["ms"].items()
        ]
    memory = {
        _label(name): [Bar("relax_grad", row["memory"]), Bar("PyTorch", 1.0)]
        for name, row, _ in steps(measured)
    }
    return [
        Panel("Time of a training step, relax_grad = 1", groups),
        Panel("Peak memory of a step, PyTorch eager = 1", memory),
    ]


def file_of_machine(measured: dict, target: str) -> str:
    """Return the name of the file for a machine: ``amd-epyc-znver5.json``."""
    name = f"{measured['processor']} {target}".lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") + ".json"


def conditions(measured: dict) -> str:
    """Return the machine and the versions of the measurement of memory in one line."""
    return (
        f"{measured['processor']} ({measured['target']}), {measured['threads']} threads, "
        f"TVM {measured['tvm']}, PyTorch {measured['torch']} eager"
    )


def _lines_of_conditions(measured: dict, times: dict) -> list[str]:
    versions = f"TVM {times['tvm']}, PyTorch {times['torch']}"
    if "jax" in times:
        versions += f", JAX {times['jax']}"
    return [
        f"{times['processor']} ({times['target']}), {times['threads']} threads, {times['date']}",
        versions,
        f"memory: {measured['processor']} ({measured['target']}), {measured['date']}",
    ]


def draw(measured: dict, times: dict) -> str:
    """Return the chart as SVG."""
    parts, y = [], 24
    for title, groups in panels(measured, times):
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{title}</text>')
        y += 14
        for label, bars in groups.items():
            middle = y + len(bars) * (_BAR + 2) / 2 + 4
            parts.append(
                f'<text x="{_LEFT - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>'
            )
            for name, length, reason in bars:
                color = OURS if name == "relax_grad" else OTHERS
                parts += _bar(y, LABELS.get(name, name), length, reason, color)
                y += _BAR + 2
            y += 12
        y += 24
    for line in _lines_of_conditions(measured, times):
        parts.append(f'<text x="0" y="{y - 8}" font-size="13">{escape(line)}</text>')
        y += 18
    body = "\n".join(parts)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" '
        f'height="{y}" font-family="sans-serif" font-size="15" fill="{TEXT}" role="img" '
        f'aria-label="Time and memory of training steps relative to others">\n{body}\n</svg>\n'
    )
    return for_both(svg, DARK)


def _bar(y: float, name: str, length: float | None, reason: str, color: str) -> list[str]:
    """Return a bar with its text, or the reason why there is none."""
    if length is None:
        return [f'<text x="{_LEFT}" y="{y + 15}">{escape(f"{name}: {reason}")}</text>']
    width = min(_UNIT * length, _LONGEST)
    right, bottom, tip = _LEFT + width, y + _BAR, 8 if _UNIT * length > _LONGEST else 0
    outline = (
        (
            f"M{_LEFT} {y}H{right - tip:.1f}L{right:.1f} {y + _BAR / 2:g}L{right - tip:.1f} "
            f"{bottom}H{_LEFT}Z"
        )
        if tip
        else f"M{_LEFT} {y}H{right:.1f}V{bottom}H{_LEFT}Z"
    )
    number = f"{length:.2f}" if length < 10 else f"{length:.0f}"
    return [
        f'<path d="{outline}" fill="{color}"/>',
        f'<text x="{right + 6:.1f}" y="{y + 15}">{number} {escape(name)}</text>',
    ]


def table(measured: dict) -> list[str]:
    """Return the lines of the table of README.md, which docs/index.md includes."""
    lines = ["| training step | than PyTorch eager | of its memory |", "|---|---:|---:|"]
    for name, row, torch in steps(measured):
        speedup, memory = torch["ms"] / row["ms"], row["measured"] / torch["measured"]
        lines.append(f"| {name} | {speedup:.1f}x faster | {memory:.2f} |")
    return lines


def main() -> None:
    measured, times = json.loads(SOURCE.read_text()), json.loads(TIMES.read_text())
    (FOLDER / "steps.svg").write_text(draw(measured, times))
    print("\n".join(table(measured)))


if __name__ == "__main__":
    main()
