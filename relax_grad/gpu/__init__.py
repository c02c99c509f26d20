"""The pipeline for GPUs: TVM's own stages and schedules, with the optimizations of training steps
that depend on no processor.

The import of ``pipeline`` lets :func:`relax_grad.pipeline` compile for CUDA.
"""
