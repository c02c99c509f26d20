"""The pipeline: its registration, the cases that it leaves to other pipelines, and exported
libraries."""

from __future__ import annotations

import doctest
import math
import mmap

import numpy as np
import pytest
import tvm
import tvm_ffi
from dispatched import HOST, flat, run_both
from processes import run_python
from programs import build, run, tensor, to_numpy
from tvm import relax, tirx
from tvm.relax import op
from tvm.relax.training.optimizer import Adam
from tvm.script import from_source

import relax_grad
from relax_grad.cpu import pipeline

RNG = np.random.default_rng(0)
SHAPES = [(6, 8), (8, 5), (5,)]


def classifier(rows=6):
    """Return the loss of a linear classifier with gelu, and its gradients."""

    def body(bb, x, w, b):
        scores = bb.emit(op.add(op.matmul(x, w), b))
        probabilities = bb.emit(op.nn.log_softmax(bb.emit(op.nn.gelu(scores))))
        return op.negative(op.mean(bb.emit(op.multiply(probabilities, probabilities))))

    shapes = [(rows, 8), *SHAPES[1:]]
    params = [tensor(name, shape, "float32") for name, shape in zip("xwb", shapes, strict=True)]
    return relax_grad.value_and_grad(build(params, body), wrt=["w", "b"])


def run_fused(module, name, *arguments):
    return run(module, name, *arguments, target=HOST, pipeline="relax_grad")


def values():
    return [RNG.normal(size=shape).astype("float32") for shape in SHAPES]


