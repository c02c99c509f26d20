"""A directive for the pictures of measurements, which follow the colours of the page.

A picture in ``_measured`` has a style for dark pages, by which browsers follow the reader's system.
The pages have a switch too: they get two pictures, of which the theme shows one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from measured import MEASURED
from sphinx.util.docutils import SphinxDirective

#: The condition of the style of a picture, and the conditions in its place for the pages of a
#: theme.
_DARK, _THEMES = "(prefers-color-scheme: dark)", {"light": "not all", "dark": "all"}


class Chart(SphinxDirective):
    """A picture of ``_measured`` by its name, for light and for dark pages."""

    required_arguments = 1
    option_spec: ClassVar = {"alt": directives.unchanged_required}

    def run(self):
        (name,) = self.arguments
        source = MEASURED / f"{name}.svg"
        self.env.note_dependency(str(source))
        folder = Path(self.env.doctreedir, "charts")
        folder.mkdir(parents=True, exist_ok=True)
        page = Path(self.env.doc2path(self.env.docname)).parent
        pictures = []
        for theme, condition in _THEMES.items():
            path = folder / f"{name}_{theme}.svg"
            path.write_text(source.read_text("utf-8").replace(_DARK, condition), "utf-8")
            uri = Path(os.path.relpath(path, page)).as_posix()
            pictures.append(nodes.image(uri=uri, classes=[f"only-{theme}"], **self.options))
        return pictures


def setup(app):
    app.add_directive("chart", Chart)
    return {"parallel_read_safe": True}
