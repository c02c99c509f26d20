"""The function of one worker that has a part of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tvm
from tvm import relax

from ..._validation import check_integer, matching
from ...ir.bindings import bindings_of
from ...ir.dataflow import in_dataflow
from ...ir.module import ModulePass, copy_with_new_vars, normalized, relax_function, with_functions
from ..shards import Shard, axis_of
from . import _dropout, _shapes, _vocabulary  # noqa: F401  (register their rules)
from ._layouts import local_type
from ._propagation import Propagation, divided_at

#: Operators between a weight and its product that keep the features of its axes.
_KEEPS_AXES = ("relax.astype", "relax.grad.start_checkpoint", "relax.nn.dropout")


@tvm.transform.module_pass(opt_level=0, name="relax_grad.distributed.TensorParallel")
class TensorParallel(ModulePass):
    """A pass that rewrites a function of whole tensors into the function of one worker, which has a
    part of some parameters.

    It is the tensor parallelism of Megatron-LM (Shoeybi et al., 2019), as a rewrite of Relax. A
    column-parallel layer has a part of the output features, and a row-parallel layer a part of the
    input features. The operators in between run on the worker's part of the divided axis. A product
    over a divided axis ends in a sum over the workers. Run the pass before
    :class:`relax_grad.transform.Gradient`: the workers compute the gradients of one function
    together. Gradients of divided parameters are the worker's parts, and other gradients are the
    same on all workers.

    Two operators are inserted. ``R.grad.copy_to_tensor_parallel`` stands where a tensor that all
    workers have enters a divided computation: its gradient is the sum of all workers' parts.
    ``R.grad.reduce_from_tensor_parallel`` is the sum over the workers, and passes its gradient on
    unchanged. Their legalizations are nothing and ``R.ccl.allreduce``. A tensor that all workers
    have and that meets a divided axis is cut to the worker's part, such as a mask of dropout, or
    the bias of a column-parallel layer without an annotation.

    Parameters
    ----------
    func_name : str
        The function. Its other parameters and its results are the same on all workers. Divided
        results are collected.
    shards : Mapping[str, Shard]
        The annotations of parameters by their names or by patterns such as ``"*.up.*"``; the first
        that matches counts. :func:`relax_grad.distributed.column`,
        :func:`~relax_grad.distributed.row` and :func:`~relax_grad.distributed.along` make them.
        Parameters that none matches stay whole.
    num_workers : int
        The number of workers.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; if the workers do not divide an extent; or if an operator
        cannot run on a part of the divided axis. The message names the operator, the variable and
        the axis.

    Examples
    --------
    >>> from relax_grad.distributed import column, row
    >>> from relax_grad.distributed.transform import TensorParallel
    >>> from tvm import relax
    >>> shapes = {"x": (5, 4), "up": (4, 8), "down": (8, 4)}
    >>> x, up, down = (relax.Var(k, relax.TensorType(v, "float32")) for k, v in shapes.items())
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("forward", [x, up, down]):
    ...     y = bb.emit(relax.op.nn.relu(relax.op.matmul(x, up)))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.matmul(y, down)))
    >>> module = TensorParallel("forward", {"up": column(), "down": row()}, 2)(bb.get())
    >>> [str(each.ty.shape) for each in module["forward"].params]
    ['R.shape([5, 4])', 'R.shape([4, 4])', 'R.shape([4, 4])']
    >>> module.script().count("R.grad.reduce_from_tensor_parallel")
    1
    """

    def __init__(self, func_name: str, shards: Mapping[str, Shard], num_workers: int):
        num_workers = check_integer("num_workers", num_workers, 1)
        check_shards(shards)
        self.func_name, self.shards, self.num_workers = func_name, dict(shards), num_workers

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        function = relax_function(mod, self.func_name)
        made = self._divided(function, self.shards_of(mod))
        return with_functions(mod, {self.func_name: copy_with_new_vars(made)})

    def shards_of(self, mod: tvm.IRModule) -> dict[str, Shard]:
        """Return the annotation of each divided parameter of a module's function, with its axis.

        Parameters
        ----------
        mod : tvm.IRModule
            The module of whole tensors.

        Returns
        -------
        shards : dict[str, Shard]
            The annotations by the names of parameters.
        """
        function = relax_function(mod, self.func_name)
        annotations = match_shards(self.shards, [param.name for param in function.params])
        params = {param.name: param for param in function.params}
        return {
            name: self._resolved(function, params[name], shard)
            for name, shard in annotations.items()
        }

    def _resolved(self, function: relax.Function, param: relax.Var, shard: Shard) -> Shard:
        kind = param.ty
        is_tensor = isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr)
        if not is_tensor or kind.ndim < 1:
            raise ValueError(
                f"shards: {param.name} must be a tensor with an axis and a known shape to be "
                f"divided, but its type is {kind}"
            )
        if kind.ndim == 1 and shard.kind == "row":
            raise ValueError(
                f"shards: {param.name} has {shard}, but one axis only: the bias of a "
                "row-parallel layer is whole, because it is added after the sum over the "
                "workers; leave it out"
            )
        if (shard.kind == "column" and kind.ndim > 1) or shard.kind == "row":
            outputs, inputs = _features(function, param)
            shard = replace(shard, axis=outputs if shard.kind == "column" else inputs)
        axis = axis_of(param.name, shard, kind.ndim)
        divided_at(param.name, kind, axis, shard.parts, self.num_workers)
        return replace(shard, axis=axis)

    def _divided(self, function: relax.Function, shards: Mapping[str, Shard]) -> relax.Function:
        if self.num_workers == 1 or not shards:
            return function
        plain = relax.transform.ToNonDataflow()(tvm.IRModule({"f": function}))["f"]
        bound = [binding.var.name for binding in bindings_of(plain.body)]
        names = [*bound, *(param.name for param in plain.params)]
        propagation = Propagation(self.num_workers, names, plain.params[:])
        params = []
        for param in plain.params:
            shard = shards.get(param.name)
            if shard is not None:
                axis = axis_of(param.name, shard, param.ty.ndim)
                layout = divided_at(param.name, param.ty, axis, shard.parts, self.num_workers)
                part = relax.Var(param.name, local_type(param.ty, layout))
                propagation.divide(param, part, layout)
                param = part
            params.append(param)
        for block in plain.body.blocks[:]:
            for binding in block.bindings[:]:
                propagation.bind(binding)
        result = propagation.collected(plain.body.body)
        body = relax.SeqExpr([relax.BindingBlock(propagation.emit.bindings)], result)
        made = relax.Function(
            params, normalized(params, body), None, plain.is_pure, plain.attrs, plain.span
        )
        return in_dataflow(made)


def check_shards(shards: object) -> None:
    """Check that an argument is a mapping of names to annotations."""
    if not isinstance(shards, Mapping):
        raise TypeError(
            "shards must be a mapping of names or patterns to column(), row() or along(), but "
            f"it is {shards!r}"
        )
    for pattern, shard in shards.items():
        if not isinstance(pattern, str) or not isinstance(shard, Shard):
            raise TypeError(
                f"shards: {pattern!r} must be a name or a pattern, and {shard!r} the result of "
                "column(), row() or along()"
            )


def match_shards(shards: Mapping[str, Shard], names: list[str]) -> dict[str, Shard]:
    """Return the annotation of each name that a pattern matches.

    Raises
    ------
    ValueError
        If a pattern matches no name that an earlier one left.
    """
    annotations: dict[str, Shard] = {}
    for pattern, shard in shards.items():
        left = [name for name in names if name not in annotations]
        reason = "or all have an annotation already"
        matched = matching("shards", pattern, left, "parameter", reason)
        annotations.update(dict.fromkeys(matched, shard))
    return {name: annotations[name] for name in names if name in annotations}


def _features(function: relax.Function, param: relax.Var) -> tuple[int, int]:
    """Return the axes of a weight with the output features and the input features of its
    products."""
    axes: dict[relax.Var, list[int]] = {param: list(range(param.ty.ndim))}
    features = set()
    for binding in bindings_of(function.body):
        value = binding.value
        if isinstance(value, relax.Var | relax.TupleGetItem):
            source = value.tuple_value if isinstance(value, relax.TupleGetItem) else value
            if source in axes:
                axes[binding.var] = axes[source]
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            continue
        name, first = value.op.name, value.args[0] if len(value.args) else None
        if name in _KEEPS_AXES and first in axes:
            axes[binding.var] = axes[first]
        elif name == "relax.permute_dims" and first in axes:
            own = axes[first]
            order = value.attrs.axes
            order = range(len(own))[::-1] if order is None else map(int, order)
            axes[binding.var] = [own[i] for i in order]
        elif name == "relax.matmul":
            left, right = (
                axes.get(argument) if isinstance(argument, relax.Var) else None
                for argument in value.args
            )
            if right is not None and len(right) > 1:
                features.add((right[-1], right[-2]))
            if left is not None and len(left) > 1:
                features.add((left[-2], left[-1]))
    if len(features) != 1:
        uses = "products with different output features" if features else "no matrix product"
        raise ValueError(
            f"shards: the use of {param.name} does not tell its output and input features, "
            f"because it is an operand of {uses}; name the axis by along(axis)"
        )
    return features.pop()
