"""The page of ``examples/web`` in the built documentation: ``make web`` builds it, and a build of
the documentation copies it."""

from __future__ import annotations

import shutil
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

FOLDER = "web_example"

_MISSING = """\
`make web` builds a page in which a CNN learns the digits that you draw, and `make docs` then shows
it here. This build of the documentation is without it, because {reason}."""


def built(documentation: str | Path) -> Path:
    """Return the folder in which ``make web`` writes the page."""
    return Path(documentation).parent / "build/web"


def reason() -> str:
    """Return why the page is not there."""
    from relax_grad.static import webassembly

    try:
        webassembly.clang()
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    return "`make web` was not run"


class WebExample(SphinxDirective):
    """A link to the page, or how to build it."""

    def run(self):
        page = built(self.env.app.confdir) / "index.html"
        self.env.note_dependency(str(page))  # a page that comes or goes changes the text
        if page.is_file():
            return [_link()]
        lines = _MISSING.format(reason=reason()).splitlines()
        return self.parse_text_to_nodes(StringList(lines, str(page)))


def _link() -> nodes.paragraph:
    # The page is no document of Sphinx: a reference of Markdown to it would be a warning.
    reference = nodes.reference("", "", internal=True, refuri=f"{FOLDER}/index.html")
    reference += nodes.strong(text="Train a network in your browser")
    rest = (
        ": draw a digit, and a CNN learns it. Nothing is installed, and nothing is sent anywhere."
    )
    return nodes.paragraph("", "", reference, nodes.Text(rest))


def _copy(app, error) -> None:
    target = Path(app.outdir, FOLDER)
    shutil.rmtree(target, ignore_errors=True)
    pages = sorted(built(app.confdir).glob("*.html"))
    if error is None and app.builder.format == "html" and pages:
        target.mkdir()
        for page in pages:
            shutil.copyfile(page, target / page.name)


def setup(app):
    app.add_directive("web-example", WebExample)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
