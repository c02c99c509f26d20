"""Recomputation of results of the forward pass in the backward pass of a training step."""
