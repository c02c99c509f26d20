"""The layers of the package: the purpose and the permitted imports of each part, and the figure of
the actual imports.

The actual imports are read from the sources. ``tests/test_layers.py`` compares them with the
permitted ones.
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
        Its task, for the table of the page.
    imports : tuple[str, ...]
        The parts that it may import, besides the base of its wing and of the package.
    place : tuple[int, int]
        The centre of its box in the figure: the row, from the top, and the x coordinate.
    """

    purpose: str
    imports: tuple[str, ...]
    place: tuple[int, int]


class Wing(NamedTuple):
    """A wing of the package: parts with one purpose.

    Attributes
    ----------
    title : str
        The heading in the figure.
    parts : dict[str, Part]
        The parts, from the top: a part may import only later parts.
    base : dict[str, str]
        The purposes of the parts that all other parts of the wing may import. Each of them may
        import only later ones.
    span : tuple[int, int]
        The left and the right edge in the figure.
    """

    title: str
    parts: dict[str, Part]
    base: dict[str, str]
    span: tuple[int, int]


#: The parts above the wings, from the top.
ABOVE = {
    "cli": Part(
        "the command line",
        (
            *(
                "",
                "coverage",
                "cpu.codegen",
                "cpu.kernel",
                "cpu.target",
                "cpu.threads",
                "cpu.tiles",
            ),
            *("distributed", "functional", "registry", "testing"),
        ),
        (0, 84),
    ),
    "": Part(
        "`import relax_grad`: public names, and registration",
        (
            *("autodiff", "functional", "legalize", "op", "registry", "rules", "tir", "transform"),
            *("cpu.codegen", "cpu.pipeline", "cpu.target", "cpu.threads", "gpu"),
        ),
        (0, 300),
    ),
    "coverage": Part(
        "the gradients of all operators, in a table", ("autodiff", "registry", "testing"), (1, 196)
    ),
    "testing": Part(
        "the gradient checker, comparison with PyTorch, samples of every operator, the fuzzer",
        ("cpu.codegen", "cpu.target", "transform"),
        (2, 342),
    ),
    "distributed": Part(
        "sessions of workers, their collectives, and data parallel training",
        ("activity", "autodiff", "cpu.threads", "training"),
        (1, 624),
    ),
    "frontend": Part(
        "PyTorch and ONNX models as modules to train; random numbers",
        (
            *("activity", "autodiff", "cpu.pipeline", "cpu.target", "cpu.threads", "op"),
            *("gpu", "topi", "training", "transform"),
        ),
        (1, 478),
    ),
    "training": Part(
        "training steps, optimizers and their loop; `SetupTrainer` on `relax.training`",
        (
            *("activity", "autodiff", "backend", "cpu.pipeline", "cpu.target", "cpu.threads"),
            *("gpu", "static", "transform"),
        ),
        (2, 478),
    ),
    "static": Part(
        "a training step as a static plan, and the plan as C or WebAssembly without a runtime",
        ("cpu.codegen", "cpu.pipeline"),
        (3, 690),
    ),
    "runtime": Part("the C++ library that trains without Python", (), (3, 560)),
    "transform": Part(
        "mixed precision; the public names of the passes of both wings",
        ("autodiff", "cpu.passes"),
        (3, 420),
    ),
    "gpu": Part(
        "the pipeline for GPUs: the passes for any processor between TVM's stages; their devices",
        ("cpu.passes", "cpu.pipeline", "cpu.schedule"),
        (3, 130),
    ),
    "backend": Part(
        "calls of a library instead of operators, and patterns for others",
        ("op", "registry"),
        (3, 269),
    ),
}

