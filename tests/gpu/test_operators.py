"""Gradients on a GPU through TVM's default pipeline for GPUs, or the checks that need no device.

On a device, the gradients are checked numerically. Everywhere, their kernels are compiled for CUDA
and inspected: every function launches kernels, and no kernel does its work in one thread. With
nvcc, they are compiled to machine code. With g++, an emulation of threads, blocks and barriers runs
them on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import pytest
import tvm
from compile_cuda import compile_for_cuda, leaves, missing
from ptx import stale_loads
from tvm import relax

from relax_grad.testing import _arguments, _program
from relax_grad.testing.samples import Sample, sampled_operators, samples
from relax_grad.testing.samples._sample import cast

#: The operators whose gradients have kernels of their own, by family.
FAMILIES = {
    "region": ["vision.roi_align", "grad.roi_align*"],
    "conv": ["nn.conv[123]d", "nn.conv?d_transpose", "grad.conv*"],
    "pool": ["nn.*pool?d", "grad.*pool?d*"],
    "norm": ["nn.*norm", "nn.*softmax"],
    "loss": ["nn.nll_loss", "nn.cross_entropy_with_logits", "grad.nll*", "grad.cross*"],
    "scatter": ["take", "scatter_*", "index_put", "gather_*", "grad.take*", "grad.gather*"],
    "reduction": ["mean", "variance", "std", "sum", "grad.mean*"],
    "image": ["image.resize*", "image.affine_grid", "nn.pad", "grad.pad*"],
    "join": ["split", "concat", "grad.split*", "grad.concat*"],
}

#: The recurrences; the matrix-vector products of a single sequence fail in TVM's rules.
RECURRENT = [
    ("grad.lstm", "plain"),
    ("grad.gru", "plain"),
    ("grad.gru", "plain, resets first"),
    ("grad.rnn_tanh", "plain"),
    ("grad.recurrent_backward", "lstm with cells"),
    ("grad.recurrent_tangent", "gru"),
]

#: One sample of each kind, for the default suite.
REPRESENTATIVE = [
    ("nn.conv2d", "groups and dilation"),
    ("nn.conv1d_transpose", "groups and dilation"),
    ("grad.max_pool2d_backward", "the gradient with respect to output_grad"),
    ("nn.avg_pool1d", ""),
    ("nn.adaptive_avg_pool1d", ""),
    ("nn.layer_norm", ""),
    ("nn.softmax", ""),
    ("nn.nll_loss", ""),
    ("nn.cross_entropy_with_logits", ""),
    ("mean", "every axis"),
    ("scatter_nd", "different"),
    ("take", ""),
    ("nn.pad", "reflect, wider than the axis"),
    ("power", "negative base"),
    ("vision.roi_align", "two samples"),
    ("grad.quantized_matmul_backward_data", "one output"),
]

ON_DEVICE = pytest.mark.skipif(
    not tvm.cuda().exist,
    reason="no CUDA device: kernels are compiled and emulated, and not run on one",
)
NEEDS_NVCC = pytest.mark.skipif(
    missing("nvcc") is not None, reason=f"{missing('nvcc')}: the CUDA source is not compiled"
)
NEEDS_CXX = pytest.mark.skipif(
    missing("g++") is not None, reason=f"{missing('g++')}: the kernels are not emulated"
)

_RTOL = 1e-4


def matching(patterns: Sequence[str]) -> list[Sample]:
    """Return the samples that match operator patterns, except empty ones and those with float16
    attributes.

    TVM's rules for GPUs divide by the number of elements of a kernel's result, and the emulator has
    no half precision.
    """
    return [
        sample
        for op in sampled_operators()
        if any(fnmatchcase(op.removeprefix("relax."), pattern) for pattern in patterns)
        for sample in samples(op)
        if not _holds_nothing(sample) and "float16" not in map(str, sample.attrs.values())
    ]


def representative() -> list[Sample]:
    chosen = [
        next(s for s in samples(f"relax.{op}") if not note or s.note == note)
        for op, note in REPRESENTATIVE
    ]
    rng = np.random.default_rng(0)
    data, weight = rng.normal(size=(2, 4, 24, 25)), rng.normal(size=(4, 2, 1, 2))
    whole = rng.normal(size=(3, 4, 3, 2))
    vectors = [rng.normal(size=4) ** 2 for _ in range(4)]
    strided = {"strides": [2, 3], "padding": [1, 0]}
    training = {"axis": 1, "training": True}
    a, b = rng.normal(size=(3, 520)), rng.normal(size=(520, 5))
    long = [
        Sample([data, weight], {"groups": 2}, op="relax.nn.conv2d"),
        Sample([data, weight], {"groups": 2, **strided}, op="relax.nn.conv2d"),
        Sample([data, whole], strided, op="relax.nn.conv2d"),
        Sample([data, whole], {}, op="relax.nn.conv2d"),
        Sample([data, *vectors], training, op="relax.nn.batch_norm"),
        Sample([a, b], {}, op="relax.matmul"),
    ]
    return [*chosen, *(dataclasses.replace(each, note="sums of many terms") for each in long)]


def _holds_nothing(sample: Sample) -> bool:
    arguments = _program.make_arguments(sample.inputs, None, {})
    return any(tensor.value.size == 0 for tensor in _tensors(arguments))


def _tensors(arguments):
    for argument in arguments:
        if isinstance(argument, _program.Argument):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


class Programs:
    """The differentiated programs of samples, in one module that is compiled for CUDA."""

    def __init__(self, chosen: Sequence[Sample], dtype: str = "float32"):
        self.samples, self.programs, modules = list(chosen), [], []
        for sample in chosen:
            arguments = _program.make_arguments(cast(sample.inputs, dtype), None, {})
            _, function = _arguments.resolve(sample.function or sample.op)
            rng = np.random.default_rng(0)
            program = _program.first_order(function, arguments, sample.attrs, rng)
            wrt = _arguments.select_wrt(program.arguments, sample.wrt)
            module = _program.differentiate(program, wrt)
            del module["main"]
            modules.append(module)
            self.programs.append(program)
        self.module = _program.merge(modules)
        self.compiled = compile_for_cuda(self.module)

    def check_kernels(self) -> None:
        assert self.compiled.launches
        assert self.compiled.on_host == []
        assert self.compiled.serial == []

    def check_emulated(self) -> None:
        """Compare the results of the emulated kernels with those of LLVM's code for the CPU."""
        target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
        machine = relax.VirtualMachine(tvm.compile(self.module, target), tvm.cpu())
        with self.compiled.emulate() as emulation:
            for number, (sample, program) in enumerate(
                zip(self.samples, self.programs, strict=True), start=1
            ):
                name = f"main_{number}_adjoint"
                results = emulation.run(name, program.values())
                tensors = map(tvm.runtime.tensor, program.values())
                for own, expected in zip(results, leaves(machine[name](*tensors)), strict=True):
                    finite = np.abs(expected[np.isfinite(expected)])
                    np.testing.assert_allclose(
                        own,
                        expected,
                        _RTOL,
                        _RTOL * max(1.0, finite.max(initial=0.0)),
                        err_msg=f"{sample.op}, {sample.note}",
                    )
            # TVM keeps the kernels of reshapes, but nothing launches them.
            idle = set(self.compiled.launches) - emulation.launched
            assert not [kernel for kernel in idle if "backward" in kernel]


