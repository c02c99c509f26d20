"""``relax-grad coverage``: its three output forms and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from processes import without_torch

from relax_grad import cli
from relax_grad.coverage import OperatorCoverage
from relax_grad.registry import Classification, operators


def run(capsys, *argv) -> tuple[int, str]:
    code = cli.main(["coverage", *argv])
    return code, capsys.readouterr().out


def test_text_has_a_line_for_each_operator(capsys):
    code, out = run(capsys)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("relax.")] == operators()
    counts = re.findall(r"(\d+) (?:backward )?operators: .+? 0 unclassified", lines[-1])
    assert len(counts) == 2
    assert sum(map(int, counts)) == len(operators())


@pytest.mark.parametrize("columns", [40, 80, 100, 120, 300])
def test_the_table_fits_the_terminal(capsys, monkeypatch, columns):
    names = ["conv2d", "annotate_sharding", "nn.*pool2d*", "argmax", "cumsum", "call_tir"]
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out = run(capsys, *names)
    assert code == 0
    widest = max(map(len, out.splitlines()))
    assert widest <= min(max(columns, 80), 120)


def test_patterns(capsys):
    code, out = run(capsys, "conv2d", "cumsum", "conv2d", "atan*")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("relax.")]
    assert [line.split()[0] for line in lines] == [
        *("relax.nn.conv2d", "relax.cumsum", "relax.atan", "relax.atan2", "relax.atanh"),
    ]
    assert lines[0].split()[1:4] == ["yes", "data,", "weight;"]
    assert "data; replaces TVM's, which ignores exclusive" in lines[1]
    assert lines[3].split()[1:] == ["yes", "x1,", "x2"]
    assert out.endswith("5 operators: 5 differentiable, 0 non-differentiable, 0 unclassified\n")


def test_the_summary_counts_backward_operators_apart(capsys):
    _, out = run(capsys, "relax.cos", "relax.argmax", "relax.grad.conv2d_backward_weight")
    assert out.endswith(
        "2 operators: 1 differentiable, 1 non-differentiable, 0 unclassified; "
        "1 backward operator: 1 differentiable, 0 non-differentiable, 0 unclassified\n"
    )


def test_the_rules_of_others_are_named(capsys):
    _, out = run(capsys, "relax.cos", "relax.call_tir")
    assert re.search(r"^relax\.cos +yes +x; by TVM$", out, re.M)
    assert re.search(r"^relax\.call_tir +yes +by the pass$", out, re.M)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("conv2", "no operator 'conv2'; did you mean relax.nn.conv2d"),
        ("qqqq", "no operator 'qqqq'; relax-grad coverage lists the operators"),
        ("", "no operator ''; relax-grad coverage lists"),
        ("[", "no operator '['"),
    ],
)
def test_an_unknown_operator(capsys, pattern, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(["coverage", "--json", "conv2d", pattern])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_markdown_is_a_table(capsys):
    code, out = run(capsys, "--markdown")
    assert code == 0
    table = [line for line in out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(operators())
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert any(
        line.startswith("| `relax.nn.conv2d` | yes | relax_grad | data, weight") for line in table
    )


def test_json_can_be_read_by_a_program(capsys):
    code, out = run(capsys, "--json")
    assert code == 0
    assert list(json.loads(out)[0]) == [
        *("operator", "kind", "rule", "arguments", "reason", "refused", "corrects"),
    ]
    items = {item["operator"]: item for item in json.loads(out)}
    assert sorted(items) == operators()
    assert items["relax.nn.nll_loss"]["arguments"] == ["predictions", "weights"]
    assert items["relax.argmax"]["kind"] == "non-differentiable"
    assert "integers" in items["relax.argmax"]["reason"]
    assert items["relax.unique"]["refused"]


def test_an_unclassified_operator_is_shown_and_changes_the_exit_code(capsys, monkeypatch):
    unknown = OperatorCoverage(Classification("relax.brand_new", "unclassified"), ())
    monkeypatch.setattr("relax_grad.coverage.coverage", lambda: [unknown])
    code, out = run(capsys)
    assert code == 1
    assert "relax.brand_new  unclassified" in out
    assert "1 operator: 0 differentiable, 0 non-differentiable, 1 unclassified" in out


def test_the_forms_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["coverage", "--json", "--markdown"])
    assert exit_info.value.code == 2


def test_a_reader_that_stops_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "relax_grad", "coverage"],
        env=without_torch(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    _, errors = process.communicate()
    assert re.fullmatch(r"\d+ messages? of TVM not shown; --verbose shows them\n", errors)
