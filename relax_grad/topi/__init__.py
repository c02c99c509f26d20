"""Tensor expressions: of the backward operators, and of what takes the place of TVM's own.

They know nothing of Relax, and take static and symbolic shapes. Sums by index write their loops themselves, as the
target wants them; all else is left to be scheduled.
"""
