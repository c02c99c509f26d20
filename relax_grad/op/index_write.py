"""The backward operators of the operators that write at indices."""
