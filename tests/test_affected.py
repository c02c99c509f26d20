"""The tests that a change affects, on a small repository."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import mirror
import pytest
from affected import affected_tests, changed_files

#: A shop: ``till`` imports ``_coins`` and, through the names of ``goods``, ``goods.price``.
FILES = {
    "relax_grad/__init__.py": "",
    "relax_grad/_coins.py": "",
    "relax_grad/till.py": "from . import _coins\nfrom .goods import total\n",
    "relax_grad/street.py": "from . import till\n",
    "relax_grad/goods/__init__.py": "from .price import total\n__all__ = ['total']\n",
    "relax_grad/goods/price.py": "def total(): ...\n",
    "relax_grad/goods/scales/__init__.py": "",
    "relax_grad/goods/scales/weigh.cc": "",
    "tests/conftest.py": "pytest_plugins = ['clock']\n",
    "tests/test_coins.py": "",
    "tests/test_docs.py": "PAGE = 'docs/wares.md'\n",
    "tests/test_install.py": "",
    "tests/test_packaging.py": "",
    "tests/test_prices.py": "from customers import pay\n",
    "tests/test_till.py": "import purses\nPROGRAM = 'shopping.cc'\n",
    "tests/test_wares_page.py": "PAGE = 'docs/wares.md'\n",
    "tests/shopping.cc": "",
    "tests/examples/test_buy.py": "NAME = 'sell.py'\n",
    "tests/examples/test_lend.py": "",
    "tests/market/conftest.py": "import purses\n",
    "tests/market/deep/test_stall.py": "",
    "tests/bakery/test_bread.py": "from ._oven import heat\n",
    "tests/bakery/_oven.py": "import fuel.coal\n",
    "tests/support/clock.py": "",
    "tests/support/customers.py": "import purses\n",
    "tests/support/purses.py": "SCRIPT = 'leather.py'\n",
    "tests/support/leather.py": "",
    "tests/support/fuel/__init__.py": "",
    "tests/support/fuel/coal.py": "from . import mine\n",
    "tests/support/fuel/mine.py": "",
    "tests/support/fuel/oil.py": "",
    "docs/_ext/shelf.py": "",
    "docs/goods.md": "A page.\n```python\n1 + 1\n```\n",
    "docs/wares.md": "A page.\n",
    "examples/sell.py": "",
    "setup.py": "",
    "CHANGELOG.md": "",
    "README.md": "```python\n```\n",
    "notes/unnamed.txt": "",
}

#: The tests of modules without a test file of their name.
TABLE = {"goods.*": ("test_prices.py",), "street": ("test_coins.py", "market/deep/test_stall.py")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("shop")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    commit(root)
    return root


@pytest.fixture
def shop(repository):
    """Yield the repository, which is as committed first."""
    first = git(repository, "rev-list", "--max-parents=0", "HEAD").strip()
    git(repository, "reset", "--hard", "--quiet", first)
    git(repository, "clean", "-d", "--force", "--quiet")
    return repository


def git(root: Path, *command: str) -> str:
    names = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    run = subprocess.run(["git", "-C", root, *names, *command], check=True, stdout=subprocess.PIPE)
    return run.stdout.decode()


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Change")


def change(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + "\n")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # A test file is itself.
        ("tests/market/deep/test_stall.py", ["tests/market/deep/test_stall.py"]),
        ("tests/test_new.py", ["tests/test_new.py"]),
        # A module: its tests, then those of its direct importers.
        ("relax_grad/_coins.py", ["tests/test_coins.py", "tests/test_till.py"]),
        (
            "relax_grad/till.py",
            ["tests/test_till.py", "tests/market/deep/test_stall.py", "tests/test_coins.py"],
        ),
        ("relax_grad/goods/price.py", ["tests/test_prices.py", "tests/test_till.py"]),
        ("relax_grad/goods/__init__.py", ["tests/test_till.py"]),
        ("relax_grad/goods/scales/weigh.cc", ["tests/test_prices.py"]),
        # What the tests share: the files that use it, also through others.
        (
            "tests/support/purses.py",
            ["tests/market/deep/test_stall.py", "tests/test_till.py", "tests/test_prices.py"],
        ),
        (
            "tests/support/leather.py",
            ["tests/market/deep/test_stall.py", "tests/test_till.py", "tests/test_prices.py"],
        ),
        ("tests/bakery/_oven.py", ["tests/bakery/test_bread.py"]),
        ("tests/support/fuel/__init__.py", ["tests/bakery/test_bread.py"]),
        ("tests/support/fuel/mine.py", ["tests/bakery/test_bread.py"]),
        ("tests/support/fuel/oil.py", []),
        ("tests/market/conftest.py", ["tests/market/deep/test_stall.py"]),
        ("tests/shopping.cc", ["tests/test_till.py"]),
        # The tests marked "core" stand for all tests.
        ("tests/conftest.py", []),
        ("tests/support/clock.py", []),
        # A page.
        (
            "docs/goods.md",
            [
                "tests/test_docs.py::test_code_runs[goods.md]",
                "tests/test_docs.py::test_no_code_goes_unrun[goods.md]",
            ],
        ),
        (
            "docs/wares.md",
            ["tests/test_docs.py::test_no_code_goes_unrun[wares.md]", "tests/test_wares_page.py"],
        ),
        (
            "README.md",
            [
                "tests/test_docs.py::test_code_runs[README.md]",
                "tests/test_docs.py::test_no_code_goes_unrun[README.md]",
            ],
        ),
        ("docs/_ext/shelf.py", ["tests/test_docs.py"]),
        ("CHANGELOG.md", []),
        # Others.
        ("examples/sell.py", ["tests/examples/test_buy.py", "tests/examples/test_lend.py"]),
        ("setup.py", ["tests/test_install.py", "tests/test_packaging.py"]),
        ("notes/unnamed.txt", []),
    ],
)
def test_tests_of_a_changed_file(shop, changed, expected):
    change(shop, changed)
    assert affected_tests("HEAD", shop, TABLE) == expected


def test_committed_and_other_changes_count(shop):
    base = git(shop, "rev-parse", "HEAD").strip()
    change(shop, "tests/test_coins.py")
    commit(shop)
    change(shop, "tests/test_till.py", "tests/test_a file.py")
    change(shop, "setup.py")
    git(shop, "add", "setup.py")
    assert changed_files(base, shop) == [
        *("setup.py", "tests/test_a file.py", "tests/test_coins.py", "tests/test_till.py"),
    ]


def test_changes_of_the_base_do_not_count(shop):
    git(shop, "checkout", "--quiet", "-B", "other")
    change(shop, "setup.py")
    commit(shop)
    git(shop, "checkout", "--quiet", "-B", "own", "HEAD~1")
    change(shop, "tests/test_coins.py")
    commit(shop)
    assert changed_files("other", shop) == ["tests/test_coins.py"]


def test_a_file_that_moved(shop):
    git(shop, "mv", "tests/test_coins.py", "tests/market/test_coins.py")
    git(shop, "rm", "--quiet", "docs/goods.md")
    assert changed_files("HEAD", shop) == [
        *("docs/goods.md", "tests/market/test_coins.py", "tests/test_coins.py"),
    ]
    assert affected_tests("HEAD", shop, TABLE) == ["tests/market/test_coins.py"]


def test_the_nearest_come_first(shop):
    """Of equally near tests, those come first that more of the changed files affect."""
    change(shop, "relax_grad/_coins.py", "tests/support/customers.py", "tests/support/leather.py")
    assert affected_tests("HEAD", shop, TABLE) == [
        "tests/test_coins.py",
        "tests/test_prices.py",
        "tests/test_till.py",
        "tests/market/deep/test_stall.py",
    ]


def test_a_file_stands_for_its_tests(shop):
    change(shop, "docs/goods.md", "tests/test_docs.py")
    assert affected_tests("HEAD", shop, TABLE) == ["tests/test_docs.py"]


def test_another_base_is_refused(shop):
    with pytest.raises(ValueError, match=r"git diff .*: fatal: .*'next'"):
        affected_tests("next", shop)


def test_tests_of_pages_have_these_names(shop):
    """With the id of a test that does not exist, pytest runs nothing."""
    change(shop, "docs/goods.md")
    ids = {test.split("::")[1].removesuffix("[goods.md]") for test in affected_tests("HEAD", shop)}
    tree = ast.parse((mirror.ROOT / "tests/test_docs.py").read_text(encoding="utf-8"))
    assert ids
    assert ids <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
