"""The figure of memory against time in docs/trainer.md, and the rows of its table."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "_measured"

#: The colours of the steps, the ink and the grid, by the page.
_COLOURS = {
    "light": (("#2166ac", "#b2182b", "#1b7837"), "#333333", "#cccccc"),
    "dark": (("#7cb5f0", "#ff8f87", "#7fd08f"), "#d0d0d0", "#555555"),
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
    """Draw the settings of each step, for light and for dark pages."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    # The same numbers yield the same file.
    mpl.rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none"})
    for page, (colours, ink, faint) in _COLOURS.items():
        figure, axes = pyplot.subplots(figsize=(8, 4.2))
        steps = zip(points(results).items(), colours, _MARKERS, strict=False)
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
                    color=ink,
                )
        axes.axhline(1, color=ink, lw=0.8)
        axes.axvline(1, color=ink, lw=0.8)
        axes.set_xlim(0, 1.05)
        axes.set_ylim(0.4, 1.05)
        axes.set_xlabel("memory / PyTorch's", color=ink)
        axes.set_ylabel("time / PyTorch's", color=ink)
        axes.grid(color=faint, lw=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", colors=ink, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        legend = axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
        for text in legend.get_texts():
            text.set_color(ink)
        path = folder / f"memory_{page}.svg"
        figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
