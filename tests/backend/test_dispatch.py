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
from relax_grad.testing import _arguments, _program
from relax_grad.testing.samples import Sample, samples
from relax_grad.testing.samples._sample import cast

pytest.importorskip("torch", reason="PyTorch is not installed: there is no library")

#: Operators whose results or gradients are calls of a library.
OPERATORS = [
    *("relax.matmul", "relax.nn.attention", "relax.nn.attention_bias"),
    *(f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")),
    *(f"relax.nn.{kind}_norm" for kind in ("batch", "layer", "rms", "group", "instance")),
    *("relax.nn.softmax", "relax.nn.log_softmax", "relax.nn.nll_loss"),
]


#: Functions for calls without the other calls of a gradient, and for products with a bias.
ALONE = {
    *(f"grad.{norm}_norm_statistics" for norm in ("batch", "layer", "instance", "rms")),
    *("grad.layer_norm_backward_data", "grad.layer_norm_backward_gamma"),
    *("grad.rms_norm_backward_data", "grad.rms_norm_backward_weight"),
    *("nn.layer_norm", "nn.rms_norm", "nn.instance_norm"),
    *("nn.attention", "nn.attention_bias", "grad.attention_backward", "matmul_bias"),
}


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def calls(module) -> int:
    return module.script().count(torch_library.PREFIX)


def functions(module) -> set[str]:
    return set(re.findall(r"library\.torch\.([\w.]+)", module.script()))


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
        machines = [machine_of(module) for module in (self.module, self.dispatched)]
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


def machine_of(module, pipeline="relax_grad"):
    """Return the compiled functions; this pipeline takes less time than TVM's."""
    target = relax_grad.target.host() if pipeline == "relax_grad" else TARGET
    return relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())


def leaves(value) -> list[np.ndarray]:
    if hasattr(value, "numpy"):
        return [value.numpy()]
    return [leaf for field in value for leaf in leaves(field)]


def chosen(op: str) -> list[Sample]:
    return [s for s in samples(op) if "float16" not in map(str, s.attrs.values())]


def test_samples_have_the_same_gradients():
    differentiated = Differentiated([s for op in OPERATORS for s in chosen(op)])
    assert functions(differentiated.dispatched) == set(torch_library._functions()) - ALONE
    assert calls(differentiated.dispatched) > 2 * len(OPERATORS)
    differentiated.check()


def alone(bb, x, y, w, v, q, b):
    """Call each function of ``ALONE``: results without gradients, and gradients of one operand."""
    op, grad = relax.op, relax.op.grad

    def part(value, place):
        return bb.emit(relax.TupleGetItem(value, place))

    images = bb.emit(op.reshape(x, (2, 3, 4, 5)))
    batch = bb.emit(grad.batch_norm_statistics(images, 1))
    layer = bb.emit(grad.layer_norm_statistics(x, -1))
    root = bb.emit(grad.rms_norm_statistics(x))
    instance = bb.emit(grad.instance_norm_statistics(images, 1, [2, 3]))
    mean, rstd = part(layer, 0), part(layer, 1)
    attended = bb.emit(op.nn.attention(q, q, q, causal_mask="TopLeft"))
    both = bb.emit(op.nn.attention_bias(q, q, q, b))
    other = bb.emit(op.multiply(both, relax.const(1.0, "float32")))
    of_other = bb.emit(grad.attention_backward(q, other, q, q, q, b))
    product = bb.emit(op.matmul(y, bb.emit(op.permute_dims(w))))
    return relax.Tuple([
        *(part(each, place) for each in (batch, layer, instance) for place in (0, 1)),
        *(root, attended, both, *(part(of_other, place) for place in range(3))),
        bb.emit(op.nn.layer_norm(x, v, v, -1)),
        bb.emit(op.nn.layer_norm(x, v, v, -1, center=False, scale=False)),
        bb.emit(op.nn.rms_norm(x, v)),
        bb.emit(op.nn.instance_norm(images, op.ones((3,), "float32"), op.zeros((3,), "float32"),
                                    1, [2, 3])),
        bb.emit(grad.layer_norm_backward_data(y, x, v, mean, rstd, [1])),
        bb.emit(grad.layer_norm_backward_gamma(x, y, mean, rstd, [1])),
        bb.emit(grad.rms_norm_backward_data(x, y, v, root)),
        bb.emit(grad.rms_norm_backward_weight(y, x, root)),
        bb.emit(op.add(product, v)),
    ])  # fmt: skip


