"""The figure of memory against time in docs/trainer.md, and the rows of its table."""

from __future__ import annotations

import io
from pathlib import Path

from _pages import for_both

FOLDER = Path(__file__).parents[1] / "docs" / "_measured"

#: The colours of the steps, of text and of lines, and the same on a dark page.
_COLOURS, _INK, _FAINT = ("#2166ac", "#b2182b", "#1b7837"), "#333333", "#cccccc"
_DARK = {
    "#2166ac": "#7cb5f0",
    "#b2182b": "#ff8f87",
    "#1b7837": "#7fd08f",
    _INK: "#d0d0d0",
    _FAINT: "#555555",
}
_MARKERS = ("o", "s", "^")


def points(results: dict) -> dict[str, list[tuple[float, float, str]]]:
    """Return memory and time relative to PyTorch's, and the setting, by the step; the most memory
    comes first."""
    by_step: dict[str, list] = {}
    for row in results["rows"]:
        if row["remat"] != "PyTorch":
            point = (row["memory"], row["time"], _short(row["remat"]))
            by_step.setdefault(row["step"], []).append(point)
    return {step: sorted(of_step, reverse=True) for step, of_step in by_step.items()}


def table(results: dict) -> list[str]:
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


def draw(results: dict, folder: Path = FOLDER) -> None:
    """Draw the settings of each step."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    # The same numbers yield the same file.
    mpl.rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    steps = zip(points(results).items(), _COLOURS, _MARKERS, strict=False)
    for (step, of_step), colour, marker in steps:
        memory, time, _ = zip(*of_step, strict=True)
        axes.plot(memory, time, color=colour, marker=marker, ms=5, lw=1, label=step)
        for x, y, names in _labels(of_step):
            axes.annotate(
                names,
                (x, y),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=_INK,
            )
    axes.axhline(1, color=_INK, lw=0.8)
    axes.axvline(1, color=_INK, lw=0.8)
    axes.set_xlim(0, 1.05)
    axes.set_ylim(0.4, 1.05)
    axes.set_xlabel("memory / PyTorch's", color=_INK)
    axes.set_ylabel("time / PyTorch's", color=_INK)
    axes.grid(color=_FAINT, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    legend = axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    for text in legend.get_texts():
        text.set_color(_INK)
    drawn = io.StringIO()
    options = {"transparent": True, "bbox_inches": "tight", "metadata": {"Date": None}}
    figure.savefig(drawn, format="svg", **options)
    pyplot.close(figure)
    (folder / "memory.svg").write_text(for_both(drawn.getvalue(), _DARK), "utf-8")
