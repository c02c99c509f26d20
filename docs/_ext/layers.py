"""The layers of the package: what each part is for, what it may import, and the figure of what it does import.

What is imported is read from the sources. ``tests/test_layers.py`` holds it against what is allowed here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "relax_grad"


class Part(NamedTuple):
    """A part of the package.

    Attributes
    ----------
    purpose : str
        What it does, for the table of the page.
    imports : tuple[str, ...]
        The parts that it may import, besides those of :data:`BASE`.
    place : tuple[int, int]
        Where the middle of its box is in the figure: the row, from the top, and the abscissa.
    """

    purpose: str
    imports: tuple[str, ...]
    place: tuple[int, int]


#: The parts above the base, from the top: a part imports none that stands before it.
PARTS = {
    "cli": Part("the command line", ("", "functional", "testing"), (0, 530)),
    "": Part(
        "`import relax_grad`: the public names, and the registration of everything, once",
        ("_pipeline", "codegen", "functional", "legalize", "op", "rules", "transform"),
        (0, 230),
    ),
    "_pipeline": Part("the pipeline that compiles for CPUs", ("codegen", "transform"), (1, 80)),
    "functional": Part("`value_and_grad`, `vjp`, `jvp`, `hvp`", ("transform",), (1, 230)),
    "training": Part("`SetupTrainer` on `relax.training`", ("transform",), (1, 380)),
    "testing": Part(
        "the gradient checker, comparison with PyTorch, samples of every operator",
        ("transform",),
        (1, 530),
    ),
    "backend": Part("patterns for libraries that compute backward operators", ("op",), (1, 694)),
    "transform": Part(
        "passes: differentiation, branches, memory, and those that call kernels and schedules",
        ("dispatch", "kernel", "op", "schedule"),
        (2, 230),
    ),
    "codegen": Part(
        "machine code of functions: compiled in threads, and kept in a directory", (), (2, 80)
    ),
    "schedule": Part(
        "schedules for CPUs of the functions that have no kernel", ("kernel",), (3, 80)
    ),
    "dispatch": Part("which call of an operator a kernel takes", ("kernel", "op"), (3, 330)),
    "rules": Part("the gradient of each operator, of backward operators too", ("op",), (3, 468)),
    "legalize": Part(
        "from an operator to its tensor expression, in a few lines", ("op", "topi"), (3, 606)
    ),
    "kernel": Part(
        "fast functions for CPUs of what `topi` defines; no Relax in them", ("topi",), (4, 230)
    ),
    "op": Part(
        "backward operators: declaration, types, layouts; no tensor expressions", (), (4, 480)
    ),
    "topi": Part("tensor expressions, for any target and shape; no Relax in them", (), (5, 380)),
}

#: What every part may import; of these too, none imports one that stands before it.
BASE = {
    "coverage": "what is known of the gradients of all operators",
    "_aliases": "which tensors share memory, and which calls write to it",
    "_module": "what is done with modules again and again",
    "activity": "which variables a gradient passes through",
    "registry": "how rules are registered, and what is registered",
    "_partials": "what rules return, held against the types of the arguments",
    "_bindings": "what the bindings of a function are made of",
    "target": "the processor that is compiled for",
    "threads": "the number of threads that kernels run in",
    "_layout": "layouts of tensors, and indices in them",
    "_dtypes": "the dtypes that are accumulated in",
    "errors": "the errors that are raised",
    "_entry": "whether the package is imported by its command line, which registers late",
    "_compat": "the differences of the versions of TVM; nothing else knows them",
}

#: The modules of parts that are not named as the part.
MEMBERS = {"_stages": "_pipeline", "__main__": "cli"}

#: Imports within functions that go up, with the reason; they happen when the function is called.
UPWARD = {
    ("coverage", "testing"): "a row of the table counts the samples of its operator",
    (
        "coverage",
        "transform",
    ): "missing gradients are found in the form that the pass differentiates",
}


class Import(NamedTuple):
    """An import of one module of the package by another; both without the name of the package."""

    module: str
    imported: str
    in_function: bool

    @property
    def parts(self) -> tuple[str, str]:
        """The part that imports and the part that is imported."""
        return part_of(self.module), part_of(self.imported)


def part_of(module: str) -> str:
    """Return the part that a module belongs to."""
    name = module.partition(".")[0]
    return MEMBERS.get(name, name)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the file of each module, by its name without that of the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        *folders, name = path.relative_to(package).with_suffix("").parts
        found[".".join(folders if name == "__init__" else [*folders, name])] = path
    return found


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """Yield the imports of modules of the package by others, those within functions too."""
    files = modules(package)
    for module, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        within = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, functions)
            for node in ast.walk(function)
        }
        above = module.split(".")[: None if path.name == "__init__.py" else -1]
        for node in ast.walk(tree):
            for name in _names(node, [package.name, *filter(None, above)]):
                first, _, imported = name.partition(".")
                if first == package.name:
                    while imported not in files:  # the name is not a module's: its module
                        imported = imported.rpartition(".")[0]
                    if imported != module:
                        yield Import(module, imported, id(node) in within)


def _names(node: ast.AST, above: list[str]) -> Iterator[str]:
    """Yield the full names that a statement imports in a package that is ``above`` it."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        start = above[: len(above) - node.level + 1] if node.level else []
        yield from (
            ".".join(filter(None, [*start, node.module, alias.name])) for alias in node.names
        )


