"""Exported steps run in C++ with the same bits as in Python."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from checksums import signed
from trainer_programs import run, same_bits, train, write_data
from training_models import START, batches, module_of
from tvm.target import codegen

import relax_grad
import relax_grad.runtime
from relax_grad.training import Adam, Trainer, _export, _files, train_step

pytest.importorskip("safetensors", reason="exported states are files of safetensors")

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="the C++ trainer is built with CMake and g++",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A step with every part: its trainer, its folder, and a loader whose examples are in a
    file."""
    step = train_step(
        module_of("float32", seed=True, states=True),
        Adam(0.05, weight_decay=0.1),
        wrt=["w", "b"],
        states=["mean"],
        accumulate=2,
        clip_norm=1.0,
        ema=0.9,
        outputs=True,
        loss_scale="dynamic",
    )
    folder = tmp_path_factory.mktemp("exported")
    values = {**START, "mean": np.zeros(3)}
    values = {name: array.astype("float32") for name, array in values.items()}
    step.export(folder, values=values)
    loader = batches(5, "float32")
    x, y = (np.concatenate(arrays) for arrays in zip(*loader, strict=True))
    write_data(folder / "data.safetensors", x=x, y=y)
    return step, values, folder, loader


def test_same_bits_as_in_python(programs, exported, tmp_path):
    step, values, folder, loader = exported
    trainer = Trainer(step, values=values)
    trainer.fit(loader, 1, progress=False)
    trainer.save(tmp_path / "one", {"note": "kept"})
    trainer.fit(loader, 3, progress=False)
    trainer.save(tmp_path / "python")
    options = ["--epochs", 3, "--batch", 6, "--save"]
    printed = train(programs, folder, folder / "data.safetensors", *options, tmp_path / "cpp")
    assert f"epoch 3: mean loss {trainer.history.evaluations[-1]['mean_loss']:.6g}"[:24] in printed
    same_bits(tmp_path / "python", tmp_path / "cpp")
    # A file goes from Python to C++ and back.
    trainer.batch = 6
    trainer.save(tmp_path / "other data")
    trainer.batch = 0
    message = "other data has 6 batches of an epoch, but there are 5 in"
    wrong = ["--epochs", 4, "--batch", 6, "--resume", tmp_path / "other data"]
    assert message in train(programs, folder, folder / "data.safetensors", *wrong, code=1)
    resumed = [*options, tmp_path / "resumed", "--resume", tmp_path / "one"]
    train(programs, folder, folder / "data.safetensors", *resumed)
    assert same_bits(tmp_path / "python", tmp_path / "resumed")["more"] == {"note": "kept"}
    other = Trainer(step, values=values)
    assert other.load(tmp_path / "resumed") == {"note": "kept"}
    assert other.step(*loader[0]).loss == trainer.step(*loader[0]).loss


@pytest.mark.parametrize("on_nan", ["raise", "skip"])
def test_steps_that_are_not_finite(programs, exported, tmp_path, on_nan):
    """Batches with a NaN at each place of an accumulated gradient leave the same bits as in
    Python."""
    step, values, folder, loader = exported
    data = [loader[i] for i in (0, 1, 2, 3, 4, 0, 1, 2)]
    for i in (0, 3, 6):
        x, y = data[i]
        data[i] = (np.where(np.arange(x.size).reshape(x.shape) == 7, np.nan, x), y)
    data = [tuple(array.astype("float32") for array in batch) for batch in data]
    x, y = (np.concatenate(arrays) for arrays in zip(*data, strict=True))
    write_data(tmp_path / "data", x=x, y=y)
    trainer = Trainer(step, values=values, on_nan=on_nan)
    for i, batch in enumerate(data):
        if on_nan == "raise" and i in (0, 3, 6):
            with pytest.raises(FloatingPointError, match="the loss is nan"):
                trainer.step(*batch)
        else:
            trainer.step(*batch)
    assert (trainer.steps, trainer.updates) == ((5, 2) if on_nan == "raise" else (8, 2))
    trainer.save(tmp_path / "python")
    program = [programs / "batches", folder, tmp_path / "data", len(loader[0][1])]
    printed = run([*program, tmp_path / "cpp", on_nan])
    assert printed.count("the loss is nan") == (3 if on_nan == "raise" else 0)
    same_bits(tmp_path / "python", tmp_path / "cpp")


