"""Token rows on disk, read through mmap.

A part is a folder: `index.json` and, per shard, little-endian files
`shard-00000.bin`   token ids of all rows one after another (uint16, or uint32 for a vocabulary over 65,536)
`shard-00000.mask`  uint8 per token, 1 where it is trained; only where `masks` is `rows`
`shard-00000.idx`   int64: row offsets (rows + 1), trained tokens (rows), UTF-8 bytes of the trained text (rows)
`shard-00000.meta`  one JSON line per row; only where rows carry something beside tokens
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypedDict

import numpy as np
import orjson

from dschat_core.errors import IntegrityError

Masks = Literal["rows", "all", "none"]
FORMAT_VERSION = 1


class ShardIndex(TypedDict):
    """`index.json`."""

    version: int
    dtype: Literal["uint16", "uint32"]
    masks: Masks
    has_meta: bool
    rows: int
    tokens: int
    targets: int
    bytes: int
    shards: list[int]


class ShardWriter:
    """Appends rows; a new shard is begun when the current one has reached `shard_bytes`.

    Args:
        masks: `rows`: each row brings its mask; `all`: every token but a row's first is trained; `none`: none is.
    """

    def __init__(
        self, folder: Path, *, vocab_size: int, masks: Masks, shard_bytes: int, has_meta: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self.masks: Masks = masks
        self.has_meta = has_meta
        self.shard_bytes = shard_bytes
        self.files: list[str] = []
        self.shards: list[int] = []
        self._totals = {"tokens": 0, "targets": 0, "bytes": 0}
        self._open: dict[str, BinaryIO] = {}
        self._begin()

    def _begin(self) -> None:
        self._offsets, self._targets, self._bytes = [0], list[int](), list[int]()
        suffixes = ["bin", *(["mask"] if self.masks == "rows" else []), *(["meta"] if self.has_meta else [])]
        self._open = {suffix: (self.folder / self._name(suffix)).open("wb") for suffix in suffixes}

    def _name(self, suffix: str) -> str:
        return f"shard-{len(self.shards):05d}.{suffix}"

    def add(
        self,
        ids: np.ndarray,
        mask: np.ndarray | None = None,
        *,
        num_bytes: int,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Append a row: ids (T,), mask (T,) if masks are per row, and the bytes of its trained text."""
        if self._offsets[-1] * self.dtype.itemsize >= self.shard_bytes:
            self._finish()
            self._begin()
        self._open["bin"].write(ids.astype(self.dtype).tobytes())
        if self.masks == "rows":
            assert mask is not None
            assert len(mask) == len(ids)
            self._open["mask"].write(mask.astype(np.uint8).tobytes())
            num_targets = int(mask[1:].sum())
        else:
            num_targets = max(len(ids) - 1, 0) if self.masks == "all" else 0
        if self.has_meta:
            self._open["meta"].write(orjson.dumps(meta) + b"\n")
        self._offsets.append(self._offsets[-1] + len(ids))
        self._targets.append(num_targets)
        self._bytes.append(num_bytes)

    def _finish(self) -> None:
        for file in self._open.values():
            file.close()
        index = np.array([*self._offsets, *self._targets, *self._bytes], dtype="<i8")
        (self.folder / self._name("idx")).write_bytes(index.tobytes())
        self.files += [self._name(suffix) for suffix in (*self._open, "idx")]
        self.shards.append(len(self._targets))
        self._totals["tokens"] += self._offsets[-1]
        self._totals["targets"] += sum(self._targets)
        self._totals["bytes"] += sum(self._bytes)

    def close(self) -> ShardIndex:
        """Finish the last shard and write the index; `files` then names all files, relative to the folder."""
        self._finish()
        index: ShardIndex = {
            "version": FORMAT_VERSION,
            "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
            "masks": self.masks,
            "has_meta": self.has_meta,
            "rows": sum(self.shards),
            "tokens": self._totals["tokens"],
            "targets": self._totals["targets"],
            "bytes": self._totals["bytes"],
            "shards": self.shards,
        }
        (self.folder / "index.json").write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2) + b"\n")
        self.files.append("index.json")
        return index


