"""The names of a module's inputs and results, and the symbolic extents that the user asks for."""
