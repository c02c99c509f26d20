"""A row of the benchmark: a computation in Relax and PyTorch, with its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import tvm
from tvm import relax

import relax_grad
from relax_grad.ir.module import DONATED

#: An input: the shape of normally distributed numbers, or a function of a generator and the
#: previous inputs.
Input = tuple[int, ...] | Callable[[np.random.Generator, list[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Row:
    """A computation in Relax and PyTorch, with its inputs.

    Attributes
    ----------
    group : str
        The group whose mean includes the row: ``conv``, ``matmul``, ``memory`` or ``symbolic``.
    name : str
        The operator, the direction and the shapes; the key of the row in the results.
    inputs : Sequence[Input]
        The inputs.
    relax : Callable
        Takes a block builder and a variable for each input, and returns an expression.
    torch : Callable
        Takes a tensor for each input.
    wrt : Sequence[int]
        The inputs whose gradients the row returns in Relax. If there are any, ``relax`` is the
        forward computation, and the last input is the gradient with respect to its result, which
        ``relax`` does not take.
    keeps_result : bool
        Whether a row with ``wrt`` returns the result of the forward computation before the
        gradients.
    symbolic : Sequence[int]
        The inputs with the same symbolic variable as their first extent in Relax.
    flops : int
        The floating-point operations of a direct computation, where they bound the time; else 0.
    is_random : bool
        Whether each framework draws random numbers of its own, so that their results differ.
    replaced : Sequence[int]
        The inputs that the results replace in place, in the order of the results, which are a
        tuple: as ``train_step`` updates parameters, and PyTorch's optimizers do.
    """

    group: str
    name: str
    inputs: Sequence[Input]
    relax: Callable[..., relax.Expr]
    torch: Callable
    wrt: Sequence[int] = ()
    keeps_result: bool = False
    symbolic: Sequence[int] = ()
    flops: int = 0
    is_random: bool = False
    replaced: Sequence[int] = ()

    def arrays(self) -> list[np.ndarray]:
        """Return the inputs, with the same values in every call."""
        rng = np.random.default_rng(0)
        values: list[np.ndarray] = []
        for entry in self.inputs:
            values.append(normal(rng, entry) if isinstance(entry, tuple) else entry(rng, values))
        return values

    def module(self, arrays: Sequence[np.ndarray]) -> tvm.IRModule:
        """Return a module whose function ``main`` computes the row for arrays of the given
        shapes."""
        params = [self._param(i, array) for i, array in enumerate(arrays)]
        bb = relax.BlockBuilder()
        taken = params[:-1] if self.wrt else params
        with bb.function("main", taken):
            with bb.dataflow():
                result = bb.emit_output(bb.normalize(self.relax(bb, *taken)))
            bb.emit_func_output(result)
        if self.wrt:
            return self._gradients(bb.get())
        module = _inlined(bb.get())
        donated = [[param, field] for field, param in enumerate(self.replaced)]
        if donated:
            module.update_func(
                module.get_global_var("main"), module["main"].with_attr(DONATED, donated)
            )
        return module

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


_BATCH = tvm.tirx.Var("batch", "int64")


def _inlined(module: tvm.IRModule) -> tvm.IRModule:
    """Return a module with only ``main``, in which its callees are inlined."""
    others = {
        name: function for name, function in module.functions_items() if name.name_hint != "main"
    }
    if not others:
        return module
    main = module["main"].inline_functions(others)
    passes = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination(["main"])]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": main}))


def _second(function: relax.Function) -> relax.Function:
    """Return a function whose result is the second element of the result of the given function."""
    body = function.body
    result = body.body
    if isinstance(result, relax.Var):
        bindings = [binding for block in body.blocks for binding in block.bindings]
        (result,) = (b.value for b in bindings if b.var.same_as(result))
    body = relax.SeqExpr(body.blocks, result.fields[1])
    return relax.Function(function.params, body, function.ret_ty.fields[1], attrs=function.attrs)


def symbolic(row: Row, *positions: int) -> Row:
    """Return a row for Relax with a symbolic first extent of the inputs at the given positions."""
    name = f"symbolic batch: {row.name}"
    return replace(row, group="symbolic", name=name, symbolic=positions)


def normal(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape, "float32"))


def positive(*shape: int) -> Input:
    """Return an input with random numbers between 0.5 and 1.5."""
    return lambda rng, _: rng.random(shape, "float32") + np.float32(0.5)


def integers(below: int, *shape: int) -> Input:
    return lambda rng, _: rng.integers(0, below, shape)


def derived(function: Callable[..., np.ndarray]) -> Input:
    """Return an input that is computed from the previous inputs."""
    return lambda _, known: np.asarray(function(*known), known[0].dtype)


def with_gradients(forward: Callable, *wrt: int) -> Callable:
    """Return a PyTorch function of the inputs and the output gradient; it returns the result and
    the gradients."""

    def run(*tensors):
        *known, output_grad = tensors
        with torch.enable_grad():
            leaves = [tensor.detach() for tensor in known]
            wanted = [leaves[i].requires_grad_() for i in wrt]
            result = forward(*leaves)
            return result, torch.autograd.grad(result, wanted, output_grad)

    return run
