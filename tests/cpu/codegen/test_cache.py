"""The directory of compiled functions: hits, misses, and concurrent processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from activated_product import ARRAYS, module
from dispatched import HOST
from processes import run_python
from programs import to_numpy
from tvm import relax
from tvm.relax import op

import relax_grad
from relax_grad.cpu.codegen import compiler, lower
from relax_grad.cpu.codegen.cache import current, of_environment
from relax_grad.cpu.codegen.directory import Directory

#: The module, whose name in its package is the function's.
module_of_cache = sys.modules[relax_grad.cache.__module__]


@pytest.fixture
def directory(tmp_path):
    with relax_grad.cache(tmp_path / "functions"):
        yield tmp_path / "functions"


@pytest.fixture
def compiled(monkeypatch):
    """The names of the functions that are compiled after this point."""
    names = []
    made = lower.object_file

    def object_file(functions, *options):
        names.extend(functions)
        return made(functions, *options)

    monkeypatch.setattr(compiler, "object_file", object_file)
    return names


def run(mod, target=HOST):
    executable = tvm.compile(mod, target, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return to_numpy(machine["main"](*map(tvm.runtime.tensor, ARRAYS)))


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.o"))


def test_a_second_time_nothing_is_compiled(directory, compiled):
    wanted = run(module())
    count = len(compiled)
    assert count > 1
    assert len(entries(directory)) == count
    np.testing.assert_array_equal(run(module()), wanted)
    assert len(compiled) == count


def test_another_module_shares_functions(directory, compiled):
    run(module())
    assert "matmul_kernel" in compiled
    compiled.clear()
    run(module(op.nn.relu))
    assert compiled
    assert "matmul_kernel" not in compiled


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other"])
def test_damaged_entries_are_compiled_again(directory, compiled, damage):
    wanted = run(module())
    count = len(compiled)
    for path in entries(directory):
        data = path.read_bytes()
        changes = {
            "cut": data[: len(data) // 2],
            "changed": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
            "empty": b"",
            "other": b"something else",
        }
        path.write_bytes(changes[damage])
    np.testing.assert_array_equal(run(module()), wanted)
    assert len(compiled) == 2 * count
    run(module())
    assert len(compiled) == 2 * count


def test_entries_that_are_no_objects_are_compiled_again(directory, compiled):
    wanted = run(module())
    count = len(compiled)
    stored = Directory(directory)
    for path in entries(directory):
        stored.store(path.parent.name + path.stem, b"no object file")
    np.testing.assert_array_equal(run(module()), wanted)
    assert len(compiled) == 2 * count


def test_keys_know_target_and_options(directory, compiled):
    """Another processor, optimization level or pass option makes another function."""
    run(module())
    count = len(compiled)
    run(module(), tvm.target.Target({**dict(HOST.export()), "opt-level": 1}))
    assert len(compiled) == 2 * count
    with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
        run(module())
    assert len(compiled) == 3 * count


def functions_of(mod):
    with HOST:
        functions = relax_grad.pipeline()(mod).functions.values()
    return [f.without_attr("global_symbol") for f in functions if isinstance(f, tvm.tirx.PrimFunc)]


def test_keys_know_the_function_and_its_name():
    prims = [*functions_of(module()), *functions_of(module(op.nn.relu))]
    environment, contents = lower.environment(HOST), list(map(lower.content, prims))
    keys = [lower.key({"f": content}, environment) for content in contents]
    for i, function in enumerate(prims):
        for j, other in enumerate(prims[:i]):
            assert keys[i] != keys[j] or tvm_ffi.structural_equal(function, other)
    assert len({*keys}) < len(prims)  # both modules contain the product
    first, second = contents[:2]
    assert lower.key({"f": first}, environment) != lower.key({"g": first}, environment)
    assert lower.key({"f": first, "g": second}, environment) != keys[0]
    assert lower.key({"f": first}, [*environment, "more"]) != keys[0]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("add12", "add"), ("conv2d_kernel3", "conv2d_kernel"), ("fused_add1_log2", "fused_add_log")],
)
def test_names_without_numbers(name, wanted):
    assert lower.canonical_name(name) == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
def test_two_processes_at_once(tmp_path):
    """Both processes get the same numbers, whichever writes first, and a third process compiles
    nothing."""
    script = f"""
import os, sys, traceback
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import test_cache, relax_grad
from relax_grad.cpu.codegen import compiler
relax_grad.cache({str(tmp_path)!r})

