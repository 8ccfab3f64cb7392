"""Token rows on disk, read through mmap.

A part is a folder: `index.json` and, per shard, little-endian files
`shard-00000.bin`   token ids of all rows one after another (uint16, or uint32 for a vocabulary over 65,536)
`shard-00000.mask`  one bit per token, first token in the highest bit, 1 where it is trained; only where `masks` is `rows`
`shard-00000.idx`   int64: row offsets (rows + 1), trained tokens (rows), UTF-8 bytes of the trained text (rows), and
                    where there is a `.meta`, the offsets of its lines (rows + 1)
`shard-00000.meta`  one JSON line per row; only where rows carry something beside tokens
`shard-00000.json`  sizes and hashes of the shard's files, written last: with it the shard is finished, without it not

Shards are written independently of each other, so that processes share the work and an interrupted run makes only the
unfinished ones again; `write_index` joins them into a part.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, overload

import numpy as np
import orjson

from dschat_core import storage
from dschat_core.errors import ConfigError, IntegrityError

Masks = Literal["rows", "all", "none"]
FORMAT_VERSION = 2
MAX_FILES_PER_SHARD = 4
SPARE_FILES = 256  # file descriptors left to everything else in the process


class ShardIndex(TypedDict):
    """`index.json`: what the part holds; `shards` are the rows of each shard."""

    version: int
    dtype: Literal["uint16", "uint32"]
    masks: Masks
    has_meta: bool
    rows: int
    tokens: int
    targets: int
    bytes: int
    shards: list[int]


class ShardFile(TypedDict):
    """A file of a shard: bytes, and the hex SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """A finished shard: its rows, tokens, trained tokens, UTF-8 bytes of the trained text, and its files by name.

    `dropped` counts the rows that were left out of it, by reason.
    """

    number: int
    rows: int
    tokens: int
    targets: int
    bytes: int
    files: dict[str, ShardFile]
    dropped: dict[str, int] = field(default_factory=dict)


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | np.ndarray) -> None:
        view = data if isinstance(data, bytes) else data.view(np.uint8).data
        self._file.write(view)
        self._digest.update(view)
        self.size += len(view)

    def close(self) -> ShardFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"size": self.size, "sha256": self._digest.hexdigest()}