@pytest.fixture(scope="module")
def few() -> Programs:
    return Programs(representative())


def test_every_kernel_has_threads(few):
    few.check_kernels()


@NEEDS_NVCC
def test_nvcc_compiles_the_kernels(few):
    few.compiled.compile()


@NEEDS_CXX
def test_emulated_kernels_agree_with_the_cpu(few):
    few.check_emulated()


@pytest.fixture(scope="module")
def recurrent() -> Programs:
    return Programs(
        [next(s for s in samples(f"relax.{op}") if s.note == note) for op, note in RECURRENT]
    )


@NEEDS_CXX
def test_emulated_recurrences_agree_with_the_cpu(recurrent):
    recurrent.check_kernels()
    recurrent.check_emulated()


@NEEDS_NVCC
def test_no_kernel_loads_what_it_writes_as_unwritten(few, recurrent):
    assert few.compiled.stale_loads() == {}
    assert recurrent.compiled.stale_loads() == {}


def test_the_reader_of_machine_code_finds_a_stale_load():
    """A load of one of two parameters, of which the kernel writes one."""
    kernel = """.visible .entry either(
    .param .u64 either_param_0,
    .param .u64 either_param_1
)
{
    ld.param.u64 %rd1, [either_param_0];
    ld.param.u64 %rd2, [either_param_1];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    selp.b64 %rd5, %rd3, %rd4, %p1;
    ld.global.nc.f32 %f1, [%rd5+4];
    st.global.f32 [%rd3], %f1;
    ret;
}
"""
    assert stale_loads(kernel) == {"either": ["either_param_0"]}
    assert stale_loads(kernel.replace("[%rd5+4]", "[%rd4+4]")) == {}


