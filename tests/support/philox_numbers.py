"""The numbers of the generator Philox 4x32-10, in NumPy."""

from __future__ import annotations

import numpy as np

U64 = np.uint64
LOW = U64(0xFFFFFFFF)


def encrypted(counter, key):
    """Philox 4x32-10 in NumPy: the four words of each counter."""
    words = [np.asarray(word, U64) for word in counter]
    keys = [np.asarray(word, U64) for word in key]
    for i in range(10):
        if i:
            keys = [(k + U64(w)) & LOW for k, w in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
        first, second = words[0] * U64(0xD2511F53), words[2] * U64(0xCD9E8D57)
        words = [
            (second >> U64(32)) ^ words[1] ^ keys[0],
            second & LOW,
            (first >> U64(32)) ^ words[3] ^ keys[1],
            first & LOW,
        ]
    return np.stack(np.broadcast_arrays(*words)).astype("uint32")


def expected_bits(count, seed, stream):
    """The first words of a stream, in the order of ``random.bits``."""
    rows = -(-count // 64)
    block = np.arange(rows * 16, dtype=U64)
    seed, stream = U64(seed % 2**64), U64(stream % 2**64)
    counter = block & LOW, block >> U64(32), stream & LOW, stream >> U64(32)
    words = encrypted(counter, (seed & LOW, seed >> U64(32)))
    return words.reshape(4, rows, 16).transpose(1, 0, 2).ravel()[:count]
