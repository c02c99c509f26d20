"""The compilation pipeline: for CPUs, with kernels, fusion and schedules, and for the devices that
register their passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tvm
from tvm import relax

from .._collector import paused
from ..ir.module import check_defined
from .target import CPU


def pipeline(
    target: tvm.target.Target | str | dict | None = None,
    winograd_tile: int | None = 2,
    compile_functions: bool = False,
    symbol_prefix: str = "",
) -> tvm.transform.Pass:
    """Return the pipeline that optimizes and compiles a module.

    On a CPU, kernels replace the operators that have them. The other operators are legalized, fused
    with their neighbours, and scheduled with parallel and vectorised loops. For ``"cuda"``, TVM's
    rules schedule the functions; half precision is computed in float32, operators are joined,
    element-wise functions with common operands become one kernel, and donated arguments are written
    in place, as on a CPU. For other targets, the pipeline is TVM's own.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        The target of the compilation; by default the current target. Its ``mcpu`` determines the
        width of vectors. :func:`relax_grad.target.host` returns the target of this machine.
    winograd_tile : int or None
        The computation of convolutions by Winograd's filtering: 2, 4, or 0 for direct sums. See
        :class:`relax_grad.transform.DispatchKernels`. It is for CPUs.
    compile_functions : bool
        Whether the last pass compiles the tensor functions to machine code. It uses as many threads
        as there are cores, and the directory of :func:`relax_grad.cache`. The pipeline that
        ``tvm.compile`` finds by the name ``"relax_grad"`` does so. Otherwise the functions stay in
        the module, and TVM compiles them in one thread.
    symbol_prefix : str
        A prefix for the names of the tensor functions: programs that are linked into one library
        need different ones.

    Raises
    ------
    TypeError
        If ``symbol_prefix`` is not a string.
    ValueError
        If ``winograd_tile`` has another value. The pass itself raises it if there is no target, or
        if a function is not well-formed.

    Examples
    --------
    >>> import relax_grad, tvm
    >>> from tvm import relax
    >>> x = relax.Var("x", relax.TensorType((32, 32), "float32"))
    >>> bb = relax.BlockBuilder()
    >>> with bb.function("main", [x]):
    ...     with bb.dataflow():
    ...         y = bb.emit_output(relax.op.matmul(x, x))
    ...     _ = bb.emit_func_output(y)
    >>> target = relax_grad.target.host()
    >>> executable = tvm.compile(bb.get(), target, relax_pipeline="relax_grad")
    >>> pipeline = relax_grad.pipeline(target, winograd_tile=4)
    >>> executable = tvm.compile(bb.get(), target, relax_pipeline=pipeline)
    """

    # These imports are local because the import of kernels and schedules takes a while.
    from .codegen.declarations import Declarations
    from .codegen.early import Early
    from .passes.dispatch import DeclareKernels, DispatchKernels, checked_tile
    from .stages import passes

    tile = checked_tile(winograd_tile)
    if not isinstance(symbol_prefix, str):
        raise TypeError(f"symbol_prefix must be a string, but it is {symbol_prefix!r}")

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = tvm.target.Target.current() if target is None else tvm.target.Target(target)
        if chosen is None:
            raise ValueError("the pipeline needs a target: pass one to it or to tvm.compile")
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                check_defined(mod, function, variable.name_hint)
        if CPU.of(chosen) is None:
            return _for_device(chosen)(mod)
        declarations = Declarations.for_run() if compile_functions else None
        if declarations is None:
            with chosen, paused():
                dispatch = DispatchKernels(chosen, tile)
                stages = passes(chosen, dispatch, compile_functions, None, symbol_prefix)
                return tvm.transform.Sequential(list(stages))(mod)
        with chosen, paused(), Early(declarations) as early:
            declare = DeclareKernels(chosen, tile, declarations.kernel)
            stages = passes(chosen, declare, True, declarations, symbol_prefix, early)
            return declarations.completed(tvm.transform.Sequential(list(stages))(mod))

    return run


#: The functions that return the passes for a target which is no CPU, by its kind.
_STAGES: dict[str, Callable[[tvm.target.Target], Iterable[tvm.transform.Pass]]] = {}


def register_stages(
    kind: str, stages: Callable[[tvm.target.Target], Iterable[tvm.transform.Pass]]
) -> None:
    """Let :func:`pipeline` compile for another kind of target than CPUs.

    Parameters
    ----------
    kind : str
        TVM's name of the kind, such as ``"cuda"``.
    stages : Callable
        Returns the passes for a target.
    """
    _STAGES[kind] = stages


def stages_of(target: tvm.target.Target) -> list[tvm.transform.Pass] | None:
    """Return the passes for a target that is no CPU; None if there are none for its kind."""
    stages = _STAGES.get(target.kind.name)
    return None if stages is None else list(stages(target))


def _for_device(target: tvm.target.Target) -> tvm.transform.Pass:
    """Return the pipeline for a target that is no CPU."""
    steps = stages_of(target)
    if steps is None:
        return relax.get_default_pipeline(target)

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        with target, paused():
            return tvm.transform.Sequential(steps)(mod)

    return run


def _register(name: str) -> None:
    """Let ``tvm.compile(..., relax_pipeline=name)`` find the pipeline."""
    if name not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline(name)(_compiling)


def _compiling(**options: Any) -> tvm.transform.Pass:
    """Return the pipeline that also compiles tensor functions."""
    return pipeline(**{"compile_functions": True, **options})


_register("relax_grad")
