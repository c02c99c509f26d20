"""The directive that shows the tables of ONNX's operators of the importer."""

from __future__ import annotations

from registered import Generated

from relax_grad.frontend.onnx.operators.support import MICROSOFT_OPERATORS, STANDARD_OPERATORS


class OnnxOperators(Generated):
    """The operators of a domain by their state: those without a note in a line, the others with
    their notes."""

    required_arguments = 1

    def lines(self):
        table = {"standard": STANDARD_OPERATORS, "microsoft": MICROSOFT_OPERATORS}[
            self.arguments[0]
        ]
        titles = {"trains": "train", "forward": "without a gradient", "refused": "refused"}
        yield from [".. list-table::", "   :header-rows: 1", "   :widths: 15 45 40", ""]
        yield from ["   * - state", "     - operators", "     - note"]
        for kind, title in titles.items():
            notes: dict[str, list[str]] = {}
            for name, entry in table.items():
                if entry.kind == kind:
                    notes.setdefault(entry.note, []).append(name)
            for note, names in sorted(notes.items()):
                yield f"   * - {title}"
                yield "     - " + ", ".join(f"``{name}``" for name in names)
                yield f"     - {note}"


def setup(app):
    app.add_directive("onnx-operators", OnnxOperators)
