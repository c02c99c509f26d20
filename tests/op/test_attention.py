"""The attention weights operator and the gradient of attention: type inference, TVMScript and
JSON."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.op.grad import attention_backward, attention_weights
from tvm.script import from_source
from tvm_ffi import structural_equal

N = tirx.Var("n", "int64")


def tensor(*shape, dtype="float16"):
    return relax.Var("x", relax.TensorType(list(shape), dtype))


SCORES, STARTS = tensor(N, 2, 3, 4), tensor(5, dtype="int32")


@pytest.mark.parametrize("seqstarts", [[], [STARTS, tensor(5, dtype="int64")]])
@pytest.mark.parametrize(
    "attrs", [{}, {"causal_mask": "TopLeft"}, {"causal_mask": "BottomRight", "window_size": 3}]
)
def test_round_trip(attrs, seqstarts):
    bb = relax.BlockBuilder()
    with bb.function("main", [SCORES, *seqstarts]):
        bb.emit_func_output(bb.emit(attention_weights(SCORES, *seqstarts, **attrs)))
    module = bb.get()
    assert structural_equal(module["main"].ret_ty, SCORES.ty)
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(
    ("arguments", "attrs", "match"),
    [
        ([tensor(2, 3)], {}, r"scores must have the 4 dimensions \(batch, heads, queries, keys\)"),
        ([SCORES], {"causal_mask": "topleft"}, "causal_mask must be 'TopLeft' or 'BottomRight'"),
        (
            [SCORES],
            {"scale": 0.5},
            "scale must not be given, as the scores are scaled already, but it is 0.5",
        ),
        ([SCORES, STARTS], {}, "must be given together"),
        ([SCORES, STARTS, tensor(5)], {}, "seqstart_k must be a vector of integers"),
        ([SCORES, tensor(5, 1, dtype="int32"), STARTS], {}, "seqstart_q must be a vector"),
        ([SCORES, STARTS, tensor(4, dtype="int32")], {}, "as many sequences of queries as of keys"),
    ],
)
def test_mismatched_arguments_are_refused(arguments, attrs, match):
    with pytest.raises(ValueError, match=rf"relax\.grad\.attention_weights: .*{match}"):
        relax.BlockBuilder().normalize(attention_weights(*arguments, **attrs))


RESULT, Q, K, V = (
    tensor(N, *shape, dtype="float32") for shape in [(3, 4, 6), (3, 4, 5), (7, 2, 5), (7, 2, 6)]
)


@pytest.mark.parametrize("bias", [[], [tensor(1, 1, 3, 7, dtype="float32")]])
@pytest.mark.parametrize("attrs", [{}, {"causal_mask": "TopLeft", "window_size": 3, "scale": 0.5}])
def test_round_trip_of_the_gradient(attrs, bias):
    operands = [RESULT, RESULT, Q, K, V, *bias]
    names = ("grad", "output", "q", "k", "v", "bias")
    params = [relax.Var(name, operand.ty) for name, operand in zip(names, operands, strict=False)]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        bb.emit_func_output(bb.emit(attention_backward(*params, **attrs)))
    module = bb.get()
    assert structural_equal(module["main"].ret_ty, relax.TupleType([Q.ty, K.ty, V.ty]))
    assert structural_equal(from_source(module.script(show_meta=True)), module)
    assert structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([tensor(2, 3), RESULT, Q, K, V], "output_grad must have 4 dimensions"),
        ([Q, RESULT, Q, K, V], "output_grad must have the shape of the result"),
        ([RESULT, Q, Q, K, V], "output must have the shape of the result"),
    ],
)
def test_mismatched_arguments_of_the_gradient_are_refused(arguments, match):
    with pytest.raises(ValueError, match=rf"relax\.grad\.attention_backward: {match}"):
        relax.BlockBuilder().normalize(attention_backward(*arguments))