def test_calls_without_the_others_of_a_gradient():
    shapes = {"x": (6, 20), "y": (6, 20), "w": (20, 20), "v": (20,), "q": (2, 5, 2, 4)}
    params = [tensor(name, shape) for name, shape in {**shapes, "b": (1, 2, 5, 5)}.items()]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            result = bb.emit_output(alone(bb, *params))
        bb.emit_func_output(result)
    dispatched = DispatchLibrary()(bb.get())
    assert functions(dispatched) == ALONE
    assert "permute_dims" not in dispatched.script()  # the product takes the weight as it is
    rng = np.random.default_rng(0)
    values = [rng.normal(size=[*map(int, param.ty.shape)]).astype("float32") for param in params]
    arguments = list(map(tvm.runtime.tensor, values))
    wanted, own = (leaves(machine_of(m)["main"](*arguments)) for m in (bb.get(), dispatched))
    for place, (result, expected) in enumerate(zip(own, wanted, strict=True)):
        np.testing.assert_allclose(result, expected, 1e-4, 1e-4, err_msg=str(place))


def test_refused_calls_are_compiled_and_explained():
    x, weight = tensor("x", (2, 9, 9, 3)), tensor("weight", (3, 3, 3, 1, 4))
    vector, matrix = tensor("vector", (5,)), tensor("matrix", (5, 6))
    data, kernel = tensor("data", (2, 3, 9)), tensor("kernel", (4, 3, 3))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, weight, vector, matrix, data, kernel]):
        with bb.dataflow():
            layout = {"data_layout": "NHWC", "kernel_layout": "HWIO4o"}
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
            "relax.nn.conv2d": "layouts with blocks: NHWC, HWIO4o, NHWC",
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


@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 2)])
def test_targets_that_are_no_class(shape):
    """PyTorch's own operator raises an error, and on a GPU ends the use of the device."""
    extents = [shape[0], *shape[2:]]
    predictions, targets = tensor("predictions", shape), tensor("targets", extents, "int64")
    bb = relax.BlockBuilder()
    with bb.function("main", [predictions, targets]):
        with bb.dataflow():
            settings = {"reduction": "none", "ignore_index": 1}
            loss = bb.emit(relax.op.nn.nll_loss(predictions, targets, **settings))
            grad = relax.op.grad.nll_loss_backward(loss, predictions, targets, **settings)
            result = bb.emit_output(relax.Tuple([loss, bb.emit(grad)]))
        bb.emit_func_output(result)
    values = np.random.default_rng(0).normal(size=shape).astype("float32")
    marks = np.resize([-100, 1, 4, 2, 0], extents).astype("int64")
    arguments = list(map(tvm.runtime.tensor, (values, marks)))
    wanted, own = (
        leaves(machine_of(module)["main"](*arguments))
        for module in (bb.get(), DispatchLibrary()(bb.get()))
    )
    assert np.isnan(own[0]).sum() == np.isin(marks, (-100, 4)).sum()
    for result, expected in zip(own, wanted, strict=True):
        np.testing.assert_allclose(result, expected, 1e-6)


