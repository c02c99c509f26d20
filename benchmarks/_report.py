"""Results as tables, JSON, Markdown and bar charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

import _json_rows
from rich.table import Table

GROUPS = ("conv", "matmul", "memory", "symbolic", "step")

#: Longer bars are cut off; the number is printed beside them.
_WIDEST = 2.0

_SYMBOLIC = "symbolic batch: "
#: The units of the figures of a row of page.json.
UNITS = {
    "ms": "milliseconds of relax_grad, the median of the samples",
    "ratios": "time of relax_grad / time of the column, the median of the ratios of paired samples",
    "least": "least time of relax_grad / least time of PyTorch",
    "error": "largest difference from PyTorch, relative to the largest element",
    "compiling_s": "seconds",
    "kernels": "calls, different kernels",
    "gflops": "GFLOP/s of a direct computation in the least time of relax_grad",
    "peak": "GFLOP/s of multiply-adds in registers, in as many threads",
    "memory_mb": "MB that a step adds to the resident memory at most",
}

_CONV_KINDS = ("forward", "data gradient", "weight gradient")


@dataclass
class Result:
    """The measurements of a row.

    Attributes
    ----------
    group, name : str
        The row.
    samples : dict[str, list[float]]
        Seconds, by column. A very slow column has one sample.
    compiling : dict[str, float]
        Compile times in seconds, by column; those of PyTorch and JAX include the first call, which
        compiles.
    errors : dict[str, float]
        The largest difference from PyTorch's results, relative to their largest elements, by
        column; empty for rows with random numbers.
    kernels : tuple[int, int]
        The number of kernel calls in the program that relax_grad compiled, and of different
        kernels.
    memory : dict[str, int]
        The peak memory that a step adds to the resident memory, in bytes, by column; only for
        steps.
    flops : int
        The floating-point operations of a direct computation; 0 if they do not bound the time.
    date : str or None
        The day of the measurement, if it is not that of the other rows.
    """

    group: str
    name: str
    samples: dict[str, list[float]]
    compiling: dict[str, float]
    errors: dict[str, float]
    kernels: tuple[int, int] = (0, 0)
    memory: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    date: str | None = None

    @classmethod
    def from_dict(cls, row: dict) -> Result:
        """Return the result that ``as_dict`` wrote."""
        return cls(
            row["group"],
            row["name"],
            {
                column: [sample / 1e3 for sample in samples]
                for column, samples in row["samples_ms"].items()
            },
            row["compiling_s"],
            row["errors"],
            (row["kernels"]["calls"], row["kernels"]["different"]),
            row["memory"],
            row["flops"],
            row.get("date"),
        )

    @property
    def median(self) -> float:
        return self.ratio("torch")

    @property
    def least(self) -> float:
        return min(self.samples["relax_grad"]) / min(self.samples["torch"])

    def ratio(self, column: str) -> float | None:
        """Return the median of the ratios of consecutive samples to those of a column, or None."""
        ours, others = self.samples["relax_grad"], self.samples.get(column)
        if others is None:
            return None
        if len(others) != len(ours):  # a single one, of a very slow column
            return median(ours) / median(others)
        return median(a / b for a, b in zip(ours, others, strict=True))

    def as_dict(self) -> dict:
        return {
            "group": self.group,
            "name": self.name,
            "median": _short(self.median),
            "least": _short(self.least),
            "samples_ms": {
                column: [_short(sample * 1e3) for sample in samples]
                for column, samples in self.samples.items()
            },
            "compiling_s": {column: _short(value) for column, value in self.compiling.items()},
            "errors": {column: _short(value) for column, value in self.errors.items()},
            "kernels": {"calls": self.kernels[0], "different": self.kernels[1]},
            "memory": self.memory,
            "flops": self.flops,
            **({"date": self.date} if self.date else {}),
        }

    def as_row(self) -> dict:
        """Return the figures of the row that docs/cpu.md shows, without the samples."""
        row = {
            "group": self.group,
            "name": self.name.removeprefix(_SYMBOLIC),
            "ms": round(median(self.samples["relax_grad"]) * 1e3, 3),
            "least": round(self.least, 4),
            "ratios": {
                column: round(self.ratio(column), 4)
                for column in self.samples
                if column != "relax_grad"
            },
            **({"error": float(f"{self.errors['relax_grad']:.0e}")} if self.errors else {}),
            "compiling_s": round(self.compiling["relax_grad"], 1),
            "kernels": list(self.kernels),
        }
        if self.flops:
            row["gflops"] = round(self.flops / min(self.samples["relax_grad"]) / 1e9)
        if self.memory:
            row["memory_mb"] = {column: round(value / 1e6) for column, value in self.memory.items()}
        if self.date:
            row["date"] = self.date
        return row


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Report:
    """A table: its title, the heads of its columns, and its cells."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_rich(self) -> Table:
        table = Table(title=self.title)
        for i, head in enumerate(self.heads):
            table.add_column(head, justify="right" if i else "left", no_wrap=not i)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        lines = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)], *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{table}\n"


