"""The trace of a module: the calls that torch.export ignores or misinterprets are noted or
replaced."""
