"""Measure matrix products against PyTorch and the peak of the processor, for each width of vectors.

``python benchmarks/products.py`` measures large products, interleaved, and small ones in blocks with a pause between the
contestants, and writes ``docs/_measured/products/PROCESSOR.json``: a file for each machine. PyTorch is held to AVX2
for the columns of AVX2. The peak is that of multiply-adds in registers, by a loop in C (``cc`` compiles it).

``--candidates`` measures the ways to compute each small product in one thread, and lists the products for which the
chosen one is more than 10 % slower than another.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

from measure import processor

HERE = Path(__file__).parent

#: For each width of vectors: LLVM's processor (None: this one), the compiler's flags, and PyTorch's environment.
WIDTHS: dict[str, tuple[str | None, list[str], dict[str, str]]] = {
    "host": (None, ["-march=native"], {}),
    "avx2": (
        "haswell",
        ["-mavx2", "-mfma"],
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
}

LARGE = [
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 1536, 384),
    (1024, 384, 1536),
    (1024, 2304, 768),
    (1024, 768, 3072),
    (1000, 1000, 1000),
]

#: Rows of small products, and their columns and depths: layers of perceptrons, cells of recurrent nets, adapters of low
#: rank, heads of attention, classifiers.
_ROWS = (1, 8, 16, 32, 64, 128)
_LAYERS = (
    (16, 64),
    (64, 64),
    (256, 64),
    (64, 256),
    (10, 1024),
    (16, 768),
    (768, 16),
    (256, 784),
    (1024, 256),
    (1024, 1024),
)
SMALL = [(rows, *layer) for rows in _ROWS for layer in _LAYERS]

#: Whether the first and the second factor are transposed.
_FORMS = ("NN", "NT", "TN", "TT")


def main() -> None:
    args = _parser().parse_args()
    if args.part is not None:
        print(json.dumps(_measured(args.part, args)))
        return
    if args.candidates:
        for width in args.vectors:
            _candidates(width)
        return
    result = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "threads": 2,
        "units": {
            "peak": "GFLOP/s of 1 and 2 threads",
            "gflops": "GFLOP/s of relax_grad, by the least time",
            "median": "time of relax_grad / time of PyTorch, the median of paired samples",
            "least": "least time of relax_grad / least time of PyTorch",
        },
    }
    for width in args.vectors:
        command = [sys.executable, __file__, "--part", width, "--repeats", str(args.repeats)]
        threads = dict.fromkeys(("TVM_NUM_THREADS", "OMP_NUM_THREADS"), "2")
        environment = {**os.environ, **WIDTHS[width][2], **threads}
        made = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        result[width] = json.loads(made.stdout.splitlines()[-1])
        print(_summary(width, result[width]))
    name = re.sub(r"[^a-z0-9]+", "-", f"{result['processor']} {_target(None)}".lower()).strip("-")
    path = args.out / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(result))
    print(f"written to {path}")


def _measured(width: str, args: argparse.Namespace) -> dict:
    """Return the peak and the rows of a width; in a process whose environment holds PyTorch to this width."""
    import numpy as np
    import torch
    import tvm
    from _timing import measure, raise_mmap_threshold
    from rows.products import product
    from tvm import relax

    import relax_grad

    torch.set_num_threads(2)
    relax_grad.set_num_threads(2)
    raise_mmap_threshold()
    peak = [_peak(WIDTHS[width][1], number) for number in (1, 2)]
    target = tvm.target.Target({"kind": "llvm", "mcpu": _target(width), "num-cores": 2})
    rows = []
    for sizes in [*LARGE, *SMALL]:
        forms = [product(*sizes, form[0] == "T", form[1] == "T") for form in _FORMS]
        for form, row in zip(_FORMS, forms, strict=True):
            arrays = row.arrays()
            executable = tvm.compile(row.module(arrays), target, relax_pipeline="relax_grad")
            function = relax.VirtualMachine(executable, tvm.cpu())["main"]
            ours = [tvm.runtime.tensor(array) for array in arrays]
            theirs = [torch.from_numpy(array) for array in arrays]

            def by_torch(row=row, tensors=theirs):
                with torch.no_grad():
                    return row.torch(*tensors)

            with torch.no_grad():
                wanted = by_torch().numpy()
            np.testing.assert_allclose(
                function(*ours).numpy(), wanted, rtol=1e-3, atol=1e-3 * math.sqrt(sizes[2])
            )
            contestants = {"ours": lambda f=function, x=ours: f(*x), "torch": by_torch}
            times = measure(contestants, args.repeats, 20)
            ratios = sorted(a / b for a, b in zip(times["ours"], times["torch"], strict=True))
            least = min(times["ours"])
            rows.append(
                {
                    "group": "large" if sizes in LARGE else "small",
                    "form": form,
                    "sizes": list(sizes),
                    "us": round(least * 1e6, 2),
                    "gflops": round(2 * math.prod(sizes) / least / 1e9, 1),
                    "median": _digits(ratios[len(ratios) // 2]),
                    "least": _digits(least / min(times["torch"])),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    peak = [max(before, _peak(WIDTHS[width][1], n)) for n, before in zip((1, 2), peak, strict=True)]
    return {"target": _target(width), "peak": [round(value) for value in peak], "rows": rows}


def _digits(ratio: float) -> float:
    """Return a ratio with two digits after the point, or two digits."""
    return round(ratio, 2) if ratio > 0.1 else float(f"{ratio:.1e}")


def _target(width: str | None) -> str:
    import relax_grad

    named = None if width is None else WIDTHS[width][0]
    return named or str(relax_grad.target.host().attrs["mcpu"])


def _peak(flags: list[str], threads: int) -> float:
    """Return the GFLOP/s of multiply-adds in registers, in so many threads."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "peak.so")
        command = ["cc", "-O2", "-ffp-contract=fast", "-shared", "-fPIC", *flags]
        subprocess.run([*command, "-o", str(path), str(HERE / "_peak.c")], check=True)
        library = ctypes.CDLL(str(path))
    library.multiply_adds.restype = ctypes.c_double
    real, pointer = ctypes.c_float, ctypes.POINTER(ctypes.c_float)
    library.multiply_adds.argtypes = [ctypes.c_long, real, real, pointer]
    done = [0.0] * threads

    def run(i: int) -> None:
        done[i] = library.multiply_adds(10_000_000, 0.999, 0.001, real())

    best = 0.0
    for _ in range(15):
        workers = [threading.Thread(target=run, args=[i]) for i in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, sum(done) / (time.perf_counter() - start) / 1e9)
    return best


