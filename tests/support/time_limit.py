"""A plugin of pytest that ends a run in time: ``TIME_LIMIT=200`` skips every test that would start
after 200 seconds.

The seconds count from the start of the run, so that the time of collection is among them. The end
of the run lists the files of the skipped tests.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter

import pytest

#: The environment variable with the limit, and that in which the workers of pytest-xdist find the
#: start of the run.
_LIMIT, _START = "TIME_LIMIT", "TIME_LIMIT_START"


def seconds_of(text: str | None) -> float | None:
    """Return the limit in seconds, or None without one."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise pytest.UsageError(f"{_LIMIT} must be a number of seconds, such as 200, not {text!r}")
    return seconds


def pytest_configure(config) -> None:
    limit = seconds_of(os.environ.get(_LIMIT))
    if limit is None:
        return
    if not hasattr(config, "workerinput"):
        os.environ[_START] = repr(time.time())
    config.pluginmanager.register(_Limit(limit, float(os.environ[_START])), "limit-of-time")


class _Limit:
    """The limit of a run. Under pytest-xdist, workers skip and the controller prints."""

    def __init__(self, limit: float, start: float):
        self._end = start + limit
        self._reason = f"not run: the {_LIMIT} of {limit:g} s is over"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._end:
            pytest.skip(self._reason)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        left_out = Counter(
            report.nodeid.split("::")[0]
            for report in terminalreporter.stats.get("skipped", ())
            if isinstance(report.longrepr, tuple) and report.longrepr[2].endswith(self._reason)
        )
        if left_out:
            terminalreporter.section(self._reason)
            for file, tests in left_out.items():
                terminalreporter.write_line(f"{tests:6} of {file}")