_WIDTH, _HEIGHT, _PITCH, _TOP = 124, 36, 84, 8
_ROWS = 1 + max(part.place[0] for part in PARTS.values())


def figure() -> str:
    """Draw the parts and their imports as SVG, in the colour of the text around it."""
    edges = sorted({each.parts for each in imports() if set(each.parts) <= set(PARTS)})
    edges = [(user, used) for user, used in edges if user != used and user != "" != used]
    base_y = _TOP + _ROWS * _PITCH
    height = base_y + 3 * _HEIGHT
    drawn = [_box(name, *_centre(name)) for name in PARTS if name]
    drawn += [_edge(user, used, edges) for user, used in edges]
    names = list(BASE)
    half = (len(names) + 1) // 2
    drawn.append(_rectangle(380, base_y + _HEIGHT, 724, 2 * _HEIGHT + 4))
    for i, line in enumerate((names[:half], names[half:])):
        drawn.append(_text("   ".join(line), 380, base_y + _HEIGHT + (i - 0.5) * 26))
    return "\n".join(
        [
            f'<svg viewBox="0 0 760 {height}" role="img" aria-label="The parts of relax_grad and what they import"'
            ' style="width: 100%; max-width: 760px; color: inherit" font-family="monospace" font-size="15">',
            '<defs><marker id="layers-end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>',
            *drawn,
            "</svg>",
        ]
    )


def _centre(part: str) -> tuple[int, float]:
    row, x = PARTS[part].place
    return x, _TOP + row * _PITCH + _HEIGHT / 2


def _box(name: str, x: float, y: float) -> str:
    return _rectangle(x, y, _WIDTH, _HEIGHT) + _text(name, x, y)


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="5"'
        ' fill="currentColor" fill-opacity="0.07" stroke="currentColor" stroke-opacity="0.6"/>'
    )


def _text(text: str, x: float, y: float) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" dominant-baseline="central"'
        f' fill="currentColor" xml:space="preserve">{text}</text>'
    )


def _edge(user: str, used: str, edges: list[tuple[str, str]]) -> str:
    """Draw an arrow: straight down to the row above what is used, then to its top."""
    below = (
        PARTS[user].place[0] + 1
    )  # what is further down than this is reached by a straight line first
    outgoing = sorted(
        (PARTS[b].place[1] if PARTS[b].place[0] == below else PARTS[user].place[1], b)
        for a, b in edges
        if a == user
    )
    incoming = sorted((PARTS[a].place[1], a) for a, b in edges if b == used)
    (x, y), (to_x, to_y) = _centre(user), _centre(used)
    x += _port([name for _, name in outgoing].index(used), len(outgoing))
    to_x += _port([name for _, name in incoming].index(user), len(incoming))
    y, to_y = y + _HEIGHT / 2, to_y - _HEIGHT / 2
    turn = to_y - (_PITCH - _HEIGHT)
    middle = (turn + to_y) / 2
    return (
        f'<path d="M{x:g} {y:g}V{turn:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"'
        ' fill="none" stroke="currentColor" stroke-opacity="0.75" marker-end="url(#layers-end)"/>'
    )


def _port(number: int, count: int) -> float:
    """Return how far from the middle of a box an arrow begins or ends, of several."""
    return (number - (count - 1) / 2) * 22
