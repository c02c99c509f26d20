"""The folder ``tests/`` mirrors ``relax_grad/``."""

from __future__ import annotations

import ast
from pathlib import Path

import mirror
import pytest

TESTS = mirror.ROOT / "tests"
FILES = mirror.layers.modules()
MODULES = [name for name, path in FILES.items() if not mirror.reexports_only(path)]
#: The modules that have no test file of their name.
TABLED = [name for name in MODULES if not mirror.own_test_file(name).exists()]

#: The folders of tests of other subjects than a folder of the package.
OTHER_FOLDERS = {
    "arm": "programs on AArch64",
    "benchmarks": "the programs of benchmarks/",
    "examples": "the programs of examples/",
    "gpu": "schedules for GPUs of all legalizations",
    "support": "shared by the tests",
}

#: The tests of the whole package, or of the repository. Other files at the top have the names of
#: modules.
OF_THE_WHOLE = {
    *("test_accuracy_page", "test_bad_input", "test_docs", "test_edges", "test_examples"),
    *("test_import", "test_install", "test_layers", "test_packaging", "test_pages_in_a_browser"),
    *("test_suite", "test_types", "test_upstream"),
    *("test_affected", "test_mirror", "test_mistakes", "test_mutants", "test_new_operator"),
    *("test_time_limit", "test_web_example", "test_words"),
}


def test_every_module_has_tests():
    without = [name for name in MODULES if not mirror.files_of(name)]
    assert without == [], (
        "add a test file of the name of the module, such as tests/cpu/test_target.py for "
        "cpu.target, or name the tests that exercise the module in the table of "
        "tests/support/mirror.py"
    )


def test_the_table_names_tests_that_exist():
    named = {file for files in mirror.TABLE.values() for file in files}
    assert {file for file in named if not (TESTS / file).exists()} == set()


def test_every_entry_of_the_table_counts():
    """Each pattern names a module without a test file of its name, and no earlier pattern takes all
    of them."""
    unused = sorted(set(mirror.TABLE) - {mirror.entry_of(name) for name in TABLED})
    assert unused == [], "remove them from the table of tests/support/mirror.py"


def test_folders_mirror_the_package():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    strange = {
        folder
        for folder in folders - {Path(".")}
        if not (mirror.ROOT / "relax_grad" / folder).is_dir() and str(folder) not in OTHER_FOLDERS
    }
    assert strange == set(), "tests stand in the folder of what they test, as in relax_grad/"


def test_files_at_the_top_test_a_module_or_the_whole():
    own = {mirror.own_test_file(name).stem for name in MODULES if "." not in name}
    files = {path.stem for path in TESTS.glob("test_*.py")}
    assert files - own - OF_THE_WHOLE == set(), "move them to the folder of what they test"
    assert OF_THE_WHOLE - files == set()


def test_conftest_names_tests_that_exist():
    tree = ast.parse((TESTS / "conftest.py").read_text(encoding="utf-8"))
    named = {
        node.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Constant) and str(node.value).endswith(("/", ".py"))
    }
    assert named
    assert {name for name in named if not (TESTS / name).exists()} == set()


def test_the_file_of_a_name_comes_before_the_table(tmp_path):
    (tmp_path / "tests/shop").mkdir(parents=True)
    (tmp_path / "tests/shop/test_till.py").touch()
    table = {"shop.till": ("test_a.py",), "shop._coins": ("test_b.py",), "shop.*": ("test_c.py",)}
    tests_of = {
        name: [path.relative_to(tmp_path / "tests").as_posix() for path in files]
        for name in ("shop.till", "shop._till", "shop._coins", "shop.door", "street")
        for files in [mirror.files_of(name, tmp_path, table)]
    }
    assert tests_of == {
        "shop.till": ["shop/test_till.py"],
        "shop._till": ["shop/test_till.py"],
        "shop._coins": ["test_b.py"],
        "shop.door": ["test_c.py"],
        "street": [],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ('"""A folder."""\nfrom .a import b\n__all__ = ["b"]\n', True),
        ("import a\nif a:\n    import b\n", False),
        ("from .a import b\nc = b()\n", False),
        ("def f(): ...\n", False),
    ],
)
def test_an_init_that_only_imports_needs_no_tests(tmp_path, text, expected):
    path = tmp_path / "__init__.py"
    path.write_text(text)
    assert mirror.reexports_only(path) == expected
    assert not mirror.reexports_only(path.rename(tmp_path / "a.py"))
