"""Lines, reasons and refusals of the reader."""

from __future__ import annotations

import gc
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dschat_core.config import DataConfig, DataSource
from dschat_core.data.reading import (
    LineBlock,
    expand,
    input_files,
    missing_files,
    parse_block,
    read_blocks,
    read_records,
    unique_files,
)
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
        (b'{"n": ' + b"7" * 400 + b"}", "not_finite"),
        (b'{"n": ' + b"7" * 5000 + b"}", "not_finite"),
        (b"[" * 2000 + b"]" * 2000, "nested_too_deep"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested_too_deep"),
        (b'{"a": ' * 70 + b"1" + b"}" * 70, "nested_too_deep"),
        (b'{"a": [' * 40 + b"1" + b"]}" * 40, "nested_too_deep"),
        (b'{"a": ' * 1200 + b"1" + b"}" * 1200, "nested_too_deep"),
        (b'{"text": "a", "text": "b"}', "duplicate_key"),
        (b'{"text": "a", "text" : "b"}', "duplicate_key"),
        (b'{"text": "a", "text"\t: "b"}', "duplicate_key"),
        (b'{"text": "a", "t\\u0065xt": "b"}', "duplicate_key"),
        (b'{"messages": [{"role": "user", "role": "assistant"}]}', "duplicate_key"),
        (b'{"a": {"b": {"c": 1, "c": 2}}}', "duplicate_key"),
        (b'{"a": [[{"c": 1, "c": 2}]]}', "duplicate_key"),
        (b'{"a": ":", "a" : "\\":"}', "duplicate_key"),
        (b"\x1f\x8b\x08", "invalid_utf8"),
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


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": "b: c", "d": "e\\": f"}',
        b'{"a" : "b", "c" : {"a" : 1}}',
        b'{"a": [{"a": 1}, {"a": 2}], "b": {"a": 3}}',
        b'{"a": [[{"a": 1}], "[[[", null]}',
        b'{"a:": 1, "a::": ":"}',
        b'{"a": "' + b"[{" * 200 + b'"}',
        b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}",
    ],
)
def test_colons_and_brackets_in_texts_are_no_keys_and_no_nesting(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "good.jsonl"
    path.write_bytes(line + b"\n")
    assert [(r.reason, r.value) for r in read_records(str(path), max_line_bytes=10_000)] == [(None, json.loads(line))]


JSON_VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='ab:" \\[{', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='ab:"', max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def _written(value: Any, stream: random.Random) -> tuple[str, bool]:
    """(JSON of the value with any spacing, some key perhaps repeated, whether one was)."""
    if isinstance(value, list):
        items = [_written(item, stream) for item in value]
        return "[" + ",".join(text for text, _ in items) + "]", any(doubled for _, doubled in items)
    if not isinstance(value, dict):
        return json.dumps(value), False
    pairs = list(value.items())
    doubled = bool(pairs) and stream.random() < 0.2
    if doubled:
        pairs.append(stream.choice(pairs))
    texts = []
    for key, item in pairs:
        text, inner = _written(item, stream)
        doubled |= inner
        texts.append(json.dumps(key) + stream.choice(["", " ", "\t", "  "]) + ":" + text)
    return "{" + ", ".join(texts) + "}", doubled


@given(st.dictionaries(st.text(alphabet='ab:"', max_size=2), JSON_VALUES, max_size=4), st.integers(0, 2**32))
def test_a_key_that_is_given_twice_is_always_found_and_never_imagined(value: dict[str, Any], seed: int) -> None:
    text, doubled = _written(value, random.Random(seed))
    (record,) = parse_block(LineBlock("f", "json", 1, 0, text.encode(), 10_000))
    assert (record.reason, record.value) == (("duplicate_key", None) if doubled else (None, value))


LINES = st.lists(
    st.sampled_from(
        [
            GOOD,
            GOOD + b"\r",
            b"\xef\xbb\xbf" + GOOD,
            '{"text": "二: \u2028"}'.encode(),
            *(b"", b"  ", b"\r", b"{", b"null", b"\xff", b"[" * 30, b"x" * 39, b"x" * 100),
            b'{"a": 1, "a": 2}',
            b'{"text": "\x00"}',
        ]
    ),
    max_size=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, ended=st.booleans(), block_bytes=st.integers(1, 120))
def test_whatever_the_blocks_and_the_packing_every_line_is_found_where_it_is(
    tmp_path: Path, lines: list[bytes], ended: bool, block_bytes: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    paths = [tmp_path / f"a.jsonl{ending}" for ending in ("", ".gz", ".zst")]
    for path, packed in zip(paths, (data, gzip.compress(data), zstandard.compress(data)), strict=True):
        path.write_bytes(packed)
    expected = []
    offset = 0
    written = data.split(b"\n")[: None if data and not data.endswith(b"\n") else -1]
    for number, line in enumerate(written, 1):
        expected.append((number, offset, *_judged(line, first=number == 1)))
        offset += len(line) + 1
    for path in paths:
        blocks = read_blocks(str(path), max_line_bytes=40, block_bytes=block_bytes)
        records = [record for block in blocks for record in parse_block(block)]
        assert [(r.line, r.offset, r.value, r.reason) for r in records] == expected


def _judged(line: bytes, *, first: bool) -> tuple[Any, str | None]:
    """(value, reason) of one of LINES, found the plain way."""
    if len(line) > 40:
        return None, "line_too_long"
    text = (line.removeprefix(b"\xef\xbb\xbf") if first else line).removesuffix(b"\r")
    if not text.strip():
        return None, None
    reasons = {
        b"{": "json_truncated",
        b"null": "json_null",
        b'{"a": 1, "a": 2}': "duplicate_key",
        b"\xff": "invalid_utf8",
    }
    reasons |= {b'{"text": "\x00"}': "nul_byte", b"[" * 30: "json_truncated"}
    if text in reasons:
        return None, reasons[text]
    try:
        return json.loads(text.decode()), None
    except ValueError:
        return None, "json_syntax"


def test_d2_an_empty_file_has_no_lines_packed_or_not(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"):
        (tmp_path / name).write_bytes(b"")
        assert read(tmp_path / name) == []


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


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("newlines", [True, False])
def test_d3_a_file_over_the_limit_is_refused_before_its_end(tmp_path: Path, ending: str, newlines: bool) -> None:
    path = tmp_path / f"large.jsonl{ending}"
    opened: Any = {"": open, ".gz": gzip.open, ".zst": zstandard.open}[ending]
    with opened(path, "wb") as file:
        file.write((b"0" * 999 + (b"\n" if newlines else b"0")) * 100_000)
    lines = 0
    with pytest.raises(ConfigError, match="more than 2,000,000 bytes") as caught:
        for block in read_blocks(str(path), max_line_bytes=10_000, max_file_bytes=2_000_000, block_bytes=2**16):
            lines += len(list(parse_block(block)))
    assert str(path) in caught.value.what
    assert "max_file_bytes" in caught.value.fix
    assert lines < 2100


def test_a_file_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "exact.jsonl"
    path.write_bytes(GOOD + b"\n" + b"x" * 500 + b"\n" + GOOD)
    size = path.stat().st_size

    def lines(limit: int) -> int:
        blocks = read_blocks(str(path), max_line_bytes=100, max_file_bytes=limit, block_bytes=64)
        return sum(1 for block in blocks for _ in parse_block(block))

    assert lines(size) == 3
    with pytest.raises(ConfigError, match="more than"):
        lines(size - 1)


def test_a_missing_file_and_a_folder_are_errors_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()
    for name in ("gone.jsonl", "gone.jsonl.gz", "gone.parquet", "folder.parquet", "."):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / name)
        assert str(tmp_path / name) in caught.value.what


def test_every_opened_file_is_closed_again(tmp_path: Path) -> None:
    for name, pack in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(pack(GOOD + b"\n"))
        read(tmp_path / name)
    gc.collect()
    opened = {os.path.realpath(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd")}
    assert not [path for path in opened if path.startswith(str(tmp_path))]


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


def test_rows_of_a_table_that_are_too_large_or_not_utf8_are_refused_alone(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    texts = pyarrow.array([b"one", b"\xff\xfe", b"x" * 5000, b"two"]).view("string")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    assert read(path, max_line_bytes=4000) == [
        (1, {"text": "one"}),
        (2, "invalid_utf8"),
        (3, "line_too_long"),
        (4, {"text": "two"}),
    ]


def test_a_table_is_read_in_blocks_of_about_the_same_size_and_has_a_limit_too(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    texts = [f"{i:06d}" * 2000 for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, use_dictionary=False)
    blocks = list(read_blocks(str(path), max_line_bytes=2**20, block_bytes=2**17))
    assert max(len(block.data) for block in blocks) < 2**18
    assert [record.value["text"] for block in blocks for record in parse_block(block)] == texts
    assert [block.first_line for block in blocks] == list(range(1, 301, 10))
    with pytest.raises(ConfigError, match="more than 1,000,000 bytes"):
        list(read_blocks(str(path), max_line_bytes=2**20, max_file_bytes=1_000_000))


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


def test_a_json_file_that_is_one_array_says_how_to_turn_it_into_lines(tmp_path: Path) -> None:
    path = tmp_path / "alpaca.json"
    path.write_bytes(b'[\n  {"instruction": "a", "output": "b"}\n]\n')
    with pytest.raises(ConfigError, match="one JSON array") as caught:
        list(read_records(str(path), max_line_bytes=1000))
    assert "jq -c" in caught.value.fix
    (tmp_path / "lines.json").write_bytes(b'{"text": "a"}\n[1]\n')
    assert [r.reason for r in read_records(str(tmp_path / "lines.json"), max_line_bytes=1000)] == [None, "json_array"]


def test_a_column_that_python_has_no_values_for_is_left_out(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = {"input": ["a one", "b two"], "output": ["yes", "no"]}
    for odd in (
        pa.array([2**62] * 2).view(pa.timestamp("us")),
        pa.array([2**31 - 1] * 2, pa.int32()).view(pa.date32()),
    ):
        path = tmp_path / "odd.parquet"
        pq.write_table(pa.table({**texts, "odd": odd}), path)
        assert [r.value for r in read_records(str(path), max_line_bytes=10_000)] == [
            {"input": "a one", "output": "yes"},
            {"input": "b two", "output": "no"},
        ]
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, names=["input", "output", "input"]), path)
    with pytest.raises(ConfigError, match="several columns called input"):
        list(read_records(str(path), max_line_bytes=10_000))


def test_a_file_is_read_once_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    names = ("a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl"), "*.jsonl", f"file://{tmp_path}/a.jsonl")
    assert unique_files(names) == ["a.jsonl"]
    sources = DataConfig(text=DataSource(train=("*.jsonl",), heldout=("./a.jsonl",)))
    assert input_files(sources) == {"text": [("./a.jsonl", "heldout")]}


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    import os

    with open(os.fsencode(tmp_path) + b"/\xff.jsonl", "wb") as file:
        file.write(b"{}")
    with pytest.raises(ConfigError, match="not UTF-8"):
        unique_files([str(tmp_path / "*.jsonl")])