def _candidates(width: str) -> None:
    """Print the small products of which a candidate that was not chosen takes less than 90 % of the time."""
    os.environ["TVM_NUM_THREADS"] = "1"
    import numpy as np
    import tvm

    from relax_grad.cpu.codegen import lower
    from relax_grad.cpu.kernel.matmul import WAYS, Matmul, matmul
    from relax_grad.cpu.target import CPU

    target = tvm.target.Target({"kind": "llvm", "mcpu": _target(width), "num-cores": 1})
    target, count = lower.optimizing(target), 0
    for sizes in SMALL:
        for form in _FORMS:
            product = Matmul(*sizes, form[0] == "T", form[1] == "T")
            cpu = CPU.of(target)
            ways = [None, *(way for way in WAYS if product.allows(way))]
            made = {str(way): matmul(product, cpu, way=way) for way in ways}
            library = lower.library(made, target)
            functions = {name: library[name] for name in made}
            tensors = [tvm.runtime.tensor(np.ones(s, "float32")) for s in product.shapes()]
            calls = max(1, int(2e7 / math.prod(sizes)))
            least = dict.fromkeys(made, math.inf)
            for _ in range(15):
                for name, function in functions.items():
                    start = time.thread_time()
                    for _ in range(calls):
                        function(*tensors)
                    least[name] = min(least[name], (time.thread_time() - start) / calls)
            chosen, best = least.pop("None"), min(least.values())
            count += 1
            if chosen > 1.1 * best:
                times = ", ".join(f"{name} {value * 1e6:.2f}" for name, value in least.items())
                print(f"{width} {form} {sizes}: {chosen * 1e6:.2f} us; {times}")
    print(f"{width}: {count} products")


def _summary(width: str, part: dict) -> str:
    lines = [f"{width} ({part['target']}): peak {part['peak'][0]} and {part['peak'][1]} GFLOP/s"]
    for group in ("large", "small"):
        for form in _FORMS:
            rows = [row for row in part["rows"] if row["form"] == form and row["group"] == group]
            mean = math.exp(sum(math.log(row["median"]) for row in rows) / len(rows))
            worst = max(rows, key=lambda row: row["median"])
            share = min(row["gflops"] for row in rows) / part["peak"][1]
            lines.append(
                f"  {group} {form}: {mean:.2f} of PyTorch's time (mean of medians), most {worst['median']:.2f} "
                f"at {worst['sizes']}"
                + (f", least share of peak {share:.2f}" if group == "large" else "")
            )
    return "\n".join(lines)


def _text(result: dict) -> str:
    """Return JSON with a line for each row."""
    text = json.dumps(result, indent=1)
    return (
        re.sub(r"\{\s*(\"group\"[^}]*)\}", lambda m: "{" + " ".join(m[1].split()) + "}", text)
        + "\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vectors", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--repeats", type=int, default=7, help="samples of each (default: 7)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs/_measured/products")
    parser.add_argument(
        "--candidates", action="store_true", help="compare the ways to compute small products"
    )
    parser.add_argument("--part", choices=WIDTHS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
