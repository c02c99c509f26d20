"""Kills processes at each system call with which they write a file or a folder, and examines what
is there.

The program loads ``_atomic.py`` alone: a process without TVM is forked hundreds of times in a
second.

    python killed_writers.py FILE CASE FOLDER
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

NAMES = ("library", "manifest", "state")


def is_killed(count: int, function: Callable[[], None]) -> bool:
    """Run a function in a process that ends before its system call of this number; return whether
    it did."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(frame, event, argument):
            nonlocal seen
            if event == "c_call" and getattr(argument, "__module__", "") in ("posix", "fcntl"):
                if seen == count:
                    os._exit(9)
                seen += 1

        try:
            sys.setprofile(watch)
            function()
            sys.setprofile(None)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


class Case:
    """A folder with files of one content, and others beside them."""

    def __init__(self, atomic, folder: Path):
        self.atomic, self.path = atomic, folder / "some" / "model"
        # The order of the calls matters, and not when the disk has them.
        os.fsync = lambda handle: os.fstat(handle)

    def write(self, content: str) -> None:
        with self.atomic.new_folder(self.path, "manifest") as part:
            for name in NAMES:
                part.joinpath(name).write_text(content)

    def contents(self) -> set[str | None]:
        """Return the contents of the files; None is one that is absent."""
        files = [self.path / name for name in NAMES]
        return {file.read_text() if file.exists() else None for file in files}

    def add_others(self) -> None:
        self.path.joinpath("data").write_text("kept")
        self.path.joinpath("more").mkdir()
        self.path.joinpath("more", "data").write_text("kept")
        self.path.joinpath("link").symlink_to("data")

    def check_others(self) -> None:
        assert self.path.joinpath("link").is_symlink()
        for name in ("data", "more/data", "link"):
            assert self.path.joinpath(name).read_text() == "kept"

    def remove_parts(self) -> None:
        for part in self.path.parent.glob(".*.part"):
            shutil.rmtree(part)

    def check_end(self) -> None:
        assert self.contents() == {"new"}
        # The last writer removed what the one before it left.
        assert os.listdir(self.path.parent) == ["model"]

    def new(self) -> None:
        """A new folder is whole or absent."""
        count = 0
        while is_killed(count, lambda: self.write("new")):
            count += 1
            if self.path.exists():
                assert self.contents() == {"new"}
                shutil.rmtree(self.path)
        assert count > 20
        self.check_end()

    def replaced(self) -> None:
        """A folder is the old or the new one."""
        self.write("old")
        self.add_others()
        count, states = 0, []
        while is_killed(count, lambda: self.write("new")):
            count += 1
            states.append(self.contents())
            self.check_others()
            if states[-1] == {"new"}:
                self.write("old")
            self.remove_parts()
        assert all(state in ({"old"}, {"new"}) for state in states)
        assert {"old"} in states
        assert {"new"} in states
        self.check_others()
        self.check_end()

    def without_exchange(self) -> None:
        """A folder of old and new files has no manifest, which readers begin with."""

        def unknown(first, other):
            raise OSError("Function not implemented")

        self.atomic._exchange = unknown
        self.write("old")
        self.add_others()
        count, states = 0, []
        while is_killed(count, lambda: self.write("new")):
            count += 1
            states.append(self.contents())
            self.check_others()
            is_whole = states[-1] in ({"old"}, {"new"})
            assert is_whole or not self.path.joinpath("manifest").exists()
            if states[-1] != {"old"}:
                self.write("old")
            self.remove_parts()
        assert {"old", "new", None} in states
        self.check_others()
        self.check_end()

    def file(self) -> None:
        """A file is the old or the new one."""
        path = self.path.parent
        path.write_text("old")
        count, texts = 0, []
        while is_killed(count, lambda: self.atomic.write_file(path, [b"ne", b"w"])):
            count += 1
            texts.append(path.read_text())
            self.atomic.write_file(path, [b"old"])
            assert os.listdir(path.parent) == [path.name]
        assert set(texts) == {"old", "new"}
        assert path.read_text() == "new"


def main(file: str, name: str, folder: str) -> None:
    spec = importlib.util.spec_from_file_location("_atomic", file)
    atomic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(atomic)
    getattr(Case(atomic, Path(folder)), name)()


if __name__ == "__main__":
    main(*sys.argv[1:])
