"""The words of the changelog, the pages and the commits, as far as a program can judge them."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import tokenize
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
    r"(?:goes?|going) on with": "continue with",
    r"happens whole or not at all": "is atomic",
    r"stands beside": "see also",
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


PACKAGE = ROOT / "relax_grad"

#: The parts of the package, in which all docstrings, comments and strings are checked. Strings of
#: the samples and the fuzzer are names, not sentences.
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})

#: Headers that users read, and the examples in C, C++, Go, Java and JavaScript.
SOURCES = [
    *(PACKAGE / "runtime" / name for name in ("trainer.h", "relax_grad_trainer.h")),
    PACKAGE / "static/c/relax_grad_static.h",
    *sorted(
        path
        for path in (ROOT / "examples").rglob("*.*")
        if path.suffix in (".c", ".cc", ".go", ".java", ".py")
    ),
]
_ONLY_NAMES = ("testing/samples", "testing/fuzz")

#: Strings that are no text: "behind" is a side of a padding.
_NO_TEXTS = {"behind"}


def texts_of(source: str, has_strings: bool = True) -> list[str]:
    """Return the texts of a module: docstrings, blocks of comments, and other strings."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body:
            first = getattr(body[0], "value", None)
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                docstrings.add(first.value)
    texts = [re.sub(r"^ *\w+ : .*$", "", text, flags=re.M) for text in sorted(docstrings)]
    for node in ast.walk(ast.parse(source)) if has_strings else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.extend([node.value] * (node.value not in docstrings | _NO_TEXTS))
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#:")
            if token.start[0] == last + 1:
                texts[-1] += text
            else:
                texts.append(text)
            last = token.start[0]
    return texts


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_comments_and_errors_use_plain_words(room):
    found: dict[str, list[str]] = {}
    start = PACKAGE / room
    for path in sorted(start.rglob("*.py")) if start.is_dir() else [start]:
        name = path.relative_to(PACKAGE).as_posix()
        texts = texts_of(path.read_text(), not name.startswith(_ONLY_NAMES))
        found[name] = phrases_of("\n\n".join(texts))
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_docstrings_comments_and_errors_are_found():
    source = """
def shown():
    \"\"\"Return the sizes,
    and those of
    others.

    behind : int
    \"\"\"
    raise ValueError(f"{name} must be in the " "place of x")
    # One that
    # of the sums.
"""
    faults = phrases_of("\n\n".join(texts_of(source)))
    kinds = [fault.partition(" in ")[0] for fault in faults]
    assert kinds == ["'those of'", "'that of'", "'in the place of'"]
    faults = phrases_of("\n\n".join(texts_of(source, has_strings=False)))
    assert len(faults) == 2


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_headers_and_examples_use_plain_words(path):
    if path.suffix == ".py":
        text = "\n\n".join(texts_of(path.read_text()))
    else:
        comments = re.findall(r"/\*.*?\*/|//[^\n]*", path.read_text(), re.DOTALL)
        text = "\n\n".join(re.sub(r"\n *(?:\*|///?)", " ", comment) for comment in comments)
    assert phrases_of(text) == []


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
