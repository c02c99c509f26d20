"""The form of a row: a computation in Relax, in PyTorch and in JAX, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import tvm
from tvm import relax

import relax_grad

#: An input: the shape of normally distributed numbers, or what makes it of a generator and the inputs before it.
Input = tuple[int, ...] | Callable[[np.random.Generator, list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Row:
    """A computation in Relax, in PyTorch and in JAX.

    Attributes
    ----------
    group : str
        What it is counted to: ``conv``, ``matmul``, ``memory`` or ``symbolic``.
    name : str
        What it is.
    inputs : Sequence[Input]
        The inputs.
    relax : Callable
        Takes a block builder and a variable for each input, and returns an expression.
    torch : Callable
        Takes a tensor for each input.
    jax : Callable, optional
        Takes the module ``jax`` and an array for each input.
    wrt : Sequence[int]
        The inputs whose gradients the row returns, in Relax and JAX; ``relax`` and ``jax`` are then the
        forward computation, which the last input, the gradient with respect to its result, is not given to.
    keeps_result : bool
        Whether a row with ``wrt`` returns the result of the forward computation too, before the gradients.
    symbolic : Sequence[int]
        The inputs whose first extent is one symbolic variable in Relax.
    """

    group: str
    name: str
    inputs: Sequence[Input]
    relax: Callable[..., relax.Expr]
    torch: Callable
    jax: Callable | None = None
    wrt: Sequence[int] = ()
    keeps_result: bool = False
    symbolic: Sequence[int] = ()

    def arrays(self) -> list[np.ndarray]:
        """Return the inputs; they are the same each time."""
        rng = np.random.default_rng(0)
        found: list[np.ndarray] = []
        for entry in self.inputs:
            found.append(normal(rng, entry) if isinstance(entry, tuple) else entry(rng, found))
        return found

    def module(self, arrays: Sequence[np.ndarray]) -> tvm.IRModule:
        """Return the module whose function ``main`` is the row, for arrays of these shapes."""
        params = [self._param(i, array) for i, array in enumerate(arrays)]
        bb = relax.BlockBuilder()
        taken = params[:-1] if self.wrt else params
        with bb.function("main", taken):
            with bb.dataflow():
                result = bb.emit_output(bb.normalize(self.relax(bb, *taken)))
            bb.emit_func_output(result)
        return self._gradients(bb.get()) if self.wrt else _inlined(bb.get())

    def _param(self, index: int, array: np.ndarray) -> relax.Var:
        shape = list(array.shape)
        if index in self.symbolic:
            shape[0] = _BATCH
        return relax.Var(f"x{index}", relax.TensorType(shape, str(array.dtype)))

    def _gradients(self, forward: tvm.IRModule) -> tvm.IRModule:
        product = relax_grad.vjp(forward, "main", list(self.wrt))["main_vjp"]
        if not self.keeps_result:
            product = _second(product)
        module = tvm.IRModule({"main": product.with_attr("global_symbol", "main")})
        return relax.transform.DeadCodeElimination(["main"])(module)

    def in_jax(self, jax) -> Callable:
        """Return the row as a function of arrays, not yet compiled."""
        if not self.wrt:
            return lambda *arrays: self.jax(jax, *arrays)

        def gradients(*arrays):
            *known, output_grad = arrays

            def forward(*chosen):
                given = list(known)
                for i, value in zip(self.wrt, chosen, strict=True):
                    given[i] = value
                return self.jax(jax, *given)

            result, transposed = jax.vjp(forward, *(known[i] for i in self.wrt))
            found = transposed(output_grad)
            return (result, found) if self.keeps_result else found

        return gradients


_BATCH = tvm.tirx.Var("batch", "int64")


def _inlined(module: tvm.IRModule) -> tvm.IRModule:
    """Return a module of ``main`` alone, with the functions that it calls in it."""
    others = {name: each for name, each in module.functions_items() if name.name_hint != "main"}
    if not others:
        return module
    main = module["main"].inline_functions(others)
    passes = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination(["main"])]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": main}))


def _second(function: relax.Function) -> relax.Function:
    """Return a function that returns the second element of what a function returns."""
    body = function.body
    result = body.body
    if isinstance(result, relax.Var):
        bindings = [binding for block in body.blocks for binding in block.bindings]
        (result,) = (b.value for b in bindings if b.var.same_as(result))
    body = relax.SeqExpr(body.blocks, result.fields[1])
    return relax.Function(function.params, body, function.ret_ty.fields[1], attrs=function.attrs)


def symbolic(row: Row, *positions: int) -> Row:
    """Return a row whose first extent, of the inputs in these positions, is symbolic in Relax."""
    name = f"symbolic batch: {row.name}"
    return replace(row, group="symbolic", name=name, symbolic=positions)


def normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape, "float32"))


def positive(*shape: int) -> Input:
    """Return an input of numbers between 0.5 and 1.5."""
    return lambda rng, _: rng.random(shape, "float32") + np.float32(0.5)


def integers(below: int, *shape: int) -> Input:
    return lambda rng, _: rng.integers(0, below, shape)


def derived(function: Callable[..., np.ndarray]) -> Input:
    """Return an input that is computed of those before it."""
    return lambda _, known: np.asarray(function(*known), known[0].dtype)


def with_gradients(forward: Callable, *wrt: int) -> Callable:
    """Return a computation in PyTorch, and its gradients, as a function of its inputs and the gradient of its result."""

    def run(*tensors):
        *known, output_grad = tensors
        with torch.enable_grad():
            leaves = [tensor.detach() for tensor in known]
            wanted = [leaves[i].requires_grad_() for i in wrt]
            result = forward(*leaves)
            return result, torch.autograd.grad(result, wanted, output_grad)

    return run


def pulled_back(forward: Callable, jax, output_grad, *primals):
    """Return in JAX the gradients of a computation with respect to each of its inputs."""
    return jax.vjp(lambda *values: forward(jax, *values), *primals)[1](output_grad)
