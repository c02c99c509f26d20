"""The pages of ``examples/web`` in the built documentation.

``make web`` builds them, and a build of the documentation copies them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

FOLDER = "web_example"
PAGES = ("index.html", "classes.html")

_MISSING = """\
`make web` builds pages in which a CNN learns the digits and classes that you draw, and `make docs`
then shows them here. This build of the documentation is without them, because {reason}."""


def built(documentation: str | Path) -> Path:
    """Return the folder in which ``make web`` writes the pages."""
    return Path(documentation).parent / "build/web"


def reason() -> str:
    """Return why the pages are not there."""
    from relax_grad.static import webassembly

    try:
        webassembly.tools()
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return "`make web` was not run"


class WebExample(SphinxDirective):
    """Links to the pages, or how to build them."""

    def run(self):
        pages = [built(self.env.srcdir) / name for name in PAGES]
        for page in pages:
            self.env.note_dependency(str(page))  # a page that comes or goes changes the text
        if all(page.is_file() for page in pages):
            return [_links()]
        lines = _MISSING.format(reason=reason()).splitlines()
        return self.parse_text_to_nodes(StringList(lines, str(pages[0])))


def _links() -> nodes.paragraph:
    # The pages are no documents of Sphinx: a reference of Markdown to them would be a warning.
    digits, classes = (
        nodes.reference("", "", internal=True, refuri=f"{FOLDER}/{name}") for name in PAGES
    )
    digits += nodes.strong(text="Train a network in your browser")
    classes += nodes.Text("your own classes")
    first = nodes.Text(": draw a digit, and a CNN learns it, or teach it ")
    last = nodes.Text(" by transfer learning. Nothing is installed, and nothing is sent anywhere.")
    return nodes.paragraph("", "", digits, first, classes, last)


def _copy(app, error) -> None:
    target = Path(app.outdir, FOLDER)
    shutil.rmtree(target, ignore_errors=True)
    pages = [built(app.confdir) / name for name in PAGES]
    is_built = all(page.is_file() for page in pages)
    if error is None and app.builder.format == "html" and is_built:
        target.mkdir()
        for page in pages:
            shutil.copyfile(page, target / page.name)


def setup(app):
    app.add_directive("web-example", WebExample)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
