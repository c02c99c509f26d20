"""Training: one compiled step of a loss and an optimizer, and ``relax.training``'s trainer."""

from ._lora import Adapter, Lora, lora
from ._quantized import QuantizedWeight
from ._static import static_plan
from .history import History
from .memory import Memory, memory_of
from .optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Muon,
    Optimizer,
    RMSprop,
)
from .setup_trainer import SetupTrainer, append_loss
from .step import StepResult, TrainStep, train_step
from .trainer import Trainer

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adapter",
    "History",
    "Lion",
    "Lora",
    "Memory",
    "Muon",
    "Optimizer",
    "QuantizedWeight",
    "RMSprop",
    "SetupTrainer",
    "StepResult",
    "TrainStep",
    "Trainer",
    "append_loss",
    "lora",
    "memory_of",
    "static_plan",
    "train_step",
]
