"""Training in Node and Chromium beside other libraries, for docs/web_speed.md.

``make bench-web`` fetches the peers into build/peers, and measures five networks in one thread in
five minutes on an idle machine. It needs Node, clang and Chromium (``tests/support/tools.sh
browser``).

``--peers FOLDER`` names the folder with node_modules, and with onnxruntime-training-cpu 1.19.2 in
``ort``, which writes the files that ONNX Runtime trains from. Peers that are missing are left out.
WebGL and WebGPU run on the CPU here, by SwiftShader, where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import _browser
import torch
from _benchmark import HERE, Benchmark, Layout, Rows, facts, in_process
from _small_models import PAGES, Small, cross_entropy

import relax_grad
from relax_grad.frontend.torch import from_module
from relax_grad.training import SGD, Trainer, train_step

#: The columns: the name of the contestant, and what runs it.
NODE = {"relax_grad, Node": "relax_grad", "TensorFlow.js wasm, Node": "wasm"}
SLOW_NODE = {"TensorFlow.js cpu, Node": "cpu"}
CHROMIUM = {
    "relax_grad, Chromium": ("relax_grad", ["--disable-gpu"]),
    "relax_grad with relaxed SIMD, Chromium": ("relaxed", ["--disable-gpu"]),
    "TensorFlow.js wasm, Chromium": ("wasm", ["--disable-gpu"]),
    "ONNX Runtime 1.19.2, Chromium": ("onnxruntime", ["--disable-gpu"]),
    "TensorFlow.js webgl, Chromium": (
        "webgl",
        ["--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"],
    ),
    "TensorFlow.js webgpu, Chromium": (
        "webgpu",
        ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"],
    ),
}
NATIVE = ("relax_grad, x86-64-v2", "PyTorch")


def measured(network: Small, args: Namespace) -> dict:
    """Return the figures of a network: the times of all columns, and the size of its module."""
    row: dict = {"name": network.name, "title": network.title, "batch": network.shape[0], "ms": {}}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        row["wasm"], native = _exported(network, work)
        if args.peers and (args.peers / "ort").is_dir():
            _write_artifacts(network, work, args.peers)
        for _ in range(args.rounds):  # in turn, so that a slow minute does not hit one column
            for name, run in zip(NATIVE, native, strict=True):
                _note(row, name, {"least": _least(run, args.seconds)})
            for name, kind in NODE.items():
                _note(row, name, _in_node(kind, network, work, args))
        for name, kind in SLOW_NODE.items():
            _note(row, name, _in_node(kind, network, work, args))
        for name, (kind, flags) in CHROMIUM.items():
            _in_chromium(name, kind, flags, row, network, work, args)
        if network.name == "digits" and _browser.CHROMIUM:
            row["first_step"] = _first_step(network, work, args)
    return row


def head(args: Namespace) -> dict:
    """Return the machine, the versions, and the sizes of the peers."""
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    return {
        **facts("processor", "machine", "date", "busy"),
        "node": node.stdout.strip(),
        **facts("tvm", "torch"),
        "sizes": _peer_sizes(args.peers),
    }


def _packed(head: dict, rows: Rows) -> dict:
    """Return the contents of the file: the version of Chromium and the first step of a page stand
    beside the rows."""
    shared = ("chromium", "first_step")
    found = {key: row[key] for row in rows.values() for key in shared if key in row}
    plain = [{k: v for k, v in row.items() if k not in shared} for row in rows.values()]
    return {**head, "rows": plain, **found}


def _note(row: dict, name: str, found: dict) -> None:
    """Note the least milliseconds of a step, or the reason why there are none."""
    if "least" in found:
        known = row["ms"].get(name)
        row["ms"][name] = round(min(found["least"], known or found["least"]), 3)
        if found.get("steps") == 1:
            row.setdefault("first_steps", []).append(name)
        row.get("reasons", {}).pop(name, None)
    elif row["ms"].get(name) is None and "missing" not in found:
        row["ms"][name] = None
        row.setdefault("reasons", {})[name] = found.get("error", "no answer")


def _exported(network: Small, work: Path) -> tuple[dict, list[Callable[[], object]]]:
    """Export a network for pages and for this machine; return the sizes of the module, and the runs
    of native steps."""
    inputs, targets = network.batch()
    imported = from_module(network.made(), (inputs,), loss=cross_entropy, targets=(targets,))
    target = relax_grad.target.x86_64("v2", 1)
    trainer = Trainer(train_step(imported, SGD(0.05)), target=target)
    (work / "relaxed").mkdir(exist_ok=True)
    trainer.export(work / network.name, target=relax_grad.target.wasm())
    relaxed = relax_grad.target.wasm(relaxed_simd=True)
    trainer.export(work / "relaxed" / network.name, target=relaxed)
    trainer.export(work / f"{network.name}.native", runtime="none", target=target)
    module = (work / network.name / "step.wasm").read_bytes()
    sizes = {"bytes": len(module), "gzip": len(gzip.compress(module, 9))}
    arrays = dict(zip(trainer.train_step.batch, (inputs.numpy(), targets.numpy()), strict=True))
    return sizes, [
        _native(work / f"{network.name}.native", arrays),
        _torch(network, inputs, targets),
    ]


def _native(folder: Path, arrays: dict) -> Callable[[], object]:
    """Return a step of the same C as in a page, with kernels for x86-64-v2."""
    sys.path.append(str(HERE.parent / "tests" / "support"))
    import static_trainer

    own = static_trainer.StaticTrainer(static_trainer.built(folder))
    given, count = static_trainer._tensors(arrays)
    result = static_trainer.Result()

    def step() -> float:
        assert arrays  # the memory of the pointers in given
        own.call("step", own.handle, given, count, ctypes.byref(result))
        return result.loss

    return step


def _torch(network: Small, inputs, targets) -> Callable[[], object]:
    made = network.made()
    optimizer = torch.optim.SGD(made.parameters(), 0.05)

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(made(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _least(run: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        run()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - begin)
    return 1e3 * least


def _described(network: Small) -> dict:
    return {
        "name": network.name,
        "shape": network.shape,
        "classes": network.classes,
        "tokens": network.tokens,
    }


def _in_node(kind: str, network: Small, work: Path, args: Namespace) -> dict:
    if kind != "relax_grad" and args.peers is None:
        return {"missing": "--peers"}
    text = json.dumps(_described(network))
    command = ["node", HERE / "web/node.mjs", kind, text, str(args.seconds), work, args.peers or ""]
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=args.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no two steps in {args.limit:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-300:]}
    return json.loads(done.stdout.splitlines()[-1])


def _in_chromium(
    name: str,
    kind: str,
    flags: Sequence[str],
    row: dict,
    network: Small,
    work: Path,
    args: Namespace,
) -> None:
    if _browser.CHROMIUM is None or (not name.startswith("relax_grad") and args.peers is None):
        return
    if kind == "onnxruntime" and not (work / "artifacts").is_dir():
        return
    query = {
        "kind": kind,
        "seconds": str(args.seconds),
        "networks": json.dumps([_described(network)]),
    }
    limit = 2 * args.limit + 10
    found = _browser.rows_of("page.html", query, _folders(work, args), limit, flags)
    answers = [answer for answer in found if "error" in answer or "name" in answer]
    _note(row, name, next(iter(answers), {}))
    if "done" in found[-1]:
        row["chromium"] = found[-1]["done"]


def _folders(work: Path, args: Namespace) -> dict[str, Path]:
    modules = (args.peers or work) / "node_modules"
    return {
        "": HERE / "web",
        "models": work,
        "node_modules": modules,
        "artifacts": work / "artifacts",
    }


def _first_step(network: Small, work: Path, args: Namespace) -> dict:
    """Return the least milliseconds from the loaded script of a page to the end of its first step,
    and those before it."""
    query = {"networks": json.dumps([_described(network)])}
    best: dict = {}
    for _ in range(5):
        for row in _browser.rows_of("first_step.html", query, _folders(work, args), 60):
            if "first_step" in row:
                ms = round(row["first_step"] - row["loaded"], 1)
                if ms < best.get("ms", float("inf")):
                    best = {"page_ms": round(row["loaded"], 1), "ms": ms}
    return best


class _Rows(torch.nn.Module):
    """A network whose classes are on the last axis of two."""

    def __init__(self, network: Small):
        super().__init__()
        self.network, self.classes = network.made(), network.classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).reshape(-1, self.classes)


def _write_artifacts(network: Small, work: Path, peers: Path) -> None:
    """Write a network as ONNX, and the files that ONNX Runtime trains from."""
    (work / "onnx").mkdir()
    with contextlib.suppress(Exception):  # the page reports that the files are missing
        torch.onnx.export(
            _Rows(network) if network.tokens else network.made(),
            (network.batch()[0],),
            work / "onnx" / f"{network.name}.onnx",
            input_names=["input"],
            output_names=["output"],
            opset_version=15,
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
        )
    paths = os.pathsep.join([str(HERE), str(peers.absolute() / "ort")])
    folders = str(work / "onnx"), str(work / "artifacts")
    variables = {"PYTHONPATH": paths}
    try:
        in_process("_artifacts", "make", *folders, environment=variables, seconds=180)
    except RuntimeError as error:
        print(error)


#: The files of the peers that a page loads.
_PEER_FILES = {
    "TensorFlow.js": ["@tensorflow/tfjs/dist/tf.min.js"],
    "TensorFlow.js, WebAssembly": [
        "@tensorflow/tfjs/dist/tf.min.js",
        "@tensorflow/tfjs-backend-wasm/dist/tf-backend-wasm.min.js",
        "@tensorflow/tfjs-backend-wasm/dist/tfjs-backend-wasm-simd.wasm",
    ],
    "ONNX Runtime 1.19.2, training": [
        "onnxruntime-web/dist/ort.training.wasm.min.mjs",
        "onnxruntime-web/dist/ort-training-wasm-simd-threaded.mjs",
        "onnxruntime-web/dist/ort-training-wasm-simd-threaded.wasm",
    ],
}


def _peer_sizes(peers: Path | None) -> dict[str, dict[str, int]]:
    """Return the bytes of what pages load of the peers, and those with gzip."""
    sizes = {}
    for name, files in _PEER_FILES.items():
        paths = [(peers or HERE) / "node_modules" / file for file in files]
        if all(path.exists() for path in paths):
            data = [path.read_bytes() for path in paths]
            compressed = sum(len(gzip.compress(part, 9)) for part in data)
            sizes[name] = {"bytes": sum(map(len, data)), "gzip": compressed}
    return sizes


BENCHMARK = Benchmark(
    rows=lambda args: {network.name: network for network in PAGES},
    measure=measured,
    json="web.json",
    head=head,
    layout=Layout(_packed),
    seconds=1.0,
    options={
        "--peers": {"type": Path, "help": "a folder with node_modules"},
        "--rounds": {"type": int, "default": 2, "help": "of native and Node (default: 2)"},
        "--limit": {"type": float, "default": 20.0, "help": "seconds for a slow peer's steps"},
    },
)
