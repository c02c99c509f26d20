"""Triangular, shifted and stepped loops of tensor functions: values, gradients, and each pass of
TVM's lowering."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from sweep import TARGET
from tvm import relax, s_tir, tirx
from tvm.script import tirx as T
from tvm_ffi import structural_equal

import relax_grad
from relax_grad.cpu.codegen import lower
from relax_grad.ir.compat import structural_walk
from relax_grad.ir.loops import canonicalize_loops, with_canonical_loops

from ._loop_nests import SIZE, LoopNest
from ._tir_interpreter import run

pytestmark = pytest.mark.core

_VALUE = np.random.default_rng(0).uniform(0.5, 1.5, (SIZE, SIZE))
_PIPELINES = {"default": TARGET, "relax_grad": relax_grad.target.host()}


@T.prim_func(s_tir=True)
def triangle(A: T.Buffer((5, 5), "float64"), Y: T.Buffer((5, 5), "float64")):
    for i in range(1, 4):
        for j in range(i, 4):
            with T.sblock("use"):
                vi = T.axis.spatial(5, i)
                vj = T.axis.spatial(5, j)
                Y[vi, vj] = A[vi, vj] + 1.0


@T.prim_func(s_tir=True)
def plain(A: T.Buffer((5,), "float64"), Y: T.Buffer((5,), "float64")):
    for i in range(5):
        with T.sblock("use"):
            vi = T.axis.spatial(5, i)
            Y[vi] = A[vi]


def _loops(function):
    found = []
    structural_walk(function.body, (tirx.For, found.append))
    return found


def test_loops_begin_at_0():
    loops = _loops(with_canonical_loops(triangle))
    assert len(loops) == 2
    assert all(int(loop.min) == 0 for loop in loops)
    assert with_canonical_loops(plain).same_as(plain)
    module = tvm.IRModule({"f": plain})
    assert canonicalize_loops(module).same_as(module)


def test_other_kinds_of_loops_stay():
    i, y = tirx.Var("i", "int32"), tirx.decl_buffer((8,), "float32", "y", layout=None)
    store = tirx.BufferStore(y, tirx.const(1.0, "float32"), [i])

    def made(start, kind, thread=None, step=None):
        more = {} if step is None else {"step": tirx.IntImm("int32", step)}
        loop = tirx.For(
            i, tirx.IntImm("int32", start), tirx.IntImm("int32", 4), kind, store, thread, **more
        )
        return tirx.PrimFunc([y], loop)

    parallel = with_canonical_loops(made(2, tirx.ForKind.PARALLEL))
    (loop,) = _loops(parallel)
    assert loop.kind == tirx.ForKind.PARALLEL
    (result,) = run(parallel, np.zeros(8, "float32"))
    np.testing.assert_array_equal(result, [0, 0, 1, 1, 1, 1, 0, 0])
    falling = made(4, tirx.ForKind.SERIAL, step=-1)
    assert with_canonical_loops(falling).same_as(falling)


def test_pass_by_pass():
    """Every pass keeps the result of drawn nests: ours, those for kernels, and TVM's own."""
    nests = [LoopNest(seed) for seed in range(20)]
    results = [nest.result(_VALUE) for nest in nests]
    original = [nest.module()["f"] for nest in nests]
    starts = tvm.IRModule({f"f{k}": f.with_attr("global_symbol", f"f{k}")
                           for k, f in enumerate(original)})  # fmt: skip

    checked_functions = {}

    def check(mod, name):
        for k, (nest, wanted) in enumerate(zip(nests, results, strict=True)):
            function = mod[f"f{k}"]
            if k in checked_functions and structural_equal(checked_functions[k], function):
                continue  # the pass leaves it as it is
            checked_functions[k] = function
            got = run(function, _VALUE, np.zeros_like(_VALUE))[1]
            np.testing.assert_allclose(got, wanted, err_msg=f"{name}: {nest.lines} {nest.store}")

    check(starts, "drawn")
    checked = []

    @tvm.instrument.pass_instrument
    class Checks:
        stopped = False

        def run_after_pass(self, mod, info):
            self.stopped = self.stopped or info.name == "tirx.SplitHostDevice"
            if not self.stopped and info.name not in checked:
                check(mod, info.name)
                checked.append(info.name)

    mod = canonicalize_loops(starts)
    check(mod, "canonicalize_loops")
    mod = tirx.transform.BindTarget(tvm.target.Target("llvm").with_host("llvm"))(mod)
    stock, _, _ = tirx.get_tir_pipeline("default")
    for passes in (stock, tvm.transform.Sequential(lower._passes(True))):
        with tvm.transform.PassContext(instruments=[Checks()]):
            passes(mod)
    assert {"s_tir.LowerOpaqueBlock", "tirx.StorageRewrite", "tirx.NarrowDataType"} <= {*checked}
    assert "s_tir.CanonicalizeLoop" in checked  # which finds nothing to do


