"""The passes of distributed training, as IR."""

from __future__ import annotations

import math

import pytest
from training_models import module_of
from tvm import relax, tirx
from tvm.relax import op

from relax_grad import GradientError
from relax_grad.distributed.transform import DataParallel
from relax_grad.distributed.transform.buckets import reduced_by, reductions
from relax_grad.ir.bindings import bindings_of
from relax_grad.ir.compat import dtype_of


def layers(dtypes=("float32",) * 4, width=8):
    """Return the module of a loss of several layers of ``width ** 2`` parameters."""
    x = relax.Var("x", relax.TensorType((4, width), "float32"))
    weights = [
        relax.Var(f"w{i}", relax.TensorType((width, width), dtype))
        for i, dtype in enumerate(dtypes)
    ]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *weights]):
        y = x
        for weight in weights:
            y = bb.emit(op.matmul(y, bb.emit(op.astype(weight, "float32"))))
        bb.emit_func_output(bb.emit(op.mean(y)))
    return bb.get(), [weight.name for weight in weights]


def sizes(function):
    """Return the kind and the number of elements of each reduction."""
    return [
        (
            str(call.attrs.op_type),
            sum(math.prod(map(int, param.ty.shape.values)) for param in reduced_by(call)),
        )
        for call in reductions(function)
    ]


def test_the_result_is_that_of_gradient_and_the_own_loss():
    module, names = layers()
    function = DataParallel("loss", names, batch="x")(module)["loss_adjoint"]
    assert [param.name for param in function.params] == ["x", *names]
    result, gradients, own = function.ret_ty.fields
    assert result.ndim == own.ndim == 0
    assert len(gradients.fields) == 4


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [(2**20, [256, 1]), (64 * 4 * 2, [128, 128, 1]), (1, [64, 64, 64, 64, 1])],
)
def test_buckets(limit, wanted):
    """Gradients are joined up to the limit; the last reduction is that of the loss."""
    module, names = layers()
    function = DataParallel("loss", names, bucket_bytes=limit)(module)["loss_adjoint"]
    assert sizes(function) == [("avg", count) for count in wanted]


def test_buckets_are_reduced_as_soon_as_they_are_ready():
    """The gradient of the last layer is the first; its collective comes before that of the first
    layer's product."""
    module, names = layers()
    function = DataParallel("loss", names, bucket_bytes=1)(module)["loss_adjoint"]
    values = [binding.value for binding in bindings_of(function.body)]
    kinds = [value.op.name for value in values if isinstance(value, relax.Call)]
    first = kinds.index("relax.ccl.allreduce")
    assert "relax.matmul" in kinds[first:]
    assert kinds.count("relax.ccl.allreduce") == 5


def test_buckets_have_one_dtype():
    module, names = layers(("float32", "float16", "float32", "float16"))
    function = DataParallel("loss", names)(module)["loss_adjoint"]
    assert sorted(dtype_of(reduced_by(call)[0].ty) for call in reductions(function)[:2]) == [
        "float16",
        "float32",
    ]
    assert sizes(function)[:2] == [("avg", 128), ("avg", 128)]


def test_a_symbolic_batch_has_a_weight():
    """One more reduction: that of the numbers of examples."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    w = relax.Var("w", relax.TensorType((3,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, w]):
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.matmul(x, w)))))
    module = bb.get()
    assert sizes(DataParallel("loss", "w", batch="x")(module)["loss_adjoint"]) == [
        ("sum", 2),
        ("avg", 3),
        ("avg", 1),
    ]
    assert sizes(DataParallel("loss", "w")(module)["loss_adjoint"]) == [("avg", 3), ("avg", 1)]


def test_batch_normalisation_reduces_statistics_and_their_gradients():
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), "float32"))
    vectors = [relax.Var(name, relax.TensorType((4,), "float32")) for name in "gbmv"]
    bb = relax.BlockBuilder()
    with bb.function("loss", [x, *vectors]):
        whole = bb.emit(op.nn.batch_norm(x, *vectors, axis=1))
        y = bb.emit(relax.TupleGetItem(whole, 0))
        bb.emit_func_output(bb.emit(op.mean(bb.emit(op.multiply(y, y)))))
    module = bb.get()
    with_x = DataParallel("loss", ["g", "b"], batch="x")(module)["loss_adjoint"]
    assert [size for size in sizes(with_x) if size == ("avg", 4)] == [("avg", 4)] * 2
    local = DataParallel("loss", ["g", "b"], batch="x", batch_norm="local")(module)["loss_adjoint"]
    assert [size for size in sizes(local) if size == ("avg", 4)] == []


def test_errors():
    module, names = layers()
    with pytest.raises(ValueError, match="batch: loss has no parameter 'z'; it has x, w0"):
        DataParallel("loss", names, batch="z")(module)
    with pytest.raises(ValueError, match="seed: x must be an int64 tensor"):
        DataParallel("loss", names, seed="x")(module)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', but it is 'avg'"):
        DataParallel("loss", reduction="avg")
    with pytest.raises(ValueError, match="bucket_bytes must be a positive number"):
        DataParallel("loss", bucket_bytes=0)
    with pytest.raises(ValueError, match="the module has no function 'main'"):
        DataParallel("main")(module)
    with pytest.raises(GradientError):
        DataParallel("loss", ["w"], target_index=1)(module_of(states=True))
