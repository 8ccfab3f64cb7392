"""Exact and near duplicates; of each cluster the first row stays.

Exact: equal but for width, case, punctuation and white space. Near: Jaccard similarity of character shingles (3 wide in
Chinese, Japanese and Korean, 5 elsewhere) at or above a threshold; MinHash bands propose pairs and the true similarity
decides, so that nothing is dropped on a hash's word. Texts under 20 characters are compared exactly only: in so short
ones a letter is a difference.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

MIN_NEAR_CHARACTERS = 20
NUM_BANDS, BAND_ROWS = 16, 8
BLOCK_CHARACTERS = 1 << 16
MAX_COMPARED_PER_BUCKET = 8

_NOT_WORD = re.compile(r"[\W_]+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
_BASE = np.uint64(0x9E3779B97F4A7C15)


def comparable(text: str) -> str:
    """The text as duplicates are compared: NFKC, case folded, without punctuation and white space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NOT_WORD.sub("", folded) or "".join(folded.split())


def exact_key(form: str) -> bytes:
    """16 bytes that two comparable forms share only if they are equal."""
    return xxhash.xxh3_128_digest(form.encode("utf-8", "surrogatepass"))


def find_duplicates(forms: Sequence[str], *, near_jaccard: float) -> np.ndarray:
    """For each text, in order, the index of the first one it duplicates, or its own.

    Args:
        forms: texts as `comparable` makes them.
        near_jaccard: similarity from which two texts are one; 1 finds exact duplicates only.

    Returns:
        int64 (texts,).
    """
    first: dict[bytes, int] = {}
    parent = np.array([first.setdefault(exact_key(form), i) for i, form in enumerate(forms)], dtype=np.int64)
    if near_jaccard < 1.0:
        distinct = [i for i in first.values() if len(forms[i]) >= MIN_NEAR_CHARACTERS]
        for a, b in _similar_pairs([forms[i] for i in distinct], near_jaccard):
            _union(parent, distinct[a], distinct[b])
    return np.array([_root(parent, i) for i in range(len(parent))], dtype=np.int64)


def _root(parent: np.ndarray, i: int) -> int:
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = int(parent[i])
    return i


def _union(parent: np.ndarray, a: int, b: int) -> None:
    a, b = _root(parent, a), _root(parent, b)
    parent[max(a, b)] = min(a, b)


def _similar_pairs(forms: list[str], threshold: float) -> Iterator[tuple[int, int]]:
    """Index pairs whose similarity reaches the threshold, enough of them to connect every cluster."""
    widths = [3 if 3 * len(_CJK.findall(form)) > len(form) else 5 for form in forms]
    signatures = _signatures(forms, widths)
    sets: dict[int, np.ndarray] = {}
    compared: set[tuple[int, int]] = set()

    def shingle_set(i: int) -> np.ndarray:
        if i not in sets:
            if len(sets) > 10_000:
                sets.clear()
            sets[i] = np.unique(_shingles(_codes(forms[i]), widths[i]))
        return sets[i]

    for bucket in _buckets(signatures):
        kept: list[int] = []
        for i in bucket:
            for other in kept[:MAX_COMPARED_PER_BUCKET]:
                if (other, i) in compared or widths[other] != widths[i]:
                    continue
                compared.add((other, i))
                if jaccard(shingle_set(other), shingle_set(i)) >= threshold:
                    yield other, i
                    break
            else:
                kept.append(i)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Similarity of two sets given as arrays of distinct values."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / (len(a) + len(b) - shared)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)


def _shingles(codes: np.ndarray, width: int) -> np.ndarray:
    """A hash of each run of `width` characters, uint64 (characters - width + 1,)."""
    count = len(codes) - width + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(width):
        hashes = hashes * _BASE + codes[i : i + count]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(32))


def _signatures(forms: list[str], widths: list[int]) -> np.ndarray:
    """MinHash signatures, uint32 (texts, NUM_BANDS * BAND_ROWS)."""
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 2**63, NUM_BANDS * BAND_ROWS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    signatures = np.empty((len(forms), len(factors)), dtype=np.uint32)
    for width in (3, 5):
        block: list[int] = []
        characters = 0
        chosen = [i for i, w in enumerate(widths) if w == width]
        for position, i in enumerate(chosen):
            block.append(i)
            characters += len(forms[i])
            # Small blocks stay in the processor's cache through all the factors.
            if characters >= BLOCK_CHARACTERS or position == len(chosen) - 1:
                hashes = [_shingles(_codes(forms[j]), width) for j in block]
                starts = np.concatenate([[0], np.cumsum([len(h) for h in hashes])[:-1]])
                joined = np.concatenate(hashes)
                for column, factor in enumerate(factors):
                    values = (joined * factor) >> np.uint64(32)
                    signatures[block, column] = np.minimum.reduceat(values, starts)
                block, characters = [], 0
    return signatures


def _buckets(signatures: np.ndarray) -> Iterator[list[int]]:
    """Texts that share a band, in order, band by band."""
    for band in range(NUM_BANDS):
        rows = signatures[:, band * BAND_ROWS : (band + 1) * BAND_ROWS]
        keys = np.zeros(len(rows), dtype=np.uint64)
        for column in range(BAND_ROWS):
            keys = keys * _BASE + rows[:, column]
        order = np.argsort(keys, kind="stable")
        edges = np.concatenate([[0], np.flatnonzero(np.diff(keys[order])) + 1, [len(order)]])
        for group in np.flatnonzero(np.diff(edges) > 1):
            yield order[edges[group] : edges[group + 1]].tolist()
