"""Functions on modules, bindings, types and layouts of Relax and TIR that every part uses."""
