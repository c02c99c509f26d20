"""Opens folders that are exported anew meanwhile, by the library for C.

The arguments are the library, a folder to work in, and the folders of two steps with the input x
(4, 3) in float32. The parameter ``w`` is 1 in the first one, whose loss is the mean square, and 2
in the second one, whose loss is ten times that. It ends with an error if a loss is wrong.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time

import numpy as np
from c_trainer import Trainer, error_of

_, _, HOME, *EXPORTED = sys.argv
LOSSES = 9.0, 360.0
MODEL = os.path.join(HOME, "model")
X = np.ones((4, 3), "float32")
#: Seconds, in which some opens see no change.
PAUSE = 0.02
FILES = "step.so", "state.safetensors", "manifest.json"


def put(number: int) -> None:
    """Put one of the folders in the place of the model, as an export does."""
    new, old = f"{MODEL}.new", f"{MODEL}.old"
    shutil.copytree(EXPORTED[number], new)
    if os.path.exists(MODEL):
        os.rename(MODEL, old)
    os.rename(new, MODEL)
    shutil.rmtree(old, ignore_errors=True)


def put_files(number: int) -> None:
    """Replace the files of the model one by one, as an export does in a mount point."""
    os.unlink(os.path.join(MODEL, "manifest.json"))
    for name in FILES:
        shutil.copy(os.path.join(EXPORTED[number], name), f"{MODEL}.part")
        os.rename(f"{MODEL}.part", os.path.join(MODEL, name))


def new_library() -> None:
    """A library runs under its path, whatever the process has loaded from there before."""
    put(0)
    first = Trainer(MODEL)
    assert first.step(X) == LOSSES[0]
    put(1)
    second = Trainer(MODEL)
    assert second.step(X) == LOSSES[1]
    first.close()
    second.close()
    for number in (1, 0):
        put(number)
        trainer = Trainer(MODEL)
        assert trainer.step(X) == LOSSES[number]
        trainer.close()


def two_trainers() -> None:
    """Trainers of a folder are closed in any order, and have states of their own."""
    put(0)
    alone = Trainer(MODEL)
    losses = [alone.step(X) for _ in range(3)]
    alone.close()
    for last in (0, 1):
        trainers = [Trainer(MODEL), Trainer(MODEL)]
        assert [trainer.step(X) for trainer in trainers] == [losses[0]] * 2
        trainers[1 - last].close()
        assert [trainers[last].step(X) for _ in range(2)] == losses[1:]
        trainers[last].close()


def exchanged(replace, opens: int) -> None:
    """Each trainer has the step and the state of one export.

    A slow disk may leave no moment with a whole folder for long: this tries until one opens.
    """
    put(0)
    is_over, losses = threading.Event(), set()
    tried, end = 0, time.monotonic() + 60

    def exchange() -> None:
        number = 0
        while not is_over.is_set():
            number = 1 - number
            replace(number)
            time.sleep(PAUSE)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        while tried < opens or (not losses and time.monotonic() < end):
            tried += 1
            opened: list[Trainer] = []
            error = error_of(lambda opened=opened: opened.append(Trainer(MODEL)))
            if error:  # there is none at this moment
                assert "cannot be read: No such file" in error, error
            for trainer in opened:
                losses.add(trainer.step(X))
                trainer.close()
    finally:
        is_over.set()
        thread.join()
    assert losses
    assert losses <= set(LOSSES), losses


def states_of_another_step() -> None:
    """A folder with the state of another step is refused; one that its trainer saved is not."""
    put(0)
    trainer, state = Trainer(MODEL), os.path.join(MODEL, "state.safetensors")
    trainer.step(X)
    trainer.save(state)
    values = trainer.state()
    again = Trainer(MODEL)
    assert again.state() == values
    other = os.path.join(EXPORTED[1], "state.safetensors")
    shutil.copy(other, state)
    error = error_of(lambda: Trainer(MODEL))
    assert "state.safetensors is of another step than" in error, error
    trainer.load(other)  # that is what the caller asks for
    assert trainer.step(X) == LOSSES[1] / 10
    trainer.save(state)
    assert Trainer(MODEL).state() == trainer.state()


def files_of_python() -> None:
    """What Python writes is read, and written again."""
    put(0)
    trainer = Trainer(MODEL)
    trainer.load(os.path.join(HOME, "python"))
    trainer.save(os.path.join(HOME, "c"))
    name = "é" * 127 + "x"  # as long as a name can be
    for _ in range(2):
        trainer.save(os.path.join(HOME, name))
    assert not [file for file in os.listdir(HOME) if file.endswith(".part")]


def places_of_no_file() -> None:
    """A pipe, a device or a folder is no place for a state, and stays."""
    put(0)
    trainer, pipe = Trainer(MODEL), os.path.join(HOME, "pipe")
    os.mkfifo(pipe)
    for path, reason in ((pipe, "no regular file"), ("/dev/null", "no regular file"), (HOME, "a")):
        error = error_of(lambda path=path: trainer.save(path))
        assert f"cannot be written: it is {reason}" in error, error
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


if __name__ == "__main__":
    new_library()
    two_trainers()
    exchanged(put, 40)
    exchanged(put_files, 40)
    states_of_another_step()
    files_of_python()
    places_of_no_file()
    print("each folder is one thing")
