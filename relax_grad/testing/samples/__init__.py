"""Samples of every operator with a gradient: what the checker, the tests and the command line run."""

from . import activation, conv, index, loss, manipulate, norm, pool, search, statistical
from ._sample import Sample, register_samples, sampled_operators, samples

__all__ = ["Sample", "register_samples", "sampled_operators", "samples"]
