"""Random numbers as Relax expressions: exact bits, distributions, independence, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from philox_numbers import U64, encrypted, expected_bits
from sweep import TARGET
from tvm import relax, tirx

import relax_grad
from relax_grad.frontend import random


def build(function, *params, name="main"):
    """Return a module with a function of the seed and other parameters."""
    bb = relax.BlockBuilder()
    seed = relax.Var("seed", relax.TensorType((), "int64"))
    with bb.function(name, [seed, *params]):
        with bb.dataflow():
            result = bb.emit_output(function(bb, seed, *params))
        bb.emit_func_output(result)
    return bb.get()


def compiled(module, pipeline="relax_grad", name="main"):
    target = relax_grad.target.host() if pipeline == "relax_grad" else TARGET
    machine = relax.VirtualMachine(tvm.compile(module, target, relax_pipeline=pipeline), tvm.cpu())

    def run(seed, *operands):
        inputs = [np.array(seed, "int64"), *operands]
        return arrays(machine[name](*map(tvm.runtime.tensor, inputs)))

    return run


def arrays(value):
    return (
        value.numpy() if isinstance(value, tvm.runtime.Tensor) else [arrays(item) for item in value]
    )


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_has_the_known_answers_of_random123(counter, key, words):
    assert tuple(encrypted(counter, key)) == words


@pytest.fixture(scope="module", params=["default", "relax_grad"])
def draw(request):
    """Draws in several shapes, with a symbolic one, and among operators that may be fused with
    them."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 5), "float32"))

    def function(bb, seed, x):
        shape = list(x.ty.shape.values)
        stream = bb.emit(relax.op.add(relax.const(1, "int64"), relax.const(2, "int64")))
        mask = random.bernoulli(bb, seed, 3, shape, 0.25)
        return relax.Tuple(
            [
                random.bits(bb, seed, 3, (2, 32)),
                random.bits(bb, seed, stream, (7, 11)),
                random.bits(bb, seed, 3, shape),
                random.bits(bb, seed, -3, (1,)),
                random.bits(bb, seed, 2**40, (4,)),
                random.bits(bb, seed, 3, (), "uint64"),
                random.uniform(bb, seed, 3, shape),
                random.uniform(bb, seed, 3, (40,), "float64"),
                bb.emit(relax.op.where(mask, x, relax.op.negative(x))),
                random.bits(bb, seed, 3, (0, 3)),
                random.bits(bb, seed, 3, (n, 64)),
            ]
        )

    return compiled(build(function, x), request.param)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32 + 5, -(2**63), 2**63 - 1])
def test_bits_are_those_of_philox(draw, seed):
    for rows in (3, 13):
        x = np.arange(1, rows * 5 + 1, dtype="float32").reshape(rows, 5)
        outputs = draw(seed, x)
        for i, count, stream in ((0, 64, 3), (1, 77, 3), (2, rows * 5, 3), (10, rows * 64, 3)):
            np.testing.assert_array_equal(outputs[i].ravel(), expected_bits(count, seed, stream))
        for i, count, stream in ((3, 1, -3), (4, 4, 2**40)):
            np.testing.assert_array_equal(outputs[i].ravel(), expected_bits(count, seed, stream))
        words = expected_bits(rows * 5, seed, 3)
        np.testing.assert_array_equal(outputs[6].ravel(), (words >> 8) * np.float32(2.0**-24))
        kept = words < 2**30
        np.testing.assert_array_equal(outputs[8], np.where(kept.reshape(rows, 5), x, -x))
        low, high = (expected_bits(64, seed, 3)[i].astype(U64) for i in (0, 16))
        assert outputs[5] == low | (high << U64(32))
        assert outputs[9].shape == (0, 3)
        assert (outputs[7] < 1).all()


def test_longer_tensors_begin_with_the_same_numbers():
    function = compiled(
        build(
            lambda bb, seed: relax.Tuple(
                [random.normal(bb, seed, 0, (n,), dtype) for dtype in FLOATS for n in (70, 200)]
            )
        )
    )
    results = function(5)
    for short, long in zip(results[::2], results[1::2], strict=True):
        np.testing.assert_array_equal(short, long[:70])


FLOATS = ("float64", "float32", "float16", "bfloat16")
N = 2**17


