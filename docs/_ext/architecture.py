"""Directives of the architecture page: the figure of the layers, and the tables of their
purposes."""

from __future__ import annotations

import layers
from docutils import nodes
from registered import Generated
from sphinx.util.docutils import SphinxDirective


class LayersFigure(SphinxDirective):
    """The figure of the parts and their imports."""

    def run(self):
        figure = nodes.container("", nodes.raw("", layers.figure(), format="html"))
        figure["classes"].append("wide-figure")
        return [figure]


class LayersTable(Generated):
    """The purpose of each part, and its imports besides the base."""

    def lines(self):
        rows = (
            (f"``{name or 'relax_grad'}``", _literal(part.purpose), _code(part.imports))
            for name, part in layers.PARTS.items()
        )
        yield from _table(("part", "purpose", "imports"), "15 50 35", rows)


class BaseTable(Generated):
    """The parts that all parts may import, and those that all parts of a wing may import."""

    def lines(self):
        bases = {"all": layers.BASE, **{wing.title: wing.base for wing in layers.WINGS}}
        rows = (
            (f"``{name}``", _literal(purpose), users)
            for users, base in bases.items()
            for name, purpose in base.items()
        )
        yield from _table(("part", "contents", "users"), "20 60 20", rows)


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
    return {"parallel_read_safe": True}
