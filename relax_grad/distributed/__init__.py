"""Training by several workers on Disco, TVM's distributed runtime: sessions with collectives for
CPUs, and passes.

Workers of one machine share memory. Several machines need the extra ``distributed``, which brings
PyTorch: its library gloo moves the bytes between them.
"""

from . import transform
from .elastic import run
from .errors import WorkerError
from .session import Session, session
from .shards import Shard, along, column, join_values, row, shard_values
from .tensor_trainer import TensorParallelTrainer, tensor_parallel
from .trainer import DataParallelTrainer, data_parallel

__all__ = [
    "DataParallelTrainer",
    "Session",
    "Shard",
    "TensorParallelTrainer",
    "WorkerError",
    "along",
    "column",
    "data_parallel",
    "join_values",
    "row",
    "run",
    "session",
    "shard_values",
    "tensor_parallel",
    "transform",
]
