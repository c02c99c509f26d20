"""Results as a table, JSON, Markdown and a bar chart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

from rich.table import Table

GROUPS = ("conv", "matmul", "memory", "step")


@dataclass
class Result:
    """What has been measured of a row.

    Attributes
    ----------
    group, name : str
        The row.
    samples : dict[str, list[float]]
        Seconds, by column.
    compiling : dict[str, float]
        Seconds that compiling, and the first call, took.
    error : float
        The largest difference from PyTorch's result, relative to its largest element.
    """

    group: str
    name: str
    samples: dict[str, list[float]]
    compiling: dict[str, float]
    error: float
    median: float = field(init=False)
    least: float = field(init=False)

    def __post_init__(self):
        self.median = self.ratio("relax_grad", "torch")
        self.least = min(self.samples["relax_grad"]) / min(self.samples["torch"])

    def ratio(self, column: str, to: str) -> float | None:
        """Return the median of the ratios of samples that were taken one after the other."""
        if column not in self.samples or to not in self.samples:
            return None
        pairs = zip(self.samples[column], self.samples[to], strict=True)
        return median(a / b for a, b in pairs)


def table(results: Sequence[Result], others: Sequence[str]) -> Table:
    """Return a table of times and of the ratios to each of the others."""
    found = Table(title="time of relax_grad / time of ...")
    for name in ("", "ms", "torch (least)", *others, "error", "compile s"):
        found.add_column(name, justify="left" if not name else "right")
    for row in rows(results, others):
        found.add_row(*row)
    return found


def rows(results: Sequence[Result], others: Sequence[str]) -> list[list[str]]:
    """Return the cells of each row, with the geometric mean of each group behind it."""
    cells = []
    for group in GROUPS:
        members = [result for result in results if result.group == group]
        cells.extend(
            [
                result.name,
                f"{median(result.samples['relax_grad']) * 1e3:.3f}",
                f"{result.least:.2f}",
                *(_ratio(result.ratio("relax_grad", other)) for other in others),
                f"{result.error:.0e}",
                f"{result.compiling['relax_grad']:.1f}",
            ]
            for result in members
        )
        if len(members) > 1:
            means = []
            for other in others:
                known = [result.ratio("relax_grad", other) for result in members]
                known = [ratio for ratio in known if ratio is not None]
                means.append(_ratio(geometric_mean(known) if known else None))
            least = geometric_mean([result.least for result in members])
            cells.append([f"geometric mean of {group}", "", f"{least:.2f}", *means, "", ""])
    return cells


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def write(results: Sequence[Result], others: Sequence[str], about: dict, folder: Path) -> None:
    """Write ``results.json``, ``results.md`` and ``results.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = {**about, "rows": [asdict(result) for result in results]}
    (folder / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    heads = ["row", "ms", "torch (least)", *others, "error", "compile s"]
    lines = [
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        "Time of relax_grad divided by that of each column: medians of paired samples, and the ratio of the "
        "least times.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(cells) + " |" for cells in rows(results, others)),
    ]
    (folder / "results.md").write_text("\n".join(lines) + "\n")
    draw(results, about, folder / "results.png")


def draw(results: Sequence[Result], about: dict, path: Path) -> None:
    """Draw a bar for each row: how long it takes, PyTorch being 1."""
    import matplotlib

    matplotlib.use("Agg")  # Needs no display.
    from matplotlib import pyplot

    ordered = [result for group in GROUPS for result in results if result.group == group]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(ordered)), layout="constrained")
    for i, group in enumerate(GROUPS):
        places = [j for j, result in enumerate(ordered) if result.group == group]
        if not places:
            continue
        axes.barh(places, [ordered[j].median for j in places], color=f"C{i}", label=group)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(ordered)), [result.name for result in ordered], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set(
        xlabel="time / time of PyTorch eager",
        title=f"{about['processor']}, {about['threads']} threads",
    )
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
