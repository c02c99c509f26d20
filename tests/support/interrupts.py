"""Interrupts between two bytecodes, and the state of a trainer to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection

from relax_grad.training import Trainer

COUNTERS = ("seed", "steps", "updates", "skipped", "epoch", "batch")


class Interrupt(BaseException):
    pass


@contextlib.contextmanager
def interrupted(number: int, files: Collection[str]):
    """Interrupt the bytecode of this number, from 0, of the code in some files; give a list that
    gets its place."""
    left, place = number, []

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if left == 0 and not place:
                place.append((frame.f_code.co_name, frame.f_lineno))
                raise Interrupt
            left -= 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield place
    except Interrupt:
        pass
    finally:
        sys.settrace(previous)


def state_of(trained: Trainer) -> dict:
    """Return all that a file would have, apart from the times of steps."""
    groups = (trained.params, trained.states, trained.optimizer_state)
    tensors = {name: value.numpy().tobytes() for group in groups for name, value in group.items()}
    columns = dataclasses.asdict(trained.history)
    columns.pop("seconds")
    columns = {name: repr(values) for name, values in columns.items()}  # NaN is not NaN
    return {**tensors, **columns, **{name: getattr(trained, name) for name in COUNTERS}}
