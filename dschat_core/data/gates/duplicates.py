"""Exact and near duplicates; of each cluster the first row stays.

Exact: equal but for width, case, punctuation, white space and invisible characters. Near: Jaccard similarity of
character shingles (3 wide in Chinese, Japanese and Korean, 5 elsewhere) at or above a threshold; MinHash bands propose
pairs and the true similarity decides, so that nothing is dropped on a hash's word. Texts under 20 characters are
compared exactly only: in so short ones a letter is a difference.

Two steps, so that rows can stream through many processes and the tables can lie on disk: `signatures` is a pure
function of a block of texts, `find_first` resolves the signatures of all rows. What it finds is a function of the rows
and their order alone: memory, partitions and blocks change the time it takes, not the outcome.

MinHash and banding: Broder 1997; Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3. Buckets too large
to compare pair by pair are joined by prefix filtering: Bayardo, Ma, Srikant, Scaling up all pairs similarity search, 2007.
"""

from __future__ import annotations

import re
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from dschat_core.data.unicode import nfkc

MIN_NEAR_CHARACTERS = 20
CJK_WIDTH, OTHER_WIDTH = 3, 5

# A pair of similarity s shares a band with probability 1 - (1 - s^5)^20: 0.9996 at 0.8, 0.97 at 0.7, 5e-4 at 0.12.
NUM_BANDS, BAND_ROWS = 20, 5

# So many characters at a time stay in the processor's cache through all the hash functions.
BLOCK_CHARACTERS = 1 << 16

# Characters whose shingles are compared at a time; some 50 bytes of memory each.
BATCH_CHARACTERS = 1 << 20

# Buckets up to this size are compared pair by pair, larger ones by the rarest shingles of each member.
MAX_PAIRED = 16
MAX_PREFIX = 64

PAIRS_PER_BATCH = 2048

# Bytes that grouping takes per row of a partition, measured; what a partition is sized by.
GROUPING_BYTES = 64
MAX_PARTITIONS = 64
SPILLED_ROWS = 1 << 15

_LOWER = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_ASCII_NOT_WORD = bytes(code for code in range(128) if not chr(code).isalnum())
# What NFKC leaves without a letter, deleted first: it is much of what makes NFKC leave its fast path.
_COMMON_MARKS = re.compile(
    r"[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2010-\u2027\u2030-\u205e\u3000-\u3003\u3008-\u3020\u3030"
    r"\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff"
    r"\uffa0\U000e0000-\U000e0fff]+"
)
_INVISIBLE = re.compile(
    r"[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff"
    r"\uffa0\U000e0000-\U000e0fff]+"
)
_NOT_WORD = re.compile(r"[\W_]+")
_BASE = np.uint32(0x9E3779B1)
_BASE_64 = np.uint64(0x9E3779B97F4A7C15)
# Odd, so that each multiplication permutes the hashes.
_FACTORS = np.random.default_rng(0).integers(0, 2**31, NUM_BANDS * BAND_ROWS, dtype=np.uint32) * np.uint32(
    2
) + np.uint32(1)


