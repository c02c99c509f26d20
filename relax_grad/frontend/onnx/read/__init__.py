"""Models of ONNX as protocol buffers: their files, their validity, and their nodes."""
