"""The accepted versions of TVM, and the messages for other versions."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tvm_ffi
from processes import without_torch
from tvm import tirx

from relax_grad.ir import compat
from relax_grad.ir.compat import FFI_END, TVM_RANGE, check_versions, parse_version

ROOT = Path(__file__).parents[2]
GOOD_FFI = "0.1.14.post1"


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.27.0", (0, 27, 0)),
        ("0.27", (0, 27)),
        ("0.27.0.post1", (0, 27, 0)),
        ("0.27.0rc2", (0, 27, 0)),
        ("0.28.dev0", (0, 28)),
        ("0.27.0.dev512+gdeadbeef9", (0, 27, 0)),
        ("0.27.0+cu130", (0, 27, 0)),
        ("v0.26.0", (0, 26, 0)),
        ("0.100.3", (0, 100, 3)),
    ],
)
def test_parse_version(text, release):
    assert parse_version(text) == release


@pytest.mark.parametrize("text", ["", "unknown", "dev", ".1"])
def test_malformed_versions_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"not a version: {text!r}")):
        parse_version(text)


@pytest.mark.parametrize(
    "version", ["0.26", "0.26.0", "0.26.3", "0.27.0", "0.27.0.post1", "0.27.9+local"]
)
@pytest.mark.parametrize("ffi", ["0.1.14.post0", GOOD_FFI, "0.1.15", "0.1.15.post2", None])
def test_supported_versions_pass_in_silence(version, ffi):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions(version, ffi)


@pytest.mark.parametrize(
    "version", ["0.9.0", "0.25.0", "0.25.9.post1", "0.28.0", "0.28.0.dev0", "0.100", "1.0"]
)
def test_unsupported_tvm_is_refused(version):
    with pytest.raises(ImportError) as caught:
        check_versions(version, GOOD_FFI)
    message = str(caught.value)
    assert f"apache-tvm {version} is installed" in message
    assert "needs apache-tvm >=0.26,<0.28" in message
    assert "pip install 'apache-tvm>=0.26,<0.28'" in message


@pytest.mark.parametrize("ffi", ["0.1.16", "0.1.16rc0", "0.1.17.post2", "0.2.0", "1.0"])
def test_ffi_that_was_not_tested_is_warned_of_with_the_remedy(ffi):
    with pytest.warns(RuntimeWarning, match=r"was not tested with apache-tvm 0\.27\.0") as caught:
        check_versions("0.27.0", ffi)
    (warning,) = caught
    assert f"apache-tvm-ffi {ffi} " in str(warning.message)
    assert "pip install 'apache-tvm-ffi>=0.1.14.post0,<0.1.16'" in str(warning.message)


def test_the_ranges_are_those_of_the_package_metadata():
    """The version ranges for pip and for the import check must agree."""
    setup = (ROOT / "setup.py").read_text()
    low, high = (".".join(map(str, release)) for release in TVM_RANGE)
    assert f'"apache-tvm>={low},<{high}"' in setup
    assert f',<{".".join(map(str, FFI_END))}"' in setup


def _run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        cwd=ROOT,
        env=without_torch(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_import_under_an_unsupported_tvm():
    result = _run("import tvm; tvm.__version__ = '0.25.0'; import relax_grad")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: relax_grad needs apache-tvm >=0.26,<0.28")
    assert "apache-tvm 0.25.0 is installed" in last


def test_import_without_tvm():
    result = _run("import sys; sys.modules['tvm'] = None; import relax_grad")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: relax_grad extends Apache TVM")
    assert "pip install 'apache-tvm>=0.26,<0.28'" in last


def test_import_warns_once_at_the_line_that_imports():
    result = _run(
        """
from importlib import metadata
installed = metadata.version
metadata.version = lambda name: "0.1.16" if name == "apache-tvm-ffi" else installed(name)
import relax_grad
import relax_grad.testing, relax_grad.cli, relax_grad.ir.compat
"""
    )
    assert result.returncode == 0, result.stderr
    warned = [line for line in result.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(warned) == 1, result.stderr
    assert "apache-tvm-ffi 0.1.16 was not tested" in warned[0]
    assert warned[0].startswith("<string>:5:")


@pytest.mark.parametrize("order", ["pre", "post"])
def test_structures_are_visited_as_by_tvm_ffi(order):
    x = tirx.Var("x", "int64")
    expr = tirx.Cast("float32", x * 2 + 1) * tirx.exp(tirx.Cast("float32", x))
    # Without tvm_ffi's checks of rules, which take longer than the visit.
    assert compat.structural_walk is not tvm_ffi.structural_walk
    assert compat.structural_map is not tvm_ffi.structural_map
    visits = []
    for walk in (compat.structural_walk, tvm_ffi.structural_walk):
        visits.append([])
        seen = lambda node, into=visits[-1]: into.append(type(node))  # noqa: E731
        walk(expr, [((tirx.Cast, tirx.Mul), seen), (tirx.Var, seen)], order=order)
    assert visits[0] == visits[1]
    assert len(visits[0]) == 6
    rules = [(tirx.Var, lambda var: tirx.Var("y", var.ty.dtype))]
    made, wanted = (
        each.structural_map(expr, rules, order=order).script() for each in (compat, tvm_ffi)
    )
    assert made == wanted
    assert "y" in made
