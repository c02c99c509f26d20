"""The charts that are drawn as text: SVG for light and for dark pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple
from xml.sax.saxutils import escape

from _benchmark import MEASURED

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


def for_both(svg: str, dark: Mapping[str, str]) -> str:
    """Return a picture with a style that replaces its colours on dark pages.

    Parameters
    ----------
    svg : str
        The picture for light pages. Colours stand in the attributes ``fill`` and ``stroke``, or in
        ``style``.
    dark : Mapping[str, str]
        The colours for dark pages, by those of the picture.
    """
    rules = "\n".join(_rules(svg, dark))
    style = f"<style>@media (prefers-color-scheme: dark) {{\n{rules}\n}}</style>"
    return re.sub(r"<svg[^>]*>", lambda head: f"{head[0]}\n{style}", svg, count=1)


def _rules(svg: str, dark: Mapping[str, str]) -> Iterator[str]:
    for light, other in dark.items():
        for name in ("fill", "stroke"):
            if f'{name}="{light}"' in svg:
                yield f'[{name}="{light}"] {{{name}: {other}}}'
            if f"{name}: {light}" in svg:
                yield f'[style*="{name}: {light}"] {{{name}: {other} !important}}'


def picture(parts: Sequence[str], size: tuple[int, int], font: int, label: str) -> str:
    """Return the SVG of some elements, with a label for readers that do not see it."""
    width, height = size
    body = "\n".join(parts)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="{font}" fill="{TEXT}" role="img" '
        f'aria-label="{label}">\n{body}\n</svg>\n'
    )
    return for_both(svg, DARK)


class Bar(NamedTuple):
    """A bar: the contestant, and its length or the reason why there is none."""

    name: str
    length: float | None
    reason: str = ""


class Panel(NamedTuple):
    """Bars in groups: a title, and the bars by the labels of their steps."""

    title: str
    groups: dict[str, list[Bar]]


def _steps(measured: dict) -> list[tuple[str, dict, dict]]:
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
        for name, row, _ in _steps(measured)
    }
    return [
        Panel("Time of a training step, relax_grad = 1", groups),
        Panel("Peak memory of a step, PyTorch eager = 1", memory),
    ]


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


def steps_chart(measured: dict, times: dict) -> str:
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
    label = "Time and memory of training steps relative to others"
    return picture(parts, (_WIDTH, y), 15, label)


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


def steps_table(measured: dict) -> list[str]:
    """Return the lines of the table of README.md, which docs/index.md includes."""
    lines = ["| training step | than PyTorch eager | of its memory |", "|---|---:|---:|"]
    for name, row, torch in _steps(measured):
        speedup, memory = torch["ms"] / row["ms"], row["measured"] / torch["measured"]
        lines.append(f"| {name} | {speedup:.1f}x faster | {memory:.2f} |")
    return lines


def draw_steps(_: object = None) -> None:
    """Draw the chart of the first page, of the times and the memory in docs/_measured, and print
    the table."""
    measured, times = (
        json.loads((MEASURED / name).read_text("utf-8")) for name in ("memory.json", "steps.json")
    )
    (MEASURED / "steps.svg").write_text(steps_chart(measured, times), "utf-8")
    print(*steps_table(measured), sep="\n")


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

_CPU_WIDTH, _BARS, _CPU_LEFT, _CPU_BAR, _STEP = 640, 230, 190, 16, 26

#: The largest ratio on the axis.
_LARGEST = 1.6


def machines() -> list[dict]:
    """Return the measurements of all machines, the newest first."""
    results = [
        json.loads(path.read_text("utf-8")) for path in sorted((MEASURED / "cpu").glob("*.json"))
    ]
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


def _kernel_bars(measured: dict) -> list[tuple[str, float, str, tuple[float, float]]]:
    """Return a bar for each family: its title, the geometric mean, a remark, and the least and
    largest ratio."""
    bars = []
    for title, rows in families(measured).items():
        ratios = [row["ratios"]["torch"] for row in rows]
        if ratios:
            remark = f"{len(rows)} rows, {min(ratios):.2f} to {max(ratios):.2f}"
            bars.append((title, geometric_mean(ratios), remark, (min(ratios), max(ratios))))
    return bars


def _step_bars(measured: dict) -> list[tuple[str, float, str, tuple[float, float]]]:
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
        _kernel_bars,
    ),
    "steps": ("Time of training steps, PyTorch eager = 1", _step_bars),
}


def cpu_chart(measured: dict, chart: str) -> str:
    """Return a chart as SVG."""
    title, bars = CHARTS[chart]
    parts, y = [f'<text x="0" y="20" font-weight="bold">{escape(title)}</text>'], 38
    top = y
    for label, value, remark, (least, largest) in bars(measured):
        middle = y + _CPU_BAR / 2
        parts.append(
            f'<text x="{_CPU_LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(
            f'<rect x="{_CPU_LEFT}" y="{y}" width="{_place(value) - _CPU_LEFT:.1f}" '
            f'height="{_CPU_BAR}" fill="{OURS}"/>'
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
    return picture(parts, (_CPU_WIDTH, y + 8), 13, escape(title))


def _place(ratio: float) -> float:
    """Return the horizontal position of a ratio."""
    return round(_CPU_LEFT + _BARS * min(ratio, _LARGEST) / _LARGEST, 1)


def draw_cpu(_: object = None) -> None:
    """Draw the charts of docs/cpu.md, of the machine that was measured last."""
    measured = machines()[0]
    for chart in CHARTS:
        (MEASURED / f"cpu_{chart}.svg").write_text(cpu_chart(measured, chart), "utf-8")
