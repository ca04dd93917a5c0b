"""The shared memory of a block by compute capability, which decides how large the tiles of a kernel may be."""

from __future__ import annotations

LARGE, MIDDLE, SMALL = 227 << 10, 163 << 10, 99 << 10  # what a block may have at most
RESERVE = 3 << 10  # of which a kernel may need some beside its tiles
BLOCK_BYTES = {80: MIDDLE, 86: SMALL, 87: MIDDLE, 89: SMALL, 90: LARGE, 100: LARGE, 103: LARGE, 110: LARGE}


def block_bytes(capability: int) -> int:
    """Of a block at that capability (80, 90, ...). One that is not listed, as 12.0, counts as the smallest."""
    return BLOCK_BYTES.get(capability, SMALL)


def least_shared_bytes(major: int, minor: int) -> int:
    """What the tiles of a program may take."""
    return block_bytes(10 * major + minor) - RESERVE
