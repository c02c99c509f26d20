"""The programs for AArch64 that the tests of this folder run under qemu-user."""

from __future__ import annotations

from pathlib import Path

import arm
import pytest


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """Return the folder of the programs; skip the test if they cannot be built or run."""
    pytest.importorskip("safetensors", reason="tensors go to the emulator in files")
    if arm.missing() is not None:
        pytest.skip(arm.missing())
    return arm.build(tmp_path_factory.mktemp("arm"))
