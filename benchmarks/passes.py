"""Time of each pass of the pipeline as a network grows.

The networks have small tensors and many layers. The passes of ``relax_grad.pipeline`` run one by
one on training steps with AdamW, which write to the memory of the old parameters, without TVM's
code generation after them.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

from _benchmark import Benchmark
from tvm import IRModule, relax

import relax_grad
from relax_grad.cpu import stages
from relax_grad.training import AdamW, train_step
from relax_grad.training._donation import donating
from relax_grad.transform import DispatchKernels

op = relax.op

#: The growth, for twice as many layers, above which a pass is marked.
LINEAR = 2.3

#: Passes that take less than this, in seconds, are not marked: their times are not accurate enough.
SHORT = 0.1


def _tensor(name: str, *shape: int) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, "float32"))


def norms(layers: int) -> tuple[list[relax.Var], Callable]:
    """``sin(rms_norm(x))``."""
    params = [_tensor("x", 8, 16), *(_tensor(f"w{i}", 16) for i in range(layers))]

    def body(bb, x, *weights):
        for weight in weights:
            x = bb.emit(op.sin(bb.emit(op.nn.rms_norm(x, weight, axes=[-1]))))
        return x

    return params, body


def residual(layers: int) -> tuple[list[relax.Var], Callable]:
    """``x + relu(batch_norm(conv2d(x)))``."""
    params = [_tensor("x", 2, 8, 6, 6)]
    for i in range(layers):
        params += [_tensor(f"w{i}", 8, 8, 3, 3)]
        params += [_tensor(f"{name}{i}", 8) for name in ("gamma", "beta", "mean", "variance")]

    def body(bb, x, *params):
        for i in range(0, len(params), 5):
            weight, *of_norm = params[i : i + 5]
            y = bb.emit(op.nn.conv2d(x, weight, padding=1))
            y = bb.emit(op.nn.batch_norm(y, *of_norm, axis=1))
            y = bb.emit(op.nn.relu(bb.emit(relax.TupleGetItem(y, 0))))
            x = bb.emit(op.add(x, y))
        return x

    return params, body


def dense(layers: int) -> tuple[list[relax.Var], Callable]:
    """Blocks of three convolutions, each of the concatenation of all tensors of its block, as in
    DenseNet."""
    width, growth = 8, 4
    params = [_tensor("x", 2, width, 6, 6)]
    for i in range(layers):
        params += [_tensor(f"w{i}_{k}", growth, width + k * growth, 3, 3) for k in range(3)]
        params.append(_tensor(f"shrink{i}", width, width + 3 * growth, 1, 1))

    def body(bb, x, *weights):
        for i in range(0, len(weights), 4):
            *convolutions, shrink = weights[i : i + 4]
            features = [x]
            for weight in convolutions:
                joined = bb.emit(op.concat(features, axis=1)) if len(features) > 1 else x
                y = bb.emit(op.nn.conv2d(joined, weight, padding=1))
                features.append(bb.emit(op.nn.relu(y)))
            x = bb.emit(op.nn.conv2d(bb.emit(op.concat(features, axis=1)), shrink))
        return x

    return params, body


def transformer(layers: int) -> tuple[list[relax.Var], Callable]:
    """Blocks of attention and of two dense layers, each after ``layer_norm``."""
    batch, length, width, heads = 2, 8, 16, 2
    params = [_tensor("x", batch, length, width)]
    for i in range(layers):
        params += [_tensor(f"{name}{i}", width) for name in ("gamma", "beta")]
        params += [_tensor(f"qkv{i}", width, 3 * width), _tensor(f"out{i}", width, width)]
        params += [_tensor(f"{name}{i}", width) for name in ("scale", "shift")]
        params += [_tensor(f"up{i}", width, 2 * width), _tensor(f"down{i}", 2 * width, width)]

    def block(bb, x, gamma, beta, qkv, out, scale, shift, up, down):
        y = bb.emit(op.nn.layer_norm(x, gamma, beta, axes=[-1]))
        parts = bb.emit(op.split(bb.emit(op.matmul(y, qkv)), 3, axis=-1))
        heads_of = []
        for i in range(3):
            part = bb.emit(relax.TupleGetItem(parts, i))
            part = bb.emit(op.reshape(part, (batch, length, heads, width // heads)))
            heads_of.append(bb.emit(op.permute_dims(part, [0, 2, 1, 3])))
        q, k, v = heads_of
        scores = bb.emit(op.matmul(q, bb.emit(op.permute_dims(k, [0, 1, 3, 2]))))
        y = bb.emit(op.matmul(bb.emit(op.nn.softmax(scores)), v))
        y = bb.emit(op.reshape(bb.emit(op.permute_dims(y, [0, 2, 1, 3])), (batch, length, width)))
        x = bb.emit(op.add(x, bb.emit(op.matmul(y, out))))
        y = bb.emit(op.nn.layer_norm(x, scale, shift, axes=[-1]))
        y = bb.emit(op.nn.gelu(bb.emit(op.matmul(y, up))))
        return bb.emit(op.add(x, bb.emit(op.matmul(y, down))))

    def body(bb, x, *params):
        for i in range(0, len(params), 8):
            x = block(bb, x, *params[i : i + 8])
        return x

    return params, body


NETWORKS = {"norms": norms, "residual": residual, "dense": dense, "transformer": transformer}


def network(name: str, layers: int) -> IRModule:
    """Return a module whose ``main`` returns the sum of the outputs of a network."""
    params, body = NETWORKS[name](layers)
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            loss = bb.emit_output(op.sum(body(bb, *params)))
        bb.emit_func_output(loss)
    return bb.get()


def passes(name: str, layers: int) -> Iterator[tuple[str, Callable[[IRModule], IRModule]]]:
    """Yield the measured stages of a network in order; each takes the result of the previous
    one."""
    yield "(build)", lambda _: network(name, layers)
    weights = [param.name for param in NETWORKS[name](layers)[0][1:]]

    def differentiated(module: IRModule) -> IRModule:
        relax_grad.value_and_grad(module, wrt=weights)
        return module

    def with_updates(module: IRModule) -> IRModule:
        return donating(train_step(module, AdamW(lr=1e-3), wrt=weights, func_name="main"))

    yield "Gradient", differentiated
    yield "(step)", with_updates
    target = relax_grad.target.host()
    for transform in stages.passes(target, DispatchKernels(target)):
        yield transform.info.name, transform


def measure(name: str, layers: int) -> dict[str, float]:
    """Return the seconds of each pass for a network; the runs of a repeated pass are added up.

    Python's garbage collector is off within a pass: a full collection takes time in proportion to
    all objects, and would count for the pass in which it happens to run.
    """
    seconds: dict[str, float] = {}
    module = None
    with relax_grad.target.host():
        for label, run in passes(name, layers):
            gc.collect()
            gc.disable()
            try:
                start = time.process_time()
                module = run(module)
                seconds[label] = seconds.get(label, 0.0) + time.process_time() - start
            finally:
                gc.enable()
    return seconds


def measured(name: str, args: Namespace) -> dict[str, dict]:
    """Return the least seconds of each pass for each number of layers, and the growth between the
    last two. A pass whose time grows faster than the layers is marked."""
    columns = []
    for count in args.layers:
        runs = [measure(name, count) for _ in range(args.repeats)]
        columns.append({label: min(run[label] for run in runs) for label in runs[0]})
    rows = {label: [column[label] for column in columns] for label in columns[0]}
    rows["all"] = [sum(column.values()) for column in columns]
    return {label: _figures(seconds, args.layers) for label, seconds in rows.items()}


def _figures(seconds: Sequence[float], layers: Sequence[int]) -> dict:
    found: dict = {"s": [round(second, 4) for second in seconds]}
    if len(layers) > 1:
        found["growth"] = round(seconds[-1] / seconds[-2], 2)
        if found["growth"] > LINEAR * layers[-1] / layers[-2] / 2 and seconds[-1] > SHORT:
            found["above"] = True
    return found


BENCHMARK = Benchmark(
    rows=lambda args: {name: name for name in NETWORKS},
    measure=measured,
    repeats=1,
    options={
        "--layers": {
            "nargs": "+",
            "type": int,
            "default": [100, 200, 400],
            "help": "how many layers, ascending (default: 100 200 400)",
        }
    },
)
