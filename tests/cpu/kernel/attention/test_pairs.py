"""Attention by pairs of bfloat16 against PyTorch in float64, on processors that multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from attentions import (
    DROPPED,
    HEADS_FIRST,
    MASKS,
    TURNED,
    drawn,
    factors_of,
    in_orders,
    reference,
    scores_of,
    sized,
    with_generator,
)
from hypothesis import given
from machines import HALVES, PAIRS, at, compile_kernels, largest_error, of_halves
from sweep import at_length, batches, share

from relax_grad.cpu.kernel.attention.backward import attention_backward
from relax_grad.cpu.kernel.attention.forward import attention
from relax_grad.cpu.kernel.language.halves import stored_as
from relax_grad.cpu.target import CPU

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")

pytestmark = pytest.mark.usefixtures("halves")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TARGET = tvm.target.Target(PAIRS["avx512bf16"])
RNG = np.random.default_rng(0)


@pytest.fixture(params=HALVES)
def halves(request, monkeypatch):
    """Compile for a target that multiplies pairs, or tiles."""
    monkeypatch.setitem(globals(), "TARGET", of_halves(request.param))


#: Sizes, symbolic extents, axes of the bias, attributes, tensors with the heads first, and those
#: with the features before the positions.
CASES = [
    ((1, 131, 70, 2, 1, 5, 7), (), None, MASKS[1]),
    ((1, 71, 270, 2, 2, 18, 33), ("keys",), None, MASKS[3]),
    ((2, 9, 21, 4, 2, 16, 16), ("batch",), (2, 3), {}),
    ((1, 3, 9, 1, 1, 3, 1), (), None, MASKS[2]),  # a panel of one vector
    DROPPED[1],
    HEADS_FIRST[2],
    TURNED[1],
    TURNED[3],
]

#: Others, for the long sweeps.
MORE_CASES = [
    *(((1, 71, 270, 2, 2, 18, 33), (), None, attrs) for attrs in MASKS),
    ((1, 133, 133, 2, 1, 64, 64), ("queries", "keys"), (0, 1, 2, 3), MASKS[1]),
    ((1, 64, 384, 1, 1, 128, 96), (), (3,), {}),
    *DROPPED[::2],
    *HEADS_FIRST[:2],
    *TURNED,
]


def product_of(cpu: CPU) -> str:
    """Return the name of the function that adds products of pairs, or of tiles."""
    return "relax_grad_tiles_add" if cpu.tiles else "add_pairs"


def drawn_arrays(shapes: Sequence, names: dict) -> list[np.ndarray]:
    """Return random numbers of bfloat16; an array of the last shape, of saved numbers, is left
    out."""
    return [RNG.normal(size=at(shape, names)).astype(BFLOAT16) for shape in shapes[:-1]]


def wide(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(array).astype("float64") for array in arrays]


def dtypes_of(arrays: Sequence[np.ndarray], results: int) -> list[str]:
    return [*(array.dtype.name for array in arrays), *["float32"] * results]


def forward_of(case: tuple, **properties) -> tuple:
    """Return the kernel of a case that saves numbers for the gradient, its sizes, its arrays before
    they are turned, and those that it takes."""
    sizes, symbolic, bias, attrs, *orders = case
    of, shapes, names = sized(sizes, symbolic, bias, **attrs)
    numbers, turned = map(set, [*orders, (), ()][:2])
    numbers, turned = numbers & {0, 1, 2}, turned & {1}
    *inputs, result = drawn_arrays(shapes, names)
    taken = with_generator(of, in_orders(inputs, numbers, turned))
    cpu = replace(CPU.of(TARGET), **properties)
    function = stored_as(
        dtypes_of(taken, 2),
        2,
        lambda: attention(
            of,
            shapes[:-1],
            cpu,
            saves_sums=True,
            exchanged=sorted(numbers),
            turned=sorted(turned),
        ),
    )
    return function, of, inputs, taken, [result.shape, at(shapes[-1], names)]


def backward_of(case: tuple, takes_sums: bool, **properties) -> tuple:
    """Return the kernel of the gradient of a case, the arrays that it takes, and the wanted
    gradients."""
    sizes, symbolic, bias, attrs, *orders = case
    of, shapes, names = sized(sizes, symbolic, bias, **attrs)
    numbers, turned = map(set, [*orders, (), ()][:2])
    *inputs, grad = drawn_arrays(shapes, names)
    leaves = [torch.from_numpy(array).requires_grad_() for array in wide(inputs)]
    result, sums = reference(of, *leaves)
    (torch_grad,) = map(torch.from_numpy, wide([grad]))
    wanted = [g.numpy() for g in torch.autograd.grad(result, leaves[:3], torch_grad)]
    keys = {3} if 1 in turned else set()
    operands = {2, 3, 4} - keys if numbers else set()
    result, sums = (tensor.detach().numpy().astype("float32") for tensor in (result, sums))
    taken = with_generator(of, in_orders([grad, result, *inputs], operands, keys), 5)
    taken += [sums] if takes_sums else []
    wanted = in_orders(wanted, (), {1} if 6 in turned else ())
    cpu = replace(CPU.of(TARGET), **properties)
    function = stored_as(
        dtypes_of(taken, 3),
        3,
        lambda: attention_backward(
            of,
            [shapes[-2], shapes[-2], *shapes[:-2]],
            cpu,
            takes_sums=takes_sums,
            exchanged=sorted(operands),
            turned=[*keys, *([len(taken) + 1] if 6 in turned else [])],
        ),
    )
    return function, taken, wanted


def run(functions: Sequence, arguments: Sequence, shapes: Sequence) -> list[list[np.ndarray]]:
    """Return the results of kernels, compiled together; numbers that they do not write are NaN."""
    library = compile_kernels({f"f{i}": function for i, function in enumerate(functions)}, TARGET)
    results = []
    for i, (arrays, extents) in enumerate(zip(arguments, shapes, strict=True)):
        assert product_of(CPU.of(TARGET)) in functions[i].script()
        outputs = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in extents]
        library[f"f{i}"](*map(tvm.runtime.tensor, arrays), *outputs)
        results.append([output.numpy() for output in outputs])
    return results


def check_forward(cases: Sequence[tuple]) -> None:
    """Compare results, and the saved numbers, in which no product of weights is."""
    made = list(map(forward_of, cases))
    results = run([m[0] for m in made], [m[3] for m in made], [m[4] for m in made])
    for case, (_, of, inputs, *_), (result, saved) in zip(cases, made, results, strict=True):
        tensors = list(map(torch.from_numpy, wide(inputs)))
        expected, expected_saved = (tensor.numpy() for tensor in reference(of, *tensors))
        if of.has_few_keys:
            # Weights of masked keys may be unwritten.
            saved = np.where(np.isnan(saved) & (expected_saved == 0), np.float32(0), saved)
        is_finite = np.isfinite(expected_saved)
        assert np.array_equal(np.isfinite(saved), is_finite), case
        assert largest_error(saved[is_finite], expected_saved[is_finite]) < 2e-6, case
        excess = np.abs(result - expected) - rounding_of_weights(of, *tensors)
        assert excess.max() < 2e-6 * max(1, np.abs(expected).max()), case


def rounding_of_weights(of, query, key, value, bias=None) -> np.ndarray:
    """Return the largest errors of results whose weights are rounded to bfloat16 before their
    division by the sum: the largest weight of each query, 1, is exact if it is not multiplied by a
    factor of dropout."""
    scores = scores_of(of, query, key, bias)
    weights = torch.nan_to_num(scores.softmax(-1))
    if of.rate is not None:
        weights = weights * factors_of(of, weights.shape)
    else:
        weights = weights.masked_fill(scores == scores.amax(-1, keepdim=True), 0)
    value = value.abs().repeat_interleave(of.heads // of.key_heads, 2)
    return 2**-8 * torch.einsum("bhqk,bkhf->bqhf", weights, value).numpy()


def check_backward(cases: Sequence[tuple]) -> None:
    made = [backward_of(case, i % 2 == 0) for i, case in enumerate(cases)]
    shapes = [[grad.shape for grad in wanted] for *_, wanted in made]
    results = run([m[0] for m in made], [m[1] for m in made], shapes)
    for case, got, (*_, wanted) in zip(cases, results, made, strict=True):
        for name, own, expected in zip("qkv", got, wanted, strict=True):
            assert largest_error(own, expected) < 8e-3, (case, name)


def test_forward():
    check_forward(CASES)


def test_backward():
    check_backward(CASES)


@pytest.mark.slow
def test_more_cases():
    cases = share(MORE_CASES)
    check_forward(cases)
    check_backward(cases)


@pytest.mark.slow
@at_length(20)
@given(cases=batches(drawn()))
def test_any_size(cases):
    check_forward(cases)
    check_backward(cases)


def test_results_do_not_depend_on_the_threads():
    """The gradients of keys are summed in order: there are fewer blocks of queries than threads, so
    that these have no sums of their own."""
    case = ((1, 133, 290, 4, 2, 18, 33), (), None, MASKS[1])
    state = RNG.bit_generator.state
    made = []
    for cores in (1, 16):
        RNG.bit_generator.state = state  # the same numbers
        function, _, _, taken, shapes = forward_of(case, cores=cores)
        gradient, operands, wanted = backward_of(case, True, cores=cores)
        made += [(function, taken, shapes), (gradient, operands, [w.shape for w in wanted])]
    results = run(*map(list, zip(*made, strict=True)))
    for own in (results[::2], results[1::2]):
        assert len({b"".join(array.tobytes() for array in arrays) for arrays in own}) == 1


def test_numbers_that_are_not_finite_stay_in_their_row():
    _, of, inputs, taken, shapes = forward_of(((1, 5, 9, 1, 1, 4, 3), (), None, {}))
    function = forward_of(((1, 5, 9, 1, 1, 4, 3), (), None, {}))[0]
    taken[0][0, 1] = np.nan
    ((result, _),) = run([function], [taken], [shapes])
    expected, _ = reference(of, *map(torch.from_numpy, wide(inputs)))
    others = [0, 2, 3, 4]
    assert np.isnan(result[0, 1]).all()
    assert largest_error(result[:, others], expected.numpy()[:, others]) < 4e-3


@pytest.mark.parametrize("causal_mask", [None, "TopLeft"])
def test_errors_are_no_larger_than_those_of_pytorch(causal_mask):
    lengths = [(64, 17), (40, 128), (128, 200), (30, 290)]
    heads, features, rng = 4, 64, np.random.default_rng(0)
    functions, drawn_tensors = {}, []
    cpu = CPU.of(TARGET)
    for i, (queries, keys) in enumerate(lengths):
        attrs = {"causal_mask": causal_mask}
        sizes = (2, queries, keys, heads, heads, features, features)
        of, (query, key, value, result, _), _ = sized(sizes, (), None, **attrs)
        shapes = [query, key, value, result]
        functions[f"forward{i}"] = stored_as(
            ["bfloat16"] * 4 + ["float32"],
            2,
            lambda of=of, shapes=shapes: attention(of, shapes, cpu, saves_sums=True),
        )
        functions[f"backward{i}"] = stored_as(
            ["bfloat16"] * 5 + ["float32"] + ["bfloat16"] * 3,
            3,
            lambda of=of, shapes=[result, result, *shapes[:3]]: attention_backward(
                of, shapes, cpu, takes_sums=True
            ),
        )
        drawn_tensors.append((of, [rng.normal(size=s).astype(BFLOAT16) for s in shapes]))
    library = compile_kernels(functions, TARGET)
    for i, (of, (*inputs, grad)) in enumerate(drawn_tensors):
        own = _run_both(library, i, of, inputs, grad)
        exact = _in_torch(causal_mask, inputs, grad, torch.float64)
        theirs = _in_torch(causal_mask, inputs, grad, torch.bfloat16)
        for name, ours, other, wanted in zip("oqkv", own, theirs, exact, strict=True):
            mine, reached = (
                float(((tensor.double() - wanted) ** 2).mean().sqrt()) for tensor in (ours, other)
            )
            assert mine < 1.04 * reached, (lengths[i], name, mine, reached)


def _run_both(library, i: int, of, inputs: Sequence[np.ndarray], grad: np.ndarray) -> list:
    """Return the result and the gradients of kernels as tensors of PyTorch."""

    def empty(shape, dtype):
        return tvm.runtime.empty([int(n) for n in shape], dtype)

    operands = list(map(tvm.runtime.tensor, inputs))
    result, saved = empty(grad.shape, "bfloat16"), empty(of.saved, "float32")
    grads = [empty(array.shape, "bfloat16") for array in inputs]
    library[f"forward{i}"](*operands, result, saved)
    library[f"backward{i}"](tvm.runtime.tensor(grad), result, *operands, saved, *grads)
    return [torch.from_numpy(tensor.numpy().astype("float64")) for tensor in (result, *grads)]


def _in_torch(causal_mask, inputs: Sequence[np.ndarray], grad: np.ndarray, dtype) -> list:
    """Return the result and the gradients of PyTorch's attention in a dtype."""
    leaves = [torch.from_numpy(array).to(dtype).requires_grad_() for array in wide(inputs)]
    result = torch.nn.functional.scaled_dot_product_attention(
        *(leaf.transpose(1, 2) for leaf in leaves), is_causal=causal_mask is not None
    ).transpose(1, 2)
    (output_grad,) = map(torch.from_numpy, wide([grad]))
    return [result.detach(), *torch.autograd.grad(result, leaves, output_grad.to(dtype))]


def test_only_operands_of_bfloat16_are_pairs():
    of, shapes, _ = sized((1, 9, 9, 1, 1, 4, 4), (), None)
    cpu = CPU.of(TARGET)

    def script(dtypes: Sequence[str], cpu: CPU = cpu) -> str:
        return stored_as([*dtypes, "float32"], 1, lambda: attention(of, shapes[:-1], cpu)).script()

    name = product_of(cpu)
    assert name in script(["bfloat16"] * 3)
    assert name not in script(["bfloat16"] * 3, replace(cpu, bfloat16=False, tiles=False))
    assert name not in script(["float16"] * 3)
    assert "add_pairs" not in script(["bfloat16", "bfloat16", "float32"])
