"""Optional packages that are missing, broken, old or newer than tested."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from relax_grad import _packages
from relax_grad._packages import REQUIREMENTS, fault, is_usable, load, newer_torch

ROOT = Path(__file__).parents[1]
_numbers = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a package with a text and a version, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_packages, "REQUIREMENTS", dict(REQUIREMENTS))

    def make(text: str | None, version: str | None = "1.9") -> str:
        name = f"package_{next(_numbers)}"
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "__init__.py").write_text(text)
        if version is not None:
            data = tmp_path / f"{name}-{version}.dist-info"
            data.mkdir()
            (data / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        _packages.REQUIREMENTS[name] = f"{name}>=1.7,<3"
        importlib.invalidate_caches()
        return name

    return make


def test_a_missing_package(package):
    _packages.REQUIREMENTS["package_of_nobody"] = "package_of_nobody>=1.7"
    assert not is_usable("package_of_nobody")
    with pytest.raises(ImportError) as caught:
        load("package_of_nobody", "the picture")
    assert str(caught.value) == (
        "the picture needs package_of_nobody>=1.7: package_of_nobody is not installed; install "
        "it: pip install 'package_of_nobody>=1.7'"
    )
    assert caught.value.name == "package_of_nobody"


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("import package_of_nobody", "ModuleNotFoundError: No module", "install what it needs: "),
        ("raise OSError('libx.so.9: cannot open')", "OSError: libx.so.9", "install it again: "),
        ("from . import _C", "ImportError: cannot import name '_C'", "install it again: "),
        ("1 / 0", "ZeroDivisionError: division by zero", "install it again: "),
        ("raise RuntimeError", "RuntimeError: )", "install it again: "),
    ],
)
def test_a_package_that_is_not_imported(package, text, reason, remedy):
    name = package(text)
    symptom, shown = fault(name)
    assert symptom.startswith(f"{name} 1.9 is installed, but its import fails ({reason}")
    assert shown.startswith(f"{remedy}pip install ")
    assert shown.endswith(f"'{name}>=1.7,<3'")
    assert not is_usable(name)


def test_the_rest_of_a_removed_package(package):
    name = package(None, None)
    symptom, remedy = fault(name)
    assert f"only a folder without the package is left of {name} in " in symptom
    assert remedy.startswith("remove the folder, and install it: ")


@pytest.mark.parametrize("version", ["1.6", "0.9.9", "1.6.9+cpu", "1.6rc1"])
def test_an_old_package_is_refused(package, version):
    name = package("", version)
    with pytest.raises(ImportError) as caught:
        load(name, "the import")
    assert f"the import needs {name}>=1.7,<3: {name} {version} is installed" in str(caught.value)
    assert f"pip install --upgrade '{name}>=1.7,<3'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", "1.7"),
        ("", "2.9.1"),
        ("", "3.0"),
        ("", "unknown"),
        ("", None),
        ("__version__ = 2", None),
    ],
)
def test_newer_packages_and_those_without_a_version_are_taken(package, text, version):
    name = package(text, version)
    assert load(name, "the import").__name__ == name
    assert fault(name) is None


def test_a_release_of_pytorch_above_the_tested_one_is_remarked():
    tested = ".".join(map(str, _packages.TESTED_TORCH))
    for version in ("2.11.0", f"{tested}.0", f"{tested}.3+cpu", "unknown"):
        assert newer_torch(version) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _packages.warn_of_newer_torch(version, 1)
    with pytest.warns(RuntimeWarning) as caught:
        _packages.warn_of_newer_torch("3.0.1+cpu", 1)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"PyTorch 3.0.1+cpu is newer than {tested}, the newest tested")
    assert "\n" not in message
    assert warning.filename == __file__


def test_the_bound_of_pytorch_is_above_the_tested_release():
    high = re.fullmatch(r"torch>=2\.11,<(\d+)\.(\d+)", REQUIREMENTS["torch"])
    major, minor = _packages.TESTED_TORCH
    assert (int(high[1]), int(high[2])) in [(major, minor + 2), (major, minor + 3)]


def _run(tmp_path, torch: str, code: str) -> str:
    """Run code with a PyTorch of this text, and return the last line of the errors."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(torch)
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    return process.stderr.strip().splitlines()[-1]


#: PyTorch 2.15 refuses a second import, with an error that hides the cause.
_ONCE = """
import sys
if hasattr(sys, "tried"):
    raise ImportError("`torch` can only be initialized once per process")
sys.tried = True
"""


@pytest.mark.parametrize("before", ["", _ONCE])
def test_a_pytorch_without_its_libraries(tmp_path, before):
    """TVM goes without such a PyTorch, and so do the parts that do not need it."""
    code = """
from relax_grad import testing
from relax_grad.cli import _diagnosis
from relax_grad.testing.fuzz.checks import Settings
assert not Settings().torch
assert dict(_diagnosis.facts())["PyTorch"] == "cannot be used"
(problem,) = (each for each in _diagnosis.find_problems() if "torch" in each.symptom)
assert "libcudnn.so.9" in problem.symptom and "pip install" in problem.remedy
import relax_grad.frontend.torch
"""
    text = f"{before}raise ImportError('libcudnn.so.9: cannot open shared object file')"
    last = _run(tmp_path, text, code)
    assert last.startswith(
        f"ImportError: relax_grad.frontend.torch needs {REQUIREMENTS['torch']}: torch "
    )
    assert "its import fails (ImportError: libcudnn.so.9: cannot open shared object file)" in last


def test_a_pytorch_that_breaks_the_import_of_tvm(tmp_path):
    last = _run(tmp_path, "raise OSError('libtorch_cpu.so: file too short')", "import relax_grad")
    assert last.startswith("ImportError: TVM imports PyTorch, and torch ")
    assert "its import fails (OSError: libtorch_cpu.so: file too short); install it again" in last
