"""Randomness is derived, not stored: every stream is seeded from what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(*names: int | str) -> int:
    """A seed (63 bits) for the random stream that `names` identify, such as (seed, stage, step)."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