class Forms(Protocol):
    """Comparable forms by row: a list, or a file of them."""

    def __getitem__(self, row: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Signatures:
    """What `find_first` needs of a block of texts besides their forms.

    Attributes:
        keys: uint64 (texts, 2): xxh3-128 of each form.
        bands: uint64 (texts, NUM_BANDS), or (texts, 0) where near duplicates are not asked for; zeros where width is 0.
        widths: uint8 (texts,): characters in a shingle; 0 for texts that are compared exactly only.
    """

    keys: np.ndarray
    bands: np.ndarray
    widths: np.ndarray


def comparable(text: str) -> str:
    """The text as duplicates are compared: NFKC, case folded, without punctuation, symbols, white and invisible space.

    A text without a letter or digit keeps its punctuation. Marks that make a letter (accents, vowel signs) stay.
    """
    if text.isascii():
        return text.encode().translate(_LOWER, _ASCII_NOT_WORD).decode() or "".join(text.split())
    # In UTF-8 no byte below 128 is part of another character.
    words = text.encode("utf-8", "surrogatepass").translate(_LOWER, _ASCII_NOT_WORD).decode("utf-8", "surrogatepass")
    folded = nfkc(_COMMON_MARKS.sub("", words)).casefold()
    return _NOT_WORD.sub(_letter_marks, folded) or "".join(_INVISIBLE.sub("", nfkc(text)).casefold().split())


def _letter_marks(run: re.Match[str]) -> str:
    return "".join(character for character in run[0] if unicodedata.category(character) in ("Mn", "Mc"))


# ── one block ───────────────────────────────────────────────────────────────────────────────────────────


def signatures(forms: Sequence[str], *, near: bool = True) -> Signatures:
    """Keys and MinHash bands of a block of texts; a pure function of each text, whatever its block.

    Args:
        forms: texts as `comparable` makes them.
        near: False leaves out the bands.
    """
    digest = xxhash.xxh3_128_digest
    keys = np.frombuffer(b"".join([digest(form.encode("utf-8", "surrogatepass")) for form in forms]), dtype="<u8")
    bands = np.zeros((len(forms), NUM_BANDS if near else 0), dtype=np.uint64)
    widths = np.zeros(len(forms), dtype=np.uint8)
    if near:
        lengths = np.fromiter(map(len, forms), dtype=np.int64, count=len(forms))
        for start, end in _runs(lengths, BLOCK_CHARACTERS):
            codes, ends = _codes(forms[start:end]), np.cumsum(lengths[start:end])
            widths[start:end] = _widths(codes, ends, lengths[start:end])
            for width in (CJK_WIDTH, OTHER_WIDTH):
                chosen = np.flatnonzero(widths[start:end] == width)
                if len(chosen):
                    hashes, counts = _shingles(codes, ends, chosen, width)
                    bands[start + chosen] = _bands(hashes, counts)
    return Signatures(keys.reshape(-1, 2).astype(np.uint64), bands, widths)


def _runs(lengths: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of up to `limit` characters, or of a single longer row."""
    ends = np.concatenate([[0], np.cumsum(lengths)])
    start = 0
    while start < len(lengths):
        end = max(start + 1, int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1)
        yield start, end
        start = end


def _codes(forms: Sequence[str]) -> np.ndarray:
    """The characters of all texts, one after the other, uint32."""
    return np.frombuffer("".join(forms).encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _widths(codes: np.ndarray, ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Shingle widths, uint8 (texts,): CJK_WIDTH where over a third of the characters are of those scripts."""
    cjk = (codes - 0x3040 <= 0x9FFF - 0x3040) | (codes - 0xAC00 <= 0xD7AF - 0xAC00) | (codes - 0x20000 < 0x20000)
    before = np.concatenate([[0], np.cumsum(cjk)])
    widths = np.where(3 * (before[ends] - before[ends - lengths]) > lengths, CJK_WIDTH, OTHER_WIDTH)
    return np.where(lengths >= MIN_NEAR_CHARACTERS, widths, 0).astype(np.uint8)


def _shingles(codes: np.ndarray, ends: np.ndarray, chosen: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of each run of `width` characters in the chosen texts, in order, with repeats.

    Args:
        codes: all texts' characters; ends: where each text ends, int64 (texts,).
        chosen: ascending indices of texts of at least `width` characters.

    Returns:
        hashes, uint32 (shingles,), and how many each chosen text has, int64 (chosen,).
    """
    starts = np.concatenate([[0], ends[:-1]])[chosen]
    counts = ends[chosen] - starts - (width - 1)
    if len(chosen) < len(ends):
        codes = codes[_ranges(starts, counts + (width - 1))]
        starts = np.concatenate([[0], np.cumsum(counts + (width - 1))[:-1]])
    total = len(codes) - (width - 1)
    hashes = codes[:total] + _BASE
    for i in range(1, width):
        hashes *= _BASE
        hashes ^= hashes >> np.uint32(15)
        hashes += codes[i : i + total]
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    # Drops the runs that reach from one text into the next.
    inside = np.ones(total, dtype=bool)
    for i in range(width - 1):
        inside[starts[1:] - 1 - i] = False
    return hashes[inside], counts


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The indices starts[0] … starts[0] + counts[0] - 1, then those of the next range, int64 (counts.sum(),)."""
    offsets = starts - np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.arange(counts.sum()) + np.repeat(offsets, counts)


def _bands(hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Band hashes of texts given by their shingles, uint64 (texts, NUM_BANDS)."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    minima = np.empty((NUM_BANDS * BAND_ROWS, len(counts)), dtype=np.uint32)
    values = np.empty_like(hashes)
    for row, factor in enumerate(_FACTORS):
        np.multiply(hashes, factor, out=values)
        np.minimum.reduceat(values, starts, out=minima[row])
    bands = np.zeros((NUM_BANDS, len(counts)), dtype=np.uint64)
    for row in range(BAND_ROWS):
        bands ^= minima[row::BAND_ROWS]
        bands *= _BASE_64
        bands ^= bands >> np.uint64(29)
    return bands.T


# ── all rows ────────────────────────────────────────────────────────────────────────────────────────────


def find_first(
    keys: np.ndarray,
    bands: np.ndarray,
    widths: np.ndarray,
    forms: Forms,
    *,
    near_jaccard: float,
    memory_bytes: int | None = None,
    folder: Path | None = None,
) -> np.ndarray:
    """For each row the first row of its cluster, itself where it is the first or the only one.

    Rows are of one cluster if a chain of pairs joins them, each equal or of a Jaccard similarity of at least
    `near_jaccard`. The bands find 99.96 % of the pairs at 0.8, 97 % at 0.7, 48 % at 0.5.

    Args:
        keys, bands, widths: see `Signatures`; arrays or memory maps.
        forms: `forms[row]` is the row's comparable form.
        near_jaccard: similarity from which two rows are one; 1 finds exact duplicates only.
        memory_bytes: above it the tables are sorted into temporary files by ranges of their keys, and read back one
            at a time. About 20 bytes per row stay in memory regardless.
        folder: where those files are made and removed, some 320 bytes per row; none: the system's temporary folder.

    Returns:
        int64 (rows,).
    """
    parent = np.arange(len(keys))
    with tempfile.TemporaryDirectory(prefix="duplicates-", dir=folder) as spilled:
        for rows, starts in _buckets(keys[:, :1], np.arange(len(keys)), memory_bytes, Path(spilled)):
            _unite_equal(parent, keys, rows, starts)
    if near_jaccard >= 1.0 or not bands.shape[1]:
        return parent
    chosen = np.flatnonzero((parent == np.arange(len(keys))) & (widths > 0))
    with tempfile.TemporaryDirectory(prefix="duplicates-", dir=folder) as spilled:
        for rows, starts in _buckets(bands, chosen, memory_bytes, Path(spilled)):
            _unite_near(parent, rows, starts, forms, widths, near_jaccard)
    return _roots(parent, np.arange(len(keys)))


def _buckets(
    columns: np.ndarray, chosen: np.ndarray, memory_bytes: int | None, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The chosen rows that share a value, column by column; see `_grouped`."""
    partitions = -(-len(chosen) * GROUPING_BYTES // memory_bytes) if memory_bytes else 1
    if partitions <= 1:
        for column in range(columns.shape[1]):
            yield _grouped(np.ascontiguousarray(columns[chosen, column]), chosen)
        return
    partitions = min(partitions, MAX_PARTITIONS)
    files = _spilled(columns, chosen, partitions, folder)
    for path in files:
        if path.exists():
            values, rows = np.fromfile(path, dtype=np.uint64).reshape(-1, 2).T
            path.unlink()
            yield _grouped(np.ascontiguousarray(values), rows.astype(np.int64))


def _spilled(columns: np.ndarray, chosen: np.ndarray, partitions: int, folder: Path) -> list[Path]:
    """Sort (value, row) into one file per column and range of values; ranges without rows have no file."""
    files = [[folder / f"{column}-{part}" for part in range(partitions)] for column in range(columns.shape[1])]
    for start in range(0, len(chosen), SPILLED_ROWS):
        rows = chosen[start : start + SPILLED_ROWS]
        block = columns[rows]
        for column, paths in enumerate(files):
            values = block[:, column]
            part = ((values >> np.uint64(32)) * np.uint64(partitions)) >> np.uint64(32)
            order = np.argsort(part)
            pairs = np.stack([values[order], rows[order].astype(np.uint64)], axis=1)
            edges = np.searchsorted(part[order], np.arange(partitions + 1))
            for path, first, end in zip(paths, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                if first < end:
                    with path.open("ab") as file:
                        pairs[first:end].tofile(file)
    return [path for paths in files for path in paths]


def _grouped(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that share their value with another, as groups one after the other.

    Returns:
        rows, ascending in each group, int64 (members,), and where each group starts, int64 (groups,).
    """
    order = np.argsort(values)
    ordered = values[order]
    same = ordered[1:] == ordered[:-1]
    member = np.zeros(len(rows), dtype=bool)
    member[1:] |= same
    member[:-1] |= same
    order, ordered = order[member], ordered[member]
    found = rows[order]
    found = found[np.lexsort((found, ordered))]
    return found, np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))


def _unite_equal(parent: np.ndarray, keys: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> None:
    """Make the first row of each exact key the parent of the others; the groups share half of the key."""
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(rows)))
    rest = keys[rows, 1]
    order = np.lexsort((rows, rest, group))
    rows, rest, group = rows[order], rest[order], group[order]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (rest[1:] != rest[:-1]) | (group[1:] != group[:-1])
    parent[rows] = rows[first][np.cumsum(first) - 1]


def _unite_near(
    parent: np.ndarray, rows: np.ndarray, starts: np.ndarray, forms: Forms, widths: np.ndarray, threshold: float
) -> None:
    """Join the similar rows of each bucket of a band.

    Pairs that are already joined need no comparison: leaving them out never changes which rows end up together.
    """
    sizes = np.diff(starts, append=len(rows))
    small = sizes <= MAX_PAIRED
    # The first of a bucket against the others comes first: in a cluster that settles nearly all pairs.
    for pairs in (_star(rows, starts[small], sizes[small]), _rest(rows, starts[small], sizes[small])):
        _unite_similar(parent, pairs, forms, widths, threshold)
    for start, size in zip(starts[~small].tolist(), sizes[~small].tolist(), strict=True):
        members = rows[start : start + size]
        if np.ptp(_roots(parent, members)):
            for width in (CJK_WIDTH, OTHER_WIDTH):
                alike = members[widths[members] == width]
                if len(alike) > 1:
                    for pairs in _prefix_pairs(alike, forms, width, threshold):
                        _unite_similar(parent, pairs, forms, widths, threshold)


def _star(rows: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The first row of each bucket with each other one, int64 (pairs, 2)."""
    return np.stack([np.repeat(rows[starts], sizes - 1), rows[_ranges(starts + 1, sizes - 1)]], axis=1)


def _rest(rows: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """All other pairs of rows of a bucket, int64 (pairs, 2)."""
    found = [np.empty((0, 2), dtype=np.int64)]
    for size in np.unique(sizes):
        first, second = np.triu_indices(size - 1, k=1)
        at = starts[sizes == size, None] + 1
        found.append(np.stack([rows[at + first].ravel(), rows[at + second].ravel()], axis=1))
    return np.concatenate(found)


def _prefix_pairs(rows: np.ndarray, forms: Forms, width: int, threshold: float) -> Iterator[np.ndarray]:
    """Pairs of a large bucket that may be similar, int64 (pairs, 2), in batches; their number grows with the rows.

    Two sets of similarity t share one of the first n - ceil(t n) + 1 of their n members, whatever the order, and have
    enough of them left from there on. The rarest come first here, so that what all rows have in common (boilerplate, a
    template) proposes no pairs. A shingle that over MAX_PAIRED rows have among their rarest ties each to the first and
    to the next of these rows only.
    """
    # A table of some hundred counters per row, by the hash's upper bits.
    bits = min(len(rows).bit_length() + 8, 20)
    shift = np.uint32(32 - bits)
    counts = np.zeros(1 << bits, dtype=np.uint32)
    for _, sets, _ in _batches(rows, forms, width):
        counts += np.bincount(sets.astype(np.uint32) >> shift, minlength=len(counts)).astype(np.uint32)
    # Eighths of powers of two fit in 8 bits beside the row and the hash; any order serves that is the same for all rows.
    mantissa, exponent = np.frexp(counts.astype(np.float64))
    rarity = np.minimum(8 * exponent + (16 * mantissa - 8).astype(np.int32), 255).clip(min=0).astype(np.uint64)
    postings, set_sizes = [], []
    for first, sets, sizes in _batches(rows, forms, width):
        hashes = sets.astype(np.uint32)
        ranked = (sets >> np.uint64(32) << np.uint64(40)) | (rarity[hashes >> shift] << np.uint64(32)) | hashes
        ranked.sort()
        prefix = np.minimum(sizes - np.ceil(threshold * sizes - 1e-9).astype(np.int64) + 1, MAX_PREFIX)
        rank = _ranges(np.zeros_like(prefix), prefix)
        taken = ranked[np.repeat(np.cumsum(sizes) - sizes, prefix) + rank]
        owner = np.repeat(np.arange(len(sizes)), prefix) + first
        postings.append(taken << np.uint64(32) | (owner * MAX_PREFIX + rank).astype(np.uint64))
        set_sizes.append(sizes)
    listed = np.concatenate(postings)
    listed.sort()
    shared = (listed[1:] ^ listed[:-1]) < np.uint64(1 << 32)
    listed = listed[np.append(shared, False) | np.append(False, shared)]
    owner, rank = np.divmod((listed & np.uint64(0xFFFFFFFF)).astype(np.int64), MAX_PREFIX)
    set_size = np.concatenate(set_sizes)[owner]
    shingle = listed >> np.uint64(32)
    starts = np.flatnonzero(np.diff(shingle, prepend=~shingle[:1]))
    sizes = np.diff(starts, append=len(listed))
    short = sizes <= MAX_PAIRED
    long_starts, long_sizes = starts[sizes > MAX_PAIRED], sizes[sizes > MAX_PAIRED]
    places = np.arange(len(listed))
    following = _ranges(long_starts, long_sizes - 1)
    for pairs in (
        _star(places, long_starts, long_sizes),
        np.stack([following, following + 1], axis=1),
        _star(places, starts[short], sizes[short]),
        _rest(places, starts[short], sizes[short]),
    ):
        # Of two sets that share nothing rarer, what comes from here on is all that they can share.
        needed = threshold / (1 + threshold) * set_size[pairs].sum(axis=1)
        possible = pairs[(set_size - rank)[pairs].min(axis=1) >= needed - 1e-9]
        yield rows[_distinct(owner[possible])]


def _distinct(pairs: np.ndarray) -> np.ndarray:
    """The pairs in ascending order, each once; rows are under 2^32."""
    packed = np.unique(pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1].astype(np.uint64))
    return np.stack([packed >> np.uint64(32), packed & np.uint64(0xFFFFFFFF)], axis=1).astype(np.int64)


def _unite_similar(parent: np.ndarray, pairs: np.ndarray, forms: Forms, widths: np.ndarray, threshold: float) -> None:
    """Join the pairs whose similarity reaches the threshold; pairs of different scripts are not compared."""
    pairs = _open_pairs(parent, pairs[widths[pairs[:, 0]] == widths[pairs[:, 1]]])
    for width in (CJK_WIDTH, OTHER_WIDTH):
        of_width = _distinct(pairs[widths[pairs[:, 0]] == width])
        for start in range(0, len(of_width), PAIRS_PER_BATCH):
            batch = _open_pairs(parent, of_width[start : start + PAIRS_PER_BATCH])
            if len(batch):
                _unite(parent, batch[_similar(batch, forms, width, threshold)])


def _similar(pairs: np.ndarray, forms: Forms, width: int, threshold: float) -> np.ndarray:
    """Whether each pair's Jaccard similarity of shingle sets reaches the threshold, bool (pairs,)."""
    rows, places = np.unique(pairs, return_inverse=True)
    parts = list(_batches(rows, forms, width))
    hashes = np.concatenate([sets for _, sets, _ in parts]) & np.uint64(0xFFFFFFFF)
    sizes = np.concatenate([counts for _, _, counts in parts])
    starts = np.cumsum(sizes) - sizes
    places = places.reshape(-1, 2)
    both = sizes[places]
    similar = np.zeros(len(pairs), dtype=bool)
    # Sets of too different sizes can't be similar.
    possible = np.flatnonzero(both.min(axis=1) >= threshold * both.max(axis=1))
    for first, end in _runs(both[possible].sum(axis=1), BATCH_CHARACTERS):
        chosen = possible[first:end]
        ordinals = np.repeat(np.arange(len(chosen), dtype=np.uint64) << np.uint64(32), both[chosen].sum(axis=1))
        merged = hashes[_ranges(starts[places[chosen]].ravel(), both[chosen].ravel())] | ordinals
        merged.sort()
        twice = merged[1:][merged[1:] == merged[:-1]] >> np.uint64(32)
        shared = np.bincount(twice.astype(np.int64), minlength=len(chosen))
        similar[chosen] = shared / (both[chosen].sum(axis=1) - shared) >= threshold
    return similar


def _batches(rows: np.ndarray, forms: Forms, width: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The shingle sets of rows, some at a time.

    Yields:
        The index of the batch's first row, its sets as `index in the batch << 32 | hash` in ascending order, uint64,
        and the size of each set, int64 (rows of the batch,).
    """
    texts: list[str] = []
    characters = done = 0
    for row in rows.tolist():
        text = forms[row]
        if texts and characters + len(text) > BATCH_CHARACTERS:
            yield done, *_sets(texts, width)
            done += len(texts)
            texts, characters = [], 0
        texts.append(text)
        characters += len(text)
    if texts:
        yield done, *_sets(texts, width)


def _sets(texts: list[str], width: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))
    hashes, counts = _shingles(_codes(texts), ends, np.arange(len(texts)), width)
    ordinals = np.repeat(np.arange(len(texts), dtype=np.uint64) << np.uint64(32), counts)
    members = ordinals | hashes
    members.sort()
    members = members[np.concatenate([[True], members[1:] != members[:-1]])]
    return members, np.bincount((members >> np.uint64(32)).astype(np.int64), minlength=len(texts))


# ── sets of rows ────────────────────────────────────────────────────────────────────────────────────────


def _open_pairs(parent: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The pairs that are not joined yet."""
    roots = _roots(parent, pairs)
    return pairs[roots[:, 0] != roots[:, 1]]


def _unite(parent: np.ndarray, pairs: np.ndarray) -> None:
    """Join pairs; the smallest row of a set is its root."""
    while len(pairs := _open_pairs(parent, pairs)):
        roots = _roots(parent, pairs)
        np.minimum.at(parent, roots.max(axis=1), roots.min(axis=1))


def _roots(parent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The root of each row, of the shape of `rows`; halves the paths to them on the way."""
    while True:
        up = parent[rows]
        top = parent[up]
        if np.array_equal(up, top):
            return up
        parent[rows] = top
