"""Tables, numbers and bars of the benchmarks' results."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich", reason="the extra 'bench' is missing: no rich")

from _report import UNITS, Result, page, reports, updated, write

ABOUT = {
    "date": "2026-01-02",
    "processor": "some",
    "target": "any",
    "threads": 2,
    "tvm": "0.27.0",
    "torch": "2.13.0",
}


def result(group="memory", name="softmax", ours=(2.0, 1.0, 3.0), torch=(4.0, 4.0, 4.0), **others):
    samples = {"relax_grad": list(ours), "torch": list(torch)}
    samples |= {name: list(values) for name, values in others.items()}
    columns = dict.fromkeys(samples, 0.5)
    return Result(group, name, samples, columns, columns, (3, 2))


def test_ratios_are_medians_of_pairs():
    row = result(jax=(2.0, 2.0, 2.0))
    assert row.median == 0.5
    assert row.least == 0.25
    assert row.ratio("jax") == 1.0
    assert row.ratio("TVM") is None


def test_a_column_of_one_sample_has_the_ratio_of_medians():
    assert result(TVM=(200.0,)).ratio("TVM") == 0.01


def test_tables_of_groups():
    step = result("step", "ResNet", (1.0,), (2.0,))
    step.memory = {"relax_grad": 50_000_000, "torch": 100_000_000}
    means, memory, steps, peaks = reports([result(), step], ["torch", "jax"])
    assert means.rows[0] == ["memory", "1", "0.50", "", "0", "softmax: 0.50"]
    assert memory.rows[0] == ["softmax", "2000.000", "0.25", "0.50", "", "5e-01", "0.5", "3 / 2"]
    assert memory.rows[-1][:4] == ["geometric mean", "", "0.25", "0.50"]
    assert steps.rows[0][0] == "ResNet"
    assert peaks.rows == [["ResNet", "50", "100", "0.50"]]


def test_symbolic_rows_stand_beside_static_ones():
    row = result("symbolic", "symbolic batch: softmax", static=(2.0, 1.0, 3.0))
    table = reports([row], ["torch"])[1]
    assert table.rows[0][0] == "softmax"
    assert table.rows[0][list(table.heads).index("static")] == "1.00"


def test_the_speed_is_that_of_the_least_time():
    row = result("conv", "forward", (2.0, 1.5, 3.0))
    row.flops = 3_000_000_000_000
    assert row.as_row()["gflops"] == 2000
    assert "gflops" not in result().as_row()


def test_results_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is missing: no matplotlib")
    rows = [result("conv", f"{kind} 1x2x3² -> 4, 1x1") for kind in ("forward", "weight gradient")]
    rows += [result(), result("matmul", "NN", (9.0,), (1.0,))]
    write(rows, ["torch"], ABOUT, tmp_path)
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["threads"] == 2
    assert [row["name"] for row in report["rows"]] == [row.name for row in rows]
    assert report["rows"][2]["samples_ms"]["torch"] == [4000.0, 4000.0, 4000.0]
    text = (tmp_path / "results.md").read_text()
    assert "| softmax | 2000.000 | 0.25 | 0.50 | 5e-01 | 0.5 | 3 / 2 |" in text
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "page.json").read_text("utf-8")) == json.loads(page(rows, ABOUT))


def test_the_page_has_the_figures_of_the_rows():
    step = result("step", "ResNet", (1.0,), (2.0,), **{"torch.compile": (4.0,)})
    step.memory = {"relax_grad": 50_000_000, "torch": 100_000_000}
    report = json.loads(page([result("symbolic", "symbolic batch: softmax²"), step], ABOUT))
    assert report["processor"] == "some"
    assert report["units"] == UNITS
    assert report["rows"] == [
        {
            "group": "symbolic",
            "name": "softmax²",
            "ms": 2000.0,
            "least": 0.25,
            "ratios": {"torch": 0.5},
            "error": 0.5,
            "compiling_s": 0.5,
            "kernels": [3, 2],
        },
        {
            "group": "step",
            "name": "ResNet",
            "ms": 1000.0,
            "least": 0.5,
            "ratios": {"torch": 0.5, "torch.compile": 0.25},
            "error": 0.5,
            "compiling_s": 0.5,
            "kernels": [3, 2],
            "memory_mb": {"relax_grad": 50, "torch": 100},
        },
    ]


def test_rows_take_the_place_of_earlier_ones(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is missing: no matplotlib")
    step = result("step", "ResNet", (1.0,), (2.0,))
    step.memory, step.flops = {"relax_grad": 50_000_000, "torch": 100_000_000}, 3_000_000_000
    first = [result(), result(name="renamed"), step]
    write(first, ["torch"], {**ABOUT, "peak": 300}, tmp_path)
    names = [("memory", "softmax"), ("memory", "gelu"), ("step", "ResNet")]
    today = {**ABOUT, "date": "2026-01-05", "peak": 150}
    new = [result(name="gelu"), result(ours=(8.0, 8.0, 8.0))]
    kept, about = updated(new, today, tmp_path / "results.json", names)
    assert about == {**today, "peak": 300}
    assert [(row.group, row.name) for row in kept] == names
    assert [row.median for row in kept] == [2.0, 0.5, 0.5]
    assert [row.date for row in kept] == [None, None, "2026-01-02"]
    assert kept[2].as_row() == {**step.as_row(), "date": "2026-01-02"}

    write(kept, ["torch"], today, tmp_path)
    later = {**ABOUT, "date": "2026-01-09"}
    again, _ = updated([result()], later, tmp_path / "results.json", names)
    assert [row.date for row in again] == [None, "2026-01-05", "2026-01-02"]


@pytest.mark.parametrize(("key", "other"), [("processor", "other"), ("threads", 4), ("tvm", "1")])
def test_rows_of_other_machines_and_versions_stay_apart(tmp_path, key, other):
    pytest.importorskip("matplotlib", reason="the extra 'bench' is missing: no matplotlib")
    write([result()], ["torch"], ABOUT, tmp_path)
    with pytest.raises(SystemExit, match=f"{key} {ABOUT[key]}, .* have {other}: .* --out"):
        updated([result()], {**ABOUT, key: other}, tmp_path / "results.json", [])