class ShardWriter:
    """Writes one shard of a part; any number of them may be written at once, each by a writer of its own.

    Args:
        number: the shard's place in the part, from 0.
        vocab_size: above 65,536 ids take four bytes instead of two.
        masks: `rows`: each row brings its mask; `all`: every token but a row's first is trained; `none`: none is.
        has_meta: each row brings a JSON object.
    """

    def __init__(self, folder: Path, number: int, *, vocab_size: int, masks: Masks, has_meta: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Until this writer is done, what an earlier one left here is no finished shard.
        _info_path(folder, number).unlink(missing_ok=True)
        self._folder, self._number = folder, number
        self._dtype, self._masks, self._has_meta = _token_dtype(vocab_size), masks, has_meta
        suffixes = ["bin", *(["mask"] if masks == "rows" else []), *(["meta"] if has_meta else [])]
        self._files = {suffix: _HashedFile(folder / _name(number, suffix)) for suffix in suffixes}
        self._bits = np.zeros(0, dtype=bool)  # mask bits that do not fill a byte yet
        self._lengths: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._bytes: list[np.ndarray] = []
        self._line_sizes: list[int] = []

    def add_batch(
        self,
        values: np.ndarray,
        offsets: np.ndarray,
        *,
        mask: np.ndarray | None,
        num_bytes: np.ndarray,
        meta: Sequence[dict[str, Any]] | None,
    ) -> None:
        """Append rows.

        Args:
            values: ids of all rows one after another, integers (tokens,).
            offsets: row r is `values[offsets[r]:offsets[r + 1]]`, int64 (rows + 1,), from 0 to tokens.
            mask: where a token is trained, bool (tokens,); a row's first token has no context and never is. Given
                exactly where `masks` is `rows`.
            num_bytes: UTF-8 bytes of each row's trained text, int64 (rows,).
            meta: one object per row, exactly where `has_meta`.
        """
        lengths = np.diff(offsets)
        assert len(num_bytes) == len(lengths)
        assert (offsets[0], offsets[-1]) == (0, len(values))
        assert (mask is not None) == (self._masks == "rows")
        assert (meta is not None) == self._has_meta
        if len(values):
            assert values.min() >= 0
            assert values.max() <= np.iinfo(self._dtype).max
        self._files["bin"].write(np.ascontiguousarray(values, dtype=self._dtype))
        if mask is not None:
            assert len(mask) == len(values)
            trained = mask.astype(bool)
            trained[offsets[:-1][lengths > 0]] = False
            self._write_bits(trained)
            counts = np.concatenate([[0], np.cumsum(trained)])
            targets = counts[offsets[1:]] - counts[offsets[:-1]]
        else:
            targets = np.maximum(lengths - 1, 0) if self._masks == "all" else np.zeros_like(lengths)
        if meta is not None:
            assert len(meta) == len(lengths)
            lines = [orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in meta]
            self._files["meta"].write(b"".join(lines))
            self._line_sizes += map(len, lines)
        self._lengths.append(lengths)
        self._targets.append(targets)
        self._bytes.append(np.asarray(num_bytes))

    def _write_bits(self, trained: np.ndarray) -> None:
        bits = np.concatenate([self._bits, trained])
        whole = len(bits) // 8 * 8
        self._files["mask"].write(np.packbits(bits[:whole]))
        self._bits = bits[whole:]

    def close(self, dropped: Mapping[str, int] | None = None) -> ShardInfo:
        """Write what is left, force it all to disk, and then say in `shard-….json` that the shard is finished."""
        if self._masks == "rows":
            self._files["mask"].write(np.packbits(self._bits))
        lengths, targets, sizes = (
            np.concatenate(parts).astype("<i8") if parts else np.zeros(0, dtype="<i8")
            for parts in (self._lengths, self._targets, self._bytes)
        )
        columns = [_offsets(lengths), targets, sizes]
        if self._has_meta:
            columns.append(_offsets(np.array(self._line_sizes, dtype="<i8")))
        self._files["idx"] = _HashedFile(self._folder / _name(self._number, "idx"))
        self._files["idx"].write(np.concatenate(columns))
        info = ShardInfo(
            number=self._number,
            rows=len(lengths),
            tokens=int(lengths.sum()),
            targets=int(targets.sum()),
            bytes=int(sizes.sum()),
            files={_name(self._number, suffix): file.close() for suffix, file in sorted(self._files.items())},
            dropped=dict(dropped or {}),
        )
        storage.write(str(_info_path(self._folder, self._number)), orjson.dumps(asdict(info)) + b"\n")
        return info


def write_index(
    folder: Path, infos: Sequence[ShardInfo], *, vocab_size: int, masks: Masks, has_meta: bool
) -> ShardIndex:
    """Join finished shards, numbered from 0 without a gap, into a part: writes and returns `index.json`."""
    infos = sorted(infos, key=lambda info: info.number)
    assert [info.number for info in infos] == list(range(len(infos)))
    index: ShardIndex = {
        "version": FORMAT_VERSION,
        "dtype": "uint16" if _token_dtype(vocab_size).itemsize == 2 else "uint32",
        "masks": masks,
        "has_meta": has_meta,
        "rows": sum(info.rows for info in infos),
        "tokens": sum(info.tokens for info in infos),
        "targets": sum(info.targets for info in infos),
        "bytes": sum(info.bytes for info in infos),
        "shards": [info.rows for info in infos],
    }
    folder.mkdir(parents=True, exist_ok=True)
    storage.write(str(folder / "index.json"), orjson.dumps(index, option=orjson.OPT_INDENT_2) + b"\n")
    return index


def read_info(folder: Path, number: int) -> ShardInfo | None:
    """What a finished shard says of itself; None where it is not finished, or the record of it is damaged."""
    try:
        return ShardInfo(**orjson.loads(_info_path(folder, number).read_bytes()))
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return None


def check_shard(folder: Path, info: ShardInfo) -> str | None:
    """What is wrong with a finished shard's files (the first that is missing, cut or altered); None if nothing is."""
    for name, expected in info.files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
        if (digest := storage.sha256_file(path)) != expected["sha256"]:
            return f"{name} has SHA-256 {digest[:12]}… instead of {expected['sha256'][:12]}…"
    return None


def _name(number: int, suffix: str) -> str:
    return f"shard-{number:05d}.{suffix}"


def info_name(number: int) -> str:
    """The file that says a shard is finished."""
    return _name(number, "json")


def _info_path(folder: Path, number: int) -> Path:
    return folder / info_name(number)


def _token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, dtype=lengths.dtype), np.cumsum(lengths)])


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────


class _Spans(NamedTuple):
    """Where rows lie: the shard of each, and its first token and the one after its last there."""

    shards: list[int]
    starts: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray


