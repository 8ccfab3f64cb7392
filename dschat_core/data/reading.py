"""Raw files → numbered lines and records, one at a time, within bounded memory.

A line ends on `\n` alone (U+2028 is legal inside JSON); a BOM on line 1 and a `\r` before the end are not part of it.
`.jsonl` and unknown endings are JSON lines, `.txt` is one document per line, `.parquet` and Hugging Face data sets (see
`hub`) one record per row; `.gz` and `.zst` around the first two. A bad line becomes a record with a reason code; a file
that can't be read at all is an error that names it. Reading gives blocks of lines, which any process can parse.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, Literal, NamedTuple, cast

import orjson

from dschat_core import storage
from dschat_core.config import DataConfig, Dataset, DataSource
from dschat_core.data import hub
from dschat_core.errors import ConfigError

KEPT_BYTES = 4096
BLOCK_BYTES = 2**21
ARROW_ROWS = 2048
# Deeper than any form of dialogue, and far from what exhausts a parser.
MAX_NESTING = 64
SPACED_KEY = re.compile(rb'"[ \t\r]+:')
UTF8_BOM = b"\xef\xbb\xbf"
# UTF-32's little-endian mark begins with UTF-16's.
OTHER_BOMS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


class Record(NamedTuple):
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
        heldout = [hub.heldout_split(uri) for uri in unique_files(source.heldout)]
        held = {_canonical(uri) for uri in heldout}
        train = [uri for uri in unique_files(source.train) if _canonical(uri) not in held]
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
    if hub.is_dataset(pattern):
        return [pattern]
    with storage.explained("look for", pattern):
        files = storage.filesystem(pattern)
        if files.isfile(pattern):
            return [pattern]
        if not any(character in pattern for character in "*?["):
            return []
        matches = sorted(path for path, entry in files.glob(pattern, detail=True).items() if entry["type"] == "file")
    if unreadable := [path for path in matches if not _is_text(path)]:
        raise ConfigError(f"{pattern} names a file whose name is not UTF-8: {unreadable[0]!a}", fix="rename that file")
    if not storage.is_remote(pattern):
        return [str(path) for path in matches]
    scheme = pattern.split("://", 1)[0]
    return [path if "://" in path else f"{scheme}://{path}" for path in matches]


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def unique_files(patterns: Iterable[str]) -> list[str]:
    """The files that paths and globs name, each once however it is named, in name order per pattern."""
    found: dict[str, str] = {}
    for pattern in patterns:
        for uri in expand(pattern):
            found.setdefault(_canonical(uri), uri)
    return list(found.values())


def _canonical(uri: str) -> str:
    """One name for a file that has several: relative and absolute, through links, with `..`."""
    if storage.is_remote(uri) or uri.startswith(hub.HUB):
        return uri
    return os.path.realpath(storage.local_path(uri))


def read_records(uri: str, *, max_line_bytes: int, max_file_bytes: int = 2**63) -> Iterator[Record]:
    """Every line of a file as a record, parsed by the file's ending.

    Raises:
        ConfigError: as `read_blocks`.
    """
    blocks = read_blocks(uri, max_line_bytes=max_line_bytes, max_file_bytes=max_file_bytes)
    return chain.from_iterable(map(parse_block, blocks))


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of a file, still as bytes: what a worker process is given.

    Attributes:
        form: `json` or `text` lines; `arrow`: an Arrow stream of rows; `refused`: the beginning of one line too long.
        offset: of the first line in the uncompressed file, in bytes; None where rows have no bytes of their own.
    """

    file: str
    form: Literal["json", "text", "arrow", "refused"]
    first_line: int
    offset: int | None
    data: bytes
    max_line_bytes: int


def read_blocks(
    uri: str, *, max_line_bytes: int, max_file_bytes: int = 2**63, block_bytes: int = BLOCK_BYTES
) -> Iterator[LineBlock]:
    """A file's lines in blocks of about `block_bytes`, whatever its size, within bounded memory.

    Args:
        max_line_bytes: longer lines are refused one by one; the rest of the file is read.
        max_file_bytes: a file that grows larger when decompressed is refused whole.

    Raises:
        ConfigError: the file is missing, too large, not UTF-8 text but UTF-16, or broken.
    """
    name = uri.lower().removesuffix(".gz").removesuffix(".zst")
    if hub.is_dataset(uri):
        yield from _arrow_blocks(uri, hub.batches(uri), max_line_bytes, max_file_bytes)
    elif name.endswith(".parquet"):
        with storage.explained("read", uri):
            yield from _arrow_blocks(uri, _parquet_batches(uri, block_bytes), max_line_bytes, max_file_bytes)
    else:
        form: Literal["json", "text"] = "text" if name.endswith(".txt") else "json"
        with storage.explained("read", uri):
            yield from _line_blocks(uri, form, max_line_bytes, max_file_bytes, block_bytes)


