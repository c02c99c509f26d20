"""Directives of the page on the architecture: the figure of the layers, and tables of what they are for."""

from __future__ import annotations

import layers
from docutils import nodes
from registered import Generated
from sphinx.util.docutils import SphinxDirective


class LayersFigure(SphinxDirective):
    """The figure of the parts and their imports."""

    def run(self):
        return [nodes.raw("", layers.figure(), format="html")]


class LayersTable(Generated):
    """What each part does, and what it may import besides the base."""

    def lines(self):
        rows = (
            (f"``{name or 'relax_grad'}``", _literal(part.purpose), _code(part.imports))
            for name, part in layers.PARTS.items()
        )
        yield from _table(("part", "what it does", "what it may import"), "15 50 35", rows)


class BaseTable(Generated):
    """The modules that every part may import."""

    def lines(self):
        rows = ((f"``{name}``", _literal(purpose)) for name, purpose in layers.BASE.items())
        yield from _table(("module", "what it holds"), "20 80", rows)


class UpwardTable(Generated):
    """The imports within functions that go up."""

    def lines(self):
        rows = (
            (f"``{a}``", f"``{b}``", _literal(reason)) for (a, b), reason in layers.UPWARD.items()
        )
        yield from _table(("module", "imports", "because"), "15 15 70", rows)


def _literal(text: str) -> str:
    return text.replace("`", "``")


def _code(names) -> str:
    return ", ".join(f"``{name or 'relax_grad'}``" for name in names)


def _table(head, widths, rows):
    yield from [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
    for first, *rest in (head, *rows):
        yield f"   * - {first}"
        yield from (f"     - {cell}" for cell in rest)


def setup(app):
    app.add_directive("layers-figure", LayersFigure)
    app.add_directive("layers-table", LayersTable)
    app.add_directive("base-table", BaseTable)
    app.add_directive("upward-table", UpwardTable)
    return {"parallel_read_safe": True}
