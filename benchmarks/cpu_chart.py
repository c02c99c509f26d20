"""Draw the time of kernels, by family, and of training steps relative to PyTorch eager, for
docs/cpu.md.

``python benchmarks/cpu_chart.py`` reads the newest file of docs/_measured/cpu, and writes
cpu_kernels.svg and cpu_steps.svg to docs/_measured.
``python benchmarks/cpu_chart.py benchmarks/results/page.json`` first copies the results of
``make bench`` to the file of their machine in that folder. It needs the standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean
from xml.sax.saxutils import escape

from _pages import for_both
from chart import DARK, FOLDER, OTHERS, OURS, TEXT, conditions, file_of_machine

MACHINES = FOLDER / "cpu"

#: Families of kernels: a title, the group of the rows, and a pattern at the beginning or the end of
#: their names.
FAMILIES = (
    ("Convolutions, 3x3", "conv", r".*, 3x3(, stride 2|, dilation 2)?$"),
    ("Convolutions, 1x1", "conv", r".*, 1x1(, stride 2)?$"),
    ("Convolutions, depthwise", "conv", r".*depthwise$"),
    ("Convolutions, transposed", "conv", r".*, transposed(, stride 2)?$"),
    ("Convolutions, others", "conv", r".*, (\d|\d+ groups|3x3x3|5x5|7x7|7x7, stride 2)$"),
    ("Matrix products", "matmul", ""),
    ("Normalisations", "memory", r"(batch|layer|rms|group)_norm"),
    ("Softmax, cross-entropy", "memory", r"softmax|log_softmax|cross-entropy"),
    ("Activations", "memory", r"gelu|silu|relu|add and relu"),
    ("Pools", "memory", r"(max|avg)_pool2d"),
    ("Sums and means", "memory", r"bias gradient|sum of|mean of"),
    ("Indices and layouts", "memory", r"embedding|scatter|gather|NCHW"),
    ("Updates of optimizers", "memory", r"SGD|momentum|Adam"),
    ("With a symbolic batch", "symbolic", ""),
)

_WIDTH, _BARS, _LEFT, _BAR, _STEP = 640, 230, 190, 16, 26

#: The largest ratio on the axis.
_LARGEST = 1.6


def machines() -> list[dict]:
    """Return the measurements of all machines, the newest first."""
    results = [json.loads(path.read_text("utf-8")) for path in sorted(MACHINES.glob("*.json"))]
    return sorted(results, key=lambda measured: measured["date"], reverse=True)


def families(measured: dict) -> dict[str, list[dict]]:
    """Return the rows of each family."""
    return {
        title: [
            row
            for row in measured["rows"]
            if row["group"] == group and re.match(pattern, row["name"])
        ]
        for title, group, pattern in FAMILIES
    }


def kernels(measured: dict) -> list[tuple[str, float, str, tuple[float, float]]]:
    """Return a bar for each family: its title, the geometric mean, a remark, and the least and
    largest ratio."""
    bars = []
    for title, rows in families(measured).items():
        ratios = [row["ratios"]["torch"] for row in rows]
        if ratios:
            remark = f"{len(rows)} rows, {min(ratios):.2f} to {max(ratios):.2f}"
            bars.append((title, geometric_mean(ratios), remark, (min(ratios), max(ratios))))
    return bars


def steps(measured: dict) -> list[tuple[str, float, str, tuple[float, float]]]:
    """Return a bar for each step: its name, the ratio, and PyTorch's time; the range is the
    ratio."""
    bars = []
    for row in measured["rows"]:
        if row["group"] == "step":
            ratio = row["ratios"]["torch"]
            bars.append(
                (row["name"].partition(",")[0], ratio, f"{row['ms']:.0f} ms", (ratio, ratio))
            )
    return bars


#: The charts: the name of the file, the title, and the bars.
CHARTS = {
    "kernels": (
        "Time of kernels, PyTorch eager = 1: geometric mean, and range of the rows",
        kernels,
    ),
    "steps": ("Time of training steps, PyTorch eager = 1", steps),
}


def draw(measured: dict, chart: str) -> str:
    """Return a chart as SVG."""
    title, bars = CHARTS[chart]
    parts, y = [f'<text x="0" y="20" font-weight="bold">{escape(title)}</text>'], 38
    top = y
    for label, value, remark, (least, largest) in bars(measured):
        middle = y + _BAR / 2
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_place(value) - _LEFT:.1f}" height="{_BAR}" '
            f'fill="{OURS}"/>'
        )
        if least < largest:
            parts.append(
                f'<path d="M{_place(least)} {middle}H{_place(largest)}" stroke="{TEXT}" '
                'stroke-width="1.5"/>'
            )
        parts.append(
            f'<text x="{_place(_LARGEST) + 4}" y="{y + 13}" font-size="12">{value:.2f}; '
            f"{escape(remark)}</text>"
        )
        y += _STEP
    parts.insert(
        1,
        f'<path d="M{_place(1.0)} {top - 4}V{y}" stroke="{OTHERS}" stroke-width="2" class="one"/>',
    )
    y += 20
    parts.append(f'<text x="0" y="{y}" font-size="11">{escape(conditions(measured))}</text>')
    body = "\n".join(parts)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" width="{_WIDTH}" '
        f'height="{y + 8}" font-family="sans-serif" font-size="13" fill="{TEXT}" role="img" '
        f'aria-label="{escape(title)}">\n{body}\n</svg>\n'
    )
    return for_both(svg, DARK)


def _place(ratio: float) -> float:
    """Return the horizontal position of a ratio."""
    return round(_LEFT + _BARS * min(ratio, _LARGEST) / _LARGEST, 1)


def main() -> None:
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_text("utf-8")
        measured = json.loads(text)
        (MACHINES / file_of_machine(measured, measured["target"])).write_text(text, "utf-8")
    measured = machines()[0]
    for chart in CHARTS:
        (FOLDER / f"cpu_{chart}.svg").write_text(draw(measured, chart), "utf-8")


if __name__ == "__main__":
    main()
