"""ONNX graphs before the import: roles of constants, folded extents, and loops written out."""