#: Functions of sums, and shapes for which they have a single term.
ONE_TERM = {
    "matmul": (relax.op.matmul, [(8, 1), (1, 6)]),
    "matmul of batches": (relax.op.matmul, [(2, 3, 1), (2, 1, 4)]),
    "einsum": (lambda *x: relax.op.einsum(x, "ij,jk->ik"), [(5, 1), (1, 3)]),
    "attention": (relax.op.nn.attention, [(1, 1, 2, 4)] * 3),
    "rms_norm": (lambda x, weight: relax.op.nn.rms_norm(x, weight, axes=[-1]), [(5, 1), (1,)]),
    "layer_norm": (lambda *x: relax.op.nn.layer_norm(*x, axes=[-1]), [(5, 1), (1,), (1,)]),
    "softmax": (relax.op.nn.softmax, [(5, 1)]),
    "conv2d": (relax.op.nn.conv2d, [(1, 1, 4, 4), (2, 1, 1, 1)]),
    "conv1d_transpose": (relax.op.nn.conv1d_transpose, [(1, 1, 4), (1, 2, 1)]),
    "max over no axes": (lambda x: relax.op.max(x, []), [(5, 4)]),
    "min over no axes": (lambda x: relax.op.min(x, []), [(5, 4)]),
    "mean": (lambda x: relax.op.mean(x, -1), [(5, 1)]),
    "prod": (lambda x: relax.op.prod(x, -1), [(5, 1)]),
    "variance": (lambda x: relax.op.variance(x, -1), [(5, 1)]),
}


@NEEDS_CXX
def test_the_reader_of_a_sum_of_one_term_sees_it_once():
    """TVM's rules inline what reads such a sum into its initial value too."""
    rng = np.random.default_rng(0)
    bb, values = relax.BlockBuilder(), {}
    for name, (function, shapes) in ONE_TERM.items():
        entry = name.replace(" ", "_")
        values[entry] = [rng.uniform(0.5, 2, shape).astype("float32") for shape in shapes]
        arguments = [
            relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)
        ]
        with bb.function(entry, arguments):
            with bb.dataflow():
                result = bb.emit(function(*arguments))
                more = bb.emit_output(relax.op.add(result, relax.const(1.0, "float32")))
            bb.emit_func_output(more)
    machine = relax.VirtualMachine(tvm.compile(bb.get(), "llvm"), tvm.cpu())
    with compile_for_cuda(bb.get()).emulate() as emulation:
        for entry, operands in values.items():
            wanted = machine[entry](*map(tvm.runtime.tensor, operands)).numpy()
            (own,) = emulation.run(entry, operands)
            np.testing.assert_allclose(own, wanted, 1e-5, 1e-5, err_msg=entry)


def test_no_kernel_writes_an_empty_part():
    """TVM's rules drop the bound of the threads that write a tensor without elements."""
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            parts = bb.emit_output(relax.op.split(x, [2, 2], axis=1))
        bb.emit_func_output(parts)
    compiled = compile_for_cuda(bb.get())
    assert len(compiled.launches) == 2, compiled.source


def test_half_precision_has_threads():
    chosen = [s for s in representative() if "float16" in s.dtypes and "conv" in s.op]
    Programs(chosen, "float16").check_kernels()


@ON_DEVICE
@pytest.mark.parametrize("sample", representative(), ids=lambda s: f"{s.op} {s.note}".strip())
def test_gradients_on_the_device(sample):
    sample.check(target="cuda", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of_a_family(family):
    programs = Programs(matching(FAMILIES[family]))
    programs.check_kernels()
    if missing("g++") is None:
        programs.check_emulated()


@pytest.mark.slow
@ON_DEVICE
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_family_on_the_device(family):
    for sample in matching(FAMILIES[family]):
        if sample.smooth:
            sample.check(target="cuda")
