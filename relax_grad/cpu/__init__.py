"""The compiler for CPUs: a pipeline of passes, kernels, schedules, and machine code.

It identifies operators by their names and attributes, and uses no rules of differentiation. The
modules for differentiation do not import it.
"""
