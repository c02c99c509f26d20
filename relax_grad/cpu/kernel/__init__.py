"""Fast CPU kernels for computations that ``relax_grad.topi`` defines as tensor expressions.

Each module generates ``tirx.PrimFunc`` for given shapes and attributes, and for the vectors,
registers and cores of a CPU (:class:`relax_grad.target.CPU`). The kernels do not know Relax;
``relax_grad.cpu.dispatch`` selects the kernel for a call of an operator.
"""
