"""Fast CPU kernels of what ``relax_grad.topi`` defines as tensor expressions.

Each module generates ``tirx.PrimFunc`` for shapes and attributes given, and for a CPU's vectors, registers and
cores (:class:`relax_grad.target.CPU`). None knows Relax; ``relax_grad.cpu.dispatch`` decides which call of an
operator a kernel takes.
"""
