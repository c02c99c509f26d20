"""The package's parts import each other one way only, as the architecture page says."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter

import pytest
from mirror import layers


@functools.cache
def imports() -> list[layers.Import]:
    """Return the imports in the package. Reading them takes too long for the collection of
    tests."""
    return list(layers.imports())


def between() -> list[layers.Import]:
    """Return the imports of one part by another."""
    return [edge for edge in imports() if edge.parts[0] != edge.parts[1]]


def names(node: ast.AST) -> list[str]:
    """Return the full names of a statement's absolute imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


#: The parts that every other part may import. The base parts of a wing serve that wing only.
BASES = {"": [*layers.BASE], **{wing.title: [*wing.base] for wing in layers.WINGS}}

PARTS = [*layers.PARTS, *(name for base in BASES.values() for name in base)]


def test_imports_are_read(tmp_path):
    package = tmp_path / "shop"
    (package / "till").mkdir(parents=True)
    (package / "till/__init__.py").write_text("from . import coins\nfrom ..goods import price\n")
    (package / "till/coins.py").write_text(
        "import shop.goods\n"
        "import os\n"
        "def f():\n"
        "    from .. import till\n"
        "    from ..goods import price\n"
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
    assert {layers.part_of(module) for module in layers.modules()} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_only_allowed_imports(part):
    for edge in between():
        user, used = edge.parts
        if user == part:
            reason = f"{edge.module or 'relax_grad'} imports {edge.imported or 'relax_grad'}"
            assert used in layers.allowed(part), (
                f"{reason}; docs/_ext/layers.py lists the parts that {part or 'relax_grad'} may "
                "import"
            )


def test_no_file_imports_itself_through_others():
    """The test counts imports inside functions too: a cycle of files has no bottom from which to
    read it."""
    graph: dict[str, set[str]] = {}
    for edge in imports():
        graph.setdefault(edge.module, set()).add(edge.imported)
    graph["cli"].discard("")  # the commands import the public names, as users do
    graph.setdefault("cli", set())
    TopologicalSorter(graph).prepare()


def test_no_part_imports_private_modules_of_another():
    for edge in between():
        room = edge.imported.removeprefix(edge.parts[1]).lstrip(".")
        private = [name for name in room.split(".") if name.startswith("_")]
        assert not private, f"{edge.module} imports {edge.imported}: give the module a public name"


def test_wings_share_only_operators_and_definitions():
    """One wing uses only the named operators and the definitions in topi of the other wing."""
    parts = {
        edge.parts
        for edge in between()
        if (user := layers.wing_of(edge.parts[0])) and (used := layers.wing_of(edge.parts[1]))
        if user is not used
    }
    assert {used for _, used in parts} == {"op", "topi"}
    assert {layers.wing_of(user).title for user, _ in parts} == {"cpu"}


def test_imports_go_down_in_the_figure():
    for edge in between():
        user, used = (layers.PARTS.get(part) for part in edge.parts)
        if user and used and "" not in edge.parts:
            assert used.place[0] > user.place[0], edge


def test_allowed_imports_are_used():
    """Every import that the lists allow is in use. Unused entries must be removed."""
    used = {edge.parts for edge in between()}
    assert {(name, to) for name, part in layers.PARTS.items() for to in part.imports} <= used


#: The rooms of packages that are passed once, from the top. A room may import only rooms of later
#: strings.
ROOMS = {
    "frontend.torch": ("run", "model", "_build", "_importer", "export", "tracing", "inputs"),
    "frontend.onnx": (
        *("model", "_convert _write", "_importer"),
        *("graph", "operators", "extents", "read"),
    ),
    "cpu.kernel": ("attention conv movement recurrent reduction", "matmul", "language"),
}


def between_rooms(package: str) -> list[tuple[list[str], list[str]]]:
    """Return the imports of rooms of a package by other rooms, as names relative to the package."""
    pairs = []
    for edge in imports():
        names = [edge.module, edge.imported]
        if all(name.startswith(f"{package}.") for name in names):
            user, used = (name.removeprefix(f"{package}.").split(".") for name in names)
            if user[0] != used[0]:
                pairs.append((user, used))
    return pairs


@pytest.mark.parametrize("package", ROOMS)
def test_the_rooms_of_a_package_are_passed_once(package):
    floors = {room: floor for floor, rooms in enumerate(ROOMS[package]) for room in rooms.split()}
    for user, used in between_rooms(package):
        if {user[0], used[0]} <= floors.keys():
            assert floors[user[0]] < floors[used[0]], (user, used)


@pytest.mark.parametrize("package", ["cpu.kernel", "cpu.passes", "frontend.onnx"])
def test_no_room_imports_private_modules_of_another(package):
    for user, used in between_rooms(package):
        private = [name for name in used[1:] if name.startswith("_")]
        assert not private, f"{user} imports {used}: give the module a public name"


@pytest.mark.parametrize("part", ["topi", "cpu.kernel"])
def test_relax_stays_out_of(part):
    for module, path in layers.modules().items():
        if layers.part_of(module) == part:
            names_of = {
                name for node in ast.walk(ast.parse(path.read_text())) for name in names(node)
            }
            assert not {name for name in names_of if name.startswith("tvm.relax")}, module


def test_the_figure_shows_every_part():
    drawn = layers.figure()
    for name in filter(None, PARTS):
        short = name.rpartition(".")[2]
        assert any(
            f"{before}{short}{after}" in drawn for before in (">", "   ") for after in ("<", "   ")
        )
    arrows = {edge.parts for edge in between() if set(edge.parts) <= set(layers.PARTS)}
    assert drawn.count("marker-end") == sum("" not in arrow for arrow in arrows)
