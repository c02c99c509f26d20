"""Modules whose forward and backward run through TVM."""