def test_layouts_of_convert_layout():
    data, weight = tensor("data", (2, 3, 9, 8)), tensor("weight", (4, 3, 3, 3))
    bb = relax.BlockBuilder()
    with bb.function("main", [data, weight]):
        with bb.dataflow():
            hidden = bb.emit(relax.op.nn.conv2d(data, weight, strides=(2, 1), padding=1))
            loss = bb.emit_output(relax.op.mean(bb.emit(relax.op.square(hidden))))
        bb.emit_func_output(loss)
    module = relax_grad.value_and_grad(bb.get(), wrt=["data", "weight"])
    del module["main"]
    convert = relax.transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]})
    converted = convert(module)
    assert "NHWC" in converted.script()
    dispatched = DispatchLibrary()(converted)
    assert "NHWC" not in dispatched.script()
    assert calls(dispatched) == 3
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in ((2, 3, 9, 8), (4, 3, 3, 3))]
    wanted, own = (
        leaves(machine_of(each)["main_adjoint"](*map(tvm.runtime.tensor, values)))
        for each in (module, dispatched)
    )
    for result, expected in zip(own, wanted, strict=True):
        np.testing.assert_allclose(result, expected, 1e-4, 1e-5)


def test_products_in_bfloat16(torch):
    """Operands are rounded, and results are float32; other operators stay in float32."""
    x, weight = tensor("x", (7, 40)), tensor("weight", (40, 5))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, weight]):
        with bb.dataflow():
            product = bb.emit(relax.op.matmul(x, weight))
            result = bb.emit_output(relax.op.nn.softmax(product))
        bb.emit_func_output(result)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype("float32") for shape in ((7, 40), (40, 5))]
    machine = machine_of(DispatchLibrary(precision="bfloat16")(bb.get()))
    own = machine["main"](*map(tvm.runtime.tensor, values)).numpy()
    rounded = [torch.from_numpy(value).bfloat16() for value in values]
    product = rounded[0] @ rounded[1]
    np.testing.assert_array_equal(own, torch.softmax(product.float(), 1).numpy())


class _Result:
    """A result that notes the shape of what is written to it."""

    def __init__(self):
        self.shape = None

    def __getitem__(self, index):
        return self

    def copy_(self, value):
        self.shape = tuple(value.shape)


@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_of_a_gpu(torch, has_bias):
    """PyTorch infers the shapes of the results without a GPU, and checks the arguments."""
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    modes = pytest.importorskip("torch.utils._python_dispatch")
    functions = torch_library._functions()

    class OfBackward(modes.TorchDispatchMode):
        """PyTorch's inference for this operator lacks an argument of its schema."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "efficient_attention_backward" in str(function):
                assert kwargs == {"scale": 0.5, "num_splits_key": 1}
                return [torch.empty_like(each) for each in (*args[1:4], args[0])]
            return function(*args, **(kwargs or {}))

    with fake.FakeTensorMode(), OfBackward():
        grad, query, key, value, output = (
            torch.empty(2, 40, 3, 8, device="cuda") for _ in range(5)
        )
        bias = [torch.empty(1, 3, 40, 40, device="cuda")] if has_bias else []
        sums = torch.empty(2, 3, 64, device="cuda")
        numbers = [0.5, int(not has_bias), int(has_bias)]
        forward, backward = ([_Result() for _ in range(count)] for count in (2, 3))
        functions["attention_and_log_sum_exp"].compute(
            torch, [query, key, value, *bias, *numbers], forward
        )
        functions["attention_gradients"].compute(
            torch, [grad, output, sums, query, key, value, *bias, *numbers], backward
        )
    assert [result.shape for result in forward] == [(2, 40, 3, 8), (2, 3, 64)]
    assert [result.shape for result in backward] == [(2, 40, 3, 8)] * 3


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
        precisions = matmul.fp32_precision, cudnn.conv.fp32_precision
        sums = (
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        )
        return *precisions, *sums, cudnn.deterministic

    before, device = read(), _Device()
    for tf32, precision in ((False, "ieee"), (True, "tf32")):
        with torch_library._on_device(torch, device, tf32):
            assert read() == (precision, precision, False, False, True)
        assert read() == before
    assert entered == [(4242, device)] * 2


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="library must be one of 'torch', but it is 'cudnn'"):
        DispatchLibrary("cudnn")
    with pytest.raises(
        ValueError, match="must be one of 'float32', 'tf32', 'bfloat16', but it is 'fp8'"
    ):
        DispatchLibrary(precision="fp8")
