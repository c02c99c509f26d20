"""``python -m relax_grad``: see :mod:`relax_grad.cli`."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
