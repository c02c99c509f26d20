"""``relax-grad cache``: the size, the entries, and the deletion of the directory."""

from __future__ import annotations

import json
import os

import pytest

from relax_grad import cli
from relax_grad.cpu.codegen.directory import PROGRAM, Directory


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_GRAD_CACHE", str(tmp_path / "kept"))
    made = Directory(tmp_path / "kept")
    made.store("ab" * 32, b"x" * 2000, description="matmul_kernel")
    made.store("cd" * 32, b"x" * 3 * 2**20, PROGRAM, "step for llvm")
    for i, entry in enumerate(sorted(made.entries(), key=lambda entry: entry.is_program)):
        os.utime(entry.path, (i, i))
    return made


def run(capsys, *argv) -> tuple[int, str]:
    code = cli.main(["cache", *argv])
    return code, capsys.readouterr().out


def test_size(directory, capsys):
    wanted = f"{directory.path}: 3.0 MiB of at most 1.0 GiB, 1 program and 1 object file\n"
    assert run(capsys) == (0, wanted)


def test_list(directory, capsys):
    code, out = run(capsys, "list")
    first, second, _total = out.splitlines()
    assert code == 0
    assert first.endswith("3.0 MiB  program      step for llvm")
    assert second.endswith("2.0 KiB  object file  matmul_kernel")


def test_many_functions_fit_a_line(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    directory.store("ef" * 32, b"", description=", ".join(["multiply_add"] * 16))
    assert max(map(len, run(capsys, "list")[1].splitlines()[:-1])) <= 80


def test_json(directory, capsys):
    code, out = run(capsys, "list", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["programs"], report["objects"], report["limit"]) == (1, 1, 2**30)
    assert [entry["kind"] for entry in report["entries"]] == ["program", "object file"]


def test_clear(directory, capsys):
    assert run(capsys, "clear") == (0, f"deleted 3.0 MiB from {directory.path}\n")
    assert run(capsys)[1].startswith(f"{directory.path}: 0 B of")


@pytest.mark.parametrize("action", ["size", "list", "clear"])
def test_off(capsys, action):
    code, out = run(capsys, action)  # the tests run without a cache
    assert code == 0
    assert out.startswith("the cache is off")


def test_a_directory_of_others(directory, capsys):
    directory.path.chmod(0o707)
    code, out = run(capsys)
    assert code == 1
    assert out.startswith(f"not used: {directory.path} may be written to by every user\n")
    code, out = run(capsys, "clear")
    assert code == 1
    assert out.splitlines()[1].startswith("not cleared: ")
    assert len(list(directory.entries())) == 2


def test_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("RELAX_GRAD_CACHE", str(file))
    code, out = run(capsys, "clear")
    assert code == 1
    assert f"{file} is a file" in out
