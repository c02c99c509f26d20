"""Files of results: what was measured where, and a line for each row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path


def about(processor: str, threads: int) -> dict[str, object]:
    """Return the date, the machine and the versions of a measurement."""
    import torch
    import tvm

    import relax_grad

    return {
        "date": date.today().isoformat(),
        "processor": processor,
        "target": relax_grad.target.host().attrs["mcpu"],
        "threads": threads,
        "tvm": tvm.__version__,
        "torch": torch.__version__,
    }


def write(path: Path, heads: Mapping[str, object], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a JSON object of these keys and of ``rows``, each on a line of its own."""
    first = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in heads.items())
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n{first} "rows": [\n{lines}\n ]\n}}\n')
