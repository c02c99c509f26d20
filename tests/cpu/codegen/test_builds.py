"""The identity of the build of TVM: one for a wheel, and another one after any change of files."""

from __future__ import annotations

import os

import pytest

from relax_grad.cpu.codegen import builds


class Distribution:
    def __init__(self, record):
        self._record = record

    def read_text(self, name):
        return self._record if name == "RECORD" else None


@pytest.fixture
def build(monkeypatch):
    def of(record):
        def distribution(_name):
            if record is None:
                raise builds.metadata.PackageNotFoundError
            return Distribution(record)

        monkeypatch.setattr(builds.metadata, "distribution", distribution)
        return builds.build.__wrapped__()

    return of


LINES = "tvm/__init__.py,sha256=a,1\ntvm/lib/libtvm.so,sha256=b,1\n"


def test_a_wheel_is_known_by_its_digests(build):
    same = LINES + "tvm/__pycache__/__init__.cpython-311.pyc,,\n../../../bin/tvmc,sha256=e,1\n"
    assert build(same) == build(LINES)
    assert build(LINES.replace("=b", "=c")) != build(LINES)


def test_a_build_from_source_is_known_by_its_files(build, monkeypatch):
    monkeypatch.setattr(builds, "stamps", lambda *_: "stamps")
    editable = "__editable__.tvm.pth,sha256=d,1\napache_tvm.dist-info/METADATA,sha256=a,1\n"
    assert [build(None), build(""), build(editable)] == ["stamps"] * 3


def test_stamps_change_with_files(tmp_path):
    file = tmp_path / "below" / "a.py"
    file.parent.mkdir()
    file.write_text("1")
    first = builds.stamps(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert builds.stamps(tmp_path) == first
    file.write_text("12")
    second = builds.stamps(tmp_path)
    os.utime(file, (1, 1))
    assert len({first, second, builds.stamps(tmp_path)}) == 3
