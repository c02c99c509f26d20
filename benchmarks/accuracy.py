"""Measure the error of every gradient in every dtype, against float64.

``python benchmarks/accuracy.py`` differentiates the samples of every operator, writes the largest
error of each operator and dtype to docs/_measured/accuracy.json, and draws them. With names of
operators as arguments, it measures only those, and adds their errors to the stored ones.
``--kernels`` measures only the kernels in half precision, beside PyTorch's. ``--plot`` draws the
stored measurements.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tvm
from _pages import for_both
from measure import processor

from relax_grad.testing import _program
from relax_grad.testing.check import resolve, select_wrt
from relax_grad.testing.parity import PreparedParity, TorchCase
from relax_grad.testing.samples import Sample, sampled_operators, samples
from relax_grad.testing.samples._sample import _makers, cast

RESULTS = Path(__file__).parents[1] / "docs" / "_measured"
DTYPES = ("float64", "float32", "float16", "bfloat16")

#: The number of samples of an operator that are measured in each dtype.
_SAMPLES = 4

#: The distance from 1 to the next number.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

#: Smaller errors, in epsilons, are drawn as this one.
_LEAST = 0.01

#: The colours of the dtypes, of text and of lines, and the same on a dark page.
_COLOURS, _INK, _FAINT = ("#1b7837", "#2166ac", "#b2182b", "#b8860b"), "#333333", "#cccccc"
_DARK = {
    "#1b7837": "#7fd08f",
    "#2166ac": "#7cb5f0",
    "#b2182b": "#ff8f87",
    "#b8860b": "#f0c35a",
    _INK: "#d0d0d0",
    _FAINT: "#555555",
}


@dataclass(frozen=True)
class Error:
    """The largest error of an operator's gradients in a dtype.

    Attributes
    ----------
    relative : float
        The largest difference of an element, relative to the largest element of the same gradient.
    sample : str
        The note of the sample with this error, and the argument.
    count : int
        The number of measured samples.
    """

    relative: float
    sample: str
    count: int


def main() -> int:
    args = _parser().parse_args()
    if args.kernels:
        _write(_stored() | {"kernels": _kernels()})
        return 0
    stored = _stored() if args.operators or args.plot else {}
    if args.plot:
        draw(stored)
        return 0
    names = args.operators or sampled_operators()
    measured = {}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for number, (name, errors) in enumerate(pool.imap(_named, names), start=1):
            measured[name] = errors
            line = "  ".join(
                f"{dtype} {e.relative:.1e} ({e.sample})" for dtype, e in errors.items()
            )
            print(f"{number}/{len(names)} {name}: {line}", flush=True)
    errors = stored.get("errors", {}) | _plain(measured)
    results = {"about": about(), "errors": dict(sorted(errors.items()))}
    if stored and stored["about"] != results["about"]:
        print(f"not stored: the other operators were measured with {stored['about']}; measure all")
        return 1
    results["kernels"] = stored["kernels"] if stored else _kernels()
    _write(results)
    draw(results)
    return 0


def _write(results: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "accuracy.json").write_text(written(results))


def written(results: dict) -> str:
    """Return the text of the file: a line for each operator and each case of kernels."""
    return _lines(results, 4, {"about": 0, "errors": 1}) + "\n"


def _lines(value: object, depth: int, depths: Mapping[str, int], margin: str = "") -> str:
    """Return a text with a line for each value at a depth; some keys have another depth."""
    if not depth or not isinstance(value, dict):
        return json.dumps(value)
    inner = f"{margin} "
    lines = [
        f"{inner}{json.dumps(key)}: {_lines(entry, depths.get(key, depth - 1), {}, inner)}"
        for key, entry in value.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"


def _kernels() -> dict:
    """Return the errors of kernels in half precision: ours and PyTorch's, with two digits."""
    from _half_kernels import measured

    return {"about": about(), "errors": _rounded(measured())}


def _rounded(errors: float | dict) -> float | dict:
    if isinstance(errors, dict):
        return {name: _rounded(value) for name, value in errors.items()}
    return float(f"{errors:.1e}")


def _stored() -> dict:
    return json.loads((RESULTS / "accuracy.json").read_text())


def _named(operator: str) -> tuple[str, dict[str, Error]]:
    return operator, measure(operator)


def measure(operator: str) -> dict[str, Error]:
    """Return the largest error of an operator's samples, by dtype.

    Inputs and cotangents are rounded to the dtype first, and the gradient of the same numbers is
    computed in float64: the error is that of the computation. Float64 itself is compared with
    PyTorch's float64, for the samples with a function in PyTorch.
    """
    measured: dict[str, list[tuple[float, str]]] = {}
    for sample, dtypes in _chosen(operator):
        with sample.within():
            for dtype, error, argument in _errors(sample, dtypes):
                note = f"{sample.note}, {argument}"
                measured.setdefault(dtype, []).append((error, note))
    return {
        dtype: Error(*max(measured[dtype]), len(measured[dtype]))
        for dtype in DTYPES
        if dtype in measured
    }


def _chosen(operator: str) -> Iterator[tuple[Sample, list[str]]]:
    """Yield samples with the dtypes to measure them in: for each dtype, the first samples that
    support it."""
    left = dict.fromkeys(DTYPES, _SAMPLES)
    for sample in samples(operator):
        can = [*(["float64"] if sample.torch else []), *sample.dtypes] if sample.smooth else []
        chosen = [dtype for dtype in can if left[dtype]]
        left.update({dtype: left[dtype] - 1 for dtype in chosen})
        if chosen:
            yield sample, chosen


