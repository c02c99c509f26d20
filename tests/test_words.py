"""The words of the changelog, the pages and the commits, as far as a program can judge them."""

from __future__ import annotations

import ast
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


#: Phrases of no page, with what to write instead.
PHRASES = {
    r"those of": "repeat the noun, or 'as in'",
    r"that of": "repeat the noun, or the possessive",
    r"that (?:before|after) the": "repeat the noun",
    r"behind": "after, for the order of calls and elements",
    r"in (?:the|their|its) places? of": "instead of",
    r"of (?:its|their|one's) own": "separate, custom, your",
    r"so far": "previously",
    r"of the time before": "a speedup, such as 1.3x faster",
    r"the least times?": "best of n",
    r"resident memory": "RSS",
}

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def phrases_of(page: str) -> list[str]:
    """Return the phrases to replace in the text of a page, with their remedies."""
    page = re.sub(r"```(?!\{).*?```|`[^`]+`", "`code`", page, flags=re.DOTALL)
    text = " ".join(page.split())
    return [
        f"{found[0]!r} in '...{text[max(found.start() - 40, 0) : found.end() + 30]}...': {remedy}"
        for phrase, remedy in PHRASES.items()
        for found in re.finditer(rf"\b{phrase}\b", text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_plain_words(page):
    assert phrases_of(page.read_text()) == []


#: The packages whose public docstrings and errors are checked.
ROOMS = ("autodiff", "backend", "cli", "distributed", "frontend", "legalize", "tir", "training")
MODULES = sorted(path for room in ROOMS for path in (ROOT / "relax_grad" / room).rglob("*.py"))


def texts_of(source: str, is_public: bool = True) -> list[str]:
    """Return the strings of a module that users read: docstrings of public objects, and the strings
    of errors."""
    tree = ast.parse(source)
    texts: list[str] = []
    docstrings: set[int] = set()

    def visit(node: ast.AST, is_public: bool) -> None:
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body:
            first = getattr(body[0], "value", None)
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                docstrings.add(id(first))
                texts.extend([first.value] * is_public)
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None)
            is_hidden = isinstance(node, ast.FunctionDef) or str(name).startswith("_")
            visit(child, is_public and not is_hidden)

    visit(tree, is_public)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.extend([node.value] * (id(node) not in docstrings))
    return texts


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_errors_use_plain_words(room):
    found = {}
    for path in MODULES:
        name = path.relative_to(ROOT / "relax_grad")
        if name.parts[0] == room:
            is_public = not any(re.match("_(?!_init)", part) for part in name.parts)
            texts = texts_of(path.read_text(), is_public)
            found |= {str(name): faults for faults in [phrases_of("\n\n".join(texts))] if faults}
    assert found == {}


def test_docstrings_and_errors_are_found():
    source = """
def shown():
    \"\"\"Return the sizes,
    and those of
    others.\"\"\"
    raise ValueError(f"{name} must be in the " "place of x")
def _hidden():
    \"\"\"Those behind.\"\"\"
"""
    faults = phrases_of("\n\n".join(texts_of(source)))
    assert [fault.partition(" in ")[0] for fault in faults] == ["'those of'", "'in the place of'"]


def test_a_phrase_is_found_across_lines():
    (message,) = phrases_of("The results are those\nof one worker.\n```\nthose of\n```\n")
    assert message.startswith("'those of' in '...The results are those of one worker.")
    assert message.endswith("repeat the noun, or 'as in'")


#: The last commit whose subject was not checked.
_UNCHECKED = "7dab886f8941fa35ad8c1f48f081364bbdc6c868"


def faults_of_subjects(subjects: list[str]) -> list[str]:
    """Return the subjects of commits that are longer than 72 characters, or name no area."""
    return [
        subject
        for subject in subjects
        if len(subject) > 72 or not re.match(r"[\w/.,+ -]+: ", subject)
    ]


def test_subjects_of_commits_fit():
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    command = ["git", "-C", ROOT, "log", "--no-merges", "--format=%s", f"{_UNCHECKED}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True, check=False)
    if log.returncode:
        pytest.skip("the history of the commits is not there")
    assert faults_of_subjects(log.stdout.splitlines()) == [], "write 'area: imperative'"


def test_a_long_subject_is_found():
    subjects = ["docs: add a page", "Add a page", f"docs: {'x' * 70}", "cpu/conv, tests: a"]
    assert faults_of_subjects(subjects) == subjects[1:3]
