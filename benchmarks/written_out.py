"""Attention as one operator beside attention that is written out.

Measured over a grid of sizes, by processor time; use ``--threads 1``. The operator should take at
most 1.05 of the time: where it takes more, ``relax_grad.transform.FuseAttention`` should leave the
attention.
"""

from __future__ import annotations

import time
from argparse import Namespace

import _paired
import numpy as np
import tvm
from _benchmark import Benchmark
from _paired import median_ratio
from _timing import measure
from tvm import relax

import relax_grad
from relax_grad.transform import FuseAttention

#: The batch, the number of heads, of queries, of keys, and of features.
SIZES = [
    (8, 8, 8, 8, 32),
    (64, 8, 8, 8, 16),
    (64, 8, 8, 8, 64),
    (16, 8, 11, 11, 48),
    (32, 15, 16, 16, 48),
    (64, 8, 16, 16, 16),
    (8, 8, 16, 16, 64),
    (16, 8, 16, 16, 128),
    (16, 8, 17, 17, 32),
    (8, 12, 24, 24, 96),
    (16, 8, 32, 32, 64),
    (64, 8, 32, 32, 16),
    (4, 8, 32, 32, 128),
    (8, 8, 33, 33, 32),
    (32, 4, 49, 49, 32),
    (4, 12, 50, 50, 64),
    (8, 8, 64, 64, 64),
    (2, 8, 64, 64, 128),
    (8, 8, 64, 64, 16),
    (1, 12, 77, 77, 64),
    (4, 8, 100, 100, 32),
    (1, 8, 127, 127, 80),
    (8, 4, 128, 128, 128),
    (8, 12, 128, 128, 64),
    (4, 8, 128, 128, 16),
    (2, 8, 40, 200, 64),
    (8, 12, 197, 197, 64),
    (1, 12, 256, 256, 64),
    (1, 8, 256, 256, 128),
    (1, 8, 256, 256, 32),
    (2, 8, 257, 257, 80),
    (1, 12, 384, 384, 64),
    (1, 8, 512, 512, 64),
    (1, 2, 512, 512, 128),
    (1, 1, 512, 512, 16),
    (1, 4, 1000, 1000, 48),
    (1, 1, 1024, 1024, 64),
    (1, 8, 1024, 1024, 64),
    (1, 1, 1024, 1024, 128),
    (1, 1, 1024, 1024, 16),
]

#: The forms of each size: whether there is a causal mask, and whether the heads are permuted, as
#: those of layers, which have them behind the positions.
FORMS = [(False, False), (True, False), (False, True)]


def rows(args: Namespace) -> dict[str, tuple]:
    """Return the sizes and forms by name."""
    named = {}
    for sizes in SIZES:
        for is_causal, is_permuted in FORMS:
            name = "x".join(map(str, sizes)) + ", causal" * is_causal + ", permuted" * is_permuted
            named[name] = sizes, is_causal, is_permuted
    return named


def written_out(sizes: tuple, is_causal: bool, is_permuted: bool) -> tvm.IRModule:
    """Return a module whose function ``main`` is an attention, with the heads before the
    positions, to which they may be permuted."""
    batch, heads, queries, keys, features = sizes
    shapes = [(batch, heads, length, features) for length in (queries, keys, keys)]
    if is_permuted:
        shapes = [(batch, length, heads, features) for length in (queries, keys, keys)]
    q, k, v = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in zip("qkv", shapes, strict=True)
    )
    op, bb = relax.op, relax.BlockBuilder()
    with bb.function("main", [q, k, v]):
        with bb.dataflow():
            if is_permuted:
                q, k, v = (bb.emit(op.permute_dims(x, [0, 2, 1, 3])) for x in (q, k, v))
            scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
            scores = bb.emit(op.multiply(scores, relax.const(features**-0.5, "float32")))
            if is_causal:
                mask = relax.const(np.tri(queries, keys, dtype=bool))
                hidden = relax.const(-np.inf, "float32")
                scores = bb.emit(op.where(mask, scores, hidden))
            weights = bb.emit(op.nn.softmax(scores, -1))
            y = op.matmul(weights, v)
            y = bb.emit_output(op.permute_dims(bb.emit(y), [0, 2, 1, 3]) if is_permuted else y)
        bb.emit_func_output(y)
    return bb.get()


def measured(row: tuple, args: Namespace) -> dict:
    """Return the times without and with gradients, after a comparison of the results."""
    sizes, is_causal, is_permuted = row
    target = _paired.prepared(args)
    module = written_out(sizes, is_causal, is_permuted)
    functions = {}
    for form, mod in (("written out", module), ("fused", FuseAttention()(module))):
        both = relax_grad.vjp(mod, "main", [0, 1, 2])
        functions[f"{form} forward"] = mod["main"]
        functions[f"{form} both"] = both["main_vjp"]
    names = {name.replace(" ", "_"): name for name in functions}
    mod = tvm.IRModule(
        {
            symbol: relax.utils.copy_with_new_vars(functions[name]).with_attr(
                "global_symbol", symbol
            )
            for symbol, name in names.items()
        }
    )
    mod = relax.transform.DeadCodeElimination(list(names))(mod)
    machine = relax.VirtualMachine(tvm.compile(mod, target, relax_pipeline="relax_grad"), tvm.cpu())
    rng = np.random.default_rng(0)
    params = functions["fused both"].params
    arrays = [
        tvm.runtime.tensor(rng.standard_normal([int(n) for n in param.ty.shape.values], "float32"))
        for param in params
    ]
    calls = {}
    for symbol, name in names.items():
        taken = arrays[: len(functions[name].params)]
        calls[name] = lambda call=machine[symbol], taken=taken: call(*taken)
    _check(sizes, calls["fused both"](), calls["written out both"]())
    times = measure(calls, args.repeats, args.seconds, time.thread_time)
    kinds = ("forward", "both")
    return {
        "sizes": list(sizes),
        "causal": is_causal,
        "permuted": is_permuted,
        "is_fused": "R.nn.attention" in functions["fused forward"].script(),
        "us": [round(min(times[f"fused {kind}"]) * 1e6, 1) for kind in kinds],
        "written_out_us": [round(min(times[f"written out {kind}"]) * 1e6, 1) for kind in kinds],
        "median": [
            median_ratio(times[f"fused {kind}"], times[f"written out {kind}"]) for kind in kinds
        ],
    }


def _check(sizes: tuple, ours, theirs) -> None:
    """Compare the result and the gradients of two forms."""
    pairs = [(ours[0], theirs[0]), *zip(ours[1], theirs[1], strict=True)]
    for own, other in pairs:
        own, other = own.numpy(), other.numpy()
        error = float(np.abs(own - other).max() / np.abs(other).max())
        if not error < 1e-4:
            raise ValueError(f"{sizes}: the results differ by {error:.1e} of the largest element")


UNITS = {
    "us": "microseconds of the operator: forward, and forward with gradients; the least times",
    "written_out_us": "microseconds of the form that is written out",
    "median": "time of the operator / time of the other form, the median of paired samples",
}

BENCHMARK = Benchmark(
    rows=rows,
    measure=measured,
    json="attention/written_out",
    head=lambda args: _paired.head(args, UNITS),
    layout=_paired.LAYOUT,
    summary=lambda rows: _paired.summary(
        rows, lambda row: "causal" if row["causal"] else "all", lambda row: max(row["median"])
    ),
)
