"""The small library of C for WebAssembly, and its linker."""

from __future__ import annotations

import ctypes
import math
import random
import shutil
import subprocess
import sys
from decimal import Decimal, localcontext

import pytest

from relax_grad.static import webassembly

COMPILER = shutil.which("cc") or shutil.which("gcc")
INFINITY = math.inf


@pytest.fixture(scope="module")
def power(tmp_path_factory):
    """Return the function pow of pow.c, compiled for this machine."""
    if COMPILER is None:
        pytest.skip("needs a C compiler, cc or gcc")
    library = tmp_path_factory.mktemp("pow") / "pow.so"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-ffp-contract=off"]
    command = [COMPILER, *flags, "-I", webassembly.SOURCES / "include", "-Dpow=own_pow", "-fPIC"]
    source = webassembly.SOURCES / "pow.c"
    subprocess.run([*command, "-shared", source, "-o", library], check=True)
    function = ctypes.CDLL(str(library)).own_pow
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    return function


def test_powers_are_rounded_correctly(power):
    draw = random.Random(0)
    cases = [(0.9, float(step)) for step in range(1, 200)]
    cases += [(0.999, float(step)) for step in range(1, 2000, 7)]
    for _ in range(400):
        cases.append((draw.random(), draw.uniform(-50, 50)))
        cases.append((math.exp(draw.uniform(-300, 300)), draw.uniform(-2, 2)))
        cases.append((math.exp(draw.uniform(-1e-3, 1e-3)), draw.uniform(-1e5, 1e5)))
    with localcontext() as context:
        context.prec = 50
        for base, exponent in cases:
            wanted = float((Decimal(exponent) * Decimal(base).ln()).exp())
            assert power(base, exponent) == wanted, (base, exponent)


def test_powers_of_special_numbers(power):
    """Annex F of C99, section 9.4.4."""
    numbers = [0.0, 1.0, 2.0, 3.0, 0.5, 2.5, INFINITY, 5e-324, 2.0**53, 1e300]
    numbers += [-number for number in numbers]
    for base in numbers:
        for exponent in numbers:
            own = power(base, exponent)
            try:
                wanted = math.pow(base, exponent)
            except OverflowError:
                wanted = math.copysign(INFINITY, -1 if base < 0 and exponent % 2 == 1 else 1)
            except ValueError:  # a zero with a negative exponent, or no real result
                is_odd = exponent % 2 == 1
                wanted = math.nan if base else math.copysign(INFINITY, base if is_odd else 1.0)
            assert own == wanted or (math.isnan(own) and math.isnan(wanted)), (base, exponent)
            assert math.isnan(wanted) or math.copysign(1, own) == math.copysign(1, wanted)
    assert power(math.nan, 0.0) == power(1.0, math.nan) == 1
    assert math.isnan(power(math.nan, 1.0))
    assert math.isnan(power(2.0, math.nan))


def test_a_function_that_pages_lack_is_named(tmp_path):
    try:
        tools = webassembly.tools()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    source, kernels = tmp_path / "step.c", tmp_path / "kernels.o"
    flags = ["-c", "-x", "c", "-", "-o", str(kernels)]
    code = b"double lgamma(double); double sin(double);"
    code += b"double __attribute__((used)) kernel(double x) { return lgamma(sin(x)); }"
    subprocess.run([*tools.compile, *flags], input=code, check=True)
    names = [*(f"relax_grad_{name}" for name in webassembly._EXPORTS), "relax_grad_exported"]
    calls = "".join(f"double {name}(void) {{ return kernel(0); }}" for name in names)
    source.write_text(f"double kernel(double);{calls}")
    with pytest.raises(ValueError, match=r"kernels call lgamma, which a page does not have"):
        webassembly.linked(tools, [source], tmp_path, kernels)


def test_tools_that_are_missing_are_named_with_their_packages(tmp_path):
    for name, version, match in (
        ("gcc", "gcc 12", "must be a clang, but .*gcc is another compiler"),
        ("clang", "clang version 16", "the linker wasm-ld of .*clang is not installed"),
    ):
        script = tmp_path / name
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo wasm-ld-0\n'
        )
        script.chmod(0o755)
        with pytest.raises((FileNotFoundError, ValueError), match=match) as error:
            webassembly.tools(script)
        assert "apt-get install clang lld" in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"clang-0 is not installed; .*install clang lld"):
        webassembly.tools("clang-0")


def test_zig_is_taken_where_clang_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(webassembly.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"^clang is not .*\(pip install ziglang\)"):
        webassembly.tools()
    with pytest.raises(FileNotFoundError, match=r"^zig is not installed; "):
        webassembly.tools("zig")
    monkeypatch.setattr(webassembly.importlib.util, "find_spec", lambda name: name)
    of_pip = (sys.executable, "-m", "ziglang")
    for found in (webassembly.tools(), webassembly.tools("zig")):
        assert found.link == (*of_pip, "wasm-ld")
        assert found.compile[:4] == (*of_pip, "cc")
    with pytest.raises(FileNotFoundError, match="zig is not installed; "):
        webassembly.tools(tmp_path / "zig")
    (tmp_path / "zig").touch(0o755)
    assert webassembly.tools().link == (str(tmp_path / "zig"), "wasm-ld")
    assert webassembly.tools(tmp_path / "zig") == webassembly.tools()


def test_a_compiler_that_fails_is_an_error(tmp_path):
    tools = webassembly.Tools(("false",), ("false",))
    with pytest.raises(RuntimeError, match=r"false cannot make step\.wasm"):
        webassembly.linked(tools, [tmp_path / "a.c"], tmp_path, tmp_path / "kernels.o")
