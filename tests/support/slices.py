"""A plugin of pytest that runs a part of every long sweep: ``SLICE=2/4`` is the second of four.

Each long test is in one of the parts, so that all parts together are the whole. The parts take the
cases of a test in turn, and tests of one case in turn within their file. A test that draws its
cases takes its part of them itself (:func:`sweep.at_length`).

``CASES=1/3`` runs every third case of each test, from the first, so that no test is left out: for
lanes of versions, whose faults are seldom of one case.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict

import pytest
from hypothesis import settings


def slice_of(text: str | None, name: str = "SLICE") -> tuple[int, int]:
    """Return the number of a part, from 0 on, and the number of parts, of a text such as
    ``"2/4"``, the value of an environment variable."""
    if not text:
        return 0, 1
    part, of, parts = text.partition("/")
    if not (of and part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"{name} must be PART/PARTS, such as 2/4, but it is {text!r}")
    return int(part) - 1, int(parts)


PART, PARTS = slice_of(os.environ.get("SLICE"))

_CASES = slice_of(os.environ.get("CASES"), "CASES")


def is_in_part(items: list, part: int, parts: int) -> list[bool]:
    """Tell of each test whether it is in a part of the sweeps; those that are no sweeps are."""
    numbers: dict = defaultdict(int)
    chosen = []
    for item in items:
        divides_itself = getattr(getattr(item, "obj", None), "divides_itself", False)
        if divides_itself or item.get_closest_marker("slow") is None:
            chosen.append(True)
            continue
        chosen.append(numbers[item.path] % parts == part)
        numbers[item.path] += 1
    return chosen


def is_in_cases(items: list, part: int, parts: int) -> list[bool]:
    """Tell of each test whether it is in a part of the cases of its function, which are taken in
    turn. A function with fewer cases than parts is in each part by its first case."""
    functions = [item.nodeid.partition("[")[0] for item in items]
    counts, numbers = Counter(functions), Counter[str]()
    chosen = []
    for function in functions:
        first = part if part < counts[function] else 0
        chosen.append(numbers[function] % parts == first)
        numbers[function] += 1
    return chosen


def check_lengths(items: list) -> None:
    """Refuse long tests that draw Hypothesis's default number of cases, whatever the share of the
    sweeps (:data:`sweep.SHARE`)."""
    for item in items:
        test = getattr(item, "obj", None)
        drawn = getattr(test, "_hypothesis_internal_use_settings", None)
        if drawn == settings.default and item.get_closest_marker("slow"):
            raise pytest.UsageError(
                f"{item.nodeid} is slow and has no number of cases: use sweep.at_length"
            )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items: list) -> None:
    check_lengths(items)
    if PARTS == 1 and _CASES[1] == 1:
        return
    chosen = [
        ok and is_case
        for ok, is_case in zip(
            is_in_part(items, PART, PARTS), is_in_cases(items, *_CASES), strict=True
        )
    ]
    config.hook.pytest_deselected(
        items=[item for item, ok in zip(items, chosen, strict=True) if not ok]
    )
    items[:] = [item for item, ok in zip(items, chosen, strict=True) if ok]