class ShardReader:
    """Random access to the rows of a part.

    Attributes:
        lengths: tokens of each row, int64 (rows,).
        num_targets: trained tokens of each row, int64 (rows,); a token at position 0 has no context and is never one.
        num_bytes: UTF-8 bytes of each row's trained text, int64 (rows,).
        meta: what each row carries beside its tokens (preferences: `kind`; prompts: `messages`), or None.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.index: ShardIndex = orjson.loads((self.folder / "index.json").read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise self._broken("index.json", str(error)) from None
        self._dtype = np.dtype("<u2" if self.index["dtype"] == "uint16" else "<u4")
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        targets, sizes = [], []
        for shard, rows in enumerate(self.index["shards"]):
            index = self._map(f"shard-{shard:05d}.idx", np.dtype("<i8"), 3 * rows + 1)
            offsets = index[: rows + 1]
            num_tokens = int(offsets[-1])
            self._offsets.append(offsets)
            targets.append(index[rows + 1 : 2 * rows + 1])
            sizes.append(index[2 * rows + 1 :])
            self._tokens.append(self._map(f"shard-{shard:05d}.bin", self._dtype, num_tokens))
            if self.index["masks"] == "rows":
                self._masks.append(self._map(f"shard-{shard:05d}.mask", np.dtype(np.uint8), num_tokens))
        self._starts = np.concatenate([[0], np.cumsum(self.index["shards"])])
        self.lengths: np.ndarray = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        self.num_targets: np.ndarray = np.concatenate(targets)
        self.num_bytes: np.ndarray = np.concatenate(sizes)
        self.meta: list[dict[str, Any]] | None = self._read_meta() if self.index["has_meta"] else None

    def __len__(self) -> int:
        return self.index["rows"]

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
        path = self.folder / name
        try:
            if path.stat().st_size != count * dtype.itemsize:
                raise self._broken(name, f"it has {path.stat().st_size} bytes instead of {count * dtype.itemsize}")
            if count == 0:
                return np.empty(0, dtype=dtype)
            with path.open("rb") as file:
                return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
        except OSError as error:
            raise self._broken(name, str(error)) from None

    def _read_meta(self) -> list[dict[str, Any]]:
        lines: list[bytes] = []
        for shard in range(len(self.index["shards"])):
            lines += (self.folder / f"shard-{shard:05d}.meta").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]

    def _broken(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"cannot read the shards in {self.folder}: {name}",
            why=why,
            fix=f"dschat verify {self.folder.parent}, remove the artifact and run again",
        )

    def _locate(self, row: int) -> tuple[int, int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.folder}")
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        local = row - int(self._starts[shard])
        return shard, int(self._offsets[shard][local]), int(self._offsets[shard][local + 1])

    def tokens(self, row: int) -> np.ndarray:
        """Ids of a row, int64 (T,)."""
        shard, start, end = self._locate(row)
        return self._tokens[shard][start:end].astype(np.int64)

    def mask(self, row: int) -> np.ndarray:
        """Where a row's tokens are trained, bool (T,): mask[t] speaks of token t itself, predicted from those before."""
        shard, start, end = self._locate(row)
        mask = np.full(end - start, self.index["masks"] == "all")
        if self.index["masks"] == "rows":
            mask[:] = self._masks[shard][start:end]
        mask[:1] = False
        return mask


def trained_bytes(ids: np.ndarray, mask: np.ndarray, sizes: np.ndarray) -> int:
    """UTF-8 bytes of the trained tokens of a row; `sizes` from `chat_template.token_bytes`."""
    trained = mask.copy()
    trained[:1] = False
    return int(sizes[ids[trained]].sum())


def as_arrays(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """A ragged list of lists as (values int64, offsets int64 (rows + 1,))."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter((value for row in rows for value in row), dtype=np.int64, count=int(offsets[-1]))
    return values, offsets
