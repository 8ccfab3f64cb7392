"""Lines, reasons and refusals of the reader."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from dschat_core.config import DataConfig, DataSource
from dschat_core.data.reading import expand, input_files, missing_files, read_records
from dschat_core.errors import ConfigError

GOOD = b'{"text": "fine"}'


def read(path: Path, *, max_line_bytes: int = 1000) -> list[tuple[int, object]]:
    """(line, value or reason or None) of every line."""
    return [(r.line, r.value or r.reason) for r in read_records(str(path), max_line_bytes=max_line_bytes)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"input": "cut sho', "json_truncated"),
        (b'{"input": "a", "output":', "json_truncated"),
        (b'{"a": 1} {"b": 2}', "json_trailing"),
        (b'["a", "b"]', "json_array"),
        (b"null", "json_null"),
        (b"7", "json_scalar"),
        (b'{"text": "a\0b"}', "nul_byte"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b'{"text": "\xff\xfe"}', "invalid_utf8"),
        (b'{"text": NaN}', "not_finite"),
        (b'{"text": 1e999}', "not_finite"),
        (b"{'text': 1}", "json_syntax"),
        (b"[" * 2000 + b"]" * 2000, "json_syntax"),
    ],
)
def test_d1_each_bad_line_has_a_reason_of_its_own_and_its_neighbours_survive(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    records = list(read_records(str(path), max_line_bytes=10_000))
    assert [record.reason for record in records] == [None, reason, None]
    assert (records[1].file, records[1].line, records[1].offset) == (str(path), 2, len(GOOD) + 1)
    assert records[1].raw == line
    assert records[2].value == {"text": "fine"}


def test_d2_bom_crlf_line_separators_blank_lines_and_a_missing_newline(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\n  \r\n" + '{"text": "a\u2028b"}'.encode() + b"\r\n" + GOOD)
    assert read(path) == [(1, {"text": "fine"}), (2, None), (3, None), (4, {"text": "a\u2028b"}), (5, {"text": "fine"})]


def test_d2_a_bom_elsewhere_is_not_stripped(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(GOOD + b"\n\xef\xbb\xbf" + GOOD + b"\n")
    assert read(path) == [(1, {"text": "fine"}), (2, "json_syntax")]


def test_d3_utf16_is_refused_by_name_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "wide.jsonl"
    path.write_text('{"text": "wide"}\n', encoding="utf-16")
    with pytest.raises(ConfigError, match="is UTF-16") as caught:
        read(path)
    assert str(path) in caught.value.what
    assert "iconv" in caught.value.fix


def test_d3_a_long_line_is_quarantined_and_the_next_one_read_at_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * 3_000_000 + b"\n" + GOOD + b"\n")
    records = list(read_records(str(path), max_line_bytes=1000))
    assert [(r.line, r.reason, r.offset) for r in records] == [(1, "line_too_long", 0), (2, None, 3_000_001)]
    assert len(records[0].raw) <= 4096


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "exact.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD)
    assert [value for _, value in read(path, max_line_bytes=len(GOOD))] == [{"text": "fine"}] * 2


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_d3_a_packed_file_of_zeros_is_refused_in_bounded_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"zeros.jsonl.{ending}"
    with gzip.open(path, "wb", compresslevel=1) if ending == "gz" else zstandard.open(path, "wb") as file:
        for _ in range(256):
            file.write(bytes(2**20))
        file.write(b"\n" + GOOD + b"\n")
    program = (
        "import resource, sys\n"
        "from dschat_core.data.reading import read_records\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print([(r.line, r.reason) for r in read_records(sys.argv[1], max_line_bytes=2**23)])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    found, grown_kib = done.stdout.splitlines()
    assert found == "[(1, 'line_too_long'), (2, None)]"
    assert int(grown_kib) < 160 * 1024


def test_gzip_and_zstandard_give_the_same_lines_also_over_several_frames(tmp_path: Path) -> None:
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(100)))
    half = plain.read_bytes()[:600], plain.read_bytes()[600:]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(b"".join(gzip.compress(piece) for piece in half))
    zst = tmp_path / "a.jsonl.zst"
    zst.write_bytes(b"".join(zstandard.compress(piece) for piece in half))
    assert read(packed) == read(zst) == read(plain)


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_broken_compression_names_the_file(tmp_path: Path, ending: str, damage: str) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    data = b"".join(json.dumps({"text": str(i * 7919)}).encode() + b"\n" for i in range(1000))
    packed = gzip.compress(data) if ending == "gz" else zstandard.compress(data)
    path.write_bytes(packed[: len(packed) // 2] if damage == "cut" else b"not compressed at all")
    with pytest.raises(ConfigError, match="cannot be decompressed"):
        read(path)


def test_text_files_give_a_document_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\n\n二\n".encode() + b"\xff\n\0\n")
    assert read(path) == [(1, {"text": "one"}), (2, None), (3, {"text": "二"}), (4, "invalid_utf8"), (5, "nul_byte")]


def test_parquet_gives_a_record_per_row(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    assert read(path) == [(1, {"text": "one"}), (2, {"text": None})]
    path.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="not a readable parquet file"):
        read(path)


def test_globs_expand_in_order_and_heldout_files_are_never_training_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "held [1].jsonl"):
        (tmp_path / name).write_bytes(GOOD)
    (tmp_path / "folder.jsonl").mkdir()
    held = str(tmp_path / "held [1].jsonl")
    sources = DataConfig(text=DataSource(train=(str(tmp_path / "*.jsonl"),), heldout=(held,)))
    assert input_files(sources) == {
        "text": [(str(tmp_path / "a.jsonl"), "train"), (str(tmp_path / "b.jsonl"), "train"), (held, "heldout")]
    }
    assert expand(held) == [held]


def test_missing_files_are_named_with_their_key(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_bytes(GOOD)
    gone = str(tmp_path / "gone.jsonl")
    sources = DataConfig(
        prompts=DataSource(train=(str(there), gone), heldout=(str(tmp_path / "*.nothing"),)),
    )
    assert missing_files(sources) == [f"data.prompts.train: {gone}", f"data.prompts.heldout: {tmp_path}/*.nothing"]
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        input_files(sources)
