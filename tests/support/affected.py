"""The tests of what changed since a commit, nearest first:
``python tests/support/affected.py COMMIT``.

These are the changed test files, the tests of the changed modules and those of the modules that
import them, the tests of the changed documentation pages, and the test files that name another
changed file. ``tests/conftest.py`` and its plugins concern every test; the tests marked ``core``
stand for them.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import mirror

__all__ = ["affected_tests", "changed_files", "nearest_tests"]

#: The files of the metadata of the package, and the tests of its installation.
_METADATA = ("setup.py", "pyproject.toml")
_TESTS_OF_METADATA = ("test_packaging.py", "test_install.py")

#: A file in which every commit has a line.
_CHANGELOG = "CHANGELOG.md"

#: The tests of a documentation page, and of a page with Python blocks.
_PAGE_TESTS = ("test_no_code_goes_unrun",)
_CODE_TESTS = ("test_code_runs",)


def affected_tests(
    base: str, root: Path = mirror.ROOT, table: Mapping[str, tuple[str, ...]] = mirror.TABLE
) -> list[str]:
    """Return the tests that a change since a commit affects.

    Parameters
    ----------
    base : str
        The commit. What counts is the difference from its last common ancestor with ``HEAD``, with
        the files that are not committed yet.
    root : Path, optional
        The repository.
    table : Mapping[str, tuple[str, ...]], optional
        The tests of modules without a test file of their name, as in :mod:`mirror`.

    Returns
    -------
    tests : list[str]
        Test files and ids of tests for pytest, relative to the repository. Those nearest to the
        change come first, and of equally near ones those that more changed files affect.
    """
    project = _Project(root, table)
    nearest: dict[str, int] = {}
    times: Counter[str] = Counter()
    for path in changed_files(base, root):
        distances: dict[str, int] = {}
        for test, distance in project.tests_of(path):
            distances[test] = min(distance, distances.get(test, distance))
        times.update(distances.keys())
        for test, distance in distances.items():
            nearest[test] = min(distance, nearest.get(test, distance))
    tests = (test for test in nearest if "::" not in test or test.split("::")[0] not in nearest)
    return sorted(tests, key=lambda test: (nearest[test], -times[test], test))


def nearest_tests(
    path: str, root: Path = mirror.ROOT, table: Mapping[str, tuple[str, ...]] = mirror.TABLE
) -> list[str]:
    """Return the tests that a change of one file affects, nearest first."""
    nearest: dict[str, int] = {}
    for test, distance in _Project(root, table).tests_of(path):
        nearest[test] = min(distance, nearest.get(test, distance))
    return sorted(nearest, key=lambda test: (nearest[test], test))


def changed_files(base: str, root: Path = mirror.ROOT) -> list[str]:
    """Return the files that changed since a commit: also deleted, uncommitted and untracked
    ones."""
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", "--merge-base", base, "--")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*changed, *untracked})


def _git(root: Path, *command: str) -> list[str]:
    """Return the file names that a command of git prints."""
    process = subprocess.run(
        ["git", "-C", root, *command], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise ValueError(f"git {' '.join(command)}: {process.stderr.strip()}")
    return list(filter(None, process.stdout.split("\0")))


class _Project:
    """The test files of a repository and what each of them tests."""

    def __init__(self, root: Path, table: Mapping[str, tuple[str, ...]]):
        self.root = root
        self.package = root / "relax_grad"
        self.tests = root / "tests"
        self.support = self.tests / "support"
        self.table = table

    def tests_of(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the tests that a changed file affects, and their distances."""
        path = self.root / name
        folder, *_ = Path(name).parts
        if name == _CHANGELOG:
            return
        if name in _METADATA:
            yield from self._existing(0, *(self.tests / file for file in _TESTS_OF_METADATA))
        elif self.package in path.parents:
            yield from self._of_module(self._module(path))
        elif self.tests in path.parents and path.name.startswith(("test_", "conftest.")):
            yield from self._of_test_file(path)
        elif self.tests in path.parents:
            yield from self._of_helper(path)
        elif path.suffix == ".md" and path.parent in (self.root, self.root / "docs"):
            yield from self._of_page(path)
        else:
            yield from self._naming(path, 0)
            if folder in ("examples", "benchmarks"):
                yield from self._existing(1, *sorted(self.tests.glob(f"{folder}/**/test_*.py")))
            elif folder == "docs" and path.suffix == ".py":
                yield from self._existing(1, self.tests / "test_docs.py")

    def _existing(self, distance: int, *paths: Path) -> Iterator[tuple[str, int]]:
        for path in paths:
            if path.exists():
                yield path.relative_to(self.root).as_posix(), distance

    # Modules of the package.

    def _module(self, path: Path) -> str:
        """Return the module of a file of the package; of other files than Python's, the package
        around it."""
        names = path.relative_to(self.package).with_suffix("").parts
        of_package = path.suffix != ".py" or path.name == "__init__.py"
        return ".".join(names[:-1] if of_package else names)

    @cached_property
    def _importers(self) -> dict[str, set[str]]:
        """The modules that import each module."""
        importers: dict[str, set[str]] = {}
        for edge in mirror.layers.imports(self.package):
            importers.setdefault(edge.imported, set()).add(edge.module)
        return importers

    def _of_module(self, module: str, distance: int = 0) -> Iterator[tuple[str, int]]:
        """Yield the tests of a module, and those of its importers.

        An ``__init__`` that only imports names stands for its own importers, besides that of the
        whole package.
        """
        files = mirror.files_of(module, self.root, self.table)
        yield from self._existing(distance, *files)
        for importer in self._importers.get(module, ()):
            files = mirror.files_of(importer, self.root, self.table)
            yield from self._existing(distance + 1, *files)
            path = self.package.joinpath(*importer.split("."), "__init__.py")
            if importer and path.exists() and mirror.reexports_only(path):
                yield from self._of_module(importer, distance + 1)

    # Files of tests/.

    @cached_property
    def _texts(self) -> dict[Path, str]:
        """The text of each Python file of ``tests/``, and of sources beside them."""
        suffixes = (".py", ".cc", ".h")
        files = (path for path in sorted(self.tests.rglob("*")) if path.suffix in suffixes)
        return {path: path.read_text(encoding="utf-8") for path in files}

    @cached_property
    def _imported(self) -> dict[Path, set[Path]]:
        """The files of ``tests/`` that each Python file there imports."""
        return {
            path: {file for node in ast.walk(ast.parse(text)) for file in self._imports(node, path)}
            for path, text in self._texts.items()
            if path.suffix == ".py"
        }

    def _imports(self, node: ast.AST, user: Path) -> Iterator[Path]:
        """Yield the files that a statement imports, relative ones and those of
        ``tests/support/``."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._files_of(self.support, alias.name)
        elif isinstance(node, ast.ImportFrom):
            folder = user.parents[node.level - 1] if node.level else self.support
            for alias in node.names:
                yield from self._files_of(folder, f"{node.module or ''}.{alias.name}".lstrip("."))

    def _files_of(self, folder: Path, name: str) -> Iterator[Path]:
        """Yield the files that the import of a name loads from a folder: of ``a.b``, the packages
        or modules ``a`` and ``a.b``."""
        place = folder
        for part in name.split("."):
            yield place.joinpath(f"{part}.py")
            place = place / part
            yield place / "__init__.py"

    def _users(self, path: Path) -> Iterator[Path]:
        """Yield the files of ``tests/`` that import or name a file; a file of a package is named
        with its folder."""
        is_in_package = (path.parent / "__init__.py").exists()
        name = f"{path.parent.name}/{path.name}" if is_in_package else path.name
        named = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        for user, text in self._texts.items():
            if user != path and (path in self._imported.get(user, ()) or named.search(text)):
                yield user

    def _of_helper(self, changed: Path) -> Iterator[tuple[str, int]]:
        """Yield the tests that use a file, directly or through other files of ``tests/``."""
        distances, queue = {changed: 0}, [changed]
        for path in queue:
            for user in self._users(path):
                if user not in distances:
                    distances[user] = distances[path] + 1
                    if not user.name.startswith("test_"):
                        queue.append(user)
                    yield from self._of_test_file(user, distances[user])

    def _of_test_file(self, path: Path, distance: int = 0) -> Iterator[tuple[str, int]]:
        """Yield a test file, or the tests that use a ``conftest.py``."""
        if path.name.startswith("test_"):
            yield from self._existing(distance, path)
        elif path.name == "conftest.py" and path.parent != self.tests:
            yield from self._existing(distance, *sorted(path.parent.rglob("test_*.py")))

    def _naming(self, path: Path, distance: int) -> Iterator[tuple[str, int]]:
        """Yield the test files that name a file, directly or through other files of ``tests/``."""
        for test, further in self._of_helper(path):
            yield test, distance + further - 1

    # Pages.

    def _of_page(self, page: Path) -> Iterator[tuple[str, int]]:
        """Yield the tests of a documentation page, and the test files that name it."""
        tests = self.tests / "test_docs.py"
        if tests.exists() and page.exists():
            has_code = re.search(r"^```python$", page.read_text(encoding="utf-8"), re.MULTILINE)
            if page.parent != self.root or page.name == "README.md":
                for test in (*_PAGE_TESTS, *(_CODE_TESTS if has_code else ())):
                    yield f"{tests.relative_to(self.root).as_posix()}::{test}[{page.name}]", 0
        for test, distance in self._naming(page, 1):
            if test != tests.relative_to(self.root).as_posix():
                yield test, distance


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tests that a change affects.")
    parser.add_argument("base", metavar="COMMIT", help="what changed since this commit")
    try:
        tests = affected_tests(parser.parse_args().base)
    except ValueError as error:
        sys.exit(str(error))
    for test in tests:
        print(test)


if __name__ == "__main__":
    main()
