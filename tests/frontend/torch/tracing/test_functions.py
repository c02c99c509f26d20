"""Functions with a gradient of their own (torch.autograd.Function), against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed: extra torch")

import tvm  # noqa: E402
from torch_models import check, close, compiled, set_seeds, tensor_of  # noqa: E402
from tvm import relax  # noqa: E402

import relax_grad  # noqa: E402
from relax_grad.frontend.torch import (  # noqa: E402
    UnsupportedOperatorError,
    from_module,
    wrap,
)

nn, F = torch.nn, torch.nn.functional
Function = torch.autograd.Function
once_differentiable = torch.autograd.function.once_differentiable


@pytest.fixture(autouse=True)
def _seeded():
    set_seeds()


class Of(nn.Module):
    """A loss that is a function of the module and an input, with a dense layer and a vector."""

    def __init__(self, function):
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(4))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def model(function):
    return Of(function).double()


def data(rows=3):
    return torch.randn(rows, 4, dtype=torch.float64)


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reverse(Function):
    """It returns its input, and takes a number, a string and None."""

    @staticmethod
    def forward(ctx, x, factor, name="reverse", *, other=None):
        ctx.factor = factor if name == "reverse" else None
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None, None


class Clamp(Function):
    """The gradient passes where the input is inside, or comes back inside; it is written in
    place."""

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, gradient):
        (x,), (low, high) = ctx.saved_tensors, ctx.bounds
        result = gradient.clone()
        result[(x < low) & (gradient > 0)] = 0
        result.masked_fill_((x > high) & (gradient < 0), 0)
        return result, None, None


class Swish(Function):
    """It has setup_context, and saves its input only."""

    @staticmethod
    def forward(x, beta=1.0):
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.beta = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(ctx.beta * x)
        return gradient * share * (1 + ctx.beta * x * (1 - share)), None


class Product(Function):
    """It has no gradient for the second input, and broadcasts: its gradients are summed to the
    shapes of inputs."""

    @staticmethod
    def forward(ctx, x, mask, y, index):
        ctx.save_for_backward(x, mask, None, y)
        ctx.index = index  # a tensor as an attribute
        return x * mask * y[index]

    @staticmethod
    def backward(ctx, gradient):
        x, mask, none, y = ctx.saved_tensors
        assert none is None
        row = gradient * mask * x if ctx.needs_input_grad[2] else None
        gradient_of_y = torch.zeros_like(y).index_put((ctx.index,), row.sum(0))
        return 3 * gradient * mask * y[ctx.index], None, gradient_of_y.float(), None


class Two(Function):
    """It has two differentiable outputs, one that is not, and saves results of all kinds."""

    @staticmethod
    def forward(ctx, x, y):
        inside, power, number = x > 0, x.exp(), x.sum()
        result = power * y
        ctx.mark_non_differentiable(number)
        ctx.save_for_backward(y, power, inside, result)
        return result, power.sum(), number, inside

    @staticmethod
    def backward(ctx, first, second, third, fourth):
        _, power, inside, result = ctx.saved_tensors
        assert third.shape == ()
        assert fourth.dtype == torch.bool
        gradient = first * result + second * power + third
        return gradient.masked_fill(inside, 3.0), 2 * first * power


class Sparse(Function):
    """Its gradients are not materialized."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        number = x.sum()
        ctx.mark_non_differentiable(number)
        return x.sin(), number

    @staticmethod
    def backward(ctx, gradient, none):
        assert none is None
        return 2 * gradient


class Recomputing(Function):
    """Its backward function differentiates, as those of reversible networks do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        before = x @ weight
        inner = gradient * (1 - before.tanh() ** 2) * Round.apply(7 * gradient)
        return inner @ weight.t(), x.t() @ inner


class Boxed(Function):
    """It takes its gradients in a list, since PyTorch 2.12."""

    boxed_grads_call = hasattr(Function, "boxed_grads_call")

    @staticmethod
    def forward(ctx, x):
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, *gradients):
        first, second = gradients[0] if Boxed.boxed_grads_call else gradients
        return 2 * first - second


class Buffered(Function):
    """It asks for the buffers of gradients and names the dtypes of cotangents, since PyTorch 2.15
    and 2.14."""

    @staticmethod
    def forward(ctx, x):
        if hasattr(ctx, "set_output_grad_dtype"):
            ctx.set_output_grad_dtype(torch.float32, None)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        if hasattr(type(ctx), "set_output_grad_dtype"):
            assert first.dtype == torch.float32
        if hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers"):
            assert len(ctx.input_grad_buffers) == 1
        return first.double() * 3 - second


def newer(m, x):
    first, second = Boxed.apply(m.dense(x))
    first, third = Buffered.apply(first * second)
    return (first * third * m.scale).sum()


class Written(Function):
    """It writes to its cotangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gradient.mul_(x)
        gradient[:, 0] = 0
        return gradient