def test_pipeline_without_gradient():
    """Functions that no gradient has passed through."""
    nest = next(nest for nest in map(LoopNest, range(200, 300)) if "range(i, 6)" in nest.lines[1])
    mod = nest.module()
    compiled = tvm.compile(mod, _PIPELINES["relax_grad"], relax_pipeline="relax_grad")
    value = relax.VirtualMachine(compiled, tvm.cpu())["main"](tvm.runtime.tensor(_VALUE))
    np.testing.assert_allclose(value.numpy(), np.square(nest.result(_VALUE)).sum())


def _slope(nest, tangent):
    step = 1e-6
    up, down = (np.square(nest.result(_VALUE + s * tangent)).sum() for s in (step, -step))
    return (up - down) / (2 * step)


@pytest.mark.parametrize("pipeline", _PIPELINES)
def test_values_and_gradients(pipeline):
    """Drawn nests agree with NumPy, and their gradients with differences."""
    mod = tvm.IRModule()
    nests = [LoopNest(seed) for seed in range(100, 108)]
    for k, nest in enumerate(nests):
        module = relax_grad.value_and_grad(nest.module())
        names = {v: f"{v.name_hint}_{k}" for v in module.get_global_vars()}
        for variable, function in _renamed(module, names):
            mod[variable] = function
    vm = relax.VirtualMachine(
        tvm.compile(mod, _PIPELINES[pipeline], relax_pipeline=pipeline), tvm.cpu()
    )
    tangent = np.random.default_rng(1).normal(size=_VALUE.shape)
    for k, nest in enumerate(nests):
        value, (gradient,) = vm[f"main_adjoint_{k}"](tvm.runtime.tensor(_VALUE))
        wanted = np.square(nest.result(_VALUE)).sum()
        np.testing.assert_allclose(value.numpy(), wanted, err_msg=str(nest.lines))
        slope = float((gradient.numpy() * tangent).sum())
        np.testing.assert_allclose(slope, _slope(nest, tangent), rtol=1e-5, err_msg=str(nest.lines))


@pytest.mark.parametrize("pipeline", _PIPELINES)
def test_symbolic_extents(pipeline):
    module = tvm.script.from_source(_SYMBOLIC)
    compiled = tvm.compile(
        relax_grad.value_and_grad(module), _PIPELINES[pipeline], relax_pipeline=pipeline
    )
    vm = relax.VirtualMachine(compiled, tvm.cpu())
    for n in (1, 2, 5):
        x, tangent = _VALUE[:n, :n].copy(), np.ones((n, n))
        value, (gradient,) = vm["main_adjoint"](tvm.runtime.tensor(x))
        np.testing.assert_allclose(value.numpy(), _symbolic(x))
        step = 1e-6 * tangent
        wanted = (_symbolic(x + step) - _symbolic(x - step)) / 2e-6
        np.testing.assert_allclose(gradient.numpy().sum(), wanted, rtol=1e-6)


_SYMBOLIC = """
@I.ir_module
class M:
    @T.prim_func(private=True, s_tir=True)
    def f(a: T.handle, y: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n, n), "float64")
        Y = T.match_buffer(y, (n, n), "float64")
        with T.sblock("fill"):
            for i, j in T.grid(n, n):
                Y[i, j] = A[i, j]
        with T.sblock("use"):
            T.reads(Y[0:n, 0:n], A[0:n, 0:n])
            T.writes(Y[0:n, 0:n])
            for i in range(1, n):
                for j in T.serial(i, n, step=2):
                    Y[i, j] = Y[i, j] * A[j, i]
    @R.function
    def main(A: R.Tensor(("n", "n"), "float64")) -> R.Tensor((), "float64"):
        n = T.int64()
        cls = M
        y = R.call_tir(cls.f, (A,), out_ty=R.Tensor((n, n), "float64"))
        s = R.sum(R.multiply(y, y))
        return s
"""


def _symbolic(x):
    y = x.copy()
    for i in range(1, len(x)):
        for j in range(i, len(x), 2):
            y[i, j] *= x[j, i]
    return np.square(y).sum()


def _renamed(module, names):
    """Yield the functions of a module under other names."""
    text = module.script(show_meta=False)
    for variable in sorted(names, key=lambda v: -len(v.name_hint)):
        text = text.replace(f"cls.{variable.name_hint},", f"cls.{names[variable]},")
        text = text.replace(f"def {variable.name_hint}(", f"def {names[variable]}(")
    return tvm.script.from_source(text).functions_items()


def test_stock_pass_is_wrong():
    """TVM's pass still needs the replacement; if this fails, relax_grad.ir.loops can go."""
    mod = tvm.IRModule({"f": triangle.with_attr("global_symbol", "f")})
    wrong = run(s_tir.transform.CanonicalizeLoop()(mod)["f"], np.zeros((5, 5)), np.zeros((5, 5)))[1]
    right = run(triangle, np.zeros((5, 5)), np.zeros((5, 5)))[1]
    assert right.sum() == 6
    assert not np.array_equal(wrong, right)
