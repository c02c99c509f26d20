"""The directory of machine code: damage, other users, full disks, killed writers."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import tempfile
import time

import pytest

from relax_grad.cpu.codegen import directory as module
from relax_grad.cpu.codegen.directory import OBJECT, PROGRAM, Directory

needs_users = pytest.mark.skipif(
    not hasattr(os, "geteuid"), reason="this system has no owners of files"
)

KEY = "ab" + "0" * 62


def key(i: int) -> str:
    return f"{i:02x}" + "0" * 62


DATA = bytes(range(256)) * 3


@pytest.fixture
def folder(tmp_path):
    return Directory(tmp_path / "kept")


def path_of(folder, name=KEY, suffix=OBJECT):
    return folder.path / name[:2] / f"{name[2:]}{suffix}"


def test_entries_of_two_kinds(folder):
    folder.store(KEY, DATA, description="a, b")
    folder.store(KEY, b"", PROGRAM, "step\nfor llvm")
    assert folder.load(KEY) == DATA
    assert folder.load(KEY, PROGRAM) == b""
    assert folder.load(key(205)) is None
    shown = {(entry.is_program, entry.description) for entry in folder.entries()}
    assert shown == {(False, "a, b"), (True, "step for llvm")}
    assert sum(entry.size for entry in folder.entries()) == folder.clear()
    assert not list(folder.path.iterdir())


def test_no_one_else_can_read_or_write(folder):
    old = os.umask(0)
    try:
        folder.store(KEY, DATA)
    finally:
        os.umask(old)
    for path in (folder.path, path_of(folder).parent, path_of(folder)):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_damage_is_noticed(folder):
    """A flipped bit anywhere, a lost end, or another file: the entry is not found."""
    folder.store(KEY, DATA, description="f")
    path = path_of(folder)
    whole = path.read_bytes()
    draw = random.Random(0)
    damaged = [whole[: draw.randrange(len(whole))] for _ in range(50)]
    for _ in range(200):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(changed))
    damaged += [whole + b"\0", b"", whole.replace(b"entry 2", b"entry 1")]
    for content in damaged:
        path.write_bytes(content)
        assert folder.load(KEY) is None
    list(folder.entries())  # does not raise
    folder.store(KEY, DATA)
    assert folder.load(KEY) == DATA


@pytest.mark.parametrize("failing", ["write", "replace", "interrupt"])
def test_writers_that_fail_leave_nothing(folder, monkeypatch, failing):
    """A full disk is no error; Ctrl-C is passed on."""
    folder.store(key(205), DATA)

    def full(*_, **__):
        raise KeyboardInterrupt if failing == "interrupt" else OSError(errno.ENOSPC, "disk full")

    if failing == "write":
        monkeypatch.setattr(module.os, "fdopen", full)
    else:
        monkeypatch.setattr(module.os, "replace", full)
    if failing == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            folder.store(KEY, DATA)
    else:
        folder.store(KEY, DATA)
    monkeypatch.undo()
    assert folder.load(KEY) is None
    assert folder.load(key(205)) == DATA
    assert [path.name for path in folder.path.glob("*/.*")] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_killed_writers(folder):
    """Every entry that is found is whole, whenever a writer is killed. Two write the same ones."""
    draw = random.Random(1)
    large = DATA * 1000
    for _ in range(12):
        writers = []
        for _ in range(2):
            process = os.fork()
            if process == 0:
                while True:
                    for i in range(10):
                        folder.store(key(i), large + bytes([i]))
            writers.append(process)
        time.sleep(draw.uniform(0.002, 0.03))
        for process in writers:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    found = [folder.load(key(i)) for i in range(10)]
    assert any(found)
    assert all(data is None or data == large + bytes([i]) for i, data in enumerate(found))


def test_what_killed_writers_leave_is_deleted(folder):
    folder.store(KEY, DATA)
    handle, name = tempfile.mkstemp(prefix=".new-", dir=path_of(folder).parent)
    os.close(handle)
    folder.trim()
    assert os.path.exists(name)  # its writer may live
    os.utime(name, (time.time() - 4000,) * 2)
    folder.store(key(205), DATA)
    folder.trim()
    assert not os.path.exists(name)
    assert [entry.is_program for entry in folder.entries()] == [False, False]


def test_the_limit_counts_all_kinds(tmp_path):
    folder = Directory(tmp_path, max_bytes=2500)
    for i, suffix in enumerate((OBJECT, PROGRAM, OBJECT)):
        folder.store(key(i), b"x" * 1000, suffix)
        os.utime(path_of(folder, key(i), suffix), (i, i))
    folder.trim()
    assert folder.load(key(0)) is None
    assert folder.load(key(1), PROGRAM) is not None
    os.utime(path_of(folder, key(1), PROGRAM), (0, 0))
    Directory(tmp_path, max_bytes=1).trim()  # it has added nothing
    assert len(list(folder.entries())) == 2


def test_files_of_the_user_stay(tmp_path):
    """Somebody may name a directory with files of their own."""
    kept = [tmp_path / "notes.o", tmp_path / "ab" / "mine.o", tmp_path / "zz" / f"{'0' * 62}.o"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(DATA)
    folder = Directory(tmp_path, max_bytes=1)
    folder.store(KEY, DATA)
    assert [entry.path for entry in folder.entries()] == [path_of(folder)]
    folder.trim()
    assert folder.load(KEY) is None
    folder.store(KEY, DATA)
    assert folder.clear() > len(DATA)
    assert all(path.read_bytes() == DATA for path in kept)


def test_missing_and_foreign_directories_are_no_errors(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (Directory(tmp_path / "none"), Directory(file / "below")):
        assert folder.load(KEY) is None
        assert list(folder.entries()) == []
        assert folder.clear() == 0
        folder.trim()
    Directory(file / "below").store(KEY, DATA)
    assert file.read_text() == ""


@needs_users
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_directories_that_others_may_write_to_are_refused(folder, monkeypatch, mode):
    monkeypatch.setattr(module, "_is_of_one_user", lambda _: False)
    folder.store(KEY, DATA)
    assert folder.refusal() is None
    folder.path.chmod(mode)
    assert str(folder.path) in folder.refusal()
    below = Directory(folder.path / "below" / "more")  # it does not exist
    # Nobody can replace a directory in a sticky one.
    assert (below.refusal() is None) == (mode == 0o1777)


@needs_users
def test_links_lead_to_the_real_directory(folder, tmp_path, monkeypatch):
    folder.store(KEY, DATA)
    folder.path.chmod(0o707)
    link = tmp_path / "link"
    link.symlink_to(folder.path)
    assert str(folder.path) in Directory(link).refusal()


@needs_users
def test_files_that_others_may_write_to_are_not_loaded(folder, tmp_path):
    folder.store(KEY, DATA)
    path = path_of(folder)
    path.chmod(0o602)
    assert folder.load(KEY) is None
    path.chmod(0o600)
    assert folder.load(KEY) == DATA
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert folder.load(KEY) is None


@needs_users
def test_files_of_others():
    def status(user, group, mode):
        return os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))

    me, own = os.geteuid(), stat.S_IFREG | 0o600
    assert module._distrusted(status(me, 0, own)) is None
    assert module._distrusted(status(0, 0, own)) is None
    assert "belongs to the user" in module._distrusted(status(me + 4321, 0, own))
    assert "belongs to the user" in module._distrusted(status(me + 4321, 0, own), is_sticky=True)
    assert "every user" in module._distrusted(status(me, 0, own | 0o002))
    assert "the group" in module._distrusted(status(me, 4321, own | 0o020))


@needs_users
def test_a_private_group_is_the_user(monkeypatch):
    import grp
    import pwd

    user = pwd.struct_passwd(("me", "", os.geteuid(), 50, "", "", ""))
    groups = {
        50: grp.struct_group(("me", "", 50, [])),
        51: grp.struct_group(("staff", "", 51, ["me"])),
        52: grp.struct_group(("me", "", 50, ["me", "you"])),
    }
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
    assert [module._is_of_one_user(number) for number in (50, 51, 52, 53)] == [
        True,
        False,
        False,
        False,
    ]
