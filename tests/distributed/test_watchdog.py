"""The pipes of commands, whose readers may be stopped."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from relax_grad.distributed._watchdog import PART, Watchdog, enlarge, parts, without_room


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, SimpleNamespace(commands=writer)
    os.close(reader)
    os.close(writer)


def test_parts_of_a_text():
    for size in (0, 1, PART, PART + 1, 3 * PART):
        text = "".join(map(str, range(size)))[:size]
        assert "".join(parts(text)) == text
        assert [len(part) <= PART for part in parts(text)] == [True] * max(1, -(-size // PART))


def test_a_pipe_that_nobody_reads_has_no_room(pipe):
    reader, channel = pipe
    enlarge(channel.commands)
    assert without_room({1: channel}, 0.0) is None
    sent = 0
    while without_room({1: channel}, 0.0) is None:
        sent += os.write(channel.commands, b"x" * 2 * PART)
    assert sent > 2**13
    start = time.monotonic()
    assert without_room({1: channel}, 0.1) == 1
    assert time.monotonic() - start < 2
    threading.Timer(0.1, os.read, (reader, sent)).start()
    assert without_room({1: channel}, 10.0) is None
    null = os.open(os.devnull, os.O_WRONLY)
    assert without_room({1: SimpleNamespace(commands=null)}, 0.0) is None
    os.close(null)


class Owner:
    """The owner of a watchdog, to which it tells the workers that are late."""

    def __init__(self):
        self.late = []

    def notice(self, rank):
        self.late.append(rank)


def test_a_worker_that_takes_no_command_is_late(pipe):
    reader, channel = pipe
    owner = Owner()
    watchdog = Watchdog({}, 10.0, owner.notice)
    channels = {3: channel}
    assert [watchdog.look(channels, now) for now in (0.0, 50.0)] == [None, None]
    os.write(channel.commands, b"xx")
    assert [watchdog.look(channels, now) for now in (60.0, 69.0)] == [None, None]
    os.read(reader, 1)  # it takes them slowly
    assert [watchdog.look(channels, now) for now in (70.5, 80.0)] == [None, None]
    assert watchdog.look(channels, 81.0) == 3
    watchdog.end, watchdog.timeout = 90.0, 100.0  # a call that waits for its result
    assert [watchdog.look(channels, now) for now in (89.0, 91.0, 92.0)] == [None, 3, None]
    watchdog.close()


def test_the_thread_tells_once_and_ends(pipe):
    _, channel = pipe
    os.write(channel.commands, b"x")
    owner, before = Owner(), threading.active_count()
    watchdog = Watchdog({1: channel}, 0.01, owner.notice)
    end = time.monotonic() + 10
    while not owner.late and time.monotonic() < end:
        time.sleep(0.01)
    assert owner.late == [1]
    del watchdog
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert owner.late == [1]