def started(name):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with open({str(tmp_path)!r} + "/result." + name, "wb") as file:
            file.write(test_cache.run(test_cache.module()).tobytes())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

for process in [started("first"), started("second")]:
    assert os.waitpid(process, 0)[1] == 0
compiler.object_file = None
assert os.waitpid(started("third"), 0)[1] == 0
"""
    run_python(script)
    wanted = run(module()).tobytes()
    for name in ("first", "second", "third"):
        assert (tmp_path / f"result.{name}").read_bytes() == wanted, name
    assert not list(tmp_path.glob("*/.new-*"))


def test_a_directory_that_cannot_be_written_to(tmp_path, compiled):
    """The parent of the directory is a file here."""
    file = tmp_path / "file"
    file.write_text("no directory")
    with relax_grad.cache(file / "functions"):
        first, second = run(module()), run(module())
    np.testing.assert_array_equal(first, second)
    assert file.read_text() == "no directory"


def test_the_oldest_entries_are_deleted(tmp_path):
    stored = Directory(tmp_path, max_bytes=2500)
    for i, letter in enumerate("abc"):
        stored.store(letter * 64, letter.encode() * 1000)
        os.utime(tmp_path / (letter * 2) / f"{letter * 62}.o", (i, i))
    assert stored.load("a" * 64) == b"a" * 1000  # now the newest entry
    stored.trim()
    assert [stored.load(letter * 64) is not None for letter in "abc"] == [True, False, True]
    Directory(tmp_path).trim()
    assert len(entries(tmp_path)) == 2


@pytest.fixture
def unset(monkeypatch):
    """The state of a process in which nobody has called relax_grad.cache."""
    monkeypatch.setattr(module_of_cache, "_directories", [module_of_cache._Default])
    monkeypatch.setattr(module_of_cache, "_told", set())
    monkeypatch.delenv("RELAX_GRAD_CACHE")
    return monkeypatch


def test_the_default_directory(unset, tmp_path):
    unset.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert current().path == tmp_path / "caches" / "relax_grad"
    assert current().max_bytes == 2**30
    unset.setenv("XDG_CACHE_HOME", "relative")  # the specification ignores it
    unset.setenv("HOME", str(tmp_path / "home"))
    assert current().path == tmp_path / "home" / ".cache" / "relax_grad"
    run(module())
    assert entries(tmp_path / "home" / ".cache" / "relax_grad")
    with relax_grad.cache(None):
        assert current() is None
    assert current() is not None


def test_the_choice_of_the_environment(unset, tmp_path):
    unset.setenv("RELAX_GRAD_CACHE", str(tmp_path / "mine"))
    assert current().path == tmp_path / "mine"
    unset.setenv("RELAX_GRAD_CACHE", "~/mine")
    unset.setenv("HOME", str(tmp_path))
    assert current().path == tmp_path / "mine"
    for off in ("0", "off", "OFF"):
        unset.setenv("RELAX_GRAD_CACHE", off)
        assert current() is None


def test_without_a_home_there_is_no_directory(unset):
    def homeless(_=None):
        raise RuntimeError("could not determine home directory")

    unset.delenv("XDG_CACHE_HOME", raising=False)
    unset.setattr(module_of_cache.Path, "home", homeless)
    assert current() is None


def test_choices_that_cannot_be_used_are_told_once(unset, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    unset.setenv("RELAX_GRAD_CACHE", str(file))
    with pytest.warns(RuntimeWarning, match=f"RELAX_GRAD_CACHE must name .* {file} is a file"):
        assert current() is None
    assert current() is None
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    shared.chmod(0o777)
    unset.setenv("RELAX_GRAD_CACHE", str(shared))
    with pytest.warns(RuntimeWarning, match=f"{shared} may be written to by every user; set"):
        assert current() is None
    assert current() is None
    assert of_environment()[0].path == shared
    with pytest.raises(PermissionError, match=f"{shared} may be written to by every user; pass"):
        relax_grad.cache(shared)


def test_contexts_restore_the_previous_directory(tmp_path):
    assert current() is None
    with relax_grad.cache(tmp_path / "a"):
        with relax_grad.cache(tmp_path / "b"):
            assert current().path == tmp_path / "b"
            relax_grad.cache(None)
            assert current() is None
        assert current().path == tmp_path / "a"
    assert current() is None


def test_arguments_are_checked(tmp_path):
    with pytest.raises(TypeError):
        relax_grad.cache(3)
    with pytest.raises(ValueError, match="max_bytes"):
        relax_grad.cache(tmp_path, max_bytes=-1)
    assert current() is None
