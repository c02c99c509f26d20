"""The C++ trainer, built with sanitizers, refuses every damaged folder by an error with the file
and the reason."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checksums import flipped, signed
from training_models import START, module_of

import relax_grad.runtime
from relax_grad.training import Adam, _export, train_step

pytest.importorskip("safetensors", reason="exported states are files of safetensors")

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="the C++ trainer is built with CMake and g++",
)

SOURCE = Path(__file__).with_name("trainer_folders.cc")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Return the program that loads folders; the first undefined behaviour ends it."""
    folder = tmp_path_factory.mktemp("sanitized")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\n"
        "project(programs LANGUAGES CXX)\n"
        # Objects of TVM's libraries have no type information for UBSan's check of virtual
        # functions.
        "add_compile_options(-O0 -fsanitize=address,undefined -fno-sanitize=vptr "
        "-fno-sanitize-recover=all)\n"
        "add_link_options(-fsanitize=address,undefined)\n"
        f'add_subdirectory("{relax_grad.runtime.folder()}" trainer)\n'
        f'add_executable(folders "{SOURCE}")\n'
        "target_link_libraries(folders PRIVATE relax_grad_trainer)\n"
    )
    build = folder / "build"
    for command in (
        ["cmake", "-S", folder, "-B", build, f"-DPYTHON={sys.executable}"],
        ["cmake", "--build", build, "--parallel", "2"],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "folders"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    module = module_of("float32", seed=True, states=True)
    step = train_step(module, Adam(0.05), wrt=["w", "b"], states=["mean"], accumulate=2, ema=0.9)
    folder = tmp_path_factory.mktemp("exported") / "model"
    values = {name: np.float32(value) for name, value in {**START, "mean": np.zeros(3)}.items()}
    step.export(folder, values=values)
    return folder


class Cases:
    """Folders with one damaged file each."""

    def __init__(self, exported: Path, folder: Path):
        self._exported, self._folder = exported, folder
        self.folders: list[Path] = []

    def add(self, **files: bytes) -> None:
        """Add a folder with other bytes in the files of these stems."""
        folder = self._folder / str(len(self.folders))
        folder.mkdir()
        for file in self._exported.iterdir():
            if file.stem in files:
                (folder / file.name).write_bytes(files[file.stem])
            else:
                os.link(file, folder / file.name)
        self.folders.append(folder)

    def run(self, program: Path) -> list[str]:
        """Return the outcome of each folder."""
        names = self._folder / "names"
        names.write_text("".join(f"{folder}\n" for folder in self.folders))
        options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        done = subprocess.run(
            [str(program), str(names)],
            capture_output=True,
            check=False,
            env={**os.environ, **options},
            timeout=300,
        )
        outcomes = done.stdout.decode(errors="replace").splitlines()
        count = len(outcomes)
        last = self.folders[min(count, len(self.folders) - 1)]
        assert done.returncode == 0, f"at {last}: {done.stderr.decode(errors='replace')[-3000:]}"
        assert count == len(self.folders)
        return outcomes

    def refuse(self, program: Path, wanted: list[tuple]) -> None:
        """Assert that each outcome matches a pattern, the first of each tuple."""
        pairs = zip(wanted, self.run(program), strict=True)
        assert [pair for pair in pairs if not re.match(pair[0][0], pair[1])] == []


@pytest.fixture
def cases(exported, tmp_path) -> Cases:
    return Cases(exported, tmp_path)


def manifest_of(tree: object) -> bytes:
    return signed(dumped(tree).encode())


class State:
    """The parts of a file of safetensors."""

    def __init__(self, data: bytes):
        (length,) = struct.unpack("<Q", data[:8])
        self.header, self.data = json.loads(data[8 : 8 + length]), data[8 + length :]

    @property
    def described(self) -> dict:
        return json.loads(self.header["__metadata__"][_export._files.FORMAT])

    def packed(self, header: dict, described: dict | None = None) -> bytes:
        header = copy.deepcopy(header)
        if described is not None:
            header["__metadata__"][_export._files.FORMAT] = dumped(described)
        text = dumped(header).encode()
        return signed(struct.pack("<Q", len(text)) + text + self.data)


class Raw(str):
    """A text that stands in JSON as it is; as a key it is the name of another one that is there
    already."""


def dumped(value: object) -> str:
    """Return JSON, in which ``Raw`` texts have no quotation marks."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {dumped(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(dumped, value)) + "]"
    return json.dumps(value)


#: Values at the limits of what a reader accepts.
LIMITS = [
    *(None, True, "", "x" * 300, "\0", "a/b", [], {}, -1, 0, 1, 2, 0.5),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**61, 2**62, 2**63 - 1, -(2**31), -(2**63)),
    *map(Raw, ("9223372036854775808", "-9223372036854775809", "9" * 400, "1e999", "-1e999")),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "01", "+1", "1.", ".5", "1e", "-", "0x1", "nul")),
    *map(Raw, ("[" * 70 + "]" * 70, "[" * 100_000, '{"a":' * 100_000, '{"a":1,"a":1}', "[1,]")),
    *map(Raw, ('"\\ud800"', '"\\udc00\\ud800"', '"\\u12"', '"\\x"', '"\t"', '"', "")),
]


def mutated(value: object, rng: random.Random) -> object:
    """Return a copy of a tree of JSON with a change at a random place."""
    value = copy.deepcopy(value)
    places: list[tuple[object, object]] = []

    def walk(at: object) -> None:
        items = (
            at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
        )
        for key, child in items:
            places.append((at, key))
            walk(child)

    walk(value)
    at, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del at[key]
    elif kind == 1:
        _, other = source = rng.choice(places)
        at[key] = copy.deepcopy(source[0][other])
    elif kind == 2 and isinstance(at, list):
        at.insert(key, copy.deepcopy(at[key]))
    else:
        at[key] = rng.choice(LIMITS)
    return value


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a flipped bit, without their end, or with a part that stands elsewhere
    too."""
    kind, at = rng.randrange(3), rng.randrange(len(data))
    if kind == 0:
        return flipped(data, rng.randrange(8 * len(data)))
    if kind == 1:
        return data[:at]
    other = rng.randrange(len(data))
    return data[:at] + data[other : other + rng.randrange(40)] + data[at:]


def test_generated_folders(program, exported, cases):
    """Each of many folders is refused with its file, or is one that trains."""
    rng = random.Random(35)
    manifest = json.loads((exported / "manifest.json").read_text())
    state = State((exported / "state.safetensors").read_bytes())
    damaged = []
    for _ in range(40):
        damaged += ["manifest"] * 2 + ["state"] * 3
        cases.add(manifest=manifest_of(mutated(manifest, rng)))
        cases.add(manifest=signed(scrambled((exported / "manifest.json").read_bytes(), rng)))
        cases.add(state=state.packed(mutated(state.header, rng)))
        cases.add(state=state.packed(state.header, mutated(state.described, rng)))
        cases.add(state=signed(scrambled((exported / "state.safetensors").read_bytes(), rng)))
    outcomes = cases.run(program)
    refused = 0
    for stem, folder, outcome in zip(damaged, cases.folders, outcomes, strict=True):
        if outcome.startswith("error: "):
            refused += 1
            # What the manifest says may not fit the library or the state.
            name = "" if stem == "manifest" else f"{stem}.safetensors"
            assert outcome.startswith(f"error: {folder}/{name}"), outcome
        else:
            # A step that the library does not have shows itself when it is called.
            assert outcome == "runs" or outcome.startswith("loads: "), (folder, outcome)
    assert refused > len(outcomes) // 2
    assert outcomes.count("runs") > 0


def test_files_of_another_kind(program, exported, cases):
    """What is no regular file, or is far too large, is not read."""
    for name in ("manifest.json", "state.safetensors", "step.so"):
        for kind in ("folder", "pipe", "large"):
            cases.add(**{Path(name).stem: b""})
            path = cases.folders[-1] / name
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                with path.open("wb") as file:
                    file.truncate(2**40)  # a sparse file
    messages = {
        "manifest": "bytes, but there should be at most 100000000",
        "state": "is damaged",
        "step": "bytes, but there should be at most",
    }
    wanted = [
        (f"error: .*/{stem}.* {message}",)
        for stem, large in messages.items()
        for message in ("cannot be read: it is a folder", "cannot be read: it is no regular", large)
    ]
    cases.refuse(program, wanted)


def test_flipped_bits(program, exported, cases):
    """One flipped bit anywhere in a file is an error that names the file."""
    rng = random.Random(36)
    files = {file.stem: file.read_bytes() for file in exported.iterdir()}
    names = {file.stem: file.name for file in exported.iterdir()}
    assert sorted(names.values()) == ["manifest.json", "state.safetensors", "step.so"]
    wanted = []
    for stem, data in files.items():
        for _ in range(60 if stem == "step" else 250):
            cases.add(**{stem: flipped(data, rng.randrange(8 * len(data)))})
            wanted.append((f"error: {cases.folders[-1]}/{names[stem]} ",))
    cases.refuse(program, wanted)


def test_older_folders(program, exported, cases):
    """Folders of version 1, whose files have no checksums, train; version 2 cannot be without
    them."""
    manifest = json.loads((exported / "manifest.json").read_text())
    state = State((exported / "state.safetensors").read_bytes())
    header = edited(state.header, "__metadata__.crc32", ...)
    old = {key: value for key, value in manifest.items() if "crc32" not in key}
    cases.add(
        manifest=dumped({**old, "version": 1}).encode(),
        state=state.packed(header, {**state.described, "version": 1}),
    )
    cases.add(state=state.packed(header))
    runs, refused = cases.run(program)
    assert runs == "runs"
    assert refused == f"error: {cases.folders[1]}/state.safetensors is damaged: it has no checksum"


def edited(tree: dict, place: str, value: object) -> dict:
    """Return a copy of a tree of JSON with another value; ``...`` removes the key."""
    tree = copy.deepcopy(tree)
    at, *rest = [int(part) if part.isdigit() else part for part in place.split(".")][::-1]
    parent = tree
    for part in reversed(rest):
        parent = parent[part]
    if value is ...:
        del parent[at]
    else:
        parent[at] = value
    return tree


def refusals_of_manifests() -> list[tuple[str, object, str]]:
    """Return places in a manifest with values that do not fit, and what the error says."""
    wrong = [0, -1, 2**31, 2**63 - 1, 2.0, Raw("9" * 30), Raw("1e3")]
    integer = "damaged: accumulate must be an integer from 1 to 2147483647, but it is"
    edits = [("accumulate", value, integer) for value in wrong]
    edits += [("accumulate", Raw("NaN"), "damaged: accumulate must be a value, .* there is NaN")]
    wrong = ["2", True, None, []]
    edits += [("accumulate", value, "damaged: accumulate must be a number") for value in wrong]
    edits += [("version", value, "damaged: version must be an? ") for value in (-1, 2.0, "1", True)]
    edits += [("version", 3, "has version 3 of the format, but this program reads version")]
    edits += [("format", "other", "is of another format: other")]
    for group in ("params", "frozen", "states", "optimizer_state"):
        edits += [
            (group, value, f"damaged: {group} must be a list") for value in (None, {}, "x", 1)
        ]
        edits += [(group, ..., f"damaged: has no {group}")]
    for extent in (-1, 2**64, 1.5, None, []):
        edits += [("params.0.shape.0", extent, r"damaged: params.0.shape.0 must be a")]
    edits += [
        ("params.0.shape.0", "batch", "only inputs have symbolic extents"),
        ("optimizer_state.0.shape", ["n"], "only inputs have symbolic extents"),
        ("params.0.shape.0", 2**62, "larger than any memory: w"),
        ("batch.0.shape", [0, 2**62, 2**62], "larger than any memory: x"),
        ("batch.0.shape", [1] * 65, "65 axes, more than 64"),
        ("batch.0.shape.0", "", "batch.0.shape.0 is an empty text"),
        ("batch.0.name", "", "batch.0.name is an empty text"),
        ("batch.0.name", "y", "batch has y twice"),
        ("batch.0.name", "a\nb", "batch.0.name has control characters"),
        ("batch.0.dtype", "float31", "batch.0.dtype float31 is not supported"),
        ("params.0.dtype", "float32x4", "params.0.dtype float32x4 is not supported"),
        ("batch.0", ..., "step.so: the function step takes 8 arguments, but the manifest has 7"),
        ("hyperparameters.0.default", Raw("1e999"), "default is beyond all numbers: 1e999"),
        ("hyperparameters.0.default", Raw("NaN"), "hyperparameters.0.default must be a value"),
        ("hyperparameters.0.default", ..., "hyperparameters.0 has no default"),
        ("hyperparameters", [{"name": "lr", "default": 1}] * 2, "hyperparameters has lr twice"),
        ("metrics", ["a", "a"], "metrics has a twice"),
        ("outputs", [1], "outputs.0 must be text"),
        ("levels", ["x86-64-v9"], "must be levels from x86-64 to x86-64-v4 in this order"),
        ("levels", ["x86-64-v3", "x86-64"], "must be levels from x86-64 to x86-64-v4"),
        ("library", "../step.so", "library must be the name of a file in the same folder"),
        ("state", "..", "state must be the name of a file in the same folder"),
        ("library", "", "library is an empty text"),
        ("library_bytes", 2**40, "step.so is damaged: it has .* bytes, but 1099511627776 were"),
        ("library_bytes", 0, "library_bytes must be an integer from 1"),
        ("library_bytes", 5, "step.so is damaged: it has .* bytes, but there should be at most 5"),
        ("forward", [], "forward must be an object"),
        (
            "forward",
            {"name": "f", "inputs": [], "values": ["u"]},
            "forward.values has u, which is no",
        ),
        ("forward", {"name": "f", "inputs": [], "values": []}, "step.so has no function f"),
        ("forward", {"name": "step", "inputs": [], "values": []}, "step takes 8 arguments, but"),
        ("target", Raw("[" * 65 + "]" * 65), "its JSON is nested more than 64 deep"),
        ("target", Raw('{"a":1,"a":2}'), "target has the key a twice"),
        ("target", Raw("NaN"), "target must be a value, but at byte .* there is NaN"),
        ("target", Raw("01"), "target must be a number, without leading zeros"),
        ("target", Raw('"\\ud800"'), "target has half a surrogate pair"),
    ]
    edits += [
        ("crc32", ..., "manifest.json is damaged: it has no checksum of its own"),
        ("library_crc32", ..., "manifest.json is damaged: it has no checksum of step.so"),
        ("library_crc32", "0123abcd", "step.so is damaged: its checksum is .* with 0123abcd"),
        ("library_crc32", 1, "library_crc32 must be text"),
    ]
    return edits


def test_refused_manifests(program, exported, cases):
    """Values out of range are named with their place."""
    manifest = json.loads((exported / "manifest.json").read_text())
    wanted = refusals_of_manifests()
    for place, value, _ in wanted:
        cases.add(manifest=manifest_of(edited(manifest, place, value)))
    raw = (exported / "manifest.json").read_bytes()
    for text, message in (
        (b"", "must be an object, but at byte 0 the text ends"),
        (b"[]", "must be an object, but at byte 0"),
        (raw + b"x", "must be one value, with nothing after it"),
        (raw.replace(b"llvm", b"ll\xff\xfe"), "target has text that is no UTF-8"),
        (raw.replace(b"llvm", b"ll\xc0\x80"), "target has text that is no UTF-8"),
        (raw.replace(b"llvm", b"ll\xed\xa0\x80"), "target has text that is no UTF-8"),
    ):
        wanted.append((text[:20], None, message))
        cases.add(manifest=signed(text))
    cases.refuse(program, [(f"error: .*/.*{message}", *which) for *which, message in wanted])


def test_refused_states(program, exported, cases):
    state = State((exported / "state.safetensors").read_bytes())
    wanted: list[tuple[str, object, str]] = []
    limits = {"seed": 2**31 - 1, "steps": 2**53, "updates": 2**53, "batch": 2**53}
    for name, most in limits.items():
        for value in (-1, most + 1, 2**63, 1.0, True, None, "1"):
            message = f"damaged: counters.{name} must be a"
            wanted.append((f"counters.{name}", value, message))
        wanted.append((f"counters.{name}", ..., f"damaged: counters has no {name}"))
    for name in ("history", "more", "counters"):
        wanted += [(name, value, f"damaged: {name} must be an object") for value in ([], None, 1)]
        wanted.append((name, ..., f"damaged: has no {name}"))
    wanted.append(("counters.skipped", 1, "the counter skipped is 1, but steps is 0"))
    wanted.append(("version", 7, "has version 7 of the format, but this program reads version"))
    wanted.append(("more", Raw("{" + '"a":{' * 64 + "}" * 65), "nested more than 64 deep"))
    for place, value, _ in wanted:
        cases.add(state=state.packed(state.header, edited(state.described, place, value)))
    headers = [
        ("params/w.dtype", "F8_E4M3", "params/w.dtype is F8_E4M3, which is not supported"),
        ("params/w.shape", [2**62], "params/w is larger than any file"),
        ("params/w.data_offsets", [0, 2**63], "params/w.data_offsets.1 must be an integer"),
        ("params/w.data_offsets", [0], "params/w must have two data_offsets"),
        ("params/w", ..., "there are bytes of no tensor in it|its tensors have"),
        ("params/w.more", 1, "params/w.more is no key of a tensor"),
        ("__metadata__.more", 1, "__metadata__.more must be text"),
    ]
    for place, value, _ in headers:
        cases.add(state=state.packed(edited(state.header, place, value)))
    where = "error: .*/state.safetensors .*"
    wanted += headers
    cases.refuse(program, [(f"{where}({message})", *which) for *which, message in wanted])


@pytest.mark.skipif(sys.platform != "linux", reason="the header is that of ELF")
def test_refused_libraries(program, exported, cases):
    """A library for another processor is named before the system's loader sees it."""
    data = (exported / "step.so").read_bytes()
    here = "x86_64|aarch64|riscv|the machine"

    def changed(at: int, *values: int) -> bytes:
        return data[:at] + bytes(values) + data[at + len(values) :]

    other = 183 if data[18] == 62 else 62
    wanted = [
        (
            changed(18, other, 0),
            f"step.so was compiled for ({here}) .* this program is for ({here})",
        ),
        (changed(18, 40, 0), "step.so was compiled for arm .64 bits., but this program is for"),
        (changed(4, 1), r"step.so was compiled for .* \(32 bits\), but this program"),
        (changed(5, 2), "64 bits, big endian"),
        (changed(16, 1), "step.so is damaged: it is no shared library of ELF"),
        (changed(0, 0), "step.so is damaged: it is no shared library of ELF"),
    ]
    for library, _ in wanted:
        cases.add(step=library)
    cases.refuse(program, [(f"error: .*{message}",) for _, message in wanted])


@pytest.mark.skipif(shutil.which("clang++") is None, reason="libFuzzer comes with clang")
def test_readers_under_libfuzzer(exported, tmp_path):
    """Manifests, headers and descriptions that libFuzzer makes of valid ones; the first byte
    chooses the reader."""
    from tvm_ffi import libinfo

    manifest = (exported / "manifest.json").read_bytes()
    state = State((exported / "state.safetensors").read_bytes())
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    old = edited(edited(json.loads(manifest), "crc32", ...), "version", 1)
    for i, (reader, text) in enumerate(
        [
            (0, manifest),
            (0, dumped(old).encode()),
            (1, dumped(state.header).encode()),
            (2, dumped(state.described).encode()),
        ]
    ):
        (seeds / str(i)).write_bytes(bytes([reader]) + text)
    runtime, library = relax_grad.runtime.folder(), Path(libinfo.find_libtvm_ffi())
    readers = "manifest", "extent_checks", "safetensors", "state", "json", "checksum"
    sources = [runtime / f"{name}.cc" for name in readers]
    program = tmp_path / "fuzzer"
    command = ["clang++", "-std=c++17", "-O1", "-fsanitize=fuzzer,address,undefined"]
    command += ["-fno-sanitize=vptr", "-fno-sanitize-recover=all", f"-I{runtime}"]
    command += [f"-I{folder}" for folder in libinfo.include_paths()]
    command += [SOURCE.with_name("trainer_fuzzer.cc"), *sources, "-o", program]
    command += [library, f"-Wl,-rpath,{library.parent}"]
    # The limit holds for one allocation, not for the process: Linux counts the peak of the process
    # that started a program as the program's own, and a worker of this suite has gigabytes.
    fuzz = [program, "-seed=35", "-runs=20000", "-timeout=10", seeds]
    fuzz += ["-rss_limit_mb=0", "-malloc_limit_mb=512"]
    for words in (command, fuzz):
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