DIFFERENTIATION = Wing(
    "differentiation",
    {
        "functional": Part("`value_and_grad`, `vjp`, `jvp`, `hvp`", ("autodiff",), (4, 70)),
        "autodiff": Part("the differentiation pass and its parts", ("tir",), (5, 70)),
        "rules": Part(
            "the gradients of operators, including backward operators", ("op",), (5, 196)
        ),
        "legalize": Part("the tensor expression of each operator", ("op", "topi"), (5, 342)),
        "tir": Part("reverse mode for tensor functions", (), (7, 70)),
        "op": Part(
            "backward operators: declaration, types, layouts; no tensor expressions", (), (7, 240)
        ),
        "topi": Part(
            "tensor expressions, for any target and shape; no Relax in them", (), (8, 342)
        ),
    },
    {
        "activity": "the variables that a gradient passes through",
        "registry": "the registration of rules, and the registered rules",
    },
    (6, 406),
)

CPU = Wing(
    "cpu",
    {
        "cpu.pipeline": Part("the passes in their order", ("cpu.codegen", "cpu.passes"), (4, 584)),
        "cpu.codegen": Part(
            "machine code of functions: compiled in threads, and kept in a directory", (), (5, 690)
        ),
        "cpu.passes": Part(
            "passes that call kernels and schedules, fold, inline, and plan memory",
            ("cpu.dispatch", "cpu.kernel", "cpu.schedule", "op"),
            (5, 478),
        ),
        "cpu.dispatch": Part("the kernels of operator calls", ("cpu.kernel", "op"), (6, 566)),
        "cpu.schedule": Part("schedules of functions without a kernel", ("cpu.kernel",), (6, 692)),
        "cpu.kernel": Part(
            "fast functions for the definitions in `topi`; no Relax in them", ("topi",), (7, 625)
        ),
    },
    {
        "cpu.target": "the processor of the target",
        "cpu.tiles": "permission for the processor's tiles of bfloat16",
        "cpu.tuning": "the sizes and limits of kernels: a row for each family of processors",
        "cpu.kernel_limits": "the fields of these rows for other kernels than matrix products",
        "cpu.limits": "the fields for matrix products, their units and benchmarks",
        "cpu.squares": "the function that transposes squares for all kernels of a program",
        "cpu.threads": "the number of threads of kernels",
    },
    (414, 754),
)

WINGS = (DIFFERENTIATION, CPU)

#: The parts that every part may import. Each of them may import only later ones.
BASE = {
    "ir": "modules, bindings, types, layouts and versions of TVM: functions that depend on no "
    "operator",
    "_validation": "the checks of arguments: integers, and patterns of names",
    "_collector": "the pause of Python's garbage collector",
    "_progress": "the display of what takes seconds",
    "_packages": "optional packages: supported versions, and errors for missing and broken ones",
    "errors": "errors",
    "_entry": "the detection of an import by the command line, which registers late",
}

#: All parts with the base of each wing, from the top.
PARTS: dict[str, Part] = {**ABOVE, **DIFFERENTIATION.parts, **CPU.parts}

#: The parts of the modules whose names differ from that of their part.
MEMBERS = {
    "__main__": "cli",
    "target": "",
    "cpu": "cpu.pipeline",
    "cpu.memory": "cpu.pipeline",
    "cpu.programs": "cpu.pipeline",
    "cpu.stages": "cpu.pipeline",
    "cpu.storages": "cpu.pipeline",
}


def wing_of(part: str) -> Wing | None:
    """Return the wing of a part, or None above and below the wings."""
    return next((wing for wing in WINGS if part in wing.parts or part in wing.base), None)


def allowed(part: str) -> set[str]:
    """Return the parts that a part may import."""
    wing = wing_of(part)
    if part in BASE:
        return set(BASE)
    own = PARTS[part].imports if part in PARTS else ()
    return {*BASE, *own, *(wing.base if wing else ())}


class Import(NamedTuple):
    """An import of one module of the package by another; both names are relative to the package."""

    module: str
    imported: str
    in_function: bool

    @property
    def parts(self) -> tuple[str, str]:
        """The importing and the imported part."""
        return part_of(self.module), part_of(self.imported)


def part_of(module: str) -> str:
    """Return the part of a module."""
    first, _, rest = module.partition(".")
    name = ".".join(filter(None, [first, rest.partition(".")[0]])) if first == "cpu" else first
    return MEMBERS.get(name, name)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return the file of each module, by the name of the module relative to the package."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        *folders, name = path.relative_to(package).with_suffix("").parts
        paths[".".join(folders if name == "__init__" else [*folders, name])] = path
    return paths


