"""The figures of docs/trainer.md and docs/accuracy.md that Matplotlib draws."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _benchmark import MEASURED
from _charts import for_both

from relax_grad.testing.samples._sample import _makers

#: The colours of rows, of text and of lines, and the same on a dark page.
_GREEN, _BLUE, _RED, _YELLOW = "#1b7837", "#2166ac", "#b2182b", "#b8860b"
_INK, _FAINT = "#333333", "#cccccc"
_DARK = {
    _GREEN: "#7fd08f",
    _BLUE: "#7cb5f0",
    _RED: "#ff8f87",
    _YELLOW: "#f0c35a",
    _INK: "#d0d0d0",
    _FAINT: "#555555",
}
#: The distance from 1 to the next number, and the colour of a dtype.
DTYPES = {
    "float64": (2.0**-52, _GREEN),
    "float32": (2.0**-23, _BLUE),
    "float16": (2.0**-10, _RED),
    "bfloat16": (2.0**-7, _YELLOW),
}

#: Smaller errors, in epsilons, are drawn as this one.
_LEAST = 0.01

#: The colours and markers of training steps.
_COLOURS = _BLUE, _RED, _GREEN
_MARKERS = ("o", "s", "^")


def _points(results: dict) -> dict[str, list[tuple[float, float, str]]]:
    """Return memory and time relative to PyTorch's, and the setting, by the step; the most memory
    comes first."""
    by_step: dict[str, list] = {}
    for row in results["rows"]:
        if row["remat"] != "PyTorch":
            point = (row["memory"], row["time"], _short(row["remat"]))
            by_step.setdefault(row["step"], []).append(point)
    return {step: sorted(of_step, reverse=True) for step, of_step in by_step.items()}


def memory_table(results: dict) -> list[str]:
    """Return the rows of the table in Markdown."""
    return [
        f"| {row['step']} | {_written(row['remat'])} | {row['planned'] / 1e6:.0f} | "
        f"{row['measured'] / 1e6:.0f} | {row['memory']:.2f} | {row['time']:.2f} |"
        for row in results["rows"]
        if row["remat"] != "PyTorch"
    ]


def _share(remat: str) -> str | None:
    return remat.partition("%")[0] if remat.endswith("% of the peak") else None


def _written(remat: str) -> str:
    share = _share(remat)
    return f"budget of {share} %" if share else remat if remat == "none" else f'`"{remat}"`'


def _short(remat: str) -> str:
    share = _share(remat)
    return f"{share} %" if share else "policy" if remat.startswith("dots") else remat


def _labels(of_step: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return one label for settings with almost the same memory: its place, and their names."""
    groups: list[list] = []
    for point in of_step:
        if groups and groups[-1][0][0] - point[0] < 0.04:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [
        (
            sum(x for x, _, _ in group) / len(group),
            max(y for _, y, _ in group),
            ", ".join(name for _, _, name in reversed(group)),
        )
        for group in groups
    ]


@contextmanager
def _figure(name: str, size: tuple[float, float], folder: Path) -> Iterator[Any]:
    """Give the axes of a figure in the colours of the page, and write it to a folder."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    # The same numbers yield the same file.
    mpl.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=size)
    yield axes
    axes.grid(color=_FAINT, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    columns = len(axes.get_legend_handles_labels()[1])
    legend = axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, frameon=False)
    for text in legend.get_texts():
        text.set_color(_INK)
    drawn = io.StringIO()
    options = {"transparent": True, "bbox_inches": "tight", "metadata": {"Date": None}}
    figure.savefig(drawn, format="svg", **options)
    pyplot.close(figure)
    (folder / f"{name}.svg").write_text(for_both(drawn.getvalue(), _DARK), "utf-8")


def draw_memory(results: dict, folder: Path = MEASURED) -> None:
    """Draw memory against time, for the settings of each step."""
    with _figure("memory", (8, 4.2), folder) as axes:
        steps = zip(_points(results).items(), _COLOURS, _MARKERS, strict=False)
        for (step, of_step), colour, marker in steps:
            memory, time, _ = zip(*of_step, strict=True)
            axes.plot(memory, time, color=colour, marker=marker, ms=5, lw=1, label=step)
            how = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": _INK}
            for x, y, names in _labels(of_step):
                axes.annotate(names, (x, y), (0, 7), **how)
        axes.axhline(1, color=_INK, lw=0.8)
        axes.axvline(1, color=_INK, lw=0.8)
        axes.set_xlim(0, 1.05)
        axes.set_ylim(0.4, 1.05)
        axes.set_xlabel("memory / PyTorch's", color=_INK)
        axes.set_ylabel("time / PyTorch's", color=_INK)


def draw_accuracy(results: dict, folder: Path = MEASURED) -> None:
    """Draw the errors of operators, with a row for each family."""
    families = _families(results["errors"])
    with _figure("accuracy", (8, 0.27 * len(families) + 1.2), folder) as axes:
        for row, errors in enumerate(families.values()):
            for offset, (dtype, (epsilon, colour)) in enumerate(DTYPES.items()):
                own = [entry[dtype]["relative"] / epsilon for entry in errors if dtype in entry]
                heights = [row + 0.17 * (offset - 1.5)] * len(own)
                axes.scatter(np.maximum(own, _LEAST), heights, 9, colour, lw=0, alpha=0.8)
        for dtype, (_, colour) in DTYPES.items():
            axes.scatter([], [], 16, colour, label=dtype)
        axes.axvline(1, color=_INK, lw=0.8)
        axes.set_xscale("log")
        axes.set_yticks(range(len(families)), families, color=_INK)
        axes.set_ylim(len(families) - 0.4, -0.6)
        axes.set_xlabel("error / epsilon of the dtype (at the left edge: none)", color=_INK)


def _families(errors: dict) -> dict[str, list[dict]]:
    """Return the errors of the operators of each module of samples, by the name of the module."""
    families: dict[str, list[dict]] = {}
    for name, entry in errors.items():
        if entry:
            maker = _makers[name]
            family = getattr(maker, "func", maker).__module__.rpartition(".")[2]
            families.setdefault(family, []).append(entry)
    return dict(sorted(families.items()))