def reports(results: Sequence[Result], others: Sequence[str]) -> list[Report]:
    """Return the tables: one of the means, one for each group, one of memory."""
    tables = [_means(results, others)]
    for group in GROUPS:
        members = [result for result in results if result.group == group]
        if members:
            tables.append(_times(group, members, others))
    if any(result.memory for result in results):
        tables.append(_memory(results))
    return tables


def _means(results: Sequence[Result], others: Sequence[str]) -> Report:
    rows = []
    for group in GROUPS:
        members = [result for result in results if result.group == group]
        if not members:
            continue
        slowest = max(members, key=lambda result: result.median)
        rows.append(
            [
                group,
                str(len(members)),
                *(_ratio(_mean(members, other)) for other in others),
                str(sum(result.median > 1 for result in members)),
                f"{slowest.name}: {_ratio(slowest.median)}",
            ]
        )
    heads = ["", "rows", *others, "slower than torch", "the slowest"]
    return Report("Geometric means of time of relax_grad / time of ...", heads, rows)


def _mean(members: Sequence[Result], column: str) -> float | None:
    known = [ratio for result in members if (ratio := result.ratio(column)) is not None]
    return geometric_mean(known) if known else None


def _times(group: str, members: Sequence[Result], others: Sequence[str]) -> Report:
    columns = [*others, "static"] if group == "symbolic" else others
    rows = [
        [
            result.name.removeprefix(_SYMBOLIC),
            f"{median(result.samples['relax_grad']) * 1e3:.3f}",
            _ratio(result.least),
            *(_ratio(result.ratio(column)) for column in columns),
            f"{result.errors['relax_grad']:.0e}" if result.errors else "",
            f"{result.compiling['relax_grad']:.1f}",
            f"{result.kernels[0]} / {result.kernels[1]}",
        ]
        for result in members
    ]
    means = [_ratio(_mean(members, column)) for column in columns]
    least = geometric_mean(result.least for result in members)
    rows.append(["geometric mean", "", _ratio(least), *means, "", "", ""])
    heads = ["", "ms", "torch (least)", *columns, "error", "compile s", "kernels"]
    return Report(f"{group}: time of relax_grad / time of ...", heads, rows)


def _memory(results: Sequence[Result]) -> Report:
    members = [result for result in results if result.memory]
    columns = list(dict.fromkeys(column for result in members for column in result.memory))
    rows = [
        [
            result.name,
            *(f"{result.memory[c] / 1e6:.0f}" if c in result.memory else "" for c in columns),
            _ratio(result.memory["relax_grad"] / result.memory["torch"]),
        ]
        for result in members
    ]
    heads = ["", *columns, "relax_grad / torch"]
    return Report("Memory that a training step adds at most, in MB", heads, rows)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def updated(
    results: Sequence[Result], about: dict, path: Path, names: Sequence
) -> tuple[list[Result], dict]:
    """Return the results of a file with these results in place of their rows, and ``about`` with
    the higher of both peaks: neighbours on a machine only lower one.

    Parameters
    ----------
    results : sequence of Result
        The new results.
    about : dict
        The date, the machine and the versions of the new results.
    path : Path
        The ``results.json`` of an earlier measurement.
    names : sequence of tuple[str, str]
        The group and the name of all rows of the benchmark, in their order; other rows of the file
        are left out.

    Raises
    ------
    SystemExit
        If the file was measured on another machine, with another number of threads, or with other
        versions.
    """
    earlier = json.loads(path.read_text("utf-8"))
    for key in ("processor", "target", "threads", "tvm", "torch"):
        if earlier[key] != about[key]:
            raise SystemExit(
                f"{path} has rows with {key} {earlier[key]}, and the new ones have {about[key]}: "
                "write them to another folder with --out"
            )
    rows = {}
    for row in earlier["rows"]:
        result = Result.from_dict(row)
        date = result.date or earlier["date"]
        result.date = date if date != about["date"] else None
        rows[result.group, result.name] = result
    rows.update({(result.group, result.name): result for result in results})
    peaks = [measured["peak"] for measured in (earlier, about) if "peak" in measured]
    about = {**about, "peak": max(peaks)} if peaks else about
    return [rows[name] for name in names if name in rows], about


