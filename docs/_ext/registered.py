"""Directives that list the registrations of relax_grad, from its registry at build time."""

from __future__ import annotations

from collections.abc import Iterator

from docutils import nodes
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


#: The groups of operators: a title, and the parts of the names after "relax." that belong to it.
#: The last group has all others.
_GROUPS = (
    ("Neural networks", ("nn",)),
    ("Images and detection", ("image", "vision")),
    ("Backward operators and markers", ("grad",)),
    ("Communication and distribution", ("ccl", "dist")),
    ("Memory, machine and inspection", ("builtin", "inspect", "memory", "vm")),
    ("Tensors", ()),
)


class OperatorCoverage(Generated):
    """The tables of all operators of the installed TVM, by group, with the gradient or the reason
    for its absence.

    The name of an operator is an anchor of the page. ``_static/operators.js`` adds a filter.
    """

    def lines(self):
        entries = coverage()
        yield from [f"{summary(entries)}.", ""]
        groups = {title: [] for title, _ in _GROUPS}
        for item in entries:
            groups[_group(item.classification.op_name)].append(item)
        for title, items in groups.items():
            if items:
                yield from [".. container:: operator-group", "", f"   .. rubric:: {title}", ""]
                yield from (f"   {line}" for line in self._table(items))

    def run(self):
        output = super().run()
        tables = (table for node in output for table in node.findall(nodes.table))
        for table in tables:
            for line in table.findall(nodes.row):
                for name in list(line.findall(nodes.literal))[:1]:
                    name["ids"].append(name.astext())
        return output

    def _table(self, items):
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 30 10 12 48"]
        yield from ["   :class: operators", ""]
        yield from ["   * - operator", "     - gradient", "     - rule"]
        yield "     - arguments with a gradient, or the reason for its absence"
        for item in items:
            name, kind, rule, arguments, _ = row(item)
            yield f"   * - ``{name}``"
            cells = (kind, rule, item.classification.reason or arguments)
            yield from (f"     - {_escaped(cell)}" for cell in cells)
        yield ""


def _group(op_name: str) -> str:
    """Return the title of an operator's group."""
    part = op_name.split(".")[1]
    return next(title for title, parts in _GROUPS if part in parts or not parts)


class RegisteredOperators(Generated):
    """The table of the registrations that replace TVM's own, with the faults of TVM's."""

    def lines(self):
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 35 20 45", ""]
        yield from ["   * - operator", "     - registered", "     - fault of TVM's registration"]
        by_operator = {}
        for declaration in declarations():
            if declaration.corrects or declaration.attr == "FLegalize":
                by_operator.setdefault(declaration.op_name, []).append(declaration)
        for op_name, declared in by_operator.items():
            yield f"   * - ``{op_name}``"
            yield f"     - {', '.join(_WHAT[d.attr] for d in declared)}"
            corrections = (_correction(d, len(declared) > 1) for d in declared if d.corrects)
            yield f"     - {'; '.join(corrections)}"


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
