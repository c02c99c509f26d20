"""A plugin of pytest that prints the processor time of tests, by folder and for the slowest ones.

``--cpu-times`` turns it on (``make test-profile``). Processor time counts every thread, every
process that a test has waited for and, on Linux, processes that still live, so that it hardly
depends on other work of the machine. Wall time is that of setup, call and teardown.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from pathlib import Path

import pytest

_KEY = "processor seconds"
#: The number of the slowest tests that are printed.
_SLOWEST = 30
#: The processor seconds above which a file is named.
_BUDGET = 20


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--cpu-times",
        action="store_true",
        help="print processor and wall seconds by folder, and the slowest tests",
    )


def pytest_configure(config) -> None:
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(_Times(), "cpu-times-of-tests")


def _processor_time() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(map(_time_of_process, _children("self")))


def _children(process: str) -> list[str]:
    """Return the living processes that the threads of a process have started."""
    children = []
    for path in Path("/proc", process, "task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += path.read_text().split()
    return children


def _time_of_process(process: str) -> float:
    """Return the processor time of a process, of those that it has waited for, and of its living
    ones."""
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has ended
        return 0.0
    ticks = sum(map(int, fields[11:15]))  # the user and system times, then those of children
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(_time_of_process, _children(process)))


class _Times:
    """The times of all tests. Under pytest-xdist, workers measure and the controller prints."""

    def __init__(self):
        self._cpu: dict[str, float] = {}
        self._wall: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        item.stash[_START] = _processor_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        try:
            return (yield)
        finally:
            # The ticks of a living process may be more than its time, which counts when it has
            # ended.
            spent = max(0.0, _processor_time() - item.stash[_START])
            item.user_properties.append((_KEY, spent))

    def pytest_runtest_logreport(self, report) -> None:
        self._wall[report.nodeid] += report.duration
        if report.when == "teardown":
            self._cpu[report.nodeid] = dict(report.user_properties).get(_KEY, 0.0)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for line in report_of(self._cpu, self._wall):
            terminalreporter.write_line(line)


_START = pytest.StashKey[float]()


def report_of(cpu: dict[str, float], wall: dict[str, float]) -> list[str]:
    """Return the lines of the report: a table of the files and folders, the files above the budget,
    and the slowest tests."""
    groups: dict[str, list[str]] = defaultdict(list)
    for test in cpu:
        file = test.split("::")[0]
        groups[file].append(test)
        groups[os.path.dirname(file) + "/"].append(test)
        groups["all"].append(test)
    rows = [
        (sum(cpu[test] for test in tests), sum(wall[test] for test in tests), len(tests), group)
        for group, tests in groups.items()
    ]
    lines = ["", "processor s    wall s   tests"]
    for is_folder in (True, False):
        chosen = [row for row in rows if row[3].endswith("/") == is_folder or row[3] == "all"]
        chosen = sorted(chosen, reverse=True)[: None if is_folder else _SLOWEST]
        lines += [f"{c:11.1f} {w:9.1f} {n:7}  {group}" for c, w, n, group in chosen]
        lines.append("")
    above = [group for seconds, _, _, group in sorted(rows, reverse=True) if seconds > _BUDGET]
    files = [f"  {group}" for group in above if group != "all" and not group.endswith("/")]
    lines += [f"{len(files)} files above {_BUDGET} processor seconds", *files, ""]
    slowest = sorted(cpu, key=cpu.get, reverse=True)[:_SLOWEST]
    return [*lines, *(f"{cpu[test]:11.1f} {wall[test]:9.1f}          {test}" for test in slowest)]
