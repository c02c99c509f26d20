"""The pages of ``examples/web`` in the built documentation: links to copies, or the way to them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "docs/_ext"
CONFIGURATION = f"""
import sys
sys.path.insert(0, {str(EXTENSIONS)!r})
extensions = ["myst_parser", "web_example"]
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that builds a small documentation, and returns its folder and its text."""
    missing = [name for name in ("sphinx", "myst_parser") if not importlib.util.find_spec(name)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; install with the extra docs")
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text(CONFIGURATION)
    (docs / "index.md").write_text("# First page\n\n```{web-example}\n```\n")

    def run(**variables: str) -> tuple[Path, str]:
        from sphinx.cmd.build import main

        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        target = tmp_path / "html"
        assert main(["-q", "-W", "-b", "html", str(docs), str(target)]) == 0
        page = (target / "index.html").read_text()
        text = re.sub(r"<[^>]+>", "", page.split('role="main"')[-1])
        return target, " ".join(text.split())

    return run


def test_the_pages_come_and_go(build, tmp_path):
    target, text = build()
    assert "`make web`" not in text
    assert "make web builds pages" in text
    assert not (target / "web_example").exists()
    folder = tmp_path / "build/web"
    folder.mkdir(parents=True)
    for name in ("index.html", "classes.html"):
        (folder / name).write_text(f"the page {name}")
    target, text = build()
    assert "Train a network in your browser" in text
    assert "make web" not in text
    for name in ("index.html", "classes.html"):
        assert f'href="web_example/{name}"' in (target / "index.html").read_text()
        assert (target / "web_example" / name).read_text() == f"the page {name}"
    (folder / "classes.html").unlink()
    target, text = build()
    assert "make web builds pages" in text
    assert not (target / "web_example").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is not None, reason="zig of pip is a complete tool chain"
)
def test_the_reason_names_a_missing_tool_chain(build, tmp_path):
    _, text = build(PATH=str(tmp_path))
    assert "because clang is not installed; step.wasm needs clang and wasm-ld" in text
