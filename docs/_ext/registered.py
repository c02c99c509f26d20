"""Directives that list the registrations of relax_grad, from its registry at build time."""

from __future__ import annotations

from collections.abc import Iterator

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from tvm.relax.op import grad as relax_op_grad

from relax_grad.cli.coverage import row, summary
from relax_grad.coverage import coverage
from relax_grad.registry import Declaration, declarations

_WHAT = {
    "FPrimalGradient": "gradient",
    "FLegalize": "legalization",
    "FInferType": "type inference",
    "FRelaxInferLayout": "layout inference",
}


class Generated(SphinxDirective):
    """A directive that generates lines of reStructuredText."""

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self):
        source = f"<{self.name}>"
        return self.parse_text_to_nodes(StringList(list(self.lines()), source))


class OperatorCoverage(Generated):
    """The table of all operators of the installed TVM, with the gradient or the reason for its absence."""

    def lines(self):
        found = coverage()
        yield from [f"{summary(found)}.", ""]
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 30 10 12 48", ""]
        yield from ["   * - operator", "     - gradient", "     - rule"]
        yield "     - arguments with a gradient, or the reason for its absence"
        for item in found:
            name, kind, rule, arguments, _ = row(item)
            yield f"   * - ``{name}``"
            cells = (kind, rule, item.classification.reason or arguments)
            yield from (f"     - {_escaped(cell)}" for cell in cells)


class RegisteredOperators(Generated):
    """The table of the registrations that replace TVM's own, with the faults of TVM's."""

    def lines(self):
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 35 20 45", ""]
        yield from ["   * - operator", "     - registered", "     - fault of TVM's registration"]
        by_operator = {}
        for declaration in declarations():
            if declaration.corrects or declaration.attr == "FLegalize":
                by_operator.setdefault(declaration.op_name, []).append(declaration)
        for op_name, found in by_operator.items():
            yield f"   * - ``{op_name}``"
            yield f"     - {', '.join(_WHAT[d.attr] for d in found)}"
            yield f"     - {'; '.join(_correction(d, len(found) > 1) for d in found if d.corrects)}"


class BackwardBuilders(Generated):
    """The documentation of each backward operator's builder."""

    def lines(self):
        for declaration in declarations():
            name = declaration.op_name.removeprefix("relax.grad.")
            builder = getattr(relax_op_grad, name, None)
            module = getattr(builder, "__module__", "")
            if declaration.attr == "FLegalize" and module.startswith("relax_grad."):
                yield f".. autofunction:: {module}.{name}"
                yield ""


def _correction(declaration: Declaration, several: bool) -> str:
    text = _escaped(declaration.corrects)
    return f"{_WHAT[declaration.attr]}: {text}" if several else text


def _escaped(text: str) -> str:
    for character in "\\*`|_":
        text = text.replace(character, f"\\{character}")
    return text


def setup(app):
    app.add_directive("operator-coverage", OperatorCoverage)
    app.add_directive("registered-operators", RegisteredOperators)
    app.add_directive("backward-builders", BackwardBuilders)
    return {"parallel_read_safe": True}
