"""The backward operators of pooling: type inference, errors, TVMScript and JSON."""

from __future__ import annotations

import pytest
import tvm
from calls import type_of
from tvm import relax, tirx
from tvm.relax.op import grad as backward
from tvm.relax.op.grad import max_pool2d_jvp
from tvm.script import from_source
from tvm_ffi import structural_equal

ATTRS = {
    "pool_size": (3, 2),
    "strides": 2,
    "padding": (0, 1, 2, 0),
    "dilation": (1, 2),
    "ceil_mode": True,
    "layout": "NHWC",
    "out_layout": "NCHW",
}


def tensor(*shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def test_round_trip():
    tangent, data = tensor(2, 7, 6, 3, name="v"), tensor(2, 7, 6, 3)
    bb = relax.BlockBuilder()
    with bb.function("main", [tangent, data]):
        with bb.dataflow():
            out = bb.emit_output(max_pool2d_jvp(tangent, data, **ATTRS))
        bb.emit_func_output(out)
    module = bb.get()
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_type_is_that_of_max_pool2d():
    n, h = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    for shape in ((2, 7, 6, 3), (n, h, 6, 3)):
        data = tensor(*shape)
        forward = type_of(relax.op.nn.max_pool2d(data, **ATTRS))
        assert structural_equal(type_of(max_pool2d_jvp(data, data, **ATTRS)), forward)
    half = tensor(2, 7, 6, 3, dtype="float16")
    static = tensor(2, 7, 6, 3)
    expected = relax.TensorType(type_of(relax.op.nn.max_pool2d(static, **ATTRS)).shape, "float16")
    assert structural_equal(type_of(max_pool2d_jvp(half, static, **ATTRS)), expected)


def test_type_of_an_unknown_shape():
    unknown = relax.Var("x", relax.TensorType(dtype="float32", ndim=4))
    result = type_of(max_pool2d_jvp(unknown, unknown, 2))
    assert (result.ndim, result.shape) == (4, None)


X = tensor(1, 2, 6, 6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: max_pool2d_jvp(tensor(1, 2, 6, 5), X, 2), ValueError, "data_tangent must have"),
        (lambda: max_pool2d_jvp(tensor(2, 6, 6), X, 2), ValueError, "data_tangent must have"),
        (lambda: max_pool2d_jvp(X, tensor(2, 6, 6), 2), ValueError, "do not fit relax.nn.max_poo"),
        (
            lambda: max_pool2d_jvp(relax.ShapeExpr([1, 2, 6, 6]), X, 2),
            TypeError,
            "data_tangent must be a tensor",
        ),
        (
            lambda: max_pool2d_jvp(X, relax.ShapeExpr([1, 2, 6, 6]), 2),
            TypeError,
            "data must be a tensor",
        ),
        (
            lambda: max_pool2d_jvp(tensor(1, 2, 6, 6, 4), tensor(1, 2, 6, 6, 4), layout="NCHW4h"),
            ValueError,
            "layout must have the axes 'NCHW'",
        ),
        (
            lambda: max_pool2d_jvp(X, X, out_layout="NCHW2w"),
            ValueError,
            "out_layout must have the axes",
        ),
        (lambda: max_pool2d_jvp(X, X, 2, strides=0), ValueError, "strides must be positive"),
        (lambda: max_pool2d_jvp(X, X, (2, 0)), ValueError, "pool_size must be positive"),
        (lambda: max_pool2d_jvp(X, X, 2, dilation=-1), ValueError, "dilation must be positive"),
    ],
)
def test_refuses(make, error, message):
    with pytest.raises(error, match=message) as caught:
        type_of(make())
    assert "relax.grad.max_pool2d_jvp" in str(caught.value)


# Every operator for its numbers of spatial axes.

SPATIAL = {1: (7,), 2: (7, 6), 3: (7, 6, 4)}
POOL = {"pool_size": 3, "strides": 2, "padding": 1, "dilation": 1, "ceil_mode": True}
WINDOWS = {1: (4,), 2: (4, 4), 3: (4, 4, 3)}
OPERATORS = [
    *((f"{kind}_pool{rank}d_backward", rank, POOL) for kind in ("max", "avg") for rank in (1, 3)),
    *((f"max_pool{rank}d_jvp", rank, POOL) for rank in (1, 3)),
    *((f"adaptive_avg_pool{rank}d_backward", rank, {"output_size": 4}) for rank in (1, 2, 3)),
]