def test_errors_of_the_library(programs, exported):
    """The program examines each error, and that the trainer is as before."""
    _, _, folder, _ = exported
    # TVM has 4 threads, of which the last part of the program uses 2.
    printed = run(["env", "TVM_NUM_THREADS=4", programs / "errors", folder])
    assert "31 errors as expected" in printed


def test_folders_that_do_not_fit(programs, exported, tmp_path):
    _, _, folder, _ = exported

    def refuses(change, message: str) -> None:
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(folder, broken)
        change(broken)
        printed = train(programs, broken, folder / "data.safetensors", "--batch", 6, code=1)
        assert printed.count("error: ") == 1
        assert message in printed

    def edited(**changes):
        def change(at: Path) -> None:
            manifest = json.loads((at / "manifest.json").read_text())
            manifest.update(changes)
            (at / "manifest.json").write_bytes(signed(json.dumps(manifest).encode()))

        return change

    def cut(name: str, size: int):
        def change(at: Path) -> None:
            (at / name).write_bytes((at / name).read_bytes()[:size])

        return change

    refuses(
        lambda at: (at / "manifest.json").unlink(), "manifest.json cannot be read: No such file"
    )
    refuses(cut("manifest.json", 50), "manifest.json is damaged")
    refuses(
        edited(version=3), "has version 3 of the format, but this program reads versions 1 to 2"
    )
    refuses(edited(format="other"), "is of another format")
    refuses(edited(accumulate="2"), "accumulate must be a number, but")
    refuses(edited(params=[]), "has tensors that the step does not")
    refuses(lambda at: (at / "step.so").unlink(), "step.so cannot be read: No such file")
    refuses(cut("step.so", 1000), "step.so is damaged: it has 1000 bytes, but")
    refuses(lambda at: (at / "state.safetensors").unlink(), "state.safetensors cannot be read")
    size = (folder / "state.safetensors").stat().st_size
    for kept in (0, 5, 100, size // 2, size - 1):
        refuses(cut("state.safetensors", kept), "state.safetensors is damaged")
    other = [{"name": "w", "shape": [4], "dtype": "float32"}]
    refuses(
        edited(params=[*other, {"name": "b", "shape": [], "dtype": "float32"}]),
        "params/w must have shape (4)",
    )
    whole = "must be an integer from"
    for options, message in (
        (["--batch", "0"], f"--batch {whole} 1 to 9007199254740992, but it is 0"),
        (["--batch", "6.5"], f"--batch {whole} 1 to 9007199254740992, but it is 6.5"),
        (["--batch", "1000"], "--batch is more than the examples"),
        (["--epochs", "many"], f"--epochs {whole} 0 to 9007199254740992, but it is many"),
        (["--epochs", "nan"], f"--epochs {whole} 0"),
        (["--epochs", "9" * 30], f"--epochs {whole} 0"),
        (["--epochs", "-1"], f"--epochs {whole} 0"),
        (["--threads", "-1"], f"--threads {whole} 0 to 65536, but it is -1"),
        (["--threads", "4294967297"], f"--threads {whole} 0"),
        (["--lr", "nan"], "--lr must be a number of at least 0, but it is nan"),
        (["--lr", "1e999"], "--lr must be a number of at least 0"),
        (["--lr", "-0.1"], "--lr must be a number of at least 0, but it is -0.1"),
        (["--lr", "0.1x"], "--lr must be a number of at least 0, but it is 0.1x"),
        (["--lr", "0.1", "--lr", "0.2"], "--lr is given twice"),
        (["--unknown", "1"], "there is no option --unknown"),
        (["--save"], "--save needs a value"),
        (["--save", ""], "--save has an empty value"),
        (["more"], "usage: train"),
    ):
        printed = train(programs, folder, folder / "data.safetensors", *options, code=1)
        assert message in printed
    assert "usage: train" in train(programs, code=1)


def test_export_replaces_a_folder(exported, tmp_path):
    """A second export replaces the three files, and keeps others; one that fails changes
    nothing."""
    step, values, _, loader = exported
    folder = tmp_path / "model"
    trainer = Trainer(step, values=values)
    trainer.export(folder)
    folder.joinpath("notes").write_text("kept")
    trainer.step(*loader[0])
    trainer.export(folder)
    assert _files.read(folder / "state.safetensors")[1]["counters"]["steps"] == 1
    trainer.step(*loader[1])
    with pytest.raises(RuntimeError):
        trainer.export(folder, compiler="false")
    assert _files.read(folder / "state.safetensors")[1]["counters"]["steps"] == 1
    names = ["manifest.json", "notes", "state.safetensors", "step.so"]
    assert sorted(os.listdir(folder)) == names
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_the_library_saves_as_python_does(programs, exported, tmp_path):
    """The permissions are those of the umask, links stay, the disk has the file, and nothing is
    left over."""
    noting = tmp_path / "calls.so"
    source = Path(__file__).with_name("trainer_calls.cc")
    run(["g++", "-shared", "-fPIC", source, "-o", noting, "-ldl"])
    store = tmp_path / "store"
    store.mkdir()
    link = tmp_path / "state"
    link.symlink_to(Path("store") / "saved")
    _, _, folder, _ = exported
    command = [programs / "train", folder, folder / "data.safetensors"]
    command = list(map(str, [*command, "--batch", 6, "--save", link]))
    environment = {**os.environ, "LD_PRELOAD": str(noting), "CALLS": str(tmp_path / "calls")}
    for name in (".saved.abcdefgh.part", ".saved.0123abcd.part", ".saved.more.abcdefgh.part"):
        (store / name).write_text("left over")
    with (store / ".saved.0123abcd.part").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.run(command, check=True, env=environment, umask=0o027, capture_output=True)
    kept = [".saved.0123abcd.part", ".saved.more.abcdefgh.part"]
    assert sorted(os.listdir(store)) == [*kept, "saved"]
    assert stat.S_IMODE((store / "saved").stat().st_mode) == 0o640
    assert link.is_symlink()
    assert (tmp_path / "calls").read_text().split("\n") == [
        *("fsync file", "rename", "fsync folder"),
        "",
    ]
    train(programs, *command[1:], "--resume", link)  # over the first one
    _files.read(link)
    assert sorted(os.listdir(store)) == [kept[1], "saved"]
    link.unlink()
    link.symlink_to("state")
    assert "cannot be written: there are too many symbolic links" in train(
        programs, *command[1:], code=1
    )


def test_damaged_tensors(programs, exported, tmp_path):
    """Files of safetensors whose headers lie, and that no memory is read or taken for."""
    _, _, folder, _ = exported
    path = tmp_path / "a folder" / "some data"
    path.parent.mkdir()

    def entry(shape, begin, end, dtype="F32"):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    def refuses(header, data, message, length=None) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        length = len(text) if length is None else length
        path.write_bytes(length.to_bytes(8, "little") + text + bytes(data))
        printed = train(programs, folder, path, code=1)
        assert printed.startswith(f"error: {path} ")
        assert message in printed

    refuses({"x": entry([2**61], 0, 0, "F64")}, 0, "x is larger than any file")
    refuses({"x": entry([2**62], 0, 0)}, 0, "x is larger than any file")
    refuses({"x": entry([0, 2**62, 2**62], 0, 0)}, 0, "x is larger than any file")
    refuses({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, 16, "its tensors overlap")
    refuses({"x": entry([2], 0, 8), "y": entry([2], 12, 20)}, 20, "there are bytes of no tensor")
    refuses({"x": entry([2], 0, 8)}, 9, "its tensors have 8 bytes, but it has 9")
    refuses({"x": entry([2], -8, 0)}, 8, "x.data_offsets.0 must be an integer from 0 to")
    refuses({"x": entry([2], 8, 0)}, 8, "x is not within the file")
    refuses({"x": entry([-2], 0, 8)}, 8, "x.shape.0 must be an integer from 0 to")
    refuses({"x": entry([2.0], 0, 8)}, 8, "x.shape.0 must be an integer from 0 to")
    refuses({"x": entry([3], 0, 8)}, 8, "x has another size than its shape")
    refuses({}, 0, "its header is longer than the file", 2**64 - 1)
    refuses(b"[" * 1_000_000, 0, "must be an object, but at byte 0 there is [[[[")
    refuses({"x": [[]]}, 0, "x must be an object, but at byte 6 there is [[]]")
    refuses(b"[]", 0, "must be an object, but at byte 0 there is []")
    refuses({"x": entry([2], 0, 2, "BOOL")}, b"\1\2", "x has booleans that are neither 0 nor 1")


def test_other_architectures(tmp_path):
    """Errors come before the compilation, and name the compiler and its package."""
    step = train_step(module_of("float32"), Adam(), wrt=["w", "b"])
    here, there = platform.machine(), "aarch64"
    there = "x86_64" if here in ("aarch64", "arm64") else there
    target = {"kind": "llvm", "mtriple": f"{there}-linux-gnu"}
    values = {name: array.astype("float32") for name, array in START.items()}
    with pytest.raises(ValueError, match=f"architecture, .*, but it is {there}; TrainStep.export"):
        Trainer(step, target=target, values=values)
    mac = {"kind": "llvm", "mtriple": "arm64-apple-macos"}
    trainer = Trainer(step, values=values)
    for exported in (step, trainer):
        with pytest.raises(FileNotFoundError, match=r"the compiler no-g\+\+ is not installed$"):
            exported.export(tmp_path / "model", target=target, compiler="no-g++")
        with pytest.raises(ValueError, match=r"must name a C.. compiler for arm64-apple-macos"):
            exported.export(tmp_path / "model", target=mac)
    with pytest.raises(FileNotFoundError, match=r"the compiler no-g.. is not installed$"):
        trainer.export(tmp_path / "model", compiler="no-g++")
    assert not (tmp_path / "model").exists()


def test_missing_cross_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    step = train_step(module_of("float32"), Adam(), wrt=["w", "b"])
    there = "riscv64"
    expected = (
        "riscv64-linux-gnu-g.. is not installed; .* have it in the package g..-riscv64-linux-gnu"
    )
    with pytest.raises(FileNotFoundError, match=expected):
        step.export(tmp_path, target={"kind": "llvm", "mtriple": f"{there}-linux-gnu"})


X86_64 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="levels are those of x86-64"
)
LEVELS = ("v2", "v3", "v4")


@pytest.fixture(scope="module")
def levels(exported, tmp_path_factory):
    """A folder with three versions of the step, and a folder for each of them alone."""
    step, values, data, _ = exported
    folder = tmp_path_factory.mktemp("levels")
    make = relax_grad.target.x86_64
    step.export(folder / "all", target=[make("v4"), make("v2"), make("v3")], values=values)
    for level in LEVELS:
        step.export(folder / level, target=make(level), values=values)
    shutil.copy(data / "data.safetensors", folder)
    return folder


def names_of(level: str) -> str:
    return f"x86-64-{level}"


@X86_64
def test_versions_are_in_order(levels):
    """The library has one executable for each level, each of which calls only its own functions."""
    manifest = json.loads((levels / "all" / "manifest.json").read_text())
    assert manifest["levels"] == list(map(names_of, LEVELS))
    module = tvm.runtime.load_module(str(levels / "all" / "step.so"))
    for level in LEVELS:
        called = set(re.findall(r"x86_64_(v\d)_", module["as_text"]()))
        assert called == {level}
        following = [part for part in module.imports if part.kind == "relax.VMExecutable"]
        module = following[0] if following else None
    assert module is None


@X86_64
def test_every_level(programs, levels, tmp_path):
    """A version has the bits of a library for its level alone. The highest level of the processor
    is the default."""
    data = levels / "data.safetensors"
    options = [data, "--epochs", 3, "--batch", 6, "--save"]
    target = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    features = {"v2": "sse4.2", "v3": "avx2", "v4": "avx512vl"}
    here = [level for level in LEVELS if codegen.target_has_features(features[level], target)]
    for level in here:
        chosen = ["--level", names_of(level)]
        printed = train(programs, levels / "all", *options, tmp_path / "all", *chosen)
        assert f"level {names_of(level)}\n" in printed
        train(programs, levels / level, *options, tmp_path / "alone")
        same_bits(tmp_path / "alone", tmp_path / "all")
    printed = train(programs, levels / "all", data, "--batch", 6)
    assert f"level {names_of(here[-1])}\n" in printed


@X86_64
@pytest.mark.parametrize(("cpu", "level"), [("qemu64", None), ("Nehalem", "v2"), ("Haswell", "v3")])
def test_other_processors(cpu, level, programs, levels):
    """Emulated processors without AVX-512 or AVX2 run the version for their level."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("qemu-x86_64 is not installed (Debian's package qemu-user)")

    def run_on(folder, code):
        program = [programs / "train", folder, levels / "data.safetensors"]
        return run([emulator, "-cpu", cpu, *program, "--batch", 6], code)

    if level is None:
        message = "step.so has versions for x86-64-v2, x86-64-v3, x86-64-v4, but the processor"
        assert message in run_on(levels / "all", 1)
    else:
        assert f"level {names_of(level)}\n" in run_on(levels / "all", 0)
    # A library for one level needs that level.
    message = "step.so has versions for x86-64-v4, but the processor has none of these levels"
    assert message in run_on(levels / "v4", 1)


@X86_64
def test_levels_that_do_not_fit(programs, levels, exported, tmp_path):
    data = levels / "data.safetensors"

    def refuses(folder, message, *options):
        printed = train(programs, folder, data, "--batch", 6, *options, code=1)
        assert message in printed

    wrong = ["--level", "x86-64-v5"]
    refuses(levels / "all", "has no version for x86-64-v5, but for x86-64-v2, x86-64-v3", *wrong)
    refuses(exported[2], "was compiled for one processor, and has no version for x86-64-v5", *wrong)
    broken = tmp_path / "broken"
    shutil.copytree(levels / "all", broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    changed = json.dumps({**manifest, "levels": ["x86-64"]}).encode()
    (broken / "manifest.json").write_bytes(signed(changed))
    refuses(broken, "step.so has 3 versions, but the manifest names 1")


def test_targets_that_do_not_fit(exported, tmp_path):
    step, values, _, _ = exported
    for seed, error in ((-1, ValueError), (2**31, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(error, match="seed must be"):
            step.export(tmp_path / "model", values=values, seed=seed)
    make = relax_grad.target.x86_64

    def refuses(targets, message, **options):
        with pytest.raises(ValueError, match=message):
            step.export(tmp_path / "model", target=targets, values=values, **options)

    refuses([], "several targets must be levels of x86-64, .* but there is none")
    refuses([make("v3"), relax_grad.target.arm("generic")], "levels of x86-64, .* but one is .*arm")
    refuses([make("v3"), make("v3", 2)], "must differ, but they are x86-64-v3, x86-64-v3")
    other = {"relax_pipeline": "default"}
    if platform.machine() in ("x86_64", "AMD64"):
        refuses([make("v3"), make("v4")], 'need the pipeline "relax_grad"', compile_options=other)
    assert not (tmp_path / "model").exists()


def test_lowest_level_is_linked_first(monkeypatch, tmp_path):
    """The linker takes the first definition of functions that all versions have."""
    files = {"imports": b"data", "b": b"__tvm_ffi_x86_64_v4_add", "a": b"__tvm_ffi_x86_64_v3_add"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    linked = []
    monkeypatch.setattr(_export.cc, "create_shared", lambda output, objects: linked.extend(objects))
    _export._link(["x86_64_v3_", "x86_64_v4_"], "step.so", [str(tmp_path / name) for name in files])
    assert [Path(path).name for path in linked] == ["a", "b", "imports"]
