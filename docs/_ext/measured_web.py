"""Tables of docs/web_speed.md, from the file of the benchmark ``web``, and of
docs/without_runtime.md, from the file of ``static_sizes``."""

from __future__ import annotations

from measured import Measured
from measured_cpu import table
from measured_scaling import is_quiet

FILE = "web.json"
OURS, CHROMIUM, NATIVE = "relax_grad, Node", "relax_grad, Chromium", "relax_grad, x86-64-v2"
RELAXED = "relax_grad with relaxed SIMD, Chromium"

#: The columns of the peers, and how often their time is relax_grad's at least.
PEERS = (
    "TensorFlow.js wasm, Node",
    "TensorFlow.js cpu, Node",
    "TensorFlow.js wasm, Chromium",
    "TensorFlow.js webgl, Chromium",
    "TensorFlow.js webgpu, Chromium",
    "ONNX Runtime 1.19.2, Chromium",
)


def milliseconds(value: float | None) -> str:
    """Return a time as text; a dash for a network that is not trained."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def best_tensorflow(row: dict) -> float | None:
    """Return the least time of TensorFlow.js for a network; None if no back end trains it."""
    times = [ms for name, ms in row["ms"].items() if name.startswith("TensorFlow.js") and ms]
    return min(times, default=None)


class Steps(Measured):
    """The table of steps in WebAssembly and natively."""

    file = FILE

    def lines(self, measured):
        heads = (
            *("network", "batch", "Node, ms", "Chromium, ms", "relaxed SIMD, ms", "native, ms"),
            *("Node / native", "PyTorch, ms"),
        )
        rows = []
        for row in measured["rows"]:
            ms = row["ms"]
            shown = [milliseconds(ms.get(name)) for name in (OURS, CHROMIUM, RELAXED, NATIVE)]
            ratio = f"{ms[OURS] / ms[NATIVE]:.2f}"
            rows.append(
                [row["title"], str(row["batch"]), *shown, ratio, milliseconds(ms.get("PyTorch"))]
            )
        yield from table(heads, rows, "lrrrrrrr")


class Peers(Measured):
    """The table of steps beside TensorFlow.js and ONNX Runtime."""

    file = FILE

    def lines(self, measured):
        names = [n for n in PEERS if any(n in row["ms"] for row in measured["rows"])]
        heads = ("step, ms", *(row["title"] for row in measured["rows"]))
        rows = []
        for name in (OURS, CHROMIUM, *names):
            cells = []
            for row in measured["rows"]:
                mark = r" \*" if name in row.get("first_steps", ()) else ""
                cells.append(milliseconds(row["ms"].get(name)) + mark)
            rows.append([name, *cells])
        yield from table(heads, rows, "l" + "r" * len(measured["rows"]))
        yield ""
        best = [(row, best_tensorflow(row)) for row in measured["rows"]]
        shares = [min(r["ms"][OURS], r["ms"].get(CHROMIUM) or 1e9) / t for r, t in best if t]
        if shares:
            yield (
                f"relax_grad's steps take {min(shares):.4f} to {max(shares):.2f} of the time of "
                "the fastest back end of TensorFlow.js that trains the network."
            )


class Reasons(Measured):
    """The list of the networks that peers do not train, with their errors."""

    file = FILE

    def lines(self, measured):
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in measured["rows"]:
            for name, reason in row.get("reasons", {}).items():
                reasons.setdefault((name, reason), []).append(row["title"])
        for (name, reason), titles in reasons.items():
            yield f"- {name}: {'; '.join(titles)}: {reason.rstrip('.')}."


class Sizes(Measured):
    """The table of what a page loads."""

    file = FILE

    def lines(self, measured):
        rows = [[f"`step.wasm`, {row['title']}", *_sizes(row["wasm"])] for row in measured["rows"]]
        rows += [[f"{name}, without a model", *_sizes(n)] for name, n in measured["sizes"].items()]
        yield from table(("a page loads", "bytes", "with gzip"), rows, "lrr")


class Conditions(Measured):
    """A paragraph with the time to the first step, the machine, the versions and the date."""

    file = FILE

    def lines(self, measured):
        if first := measured.get("first_step"):
            yield (
                "**First step.** From the loaded script to the end of the first step of the "
                f"digits CNN, Chromium took {first['ms']:.0f} ms: fetching and compiling the "
                "module, reading the state, and the step. Starting the page itself took "
                f"{first['page_ms']:.0f} ms before it, in a browser that had just started."
            )
            yield ""
        chromium = measured.get("chromium", "").partition("Chrome/")[2].partition(" ")[0]
        yield (
            f"Measured on an {measured['processor']}, one thread, Node {measured['node']}, "
            f"Chromium {chromium}, TVM {measured['tvm']}, PyTorch {measured['torch']}, "
            f"{measured['date']}."
        )
        if not is_quiet(measured):
            yield (
                f"Other programs took {100 * measured['busy']:.0f} % of the processors when the "
                "measurement began: times and ratios are those of a busy machine."
            )


class StaticSizes(Measured):
    """The table of the sizes of steps without a runtime."""

    file = "static_sizes.json"

    def lines(self, measured):
        targets = list(next(iter(measured["steps"].values())))
        heads = ("step", *(f"{name}: code" for name in targets), "state", "arena", "workspace")
        rows = []
        for name, sizes in measured["steps"].items():
            memory = sizes[targets[0]]
            rows.append(
                [
                    name,
                    *(kilobytes(sizes[target]["code"]) for target in targets),
                    *(kilobytes(memory[area]) for area in ("state", "arena", "workspace")),
                ]
            )
        yield from table(heads, rows, "l" + "r" * (len(heads) - 1))


def kilobytes(size: int) -> str:
    """Return bytes as text, in kB or MB."""
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _sizes(numbers: dict[str, int]) -> list[str]:
    return [f"{numbers['bytes']:,}", f"{numbers['gzip']:,}"]


def setup(app):
    for name, directive in (
        ("web-steps", Steps),
        ("web-peers", Peers),
        ("web-reasons", Reasons),
        ("web-sizes", Sizes),
        ("web-conditions", Conditions),
        ("static-sizes", StaticSizes),
    ):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True}
