"""The function that runs an imported model and then a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax, tirx

from ..._validation import check_call, described
from ...ir.extent_checks import checks_of, with_extent_checks
from ...ir.module import ending_blocks, normalized, tuple_fields
from ...training import append_loss

#: The types of targets by their names: a type, or a shape and a dtype.
Targets = Mapping[str, relax.TensorType | tuple[Sequence[int | str], str]]


def loss_of(
    main: relax.Function,
    outputs: Sequence[str],
    loss_fn: Callable[..., relax.Expr],
    targets: Targets | None,
    returns_outputs: bool = False,
) -> relax.Function:
    """Return the function that runs a function of a model and then a loss.

    Parameters
    ----------
    main : relax.Function
        The function of the model.
    outputs : Sequence[str]
        The names of its first results.
    loss_fn, targets
        Those of :meth:`Imported.with_loss`.
    returns_outputs : bool
        Whether the function returns the outputs between the loss and the new states.
    """
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of the block builder, the outputs and the targets, but "
            f"it is {described(loss_fn)}; such as lambda bb, output, target: ..."
        )
    if targets is not None and not isinstance(targets, Mapping):
        raise TypeError(
            'targets must be a mapping from names to types, such as {"y": ((8,), "int64")}, '
            f"but it is {described(targets)}"
        )
    taken = {param.name for param in main.params}
    symbols = _symbols(main)
    params = [
        relax.Var(key, result.ty) for key, result in zip(outputs, results_of(main), strict=False)
    ]
    extra = []
    for key, kind in dict(targets or {}).items():
        if key in taken:
            raise ValueError(f"targets: the model has a parameter {key!r} already")
        extra.append(relax.Var(key, _type(key, kind, symbols)))
    carriers = _carriers(main, params)
    carrier_params = [relax.Var(f"{carrier.name}_extents", carrier.ty) for carrier in carriers]
    bb = relax.BlockBuilder()
    _check_loss(loss_fn, bb, params, extra)
    with ending_blocks(bb), bb.function("loss", [*carrier_params, *params, *extra]):
        with bb.dataflow():
            value = _called(loss_fn, bb, *params, *extra)
            if not isinstance(value, relax.Expr):
                raise TypeError(
                    "loss_fn must return a Relax expression, as bb.emit(relax.op.mean(...)) does, "
                    f"but it returns {described(value)}"
                )
            value = bb.emit_output(value)
        bb.emit_func_output(value)
    if returns_outputs:
        _check_extents(params, bb.get()["loss"])
    kept = len(results_of(main)) - len(params)
    whole = append_loss(
        _returning(main, carriers, len(params) if returns_outputs else 0),
        bb.get()["loss"],
        len(carriers) + len(params),
        kept + (len(params) if returns_outputs else 0),
    )
    count = int(main.attrs["num_input"])
    every = list(whole.params)
    behind = every[len(main.params) :]
    ordered = [*every[:count], *behind, *every[count : len(main.params)]]
    loss = relax.Function(ordered, whole.body, is_pure=whole.is_pure)
    loss = loss.with_attr("num_input", count + len(behind))
    return with_extent_checks(loss, checks_of(main))


def _called(loss_fn: Callable, *arguments: object) -> relax.Expr:
    """Return the loss, or raise an error for a function that computes with numbers."""
    try:
        return loss_fn(*arguments)
    except TypeError as error:
        if "with `const`" not in str(error):  # TVM's, for an operand that is no expression
            raise
        raise TypeError(
            f"the loss computes with a number or by another library ({error}), but for an ONNX "
            'import it computes with Relax: relax.const(2.0, "float32"), and '
            "bb.emit(relax.op.mean(...))"
        ) from error


def _check_loss(
    loss_fn: Callable, bb: relax.BlockBuilder, outputs: Sequence, targets: Sequence
) -> None:
    """Raise TypeError if a loss is a function of another library, or of other numbers of
    arguments."""
    library = str(getattr(loss_fn, "__module__", "")).partition(".")[0]
    if library in ("torch", "numpy", "jax", "tensorflow"):
        raise TypeError(
            f"the loss is a function of {library}, but for an ONNX import it computes with Relax: "
            "lambda bb, output, target: bb.emit(relax.op.mean(bb.emit(...)))"
        )
    count = f"{len(targets)} target{'' if len(targets) == 1 else 's'}"
    check_call(
        f"with {count} the loss",
        loss_fn,
        [bb, *outputs, *targets],
        'lambda bb, output, target: ..., and targets={"target": (("batch",), "int64")}',
    )


def _of_dtype(kind: object) -> str:
    """Return the remedy for a dtype that is no text."""
    if not isinstance(kind, Sequence) or isinstance(kind, str) or len(kind) != 2:
        return ""
    return f' and {described(kind[1])}: write the dtype as text, such as "int64"'


def _type(name: str, kind: Any, symbols: Mapping[str, tirx.Var]) -> relax.TensorType:
    """Return the type of a target."""
    if isinstance(kind, relax.TensorType):
        return kind
    is_pair = isinstance(kind, Sequence) and not isinstance(kind, str) and len(kind) == 2
    if not is_pair or not isinstance(kind[0], Sequence) or not isinstance(kind[1], str):
        raise TypeError(
            f"targets: {name} must have a relax.TensorType, or a shape and a dtype, such as "
            f'(("batch",), "int64"), but it has {described(kind)}{_of_dtype(kind)}'
        )
    shape, dtype = kind
    for extent in shape:
        if isinstance(extent, str) and extent not in symbols:
            raise ValueError(
                f"targets: {name} has the extent {extent!r}, but the symbols of the model are "
                f"{', '.join(symbols) or 'none'}"
            )
    return relax.TensorType([symbols.get(extent, extent) for extent in shape], dtype)


def _carriers(main: relax.Function, outputs: Sequence[relax.Var]) -> list[relax.Var]:
    """Return the inputs that define the symbolic extents of outputs where these are expressions,
    such as ``2 * n``."""
    extents = [extent for output in outputs for extent in _extents(output)]
    if all(isinstance(extent, (tirx.IntImm, tirx.Var)) for extent in extents):
        return []
    return [param for param in main.params if any(isinstance(e, tirx.Var) for e in _extents(param))]


def _extents(var: relax.Var) -> list:
    shape = var.ty.shape if isinstance(var.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []


def _check_extents(outputs: Sequence[relax.Var], loss: relax.Function) -> None:
    """Raise ValueError if a loss reads an output whose extents are known only at run time: it has
    no gradient."""
    read = {variable.name for variable in relax.analysis.free_vars(loss.body)}
    for output in outputs:
        is_known = isinstance(output.ty.shape, relax.ShapeExpr)
        if not is_known and output.name in read:
            raise ValueError(
                f"the loss reads the output {output.name}, whose extents are known only at run "
                f"time: its type is {output.ty}. Give the extents of the inputs from which the "
                "model computes them: from_model(..., shapes={...})"
            )


def results_of(function: relax.Function) -> list[relax.Expr]:
    """Return the results of a function: the elements of a tuple, or the only one."""
    result = function.body.body
    return tuple_fields(result) if isinstance(result.ty, relax.TupleType) else [result]


def _returning(
    function: relax.Function, params: Sequence[relax.Var], repeated: int = 0
) -> relax.Function:
    """Return a function that returns some of its parameters before its results, and its first
    results twice."""
    if not params and not repeated:
        return function
    results = results_of(function)
    returned = [*params, *results[:repeated], *results]
    body = relax.SeqExpr(function.body.blocks, relax.Tuple(returned))
    every = list(function.params)
    return relax.Function(
        every, normalized(every, body), is_pure=function.is_pure, attrs=function.attrs
    )


def _symbols(function: relax.Function) -> dict[str, tirx.Var]:
    """Return the symbolic extents of the parameters by their names."""
    shapes = [param.ty.shape for param in function.params if isinstance(param.ty, relax.TensorType)]
    extents = [extent for shape in shapes if shape is not None for extent in shape.values]
    return {extent.name: extent for extent in extents if isinstance(extent, tirx.Var)}
