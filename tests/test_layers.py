"""The package's parts import each other one way only, as the page on the architecture says."""

from __future__ import annotations

import ast
import importlib.util
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "docs/_ext/layers.py"
_spec = importlib.util.spec_from_file_location("layers", SOURCE)
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)

IMPORTS = list(layers.imports())
BETWEEN = [each for each in IMPORTS if each.parts[0] != each.parts[1]]


def names(node: ast.AST) -> list[str]:
    """Return the full names that a statement imports, of those that do not begin with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def goes_up(user: str, used: str) -> bool:
    """Tell whether an import goes to a part that stands above."""
    order = [*layers.PARTS, *layers.BASE]
    return order.index(used) < order.index(user)


def test_imports_are_read(tmp_path):
    package = tmp_path / "shop"
    (package / "till").mkdir(parents=True)
    (package / "till/__init__.py").write_text("from . import coins\nfrom ..goods import price\n")
    (package / "till/coins.py").write_text(
        "import shop.goods\nimport os\ndef f():\n    from .. import till\n    from ..goods import price\n"
    )
    (package / "goods.py").write_text("def price(): ...\n")
    (package / "__init__.py").write_text("from .till.coins import *\n")
    assert set(layers.imports(package)) == {
        ("", "till.coins", False),
        ("till", "till.coins", False),
        ("till", "goods", False),
        ("till.coins", "goods", False),
        ("till.coins", "till", True),
        ("till.coins", "goods", True),
    }


def test_every_module_belongs_to_a_part():
    parts = {layers.part_of(module) for module in layers.modules()}
    assert parts == {*layers.PARTS, *layers.BASE}


@pytest.mark.parametrize("part", [*layers.PARTS, *layers.BASE])
def test_a_part_imports_what_it_may(part):
    allowed = {*layers.BASE, *(layers.PARTS[part].imports if part in layers.PARTS else ())}
    for each in BETWEEN:
        user, used = each.parts
        if user == part and not (each.in_function and each.parts in layers.UPWARD):
            reason = f"{each.module or 'relax_grad'} imports {each.imported or 'relax_grad'}"
            assert used in allowed, f"{reason}; docs/_ext/layers.py says what {part} may import"
            assert user in layers.PARTS or not goes_up(user, used), f"{reason}, which is above it"


def test_what_is_allowed_goes_down():
    for name, part in layers.PARTS.items():
        for used in part.imports:
            assert layers.PARTS[used].place[0] > part.place[0] or "" in (name, used)
    graph = {name: set(part.imports) for name, part in layers.PARTS.items()}
    TopologicalSorter(graph).prepare()  # raises where there is a cycle


def test_what_is_allowed_is_used():
    """What nobody imports any more is taken off the lists."""
    used = {each.parts for each in BETWEEN}
    allowed = {(name, to) for name, part in layers.PARTS.items() for to in part.imports}
    assert allowed <= used
    assert set(layers.UPWARD) <= {each.parts for each in BETWEEN if each.in_function}


@pytest.mark.parametrize("part", ["topi", "kernel"])
def test_relax_stays_out_of(part):
    for module, path in layers.modules().items():
        if layers.part_of(module) == part:
            found = {name for node in ast.walk(ast.parse(path.read_text())) for name in names(node)}
            assert not {name for name in found if name.startswith("tvm.relax")}, module


def test_the_figure_shows_every_part():
    drawn = layers.figure()
    for name in filter(None, (*layers.PARTS, *layers.BASE)):
        assert f">{name}<" in drawn or f"{name}   " in drawn or f"   {name}<" in drawn
    arrows = {each.parts for each in BETWEEN if set(each.parts) <= set(layers.PARTS)}
    assert drawn.count("marker-end") == sum("" not in arrow for arrow in arrows)
