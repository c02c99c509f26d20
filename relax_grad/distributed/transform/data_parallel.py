"""The adjoint of a loss for data parallel training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import op

from ..._validation import check_integer
from ...activity import holds_floats
from ...autodiff.gradient import Gradient, add_adjoint
from ...errors import GradientError
from ...ir.compat import dtype_of
from ...ir.inlining import write_out_calls
from ...ir.module import ModulePass, copy_with_new_vars, relax_function, unused, with_functions
from ._batch_norm import synchronized, training_norms
from .buckets import BUCKET_BYTES, reduce_gradients, reduce_together, reduction_of

#: The factor of a worker's number in its seed: the fractional part of the golden ratio, as a signed
#: integer.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


@tvm.transform.module_pass(opt_level=0, name="relax_grad.distributed.DataParallel")
class DataParallel(ModulePass):
    """A pass that adds the adjoint of a loss for workers that have the same parameters and
    different examples.

    It takes the place of :class:`relax_grad.transform.Gradient`: the new function is named
    ``<func_name>_adjoint``, takes the same parameters, and returns
    ``(result, (gradients...), own_loss)``. On all workers, the loss in the result, the gradients,
    and the results that ``averaged`` names are the same: over all examples together.
    ``own_loss`` covers the worker's examples.

    The collectives are operators of Relax, ``R.ccl.allreduce``. Gradients are joined in buckets, in
    the order in which the backward pass computes them.

    Parameters
    ----------
    func_name : str
        The function that returns the loss. A call of a batch normalisation that is to be
        synchronized must be in the function itself.
    require_grads : relax.Var or str or Sequence[relax.Var or str], optional
        As for ``Gradient``.
    target_index : int or Sequence[int]
        The place of the loss in the result.
    batch : str, optional
        The parameter whose first axis counts the worker's examples. If the extent is symbolic,
        workers may have different numbers of examples, and each one's loss and gradients count by
        its share. By default all count the same.
    reduction : str
        ``"mean"``: the loss is a mean over the examples, and so is the loss of all workers.
        ``"sum"``: it is a sum.
    batch_norm : str
        ``"synchronized"``: batch normalisations take the statistics of all workers' examples, and
        gradients pass through them. ``"local"``: over the worker's examples.
    averaged : Sequence[Sequence[int]]
        The places of other floating-point results to average, such as new running statistics.
    seed : str, optional
        The parameter that is the seed of random numbers. Worker 0 takes it as it is, and each other
        worker has another seed.
    bucket_bytes : int
        The size of a bucket in bytes.
    cotangent : str or None
        Adds a last parameter of this name, of the type of the loss, that the gradients are
        multiplied by.
    overlap : bool
        Whether the collectives of buckets run beside the rest of the backward pass: instead of
        ``R.ccl.allreduce`` stand a call that starts it, and one after the backward pass that waits
        for it, of functions that the workers of a session have.
    group_size : int
        The number of consecutive workers that compute one share of the batch together, as of
        :class:`relax_grad.distributed.transform.TensorParallel`. They are reduced over the workers
        of the same place in each group, by the same functions.

    Raises
    ------
    TypeError, ValueError, GradientError
        As for ``Gradient``; and if a parameter has another type than needed.

    Examples
    --------
    >>> from relax_grad.distributed.transform import DataParallel
    >>> from tvm import relax, tirx
    >>> n = tirx.Var("n", "int64")
    >>> x = relax.Var("x", relax.TensorType((n, 3), "float32"))
    >>> w = relax.Var("w", relax.TensorType((3,), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("loss", [x, w]):
    ...     y = bb.emit(relax.op.matmul(x, w))
    ...     _ = bb.emit_func_output(bb.emit(relax.op.mean(relax.op.square(y))))
    >>> module = DataParallel("loss", "w", batch="x")(bb.get())
    >>> module.script().count("R.ccl.allreduce")
    3
    """

    def __init__(
        self,
        func_name: str,
        require_grads: relax.Var | str | Sequence[relax.Var | str] | None = None,
        target_index: int | Sequence[int] = 0,
        *,
        batch: str | None = None,
        reduction: str = "mean",
        batch_norm: str = "synchronized",
        averaged: Sequence[Sequence[int]] = (),
        seed: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        cotangent: str | None = None,
        overlap: bool = False,
        group_size: int = 1,
    ):
        _check_choice("reduction", reduction, ("mean", "sum"))
        _check_choice("batch_norm", batch_norm, ("synchronized", "local"))
        bucket_bytes = check_integer("bucket_bytes", bucket_bytes, 1, of="bytes")
        if not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True or False, but it is {overlap!r}")
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise ValueError(f"group_size must be a number of workers, but it is {group_size!r}")
        self.gradient = Gradient(func_name, require_grads, target_index)
        self.func_name, self.batch, self.seed = func_name, batch, seed
        self.reduction, self.batch_norm, self.averaged = reduction, batch_norm, averaged
        self.bucket_bytes, self.cotangent, self.overlap = bucket_bytes, cotangent, overlap
        self.group_size = group_size

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return self.add_adjoint(mod, f"{self.func_name}_adjoint")

    def add_adjoint(self, mod: tvm.IRModule, name: str) -> tvm.IRModule:
        """Return the module with the adjoint under another name."""
        return _Adjoint(self, mod, name).module()


class _Adjoint:
    """The construction of the adjoint of one function.

    The function gets the worker's weight, the share of its examples times the number of workers,
    and gradients are averages. So weights are exactly 1, and need no multiplication to be exact,
    where all workers have the same number of examples.
    """

    def __init__(self, settings: DataParallel, mod: tvm.IRModule, name: str):
        self._settings, self._mod, self._name = settings, mod, name
        self._function = relax_function(mod, settings.func_name)
        names = [param.name for param in self._function.params]
        self._places = {param: names.index(param) for param in names}
        extent = self._extent()
        self._is_symbolic = extent is not None and not isinstance(extent, tirx.IntImm)
        self._examples = extent
        is_synchronized = settings.batch_norm == "synchronized"
        self._norms = training_norms(self._function) if is_synchronized else []
        self._kind = "avg" if settings.reduction == "mean" else "sum"
        self._check_loss()

    def _check_loss(self) -> None:
        kind = _at(self._function.ret_ty, self._path)
        is_scalar = isinstance(kind, relax.TensorType) and holds_floats(kind)
        extents = kind.shape.values if is_scalar and kind.shape is not None else [None]
        if not all(isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in extents):
            raise GradientError(
                f"the loss of {self._settings.func_name} must be a scalar or have one element, "
                f"but its type is {kind}"
            )

    def _extent(self) -> tirx.PrimExpr | int | None:
        """Return the number of examples of a worker, or None if all count the same."""
        name = self._settings.batch
        if name is None:
            return None
        kind = self._param(name, "batch").ty
        if not isinstance(kind, relax.TensorType) or kind.shape is None or kind.ndim < 1:
            raise ValueError(f"batch: {name} must be a tensor with an axis, but its type is {kind}")
        return kind.shape.values[0]

    def _param(self, name: str, argument: str) -> relax.Var:
        if name not in self._places:
            raise ValueError(
                f"{argument}: {self._settings.func_name} has no parameter {name!r}; it has "
                f"{', '.join(self._places)}"
            )
        return self._function.params[self._places[name]]

    def module(self) -> tvm.IRModule:
        settings, taken = self._settings, {v.name_hint for v in self._mod.get_global_vars()}
        weight = relax.Var("weight", relax.TensorType((), "float32")) if self._is_symbolic else None
        ratio = relax.Var("ratio", relax.TensorType((), "float32")) if self._norms else None
        function = self._function
        if ratio is not None:
            function = synchronized(function, weight, ratio)
        inner = unused(f"{settings.func_name}_of_worker", taken)
        mod = with_functions(self._mod, {inner: function})
        gradient = Gradient(
            inner,
            settings.gradient.require_grads,
            settings.gradient.target_index,
            cotangents="cotangent",
        )
        adjoint = unused(f"{inner}_adjoint", taken)
        mod = add_adjoint(mod, gradient, adjoint)
        callee = reduce_gradients(
            mod[adjoint],
            self._kind,
            settings.bucket_bytes,
            overlap=settings.overlap,
            of_peers=self._of_peers,
        )
        made = self._outer(callee, weight is not None and ratio is not None, ratio is not None)
        bb = relax.BlockBuilder(with_functions(mod, {}, without=[inner, adjoint]))
        bb.add_func(made.with_attr("global_symbol", self._name), self._name)
        return bb.finalize()

    def _outer(
        self, callee: relax.Function, takes_weight: bool, takes_ratio: bool
    ) -> relax.Function:
        """Return the function that calls the adjoint of a worker's loss, with that one written
        out."""
        settings = self._settings
        variable = tvm.ir.GlobalVar("adjoint_of_worker")
        bb = relax.BlockBuilder()
        variable = bb.add_func(callee.without_attr("global_symbol"), "adjoint_of_worker")
        fresh = copy_with_new_vars(self._function)
        params = list(fresh.params)
        loss_type = _at(self._function.ret_ty, self._path)
        cotangent = None
        if settings.cotangent is not None:
            cotangent = relax.Var(settings.cotangent, loss_type)
        with bb.function(self._name, [*params, *([] if cotangent is None else [cotangent])]):
            arguments = list(params)
            if settings.seed is not None:
                at = self._places[self._param(settings.seed, "seed").name]
                arguments[at] = self._own_seed(bb, params[at])
            weight, ratio = self._shares(bb, params)
            arguments += [weight] if takes_weight else []
            arguments += [ratio] if takes_ratio else []
            arguments.append(self._seed_of_loss(bb, loss_type, weight, cotangent))
            both = bb.emit(relax.Call(variable, arguments))
            result = bb.emit(relax.TupleGetItem(both, 0))
            gradients = bb.emit(relax.TupleGetItem(both, 1))
            result, own = self._reduced(bb, result, weight)
            bb.emit_func_output(relax.Tuple([result, gradients, own]))
        module = bb.finalize()
        (made,) = (v for v in module.get_global_vars() if v.name_hint == self._name)
        return copy_with_new_vars(write_out_calls(module[made], {variable: callee}))

    @property
    def _of_peers(self) -> bool:
        """Whether a group of workers has one share of the batch."""
        return self._settings.group_size > 1

    @property
    def _path(self) -> tuple[int, ...]:
        """The place of the loss in the result; () if that is the loss."""
        is_tuple = isinstance(self._function.ret_ty, relax.TupleType)
        return self._settings.gradient.target_index if is_tuple else ()

    def _own_seed(self, bb: relax.BlockBuilder, seed: relax.Var) -> relax.Expr:
        if not isinstance(seed.ty, relax.TensorType) or dtype_of(seed.ty) != "int64":
            raise ValueError(
                f"seed: {seed.name} must be an int64 tensor, but its type is {seed.ty}"
            )
        worker = tirx.Var("worker_id", "int64")
        asked = relax.Call(
            Op.get("relax.call_pure_packed"),
            [relax.ExternFunc("runtime.disco.worker_id")],
            None,
            [relax.ShapeType(None)],
        )
        bb.match_cast(bb.emit(asked), relax.ShapeType([worker]))
        group = tirx.floordiv(worker, tirx.IntImm("int64", self._settings.group_size))
        number = bb.emit(op.shape_to_tensor(relax.ShapeExpr([group])))
        number = bb.emit(op.reshape(number, ()))
        return bb.emit(op.add(seed, bb.emit(op.multiply(number, relax.const(_GOLDEN, "int64")))))

    def _shares(
        self, bb: relax.BlockBuilder, params: Sequence[relax.Var]
    ) -> tuple[relax.Expr | None, relax.Expr | None]:
        """Return the worker's weight, and the number of all examples divided by its own."""
        if not self._is_symbolic and not self._norms:
            return None, None
        if self._is_symbolic:
            at = self._places[self._settings.batch]
            extents = [params[at].ty.shape.values[0], tirx.IntImm("int64", 1)]
            own = bb.emit(
                op.astype(bb.emit(op.shape_to_tensor(relax.ShapeExpr(extents))), "float32")
            )
        else:
            own = relax.const([1.0, 1.0], "float32")
        total = bb.emit(reduction_of(bb.emit, own, "sum", self._of_peers), "examples")

        def scalar(vector: relax.Expr, i: int) -> relax.Expr:
            return bb.emit(op.reshape(bb.emit(op.strided_slice(vector, [0], [i], [i + 1])), ()))

        ratio = bb.emit(op.divide(scalar(total, 0), scalar(own, 0)))
        weight = bb.emit(op.divide(scalar(total, 1), ratio)) if self._is_symbolic else None
        return weight, ratio

    def _seed_of_loss(
        self,
        bb: relax.BlockBuilder,
        kind: relax.TensorType,
        weight: relax.Expr | None,
        cotangent: relax.Expr | None,
    ) -> relax.Expr:
        """Return the cotangent of a worker's loss."""
        dtype = dtype_of(kind)
        if weight is None or self._settings.reduction == "sum":
            return cotangent if cotangent is not None else bb.emit(op.ones(kind.shape, dtype))
        own = bb.emit(op.astype(weight, dtype))
        if cotangent is not None:
            return bb.emit(op.multiply(cotangent, own))
        return bb.emit(op.full(kind.shape, own, dtype)) if len(kind.shape) else own

    def _reduced(
        self, bb: relax.BlockBuilder, result: relax.Expr, weight: relax.Expr | None
    ) -> tuple[relax.Expr, relax.Expr]:
        """Return the result with its loss and the averaged values of all workers, and the worker's
        own loss."""
        path = self._path
        own = _field(bb, result, path)
        totals: dict[tuple[int, ...], relax.Expr] = {}
        values = {path: own, **{tuple(p): _field(bb, result, p) for p in self._settings.averaged}}
        groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for place, value in values.items():
            if holds_floats(value.ty):
                kind = self._kind if place == path else "avg"
                groups.setdefault((dtype_of(value.ty), kind), []).append(place)
        for (dtype, kind), places in groups.items():
            shares = [values[place] for place in places]
            if weight is not None and kind == "avg":
                factor = bb.emit(op.astype(weight, dtype))
                shares = [bb.emit(op.multiply(share, factor)) for share in shares]
            reduced = reduce_together(bb.emit, shares, kind, of_peers=self._of_peers)
            totals.update(zip(places, reduced, strict=True))
        return _replaced(bb, result, totals), own


def _field(bb: relax.BlockBuilder, value: relax.Expr, path: Sequence[int]) -> relax.Expr:
    for i in path:
        value = bb.emit(relax.TupleGetItem(value, i))
    return value


def _at(kind: relax.Type, path: Sequence[int]) -> relax.Type:
    for i in path:
        kind = kind.fields[i]
    return kind


def _replaced(
    bb: relax.BlockBuilder,
    value: relax.Expr,
    replacements: Mapping[tuple[int, ...], relax.Expr],
    at: tuple[int, ...] = (),
) -> relax.Expr:
    """Return a nested tuple with some of its elements replaced."""
    if at in replacements:
        return replacements[at]
    if not any(place[: len(at)] == at for place in replacements):
        return value
    fields = [
        _replaced(bb, bb.emit(relax.TupleGetItem(value, i)), replacements, (*at, i))
        for i in range(len(value.ty.fields))
    ]
    return relax.Tuple(fields)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, but it is {value!r}")
