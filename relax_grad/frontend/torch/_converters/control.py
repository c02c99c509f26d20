"""Converters of operators that control differentiation."""

from __future__ import annotations

from typing import Any

from torch import fx
from tvm import relax

from ....activity import useful
from ....autodiff.local import emit_gradients
from ....errors import GradientError
from ....ir.module import copy_with_new_vars
from ....op import differentiable_once, stop_gradient, with_backward
from ._call import is_float
from ._support import Importer, Refused


def _detach(importer: Importer, node: fx.Node) -> relax.Expr:
    data = importer.args(node)[0]
    return stop_gradient(data) if is_float(data) else data


def _start(importer: Importer, node: fx.Node) -> relax.Expr:
    return relax.op.grad.start_checkpoint(importer.args(node)[0])


def _end(importer: Importer, node: fx.Node) -> relax.Expr:
    return relax.op.grad.end_checkpoint(importer.args(node)[0])


def _cond(importer: Importer, node: fx.Node) -> relax.Expr:
    if importer.level:
        raise Refused(
            "it is in the backward function of a torch.autograd.Function; use torch.where"
        )
    predicate, yes, no, operands = importer.args(node)
    branches = (importer.branch(graph, operands) for graph in (yes, no))
    return importer.emit(relax.If(predicate, *branches))


def _with_backward(importer: Importer, node: fx.Node) -> relax.Expr:
    """Join the outputs of a function and the function of its gradients."""
    outputs, inputs, _, _, number, _ = node.args
    level = (*importer.level, number)
    inside = [inner for inner in node.graph.nodes if importer.levels[inner][: len(level)] == level]
    residuals, function = _backward(importer, node, inside, level)
    function = importer.block_builder.add_func(function, f"backward{number}")
    results, sources = (
        relax.Tuple([importer.env[inner] for inner in group]) for group in (outputs, inputs)
    )
    return importer.emit(with_backward(results, sources, relax.Tuple(residuals), function))


def _backward(
    importer: Importer, node: fx.Node, inside: Any, level: tuple[int, ...]
) -> tuple[list[relax.Expr], relax.Function]:
    """Return the residuals of a call and the function
    ``(*outputs, *residuals, *cotangents) -> gradients``.

    The nodes ``inside`` compute it.
    """
    outputs, inputs, gradients, cotangents, _, once = node.args
    members = set(inside)
    operands = {operand: None for inner in inside for operand in inner.all_input_nodes}
    operands.update(dict.fromkeys(gradients))
    kept = [
        operand
        for operand in operands
        if operand not in members
        and operand not in outputs
        and _is_variable(importer.env.get(operand))
    ]
    sources = relax.Tuple([importer.env[operand] for operand in inputs])
    residuals = []
    for operand in kept:
        value = importer.env[operand]
        if operand not in inputs and operand.op != "placeholder" and is_float(value):
            # PyTorch takes intermediate results for constants in second derivatives, which is wrong
            # in general.
            value = importer.emit(differentiable_once(value, sources))
        residuals.append(value)
    params = {
        operand: relax.Var(
            operand.name,
            importer.env[operand].ty
            if operand in importer.env
            else importer.type_of(operand.meta["val"]),
        )
        for operand in (*outputs, *kept, *cotangents)
    }
    bb, outer = importer.block_builder, (importer.env, importer.level, importer.leaves)
    importer.env, importer.level = {**importer.env, **params}, level
    importer.leaves = {params[operand] for operand in kept if operand.op == "placeholder"}
    bb._begin_dataflow_block()
    try:
        for inner in inside:
            if importer.levels[inner] == level and inner not in params:
                importer.convert(inner)
        values = [importer.env[gradient] for gradient in gradients]
        if once:
            read = [params[param] for param in params if param in operands or param in cotangents]
            sources = relax.Tuple([param for param in read if is_float(param)])
            values = [importer.emit(differentiable_once(gradient, sources)) for gradient in values]
        result = bb.emit_output(relax.Tuple(values))
    finally:
        block = bb._end_block()
        importer.env, importer.level, importer.leaves = outer
    variables = list(params.values())
    body = relax.SeqExpr([block], result)
    function = relax.Function(variables, body, result.ty)
    extents = list(relax.analysis.free_symbolic_vars(function))
    if extents:
        residuals.append(relax.ShapeExpr(extents))
        variables.insert(len(outputs) + len(kept), relax.Var("extents", relax.ShapeType(extents)))
        function = relax.Function(variables, body, result.ty)
    return residuals, copy_with_new_vars(function)


def _gradient(importer: Importer, node: fx.Node) -> tuple[relax.Expr, ...]:
    """Emit a gradient within the model after the previous bindings."""
    outputs, inputs, cotangents = importer.args(node)
    bb = importer.block_builder
    block = bb._end_block()
    bindings = list(block.bindings)
    bb._begin_dataflow_block() if isinstance(
        block, relax.DataflowBlock
    ) else bb._begin_binding_block()
    for binding in bindings:
        bb.emit_normalized(binding)
    if importer.leaves is not None:
        free = useful(bindings, relax.Tuple(outputs)) - {binding.var for binding in bindings}
        if any(variable not in importer.leaves and variable not in inputs for variable in free):
            raise Refused(
                "the differentiated tensor depends on others that are computed outside of the "
                "branch or the backward function; detach those inside"
            )
    try:
        return tuple(emit_gradients(bb, bindings, outputs, cotangents, inputs))
    except GradientError as error:
        raise Refused(str(error)) from error


def _is_variable(value: Any) -> bool:
    return isinstance(value, relax.Var) and isinstance(value.ty, relax.TensorType)


CONTROL = {
    "cond": _cond,
    "detach.default": _detach,
    "start_checkpoint": _start,
    "end_checkpoint": _end,
    "gradient.default": _gradient,
    "with_backward.default": _with_backward,
}