def imports(package: Path = PACKAGE) -> Iterator[Import]:
    """Yield the imports of modules of the package by other modules, including imports in
    functions."""
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
                    while imported not in files:  # a name within a module: take the module
                        imported = imported.rpartition(".")[0]
                    if imported != module:
                        yield Import(module, imported, id(node) in within)


def _names(node: ast.AST, above: list[str]) -> Iterator[str]:
    """Yield the full names that a statement imports in a module of the package ``above``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        start = above[: len(above) - node.level + 1] if node.level else []
        yield from (
            ".".join(filter(None, [*start, node.module, alias.name])) for alias in node.names
        )


_WIDTH, _HEIGHT, _PITCH, _TOP = 112, 36, 84, 8
_ROWS = 1 + max(part.place[0] for part in PARTS.values())
_FIRST = min(part.place[0] for wing in WINGS for part in wing.parts.values())


def figure() -> str:
    """Return the figure of the parts and their imports as SVG, in the colour of the surrounding
    text."""
    edges = sorted({edge.parts for edge in imports() if set(edge.parts) <= set(PARTS)})
    edges = [(user, used) for user, used in edges if user != used and user != "" != used]
    bottom = _TOP + _ROWS * _PITCH
    drawn = [_wing(wing, _TOP + _FIRST * _PITCH - 34, bottom + 22) for wing in WINGS]
    drawn += [_box(name, *_centre(name)) for name in PARTS if name]
    drawn += [_edge(user, used, edges) for user, used in edges]
    drawn.append(
        _rectangle(380, bottom + 66, 748, _HEIGHT) + _text("   ".join(BASE), 380, bottom + 66)
    )
    return "\n".join(
        [
            f'<svg viewBox="0 0 760 {bottom + 92}" role="img" aria-label="The parts of '
            'relax_grad and their imports" style="width: 100%; max-width: 760px; color: '
            'inherit" font-family="monospace" font-size="15">',
            '<defs><marker id="layers-end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" '
            'fill="currentColor"/></marker></defs>',
            *drawn,
            "</svg>",
        ]
    )


def _wing(wing: Wing, top: float, bottom: float) -> str:
    """Draw the frame of a wing, its title, and its base."""
    left, right = wing.span
    middle = (left + right) / 2
    base = "   ".join(_short(name) for name in wing.base)
    return (
        f'<rect x="{left}" y="{top:g}" width="{right - left}" height="{bottom - top:g}" rx="9" '
        'fill="none" stroke="currentColor" stroke-opacity="0.45" stroke-dasharray="5 4"/>'
        + _text(wing.title, right - 70, top + 17)
        + _rectangle(middle, bottom - 26, right - left - 24, _HEIGHT)
        + _text(base, middle, bottom - 26)
    )


def _short(name: str) -> str:
    """Return the name of a part without the name of the package of its wing."""
    return name.rpartition(".")[2]


def _centre(part: str) -> tuple[int, float]:
    row, x = PARTS[part].place
    return x, _TOP + row * _PITCH + _HEIGHT / 2


def _box(name: str, x: float, y: float) -> str:
    return _rectangle(x, y, _WIDTH, _HEIGHT) + _text(_short(name), x, y)


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" '
        'rx="5" fill="currentColor" fill-opacity="0.07" stroke="currentColor" '
        'stroke-opacity="0.6"/>'
    )


def _text(text: str, x: float, y: float) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" dominant-baseline="central"'
        f' fill="currentColor" xml:space="preserve">{text}</text>'
    )


def _edge(user: str, used: str, edges: list[tuple[str, str]]) -> str:
    """Draw an arrow: straight down to the row above the imported part, then to the top of its
    box."""
    below = PARTS[user].place[0] + 1  # the arrow to a lower row begins with a straight line
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
    """Return the distance of the end of an arrow from the middle of a box with ``count`` arrows."""
    return (number - (count - 1) / 2) * 22
