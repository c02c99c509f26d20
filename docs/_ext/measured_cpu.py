"""Tables and figures of docs/cpu.md, from the files of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from docutils import nodes
from measured import MEASURED, Measured
from sphinx.util.docutils import SphinxRole

#: The groups of rows of kernels, and their names on the page.
GROUPS = {
    "conv": "convolutions",
    "matmul": "matrix products",
    "memory": "normalisations, losses, activations, pools, indices, updates",
    "symbolic": "with a symbolic batch",
}


#: The ratio to PyTorch from which on a convolution or product is in the table of the closest.
_CLOSE = 0.9

#: The ratios to PyTorch from which on a product is in the table of the slower ones: two runs differ
#: by less.
_SLOWER = 1.05


#: The files of :func:`others`: the first one has several measurements, the others have one each.
_OTHERS = ("cpu_others.json", "regions.json", "shares.json")


def others() -> dict:
    """Return the measurements that ``make bench`` does not write, by their names."""
    kept, *single = (json.loads((MEASURED / name).read_text("utf-8")) for name in _OTHERS)
    names = (name.removesuffix(".json") for name in _OTHERS[1:])
    return {**kept, **dict(zip(names, single, strict=True))}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: str) -> Iterator[str]:
    """Yield the lines of a table. ``columns`` has ``l`` or ``r`` for the alignment of each."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join('---:' if column == 'r' else '---' for column in columns)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def pair(row: dict) -> str:
    """Return the text of the ratio to PyTorch, and of the ratio of the best times."""
    return f"{row['ratios']['torch']:.2f} ({row['least']:.2f})"


def kernels(measured: dict) -> list[dict]:
    return [row for row in measured["rows"] if row["group"] in GROUPS]


def slower(measured: dict) -> list[dict]:
    """Return the rows of kernels that are slower than PyTorch's by the median."""
    return [row for row in kernels(measured) if row["ratios"]["torch"] > 1]


class _OfKernels(Measured):
    """A directive of the folder of ``make bench``, with a file for each machine."""

    file = "cpu"

    @staticmethod
    def read(path):
        """Return the measurements of all machines, the newest first."""
        machines = [json.loads(file.read_text("utf-8")) for file in sorted(path.glob("*.json"))]
        return sorted(machines, key=lambda measured: measured["date"], reverse=True)


class Steps(_OfKernels):
    """The table of training steps, with rows for each machine."""

    def lines(self, measured):
        heads = (
            "processor, target",
            "step",
            "/ PyTorch (least)",
            "/ torch.compile",
            "compiled in",
            "memory / PyTorch",
        )
        rows = []
        for machine in measured:
            for row in machine["rows"]:
                if row["group"] != "step":
                    continue
                memory, compiled = row["memory_mb"], row["ratios"].get("torch.compile")
                rows.append(
                    [
                        _named(machine),
                        row["name"],
                        pair(row),
                        "" if compiled is None else f"{compiled:.2f}",
                        f"{row['compiling_s']:.0f} s",
                        f"{memory['relax_grad'] / memory['torch']:.2f}",
                    ]
                )
        yield from table(heads, rows, "llrrrr")


class Families(_OfKernels):
    """The table of the means of kernels, with rows for each machine."""

    def lines(self, measured):
        rows = []
        for machine in measured:
            for group, title in GROUPS.items():
                members = [row for row in machine["rows"] if row["group"] == group]
                if members:
                    mean = geometric_mean(row["ratios"]["torch"] for row in members)
                    least = geometric_mean(row["least"] for row in members)
                    count = str(len(members))
                    rows.append([_named(machine), title, count, f"{mean:.2f} ({least:.2f})"])
        heads = (
            "processor, target",
            "kernels",
            "rows",
            "geometric mean / PyTorch (of the best times)",
        )
        yield from table(heads, rows, "llrr")


class Slower(_OfKernels):
    """The table of the kernels that are slower than PyTorch's on the machine measured last, with
    the number of rows."""

    def lines(self, measured):
        machine = measured[0]
        behind = slower(machine)
        yield (
            f"On the {_named(machine)}, {len(behind)} of the {len(kernels(machine))} rows of "
            "kernels are slower than PyTorch's by the median of their samples:"
        )
        yield ""
        rows = [
            [row["name"] + (", symbolic batch" if row["group"] == "symbolic" else ""), pair(row)]
            for row in behind
        ]
        yield from table(("row", "time / PyTorch (of the best times)"), rows, "lr")


