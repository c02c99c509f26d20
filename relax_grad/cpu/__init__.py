"""The compiler for CPUs: a pipeline of passes, kernels, schedules, and machine code.

It takes operators by their names and attributes and knows no rule of differentiation; nothing that differentiates
imports it.
"""
