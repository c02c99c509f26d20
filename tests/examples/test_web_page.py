"""The pages that learn digits and the visitor's classes, in headless Chromium: a visitor draws,
teaches, trains, downloads and uploads, by mouse and by keyboard."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import relax_grad
from relax_grad.static import webassembly

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
SECONDS = 180


@pytest.fixture(scope="module")
def web_page():
    """Return the module of the example; skip the tests if something is not installed."""
    for package in ("torch", "sklearn", "safetensors"):
        pytest.importorskip(package, reason=f"a package of the example is not installed: {package}")
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    try:
        webassembly.tools()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return __import__("web_page")


@pytest.fixture(scope="module")
def folder(web_page, tmp_path_factory):
    """Return a folder with the page, the exported model, and the pages of the tests."""
    made = tmp_path_factory.mktemp("page")
    web_page.main([str(made)])
    web_page.trainer_of().export(made / "model", target=relax_grad.target.wasm())
    for name in ("web_visitor.html", "web_classes.html", "web_worker.html", "web_frame.mjs"):
        shutil.copyfile(HERE / name, made / name)
    page = (ROOT / "docs/web.md").read_text()
    (worker,) = re.findall(r"^```js\n([^`]*postMessage[^`]*)^```$", page, re.M | re.S)
    (made / "worker.mjs").write_text(worker)
    return made


def result_of(folder: Path, page: str) -> dict:
    """Open a page of a folder, and return the JSON that it posts."""
    posted: list[bytes] = []
    arrived = threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        extensions_map = {  # noqa: RUF012 (as in the base class)
            **http.server.SimpleHTTPRequestHandler.extensions_map,
            ".mjs": "text/javascript",
            ".wasm": "application/wasm",
        }

        def log_message(self, *args):
            pass

        def do_POST(self):
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            arrived.set()

    handler = functools.partial(Handler, directory=str(folder))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{page}"
        with subprocess.Popen(
            [CHROMIUM, *flags(profile), address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as browser:
            is_there = arrived.wait(SECONDS)
            browser.terminate()
        server.shutdown()
    assert is_there, f"{page} posted nothing in {SECONDS} seconds"
    found = json.loads(posted[0])
    assert "error" not in found, found["error"]
    return found


def flags(profile: str) -> list[str]:
    own = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    own += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    return [*own, "--hide-scrollbars", "--window-size=1500,1000", f"--user-data-dir={profile}"]


@pytest.mark.slow
def test_a_visitor_teaches_and_trains(web_page, folder, tmp_path):
    found = result_of(folder, "web_visitor.html")
    assert found["wide"] == []
    assert found["colors"] == ["light", "dark"]
    assert found["drawn"] == {"guess": True, "shares": True, "ink": True}
    assert (found["taught"], found["mine"]) == (8, "1 drawing of yours.")
    assert found["keyboard"] == {"ink": True, "steps": 16, "mine": "2 drawings of yours."}
    assert found["nothing"] == ["Draw a digit first.", True, 16]
    assert found["trained"]["steps"] == 16 + 3 * 44
    assert found["trained"]["accuracy"] > 95
    assert found["trained"]["loss"] < 1
    assert found["trained"]["rows"] == 11
    assert found["trained"]["points"] == 16 + 3 * 44
    assert found["trained"]["disabled"] == [True, True, True]
    assert 3 < found["stopped"] < 3 * 44
    assert found["reset"] == [0, True]
    assert found["uploaded"] == found["trained"]["steps"]
    assert found["damaged"] == ["the state is damaged: its checksum is wrong", True, 148]
    # Python goes on from the file that the page downloads.
    state = tmp_path / "state.safetensors"
    state.write_bytes(base64.b64decode(found["state"]))
    own = web_page.main(["--state", str(state)])
    assert abs(100 * own - found["trained"]["accuracy"]) < 0.5


@pytest.mark.slow
def test_a_visitor_teaches_classes(web_page, folder, tmp_path):
    from safetensors.numpy import load_file

    found = result_of(folder, "web_classes.html")
    assert found["wide"] == []
    assert found["colors"] == ["light", "dark"]
    assert found["untaught"] == ["Add drawings of two classes first.", True, 0]
    assert found["nothing"] == ["Draw something first.", True, 0]
    assert found["ink"]
    assert found["labels"] == ["6 drawings, 2 held back", "0 drawings, 0 held back"]
    assert found["disabled"] == [True] * 5
    trained = found["trained"]
    names = ["line", "bar", "ring", "", ""]
    assert trained.pop("accuracy") > 80
    assert trained == {"steps": 40, "names": names, "drawings": 18, "held": 6}
    assert found["learnt"]
    assert found["guess"] == "The network sees: ring."
    assert 2 < found["stopped"] < 40
    assert (found["empty"]["drawings"], found["empty"]["held"]) == (0, 0)
    text, is_wrong, steps, drawings = found["damaged"]
    assert text == "The file of drawings does not fit: the label of drawing 1 must be from 0 to 4."
    assert (is_wrong, steps, drawings) == (True, found["stopped"], 0)
    uploaded = found["uploaded"]
    accuracy = uploaded.pop("accuracy")
    assert accuracy > 80
    assert uploaded == {**trained, "names": ["line", "bar", "ring", "class 4", "class 5"]}

    # Only the last layer has learnt.
    for name in ("before", "state"):
        (tmp_path / f"{name}.safetensors").write_bytes(base64.b64decode(found[name]))
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "state"))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    moments = {
        f"optimizer_state/{name}/9.{part}"
        for name in ("exp_avg", "exp_avg_sq")
        for part in ("weight", "bias")
    }
    assert changed == {"params/9.weight", "params/9.bias", "optimizer_state/step", *moments}
    backbone = web_page.backbone().eval()
    for name, value in backbone[:-1].state_dict().items():
        if "num_batches" not in name:
            assert np.array_equal(after[f"frozen/{name}"], value.numpy()), name
    rows = web_page.digits()[-web_page.HELD_OUT :].astype("float32")
    answers = backbone(web_page.torch.from_numpy(rows[:, :64] / 16).reshape(-1, 1, 8, 8)).argmax(1)
    assert (answers.numpy() == rows[:, 64]).mean() > 0.95

    # Python goes on from the files, and the page from Python's.
    (folder / "drawings.json").write_bytes(base64.b64decode(found["drawings"]))
    files = ["--state", str(tmp_path / "state.safetensors")]
    files += ["--drawings", str(folder / "drawings.json")]
    assert abs(100 * web_page.main(files) - accuracy) < 0.1
    own = web_page.main([*files, "--steps", "20", "--save", str(folder / "python.safetensors")])
    back = result_of(folder, "web_classes.html?back")
    assert back["steps"] == 60
    assert abs(100 * own - back["accuracy"]) < 0.1


@pytest.mark.slow
def test_the_page_works_from_a_file(folder, tmp_path):
    address = (folder / "index.html").as_uri() + "#train=1"
    dom = subprocess.run(
        [CHROMIUM, *flags(tmp_path), "--virtual-time-budget=60000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    ).stdout
    assert 'data-state="ready"' in dom
    assert re.search(r'id="steps">(\d+)', dom)[1] == "44"
    assert float(re.search(r'id="accuracy">([\d.]+)', dom)[1]) > 80
    assert re.search(r'id="message"[^>]*></p>', dom)


@pytest.mark.slow
def test_the_worker_of_the_guide_trains(folder):
    found = result_of(folder, "web_worker.html")
    assert len(found["losses"]) == 4
    assert found["losses"][3] < found["losses"][0]
    assert found["bytes"] == (folder / "model/state.safetensors").stat().st_size
    assert found["steps"] == 4
