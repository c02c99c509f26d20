"""Modules as graphs of core operators, with the roles of their inputs and outputs."""
