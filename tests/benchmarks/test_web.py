"""The pages on the speed of web pages and on sizes without a runtime, and what measures them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import _browser
import pytest
from static_trainer import COMPILER

torch = pytest.importorskip("torch")

import static_sizes  # noqa: E402
import web  # noqa: E402
from _small_models import PAGES, cross_entropy  # noqa: E402

ROOT = Path(__file__).parents[2]
MEASURED = json.loads((ROOT / "docs/_measured/web.json").read_text())
SIZES = json.loads((ROOT / "docs/_measured/static_sizes.json").read_text())


def test_all_networks_are_measured_and_trained():
    assert [row["title"] for row in MEASURED["rows"]] == [network.title for network in PAGES]
    for row in MEASURED["rows"]:
        ours = [row["ms"][name] for name in ("relax_grad, Node", *web.NATIVE)]
        assert all(ms > 0 for ms in ours)
        assert row["wasm"]["bytes"] < 300_000


@pytest.mark.parametrize("network", PAGES, ids=lambda network: network.name)
def test_networks_have_a_loss_of_their_classes(network):
    inputs, targets = network.batch()
    with torch.no_grad():
        loss = cross_entropy(network.made()(inputs), targets).item()
    assert 0.5 < loss < 6
    assert inputs.shape == network.shape


def test_tables_have_a_cell_in_each_column():
    pytest.importorskip("sphinx", reason="builds the documentation: extra docs")
    sys.path.append(str(ROOT / "docs/_ext"))
    import measured_web as pages

    for directive, measured in (
        *((kind, MEASURED) for kind in (pages.Steps, pages.Peers, pages.Sizes)),
        (pages.StaticSizes, SIZES),
    ):
        lines = [line for line in directive.lines(None, measured) if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1, lines


def test_networks_of_tensorflow_have_the_names():
    text = (ROOT / "benchmarks/web/tensorflow.mjs").read_text()
    assert [n.name for n in PAGES if f"\n    {n.name}" not in text] == []


def test_the_least_time_of_several_rounds_counts():
    row = {"name": "mlp", "ms": {}}
    for found in ({"error": "slow"}, {"least": 2.0}, {"least": 3.0}, {"least": 1.5}):
        web._note(row, "a", found)
    web._note(row, "b", {"error": "no kernel"})
    web._note(row, "c", {"missing": "--peers"})
    assert row["ms"] == {"a": 1.5, "b": None}
    assert row["reasons"] == {"b": "no kernel"}


@pytest.mark.skipif(_browser.CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_page_posts_rows_until_it_is_done(tmp_path):
    post = "await fetch('/result', {method: 'POST', body: JSON.stringify(%s)});"
    script = post % "{name: location.search}" + post % "{done: 1}" + post % "{late: 1}"
    (tmp_path / "page.html").write_text(f"<script type=module>{script}</script>")
    rows = _browser.rows_of("page.html", {"a": "1 2"}, {"": tmp_path}, 60)
    assert rows == [{"name": "?a=1%202"}, {"done": 1}]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, cc or gcc")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")
def test_code_is_what_a_program_loads(tmp_path):
    source = "static const int a[100] = {1}; int b[1000]; int f(int i) { return a[i] + b[i]; }"
    (tmp_path / "a.c").write_text(source)
    subprocess.run(["cc", "-c", "a.c", "-g"], cwd=tmp_path, check=True)
    assert 400 < static_sizes.loaded_bytes(tmp_path / "a.o") < 800


def test_sizes_are_complete():
    assert list(SIZES["steps"]) == list(static_sizes.NETWORKS)
    for sizes in SIZES["steps"].values():
        assert list(sizes) == list(static_sizes.TARGETS)
        for found in sizes.values():
            assert 10_000 < found["code"] < 200_000
