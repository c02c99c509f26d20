"""The planned memory of a training step beside the memory that a process takes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import without_torch
from tvm import relax
from tvm.relax import op

from relax_grad.frontend import random
from relax_grad.training import SGD, Adam, AdamW, memory_of, train_step

_PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
import numpy as np, tvm
from tvm import relax
from tvm.relax import op
from relax_grad.training import SGD, Trainer, memory_of, train_step

ROWS, WIDTH = 8192, 256
variables = [relax.Var("x", relax.TensorType((ROWS, WIDTH), "float32"))]
variables += [relax.Var(f"w{i}", relax.TensorType((WIDTH, WIDTH), "float32")) for i in range(6)]
bb = relax.BlockBuilder()
with bb.function("loss", variables):
    with bb.dataflow():
        y = variables[0]
        for w in variables[1:]:
            y = bb.emit(op.matmul(y, w))
            y = bb.emit(op.multiply(bb.emit(op.tanh(y)), bb.emit(op.sigmoid(y))))
        loss = bb.emit_output(op.mean(op.multiply(y, y)))
    bb.emit_func_output(loss)
names = [each.name for each in variables[1:]]
remat = None if sys.argv[1] == "none" else sys.argv[1]
step = train_step(bb.get(), SGD(0.1), wrt=names, remat=remat)
planned = memory_of(step)
values = {name: np.full((WIDTH, WIDTH), 0.01, "float32") for name in names}
trainer = Trainer(step, values=values)
batch = tvm.runtime.tensor(np.ones((ROWS, WIDTH), "float32"))

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

gc.collect()
ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
trainer.step(batch)
print(json.dumps([planned.peak, status("VmHWM") - before]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or "musl" in sys.version,
    reason="the peak memory of a process is reset through /proc of Linux",
)
def test_a_step_takes_the_planned_memory():
    peaks = {}
    for remat in ("none", "auto"):
        command = [sys.executable, "-c", _PROGRAM, remat]
        environment = without_torch()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        planned, taken = json.loads(done.stdout.splitlines()[-1])
        # Beside the storages: packed operands of products, the threads and the code that is loaded.
        assert 0.95 * planned <= taken <= 1.1 * planned + (12 << 20), (remat, planned, taken)
        peaks[remat] = planned, taken
    assert peaks["auto"][0] < 0.8 * peaks["none"][0]
    assert peaks["auto"][1] < 0.9 * peaks["none"][1]


def attention_step(length: int, rate: float):
    """Return the step of a causal attention that is written out, perhaps with dropout."""
    shape = 2, 4, length, 16
    x = relax.Var("x", relax.TensorType((2, length, 64), "float32"))
    w = relax.Var("w", relax.TensorType((3, 64, 64), "float32"))
    seed = relax.Var("seed", relax.TensorType((), "int64"))
    mask = relax.const(np.tri(length, dtype=bool))
    bb = relax.BlockBuilder()
    with bb.function("loss", [seed, x, w]):
        with bb.dataflow():
            heads = []
            for i in range(3):
                own = bb.emit(op.take(w, relax.const(i, "int64"), 0))
                rows = bb.emit(op.reshape(bb.emit(op.matmul(x, own)), (2, length, 4, 16)))
                heads.append(bb.emit(op.permute_dims(rows, [0, 2, 1, 3])))
            query, key, value = heads
            turned = bb.emit(op.permute_dims(key, [0, 1, 3, 2]))
            scores = bb.emit(op.multiply(bb.emit(op.matmul(query, turned)), relax.const(0.25)))
            scores = bb.emit(op.where(mask, scores, relax.const(-np.inf, "float32")))
            weights = bb.emit(op.nn.softmax(scores, -1))
            weights = random.dropout(bb, seed, 0, weights, rate)[0]
            assert tuple(map(int, weights.ty.shape)) == (*shape[:3], length)
            loss = bb.emit_output(op.mean(op.square(bb.emit(op.matmul(weights, value)))))
        bb.emit_func_output(loss)
    return train_step(bb.get(), SGD(0.1), wrt="w")


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_the_memory_of_attention_grows_with_the_length(rate):
    peaks = [memory_of(attention_step(length, rate)).peak for length in (512, 1024, 2048)]
    scores = 2 * 4 * 512 * 512 * 4
    assert peaks[0] < scores
    for shorter, other in itertools.pairwise(peaks):
        assert 1.5 < other / shorter < 2.1, peaks


def half_network(dtype: str):
    """Return the step of a convolutional network with batch normalisation, as PyTorch's models have
    it."""
    torch = pytest.importorskip("torch", reason="the network is PyTorch's")
    from relax_grad.frontend.torch import from_module

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            channels = (3, 16, 32, 32, 32)
            layers = []
            for inputs, filters in itertools.pairwise(channels):
                conv = torch.nn.Conv2d(inputs, filters, 3, padding=1, bias=False)
                layers += [conv, torch.nn.BatchNorm2d(filters), torch.nn.ReLU()]
            self.layers = torch.nn.Sequential(*layers)
            self.head = torch.nn.Linear(channels[-1], 10)

        def forward(self, images, labels):
            scores = self.head(self.layers(images).mean((2, 3)))
            return torch.nn.functional.cross_entropy(scores, labels)

    kind = getattr(torch, dtype)
    network = Network().train().to(kind)
    batch = torch.zeros(16, 3, 24, 24, dtype=kind), torch.zeros(16, dtype=torch.int64)
    imported = from_module(network, batch)
    return train_step(imported.module, SGD(0.1), wrt=list(imported.params))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_in_half_precision_take_half_the_memory(dtype):
    whole, half = (memory_of(half_network(kind)) for kind in ("float32", dtype))
    assert 2 * half.params == whole.params
    # The copy of the parameters in float32, which the optimizer updates.
    assert half.optimizer_state - whole.optimizer_state == whole.params
    assert half.intermediate < 0.6 * whole.intermediate


def test_the_table_of_half_precision_has_about_half_the_memory():
    file = Path(__file__).parents[2] / "docs" / "_measured" / "half_memory.json"
    for row in json.loads(file.read_text()):
        whole = row["memory"]["float32"]["intermediate"]
        for dtype in ("bfloat16", "float16"):
            assert row["memory"][dtype]["intermediate"] < 0.6 * whole, row["step"]


def perceptron(dtype: str = "float32"):
    """Return the loss of three square layers, whose weights are larger than the activations."""
    rows, width = 8, 128
    x = relax.Var("x", relax.TensorType((rows, width), dtype))
    names = ["w0", "w1", "w2"]
    weights = [relax.Var(name, relax.TensorType((width, width), dtype)) for name in names]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *weights]):
        with bb.dataflow():
            y = x
            for weight in weights:
                y = bb.emit(op.nn.relu(bb.emit(op.matmul(y, weight))))
            loss = bb.emit_output(op.mean(op.astype(op.multiply(y, y), "float32")))
        bb.emit_func_output(loss)
    return bb.get(), names


#: Steps, with the number of weights beside their activations and gradients that a step allocates.
UPDATES = {
    "sgd": (SGD(0.1), {}, 1),
    "nesterov": (SGD(0.1, momentum=0.9, weight_decay=0.1, nesterov=True), {}, 1),
    "adam": (Adam(weight_decay=0.1), {}, 1),
    "adamw": (AdamW(), {}, 1),
    "average": (AdamW(), {"ema": 0.9}, 1),
    "skips": (AdamW(), {"skip_nonfinite": True}, 3),
    "clipped": (AdamW(), {"skip_nonfinite": True, "clip_norm": 1.0}, 3),
    # Each gradient is alive with the scale of the loss and without it.
    "scaled": (SGD(0.1, momentum=0.9), {"loss_scale": "dynamic"}, 6),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in UPDATES), ("adamw", "bfloat16"), ("clipped", "bfloat16")],
)
def test_an_update_takes_the_memory_of_the_old_values(case, dtype):
    """Beside the gradients that must be alive together, a step has no copy of a parameter or a
    slot."""
    optimizer, options, gradients = UPDATES[case]
    module, names = perceptron(dtype)
    memory = memory_of(train_step(module, optimizer, wrt=names, **options))
    weight, rows = 128 * 128 * 4, 8 * 128 * 4
    assert memory.results <= 32  # the loss and metrics
    assert memory.intermediate <= gradients * weight + 16 * rows


def test_the_memory_on_a_device():
    """No GPU is needed. The groups are those of a CPU, whose fused kernels allocate less."""
    module, names = perceptron()
    step = train_step(module, AdamW(), wrt=names)
    on_cpu, on_device = memory_of(step), memory_of(step, device="cuda")
    assert on_device.params == on_cpu.params == 3 * 128 * 128 * 4
    assert on_device.optimizer_state == on_cpu.optimizer_state
    assert on_device.results == on_cpu.results + 1
    assert on_cpu.intermediate <= on_device.intermediate < 2 * on_device.params
    assert memory_of(step, device="cuda:1") == on_device


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, ValueError, 'device must be "cpu", "cuda" or "cuda:1", but it is'),
        ({"device": 1}, TypeError, 'device must be "cpu", "cuda" or "cuda:1", but it is 1'),
        ({"device": "cuda", "target": "llvm"}, ValueError, "has a target: leave target out"),
        ({"library": "torch"}, ValueError, 'library is for a device, such as device="cuda"'),
        ({"device": "cuda", "library": "cudnn"}, ValueError, "cudnn"),
    ],
)
def test_devices_that_are_refused(options, error, message):
    module, names = perceptron()
    with pytest.raises(error, match=message):
        memory_of(train_step(module, SGD(), wrt=names), **options)
