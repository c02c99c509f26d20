"""Directives for measured results: the edge cases of operators, and the errors of gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from docutils.statemachine import StringList
from edges import REASONS
from sphinx.util.docutils import SphinxDirective

DTYPES = ("float64", "float32", "float16", "bfloat16")
MEASURED = Path(__file__).parents[1] / "_measured"


class Measured(SphinxDirective):
    """A directive that generates lines of Markdown from a file of measurements."""

    file: str
    #: The other files that the lines are made from.
    also: tuple[str, ...] = ()

    @staticmethod
    def read(path: Path):
        """Return the contents of the file."""
        return json.loads(path.read_text("utf-8"))

    def lines(self, measured: dict) -> Iterator[str]:
        """Yield the lines for the contents of the file; each directive implements this."""
        raise NotImplementedError

    def run(self):
        path = MEASURED / self.file
        for name in (self.file, *self.also):
            self.env.note_dependency(str(MEASURED / name))
        lines = self.lines(self.read(path))
        return self.parse_text_to_nodes(StringList(list(lines), str(path)))


class Edges(Measured):
    """The table of a section of edges, and the reasons for differences between relax_grad and
    PyTorch."""

    file = "edges.json"
    required_arguments = 1
    final_argument_whitespace = True

    def lines(self, measured):
        rows = [row for row in measured["edges"] if row["section"] == self.arguments[0]]
        if not rows:
            raise self.error(f"there are no edges in a section {self.arguments[0]!r}")
        yield from ["````{list-table}", ":header-rows: 1", ":widths: 31 23 23 23"]
        yield from [":class: edges", ""]
        yield from ["* - call", "  - relax_grad", "  - PyTorch", "  - JAX"]
        for row in rows:
            ours = row["relax_grad"]
            yield f"* - `{row['call']}`"
            yield f"  - {_shown(ours)}"
            for library in ("torch", "jax"):
                same = row[library] == ours
                yield f"  - {'same' if same else _shown(row[library])}"
        yield from ["````", ""]
        different = [row["call"] for row in rows if row["call"] in REASONS]
        if different:
            yield from ["Where relax_grad and PyTorch differ:", ""]
            yield from (f"- `{call}`: {REASONS[call]}." for call in different)


class Summary(Measured):
    """A table of the distribution of the errors of all operators, by dtype."""

    file = "accuracy.json"

    def lines(self, measured):
        yield "| dtype | operators | without error | median | largest | largest in |"
        yield "|---|---|---|---|---|---|"
        for dtype in DTYPES:
            largest = {
                name: errors[dtype]["relative"]
                for name, errors in measured["errors"].items()
                if dtype in errors
            }
            worst = max(largest, key=largest.get)
            exact = sum(error == 0 for error in largest.values())
            cells = [
                dtype,
                len(largest),
                exact,
                _number(median(largest.values())),
                _number(largest[worst]),
            ]
            yield f"| {' | '.join(map(str, cells))} | `{worst.removeprefix('relax.')}` |"


class Errors(Measured):
    """The table of the largest error of each operator's gradients, by dtype."""

    file = "accuracy.json"

    def lines(self, measured):
        yield from ["````{list-table}", ":header-rows: 1", ":widths: 40 15 15 15 15", ""]
        yield "* - operator"
        yield from (f"  - {dtype}" for dtype in DTYPES)
        for name, errors in measured["errors"].items():
            yield f"* - `{name.removeprefix('relax.')}`"
            yield from (f"  - {_error(errors.get(dtype))}" for dtype in DTYPES)
        yield "````"


class HalfErrors(Measured):
    """The table of the errors of kernels in half precision, beside PyTorch's in the same dtype."""

    file = "half_accuracy.json"

    def lines(self, measured):
        about = measured["about"]
        yield from [f"Measured on {about['processor']}, with PyTorch {about['torch']}:", ""]
        yield "| kernels | call | dtype | result | PyTorch's | gradients | PyTorch's |"
        yield "|---|---|---|---|---|---|---|"
        for family, calls in measured["errors"].items():
            rows = [(call, dtype, e) for call, found in calls.items() for dtype, e in found.items()]
            for number, (call, dtype, errors) in enumerate(rows):
                shown = [
                    f"{errors[library][kind]:.1e}" if errors[library][kind] else "0"
                    for kind in ("result", "gradients")
                    for library in ("relax_grad", "torch")
                ]
                first = family if number == 0 else ""
                yield f"| {' | '.join([first, call, dtype, *shown])} |"


