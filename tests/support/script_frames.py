"""A plugin of pytest by which TVMScript is parsed without the source of every frame of the stack.

TVM's decorators call ``inspect.stack()`` for each function and module. It looks for the source of
every frame among all loaded modules, which takes up to a second below pytest once PyTorch is
imported. TVM reads the source line of one frame. Here, a frame reads its source line when asked.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from types import FrameType


class Frame:
    """What ``inspect.FrameInfo`` tells of a frame."""

    def __init__(self, frame: FrameType):
        self.frame = frame
        self.filename = frame.f_code.co_filename
        self.lineno = frame.f_lineno
        self.function = frame.f_code.co_name

    @property
    def code_context(self) -> list[str] | None:
        """The source line, or None without a source."""
        linecache.checkcache(self.filename)
        line = linecache.getline(self.filename, self.lineno, self.frame.f_globals)
        return [line] if line else None


class Inspect:
    """The module ``inspect``, with frames that read their source line when asked."""

    def __getattr__(self, name: str):
        return getattr(inspect, name)

    def getouterframes(self, frame: FrameType | None, context: int = 1) -> list[Frame]:
        frames = []
        while frame is not None:
            frames.append(Frame(frame))
            frame = frame.f_back
        return frames

    def stack(self, context: int = 1) -> list[Frame]:
        return self.getouterframes(sys._getframe(1), context)


def pytest_configure() -> None:
    import tvm.relax.script
    import tvm.script  # noqa: F401

    for name, module in list(sys.modules.items()):
        is_script = name.startswith("tvm.") and ".script." in name
        if is_script and vars(module).get("inspect") is inspect:
            module.inspect = Inspect()