def _line_blocks(
    uri: str, form: Literal["json", "text"], max_line_bytes: int, max_file_bytes: int, block_bytes: int
) -> Iterator[LineBlock]:
    line, offset = 1, 0
    rest = b""
    try:
        with closing(storage.open_input(uri)) as packed, closing(_unpacked(uri, packed)) as file:
            while True:
                chunk = file.read(block_bytes)
                if offset + len(rest) + len(chunk) > max_file_bytes:
                    raise _too_large(uri, line, max_file_bytes)
                data = rest + chunk
                if offset == 0 and line == 1:
                    _refuse_other_encodings(uri, data)
                    _refuse_one_array(uri, data)
                end = data.rfind(b"\n") + 1 if chunk else len(data)
                if end:
                    yield LineBlock(uri, form, line, offset, data[:end], max_line_bytes)
                    line += data.count(b"\n", 0, end)
                    offset += end
                rest = data[end:]
                if not chunk:
                    return
                if len(rest) > max_line_bytes:
                    yield LineBlock(uri, "refused", line, offset, rest[:KEPT_BYTES], max_line_bytes)
                    skipped, rest = _skip_line(file, rest, block_bytes, max_file_bytes - offset)
                    offset += skipped
                    if offset + len(rest) > max_file_bytes:
                        raise _too_large(uri, line, max_file_bytes)
                    line += 1
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _broken_compression(uri, line - 1, error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise _broken_compression(uri, line - 1, error) from error


def _skip_line(file: IO[bytes], rest: bytes, block_bytes: int, most: int) -> tuple[int, bytes]:
    """Read to the end of a line of which `rest` is the beginning, or past `most`: (its bytes, what follows it)."""
    skipped = len(rest)
    while skipped <= most and (chunk := file.read(block_bytes)):
        end = chunk.find(b"\n") + 1
        if end:
            return skipped + end, chunk[end:]
        skipped += len(chunk)
    return skipped, b""


def _too_large(uri: str, line: int, max_file_bytes: int) -> ConfigError:
    return ConfigError(
        f"{uri} has more than {max_file_bytes:,} bytes when decompressed",
        where=f"{uri}:{line}",
        why="a small file that unpacks to a huge one, or a limit that is too low",
        fix="raise validation.max_file_bytes if the file is what you expect",
    )


def _refuse_one_array(uri: str, data: bytes) -> None:
    """A `.json` file that is one array would be thousands of bad lines; what it needs can be said once."""
    name = uri.lower().removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".json") and data.removeprefix(UTF8_BOM).lstrip().startswith(b"["):
        raise ConfigError(
            f"{uri} is one JSON array, not one object a line",
            where=f"{uri}:1",
            why="a file of that form has to be held in memory whole",
            fix=f"jq -c '.[]' {uri} > rows.jsonl, and name that file instead",
        )


def _refuse_other_encodings(uri: str, data: bytes) -> None:
    for bom, encoding in OTHER_BOMS.items():
        if data.startswith(bom):
            raise ConfigError(
                f"{uri} is {encoding}, not UTF-8",
                where=f"{uri}:1",
                fix=f"iconv -f {encoding} -t UTF-8 {uri} > utf8.jsonl, and name that file instead",
            )


def parse_block(block: LineBlock) -> Iterator[Record]:
    """The records of a block, in order; a pure function."""
    file, line, offset = block.file, block.first_line, block.offset
    if block.form == "refused":
        yield Record(file, line, offset, block.data, None, "line_too_long")
        return
    if block.form == "arrow":
        for row, (value, reason) in enumerate(_table_rows(block)):
            yield Record(file, line + row, None, b"", value, reason)
        return
    assert offset is not None
    parse = _text_document if block.form == "text" else _json_object
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    returns, longest = b"\r" in block.data, block.max_line_bytes + 1
    for raw in lines:
        size = len(raw) + 1
        if line == 1:
            raw = raw.removeprefix(UTF8_BOM)
        if returns:
            raw = raw.removesuffix(b"\r")
        if size > longest:
            yield Record(file, line, offset, raw[:KEPT_BYTES], None, "line_too_long")
        else:
            value, reason = parse(raw)
            yield Record(file, line, offset, raw, value, reason)
        line += 1
        offset += size


def _broken_compression(uri: str, line: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{uri} cannot be decompressed",
        where=f"after line {line}",
        why=str(error) or type(error).__name__,
        fix="make the file again; it is cut short or not what its ending says",
    )


def _unpacked(uri: str, file: IO[bytes]) -> IO[bytes]:
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
    if not raw or raw.isspace():
        return None, None
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
        return None, _why_not_json(raw) if raw and not raw.isspace() else None
    if type(value) is not dict:
        return None, {list: "json_array", type(None): "json_null"}.get(type(value), "json_scalar")
    num_keys = len(value)
    for item in value.values():
        if type(item) is list:
            for inner in item:
                if type(inner) is dict:
                    num_keys += len(inner)
    # A key is written before a colon, and lists begin with a bracket: where there are no more of them than this, no key
    # was given twice and nothing lies deeper. Most lines need no further look.
    if (raw.count(b":") == num_keys or _num_written_keys(raw, num_keys) == num_keys) and raw.count(b"[") <= MAX_NESTING:
        return value, None
    return _looked_through(raw, value)


