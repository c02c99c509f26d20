"""Offsets of buffers with known lifetimes."""

import numpy as np

from relax_grad.static._places import Slot, place


def made(size, *moments):
    slot = Slot(size)
    for moment in moments:
        slot.use(moment)
    return slot


def test_disjoint_lifetimes_share_bytes():
    slots = [made(100, 0, 1), made(100, 2, 3), made(100, 1, 2)]
    assert place(slots) == 256
    assert [slot.offset for slot in slots] == [0, 0, 128]


def test_a_buffer_without_uses_takes_nothing():
    assert place([Slot(1000)]) == 0
    assert place([]) == 0


def test_random_buffers_never_overlap_while_both_are_in_use():
    rng = np.random.default_rng(0)
    for _ in range(50):
        slots = [
            made(int(rng.integers(1, 500)), *map(int, rng.integers(0, 12, 2))) for _ in range(20)
        ]
        total = place(slots)
        moments: list[dict[int, int]] = [{} for _ in range(12)]
        for i, slot in enumerate(slots):
            assert slot.offset % 64 == 0
            assert slot.offset + slot.bytes <= total
            for moment in range(slot.first, slot.last + 1):
                for byte in range(slot.offset, slot.offset + slot.bytes):
                    assert moments[moment].setdefault(byte, i) == i
        # No moment needs more than all, and the plan is not far from the largest one.
        most = max(len(moment) for moment in moments)
        assert most <= total <= 2 * most + 64 * len(slots)
