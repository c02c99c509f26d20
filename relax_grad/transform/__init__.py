"""Passes over modules."""

from .dispatch import DispatchKernels
from .gradient import Gradient
from .schedule import ScheduleLoops

__all__ = ["DispatchKernels", "Gradient", "ScheduleLoops"]