@pytest.fixture(scope="module")
def distributions():
    """Many numbers of each distribution."""

    def function(bb, seed):
        numbers = [
            draw(bb, seed, stream, (N,), dtype)
            for dtype in FLOATS
            for stream, draw in enumerate((random.uniform, random.normal, random.exponential))
        ]
        numbers.append(random.randint(bb, seed, 3, -5, 2, (N,)))
        numbers.append(random.randint(bb, seed, 4, -(2**62), 2**62, (N,)))
        numbers.append(random.uniform(bb, seed, 5, (N,), "float32", -2.0, 3.0))
        numbers.append(random.exponential(bb, seed, 6, (N,), "float32", 4.0))
        numbers.append(random.bernoulli(bb, seed, 7, (N,), relax.const([0.3], "float32")))
        numbers.append(random.bernoulli(bb, seed, 8, (N,), 0.0))
        numbers.append(random.bernoulli(bb, seed, 8, (N,), 1.0))
        return relax.Tuple([bb.emit(relax.op.astype(tensor, "float64")) for tensor in numbers])

    return compiled(build(function))(11)


def kolmogorov_smirnov(sample, distribution):
    """The statistic times the root of the size: above 1.95 with a probability of 0.001."""
    sample = np.sort(sample)
    steps = np.arange(len(sample) + 1) / len(sample)
    at = distribution(sample)
    return math.sqrt(len(sample)) * max((steps[1:] - at).max(), (at - steps[:-1]).max())


