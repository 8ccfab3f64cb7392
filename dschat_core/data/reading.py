"""Raw files → numbered lines and records, one at a time, within bounded memory.

A line ends on `\n` alone (U+2028 is legal inside JSON); a BOM on line 1 and a `\r` before the end are not part of it.
`.jsonl` and unknown endings are JSON lines, `.txt` is one document per line, `.parquet` one record per row; `.gz` and
`.zst` around the first two. A bad line becomes a record with a reason code; a file that can't be read at all is an
error that names it.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, cast

import orjson

from dschat_core import storage
from dschat_core.config import DataConfig, Dataset, DataSource
from dschat_core.errors import ConfigError

KEPT_BYTES = 4096
UTF8_BOM = b"\xef\xbb\xbf"
# UTF-32's little-endian mark begins with UTF-16's.
OTHER_BOMS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


@dataclass(frozen=True, slots=True)
class Record:
    """A line and what it holds: `value`, or the `reason` why it holds nothing; blank lines have neither."""

    file: str
    line: int
    offset: int | None
    raw: bytes
    value: Any = None
    reason: str | None = None


def input_files(sources: DataConfig) -> dict[Dataset, list[tuple[str, str]]]:
    """Data set → its files as (address, `train` or `heldout`), globs expanded, in name order per pattern.

    A file that is named as held-out is never read for training, even if a training glob matches it too.

    Raises:
        ConfigError: a file is missing or a glob matches none, each named with its key.
    """
    if missing := missing_files(sources):
        raise ConfigError(
            "missing input files: " + "; ".join(missing),
            why="no such file, or no file matches the pattern",
            fix="correct the path in the config; for the demo: python deployments/demo_data.py runs/data",
        )
    found: dict[Dataset, list[tuple[str, str]]] = {}
    for name, source in sources.sources().items():
        heldout = unique_files(source.heldout)
        train = [uri for uri in unique_files(source.train) if uri not in set(heldout)]
        found[name] = [(uri, "train") for uri in train] + [(uri, "heldout") for uri in heldout]
    return found


def missing_files(sources: DataConfig) -> list[str]:
    """The configured files and globs that match nothing, as `data.prompts.train: path`."""
    rows = []
    for name, source in sources.sources().items():
        for role, patterns in _roles(source):
            rows += [f"data.{name}.{role}: {pattern}" for pattern in patterns if not expand(pattern)]
    return rows


def _roles(source: DataSource) -> list[tuple[str, tuple[str, ...]]]:
    return [("train", source.train), ("heldout", source.heldout)]


def expand(pattern: str) -> list[str]:
    """The files that a path or glob names, sorted; a name with brackets that exists is itself."""
    with storage.explained("look for", pattern):
        files = storage.filesystem(pattern)
        if files.isfile(pattern):
            return [pattern]
        if not any(character in pattern for character in "*?["):
            return []
        matches = sorted(path for path, entry in files.glob(pattern, detail=True).items() if entry["type"] == "file")
    if not storage.is_remote(pattern):
        return [str(path) for path in matches]
    scheme = pattern.split("://", 1)[0]
    return [path if "://" in path else f"{scheme}://{path}" for path in matches]


def unique_files(patterns: Iterable[str]) -> list[str]:
    """The files that paths and globs name, each once, in name order per pattern."""
    return list(dict.fromkeys(uri for pattern in patterns for uri in expand(pattern)))


def read_records(uri: str, *, max_line_bytes: int) -> Iterator[Record]:
    """Every line of a file as a record, parsed by the file's ending.

    Raises:
        ConfigError: the file is missing, is not UTF-8 text but UTF-16, or its compression is broken.
    """
    name = uri.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".parquet"):
        yield from _read_parquet(uri)
        return
    parse = _text_document if name.endswith(".txt") else _json_object
    with storage.explained("read", uri):
        for line, offset, raw, reason in _read_lines(uri, max_line_bytes):
            if reason is not None:
                yield Record(uri, line, offset, raw[:KEPT_BYTES], reason=reason)
            elif not raw.strip():
                yield Record(uri, line, offset, raw)
            else:
                value, reason = parse(raw)
                yield Record(uri, line, offset, raw, value, reason)


def _read_lines(uri: str, max_line_bytes: int) -> Iterator[tuple[int, int, bytes, str | None]]:
    """(line number from 1, byte offset in the uncompressed file, the line without its end, reason if refused)."""
    number = offset = 0
    try:
        with closing(_open(uri)) as file:
            while raw := file.readline(max_line_bytes + 1):
                number += 1
                start = offset
                offset += len(raw)
                if number == 1:
                    for bom, encoding in OTHER_BOMS.items():
                        if raw.startswith(bom):
                            raise ConfigError(
                                f"{uri} is {encoding}, not UTF-8",
                                where=f"{uri}:1",
                                fix=f"iconv -f {encoding} -t UTF-8 {uri} > utf8.jsonl, and name that file instead",
                            )
                    raw = raw.removeprefix(UTF8_BOM)
                if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
                    while (more := file.readline(2**20)) and not more.endswith(b"\n"):
                        offset += len(more)
                    offset += len(more)
                    yield number, start, raw[:KEPT_BYTES], "line_too_long"
                    continue
                yield number, start, raw.removesuffix(b"\n").removesuffix(b"\r"), None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _broken_compression(uri, number, error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise _broken_compression(uri, number, error) from error


def _broken_compression(uri: str, line: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{uri} cannot be decompressed",
        where=f"after line {line}",
        why=str(error) or type(error).__name__,
        fix="make the file again; it is cut short or not what its ending says",
    )


def _open(uri: str) -> IO[bytes]:
    file = storage.open_input(uri)
    if uri.lower().endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if uri.lower().endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(_ZstdStream(file), 2**20))
    # An s3fs file's own readline takes no limit.
    return cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", file), 2**20))


class _ZstdStream(io.RawIOBase):
    """Zstandard frames as a stream. The library's own reader takes a file that is cut short for one that ends."""

    # Zeros pack 1 : 32,768, so this many bytes at a time never become more than 64 MiB.
    _STEP_BYTES = 2048

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self._file.read(self._STEP_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame is cut short")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _text_document(raw: bytes) -> tuple[Any, str | None]:
    if b"\0" in raw:
        return None, "nul_byte"
    try:
        return {"text": raw.decode("utf-8")}, None
    except UnicodeDecodeError:
        return None, "invalid_utf8"


def _json_object(raw: bytes) -> tuple[Any, str | None]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None, _why_not_json(raw)
    if isinstance(value, dict):
        return value, None
    return None, {list: "json_array", type(None): "json_null"}.get(type(value), "json_scalar")


def _why_not_json(raw: bytes) -> str:
    """The reason code of a line that the strict parser refused, found with the lenient one."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        # A lone surrogate written in UTF-8's manner is as invalid as any other bad byte.
        return "invalid_utf8"
    if "\0" in text:
        return "nul_byte"
    odd: list[str] = []
    try:
        value = json.loads(text, parse_constant=lambda name: odd.append(name))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return "json_trailing"
        at_end = error.pos >= len(text.rstrip())
        return "json_truncated" if at_end or error.msg.startswith("Unterminated string") else "json_syntax"
    except (RecursionError, ValueError):
        return "json_syntax"
    if odd or not _survives(value, allow_nan=False):
        return "not_finite"
    return "json_syntax" if _survives(value, allow_nan=True) else "lone_surrogate"


def _survives(value: Any, *, allow_nan: bool) -> bool:
    """Whether a value can be written again: without `allow_nan` not if a number overflowed, never if text is not UTF-8."""
    try:
        text = json.dumps(value, ensure_ascii=not allow_nan, allow_nan=allow_nan)
        text.encode("utf-8")
    except ValueError:
        return False
    return True


def _read_parquet(uri: str) -> Iterator[Record]:
    import pyarrow.parquet

    line = 0
    try:
        with storage.open_input(uri) as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    line += 1
                    yield Record(uri, line, None, b"", value)
    except (ValueError, OSError, pyarrow.lib.ArrowException) as error:
        # A broken page or footer is any of these; only what the system says of the disk has a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConfigError(
            f"{uri} is not a readable parquet file",
            where=f"after row {line}",
            why=str(error),
            fix="make the file again",
        ) from error