def write(results: Sequence[Result], others: Sequence[str], about: dict, folder: Path) -> None:
    """Write ``results.json``, ``results.md``, ``results.png``, and ``page.json`` for
    docs/cpu.md."""
    folder.mkdir(parents=True, exist_ok=True)
    _json_rows.write(folder / "results.json", about, (result.as_dict() for result in results))
    (folder / "page.json").write_text(page(results, about), "utf-8")
    parts = [
        ", ".join(f"{key} {value}" for key, value in about.items()) + "\n",
        "Time of relax_grad divided by that of each column: medians of paired samples, and in "
        '"torch (least)" the ratio of the least times. "error" is the largest difference from '
        'PyTorch\'s results, relative to their largest element; "kernels" are the calls of '
        'kernels and the different ones among them; "static" is relax_grad with the batch as a '
        "number.\n",
        *(report.to_markdown() for report in reports(results, others)),
    ]
    (folder / "results.md").write_text("\n".join(parts))
    draw(results, about, folder / "results.png")


def page(results: Sequence[Result], about: dict) -> str:
    """Return the text of the file that docs/cpu.md is made from, one row a line."""
    heads = json.dumps({**about, "units": UNITS}, ensure_ascii=False, indent=1)
    rows = ",\n".join("  " + json.dumps(result.as_row(), ensure_ascii=False) for result in results)
    return f'{heads[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def draw(results: Sequence[Result], about: dict, path: Path) -> None:
    """Draw a panel for each kind of rows, with a bar for the time of each row relative to
    PyTorch."""
    import matplotlib

    matplotlib.use("Agg")  # Works without a display.
    from matplotlib import pyplot

    panels: dict[str, list[tuple[str, float]]] = {}
    for group in GROUPS:
        for result in results:
            if result.group == group:
                kind, label = _panel(result)
                panels.setdefault(kind, []).append((label, result.median))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    tallest = [
        max(map(len, list(panels.values())[i * across : (i + 1) * across])) for i in range(down)
    ]
    figure, axes = pyplot.subplots(
        down,
        across,
        figsize=(7 * across, 1 + sum(0.7 + 0.17 * count for count in tallest)),
        height_ratios=[4 + count for count in tallest],
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (kind, bars) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(axis, kind, bars)
    figure.suptitle(
        f"Time of relax_grad / time of PyTorch eager: {about['processor']}, "
        f"{about['threads']} threads"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(result: Result) -> tuple[str, str]:
    """Return the panel of a result, and its label there."""
    if result.group == "conv":
        for kind in _CONV_KINDS:
            if result.name.startswith(kind + " "):
                return f"conv, {kind}", result.name[len(kind) + 1 :]
    if result.group == "symbolic":
        return "symbolic batch", result.name.removeprefix(_SYMBOLIC)
    return result.group, result.name


def _draw_panel(axis, kind: str, bars: Sequence[tuple[str, float]]) -> None:
    labels, values = zip(*bars, strict=True)
    colors = ["C0" if value <= 1 else "C3" for value in values]
    places = range(len(values))
    axis.barh(places, [min(value, _WIDEST) for value in values], color=colors)
    for place, value in zip(places, values, strict=True):
        axis.text(min(value, _WIDEST), place, f" {value:.2f}", va="center", fontsize=7)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(places, labels, fontsize=7)
    axis.set_ylim(len(values) - 0.4, -0.6)
    axis.set_xlim(0, max(1.15, *(min(value, _WIDEST) * 1.1 for value in values)))
    axis.set_title(f"{kind}: geometric mean {geometric_mean(values):.2f}", fontsize=9)