class Closest(_OfKernels):
    """The table of the convolutions and products that take nine tenths of PyTorch's time or more,
    with their share of the peak, for the machines whose peak was measured."""

    def lines(self, measured):
        rows = [
            [
                _named(machine),
                row["name"],
                pair(row),
                f"{row['gflops'] / machine['peak']:.2f}",
            ]
            for machine in measured
            if "peak" in machine
            for row in machine["rows"]
            if "gflops" in row and row["ratios"]["torch"] >= _CLOSE
        ]
        if not rows:
            yield "No file of a machine has such a row together with a measured peak yet."
            return
        heads = ("processor, target", "row", "/ PyTorch (least)", "of the peak")
        yield from table(heads, rows, "llrr")


class CompileTimes(Measured):
    """The table of compile times."""

    file = "cpu_others.json"

    def lines(self, measured):
        compiling = measured["compile_time"]
        rows = [
            [name, *(f"{second:.1f}" for second in times)]
            for name, times in compiling["steps"].items()
        ]
        columns = compiling["columns"]
        yield from table(("step", *columns), rows, "l" + "r" * len(columns))


class Winograd(Measured):
    """The table of errors and times of Winograd's convolutions."""

    file = "cpu_others.json"

    def lines(self, measured):
        winograd = measured["winograd"]
        rows = []
        for name, kinds in winograd["convolutions"].items():
            for i, (kind, row) in enumerate(kinds.items()):
                tiles = (f"{_error(error)}, {time:.2f}" for error, time in row["tiles"])
                rows.append(["" if i else name, kind, *tiles, _error(row["onednn"])])
        yield from table(("convolution", "", *winograd["columns"], "oneDNN"), rows, "llllll")


class _OfMachines(Measured):
    """A table of a folder that has a file for each machine, with a part for each width of
    vectors."""

    @staticmethod
    def read(path):
        return [json.loads(file.read_text("utf-8")) for file in sorted(path.glob("*.json"))]

    def rows(self, measured: list[dict]) -> list[list[str]]:
        """Return the rows of the table, of each machine and each width."""
        widths = ("host", "avx2")
        return [
            row
            for machine in measured
            for width in widths
            if width in machine
            for row in self.of_width(machine, machine[width])
        ]

    def of_width(self, machine: dict, part: dict) -> Iterator[list[str]]:
        """Yield the rows of a machine and a width; each directive implements this."""
        raise NotImplementedError


class Products(_OfMachines):
    """The table of matrix products, with rows for each machine, width of vectors, and form."""

    file = "products"

    def lines(self, measured):
        heads = (
            "processor, target",
            "products",
            "/ PyTorch: mean",
            "most",
            "of the peak: mean",
            "least",
        )
        yield from table(heads, self.rows(measured), "llrrrr")

    def of_width(self, machine, part):
        for group in ("large", "small", "drawn"):
            members = [r for r in part["rows"] if r["group"] == group]
            if not members:
                continue
            medians = [r["median"] for r in members]
            shares = [r["gflops"] / part["peak"][1] for r in members]
            yield [
                f"{machine['processor']}, {part['target']}",
                f"{len(members)} {group}",
                f"{geometric_mean(medians):.2f}",
                f"{max(medians):.2f}",
                f"{geometric_mean(shares):.2f}" if group == "large" else "",
                f"{min(shares):.2f}" if group == "large" else "",
            ]


class SlowerProducts(_OfMachines):
    """The table of the products that take more than PyTorch's time in the median and in the least,
    with rows for each machine, width of vectors, and size."""

    file = "products"

    def lines(self, measured):
        heads = ("processor, target", "product", "form and time / PyTorch (least)", "of the peak")
        yield from table(heads, self.rows(measured), "lllr")

    def of_width(self, machine, part):
        slow: dict[str, list[dict]] = {}
        for row in part["rows"]:
            if min(row["median"], row["least"]) > _SLOWER:
                slow.setdefault(" x ".join(map(str, row["sizes"])), []).append(row)
        for size, members in slow.items():
            shares = [row["gflops"] / part["peak"][1] for row in members]
            yield [
                f"{machine['processor']}, {part['target']}",
                size,
                ", ".join(f"{r['form']} {r['median']:.2f} ({r['least']:.2f})" for r in members),
                f"{geometric_mean(shares):.2f}",
            ]


