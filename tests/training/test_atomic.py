"""Files and folders appear whole or not at all, whichever system call the process is killed at."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from relax_grad.training import _atomic

NAMES = ("library", "manifest", "state")


def write_folder(path: Path, content: str) -> None:
    with _atomic.new_folder(path, "manifest") as part:
        for name in NAMES:
            part.joinpath(name).write_text(content)


def contents(folder: Path) -> set[str | None]:
    """Return the contents of the files; None is one that is absent."""
    files = [folder / name for name in NAMES]
    return {file.read_text() if file.exists() else None for file in files}


def prepare(folder: Path) -> None:
    """Make a folder with older files, and with others."""
    write_folder(folder, "old")
    folder.joinpath("data").write_text("kept")
    folder.joinpath("more").mkdir()
    folder.joinpath("more", "data").write_text("kept")
    folder.joinpath("link").symlink_to("data")


@pytest.mark.parametrize("case", ["new", "replaced", "without_exchange", "file"])
def test_killed_writers(case, tmp_path):
    """The program kills a writer at each of its system calls."""
    if case == "replaced" and sys.platform != "linux":
        pytest.skip("other systems cannot exchange folders")
    program = Path(__file__).with_name("killed_writers.py")
    command = [sys.executable, program, _atomic.__file__, case, tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_working_folder_stays(tmp_path, monkeypatch):
    path = tmp_path / "model"
    prepare(path)
    monkeypatch.chdir(path / "more")
    number = path.stat().st_ino
    write_folder(Path(".."), "new")
    assert path.stat().st_ino == number
    assert contents(path) == {"new"}
    assert sorted(os.listdir(path)) == ["data", "library", "link", "manifest", "more", "state"]
    assert os.listdir(".") == ["data"]


def test_an_error_leaves_the_old_folder(tmp_path):
    path = tmp_path / "model"
    prepare(path)

    def fail():
        with _atomic.new_folder(path, "manifest") as part:
            part.joinpath("library").write_text("new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert contents(path) == {"old"}
    assert os.listdir(tmp_path) == ["model"]
    with pytest.raises(FileExistsError), _atomic.new_folder(path / "data", "manifest"):
        pass


def test_files_of_others_stay(tmp_path):
    """A file that another process is writing has a lock. Other names are no temporary files."""
    path = tmp_path / "state"
    names = {".state.part", ".state.abc.part", ".state.more.abcdefgh.part", ".state.abcdefgh"}
    for name in names:
        tmp_path.joinpath(name).write_text("kept")
    for name in (".state.abcdefgh.part", ".state.0123abcd.part"):
        tmp_path.joinpath(name).write_text("left over")
    with tmp_path.joinpath(".state.0123abcd.part").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _atomic.write_file(path, [b"new"])
        assert set(os.listdir(tmp_path)) == {"state", ".state.0123abcd.part", *names}
    _atomic.write_file(path, [b"new"])
    assert set(os.listdir(tmp_path)) == {"state", *names}


@pytest.mark.parametrize(
    ("mask", "of_file", "of_folder"), [(0o027, 0o640, 0o750), (0, 0o666, 0o777)]
)
def test_permissions_are_those_of_the_umask(tmp_path, mask, of_file, of_folder):
    before = os.umask(mask)
    try:
        _atomic.write_file(tmp_path / "state", [b""])
        write_folder(tmp_path / "model", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == of_file
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == of_folder
    # A folder that is replaced has the permissions of the old one.
    (tmp_path / "model").chmod(0o700)
    write_folder(tmp_path / "model", "newer")
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o700


def test_symbolic_links_stay(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for name in ("state", "model"):
        (tmp_path / name).symlink_to(Path("store") / name)
    for content in ("old", "new"):  # the first writer finds links to nothing
        _atomic.write_file(tmp_path / "state", [content.encode()])
        write_folder(tmp_path / "model", content)
        assert (store / "state").read_text() == content
        assert contents(store / "model") == {content}
        assert all((tmp_path / name).is_symlink() for name in ("state", "model"))
        assert sorted(os.listdir(store)) == ["model", "state"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        _atomic.write_file(tmp_path / "loop" / "state", [b""])


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "é" * 120 + "x" * 9, "x" * 241])
def test_names_that_are_as_long_as_names_can_be(tmp_path, name):
    """Temporary names are shorter, and the next writer finds what a killed one left."""
    for _ in range(2):
        _atomic.write_file(tmp_path / name, [b"new"])
        write_folder(tmp_path / f"{name[:-1]}y", "new")
    assert set(os.listdir(tmp_path)) == {name, f"{name[:-1]}y"}
    left_over = tmp_path / f".{_atomic._stem(tmp_path, name)}.0123abcd.part"
    assert len(os.fsencode(left_over.name)) <= 255
    left_over.write_text("left over")
    _atomic.write_file(tmp_path / name, [b"new"])
    assert not left_over.exists()


def test_pipes_devices_and_folders_stay(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    for path, error in (
        (pipe, FileExistsError),
        (link, FileExistsError),
        (Path("/dev/null"), OSError),
    ):
        with pytest.raises(error, match="it is no regular file"):
            _atomic.write_file(path, [b"new"])
    with pytest.raises(IsADirectoryError, match="is a folder; give a file"):
        _atomic.write_file(tmp_path, [b"new"])
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert Path("/dev/null").is_char_device()
    assert set(os.listdir(tmp_path)) == {"pipe", "link"}


def test_the_disk_has_a_file_before_its_name(tmp_path, monkeypatch):
    calls = []

    def noted(name, function):
        def call(*arguments):
            kind = ""
            if name == "fsync":
                kind = " folder" if stat.S_ISDIR(os.fstat(*arguments).st_mode) else " file"
            calls.append(name + kind)
            return function(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "rename"):
        noted(name, getattr(os, name))
    _atomic.write_file(tmp_path / "state", [b"new"])
    assert calls == ["fsync file", "replace", "fsync folder"]
    calls.clear()
    write_folder(tmp_path / "model", "new")
    assert calls[:4] == ["fsync file"] * 3 + ["rename"]
    assert calls[4:] == ["fsync folder"] * 2
