"""Measure training steps in Node and Chromium, beside TensorFlow.js, ONNX Runtime and PyTorch.

``make bench-web`` fetches the peers into build/peers, measures five networks in one thread, and
writes docs/_measured/web.json, from which docs/web_speed.md is built. It needs Node, clang and
Chromium (``tests/support/tools.sh browser``) and takes five minutes on an idle machine.

``--peers FOLDER`` names the folder with node_modules, and with onnxruntime-training-cpu 1.19.2 in
``ort``, which writes what ONNX Runtime trains from. Peers that are missing are left out. WebGL and
WebGPU run on the CPU here, by SwiftShader, where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _browser
from _small_models import PAGES, Small, cross_entropy

HERE = Path(__file__).parent
ROOT = HERE.parent

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


def main() -> int:
    args = _parser().parse_args()
    for variable in ("OMP_NUM_THREADS", "TVM_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    networks = [network for network in PAGES if (args.only or "") in network.name]
    if not networks:
        raise SystemExit(f"no network contains {args.only!r}; there are {[n.name for n in PAGES]}")
    with tempfile.TemporaryDirectory() as directory:
        measured = _measured(networks, Path(directory), args)
    args.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"written to {args.out}")
    return 0


def _measured(networks: Sequence[Small], work: Path, args: argparse.Namespace) -> dict:
    from importlib.metadata import version

    from measure import processor
    from scaling import _busy

    measured: dict = {
        "processor": processor(),
        "machine": platform.machine(),
        "date": datetime.date.today().isoformat(),
        "busy": _busy(),
        "node": subprocess.run(
            ["node", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "tvm": version("apache-tvm"),
        "torch": version("torch"),
        "sizes": _peer_sizes(args.peers),
        "rows": [
            {"name": network.name, "title": network.title, "batch": network.shape[0], "ms": {}}
            for network in networks
        ],
    }
    rows = {row["name"]: row for row in measured["rows"]}
    native: dict[str, list[Callable[[], object]]] = {}
    for network in networks:
        begin = time.monotonic()
        rows[network.name]["wasm"], native[network.name] = _exported(network, work)
        print(f"{network.name}: exported in {time.monotonic() - begin:.0f} s", flush=True)
    if args.peers and (args.peers / "ort").is_dir():
        _write_artifacts(networks, work, args.peers)
    for _ in range(args.rounds):  # in turn, so that a slow minute does not hit one column
        for network in networks:
            row = rows[network.name]
            for name, run in zip(NATIVE, native[network.name], strict=True):
                _note(row, name, {"least": _least(run, args.seconds)})
            for name, kind in NODE.items():
                _note(row, name, _in_node(kind, network, work, args))
    for network in networks:
        for name, kind in SLOW_NODE.items():
            _note(rows[network.name], name, _in_node(kind, network, work, args))
    for name, (kind, flags) in CHROMIUM.items():
        _in_chromium(name, kind, flags, rows, networks, work, args, measured)
    if "digits" in rows and _browser.CHROMIUM:
        measured["first_step"] = _first_step(networks, work, args)
    return measured


def _note(row: dict, name: str, found: dict) -> None:
    """Note the least milliseconds of a step, or the reason why there are none, and print both."""
    print(f"{row['name']}, {name}: {found}", flush=True)
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
    import torch

    import relax_grad
    from relax_grad.frontend.torch import from_module
    from relax_grad.training import SGD, Trainer, train_step

    torch.set_num_threads(1)
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
    sys.path.append(str(ROOT / "tests" / "support"))
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
    import torch

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


def _in_node(kind: str, network: Small, work: Path, args: argparse.Namespace) -> dict:
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


def _in_chromium(name, kind, flags, rows, networks, work, args, measured) -> None:
    if _browser.CHROMIUM is None or (not name.startswith("relax_grad") and args.peers is None):
        return
    if kind == "onnxruntime" and not (work / "artifacts").is_dir():
        return
    query = {
        "kind": kind,
        "seconds": str(args.seconds),
        "networks": json.dumps(list(map(_described, networks))),
    }
    limit = 2 * args.limit + 10
    found = _browser.rows_of("page.html", query, _folders(work, args), limit, flags)
    answered = {row["name"]: row for row in found if "name" in row}
    general = next((row for row in found if "error" in row and "name" not in row), {})
    for network in networks:
        _note(rows[network.name], name, answered.get(network.name, general))
    agents = [row["done"] for row in found if "done" in row]
    measured.update({"chromium": agents[0]} if agents else {})


def _folders(work: Path, args: argparse.Namespace) -> dict[str, Path]:
    modules = (args.peers or work) / "node_modules"
    return {
        "": HERE / "web",
        "models": work,
        "node_modules": modules,
        "artifacts": work / "artifacts",
    }


def _first_step(networks: Sequence[Small], work: Path, args: argparse.Namespace) -> dict:
    """Return the least milliseconds from the loaded script of a page to the end of its first step,
    and those before it, of the digits CNN."""
    query = {"networks": json.dumps([_described(n) for n in networks if n.name == "digits"])}
    best: dict = {}
    for _ in range(5):
        for row in _browser.rows_of("first_step.html", query, _folders(work, args), 60):
            if "first_step" in row:
                ms = round(row["first_step"] - row["loaded"], 1)
                if ms < best.get("ms", float("inf")):
                    best = {"page_ms": round(row["loaded"], 1), "ms": ms}
    print(f"first step: {best}", flush=True)
    return best


def _write_artifacts(networks: Sequence[Small], work: Path, peers: Path) -> None:
    """Write the networks as ONNX, and what ONNX Runtime trains from."""
    import torch

    class Rows(torch.nn.Module):
        def __init__(self, network: Small):
            super().__init__()
            self.network, self.classes = network.made(), network.classes

        def forward(self, x):
            return self.network(x).reshape(-1, self.classes)

    def export(network: Small) -> None:
        torch.onnx.export(
            Rows(network) if network.tokens else network.made(),
            (network.batch()[0],),
            work / "onnx" / f"{network.name}.onnx",
            input_names=["input"],
            output_names=["output"],
            opset_version=15,
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
        )

    (work / "onnx").mkdir()
    for network in networks:
        with contextlib.suppress(Exception):  # the page reports that the files are missing
            export(network)
    command = [sys.executable, HERE / "_artifacts.py", work / "onnx", work / "artifacts"]
    environment = {**os.environ, "PYTHONPATH": str(peers.absolute() / "ort")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=180,
        env=environment,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    print("\n".join(errors), file=sys.stderr)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="a folder with node_modules")
    parser.add_argument("--only", metavar="TEXT", help="a part of the name of a network")
    parser.add_argument("--seconds", type=float, default=1.0, help="of samples (default: 1)")
    parser.add_argument("--rounds", type=int, default=2, help="of native and Node (default: 2)")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for a slow peer's steps")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/_measured/web.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
