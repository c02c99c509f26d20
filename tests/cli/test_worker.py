"""``relax-grad worker`` without a controller: its messages, its JSON and its exit codes."""

from __future__ import annotations

import json
import socket

import pytest

from relax_grad import cli

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def nobody() -> str:
    """Return an address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("RELAX_GRAD_SECRET", SECRET)


def test_no_controller(nobody, capsys):
    arguments = ["worker", "--controller", nobody, "--timeout", "0.1"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("relax-grad worker: ")
    assert cli.main([*arguments, "--json"]) == 1
    out, again = capsys.readouterr()
    report = json.loads(out)
    assert again == err
    assert f"relax-grad worker: {report['error']}\n" == err
    assert (report["controller"], report["code"], report["interrupted"]) == (nobody, 1, False)
    assert report["seconds"] > 0
    assert report["versions"].keys() == {"relax_grad", "apache-tvm", "apache-tvm-ffi"}


def test_interrupt(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("relax_grad.distributed.node.serve", interrupted)
    assert cli.main(["worker", "--controller", "127.0.0.1:9", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["interrupted"], report["error"], report["code"]) == (True, None, 130)


def test_wrong_command_lines(nobody, monkeypatch, capsys, tmp_path):
    for arguments in (["--controller", "nowhere"], [], ["--controller", nobody, "--timeout", "x"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["worker", *arguments])
        assert ended.value.code == 2
    monkeypatch.delenv("RELAX_GRAD_SECRET")
    with pytest.raises(SystemExit) as ended:
        cli.main(["worker", "--controller", nobody])
    assert ended.value.code == 2
    assert "secret" in capsys.readouterr().err
    missing = str(tmp_path / "none")
    assert cli.main(["worker", "--controller", nobody, "--secret-file", missing]) == 1
    assert missing in capsys.readouterr().err
