"""Requirements that every backward operator meets, checked on the calls in differentiated samples.

The tests find operators by their builders in the package, so a new operator is checked without an
entry here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from backward_calls import (
    Found,
    add_function,
    at_sample,
    builder_of,
    calls_in,
    found_calls,
    own_operators,
    remade,
    with_extents,
)
from calls import type_of
from sweep import TARGET
from tvm import relax, tirx
from tvm.ir import Op
from tvm.script import from_source
from tvm_ffi import structural_equal

from relax_grad import registry
from relax_grad.ir.compat import dtype_of
from relax_grad.op.declare import type_key
from relax_grad.testing._program import numpy_dtype

OPERATORS = own_operators()
HALVES = ("float16", "bfloat16")
each_operator = pytest.mark.parametrize("name", OPERATORS)

#: Operators that accept any output gradient of the right rank, or of any rank: another argument or
#: the output gradient itself gives the shape of the result.
ANY_OUTPUT_GRAD = {
    "relax.grad.affine_grid_backward_data": "the size of the grid is an argument of its own",
    "relax.grad.broadcast_from_worker0_backward_x": "the result has the type of the output "
    "gradient",
    "relax.grad.divide_by_count": "the result has the type of the output gradient",
    "relax.grad.dynamic_strided_slice_backward_data": "the extents depend on values",
    "relax.grad.index_put_backward_values": "the destination of the forward operator has any "
    "extents",
    "relax.grad.scatter_elements_backward_updates": "the destination has any extents",
    "relax.grad.scatter_nd_backward_updates": "the destination has any rank",
    "relax.grad.slice_scatter_backward_src": "the destination has any extent along the axis",
    "relax.grad.stack_backward_tensors": "the result has its extents from the output gradient",
}


def short(name: str) -> str:
    return name.removeprefix("relax.grad.")


def module_of(items: list[Found]) -> tvm.IRModule:
    """Return a module with a function for each call."""
    module = tvm.IRModule()
    for number, item in enumerate(items):
        add_function(module, f"{short(item.name)}_{number}", *remade(item.call))
    return module


@each_operator
def test_operator_occurs_in_gradients_of_samples(name):
    """The gradients of the samples of the forward operators contain the operator."""
    assert found_calls()[name], (
        f"no differentiated sample holds a call of {name}: let a rule in relax_grad/rules call "
        "it, and add samples of the forward operator in relax_grad/testing/samples"
    )


@each_operator
def test_attributes(name):
    op = Op.get(name)
    for attr in ("FInferType", "FPurity", "FLegalize", "FPrimalGradient"):
        assert op.get_attr(attr) is not None, attr
    assert op.get_attr("FPurity")
    assert callable(builder_of(name))
    assert op.num_inputs == len(op.arguments) > 0
    entry = registry.classify(name)
    assert entry.kind == "differentiable" or entry.reason


@each_operator
def test_builder_and_type_inference(name):
    """The builder reproduces the rule's call, and the inferred type equals the type in the
    program."""
    for item in found_calls()[name]:
        params, call = remade(item.call)
        assert call.op.name == name
        assert structural_equal(call.attrs, item.call.attrs)
        assert len(call.args) == len(item.call.args)
        assert structural_equal(type_of(call), item.call.ty)
        for param in params:
            assert isinstance(param.ty, relax.TensorType)


@each_operator
def test_result_is_where_the_arguments_are(name):
    kind = relax.VDevice if hasattr(relax, "VDevice") else tvm.ir.VDevice  # TVM 0.26
    vdevice = kind("llvm", 1)
    for item in found_calls()[name]:
        result = type_of(remade(item.call, vdevice=vdevice)[1])
        fields = result.fields if isinstance(result, relax.TupleType) else [result]
        assert all(field.vdevice == vdevice for field in fields), (item.call, result)


@each_operator
def test_round_trips(name):
    # TVM prints constants in an index map in a form that it cannot parse.
    calls = [item for item in found_calls()[name] if not has_constant_index(item.call)]
    assert calls
    module = module_of(calls)
    script = module.script(show_meta=True)
    assert script.count(f"R.grad.{short(name)}(") == len(calls)
    assert structural_equal(from_source(script), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def has_constant_index(call: relax.Call) -> bool:
    index_map = getattr(call.attrs, "index_map", None)
    if index_map is None:
        return False
    return any(isinstance(index, tirx.IntImm) for index in index_map.final_indices)


COLLECTIVES = (
    "relax.grad.copy_to_tensor_parallel",
    "relax.grad.reduce_from_tensor_parallel",
)


@each_operator
def test_legalizes(name):
    """The result needs no further legalization."""
    items = found_calls()[name]
    with items[0].sample.within():
        legalized = relax.transform.LegalizeOps()(module_of(items))
    left = {call.op.name for call in calls_in(legalized)}
    # The operators of tensor parallelism become nothing, or a collective.
    assert name in COLLECTIVES or "relax.call_tir" in left
    assert left <= {"relax.call_tir", "relax.call_dps_packed", "relax.call_pure_packed"}


@each_operator
def test_symbolic_shapes(name):
    """The type for symbolic extents becomes the static type when the extents are substituted."""
    items = found_calls(symbolic=True)[name]
    calls = [(item.call, at_sample(item.sample)) for item in items]
    for call, extents in calls or [symbolic_batch(found_calls()[name][0].call)]:
        symbolic = type_of(remade(call)[1])
        assert structural_equal(
            with_extents(symbolic, extents), type_of(remade(call, extents=extents)[1])
        )


def symbolic_batch(call: relax.Call):
    """Make the leading extent of a call's first tensor symbolic, and equal leading extents of other
    arguments."""
    n = tirx.Var("n", "int64")
    batch = call.args[0].ty.shape.values[0]

    def symbolic(extents):
        return [n if i == 0 and extent == batch else extent for i, extent in enumerate(extents)]

    def back(extents):
        return [batch if isinstance(extent, tirx.Var) else extent for extent in extents]

    _, changed = remade(call, extents=symbolic)
    return relax.BlockBuilder().normalize(changed), back


# Half precision.

#: Half a unit in the last place, relative to the value.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
#: The error of float32 accumulation, relative to the largest number in the arguments and the
#: result.
ACCUMULATED = 1e-5


def check_half_precision(items: list[Found]):
    """Assert that results equal those of float64 on the same inputs, up to float32 sums and one
    rounding."""
    module = tvm.IRModule()
    for number, item in enumerate(items):
        for dtype in ("float64", *HALVES):
            add_function(module, f"f{number}_{dtype}", *remade(item.call, dtype))
    rng = np.random.default_rng(0)
    wrong = []
    with contextlib.ExitStack() as stack:
        for context in {item.sample.within for item in items}:
            stack.enter_context(context())
        machine = relax.VirtualMachine(tvm.compile(module, tvm.target.Target(TARGET)), tvm.cpu())

        def run(name, values):
            params = module[name].params
            cast = [
                value.astype(numpy_dtype(dtype_of(param.ty)))
                for value, param in zip(values, params, strict=True)
            ]
            return leaves(machine[name](*map(tvm.runtime.tensor, cast)))

        for number, item in enumerate(items):
            for half in HALVES:
                params = module[f"f{number}_{half}"].params
                values = [random_value(rng, param.ty, half) for param in params]
                exact = run(f"f{number}_float64", values)
                results = run(f"f{number}_{half}", values)
                if not all(
                    close(result, other, half, values)
                    for result, other in zip(results, exact, strict=True)
                ):
                    wrong.append(f"{half}: {item.call}")
    assert not wrong, "\n".join(wrong)


def with_known_shapes(name: str) -> Iterator[Found]:
    for item in found_calls()[name]:
        params, _ = remade(item.call)
        if all(isinstance(param.ty.shape, relax.ShapeExpr) for param in params):
            yield item


def elements(item: Found) -> int:
    params, _ = remade(item.call)
    return sum(math.prod(int(extent) for extent in param.ty.shape.values) for param in params)


def random_value(rng, kind: relax.TensorType, half: str) -> np.ndarray:
    """Return positive numbers that half precision can represent, so that nothing cancels, or valid
    indices."""
    shape = [int(extent) for extent in kind.shape.values]
    if dtype_of(kind) in (half, "float64", "float32"):
        return rng.uniform(0.1, 1, shape).astype(numpy_dtype(half)).astype("float64")
    return rng.integers(0, 2, shape)


def leaves(value) -> list[np.ndarray]:
    if hasattr(value, "numpy"):
        return [np.asarray(value.numpy()).astype("float64")]
    return [leaf for item in value for leaf in leaves(item)]


def close(actual: np.ndarray, exact: np.ndarray, half: str, values: list[np.ndarray]) -> bool:
    scale = max((np.abs(array).max() for array in (*values, exact) if array.size), default=0)
    tolerance = ROUNDING[half] * np.abs(exact) + ACCUMULATED * scale
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))  # NaN for an invalid target
    return bool(np.all((np.abs(actual - exact) <= tolerance) | same))


def test_half_precision():
    """Check the call with the largest arguments of each operator, which has the longest sums."""
    check_half_precision([max(with_known_shapes(name), key=elements) for name in OPERATORS])


@pytest.mark.slow
@each_operator
def test_half_precision_of_all_calls(name):
    check_half_precision(list(with_known_shapes(name)))


# Refused calls.


def refused(name: str, args, attrs, kinds, *words: str) -> bool:
    """Tell whether a call is refused; the exception must be one of Python's and explain the
    error."""
    try:
        type_of(relax.Call(Op.get(name), list(args), attrs))
    except Exception as raised:
        error = raised
    else:
        return False
    assert type(error) in kinds, (name, type(error), error)
    for word in (name, *words):
        assert word in str(error), (word, str(error))
    return True


def normalized(call: relax.Call) -> relax.Call:
    return relax.BlockBuilder().normalize(remade(call)[1])


@each_operator
def test_refuses_another_number_of_arguments(name):
    arguments = Op.get(name).arguments
    names = [argument.name for argument in arguments]
    required = sum(not argument.type_info.startswith("Optional") for argument in arguments)
    for item in found_calls()[name]:
        call = normalized(item.call)
        args = list(call.args)
        more = args + args[:1] * (len(arguments) + 1 - len(args))
        for wrong in ([], args[: required - 1], more):
            assert refused(name, wrong, call.attrs, [TypeError], *names, f"has {len(wrong)}")


@each_operator
def test_refuses_arguments_of_another_kind(name):
    """A shape or a tuple instead of a tensor, and similar mismatches."""
    tensor = relax.Var("wrong", relax.TensorType((2, 3), "float64"))
    shape = relax.ShapeExpr([2, 3])
    others = {
        "Tensor": [shape, relax.Tuple([tensor]), relax.Tuple([])],
        "Shape": [tensor, relax.Tuple([shape])],
        "Tuple": [tensor, shape],
        "PrimExpr": [tensor, shape],
    }
    for item in found_calls()[name]:
        call = normalized(item.call)
        for i, (arg, info) in enumerate(zip(call.args, Op.get(name).arguments, strict=False)):
            kind = next(kind for kind in others if kind in info.type_info)
            for wrong in others[kind]:
                args = [*call.args[:i], wrong, *call.args[i + 1 :]]
                assert refused(name, args, call.attrs, [TypeError], info.name), (info, arg.ty)


@each_operator
def test_refuses_other_attributes(name):
    x = relax.Var("x", relax.TensorType((2, 3), "float64"))
    for item in found_calls()[name]:
        call = normalized(item.call)
        expected = type_key(call.attrs)
        wrong = [relax.op.nn.dropout(x).attrs, *([] if expected is None else [None])]
        for attrs in wrong:
            words = (expected or "takes no attributes", f"has {type_key(attrs)}")
            assert refused(name, call.args, attrs, [TypeError], *words)


@each_operator
def test_refuses_an_output_grad_of_another_shape(name):
    """A changed first argument is refused or makes another valid call, as it may if it is no output
    gradient."""
    first = Op.get(name).arguments[0].name
    must = first.startswith("output_grad") and name not in ANY_OUTPUT_GRAD
    module, accepted = tvm.IRModule(), 0
    for number, item in enumerate(found_calls()[name]):
        call = normalized(item.call)
        for variant, wrong in enumerate(other_shapes(call.args[0])):
            args = [wrong, *call.args[1:]]
            if not refused(name, args, call.attrs, [TypeError, ValueError], first):
                assert not must, (first, wrong.ty)
                changed = relax.Call(call.op, args, call.attrs)
                params, changed = remade(relax.BlockBuilder().normalize(changed))
                add_function(module, f"f{number}_{variant}", params, changed)
                accepted += 1
    assert accepted or name not in ANY_OUTPUT_GRAD, f"{name} does refuse other output gradients"
    with found_calls()[name][0].sample.within():
        relax.transform.LegalizeOps()(module)


def other_shapes(argument: relax.Expr):
    """Yield expressions like an argument with one axis more, one axis less, or one different
    extent."""
    kind = argument.ty
    if isinstance(kind, relax.TupleType):
        first, *others = argument.fields
        for wrong in other_shapes(first):
            yield relax.Tuple([wrong, *others])
    elif isinstance(kind.shape, relax.ShapeExpr):
        shape = [int(extent) for extent in kind.shape.values]
        axes = range(len(shape))
        changed = [[*shape[:i], shape[i] + 1, *shape[i + 1 :]] for i in axes]
        for wrong in ([*shape, 2], *([shape[:-1]] if shape else []), *changed):
            yield relax.Var("wrong", relax.TensorType(wrong, dtype_of(kind)))