def _num_written_keys(raw: bytes, expected: int) -> int:
    """How many keys a line may have at most, repeated ones too: its colons, but for those that are seen to be text.

    No closer than it takes to tell the number from `expected`.
    """
    if SPACED_KEY.search(raw):
        return raw.count(b":")
    # Colons in texts seldom follow a quotation mark, and where they do, that has one backslash before it.
    quoted = raw.count(b'":')
    return quoted if quoted == expected or b'\\\\":' in raw else quoted - raw.count(b'\\":')


def _looked_through(raw: bytes, value: dict[str, Any]) -> tuple[Any, str | None]:
    num_keys = _num_keys(value, 1)
    if num_keys is None:
        return None, "nested_too_deep"
    if num_keys not in (raw.count(b":"), _num_written_keys(raw, num_keys)) and _has_duplicate_key(raw):
        return None, "duplicate_key"
    return value, None


def _num_keys(value: dict[str, Any] | list[Any], depth: int) -> int | None:
    """Keys of all objects in a value that lies `depth` deep; None if anything in it is deeper than MAX_NESTING."""
    if depth > MAX_NESTING:
        return None
    count, items = (len(value), value.values()) if type(value) is dict else (0, value)
    for item in items:
        if type(item) is dict or type(item) is list:
            inner = _num_keys(item, depth + 1)
            if inner is None:
                return None
            count += inner
    return count


def _has_duplicate_key(raw: bytes) -> bool:
    doubled = False

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal doubled
        found = dict(pairs)
        doubled = doubled or len(found) != len(pairs)
        return found

    json.loads(raw, object_pairs_hook=check)
    return doubled


def _depth(value: Any) -> int:
    """How deep lists and objects lie in each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


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
        # As the strict parser does, hold an integer of any length for a number of its size.
        value = json.loads(text, parse_constant=lambda name: odd.append(name), parse_int=float)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return "json_trailing"
        at_end = error.pos >= len(text.rstrip())
        return "json_truncated" if at_end or error.msg.startswith("Unterminated string") else "json_syntax"
    except RecursionError:
        return "nested_too_deep"
    except ValueError:
        return "json_syntax"
    if _depth(value) > MAX_NESTING:
        return "nested_too_deep"
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


def _arrow_blocks(uri: str, batches: Iterable[Any], max_line_bytes: int, max_file_bytes: int) -> Iterator[LineBlock]:
    """Batches of rows as Arrow streams, so that workers turn them into objects."""
    from pyarrow.ipc import new_stream

    line, total = 1, 0
    for batch in batches:
        total += batch.nbytes
        if total > max_file_bytes:
            raise _too_large(uri, line, max_file_bytes)
        sink = io.BytesIO()
        with new_stream(sink, batch.schema) as writer:
            writer.write(batch)
        yield LineBlock(uri, "arrow", line, None, sink.getvalue(), max_line_bytes)
        line += batch.num_rows


def _table_rows(block: LineBlock) -> Iterator[tuple[Any, str | None]]:
    """(value, reason) of each row of an Arrow block. Arrow's texts are not checked to be UTF-8 before they are asked for."""
    from pyarrow.ipc import open_stream

    table = _readable(open_stream(block.data).read_all())
    if len(block.data) <= block.max_line_bytes:
        with suppress(UnicodeDecodeError):
            yield from [(row, None) for row in table.to_pylist()]
            return
    for index in range(table.num_rows):
        row = table.slice(index, 1)
        if row.nbytes > block.max_line_bytes:
            yield None, "line_too_long"
            continue
        try:
            yield row.to_pylist()[0], None
        except UnicodeDecodeError:
            yield None, "invalid_utf8"


def _readable(table: Any) -> Any:
    """The table without the columns that Python has no values for (years beyond 9999, unknown time zones)."""
    kept = []
    for name in table.column_names:
        try:
            table.column(name).to_pylist()
        except UnicodeDecodeError:
            pass
        except (ValueError, OverflowError, LookupError, ArithmeticError, TypeError):
            continue
        kept.append(name)
    return table if len(kept) == table.num_columns else table.select(kept)


def _refuse_doubled_columns(uri: str, names: Sequence[str]) -> None:
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{uri} has several columns called {', '.join(doubled)}",
            why="which of them is meant can't be known",
            fix="write the file again with one column of each name",
        )


def _parquet_batches(uri: str, block_bytes: int) -> Iterator[Any]:
    import pyarrow.parquet

    row = 0
    try:
        with storage.open_input(uri) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            _refuse_doubled_columns(uri, parquet.schema_arrow.names)
            groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
            row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0)
            # Rows of long documents are taken fewer at a time.
            rows = max(1, min(ARROW_ROWS, int(block_bytes / max(1, row_bytes))))
            for batch in parquet.iter_batches(batch_size=rows):
                yield batch
                row += batch.num_rows
    except (ValueError, OSError, pyarrow.lib.ArrowException) as error:
        # A broken page or footer is any of these; only what the system says of the disk has a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConfigError(
            f"{uri} is not a readable parquet file",
            where=f"after row {row}",
            why=str(error),
            fix="make the file again",
        ) from error