def normal_distribution(x):
    return np.array([math.erfc(-point / math.sqrt(2)) / 2 for point in x])


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_have_their_distributions(distributions, dtype):
    """Sampling errors are bounded by 4 standard deviations."""
    start = 3 * FLOATS.index(dtype)
    uniform, normal, exponential = distributions[start : start + 3]
    error = 4 / math.sqrt(N)
    digits = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() + 2.0 ** -(digits + 1) - 0.5) < error / math.sqrt(12)
    assert abs(uniform.var() - 1 / 12) < error / math.sqrt(180)
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < 2 * error
    assert abs((normal**4).mean() - 3) < error * math.sqrt(96)
    assert abs(exponential.mean() - 1) < error
    assert exponential.min() > 0
    assert np.isfinite(exponential).all()
    if digits >= 24:
        assert kolmogorov_smirnov(uniform, lambda x: x) < 1.95
        assert kolmogorov_smirnov(normal, normal_distribution) < 1.95
        assert kolmogorov_smirnov(exponential, lambda x: -np.expm1(-x)) < 1.95
        halves = np.array_split(normal[: N // 64 * 64].reshape(-1, 2, 32), 2, axis=1)
        assert abs(np.corrcoef(halves[0].ravel(), halves[1].ravel())[0, 1]) < error * math.sqrt(2)


def test_integers_bounds_and_probabilities(distributions):
    integers, long, uniform, exponential, kept, never, always = distributions[12:]
    counts = np.bincount((integers + 5).astype(int), minlength=7)
    assert len(counts) == 7
    assert ((counts - N / 7) ** 2 / (N / 7)).sum() < 22.5  # chi-square of 6 degrees: 0.001
    assert -(2**62) <= long.min() < -0.99 * 2**62
    assert 0.99 * 2**62 < long.max() < 2**62
    assert -2 <= uniform.min() < -1.99
    assert 2.99 < uniform.max() <= 3
    assert abs(exponential.mean() - 0.25) < 1 / math.sqrt(N)
    assert abs(kept.mean() - 0.3) < 4 * math.sqrt(0.21 / N)
    assert not never.any()
    assert always.all()


def test_bits_are_balanced_and_independent():
    """Of seeds, streams, and neighbouring positions, every bit by itself and every two words."""
    draw = compiled(
        build(lambda bb, seed: relax.Tuple([random.bits(bb, seed, i, (2**14,)) for i in range(3)]))
    )
    seeds = (0, 1, 2, -1, 2**32, 2**33)
    words = np.stack([word for seed in seeds for word in draw(seed)])
    assert len({word.tobytes() for word in words}) == len(words)
    bits = np.unpackbits(words.view("uint8"), axis=1).reshape(len(words), -1, 32)
    size = bits.shape[1]
    ones = bits.sum(1)
    score = (ones - size / 2) / math.sqrt(size / 4)
    assert abs(score).max() < 4.5  # of 576 bits
    assert (score**2).sum() < 576 + 4 * math.sqrt(2 * 576)
    correlation = np.corrcoef(words / 2.0**32)
    assert abs(correlation - np.eye(len(words))).max() < 4.5 / math.sqrt(size)
    for step in (1, 2, 15, 16, 17, 32, 48, 64):
        for word in words:
            neighbours = np.corrcoef(word[:-step], word[step:])[0, 1]
            assert abs(neighbours) < 4.5 / math.sqrt(size)


def test_dropout_keeps_the_expectation_and_each_element_its_factor():
    x = relax.Var("x", relax.TensorType((64, 1024), "float32"))

    def function(bb, seed, x):
        rates = (0.0, 0.1, 0.5, 1.0)
        masked = [random.dropout(bb, seed, i, x, rate)[0] for i, rate in enumerate(rates)]
        masked.append(random.dropout(bb, seed, 9, x, 0.5, (64, 1))[0])
        return relax.Tuple(masked)

    draw = compiled(build(function, x))
    ones = np.ones((64, 1024), "float32")
    whole, tenth, half, nothing, rows = draw(3, ones)
    assert (whole == 1).all()
    assert (nothing == 0).all()
    assert set(np.unique(tenth)) == {0, np.float32(1 / 0.9)}
    assert set(np.unique(half)) == {0, 2}
    assert abs(tenth.mean() - 1) < 4 * math.sqrt(0.1 / 0.9 / ones.size)
    assert abs(half.mean() - 1) < 4 / 256
    assert ((rows == rows[:, :1]) & np.isin(rows, (0, 2))).all()
    assert 0 < (rows[:, 0] == 0).sum() < 64


def test_the_gradient_has_the_numbers_of_the_value():
    """Dropout, a reparametrised normal, a symbolic shape. Second order and checkpoints draw the
    same numbers."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 33), "float64"))

    def function(bb, seed, x):
        shape = list(x.ty.shape.values)
        square = bb.emit(relax.op.multiply(x, x))
        dropped = random.dropout(bb, seed, 0, square, 0.4)[0]
        noise = random.normal(bb, seed, 1, shape, "float64")
        return bb.emit(relax.op.sum(bb.emit(relax.op.multiply(dropped, noise))))

    module = relax_grad.value_and_grad(build(function, x), "main", wrt=["x"])
    draws = str(module["main_adjoint"]).count("philox")
    assert draws == 2  # nothing is drawn again for the gradient
    run = compiled(module, name="main_adjoint")
    value = np.random.default_rng(0).normal(size=(5, 33))
    for seed in (1, 2):
        loss, (gradient,) = run(seed, value)
        np.testing.assert_allclose((gradient * value).sum() / 2, loss, rtol=1e-12)
        kept = gradient != 0
        assert 0.4 < kept.mean() < 0.8


def test_a_checkpoint_draws_the_same_numbers_again():
    x = relax.Var("x", relax.TensorType((300,), "float64"))

    def function(bb, seed, x):
        def section(x):
            square = bb.emit(relax.op.multiply(x, x))
            return random.dropout(bb, seed, 0, square, 0.5)[0]

        return bb.emit(relax.op.sum(bb.emit(relax_grad.op.checkpoint(section, x))))

    module = relax_grad.value_and_grad(build(function, x), "main", wrt=["x"])
    run = compiled(module, name="main_adjoint")
    value = np.random.default_rng(0).normal(size=300)
    loss, (gradient,) = run(4, value)
    np.testing.assert_allclose((gradient * value).sum() / 2, loss, rtol=1e-12)


def test_gradients_match_differences():
    x = relax.Var("x", relax.TensorType((4, 6), "float64"))

    def function(bb, seed, x):
        noise = random.exponential(bb, seed, 0, (4, 6), "float64")
        gumbel = bb.emit(relax.op.negative(bb.emit(relax.op.log(noise))))
        soft = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.add(x, gumbel)), -1))
        dropped = random.dropout(bb, seed, 1, soft, 0.3)[0]
        return bb.emit(relax.op.sum(bb.emit(relax.op.multiply(dropped, dropped))))

    run = compiled(relax_grad.value_and_grad(build(function, x), "main"), name="main_adjoint")
    rng = np.random.default_rng(0)
    value, direction = rng.normal(size=(2, 4, 6))
    _, (gradient,) = run(3, value)
    (above, _), (below, _) = (run(3, value + step * direction) for step in (1e-5, -1e-5))
    np.testing.assert_allclose((gradient * direction).sum(), (above - below) / 2e-5, rtol=1e-6)


def test_equal_shapes_share_a_function():
    module = build(
        lambda bb, seed: relax.Tuple([random.bits(bb, seed, i, (64 * i,)) for i in (1, 1, 2)])
    )
    functions = [
        function for function in module.functions.values() if isinstance(function, tirx.PrimFunc)
    ]
    assert len(functions) == 2


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda bb, seed: random.bits(bb, seed, 0, (2,), "int32"), "uint32, uint64"),
        (lambda bb, seed: random.uniform(bb, seed, 0, (2,), "int64"), "float64"),
        (lambda bb, seed: random.bernoulli(bb, seed, 0, (2,), 1.5), "between 0 and 1"),
        (lambda bb, seed: random.randint(bb, seed, 0, 3, 3, (2,)), "above low"),
        (lambda bb, seed: random.randint(bb, seed, 0, -1, 2**63, (2,)), "at most 2"),
    ],
)
def test_wrong_arguments_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        build(draw)