class Versions(Measured):
    """The table of the versions of Python, TVM, PyTorch and NumPy that the tests ran with."""

    file = "versions.json"

    def lines(self, measured):
        yield "| run | versions | passed | failed | date |"
        yield "|---|---|---|---|---|"
        for row, result in measured.items():
            kind, _, versions = row.partition(": ")
            cells = [kind, versions, *(str(result[name]) for name in ("passed", "failed", "date"))]
            yield f"| {' | '.join(cells)} |"


class HalfSteps(Measured):
    """The table of training steps in float32 and in bfloat16, beside PyTorch's."""

    file = "half.json"

    def lines(self, measured):
        yield from _times(measured, "step", "{:.0f}")


class TileSteps(HalfSteps):
    """The same on a processor with tiles."""

    file = "half_tiles.json"


class TileKernels(Measured):
    """The table of kernels in float32 and in bfloat16, on a processor with tiles, beside
    PyTorch's."""

    file = "half_tiles.json"

    def lines(self, measured):
        yield from _times(measured, "kernel", "{:.2f}")


def _times(measured: dict, kind: str, form: str) -> Iterator[str]:
    """Yield the table of the times of all rows of a kind."""
    rows = [row for row in measured["rows"] if kind in row]
    if not rows:
        return
    columns = list(rows[0]["ms"])
    yield f"Least milliseconds on {measured['processor']} (`{measured['target']}`), "
    yield f"{measured['threads']} threads, PyTorch {measured['torch']}, {measured['date']}:"
    yield ""
    yield f"| {kind} | {' | '.join(columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for row in rows:
        times = (row["ms"][column] for column in columns)
        cells = (r"\-" if time is None else form.format(time) for time in times)
        yield f"| {row[kind]} | {' | '.join(cells)} |"


class HalfMemory(Measured):
    """The table of the planned memory of training steps in half precision, beside float32."""

    file = "half_memory.json"

    def lines(self, measured):
        yield "| step | float32, MB | bfloat16, MB | float16, MB | bfloat16 / float32 |"
        yield "|---|---|---|---|---|"
        for row in measured:
            bytes_ = {dtype: own["intermediate"] for dtype, own in row["memory"].items()}
            shown = [f"{number / 1e6:.1f}" for number in bytes_.values()]
            ratio = f"{bytes_['bfloat16'] / bytes_['float32']:.2f}"
            yield f"| {' | '.join([row['step'], *shown, ratio])} |"


class Functions(Measured):
    """The table of the largest errors of float32 functions and of their derivatives, with PyTorch's
    errors."""

    file = "functions.json"

    def lines(self, measured):
        yield "| function | relax_grad | PyTorch | gradient | PyTorch's |"
        yield "|---|---|---|---|---|"
        for name, (value, *gradients) in (
            (name, list(kinds.values())) for name, kinds in measured["errors"].items()
        ):
            cells = [
                _ulps([row[library] for row in kinds])
                for kinds in ([value], gradients)
                for library in ("relax_grad", "torch")
            ]
            yield f"| `{name}` | {' | '.join(cells)} |"


def _ulps(errors: list[float | None]) -> str:
    """Return the text of the largest of some errors in units in the last place; None is
    infinite."""
    if None in errors:
        return "∞"
    largest = max(errors)
    return f"{largest:.1f}" if largest < 1000 else f"{largest:.0e}"


def _shown(texts: dict[str, str] | None) -> str:
    """Return the text of the value and the gradients, or of the refusal."""
    if texts is None:
        return r"\-"  # Markdown would make a bullet of a plain hyphen
    if "refused" in texts:
        return f"refused: {texts['refused']}"
    value, *gradients = texts.values()
    return "\\\n    ".join([f"`{value}`", *(f"∇ `{gradient}`" for gradient in gradients)])


def _error(error: dict | None) -> str:
    if error is None:
        return r"\-"  # Markdown would make a bullet of a plain hyphen
    return _number(error["relative"])


def _number(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def setup(app):
    app.add_directive("edges", Edges)
    app.add_directive("accuracy-summary", Summary)
    app.add_directive("gradient-errors", Errors)
    app.add_directive("half-errors", HalfErrors)
    app.add_directive("half-memory", HalfMemory)
    app.add_directive("half-steps", HalfSteps)
    app.add_directive("tested-versions", Versions)
    app.add_directive("tile-kernels", TileKernels)
    app.add_directive("tile-steps", TileSteps)
    app.add_directive("function-errors", Functions)
    return {"parallel_read_safe": True}