def several(m, x):
    y = Swish.apply(m.dense(x))
    y = Written.apply(Reverse.apply(Swish.apply(y, 0.5), 0.7))
    first, second, number, inside = Two.apply(y, m.scale.expand_as(y))
    z = Round.apply(3 * first) * inside + second * number
    z = Clamp.apply(z, -1.0, 1.0) * Product.apply(z, (x > 0).double(), m.scale, torch.arange(4))
    half, number = Sparse.apply(z)
    return (half * number * Recomputing.apply(z, m.dense.weight)).sum()


FUNCTIONS = {
    "straight through": lambda m, x: (Round.apply(3 * m.dense(x)) * m.scale).sum(),
    "all of them": several,
    "of newer releases": newer,
    "one input twice": lambda m, x: (
        Two.apply(m.dense(x), m.scale.expand(3, 4))[0].sum() + Two.apply(m.scale, m.scale)[1]
    ),
    "without gradients": lambda m, x: (Round.apply(m.dense(x)).detach() * m.scale).sum(),
    "of an input": lambda m, x: (Round.apply(x) * m.scale).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_backward_function(name):
    check(model(FUNCTIONS[name]), (data(),), forward=False)


class Block(nn.Module):
    """Batch normalisation around functions, with random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x):
        return self.head(Reverse.apply(Swish.apply(self.layers(x)), 0.3))


def test_a_function_between_batch_normalisations():
    labels = torch.tensor([0, 1, 1, 0, 1])
    check(Block().double(), (data(5),), loss=F.cross_entropy, targets=(labels,), steps=2)


class Mean(Function):
    """Its context has an extent; the gradient does not."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x.mean(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.rows, -1) / ctx.rows


def test_a_symbolic_batch():
    def function(m, x):
        y = Two.apply(Swish.apply(m.dense(x)), m.scale.expand_as(x))[0]
        return (Mean.apply(y) * m.scale).sum()

    module = model(function)
    imported = from_module(module, (data(),), dynamic_shapes={"x": {0: "batch"}})
    run = compiled(imported, forward=False)
    for rows in (3, 5):
        x = data(rows)
        wanted = module(x)
        gradients = torch.autograd.grad(wanted, list(module.parameters()))
        values = list(map(tensor_of, imported.values))
        (loss, _, _), grads = run("loss_adjoint", torch.tensor(0), x, *values)
        close("loss", [loss], [wanted])
        close("gradient", grads, gradients)


def test_a_checkpointed_function():
    def function(m, x):
        y = torch.utils.checkpoint.checkpoint(
            lambda a: Two.apply(Swish.apply(m.dense(a)), m.scale.expand_as(a))[0],
            x,
            use_reentrant=False,
        )
        return (y * m.scale).sum()

    check(model(function), (data(),), forward=False)


class Halved(Function):
    """Its context managers are those of mixed precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), 2 * x.t() @ gradient


def test_mixed_precision_of_a_function():
    def function(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = Halved.apply(m.dense(x), m.dense.weight)
            assert y.dtype == torch.float32
            return (m.dense(y).float() * m.scale).sum()

    check(Of(function), (torch.randn(3, 4),), forward=False, tolerance=5e-2)


def test_a_wrapped_module():
    x, original = torch.randn(5, 4), Block()
    module = wrap(original, (x,))
    wanted, results = (
        torch.autograd.grad(network(x).square().sum(), list(original.parameters()))
        for network in (original, module)
    )
    close("gradient", results, wanted)


def gradient_of_gradient(function, x):
    """Return the gradient of a sum of squares of gradients with respect to the input, by TVM and by
    PyTorch."""
    module = model(function)
    imported = from_module(module, (x,))
    first = relax_grad.value_and_grad(imported.module, "loss", wrt=["x"])
    bb = relax.BlockBuilder(first)
    name = first.get_global_var("loss_adjoint")
    params = [relax.Var(param.name, param.ty) for param in first["loss_adjoint"].params]
    with bb.function("penalty", params):
        (gradient,) = (bb.emit(bb.emit(relax.Call(name, params))[1])[0],)
        bb.emit_func_output(bb.emit(relax.op.sum(relax.op.square(gradient))))
    second = relax_grad.value_and_grad(bb.get(), "penalty", wrt=["x"])
    built = tvm.compile(second, relax_grad.target.host(), relax_pipeline="relax_grad")
    machine = relax.VirtualMachine(built, tvm.cpu())
    arguments = [torch.tensor(0), x, *map(tensor_of, imported.values)]
    _, seconds = machine["penalty_adjoint"](*map(tvm.runtime.from_dlpack, arguments))
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(module(x), [x], create_graph=True)
    return tensor_of(seconds[0]), torch.autograd.grad(gradient.square().sum(), [x])[0]


class Cube(Function):
    """It saves its result, through which second derivatives pass."""

    @staticmethod
    def forward(ctx, x):
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        return 3 * gradient * result / x


def test_second_derivatives_are_those_of_the_backward_function():
    def function(m, x):
        y = Swish.apply(m.dense(x)) * Cube.apply(x + 3)
        return (Round.apply(y) * y * m.scale).sum()

    second, wanted = gradient_of_gradient(function, data())
    close("second derivative", [second], [wanted])


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: Two.apply(x, m.scale.expand_as(x))[0].sum(),
        lambda m, x: Recomputing.apply(x, m.dense.weight).sum(),
    ],
    ids=["intermediate results", "once differentiable"],
)
def test_second_derivatives_that_a_function_does_not_define_are_errors(function):
    with pytest.raises(relax_grad.GradientError, match="defines its first derivative only"):
        gradient_of_gradient(function, data())


def test_gradients_of_inputs_that_need_none_in_pytorch():
    imported = from_module(model(FUNCTIONS["of an input"]), (data(),))
    module = relax_grad.value_and_grad(imported.module, "loss", wrt=["x"])
    built = tvm.compile(module, relax_grad.target.host(), relax_pipeline="relax_grad")
    arguments = [torch.tensor(0), data(), *map(tensor_of, imported.values)]
    _, (grad,) = relax.VirtualMachine(built, tvm.cpu())["loss_adjoint"](
        *map(tvm.runtime.from_dlpack, arguments)
    )
    close("gradient", [tensor_of(grad)], [tensor_of(imported.params["scale"]).expand(3, 4)])


def backward_of(function):
    """Return a loss with the identity function, whose gradient is
    ``function(ctx, gradient, module)``."""

    def loss(m, x):
        class Faulty(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                return function(ctx, gradient, m)

        return Faulty.apply(m.dense(x)).sum() + m.count.sum()

    return loss


def counting(ctx, gradient, m):
    m.count += 1
    return gradient


def writing(ctx, gradient, m):
    return ctx.saved_tensors[0].mul_(gradient)


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


REFUSED = {
    "a condition": (
        backward_of(lambda c, g, m: g if g.sum() > 0 else 2 * g),
        r"Faulty.backward: it cannot be traced",
    ),
    "a number of gradients": (
        backward_of(lambda c, g, m: (g, g)),
        r"Faulty.backward: .* returns 2 gradients for 1 arguments",
    ),
    "random numbers": (
        backward_of(lambda c, g, m: g * torch.rand_like(g)),
        r"rand_like.default: it draws random numbers in the backward function",
    ),
    "a written buffer": (backward_of(counting), r"a backward function writes to a tensor"),
    "a written tensor": (backward_of(writing), r"Faulty.backward: it writes to a saved tensor"),
    "a written input": (lambda m, x: Dirty.apply(m.dense(x)).sum(), r"writes to its inputs"),
    "eigenvalues": (
        backward_of(lambda c, g, m: g * torch.linalg.eigvalsh(g[:, :3]).sum()),
        "eigh.*has no converter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_cannot_be_exact_are_errors_with_their_line(name):
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        from_module(model(function), (data(),))
    assert "test_functions.py:" in str(caught.value)