class Attention(_OfMachines):
    """The table of attention, with rows for each machine, width of vectors, and kind of mask and
    heads."""

    file = "attention"

    def lines(self, measured):
        heads = (
            "processor, target",
            "attention",
            "forward / PyTorch: mean",
            "most",
            "with gradients: mean",
            "most",
            "forward, of the peak",
        )
        yield from table(heads, self.rows(measured), "llrrrrr")

    def of_width(self, machine, part):
        kinds: dict[tuple, list[dict]] = {}
        for row in part["rows"]:
            kind = row["key_heads"] is not None, row["causal"], row.get("rate")
            kinds.setdefault(kind, []).append(row)
        for (is_grouped, is_causal, rate), members in kinds.items():
            heads = "heads share keys" if is_grouped else "a head of keys each"
            heads += "" if rate is None else f", dropout {rate}"
            lengths = sorted(row["sizes"][1] for row in members)
            ratios = []
            for i in range(2):
                medians = [row["median"][i] for row in members]
                ratios += [f"{geometric_mean(medians):.2f}", f"{max(medians):.2f}"]
            shares = [row["flops"] / row["us"][0] / 1e3 / part["peak"] for row in members]
            yield [
                f"{_processor(machine)}, {part['target']}",
                f"{'causal' if is_causal else 'all keys'}, {heads}, {lengths[0]} to "
                f"{lengths[-1]} positions",
                *ratios,
                f"{geometric_mean(shares):.2f}",
            ]


class AttentionSteps(_OfMachines):
    """The table of the training steps that are measured with attention."""

    file = "attention"

    def lines(self, measured):
        heads = ("processor, target", "step", "/ PyTorch", "/ torch.compile", "memory / PyTorch")
        yield from table(heads, self.rows(measured), "llrrr")

    def of_width(self, machine, part):
        for step in part["steps"]:
            compiled = step.get("torch.compile")
            ours, theirs = step.get("memory", (None, None))
            yield [
                f"{_processor(machine)}, {part['target']}",
                step["name"],
                f"{step['median']:.2f}",
                "" if compiled is None else f"{compiled:.2f}",
                "" if ours is None else f"{ours / theirs:.2f}",
            ]


def _processor(machine: dict) -> str:
    """Return the name of a processor, with the number of threads."""
    return f"{machine['processor']} ({machine['threads']} thread{'s' * (machine['threads'] > 1)})"


class Conditions(_OfKernels):
    """A sentence with the machine, the versions and the date of each file, or of another
    measurement."""

    also = _OTHERS
    optional_arguments = 1

    def lines(self, measured):
        abouts = [others()[self.arguments[0]]["about"]] if self.arguments else measured
        for about in abouts:
            parts = [_named(about) if "target" in about else about["processor"]]
            if "threads" in about:
                threads = "thread" if about["threads"] == 1 else "threads"
                parts.append(f"{about['threads']} {threads}")
            parts += [f"{name} {about[key]}" for key, name in _VERSIONS.items() if key in about]
            day = about.get("date") or about["recorded"]
            yield f"Measured on an {', '.join(parts)}, {day}."


def _named(machine: dict) -> str:
    """Return the name of a processor, with the target that programs are compiled for."""
    return f"{machine['processor']} ({machine['target']})"


class Figure(SphinxRole):
    """A figure of :func:`others` in a sentence, by its keys with dots; a pair is a range."""

    def run(self):
        value = others()
        for key in self.text.split("."):
            value = value[key]
        for name in _OTHERS:
            self.env.note_dependency(str(MEASURED / name))
        text = " to ".join(map(str, value)) if isinstance(value, list) else str(value)
        return [nodes.Text(text)], []


_VERSIONS = {"tvm": "TVM", "torch": "PyTorch"}


def _error(value: float) -> str:
    """Return an error with two digits, as 3.8e-7."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def setup(app):
    for name, directive in (
        ("cpu-steps", Steps),
        ("cpu-families", Families),
        ("cpu-slower", Slower),
        ("cpu-closest", Closest),
        ("cpu-products", Products),
        ("cpu-slower-products", SlowerProducts),
        ("cpu-attention", Attention),
        ("cpu-attention-steps", AttentionSteps),
        ("compile-times", CompileTimes),
        ("winograd-errors", Winograd),
        ("cpu-conditions", Conditions),
    ):
        app.add_directive(name, directive)
    app.add_role("figure", Figure())
    return {"parallel_read_safe": True}
