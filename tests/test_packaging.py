"""The package's metadata for pip, read from the installation and from the source tree."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import relax_grad
from relax_grad import cli
from relax_grad._packages import REQUIREMENTS, TESTED_TORCH
from relax_grad.ir.compat import TVM_RANGE, parse_version

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "tests/constraints.txt"


@pytest.fixture(scope="module")
def distribution():
    try:
        return metadata.distribution("relax_grad")
    except metadata.PackageNotFoundError:
        pytest.skip("relax_grad is imported from a source tree that is not installed")


@pytest.fixture(scope="module")
def requirements(distribution):
    """Return the requirements by extra ("" for none) and by distribution."""
    by_extra = {}
    for text in distribution.requires:
        requirement, _, marker = text.partition(";")
        name = re.match(r"[\w-]+", requirement).group()
        extra = re.search(r"extra == [\"'](\w+)[\"']", marker)
        by_extra.setdefault(extra[1] if extra else "", {})[name] = requirement[len(name) :].strip()
    return by_extra


def test_name_and_version(distribution):
    assert distribution.metadata["Name"].replace("-", "_") == "relax_grad"
    assert distribution.version == relax_grad.__version__
    assert distribution.metadata["Requires-Python"] == ">=3.10"


def test_license(distribution):
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    assert distribution.metadata.get_all("License-File") == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.rstrip().endswith("limitations under the License.")


def test_requirements_without_extras(requirements):
    assert sorted(requirements[""]) == ["apache-tvm", "apache-tvm-ffi", "numpy"]
    assert "<0.1.16" in requirements[""]["apache-tvm-ffi"]
    assert sorted(requirements[""]["numpy"].split(",")) == ["<3", ">=1.26"]


def test_extras(distribution, requirements):
    extras = {
        "bench",
        "cli",
        "distributed",
        "docs",
        "examples",
        "lint",
        "matrix",
        "mpi",
        "onnx",
        "onnxsim",
        "release",
        "safetensors",
        "test",
        "torch",
        "train",
        "zoo",
    }
    assert set(distribution.metadata.get_all("Provides-Extra")) == extras
    assert "torch" not in requirements["test"]
    of_packages = {name for by_name in requirements.values() for name in by_name}
    assert of_packages > REQUIREMENTS.keys()
    for by_name in requirements.values():
        for name in by_name.keys() & REQUIREMENTS.keys():
            # The metadata may have the bounds in another order.
            shown = REQUIREMENTS[name].removeprefix(name)
            assert sorted(by_name[name].split(",")) == sorted(shown.split(","))
    # The progress bars of the command line and of the examples use rich, and so do the tests of the
    # command line.
    for extra in ("cli", "test", "examples"):
        assert "rich" in requirements[extra]


def test_only_what_the_package_is_bound_to_is_closed_above(requirements):
    """A bound would take a newer release away from the user's other packages."""
    closed = set()
    for extra, by_name in requirements.items():
        assert all(">=" in versions for versions in by_name.values()), extra
        if extra != "lint":
            closed |= {name for name, versions in by_name.items() if "<" in versions}
    assert closed == {"apache-tvm", "apache-tvm-ffi", "numpy", "torch"}


def test_ci_has_a_bound_for_every_requirement(requirements):
    """An untested release must not break a run of CI."""
    lines = CONSTRAINTS.read_text().splitlines()
    bounds = {
        re.match(r"[\w-]+", line)[0]: line for line in lines if line and not line.startswith("#")
    }
    assert all(re.search(r"<|==", line) for line in bounds.values())
    names = {name for extra, by in requirements.items() if extra != "lint" for name in by}
    assert names - bounds.keys() == {"apache-tvm"}
    assert bounds.keys() <= names | {"torch"}


def test_console_script(distribution):
    (script,) = (e for e in distribution.entry_points if e.group == "console_scripts")
    assert script.name == "relax-grad"
    assert script.load() is cli.main


