"""The targets of the measurements for each width of vectors."""

from __future__ import annotations

import pytest
import tvm
from _widths import WIDTHS, target_of

import relax_grad


@pytest.mark.parametrize(
    ("name", "of_avx2"),
    [
        ("cascadelake", "haswell"),
        ("haswell", "haswell"),
        ("emeraldrapids", "x86-64-v3"),
        ("znver5", "x86-64-v3"),
    ],
)
def test_avx2_is_compiled_for_processors_whose_kernels_suit_this_one(monkeypatch, name, of_avx2):
    host = tvm.target.Target({"kind": "llvm", "mcpu": name})
    monkeypatch.setattr(relax_grad.target, "host", lambda: host)
    assert {width: target_of(width) for width in WIDTHS} == {"host": name, "avx2": of_avx2}
    assert target_of(None) == name
