"""The compilation pipeline for CPUs: kernels, fusion, schedules."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as stages

from .target import CPU
from .transform.dispatch import DispatchKernels
from .transform.schedule import ScheduleLoops


def pipeline(target: tvm.target.Target | str | dict | None = None) -> tvm.transform.Pass:
    """Return the pipeline that compiles a module for a CPU as fast as relax_grad can make it.

    Operators that have kernels become calls of them; the others are legalized, fused with their
    neighbours, and scheduled in parallel and vectors. For what LLVM does not compile it is TVM's own pipeline.

    Parameters
    ----------
    target : tvm.target.Target or str or dict, optional
        What to compile for; by default the target that the module is compiled for. The target's ``mcpu``
        decides how wide vectors are: :func:`relax_grad.target.host` names this machine's.

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

    @tvm.transform.module_pass(opt_level=0, name="relax_grad.pipeline")
    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = tvm.target.Target.current() if target is None else tvm.target.Target(target)
        if chosen is None:
            raise ValueError("the pipeline needs a target: pass one to it or to tvm.compile")
        if CPU.of(chosen) is None:
            return relax.get_default_pipeline(chosen)(mod)
        with chosen:
            return tvm.transform.Sequential(
                [
                    *stages.library_dispatch_passes(chosen),
                    DispatchKernels(chosen),
                    *stages.legalize_passes(chosen),
                    *stages.dataflow_lower_passes(chosen),
                    # Behind what turns copies by reshape into views: it would not know a scheduled one.
                    ScheduleLoops(chosen),
                    *stages.finalize_passes(chosen),
                ]
            )(mod)

    return run


def _register(name: str) -> None:
    """Let ``tvm.compile(..., relax_pipeline=name)`` find the pipeline."""
    if name not in relax.pipeline.PIPELINE_MAP:
        relax.register_pipeline(name)(pipeline)


_register("relax_grad")
