"""The reference without PyTorch: the page is built, and says what its part on PyTorch models
needs."""

from __future__ import annotations

import importlib.util
import re

#: The reST blocks of a page, and the module whose import needs PyTorch.
_BLOCK = re.compile(r"^```\{eval-rst\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULE = "relax_grad.frontend.torch"
_NOTE = """```{note}
These pages were built without PyTorch, whose importer is documented by its docstrings. Install
PyTorch with `pip install '.[torch]'`, and build the pages again. ```"""


def without_torch(text: str) -> str:
    """Return the source of a page with a note in place of the reference of the importer of PyTorch
    models."""
    return _BLOCK.sub(lambda block: _NOTE if f":: {_MODULE}" in block[1] else block[0], text)


def _read(_app, _page: str, source: list[str]) -> None:
    source[0] = without_torch(source[0])


def setup(app):
    if importlib.util.find_spec("torch") is None:
        app.connect("source-read", _read)
    return {"parallel_read_safe": True}
