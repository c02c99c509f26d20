"""Draw the time and the memory of training steps, relative to PyTorch eager, as SVG for light and for dark pages.

``python benchmarks/chart.py`` reads benchmarks/results/memory.json, and writes docs/_measured/steps_light.svg and
steps_dark.svg. It needs the standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks/results/memory.json"
FOLDER = ROOT / "docs/_measured"

#: The colours of text, of PyTorch's bars and of relax_grad's bars.
THEMES = {"light": ("#1f2328", "#b9c0c8", "#1f6feb"), "dark": ("#e6edf3", "#59636e", "#58a6ff")}

#: The panels: a title, and the key of the values relative to PyTorch's.
PANELS = (("Time of a training step", "time"), ("Peak memory of a training step", "memory"))

_WIDTH, _BARS, _LEFT, _BAR, _GROUP = 640, 300, 190, 16, 50


def steps(measured: dict) -> list[tuple[str, dict, dict]]:
    """Return the name of each step, its row without rematerialisation, and PyTorch's row."""
    rows = {(row["step"], row["remat"]): row for row in measured["rows"]}
    names = dict.fromkeys(row["step"] for row in measured["rows"])
    return [(name, rows[name, "none"], rows[name, "PyTorch"]) for name in names]


def conditions(measured: dict) -> str:
    """Return the machine and the versions in one line."""
    return (
        f"{measured['processor']} ({measured['target']}), {measured['threads']} threads, "
        f"TVM {measured['tvm']}, PyTorch {measured['torch']} eager"
    )


def draw(measured: dict, theme: str) -> str:
    """Return the chart as SVG."""
    text, theirs, ours = THEMES[theme]
    parts, y = [], 24
    for title, key in PANELS:
        parts.append(f'<text x="0" y="{y}" font-weight="bold">{title}, PyTorch eager = 1</text>')
        y += 14
        for name, row, _ in steps(measured):
            label = escape(name.partition(",")[0])
            parts.append(f'<text x="{_LEFT - 10}" y="{y + 21}" text-anchor="end">{label}</text>')
            for i, (who, value, color) in enumerate(
                (("relax_grad", row[key], ours), ("PyTorch", 1.0, theirs))
            ):
                top, length = y + i * (_BAR + 2), round(_BARS * value, 1)
                parts.append(
                    f'<rect x="{_LEFT}" y="{top}" width="{length}" height="{_BAR}" fill="{color}"/>'
                )
                parts.append(
                    f'<text x="{_LEFT + length + 6}" y="{top + 13}">{value:.2f} {who}</text>'
                )
            y += _GROUP
        y += 24
    parts.append(f'<text x="0" y="{y - 8}" font-size="11">{escape(conditions(measured))}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" '
        f'height="{y}" font-family="sans-serif" font-size="13" fill="{text}" role="img" '
        f'aria-label="Time and memory of training steps relative to PyTorch eager">\n{body}\n</svg>\n'
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
    for theme in THEMES:
        (FOLDER / f"steps_{theme}.svg").write_text(draw(measured, theme))
    print("\n".join(table(measured)))


if __name__ == "__main__":
    main()