def test_the_readme_is_the_long_description(distribution):
    assert distribution.metadata["Description-Content-Type"] == "text/markdown"
    description = distribution.metadata.get_payload() or distribution.metadata["Description"]
    assert "relax-grad check" in description


def test_every_folder_of_modules_is_a_package():
    """find_packages omits a folder without an ``__init__.py``, so a wheel lacks the folder's
    modules."""
    folders = {path.parent for path in (ROOT / "relax_grad").rglob("*.py")}
    assert len(folders) > 5
    for folder in folders:
        assert (folder / "__init__.py").is_file(), folder


def test_types_are_marked():
    assert (ROOT / "relax_grad/py.typed").is_file()
    assert '"py.typed"' in (ROOT / "setup.py").read_text()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the folder of a wheel and a source distribution, built from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="the build needs setuptools 77")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    unbuilt = shutil.ignore_patterns("__pycache__")
    for name in ("relax_grad", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=unbuilt)
    files = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    for name in (*files, "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    program = (
        "from setuptools import build_meta as build\n"
        f"build.build_wheel({str(folder)!r}); build.build_sdist({str(folder)!r})"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return folder


def test_contents_of_the_wheel(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"relax_grad-{relax_grad.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {item.filename: item.file_size for item in archive.infolist()}
    package = {
        path.relative_to(ROOT).as_posix()
        for pattern in (
            "*.py",
            "py.typed",
            "*.cc",
            "*.c",
            "*.h",
            "*.mjs",
            "*.mts",
            "CMakeLists.txt",
        )
        for path in (ROOT / "relax_grad").rglob(pattern)
    }
    assert {name for name in files if ".dist-info/" not in name} == package
    assert "relax_grad/runtime/CMakeLists.txt" in package
    assert max(files.values()) < 100_000
    assert wheel.stat().st_size < 2_000_000


def test_links_of_the_description_work_on_pypi(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert "compiles models but cannot train them" in text
    assert re.findall(r"\]\((?!https://).*?\)|<!--|<img", text) == []


def test_links_of_the_description_lead_to_the_repository(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    page = "<!-- a -->\n[one](docs/a.md#b), [two\nwords](https://c.org)\n"
    assert description(page, "") == "one, [two\nwords](https://c.org)\n"
    assert description(page, "https://d") == (
        "[one](https://d/docs/a.md#b), [two\nwords](https://c.org)\n"
    )


def test_contents_of_the_source_distribution(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        files = {item.name.partition("/")[2]: item.size for item in sources if item.isfile()}
    top = {name.partition("/")[0] for name in files}
    assert top == {
        *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
        *("pyproject.toml", "relax_grad", "relax_grad.egg-info", "setup.cfg", "setup.py"),
    }
    assert "relax_grad/runtime/CMakeLists.txt" in files
    assert max(files.values()) < 100_000


def test_the_distributions_pass_the_check_of_twine(built):
    pytest.importorskip("twine", reason="twine is not installed: extra release")
    process = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_version_is_written_once():
    """Besides, only the changelog and its tests have versions of the package."""
    pattern = re.compile(rf"(?<![\d.]){re.escape(relax_grad.__version__)}(?![\d.]|[+-]?\w)")
    files = ["setup.py", "pyproject.toml", "CITATION.cff", "docs/conf.py", "README.md"]
    files += ["relax_grad/runtime/CMakeLists.txt"]
    for name in files:
        assert not pattern.search((ROOT / name).read_text()), name
    assert len(pattern.findall((ROOT / "relax_grad/__init__.py").read_text())) == 1


def test_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        commands = re.findall(r"run: (.+)$", text, re.MULTILINE)
        assert all(command.startswith("make ") for command in commands)
        called |= {command.split()[1] for command in commands}
        pythons = re.search(r"python: \[(.+)\]", text)[1]
        assert re.findall(r"[\d.]+", pythons) == re.findall(
            r"Programming Language :: Python :: (3\.\d+)", (ROOT / "setup.py").read_text()
        )
    assert called <= targets
    assert called >= {"lint", "test", "docs", "wheels"}


def test_files_of_the_repository_parse():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    forms = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    read = {path.name: yaml.safe_load(path.read_text()) for path in forms}
    assert read["CITATION.cff"]["license"] == "Apache-2.0"
    for name, form in read.items():
        if "body" in form:
            assert {"name", "description"} <= form.keys(), name
            assert all(item["type"] and item["attributes"]["label"] for item in form["body"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        (requirement,) = hook["additional_dependencies"]
        assert f'"{requirement}"' in (ROOT / "setup.py").read_text()


def test_the_changelog_names_the_version():
    """The newest section with a date is that of the version; a section of unreleased changes is
    above."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+)\](?: - (\S+))?$", text, re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    assert sections[1][0] == relax_grad.__version__
    versions = [parse_version(version) for version, _ in sections[1:]]
    assert versions == sorted(versions, reverse=True)
    dates = [date for _, date in sections[1:]]
    assert dates == sorted(dates, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)


def test_the_citation_refers_to_the_version():
    assert "relax_grad.__version__" in (ROOT / "CITATION.cff").read_text()


def test_the_torch_pin_is_the_same_everywhere():
    for file in (ROOT / "Makefile", CONSTRAINTS, ROOT / "noxfile.py"):
        assert set(re.findall(r"torch==([\d.]+\d)", file.read_text())) == {"2.13.0"}, file


def _matrix() -> dict[str, object]:
    """Return the constants of the noxfile with versions."""
    names = ("PYTHONS", "BUILDS", "TORCHES", "OLDEST")
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    return {
        node.targets[0].id: eval(ast.unparse(node.value), {})
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in names
    }


def test_the_matrix_covers_the_supported_versions():
    namespace = _matrix()
    versions = r"Programming Language :: Python :: (3\.\d+)"
    assert namespace["PYTHONS"] == re.findall(versions, (ROOT / "setup.py").read_text())
    low, high = TVM_RANGE
    supported = [parse_version(version) for version, _ in namespace["BUILDS"]]
    assert low == supported[0][:2]
    assert all(low <= version < high for version in supported)
    torches = [parse_version(version)[:2] for version in namespace["TORCHES"]]
    assert torches[0] == parse_version(REQUIREMENTS["torch"].partition(">=")[2])
    assert torches[-1] == TESTED_TORCH


def test_the_oldest_versions_are_the_floors(requirements):
    oldest = dict(pin.split("==") for pin in _matrix()["OLDEST"])
    floors = {
        name: re.search(r">=([\w.]+)", versions)[1]
        for extra in ("", "cli", "onnx", "train")
        for name, versions in requirements[extra].items()
    }
    assert oldest.keys() == floors.keys()
    for name, version in oldest.items():
        assert f"{version}.0".startswith(f"{floors[name]}."), name


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()
    try:
        result = subprocess.run(
            ["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("make is not installed")
    listed = re.findall(r"^  make ([\w-]+) ", result.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(phony)


def test_the_recipe_of_conda_has_the_requirements(requirements):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    names = {"tvm-py": "apache-tvm", "pytorch": "torch", "matplotlib-base": "matplotlib"}
    listed = recipe["requirements"]["run"] + recipe["requirements"]["run_constraints"]
    bounds = dict(line.split(" ") for line in listed if not line.startswith("python "))
    bounds = {names.get(name, name): set(bound.split(",")) for name, bound in bounds.items()}
    assert bounds == {
        name: set(versions.split(","))
        for extra in ("", "cli", "torch", "onnx", "safetensors", "train", "mpi")
        for name, versions in requirements[extra].items()
    }
    assert recipe["context"]["python_min"] == "3.10"
    assert recipe["build"]["python"]["entry_points"] == ["relax-grad = relax_grad.cli:main"]
