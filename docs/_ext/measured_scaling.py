"""Tables of docs/distributed.md, from the file of the benchmark ``scaling``."""

from __future__ import annotations

from measured import Measured
from measured_cpu import table

FILE = "scaling.json"


class Steps(Measured):
    """The table of steps by one worker with two threads, and by two with one each."""

    file = FILE

    def lines(self, measured):
        heads = (
            "step",
            "one worker, ms",
            "two workers, ms",
            "ratio",
            "MB a step",
            "communication, ms",
        )
        rows = [
            [
                step["name"],
                f"{step['one_worker_ms']:.0f}",
                f"{step['two_workers_ms']:.0f}",
                f"{step['ratio']:.2f}",
                f"{step['megabytes']:.0f}",
                f"{step['communication_ms']:.0f}",
            ]
            for step in measured["steps"]
        ]
        yield from table(heads, rows, "lrrrrr")


class Networks(Measured):
    """The table of steps on slower networks, as measured and as predicted."""

    file = FILE

    def lines(self, measured):
        rows, names = [], list(measured["networks"])
        counts = sorted({row["workers"] for row in measured["throttled"]})
        for count in counts:
            own = {e["network"]: e for e in measured["throttled"] if e["workers"] == count}
            rows.append(
                [
                    str(count),
                    f"{own['this machine']['ms']:.0f}",
                    *(f"{own[name]['ms']:.0f} ({own[name]['predicted_ms']:.0f})" for name in names),
                ]
            )
        yield from table(("workers", "no limit, ms", *names), rows, "rr" + "r" * len(names))
        yield ""
        yield f"The model is wrong by at most {100 * largest_error(measured):.0f} %."


class Efficiencies(Measured):
    """The table of predicted efficiencies."""

    file = FILE

    def lines(self, measured):
        counts = list(next(iter(measured["steps"][0]["efficiency"].values())))
        rows = [
            [step["name"], name, *(f"{100 * shares[count]:.0f} %" for count in counts)]
            for step in measured["steps"]
            for name, shares in step["efficiency"].items()
        ]
        yield from table(("step", "network", *counts), rows, "ll" + "r" * len(counts))


class Conditions(Measured):
    """A sentence with the machine, the versions and the date."""

    file = FILE

    def lines(self, measured):
        yield (
            f"Measured on {measured['cores']} cores of an {measured['processor']}, TVM "
            f"{measured['tvm']}, PyTorch {measured['torch']}, {measured['date']}."
        )
        if not is_quiet(measured):
            yield (
                f"Other programs took {100 * measured['busy']:.0f} % of the processors when the "
                "measurement began: times and ratios are those of a busy machine."
            )


def is_quiet(measured: dict) -> bool:
    """Tell whether no other programs ran."""
    return measured["busy"] < 0.1


def largest_error(measured: dict) -> float:
    """Return the largest relative error of the predicted steps on slower networks."""
    return max(
        abs(row["predicted_ms"] / row["ms"] - 1)
        for row in measured["throttled"]
        if row["network"] in measured["networks"]
    )


def setup(app):
    for name, directive in (
        ("scaling-steps", Steps),
        ("scaling-networks", Networks),
        ("scaling-efficiency", Efficiencies),
        ("scaling-conditions", Conditions),
    ):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True}
