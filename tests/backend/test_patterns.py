"""A backend's patterns: the calls they take out of a differentiated function, and the calls they
leave."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from sweep import TARGET
from tvm import relax, te, tirx
from tvm.relax.backend import _ffi_api
from tvm.relax.backend.pattern_registry import get_patterns_with_prefix
from tvm.relax.op import grad as backward
from tvm_ffi import structural_equal

from relax_grad import backend
from relax_grad.topi import conv as topi_conv

BACKEND = "pattern_test"
CONV2D = tuple(name for name in backend.CONV_BACKWARD if "2d" in name)


@pytest.fixture(autouse=True)
def no_patterns():
    """Check that TVM's registry holds no backward patterns, and remove the test's patterns
    afterwards."""
    assert not any("backward" in pattern.name for pattern in get_patterns_with_prefix(""))
    yield
    names = [pattern.name for pattern in get_patterns_with_prefix(BACKEND)]
    _ffi_api.RemovePatterns(names)


def tensor(name, *shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def differentiated(params, body):
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            output = body(bb, *params)
            square = bb.emit(relax.op.astype(bb.emit(relax.op.multiply(output, output)), "float32"))
            loss = bb.emit_output(relax.op.sum(square))
        bb.emit_func_output(loss)
    return relax.transform.Gradient("main")(bb.get())


def network(rank=2, batch=2, dtype="float32"):
    """Return the derivative of two convolutions with max pooling between them. The second has its
    channels last."""
    spatial = "DHW"[-rank:]

    def body(bb, data, weight1, weight2):
        conv = getattr(relax.op.nn, f"conv{rank}d")
        hidden = bb.emit(conv(data, weight1, padding=1))
        hidden = bb.emit(getattr(relax.op.nn, f"max_pool{rank}d")(hidden, 2, 2))
        hidden = bb.emit(relax.op.permute_dims(hidden, [0, *range(2, rank + 2), 1]))
        layouts = {"data_layout": f"N{spatial}C", "kernel_layout": f"O{spatial}I"}
        return bb.emit(conv(hidden, weight2, strides=2, dilation=2, groups=2, **layouts))

    data = tensor("data", batch, 3, *[10] * rank, dtype=dtype)
    weight1 = tensor("weight1", 4, 3, *[3] * rank, dtype=dtype)
    weight2 = tensor("weight2", 6, *[2] * rank, 2, dtype=dtype)
    return differentiated([data, weight1, weight2], body)


def partition(module, patterns=None, **settings):
    patterns = get_patterns_with_prefix(f"{BACKEND}.") if patterns is None else patterns
    settings = {"bind_constants": False, **settings}
    return relax.transform.FuseOpsByPattern(patterns, **settings)(module)


def functions(module, attr):
    """Return the functions of a module that have an attribute, by its value."""
    by_name = {}
    for _, function in module.functions_items():
        if isinstance(function, relax.Function) and attr in (function.attrs or {}):
            by_name.setdefault(str(function.attrs[attr]), []).append(function)
    return by_name


def calls(function, prefix="relax.grad."):
    calls_found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            calls_found.append(expr)

    relax.analysis.post_order_visit(function, visit)
    return [call for call in calls_found if call.op.name.startswith(prefix)]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_call_is_taken_in_one_piece(rank):
    module = network(rank)
    operators = (*backend.CONV_BACKWARD, *backend.POOL_BACKWARD)
    backend.register_backward_patterns(BACKEND, operators)
    partitioned = partition(module)
    assert calls(partitioned["main_adjoint"]) == []

    expected = calls(module["main_adjoint"])
    assert len(expected) == 5
    composites = functions(partitioned, "Composite")
    assert sorted(composites) == [
        f"{BACKEND}.conv{rank}d_backward_data",
        f"{BACKEND}.conv{rank}d_backward_weight",
        f"{BACKEND}.max_pool{rank}d_backward",
    ]
    taken = [calls(function) for group in composites.values() for function in group]
    assert all(len(group) == 1 for group in taken)
    for call in expected:
        assert any(
            call.op == taken_call.op
            and structural_equal(call.attrs, taken_call.attrs)
            and structural_equal(call.ty, taken_call.ty)
            for (taken_call,) in taken
        )


def test_the_attributes_are_those_of_the_forward_operator():
    module = network()
    forward = [call.attrs for call in calls(module["main"], "relax.nn.conv2d")]
    composites = functions(partition(module, backend.backward_patterns(BACKEND)), "Composite")
    for name in ("conv2d_backward_data", "conv2d_backward_weight"):
        for function in composites[f"{BACKEND}.{name}"]:
            attrs = backend.BackwardCall.of_function(function).attrs
            assert attrs.pop("out_dtype") == "float32"
            assert any(
                all(np.array_equal(getattr(other, key), attrs[key]) for key in attrs)
                for other in forward
            )


def test_the_annotations_name_the_arguments():
    pattern, annotations = backend.make_backward_pattern("relax.grad.conv2d_backward_weight")
    assert list(annotations) == ["output_grad", "data", "weight_shape", "root"]
    seen = []

    def check(context):
        seen.append({name: str(expr.ty) for name, expr in context.annotated_expr.items()})
        return False

    partition(network(1), [(f"{BACKEND}.pattern", pattern, annotations, check)])
    assert seen == []
    partition(network(2), [(f"{BACKEND}.pattern", pattern, annotations, check)])
    assert sorted(len(types) for types in seen) == [4, 4]
    assert {
        "output_grad": 'R.Tensor((2, 2, 2, 6), dtype="float32")',
        "data": 'R.Tensor((2, 5, 5, 4), dtype="float32")',
        "weight_shape": "R.Shape([6, 2, 2, 2])",
        "root": 'R.Tensor((6, 2, 2, 2), dtype="float32")',
    } in seen


def test_optional_arguments_are_matched():
    start, updates = tensor("start", 5), tensor("updates", 3)
    indices = tensor("indices", 3, 1, dtype="int64")
    patterns = backend.backward_patterns(BACKEND, ["relax.grad.scatter_nd_scan"])
    for terms in ((), (tensor("terms", 3),)):
        params = [start, indices, updates, *terms]
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            with bb.dataflow():
                result = bb.emit_output(backward.scatter_nd_scan(*params))
            bb.emit_func_output(result)
        (group,) = functions(partition(bb.get(), patterns), "Composite").values()
        names = ["start", "indices", "factors", "terms"][: len(params)]
        parameters = backend.BackwardCall.of_function(group[0]).parameters
        assert parameters == {name: index for index, name in enumerate(names)}


def is_plain(call):
    attrs = call.attrs
    return (attrs["data_layout"], attrs["kernel_layout"], attrs["groups"]) == ("NCHW", "OIHW", 1)


def is_single(call):
    return {call.dtype(name) for name in ("output_grad", "root")} == {"float32"}


@pytest.mark.parametrize(
    ("check", "settings", "taken"),
    [
        (is_plain, {}, 2),
        (is_single, {}, 4),
        (is_single, {"dtype": "float16"}, 0),
        (lambda call: call.is_static(), {"batch": tirx.Var("n", "int64")}, 0),
        (lambda call: "weight" in call.op_name, {"batch": tirx.Var("n", "int64")}, 2),
    ],
)
def test_calls_that_fail_the_check_stay_in_the_module(check, settings, taken):
    """Only the first of the two convolutions is plain."""
    module = network(**settings)
    partitioned = partition(module, backend.backward_patterns(BACKEND, CONV2D, check))
    assert sum(map(len, functions(partitioned, "Composite").values())) == taken
    assert len(calls(partitioned["main_adjoint"])) == 5 - taken
    if taken == 0:
        assert structural_equal(partitioned, module)


def test_registration_is_repeatable_and_the_last_one_counts():
    first = backend.register_backward_patterns(BACKEND, CONV2D, lambda call: False)
    assert functions(partition(network()), "Composite") == {}
    backend.register_backward_patterns(BACKEND, CONV2D)
    registered = get_patterns_with_prefix(BACKEND)
    assert sorted(pattern.name for pattern in registered) == sorted(name for name, *_ in first)
    assert sum(map(len, functions(partition(network()), "Composite").values())) == 4


def test_merged_composites():
    """The pass considers only ``main``. Consecutive composite functions run as one function."""
    operators = (*backend.CONV_BACKWARD, *backend.POOL_BACKWARD)
    module = tvm.IRModule()
    module["main"] = network()["main_adjoint"].with_attr("global_symbol", "main")
    partitioned = partition(module, backend.backward_patterns(BACKEND, operators))
    merged = relax.transform.MergeCompositeFunctions()(partitioned)
    assert calls(merged["main"]) == []
    ((name, group),) = functions(merged, "Codegen").items()
    assert name == BACKEND
    several = max(group, key=lambda function: len(calls(function)))
    assert sum(len(calls(function)) for function in group) == 5
    count = len(calls(several))
    assert count > 1
    with pytest.raises(ValueError, match=f"holds {count} composite functions; describe them one"):
        backend.BackwardCall.of_function(several)


def test_offloaded_functions_run_and_other_operators_compile():
    """The "library" is the tensor expression; the patterns leave max pooling and float16 to TVM."""
    symbols = []

    @tvm_ffi.register_global_func(f"relax.ext.{BACKEND}", override=True)
    def generate(functions, options, constant_names):
        module = tvm.IRModule()
        for function in functions:
            call = backend.BackwardCall.of_function(function)
            attrs = dict(call.attrs, out_dtype=call.dtype())
            placeholders = {
                name: te.placeholder(call.shape(name), call.dtype(name), name)
                for name in sorted(call.parameters, key=call.parameters.get)
            }
            compute = topi_conv.conv_backward_data
            if call.op_name.endswith("weight"):
                compute = topi_conv.conv_backward_weight
            result = compute(*placeholders.values(), call.shape(), **attrs)
            symbol = function.attrs["global_symbol"]
            symbols.append(symbol)
            kernel = te.create_prim_func([*placeholders.values(), result])
            module[symbol] = kernel.with_attr("global_symbol", symbol)
        return [tvm.tirx.build(module, target=TARGET)]

    module = network()
    partitioned = partition(
        module, backend.backward_patterns(BACKEND, CONV2D), annotate_codegen=True
    )
    offloaded = relax.transform.RunCodegen()(partitioned)
    assert len(set(symbols)) == 4
    rng = np.random.default_rng(0)
    params = module["main_adjoint"].params
    values = [rng.normal(size=list(map(int, p.ty.shape.values))).astype("float32") for p in params]

    def run(mod):
        machine = relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())
        _, gradients = machine["main_adjoint"](*map(tvm.runtime.tensor, values))
        return [gradient.numpy() for gradient in gradients]

    for expected, result in zip(run(module), run(offloaded), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["", "my.backend"])
def test_refuses_a_name_that_tvm_would_cut(name):
    with pytest.raises(ValueError, match="backend must be a name without a dot"):
        backend.backward_patterns(name)


@pytest.mark.parametrize("name", ["relax.nn.conv2d", "conv2d_backward_data", "relax.grad.conv4d"])
def test_names_of_other_operators_are_refused(name):
    with pytest.raises(ValueError, match=f"there is no backward operator '{name}'"):
        backend.register_backward_patterns(BACKEND, [name])


def test_the_operators_that_are_named_exist():
    patterns = backend.backward_patterns(BACKEND, (*backend.CONV_BACKWARD, *backend.POOL_BACKWARD))
    assert len(patterns) == 15
