"""The pass that differentiates functions, and its parts."""
