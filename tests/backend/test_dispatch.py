"""A library of operators, PyTorch's, in the place of compiled functions: the same results."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax

import relax_grad
from relax_grad.backend import DispatchLibrary, torch_library
from relax_grad.backend.primitives import PRIMITIVES
from relax_grad.testing import _arguments, _program
from relax_grad.testing.samples import Sample, samples
from relax_grad.testing.samples._sample import cast

pytest.importorskip("torch", reason="PyTorch is not installed: there is no library")

#: Operators whose results or gradients are calls of a library.
OPERATORS = [
    *("relax.matmul", "relax.nn.attention", "relax.nn.attention_bias"),
    *(f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")),
]


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def calls(module) -> int:
    return module.script().count(torch_library.PREFIX)


class Differentiated:
    """Samples and their gradients, compiled with and without the library."""

    def __init__(self, chosen: list[Sample]):
        self.samples, self.programs, modules = chosen, [], []
        for sample in chosen:
            arguments = _program.make_arguments(cast(sample.inputs, "float32"), None, {})
            _, function = _arguments.resolve(sample.function or sample.op)
            rng = np.random.default_rng(0)
            program = _program.first_order(function, arguments, sample.attrs, rng)
            module = _program.differentiate(
                program, _arguments.select_wrt(program.arguments, sample.wrt)
            )
            del module["main"]
            modules.append(module)
            self.programs.append(program)
        self.module = _program.merge(modules)
        self.dispatched = DispatchLibrary()(self.module)

    def check(self) -> None:
        machines = [
            relax.VirtualMachine(tvm.compile(module, TARGET), tvm.cpu())
            for module in (self.module, self.dispatched)
        ]
        for number, (sample, program) in enumerate(
            zip(self.samples, self.programs, strict=True), start=1
        ):
            wanted, own = (
                leaves(
                    machine[f"main_{number}_adjoint"](*map(tvm.runtime.tensor, program.values()))
                )
                for machine in machines
            )
            for result, expected in zip(own, wanted, strict=True):
                largest = np.abs(expected).max(initial=1.0)
                np.testing.assert_allclose(
                    result, expected, 1e-4, 1e-4 * largest, err_msg=f"{sample.op}, {sample.note}"
                )


def leaves(value) -> list[np.ndarray]:
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [leaf for field in value for leaf in leaves(field)]


def chosen(op: str) -> list[Sample]:
    return [s for s in samples(op) if "float16" not in map(str, s.attrs.values())]


def test_samples_have_the_same_gradients():
    differentiated = Differentiated([s for op in OPERATORS for s in chosen(op)])
    names = {
        str(name)
        for name in re.findall(r"library\.torch\.([\w.]+)", differentiated.dispatched.script())
    }
    assert {f"relax.{name}" for name in names} == set(PRIMITIVES)
    assert calls(differentiated.dispatched) > 2 * len(OPERATORS)
    differentiated.check()


def test_refused_calls_are_compiled_and_explained():
    x, weight = tensor("x", (2, 9, 9, 3)), tensor("weight", (3, 3, 3, 4))
    vector, matrix = tensor("vector", (5,)), tensor("matrix", (5, 6))
    data, kernel = tensor("data", (2, 3, 9)), tensor("kernel", (4, 3, 3))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, weight, vector, matrix, data, kernel]):
        with bb.dataflow():
            layout = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
            ends = [
                bb.emit(relax.op.nn.conv2d(x, weight, **layout)),
                bb.emit(relax.op.matmul(vector, matrix)),
                bb.emit(relax.op.nn.conv1d(data, kernel, padding=(1, 0))),
            ]
            result = bb.emit_output(relax.Tuple(ends))
        bb.emit_func_output(result)
    dispatch = DispatchLibrary()
    assert calls(dispatch(bb.get())) == 0
    assert dispatch.explain(bb.get()) == {
        "main": {
            "relax.nn.conv2d": "layouts other than NCHW, OIHW, NCHW: NHWC, HWIO, NHWC",
            "relax.matmul": "a product of tensors of rank 1 and 2",
            "relax.nn.conv1d": "padding that differs before and after an axis: (1,) and (0,)",
        }
    }


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ([(2, 3), (3, 4)], None),
        ([("n", 3), (3, 4)], None),
        ([(2, 0), (0, 4)], "a tensor has no elements"),
        ([(2, 3, "int32"), (3, 4, "int32")], "tensors of int32"),
    ],
)
def test_products_that_the_library_computes(operands, reason):
    n = tvm.tirx.Var("n", "int64")
    params = []
    for number, extents in enumerate(operands):
        *shape, dtype = extents if isinstance(extents[-1], str) else (*extents, "float32")
        params.append(tensor(f"x{number}", [n if e == "n" else e for e in shape], dtype))
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(relax.op.matmul(*params)))
    expected = {"main": {"relax.matmul": reason or 1}}
    assert DispatchLibrary().explain(bb.get()) == expected


@pytest.mark.parametrize("pipeline", ["default", "relax_grad"])
def test_half_precision_and_every_pipeline(pipeline, torch):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float16") for shape in ((4, 40), (40, 3))]
    params = [tensor(f"x{i}", value.shape, "float16") for i, value in enumerate(values)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            product = bb.emit(relax.op.matmul(*params))
            result = bb.emit_output(relax.op.tanh(product))
        bb.emit_func_output(result)
    executable = tvm.compile(DispatchLibrary()(bb.get()), TARGET, relax_pipeline=pipeline)
    own = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, values))
    wanted = torch.tanh(torch.matmul(*map(torch.from_numpy, values)))
    np.testing.assert_allclose(own.numpy(), wanted.numpy(), 2e-3, 2e-3)


def test_a_dispatched_function_has_no_gradient():
    x = tensor("x", (3, 3))
    bb = relax.BlockBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.matmul(x, x))))
        bb.emit_func_output(loss)
    with pytest.raises(relax_grad.errors.GradientError, match="call_dps_packed"):
        relax_grad.value_and_grad(DispatchLibrary()(bb.get()), wrt="x")


class _Device:
    type, index = "cuda", 0


def test_streams_and_precision_of_a_gpu_are_set_and_restored(torch, monkeypatch):
    """A fake of PyTorch's streams, since there is no device."""
    entered = []

    @contextlib.contextmanager
    def stream(chosen):
        entered.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch_library.tvm_ffi, "get_raw_stream", lambda device: 4242)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def read():
        return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic

    before, device = read(), _Device()
    for tf32, precision in ((False, "ieee"), (True, "tf32")):
        with torch_library._on_device(torch, device, tf32):
            assert read() == (precision, precision, True)
        assert read() == before
    assert entered == [(4242, device)] * 2


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="library must be one of 'torch', but it is 'cudnn'"):
        DispatchLibrary("cudnn")
    with pytest.raises(ValueError, match="must be one of 'float32', 'tf32', but it is 'fp8'"):
        DispatchLibrary(precision="fp8")
