"""Passes that insert the collectives of training by several workers."""

from .buckets import BUCKET_BYTES, reduce_gradients
from .data_parallel import DataParallel
from .tensor_parallel import TensorParallel

__all__ = ["BUCKET_BYTES", "DataParallel", "TensorParallel", "reduce_gradients"]
