"""Tensor expressions of the backward operators, and replacements of TVM's own.

They do not depend on Relax, and support static and symbolic shapes. Sums by index are explicit
loops for the target in scope; everything else is left to the scheduler.
"""
