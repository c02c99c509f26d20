"""Pages in headless Chromium that post what they measure."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote, urlsplit

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

#: Options of a browser that is started for one page.
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions"),
)


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012, of the class that this one extends
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *args, folders: Mapping[str, Path], rows: queue.Queue, **options):
        self._folders, self._rows = folders, rows
        super().__init__(*args, **options)

    def translate_path(self, path: str) -> str:
        """Return the file of a path: the first part names a folder, and "" is another one."""
        first, _, rest = urlsplit(path).path.lstrip("/").partition("/")
        if first in self._folders:
            return str(self._folders[first] / rest)
        return str(self._folders[""] / first)

    def end_headers(self) -> None:
        # Threads of WebAssembly need both; a page without them has coarser clocks too.
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._rows.put(json.loads(data))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def rows_of(
    page: str,
    query: Mapping[str, str],
    folders: Mapping[str, Path],
    seconds: float,
    flags: Sequence[str] = ("--disable-gpu",),
) -> list[dict]:
    """Return the rows that a page posts until it is done, for some seconds at most.

    Parameters
    ----------
    page : str
        The file of the page, in the folder "".
    query : Mapping[str, str]
        The page's parameters.
    folders : Mapping[str, Path]
        The folders by the first part of the path.
    seconds : float
        The time limit.
    flags : Sequence[str]
        Further options of Chromium.
    """
    assert CHROMIUM is not None
    posted: queue.Queue = queue.Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, folders=folders, rows=posted))
    Thread(target=server.serve_forever, daemon=True).start()
    text = "&".join(f"{name}={quote(value)}" for name, value in query.items())
    address = f"http://127.0.0.1:{server.server_port}/{page}?{text}"
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}", address]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + seconds
        try:
            while not (rows and "done" in rows[-1]):
                rows.append(posted.get(timeout=max(0.0, end - time.monotonic())))
        except queue.Empty:
            rows.append({"error": f"no answer in {seconds:.0f} s"})
        finally:
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
            server.shutdown()
            server.server_close()
    return rows
