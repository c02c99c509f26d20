"""The built pages in Chromium: nothing overflows at the width of a phone or of a desktop, and every
link has a target."""

from __future__ import annotations

import functools
import html.parser
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
WIDTHS = (400, 1400)
THEMES = ("light", "dark")

#: Loads every page in frames of each width and theme, and lists the elements that reach beyond the
#: article and that no parent scrolls.
_MEASURE = """<!doctype html><meta charset="utf-8"><body><pre id="result">unfinished</pre><script>
const scrolls = (element) => {
  for (let e = element.parentElement; e && !e.matches("article"); e = e.parentElement)
    if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true;
  return false;
};
const MARGIN = 10;  // by which the theme lets headings reach beyond the article
const load = (page, width) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => done(frame);
  frame.src = page;
  document.body.append(frame);
});
(async () => {
  const found = [], figures = {};
  for (const page of PAGES) for (const width of WIDTHS) {
    const frame = await load(page, width), inner = frame.contentDocument;
    for (const figure of inner.querySelectorAll('article img[src$=".svg"], article svg[role="img"]'))
      if (figure.getClientRects().length)
        (figures[figure.src?.split("/").pop() ?? "layers"] ??= []).push(figure.getBoundingClientRect().width);
    for (const theme of THEMES) {
      inner.body.dataset.theme = theme;
      const right = inner.querySelector("article")?.getBoundingClientRect().right ?? width;
      const beyond = [...inner.querySelectorAll("article *")].filter((e) =>
        e.getBoundingClientRect().right > right + MARGIN && e.getClientRects().length && !scrolls(e));
      if (beyond.length || inner.documentElement.scrollWidth > width)
        found.push([page, width, theme, beyond.slice(0, 2).map((e) => e.outerHTML.slice(0, 160))]);
    }
    frame.remove();
  }
  const rows = await load("operators.html?filter=conv2d", 1400);
  const shown = [...rows.contentDocument.querySelectorAll(".operator-group tbody tr")]
    .filter((row) => !row.hidden && row.getClientRects().length).map((row) => row.cells[0].textContent.trim());
  document.getElementById("result").textContent = JSON.stringify({found, shown, figures});
})();
</script>"""

_SHOW = """<!doctype html><meta charset="utf-8"><body style="margin:0"><script>
const frame = document.createElement("iframe");
frame.style = "width:WIDTHpx;height:1600px;border:0";
frame.onload = () => { frame.contentDocument.body.dataset.theme = "THEME"; };
frame.src = "PAGE";
document.body.append(frame);
</script>"""


@pytest.fixture(scope="module")
def html_folder(tmp_path_factory):
    missing = [
        name for name in ("sphinx", "myst_parser", "furo") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; install with the extra docs")
    folder = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", ROOT / "docs", folder]
    subprocess.run([*command, "-d", tmp_path_factory.mktemp("doctrees")], check=True)
    return folder


@pytest.fixture
def address(html_folder):
    """Yield the address of a server of the pages."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(html_folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def chromium(profile: Path, *arguments: str) -> str:
    """Run Chromium with a profile of its own, and return its output."""
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    process = subprocess.run(
        [CHROMIUM, *flags, "--hide-scrollbars", f"--user-data-dir={profile}", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def legible_width(name: str) -> float:
    """Return the pixels of a figure's width at which most of its text has a height of 9 pixels."""
    file = ROOT / "docs/_measured" / re.sub(r"_(light|dark)\.svg$", ".svg", name)
    text = layers_figure() if name == "layers" else file.read_text()
    whole = re.search(r"<svg[^>]*font-size=\"([\d.]+)", text)
    sizes = [whole[1]] if whole else re.findall(r"font(?:-size)?: ([\d.]+)", text)
    most = float(Counter(sizes).most_common(1)[0][0])
    return 9 * float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1]) / most


def layers_figure() -> str:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "docs/_ext/layers.py")
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    return layers.figure()


@pytest.mark.slow
def test_nothing_overflows_and_the_filter_works(html_folder, address, tmp_path):
    pages = [path.relative_to(html_folder).as_posix() for path in html_folder.rglob("[!_]*.html")]
    measure = _MEASURE
    for name, value in (
        ("PAGES", [*sorted(pages), "_wide.html"]),
        ("WIDTHS", WIDTHS),
        ("THEMES", THEMES),
    ):
        measure = measure.replace(f"of {name}", f"of {json.dumps(value)}")
    added = {
        "_measure.html": measure,
        # A page that does overflow, so that the test is known to see it.
        "_wide.html": (html_folder / "index.html")
        .read_text()
        .replace("</article>", '<div style="width: 1900px">wide</div></article>'),
    }
    for name, text in added.items():
        (html_folder / name).write_text(text)
    try:
        dom = chromium(
            tmp_path, "--virtual-time-budget=600000", "--dump-dom", f"{address}/_measure.html"
        )
    finally:
        for name in added:
            (html_folder / name).unlink()
    result = json.loads(unescape(re.search(r'<pre id="result">(.*?)</pre>', dom, re.S)[1]))
    wide = [entry for entry in result["found"] if entry[0] == "_wide.html"]
    assert len(wide) == len(WIDTHS) * len(THEMES)
    others = [entry for entry in result["found"] if entry not in wide]
    assert not others, "\n".join(map(str, others))
    assert set(result["figures"]) >= {"steps_light.svg", "accuracy_light.svg", "layers"}
    for name, widths in result["figures"].items():
        assert min(widths) >= legible_width(name), name
    assert "relax.nn.conv2d" in result["shown"]
    assert all("conv2d" in name for name in result["shown"])


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", ["index", "operators", "upstream"])
def test_screenshots(html_folder, address, tmp_path, page, width, theme):
    """The pictures are for people; the test checks that they have contents."""
    show = _SHOW.replace("WIDTH", str(width)).replace("THEME", theme)
    (html_folder / "_show.html").write_text(show.replace("PAGE", f"{page}.html"))
    picture = tmp_path / f"{page}_{width}_{theme}.png"
    chromium(
        tmp_path / "profile",
        f"--window-size={width},1600",
        "--virtual-time-budget=20000",
        f"--screenshot={picture}",
        f"{address}/_show.html",
    )
    assert picture.stat().st_size > 20_000


class _Links(html.parser.HTMLParser):
    """The ids of a page, and the targets of its links and pictures."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id"))
        target = attributes.get("href") if tag in ("a", "link") else attributes.get("src")
        if target:
            self.targets.append(target)


@pytest.mark.slow
def test_every_link_has_a_target(html_folder):
    pages = {path: _Links(path.read_text()) for path in html_folder.rglob("*.html")}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_known = path not in pages or unquote(parts.fragment) in {"", *pages[path].ids}
            if not path.exists() or not is_known:
                broken.append(f"{page.relative_to(html_folder)}: {target}")
    assert not broken, "\n".join(broken)