@pytest.mark.parametrize("rows", [6, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_numbers_of_a_training_step(rows):
    ours, stock = map(flat, run_both(classifier(rows), "main_adjoint", values()))
    for own, wanted in zip(ours, stock, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["llvm", {"kind": "llvm", "opt-level": 0}])
def test_other_targets(target):
    ours, stock = run_both(classifier(), "main_adjoint", values(), tvm.target.Target(target))
    for own, wanted in zip(flat(ours), flat(stock), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)


def test_as_an_object():
    results = []
    for relax_pipeline in (relax_grad.pipeline(), relax_grad.pipeline(HOST), "relax_grad"):
        executable = tvm.compile(classifier(), HOST, relax_pipeline=relax_pipeline)
        machine = relax.VirtualMachine(executable, tvm.cpu())
        arrays = [np.full(shape, 0.5, "float32") for shape in SHAPES]
        results.append(flat(to_numpy(machine["main_adjoint"](*map(tvm.runtime.tensor, arrays)))))
    for other in results[1:]:
        for own, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(own, two)


def mixture(x, kernel, w, table, words):
    """Return the loss of convolutions, a normalisation, products and an embedding, with its
    gradients."""

    def body(bb, x, kernel, w, table, words):
        y = bb.emit(op.nn.relu(bb.emit(op.nn.conv2d(x, kernel, padding=1))))
        y = bb.emit(op.nn.max_pool2d(y, [2, 2], [2, 2]))
        y = bb.emit(op.reshape(y, [256, 256]))
        y = bb.emit(op.add(y, bb.emit(op.take(table, words, axis=0))))
        y = bb.emit(op.nn.gelu(bb.emit(op.matmul(y, w))))
        y = bb.emit(op.nn.log_softmax(bb.emit(op.add(y, bb.emit(op.nn.softmax(y))))))
        return op.mean(bb.emit(op.power(y, relax.const(1.5, "float32"))))

    return relax_grad.value_and_grad(build([x, kernel, w, table, words], body))


def test_no_loop_over_much_is_serial():
    shapes = {"x": (16, 3, 32, 32), "kernel": (16, 3, 3, 3), "w": (256, 256), "table": (300, 256)}
    params = [tensor(name, shape, "float32") for name, shape in shapes.items()]
    module = mixture(*params, tensor("words", (256,), "int64"))
    optimizer = relax.training.optimizer.Adam(0.1)
    optimizer.init(params)
    module["Adam"] = optimizer.get_function()
    is_fast_by_name = {}

    @tvm.ir.instrument.pass_instrument
    class Instrument:
        def run_after_pass(self, mod, info):
            if info.name != "relax_grad.ScheduleLoops":
                return
            for variable, function in mod.functions_items():
                if isinstance(function, tirx.PrimFunc):
                    is_fast_by_name[variable.name_hint] = is_fast(function)

    with HOST, tvm.transform.PassContext(instruments=[Instrument()]):
        relax_grad.pipeline()(module)
    assert [name for name, is_fine in is_fast_by_name.items() if not is_fine] == []
    assert sum(name.startswith("merged") for name in is_fast_by_name) >= len(params)


def is_fast(function, much=20000):
    """Tell whether a function has parallel loops, or only parameters with fewer than ``much``
    elements."""
    sizes = [np.prod([int(n) for n in param.shape]) for param in function.params]
    kinds = []
    tvm_ffi.structural_walk(function.body, (tirx.For, lambda loop: kinds.append(loop.kind)))
    return max(sizes) < much or tirx.ForKind.PARALLEL in kinds


def test_tensors_of_any_alignment(torch):
    """A slice of a PyTorch tensor is passed without a copy and may have only the alignment of its
    elements."""

    def body(bb, x, w, gamma, other):
        y = bb.emit(op.nn.conv2d(x, w, padding=1))
        y = bb.emit(op.nn.layer_norm(bb.emit(op.reshape(y, (-1, 64))), gamma, gamma, axes=-1))
        y = bb.emit(op.add(bb.emit(op.nn.softmax(bb.emit(op.matmul(y, other)))), gamma))
        return bb.emit(op.permute_dims(bb.emit(op.nn.gelu(y))))

    shapes = [(4, 32, 8, 8), (32, 32, 3, 3), (64,), (64, 64)]
    params = [tensor(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    executable = tvm.compile(build(params, body), HOST, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    tensors = [torch.randn(1 + math.prod(shape))[1:].view(shape) for shape in shapes]
    assert any(array.data_ptr() % 64 for array in tensors)
    wanted = machine["main"](*(tvm.runtime.tensor(array.numpy()) for array in tensors))
    result = machine["main"](*tensors)
    np.testing.assert_array_equal(result.numpy(), wanted.numpy())


def test_tensors_with_strides_are_refused(torch):
    x = tensor("x", (8, 8), "float32")
    module = build([x], lambda bb, x: bb.emit(op.nn.softmax(x)))
    executable = tvm.compile(module, HOST, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    with pytest.raises(ValueError, match="expected to be compact array"):
        machine["main"](torch.randn(8, 8).t())


def test_a_batch_that_is_too_large_is_refused():
    """Kernels use int32 indices. The memory is only reserved: nothing may touch it."""
    rows, columns = 2**25 + 1, 64
    size = 4 * rows * columns
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    x = tensor("x", (tirx.Var("n", "int64"), columns), "float32")
    module = build([x], lambda bb, x: bb.emit(op.sum(x, [0])))
    executable = tvm.compile(module, HOST, relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    array = np.frombuffer(memory, "float32").reshape(rows, columns)
    with pytest.raises(RuntimeError, match=r"more than 2\*\*31 - 1 elements"):
        machine["main"](tvm_ffi.from_dlpack(array, require_alignment=0))


def test_without_a_target():
    with pytest.raises(ValueError, match="the pipeline needs a target"):
        relax_grad.pipeline()(classifier())


def test_targets_of_other_compilers_keep_their_pipeline():
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    with target:
        module = relax_grad.pipeline()(classifier())
    names = [variable.name_hint for variable in module.get_global_vars()]
    assert not any("kernel" in name and "matmul" in name for name in names)


def network(rows):
    """Return the loss of a small convolutional network, and its gradients."""

    def body(bb, images, kernel, gamma, beta, wide, dense):
        y = bb.emit(op.nn.conv2d(images, kernel, padding=1))
        zeros, ones = (relax.const(np.full(32, value, "float32")) for value in (0, 1))
        y = bb.emit(op.nn.batch_norm(y, gamma, beta, zeros, ones, axis=1))
        y = bb.emit(op.nn.relu(bb.emit(relax.TupleGetItem(y, 0))))
        y = bb.emit(op.nn.max_pool2d(bb.emit(op.nn.conv2d(y, wide, padding=1)), (2, 2), (2, 2)))
        scores = bb.emit(op.matmul(bb.emit(op.mean(y, [2, 3])), dense))
        return op.negative(op.mean(bb.emit(op.nn.log_softmax(scores))))

    shapes = [(rows, 3, 12, 12), (32, 3, 3, 3), (32,), (32,), (32, 32, 3, 3), (32, 5)]
    names = ["images", "kernel", "gamma", "beta", "wide", "dense"]
    params = [tensor(name, shape, "float32") for name, shape in zip(names, shapes, strict=True)]
    return relax_grad.value_and_grad(build(params, body), wrt=names[1:])


def training_step(rows):
    """Return an Adam step of the network and its state. The step takes and returns the parameters
    and the state."""
    module = network(rows)
    module["main_adjoint"] = module["main_adjoint"].without_attr("global_symbol")
    images, *learned = relax.utils.copy_with_new_vars(module["main_adjoint"]).params
    adam = Adam(1e-2)
    adam.init(learned)
    bb = relax.BlockBuilder(module)
    update = bb.add_func(adam.get_function(), "update")
    state = relax.Var("state", update.ty.params[2])
    with bb.function("step", [images, *learned, state]):
        with bb.dataflow():
            both = bb.emit(relax.Call(module.get_global_var("main_adjoint"), [images, *learned]))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            updated = bb.emit(relax.Call(update, [relax.Tuple(learned), gradients, state]))
            result = bb.emit_output(relax.Tuple([relax.TupleGetItem(both, 0), updated]))
        bb.emit_func_output(result)
    return bb.get(), adam.state


SCRIPT = """
import sys
import numpy as np, tvm
from tvm import relax
folder, count, name = {}
machine = relax.VirtualMachine(tvm.runtime.load_module(folder + "/step.so"), tvm.cpu())
arrays = np.load(folder + "/arrays.npz")
tensors = [tvm.runtime.tensor(arrays[str(i)]) for i in range(len(arrays.files))]
def flat(value):
    return [x for v in value for x in flat(v)] if not hasattr(value, "numpy") else [value]
found = machine[name](*tensors[:count], *([tensors[count:]] if tensors[count:] else []))
assert "relax_grad" not in sys.modules
np.savez(folder + "/found.npz", *(x.numpy() for x in flat(found)))
"""


def check_export(module, name, arrays, state, folder):
    """Run an exported library in a process that imports only TVM, and assert the same bits."""
    executable = tvm.compile(module, HOST, relax_pipeline="relax_grad")
    executable.export_library(str(folder / "step.so"))
    np.savez(folder / "arrays.npz", **{str(i): a for i, a in enumerate([*arrays, *state])})
    run_python(SCRIPT.format((str(folder), len(arrays), name)))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    states = [[tvm.runtime.tensor(array) for array in state]] if state else []
    wanted = flat(to_numpy(machine[name](*map(tvm.runtime.tensor, arrays), *states)))
    saved = np.load(folder / "found.npz")
    assert len(saved.files) == len(wanted)
    for key, array in zip(saved.files, wanted, strict=True):
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(saved[key], array)


def test_an_exported_module_runs_without_relax_grad(tmp_path):
    check_export(classifier(), "main_adjoint", values(), [], tmp_path)


@pytest.mark.parametrize("rows", [4, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_an_exported_training_step(rows, tmp_path):
    module, state = training_step(rows)
    shapes = [(4, 3, 12, 12), (32, 3, 3, 3), (32,), (32,), (32, 32, 3, 3), (32, 5)]
    arrays = [RNG.normal(size=shape).astype("float32") for shape in shapes]
    check_export(module, "step", arrays, [array.numpy() for array in state], tmp_path)


def test_kernels_are_imported_when_something_is_compiled():
    run_python(
        """
import sys
import relax_grad
rooms = {f"relax_grad.cpu.{room}" for room in ("kernel", "dispatch", "schedule")}
assert not rooms & set(sys.modules)
"""
    )


def test_examples():
    assert doctest.testmod(pipeline).failed == 0
    assert doctest.testmod(pipeline).attempted > 0


@pytest.mark.parametrize("rows", [6, tirx.Var("n", "int64")], ids=["static", "symbolic"])
def test_no_function_lets_pointers_be_aliases(rows):
    """TVM's LLVM codegen applies the last function's ``noalias`` to the whole module; without it
    sums use memory."""
    with HOST:
        compiled = relax_grad.pipeline()(classifier(rows))
    functions = [f for f in compiled.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert functions
    for function in functions:
        assert function.attrs["tirx.noalias"]


def test_reads_stay_before_writes_in_place():
    """FuseOps moves the read behind the write."""
    mod = from_source("""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def add_to(A: T.Buffer((4, 5), "float32"), B: T.Buffer((4, 5), "float32")):
        for i, j in T.grid(4, 5):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + B[vi, vj]

    @R.function
    def main(x: R.Tensor((4, 5), "float32"), y: R.Tensor((4, 5), "float32")):
        cls = Module
        with R.dataflow():
            a = R.exp(x)
            b = R.multiply(a, y)
            c = R.call_tir_inplace(
                cls.add_to, (a, y), inplace_indices=[0], out_ty=[R.Tensor((4, 5), "float32")]
            )
            d = R.add(R.sin(c), b)
            R.output(c, d)
        return (c, d)
""")
    x, y = (RNG.normal(size=(4, 5)).astype("float32") for _ in range(2))
    results = flat(run_fused(mod, "main", x, y))
    total = np.exp(x) + y
    for result, wanted in zip(results, (total, np.sin(total) + np.exp(x) * y), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def test_functions_whose_extents_are_int32():
    """FuseTIR fails on a tensor that functions declare with different extent dtypes."""
    mod = from_source("""
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def double(A: T.Buffer((4, 5), "float32"), B: T.Buffer((4, 5), "float32")):
        for i, j in T.grid(4, 5):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor((4, 5), "float32")):
        cls = Module
        with R.dataflow():
            a = R.call_tir(cls.double, (R.add(x, x),), out_ty=R.Tensor((4, 5), "float32"))
            b = R.add(R.permute_dims(a, axes=[0, 1]), R.const(1, "float32"))
            R.output(b)
        return b
""")
    x = RNG.normal(size=(4, 5)).astype("float32")
    (result,) = flat(run_fused(mod, "main", x))
    np.testing.assert_allclose(result, 4 * x + 1, rtol=1e-6)


@pytest.mark.parametrize("taken", [True, False])
def test_a_tuple_of_which_a_conditional_takes_an_element(taken):
    """FuseTIR passes the element on, although the dataflow block that computes it does not return
    it."""
    mod = from_source("""
@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor((3, 1), "float32"), y: R.Tensor((3, 4), "float32"), c: R.Tensor((), "bool")
    ):
        with R.dataflow():
            a = R.log(R.add(R.exp(R.sin(x)), R.const(0.5, "float32")))
            both = (y, a)
            R.output(both)
        if c:
            b = R.multiply(y, both[1])
            r = b
        else:
            r = y
        with R.dataflow():
            s: R.Tensor((), "float32") = R.sum(r)
            R.output(s)
        return s
""")
    x, y = (RNG.normal(size=shape).astype("float32") for shape in [(3, 1), (3, 4)])
    mod = relax_grad.value_and_grad(mod, "main", "x")
    _, grad = flat(run_fused(mod, "main_adjoint", x, y, np.array(taken)))
    wanted = y.sum(1, keepdims=True) * np.exp(np.sin(x)) / (np.exp(np.sin(x)) + 0.5) * np.cos(x)
    np.testing.assert_allclose(grad, wanted if taken else np.zeros_like(x), rtol=1e-5, atol=1e-6)


def test_extents_are_defined_before_their_consumers():
    """FuseOps moves the consumers of a dynamic slice's extents before the cast that defines the
    extents."""
    mod = from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((3, 5), "float32"), y: R.Tensor((6,), "float32")):
        with R.dataflow():
            a = R.reshape(R.matmul(R.permute_dims(x), x), (5, 5))
            b = R.multiply(R.matmul(y, y), y)
            c = R.dynamic_strided_slice(
                a, R.const([1, 0], "int64"), R.const([4, 3], "int64"), R.const([2, 1], "int64")
            )
            d = R.match_cast(c, R.Tensor((2, 3), "float32"))
            e = R.add(R.reshape(R.multiply(d, R.const(0.5, "float32")), (6,)), b)
            R.output(e)
        return e
""")
    x, y = (RNG.normal(size=shape).astype("float32") for shape in [(3, 5), (6,)])
    result = run_fused(mod, "main", x, y)
    wanted = (x.T @ x)[1:4:2, :3].reshape(6) / 2 + (y @ y) * y
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


def test_a_cast_that_finds_out_extents_and_is_returned():
    mod = from_source("""
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor(("n", 3), "float32"), y: R.Tensor(ndim=2, dtype="float32")):
        m = T.int64()
        with R.dataflow():
            a = R.exp(x)
            b = R.match_cast(y, R.Tensor((m, 3), "float32"))
            c = R.concat((a, R.exp(b)))
            R.output(b, c)
        with R.dataflow():
            d = R.multiply(b, b)
            R.output(d)
        return (b, c, d)
""")
    x, y = (RNG.normal(size=(rows, 3)).astype("float32") for rows in (2, 4))
    results = flat(run_fused(mod, "main", x, y))
    for result, wanted in zip(results, (y, np.exp(np.concatenate([x, y])), y * y), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5)


def test_the_value_of_a_function_that_several_need():
    """TVM inlines nested ``Let`` values at each use, which defines the inner variables again."""
    x, y = (
        relax.Var("x", relax.TensorType((11, 3), "float32")),
        relax.Var("y", relax.TensorType((), "float32")),
    )
    bb = relax.BlockBuilder()
    with bb.function("main", [x, y]):
        with bb.dataflow():
            gate = bb.emit(op.sigmoid(op.divide(x, y)))
            ratio = bb.emit(op.divide(gate, op.add(op.square(gate), relax.const(1.0))))
            loss = bb.emit_output(op.add(op.mean(ratio), op.mean(gate)))
        bb.emit_func_output(loss)
    mod = relax_grad.value_and_grad(bb.get(), "main")
    x, y = RNG.normal(size=(11, 3)).astype("float32"), np.float32(2.0)
    _, *grads = flat(run_fused(mod, "main_adjoint", x, np.array(y)))
    gate = 1 / (1 + np.exp(-x / y))
    slope = (1 + (1 - gate**2) / (gate**2 + 1) ** 2) * gate * (1 - gate) / gate.size
    np.testing.assert_allclose(grads[0], slope / y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grads[1], -(slope * x).sum() / y**2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3)])
def test_a_constant_without_elements(shape):
    """TVM's FoldConstant makes a constant of zeros, and TVM fails to load some programs with such
    constants."""
    mod = from_source(f"""
@I.ir_module
class Module:
    @R.function
    def main() -> R.Tensor({shape}, "float32"):
        with R.dataflow():
            z = R.zeros({shape}, "float32")
            R.output(z)
        return z
""")
    assert run_fused(mod, "main").shape == shape
