"""A hook of Python's start: in these processes PyTorch appears not to be installed
(``processes.without_torch``)."""

from __future__ import annotations

import sys

sys.modules["torch"] = None
