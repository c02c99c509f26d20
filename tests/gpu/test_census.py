"""The kernels of training steps for a GPU occupy it, by their schedules: no device is necessary."""

from __future__ import annotations

from pathlib import Path

import pytest
from tvm import relax

import relax_grad

from ._census import MULTIPROCESSORS, Kernel, kernels_of

#: The steps of a thread, and the steps of all threads below which a kernel may leave most of the
#: GPU idle.
_LONGEST, _LITTLE = 2**17, 2**26


def idle(kernels: list[Kernel], most: float = 1.5) -> list[Kernel]:
    """Return the kernels in which threads are few and slow; ``most`` is the allowed imbalance."""
    return [
        kernel
        for kernel in kernels
        if kernel.steps > _LONGEST or (kernel.imbalance > most and kernel.work > _LITTLE)
    ]


def layers():
    """Return a step of layers of a ResNet-18 for batches of 8x3x224x224, and of a linear layer of a
    transformer: the sums that are longest for their number of elements."""
    shapes = {
        "x": (8, 3, 224, 224),
        "stem": (64, 3, 7, 7),
        "same": (64, 64, 3, 3),
        "down": (128, 64, 3, 3),
        "point": (128, 64, 1, 1),
        "tokens": (1024, 384),
        "linear": (384, 384),
        **{f"{name}_{kind}": (64,) for name in ("first", "second") for kind in "gbmv"},
    }
    variables = {
        name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()
    }
    bb = relax.BlockBuilder()

    def norm(x, name):
        statistics = [variables[f"{name}_{kind}"] for kind in "gbmv"]
        result = relax.op.nn.batch_norm(x, *statistics, axis=1, training=True)
        return bb.emit(relax.op.nn.relu(bb.emit(result)[0]))

    def conv(x, name, stride):
        padding = (shapes[name][-1] - 1) // 2
        return bb.emit(relax.op.nn.conv2d(x, variables[name], strides=stride, padding=padding))

    with bb.function("main", list(variables.values())):
        with bb.dataflow():
            wide = norm(conv(variables["x"], "stem", 2), "first")
            pooled = bb.emit(relax.op.nn.max_pool2d(wide, (3, 3), (2, 2), (1, 1)))
            same = norm(conv(pooled, "same", 1), "second")
            both = bb.emit(conv(same, "down", 2) + conv(same, "point", 2))
            product = bb.emit(relax.op.matmul(variables["tokens"], variables["linear"]))
            sums = bb.emit(relax.op.mean(both)), bb.emit(relax.op.mean(product))
            loss = bb.emit_output(sums[0] + sums[1])
        bb.emit_func_output(loss)
    wrt = ["x", "stem", "same", "down", "point", "linear", "first_g", "second_b"]
    return relax_grad.value_and_grad(bb.get(), wrt=wrt)


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    return kernels_of(layers())


def test_no_layer_leaves_the_gpu_idle(kernels):
    assert idle(kernels) == []


@pytest.mark.parametrize(
    ("name", "number"),
    [("weight_parts", 3), ("data_phases", 3), ("matmul_parts", 1)],
)
def test_these_layers_have_the_schedules_of_long_sums(kernels, name, number):
    assert len({k.name for k in kernels if name in k.name and "sum" not in k.name}) >= number


def test_a_kernel_of_few_blocks_is_found():
    one = Kernel("batch_norm", 1, 1024, 100352)
    few = Kernel("conv2d_backward_weight", 18, 128, 100352)
    even = Kernel("conv2d", 2 * MULTIPROCESSORS, 128, 100352)
    small = Kernel("sum", 1, 256, 100)
    assert idle([one, few, even, small]) == [one, few]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_no_kernel_of_a_network_leaves_the_gpu_idle(number, monkeypatch, torch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from _models import STEPS
    from _steps import in_relax

    step = STEPS[number]
    made, _ = in_relax(step.network().train(), step.inputs(), remat="light")
    module = relax.transform.DeadCodeElimination(["step"])(made.module)
    module = relax.transform.InlinePrivateFunctions()(module)
    # TVM's forward convolutions and the data gradients do not divide their sums.
    kernels = kernels_of(relax.transform.CanonicalizeBindings()(module))
    assert idle(kernels, 2.5) == [], step.name
