"""Functions under Autocast have the types of before, and values that differ by the rounding of the
half precision."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs import build, run, tensor
from tvm import relax, tirx
from tvm.relax import op

from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.compat import dtype_of
from relax_grad.testing import _program
from relax_grad.testing._arguments import resolve
from relax_grad.testing.samples import sampled_operators, samples
from relax_grad.transform import Autocast, Gradient
from relax_grad.transform._precision import OPERATORS, dtype_in

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5)).astype("float32")
W = RNG.normal(size=(5, 3)).astype("float32")


def of(body, *others: relax.Var, **options) -> tvm.IRModule:
    params = [tensor("x", X.shape, "float32"), tensor("w", W.shape, "float32"), *others]
    return build(params, body, **options)


def dtypes_of(module: tvm.IRModule, name: str = "main") -> list[str]:
    """Return the dtypes of the tensors in a function, in order."""
    types = [binding.var.ty for binding in bindings_of(module[name].body)]
    return [dtype_of(ty) for ty in types if isinstance(ty, relax.TensorType)]


def check(module: tvm.IRModule, *values: np.ndarray, tolerance: float = 0.03) -> tvm.IRModule:
    """Compare the values with those in float32, and return the module under Autocast."""
    cast = Autocast()(module)
    relax.analysis.well_formed(cast)
    assert _kinds(cast["main"].ret_ty) == _kinds(module["main"].ret_ty)
    wanted, found = run(module, "main", *values), run(cast, "main", *values)
    for one, other in zip(*map(_flat, (wanted, found)), strict=True):
        np.testing.assert_allclose(other, one, tolerance, tolerance * np.abs(one).max())
    return cast


def _kinds(ty: relax.Type) -> list:
    """Return the ranks and dtypes of tensors: extents may be better known than before."""
    if isinstance(ty, relax.TupleType):
        return [kind for field in ty.fields for kind in _kinds(field)]
    return [(ty.ndim, dtype_of(ty))]


def _flat(values) -> list:
    return [leaf for v in values for leaf in _flat(v)] if isinstance(values, list) else [values]


def test_products_have_half_precision():
    cast = check(of(lambda bb, x, w: bb.emit(op.nn.relu(bb.emit(op.matmul(x, w))))), X, W)
    assert dtypes_of(cast) == ["bfloat16"] * 4 + ["float32"]
    half = Autocast("float16")(of(lambda bb, x, w: bb.emit(op.matmul(x, w))))
    assert dtypes_of(half) == ["float16"] * 3 + ["float32"]


def test_each_tensor_is_cast_once():
    def body(bb, x, w):
        first, second = bb.emit(op.matmul(x, w)), bb.emit(op.matmul(x, w))
        return bb.emit(op.add(first, second))

    cast = Autocast()(of(body))
    assert cast.script().count("R.astype") == 3


def test_a_bias_keeps_the_precision_and_another_tensor_does_not():
    bias, other = tensor("bias", (3,), "float32"), tensor("other", (4, 3), "float32")

    def body(bb, x, w, bias, other):
        biased = bb.emit(op.add(bb.emit(op.matmul(x, w)), bias))
        return bb.emit(op.tanh(bb.emit(op.add(biased, other))))

    values = RNG.normal(size=3).astype("float32"), RNG.normal(size=(4, 3)).astype("float32")
    cast = check(of(body, bias, other), X, W, *values)
    kinds = {
        binding.value.op.name: dtype_of(binding.var.ty)
        for binding in bindings_of(cast["main"].body)
        if isinstance(binding.value, relax.Call)
    }
    assert kinds["relax.tanh"] == "float32"
    assert dtypes_of(cast).count("bfloat16") == 5


def test_gradients_of_parameters_are_in_float32():
    def body(bb, x, w):
        return op.sum(bb.emit(op.square(bb.emit(op.nn.gelu(bb.emit(op.matmul(x, w)))))))

    module = of(body)
    grads = [
        run(Gradient("main")(m), "main_adjoint", X, W)[1] for m in (module, Autocast()(module))
    ]
    for one, other in zip(*grads, strict=True):
        assert other.dtype == np.float32
        np.testing.assert_allclose(other, one, 0.05, 0.03 * np.abs(one).max())


@pytest.mark.parametrize("taken", [False, True])
def test_branches_return_the_types_of_before(taken):
    cond = tensor("cond", (), "bool")
    bb = relax.BlockBuilder()
    x, w = tensor("x", X.shape, "float32"), tensor("w", W.shape, "float32")
    with bb.function("main", [x, w, cond]):
        h = bb.emit(op.matmul(x, w))
        branches = []
        for function in (op.exp, op.tanh):
            inner = relax.Var("inner", h.ty)
            block = relax.BindingBlock([relax.VarBinding(inner, function(h))])
            branches.append(relax.SeqExpr([block], inner))
        chosen = bb.emit(relax.If(cond, *branches))
        bb.emit_func_output(bb.emit(op.sum(chosen)))
    check(bb.get(), X, W, np.array(taken))


def test_functions_keep_their_dtypes():
    """Those that the function calls: of Relax, and tensor functions."""
    bb = relax.BlockBuilder()
    y = tensor("y", (4, 3), "float32")
    with bb.function("other", [y]):
        bb.emit_func_output(bb.emit(op.tanh(y)))
    other = bb.get().get_global_var("other")
    x, w = tensor("x", X.shape, "float32"), tensor("w", W.shape, "float32")
    with bb.function("main", [x, w]):
        with bb.dataflow():
            h = bb.emit(op.matmul(x, w))
            called = bb.emit(relax.Call(other, [h]))
            twice = bb.emit_te(
                lambda a: tvm.te.compute(a.shape, lambda i, j: a[i, j] * tirx.const(2, "float32")),
                h,
            )
            result = bb.emit_output(relax.Tuple([called, twice]))
        bb.emit_func_output(result)
    cast = check(Autocast(func_names=["main"])(bb.get()), X, W)
    assert "float32" in str(cast["other"].params[0].ty)


def test_tuples_and_casts_of_types():
    n = tirx.Var("n", "int64")

    def body(bb, x, w):
        h = bb.emit(op.matmul(x, w))
        pair = bb.emit(relax.Tuple([h, bb.emit(op.tanh(h))]))
        joined = bb.emit(op.concat(pair, 0))
        same = bb.match_cast(joined, relax.TensorType((n, 3), "float32"))
        parts = bb.emit(op.split(same, 2, 0))
        return bb.emit(op.tanh(bb.emit(relax.TupleGetItem(parts, 1))))

    check(of(body, dataflow=False), X, W)


def test_float64_stays():
    x = tensor("x", (3, 3))
    module = build([x], lambda bb, x: bb.emit(op.matmul(x, x)))
    assert set(dtypes_of(Autocast()(module))) == {"float64"}


def test_arguments():
    with pytest.raises(ValueError, match='dtype must be "bfloat16" or "float16"'):
        Autocast("float32")
    module = of(lambda bb, x, w: bb.emit(op.matmul(x, w)))
    with pytest.raises(ValueError, match="no_such"):
        Autocast(func_names=["no_such"])(module)


def _half(value):
    """Return operands as results of a product, whose dtype is the half precision."""
    if isinstance(value, tuple | list):
        return type(value)(map(_half, value))
    ty = value.ty if isinstance(value, relax.Expr) else None
    if ty is None or dtype_in(ty) != "float32" or ty.ndim == 0:
        return value
    letters = "abcdefgh"[: ty.ndim]
    return op.einsum((value,), f"{letters}->{letters}")


def _check_samples(names, most: int | None = None) -> None:
    for name in names:
        for sample in list(samples(name))[:most]:
            with sample.within():
                _check_sample(sample)


def _check_sample(sample) -> None:
    _, function = resolve(sample.function or sample.op)
    for count in (0, 1, len(sample.inputs)):

        def of_half(*arguments, count=count, **attrs):
            cast = [*map(_half, arguments[:count]), *arguments[count:]]
            return function(*cast, **attrs)

        arguments = _program.make_arguments(sample.inputs, "float32", {})
        module = _program.first_order(of_half, arguments, sample.attrs, RNG).module
        cast = Autocast(func_names=["main"])(module)
        relax.analysis.well_formed(cast)
        types = module["main"].ret_ty, cast["main"].ret_ty
        assert tvm_ffi.structural_equal(*types, map_free_vars=True), sample


#: Samples whose functions only a gradient builds.
_NO_PROGRAMS = {"relax.layout_transform", "relax.reshape"}

_SWEPT = [name for name in sampled_operators() if ".ccl." not in name and name not in _NO_PROGRAMS]
_LISTED = {name for group in OPERATORS.values() for name in group}


def test_some_samples_of_operators_of_the_table():
    _check_samples([name for name in _SWEPT if name in _LISTED], most=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_samples_of_all_operators(part):
    _check_samples(_SWEPT[part::4])
