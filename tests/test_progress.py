"""The line that shows what takes seconds."""

from __future__ import annotations

import io
import sys

import pytest

from relax_grad import _progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def with_terminal(monkeypatch) -> Terminal:
    """Make standard error a terminal. Not a fixture: pytest replaces the stream before the test."""
    pytest.importorskip("rich", reason="rich draws the line")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def test_texts_and_counts(monkeypatch):
    terminal = with_terminal(monkeypatch)
    with _progress.shown("differentiating the loss"):
        with _progress.shown("within"):
            pass
        _progress.describe("compiling 3 functions", 3)
        _progress.advance()
        _progress._lines[0]._bar.refresh()
    written = terminal.getvalue()
    assert "compiling 3 functions" in written
    assert "1/3" in written
    assert "within" not in written
    assert _progress._lines == [None]


def test_an_error_ends_the_line(monkeypatch):
    terminal = with_terminal(monkeypatch)
    with pytest.raises(ValueError, match="inside"), _progress.shown("compiling"):
        raise ValueError("inside")
    assert "compiling" in terminal.getvalue()
    assert _progress._lines == [None]


def test_the_bar_of_a_loop_has_the_line(monkeypatch):
    terminal = with_terminal(monkeypatch)
    from relax_grad.training._progress import Bar

    monkeypatch.setattr(sys, "stdout", terminal)
    with Bar(True) as bar:
        bar.begin("epoch 1/1", 2, 0)
        with _progress.shown("compiling the step for other numbers of rows"):
            _progress.describe("compiling 3 functions", 3)
            bar._bar.refresh()
        assert len(bar._bar.tasks) == 1
        bar.advance(0.5)
    assert "compiling 3 functions" in terminal.getvalue()
    assert _progress._hosts == [None]


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_without_a_terminal_nothing_is_written(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with _progress.shown("compiling"):
        _progress.describe("compiling 3 functions", 3)
        _progress.advance()
    assert stream is None or stream.getvalue() == ""


def test_without_rich_nothing_is_written(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(_progress.importlib.util, "find_spec", lambda _: None)
    with _progress.shown("compiling"):
        _progress.advance()
    assert stream.getvalue() == ""
