"""Runs that end in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from time_limit import seconds_of

#: The first test takes the time of the run.
TESTS = """
import os
import time
from pathlib import Path

def test_first():
    Path(__file__).with_suffix(".start").write_text(os.environ["TIME_LIMIT_START"])
    later = time.time() + 1e6
    time.time = lambda: later

def test_second():
    raise AssertionError

def test_third():
    raise AssertionError
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_tests_after_the_limit_are_left_out(workers, tmp_path):
    files = (
        [tmp_path / "test_a.py"]
        if workers == 0
        else [tmp_path / "test_a.py", tmp_path / "test_b.py"]
    )
    for file in files:
        file.write_text(TESTS)
    command = ["-p", "time_limit", "-n", str(workers), "--dist", "loadfile", "-rs", "-q"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *command, "--rootdir", tmp_path, *files],
        env={
            **os.environ,
            "TIME_LIMIT": "900",
            "PYTHONPATH": str(Path(__file__).with_name("support")),
            "PYTEST_ADDOPTS": "",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{len(files)} passed, {2 * len(files)} skipped" in process.stdout
    reason = "not run: the TIME_LIMIT of 900 s is over"
    assert f"= {reason} =" in process.stdout
    assert sum(reason in line for line in process.stdout.splitlines() if "SKIPPED" in line) == 1
    for file in files:
        assert f"2 of {file.name}" in process.stdout
    # Every worker counts from the start of the run.
    assert len({file.with_suffix(".start").read_text() for file in files}) == 1


def test_seconds():
    assert seconds_of(None) is None
    assert seconds_of("") is None
    assert seconds_of("0.5") == 0.5
    for text in ("soon", "-1", "0", "nan", "inf"):
        with pytest.raises(pytest.UsageError, match="TIME_LIMIT must be a number of seconds"):
            seconds_of(text)
