"""Shared helpers for the modules, bindings, types and layouts of Relax and TIR."""
