"""Draw the time and the memory of training steps, relative to PyTorch, as SVG for light and for dark pages.

``python benchmarks/chart.py`` reads benchmarks/results/memory.json, and docs/_measured/cpu_others.json for torch.compile. It
writes docs/_measured/steps_light.svg and steps_dark.svg. It needs the standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks/results/memory.json"
FOLDER = ROOT / "docs/_measured"
OTHERS = FOLDER / "cpu_others.json"

#: The colours of text, of PyTorch's bars and of relax_grad's bars.
THEMES = {"light": ("#1f2328", "#b9c0c8", "#1f6feb"), "dark": ("#e6edf3", "#59636e", "#58a6ff")}


class Panel(NamedTuple):
    """Bars of relax_grad beside bars of length 1: a title, the other's name, and the steps' values."""

    title: str
    other: str
    values: dict[str, float]


#: Labels, bars and values fit a page 400 pixels wide: there, the text has 11 pixels.
_WIDTH, _BARS, _LEFT, _BAR, _GROUP = 520, 240, 110, 18, 52


def steps(measured: dict) -> list[tuple[str, dict, dict]]:
    """Return the name of each step, its row without rematerialisation, and PyTorch's row."""
    rows = {(row["step"], row["remat"]): row for row in measured["rows"]}
    names = dict.fromkeys(row["step"] for row in measured["rows"])
    return [(name, rows[name, "none"], rows[name, "PyTorch"]) for name in names]


def panels(measured: dict, others: dict) -> list[Panel]:
    """Return the panels of the chart. The steps with torch.compile were measured on another day."""
    rows = steps(measured)
    compiled = others["torch_compile"]["steps"]
    return [
        Panel("Time of a training step", "PyTorch", {name: row["time"] for name, row, _ in rows}),
        Panel("Peak memory of a step", "PyTorch", {name: row["memory"] for name, row, _ in rows}),
        Panel(
            "Time of a training step", "torch.compile", {name: compiled[name] for name, *_ in rows}
        ),
    ]


def conditions(measured: dict) -> str:
    """Return the machine and the versions in one line."""
    return (
        f"{measured['processor']} ({measured['target']}), {measured['threads']} threads, "
        f"TVM {measured['tvm']}, PyTorch {measured['torch']} eager"
    )


def _conditions_of_compile(others: dict) -> str:
    about = others["torch_compile"]["about"]
    return (
        f"torch.compile: {about['processor'].partition(' (')[0]}, {about['threads']} threads, "
        f"PyTorch {about['torch']}, {about['recorded']}"
    )


def draw(measured: dict, others: dict, theme: str) -> str:
    """Return the chart as SVG."""
    text, theirs, ours = THEMES[theme]
    parts, y = [], 24
    for title, other, values in panels(measured, others):
        name = "PyTorch eager" if other == "PyTorch" else other
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{title}, {name} = 1</text>')
        y += 14
        for step, value in values.items():
            label = escape(step.partition(",")[0])
            parts.append(f'<text x="{_LEFT - 10}" y="{y + 24}" text-anchor="end">{label}</text>')
            for i, (who, length, color) in enumerate(
                (("relax_grad", value, ours), (other, 1.0, theirs))
            ):
                top, width = y + i * (_BAR + 2), round(_BARS * length, 1)
                parts.append(
                    f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{_BAR}" fill="{color}"/>'
                )
                parts.append(
                    f'<text x="{_LEFT + width + 6}" y="{top + 15}">{length:.2f} {who}</text>'
                )
            y += _GROUP
        y += 24
    for line in (conditions(measured).removesuffix(" eager"), _conditions_of_compile(others)):
        parts.append(f'<text x="0" y="{y - 8}" font-size="13">{escape(line)}</text>')
        y += 16
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" '
        f'height="{y}" font-family="sans-serif" font-size="15" fill="{text}" role="img" '
        f'aria-label="Time and memory of training steps relative to PyTorch">\n{body}\n</svg>\n'
    )


def table(measured: dict) -> list[str]:
    """Return the lines of the table of README.md and docs/index.md."""
    heads = ("training step", "time, PyTorch", "time", "memory, PyTorch", "memory", "compiled in")
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for name, row, torch in steps(measured):
        cells = [name, f"{torch['ms']:.0f} ms", f"{row['ms']:.0f} ms"]
        cells += [f"{each['measured'] / 1e6:.0f} MB" for each in (torch, row)]
        lines.append("| " + " | ".join([*cells, f"{row['compiling_s']:.0f} s"]) + " |")
    return lines


def main() -> None:
    measured = json.loads(SOURCE.read_text())
    others = json.loads(OTHERS.read_text())
    for theme in THEMES:
        (FOLDER / f"steps_{theme}.svg").write_text(draw(measured, others, theme))
    print("\n".join(table(measured)))


if __name__ == "__main__":
    main()
