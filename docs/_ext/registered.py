"""Directives that list what relax_grad registers, read from its registry when the pages are built."""

from __future__ import annotations

from collections.abc import Iterator

from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective
from tvm.relax.op import grad as relax_op_grad

from relax_grad.registry import Declaration, declarations

_WHAT = {
    "FPrimalGradient": "gradient",
    "FLegalize": "legalization",
    "FInferType": "type inference",
}


class Generated(SphinxDirective):
    """A directive that stands for the lines of reStructuredText that it generates."""

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self):
        source = f"<{self.name}>"
        return self.parse_text_to_nodes(StringList(list(self.lines()), source))


class RegisteredOperators(Generated):
    """A table of operators: what is registered, and what it corrects."""

    def lines(self):
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 35 20 45", ""]
        yield from ["   * - operator", "     - registered", "     - what TVM's own does wrong"]
        rows = {}
        for declaration in declarations():
            rows.setdefault(declaration.op_name, []).append(declaration)
        for op_name, row in rows.items():
            yield f"   * - ``{op_name}``"
            yield f"     - {', '.join(_WHAT[d.attr] for d in row)}"
            yield f"     - {'; '.join(_correction(d, len(row) > 1) for d in row if d.corrects)}"


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
    text = declaration.corrects.replace("\\", "\\\\").replace("*", "\\*").replace("`", "\\`")
    text = text.replace("|", "\\|").replace("_", "\\_")
    return f"{_WHAT[declaration.attr]}: {text}" if several else text


def setup(app):
    app.add_directive("registered-operators", RegisteredOperators)
    app.add_directive("backward-builders", BackwardBuilders)
    return {"parallel_read_safe": True}