class ShardReader:
    """Random access to the rows of a part, through maps of its files: 16 bytes of memory per row, whatever its length.

    Attributes:
        lengths: tokens of each row, int64 (rows,).
        num_targets: trained tokens of each row, int64 (rows,); a token at position 0 has no context and is never one.
        num_bytes: UTF-8 bytes of each row's trained text, int64 (rows,).
        meta: what each row carries beside its tokens (preferences: `kind`; prompts: `messages`), or None.

    Raises:
        IntegrityError: a file is missing, has another size than the index says, or is damaged. (Hashes are checked
            where an artifact is fetched, not here.)
        ConfigError: the part has more shards than the process may open files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = self._read_index()
        _allow_open_files(MAX_FILES_PER_SHARD * len(self.index["shards"]))
        self._dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self._tokens: list[memoryview] = []
        self._bits: list[memoryview] = []
        lines: list[tuple[memoryview, np.ndarray]] = []
        self._indices: list[np.ndarray] = []
        for shard, rows in enumerate(self.index["shards"]):
            columns = self._read_columns(shard, rows)
            self._indices.append(columns)
            num_tokens = int(columns[rows])
            self._tokens.append(self._map(_name(shard, "bin"), num_tokens * self._dtype.itemsize))
            if self.index["masks"] == "rows":
                self._bits.append(self._map(_name(shard, "mask"), -(-num_tokens // 8)))
            if self.index["has_meta"]:
                ends = columns[3 * rows + 1 :]
                lines.append((self._map(_name(shard, "meta"), int(ends[-1])), ends))
        shards = self.index["shards"]
        self._first_row = _offsets(np.array(shards, dtype=np.int64))
        token_counts = [columns[rows] for columns, rows in zip(self._indices, shards, strict=True)]
        self._first_token = _offsets(np.array(token_counts, dtype=np.int64))
        self.lengths: np.ndarray = _joined(
            [np.diff(columns[: rows + 1]) for columns, rows in zip(self._indices, shards, strict=True)]
        )
        self._offsets = _offsets(self.lengths)
        self.meta: MetaLines | None = MetaLines(self, lines, self._first_row) if self.index["has_meta"] else None

    def __reduce__(self) -> tuple[type[ShardReader], tuple[Path]]:
        # Maps do not travel: another process (a loader's worker) makes its own, of the same pages.
        return type(self), (self.folder,)

    @cached_property
    def num_targets(self) -> np.ndarray:
        return self._column(1)

    @cached_property
    def num_bytes(self) -> np.ndarray:
        return self._column(2)

    def _column(self, place: int) -> np.ndarray:
        return _joined(
            [
                columns[place * rows + 1 : (place + 1) * rows + 1]
                for columns, rows in zip(self._indices, self.index["shards"], strict=True)
            ]
        )

    def __len__(self) -> int:
        return self.index["rows"]

    def tokens(self, row: int) -> np.ndarray:
        """Ids of a row, int64 (T,)."""
        return self._ids(self._spans([row]))

    def mask(self, row: int) -> np.ndarray:
        """Where a row's tokens are trained, bool (T,): mask[t] speaks of token t itself, predicted from those before."""
        return self._mask(self._spans([row]))

    def gather(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Several rows at once, in the order given: ids int64 (T,), mask bool (T,), and their lengths int64 (rows,).

        The way to read a packed row or a whole micro-batch: a single row costs ten times as much.
        """
        spans = self._spans(rows)
        return self._ids(spans), self._mask(spans), spans.lengths

    def _spans(self, rows: Sequence[int] | np.ndarray) -> _Spans:
        chosen = np.asarray(rows, dtype=np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            wrong = chosen[(chosen < 0) | (chosen >= len(self))][0]
            raise IndexError(f"row {wrong} of {len(self)} in {self.folder}")
        shards = np.searchsorted(self._first_row, chosen, side="right") - 1
        starts, lengths = self._offsets[chosen] - self._first_token[shards], self.lengths[chosen]
        return _Spans(shards.tolist(), starts, starts + lengths, lengths)

    def _ids(self, spans: _Spans) -> np.ndarray:
        size = self._dtype.itemsize
        joined = _slices([self._tokens[shard] for shard in spans.shards], spans.starts * size, spans.ends * size)
        return np.frombuffer(joined, dtype=self._dtype).astype(np.int64)

    def _mask(self, spans: _Spans) -> np.ndarray:
        if self.index["masks"] != "rows":
            mask = np.full(spans.lengths.sum(), self.index["masks"] == "all")
            mask[(np.cumsum(spans.lengths) - spans.lengths)[spans.lengths > 0]] = False
            return mask
        # Rows share their first and last byte with their neighbours.
        first, last = spans.starts >> 3, (spans.ends + 7) >> 3
        packed = _slices([self._bits[shard] for shard in spans.shards], first, last)
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8)).data
        sizes = (last - first) * 8
        begin = np.cumsum(sizes) - sizes + (spans.starts & 7)
        return np.frombuffer(_slices([bits] * len(sizes), begin, begin + spans.lengths), dtype=bool)

    # ── opening ─────────────────────────────────────────────────────────────────────────────────────────

    def _read_index(self) -> ShardIndex:
        try:
            index: ShardIndex = orjson.loads((self.folder / "index.json").read_bytes())
            version = index["version"]
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise self._broken("index.json", str(error) or type(error).__name__) from None
        if version != FORMAT_VERSION:
            raise IntegrityError(
                f"the shards in {self.folder} are of format {version}, this version reads {FORMAT_VERSION}",
                why="another version of dschat wrote them",
                fix="dschat run CONFIG makes them again from the validated rows",
            )
        if index.keys() != ShardIndex.__annotations__.keys() or sum(index["shards"]) != index["rows"]:
            raise self._broken("index.json", "its entries are not those of an index, or its rows do not add up")
        return index

    def _read_columns(self, shard: int, rows: int) -> np.ndarray:
        """A shard's index, checked: offsets from 0 that never fall, whatever happened to the file."""
        name = _name(shard, "idx")
        count = 4 * rows + 2 if self.index["has_meta"] else 3 * rows + 1
        columns = np.frombuffer(self._map(name, 8 * count), dtype="<i8")
        tables = [columns[: rows + 1], *([columns[3 * rows + 1 :]] if self.index["has_meta"] else [])]
        if any(table[0] != 0 or (np.diff(table) < 0).any() for table in tables):
            raise self._broken(name, "its offsets are not in order")
        return columns

    def _map(self, name: str, size: int) -> memoryview:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise self._broken(name, f"it has {found} bytes instead of {size}")
                # An empty file can't be mapped.
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
        except OSError as error:
            raise self._broken(name, str(error)) from None

    def _broken(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"cannot read the shards in {self.folder}: {name}",
            why=why,
            fix=f"dschat verify {self.folder.parent} --repair, then run again",
        )


class MetaLines(Sequence[dict[str, Any]]):
    """The JSON objects of a part's rows, parsed when they are asked for."""

    def __init__(self, reader: ShardReader, shards: list[tuple[memoryview, np.ndarray]], first_row: np.ndarray) -> None:
        self._reader, self._shards, self._first_row = reader, shards, first_row

    def __len__(self) -> int:
        return int(self._first_row[-1])

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, row: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self._reader.folder}")
        shard = int(np.searchsorted(self._first_row, row, side="right")) - 1
        lines, offsets = self._shards[shard]
        local = row - int(self._first_row[shard])
        try:
            found: dict[str, Any] = orjson.loads(lines[int(offsets[local]) : int(offsets[local + 1])])
        except orjson.JSONDecodeError as error:
            raise self._reader._broken(_name(shard, "meta"), f"line {local + 1}: {error}") from None
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def _slices(views: Sequence[memoryview], starts: np.ndarray, ends: np.ndarray) -> bytearray:
    """`views[i][starts[i]:ends[i]]` of all i, joined: the fastest way out of a map (np.concatenate takes 3 × as long)."""
    spans = zip(views, starts.tolist(), ends.tolist(), strict=True)
    return bytearray().join([view[start:end] for view, start, end in spans])


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, dtype=np.int64)


def _allow_open_files(count: int) -> None:
    """Raise the soft limit on open files to what `count` maps need: each holds a descriptor, and the default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE_FILES + len(os.listdir("/dev/fd"))
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"the part needs {count:,} open files, the process may have {hard:,}",
            why="each shard is mapped, and the hard limit on open files is too low for so many",
            fix=f"ulimit -Hn {needed}, or raise tokenization.shard_bytes",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def trained_bytes(ids: np.ndarray, mask: np.ndarray, sizes: np.ndarray) -> int:
    """UTF-8 bytes of the trained tokens of a row; `sizes` from `chat_template.token_bytes`."""
    trained = mask.copy()
    trained[:1] = False
    return int(sizes[ids[trained]].sum())
