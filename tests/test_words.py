"""The words of the changelog, the pages and the commits, as far as a program can judge them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_REFERENCE = re.compile(r"\s*\((?:\[[^\]]*\]\([^)]*\)(?:, )?)+\)")


def entries(text: str) -> list[str]:
    """Return the entries of a changelog, each in one line, without the links at their ends."""
    items = re.findall(r"^- (.+(?:\n  .+)*)", text, re.MULTILINE)
    return [_LINK.sub(r"\1", _REFERENCE.sub("", " ".join(item.split()))) for item in items]


def test_the_changelog_is_read_in_minutes():
    assert CHANGELOG.stat().st_size <= 16_000
    lines = entries(CHANGELOG.read_text())
    assert len(lines) > 20
    assert [line for line in lines if len(line.split()) > 20] == []


def test_the_changelog_has_no_timings():
    timing = re.compile(r"\d\s*(?:ms|s|MB|KB|GFLOP/s|x faster)\b|of the time", re.I)
    assert [line for line in entries(CHANGELOG.read_text()) if timing.search(line)] == []


def test_entries_join_lines_and_leave_links_out():
    text = "- One\n  line ([page](docs/a.md)).\n\n- Two [words](b.md) ([c](c.md), [d](d.md)).\n"
    assert entries(text) == ["One line.", "Two words."]


def test_links_of_the_changelog_name_pages_and_sections():
    for page, anchor in re.findall(r"\]\(docs/([\w.]+)(?:#([\w-]+))?\)", CHANGELOG.read_text()):
        titles = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, (page, anchor)
