"""The tests of each module of the package: ``tests/`` mirrors ``relax_grad/``, and a table names the tests of the others.

The module ``relax_grad/a/b.py`` or ``relax_grad/a/_b.py`` is tested by ``tests/a/test_b.py``. ``tests/test_mirror.py``
checks the table.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("layers", ROOT / "docs/_ext/layers.py")
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)

#: The tests of modules without a test file of their name: patterns of names of modules, and test files in ``tests/``.
#: The first pattern that matches counts.
TABLE: dict[str, tuple[str, ...]] = {
    "testing.samples.*": ("testing/test_samples.py",),
}


def own_test_file(module: str, root: Path = ROOT) -> Path:
    """Return the test file of a module by its name, whether it exists or not."""
    *folders, name = module.split(".")
    return root.joinpath("tests", *folders, f"test_{name.strip('_')}.py")


def entry_of(module: str, table: Mapping[str, tuple[str, ...]] = TABLE) -> str | None:
    """Return the pattern of the table that names the tests of a module, or None."""
    return next((pattern for pattern in table if fnmatchcase(module, pattern)), None)


def files_of(
    module: str, root: Path = ROOT, table: Mapping[str, tuple[str, ...]] = TABLE
) -> list[Path]:
    """Return the test files of a module of the package: that of its name, or those of the table."""
    own = own_test_file(module, root)
    if own.exists():
        return [own]
    return [root / "tests" / file for file in table.get(entry_of(module, table), ())]


def reexports_only(path: Path) -> bool:
    """Tell whether a file is an ``__init__`` that only imports names, and so has no tests of its own."""
    if path.name != "__init__.py":
        return False
    statements = ast.parse(path.read_text(encoding="utf-8")).body
    return all(
        isinstance(each, (ast.Import, ast.ImportFrom))
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        or (isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__")
        for each in statements
    )
