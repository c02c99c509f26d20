"""The compilation pipeline for CPUs: kernels, fusion, schedules."""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.module import check_defined
from .target import CPU


def pipeline(
    target: tvm.target.Target | str | dict | None = None,
    winograd_tile: int | None = 2,
    compile_functions: bool = False,
) -> tvm.transform.Pass:
    """Return the pipeline that compiles a module for a CPU as fast as relax_grad can make it.

    Operators that have kernels become calls of them; the others are legalized, fused with their
    neighbours, and scheduled in parallel and vectors. For what LLVM does not compile it is TVM's own pipeline.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What to compile for; by default the target that the module is compiled for. The target's ``mcpu``
        decides how wide vectors are: :func:`relax_grad.target.host` names this machine's.
    winograd_tile : int or None
        2, 4, or 0 for none: how convolutions with 3x3 kernels are computed, see
        :class:`relax_grad.transform.DispatchKernels`.
    compile_functions : bool
        Whether the tensor functions are compiled to machine code in the end, in as many threads as there are cores
        and with the directory of :func:`relax_grad.cache`. The pipeline that ``tvm.compile`` finds by the name
        ``"relax_grad"`` does so. Otherwise they stay in the module: TVM compiles them, in one thread.

    Raises
    ------
    ValueError
        Where ``winograd_tile`` is something else. The pass raises one where there is no target, and for a function
        that is not well-formed.

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
    """

    # Not before: importing kernels and schedules takes a while.
    from .codegen.declarations import Declarations
    from .passes.dispatch import DeclareKernels, DispatchKernels, checked_tile
    from .stages import passes

    tile = checked_tile(winograd_tile)

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = tvm.target.Target.current() if target is None else tvm.target.Target(target)
        if chosen is None:
            raise ValueError("the pipeline needs a target: pass one to it or to tvm.compile")
        for variable, function in mod.functions_items():
            if isinstance(function, relax.Function):
                check_defined(mod, function, variable.name_hint)
        if CPU.of(chosen) is None:
            return relax.get_default_pipeline(chosen)(mod)
        declarations = Declarations.for_run() if compile_functions else None
        with chosen:
            if declarations is None:
                dispatch = DispatchKernels(chosen, tile)
            else:
                dispatch = DeclareKernels(chosen, tile, declarations.kernel)
            stages = passes(chosen, dispatch, compile_functions, declarations)
            mod = tvm.transform.Sequential(list(stages))(mod)
            return mod if declarations is None else declarations.completed(mod)

    return run


def _register(name: str) -> None:
    """Let ``tvm.compile(..., relax_pipeline=name)`` find the pipeline."""
    if name not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline(name)(_compiling)


def _compiling(**options) -> tvm.transform.Pass:
    """Return the pipeline that compiles tensor functions too."""
    return pipeline(**{"compile_functions": True, **options})


_register("relax_grad")