def _errors(sample: Sample, dtypes: Sequence[str]) -> Iterator[tuple[str, float, str]]:
    """Yield dtype, error and argument of the worst gradient of a sample in each of some dtypes."""
    narrow = [dtype for dtype in dtypes if dtype != "float64"]
    programs = {dtype: _first_order(sample, dtype) for dtype in ("float64", *narrow)}
    exact = programs["float64"]
    wrt = select_wrt(exact.arguments, sample.wrt)
    modules = [_program.differentiate(program, wrt) for program in programs.values()]
    together = _program.merge(modules)
    for number in range(1, len(modules) + 1):
        del together[f"main_{number}"]
    run = _program.compile_module(together, "llvm")
    for number, (dtype, program) in enumerate(programs.items(), start=1):
        grads = run(f"main_{number}_adjoint", program.values())[1]
        if dtype not in dtypes:
            continue
        if dtype == "float64":
            wanted = _of_torch(sample)
        else:
            wanted = run("main_1_adjoint", _same_values(program, exact))[1]
        if wanted is not None:
            yield dtype, *max(map(_relative, grads, wanted, wrt), default=(0.0, ""))


def _first_order(sample: Sample, dtype: str) -> _program.Program:
    _, function = resolve(sample.function or sample.op)
    arguments = _program.make_arguments(cast(sample.inputs, dtype), None, {})
    return _program.first_order(function, arguments, sample.attrs, np.random.default_rng(0))


def _same_values(narrow: _program.Program, exact: _program.Program) -> list[np.ndarray]:
    """Return the values of a program in the dtypes of another."""
    pairs = zip(narrow.arguments, exact.arguments, strict=True)
    return [a.value.astype(_program.numpy_dtype(b.dtype)) for a, b in pairs]


def _of_torch(sample: Sample) -> list[np.ndarray] | None:
    """Return PyTorch's gradients in float64, or None if PyTorch or the function in it is
    missing."""
    if sample.torch is None or not importlib.util.find_spec("torch"):
        return None
    function = sample.function or sample.op
    case = TorchCase(function, sample.inputs, sample.torch, sample.attrs, sample.wrt)
    return PreparedParity(case, "relax_grad", 0.0, 0).run_torch()[1]


def _relative(result: np.ndarray, wanted: np.ndarray, argument: str) -> tuple[float, str]:
    if not wanted.size:
        return 0.0, argument
    result, wanted = result.astype("float64"), wanted.astype("float64")
    error = np.where(result == wanted, 0.0, np.abs(result - wanted)).max()
    scale = np.abs(wanted).max()
    return float(error / scale if scale else error), argument


def about() -> dict[str, str]:
    """Return the software and hardware of the measurement."""
    torch = importlib.util.find_spec("torch") and importlib.import_module("torch").__version__
    return {
        "processor": processor(),
        "python": platform.python_version(),
        "tvm": tvm.__version__,
        "numpy": np.__version__,
        "torch": torch or "not installed",
    }


def draw(results: dict, folder: Path = RESULTS) -> None:
    """Draw the errors into a folder, with a row for each family of operators."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    # The same numbers yield the same file.
    mpl.rcParams.update({"svg.hashsalt": "accuracy", "svg.fonttype": "none"})
    families = _families(results["errors"])
    figure, axes = pyplot.subplots(figsize=(8, 0.27 * len(families) + 1.2))
    for row, errors in enumerate(families.values()):
        for offset, (dtype, colour) in enumerate(zip(DTYPES, _COLOURS, strict=True)):
            relative = [
                entry[dtype]["relative"] / EPSILON[dtype] for entry in errors if dtype in entry
            ]
            heights = [row + 0.17 * (offset - 1.5)] * len(relative)
            axes.scatter(np.maximum(relative, _LEAST), heights, 9, colour, lw=0, alpha=0.8)
    for dtype, colour in zip(DTYPES, _COLOURS, strict=True):
        axes.scatter([], [], 16, colour, label=dtype)
    axes.axvline(1, color=_INK, lw=0.8)
    _finish(axes, list(families))
    drawn = io.StringIO()
    options = {"transparent": True, "bbox_inches": "tight", "metadata": {"Date": None}}
    figure.savefig(drawn, format="svg", **options)
    pyplot.close(figure)
    (folder / "accuracy.svg").write_text(for_both(drawn.getvalue(), _DARK), "utf-8")


def _finish(axes, families: list[str]) -> None:
    """Label the axes, and give everything except the dots the colours of the page."""
    axes.set_xscale("log")
    axes.set_yticks(range(len(families)), families, color=_INK)
    axes.set_ylim(len(families) - 0.4, -0.6)
    axes.set_xlabel("error / epsilon of the dtype (at the left edge: none)", color=_INK)
    axes.grid(color=_FAINT, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    legend = axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_color(_INK)


def _families(errors: dict) -> dict[str, list[dict]]:
    """Return the errors of the operators of each module of samples, by the name of the module."""
    families: dict[str, list[dict]] = {}
    for name, entry in errors.items():
        if entry:
            maker = _makers[name]
            family = getattr(maker, "func", maker).__module__.rpartition(".")[2]
            families.setdefault(family, []).append(entry)
    return dict(sorted(families.items()))


def _plain(measured: dict[str, dict[str, Error]]) -> dict:
    """Return the errors as written to the file: with three digits, more than are reproducible."""
    return {
        name: {
            dtype: asdict(replace(error, relative=float(f"{error.relative:.2e}")))
            for dtype, error in errors.items()
        }
        for name, errors in measured.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("operators", nargs="*", help="operators to measure; by default all")
    parser.add_argument(
        "--kernels", action="store_true", help="measure only kernels in half precision"
    )
    parser.add_argument("--plot", action="store_true", help="draw the stored measurements")
    parser.add_argument("--jobs", type=int, default=2, help="processes that measure (default: 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