def arguments(name, rank, batch=2):
    """Return the two arguments of an operator; the data have channels last."""
    data = tensor(batch, *SPATIAL[rank], 3)
    windows = (4,) * rank if name.startswith("adaptive") else WINDOWS[rank]
    first = tensor(batch, 3, *windows, name="g") if name.endswith("backward") else data
    return first, data


def layouts(rank):
    spatial = "DHW"[-rank:]
    return {"layout": f"N{spatial}C", "out_layout": f"NC{spatial}"}


@pytest.mark.parametrize("batch", ["static", "symbolic"])
@pytest.mark.parametrize(("name", "rank", "attrs"), OPERATORS)
def test_round_trips(name, rank, attrs, batch):
    first, data = arguments(name, rank, 2 if batch == "static" else tirx.Var("n", "int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [first, data] if first is not data else [data]):
        with bb.dataflow():
            call = getattr(backward, name)(first, data, **attrs, **layouts(rank))
            out = bb.emit_output(call)
        bb.emit_func_output(out)
    module = bb.get()
    assert f"R.grad.{name}(" in module.script()
    assert structural_equal(from_source(module.script()), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(("name", "rank", "attrs"), OPERATORS)
def test_types(name, rank, attrs):
    first, data = arguments(name, rank)
    result = type_of(getattr(backward, name)(first, data, **attrs, **layouts(rank)))
    windows = tensor(2, 3, *WINDOWS[rank])
    assert structural_equal(result, data.ty if name.endswith("backward") else windows.ty)


@pytest.mark.parametrize(("name", "rank", "attrs"), OPERATORS)
def test_types_of_split_channels(name, rank, attrs):
    """If 4 does not divide the number of channels, they are padded."""
    spatial = "DHW"[-rank:]
    windows = (4,) * rank if name.startswith("adaptive") else WINDOWS[rank]
    data, grad = tensor(2, *SPATIAL[rank], 3, 2), tensor(2, 2, *windows, 4, name="g")
    named = {"layout": f"N{spatial}C2c", "out_layout": f"NC{spatial}4c"}
    backward_of = name.endswith("backward")
    result = type_of(getattr(backward, name)(grad if backward_of else data, data, **attrs, **named))
    assert structural_equal(result, data.ty if backward_of else grad.ty)


@pytest.mark.parametrize(("name", "rank", "attrs"), OPERATORS)
def test_errors(name, rank, attrs):
    first, data = arguments(name, rank)
    builder = getattr(backward, name)
    wrong = tensor(*(int(extent) for extent in first.ty.shape.values[:-1]), 9)
    argument = "output_grad" if name.endswith("backward") else "data_tangent"
    with pytest.raises(ValueError, match=f"relax.grad.{name}: {argument} must have the shape"):
        type_of(builder(wrong, data, **attrs, **layouts(rank)))
    with pytest.raises(TypeError, match=f"relax.grad.{name}: data must be a tensor"):
        type_of(builder(first, relax.ShapeExpr([2]), **attrs, **layouts(rank)))
    split = {"layout": f"NC{'DHW'[-rank:]}4w", "out_layout": layouts(rank)["out_layout"]}
    with pytest.raises(ValueError, match=f"relax.grad.{name}: layout must have the axes"):
        type_of(builder(first, data, **attrs, **split))
    with pytest.raises(ValueError, match=f"relax.grad.{name}: .* requires the input to be"):
        type_of(builder(first, data, **attrs, layout=f"NC{'DHW'[-rank:]}4c"))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_defaults_are_those_of_the_forward_operator(rank):
    data = tensor(2, 3, *SPATIAL[rank])
    for kind in ("max", "avg") if rank != 2 else ():
        forward = getattr(relax.op.nn, f"{kind}_pool{rank}d")(data)
        defaults = getattr(backward, f"{kind}_pool{rank}d_backward")(data, data).attrs
        assert structural_equal(defaults, forward.attrs)
    forward = getattr(relax.op.nn, f"adaptive_avg_pool{rank}d")(data)
    defaults = getattr(backward, f"adaptive_avg_pool{rank}d_backward")(data, data).attrs
    assert structural_equal(defaults, forward.attrs)
