"""Shards give back what was written, all of it or an error that names the file."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_core import storage
from dschat_core.artifacts import Artifact, Product, Store, Workspace, load_artifact
from dschat_core.config import TokenizationConfig
from dschat_core.data.shards import (
    Masks,
    ShardIndex,
    ShardInfo,
    ShardReader,
    ShardWriter,
    check_shard,
    read_info,
    write_index,
)
from dschat_core.errors import ConfigError, IntegrityError
from dschat_core.leases import this_process

Row = tuple[np.ndarray, np.ndarray]


def random_rows(count: int, vocab_size: int, *, seed: int = 0) -> list[Row]:
    """Ids and masks of rows of 0 to 29 tokens."""
    draw = np.random.default_rng(seed)
    return [(draw.integers(0, vocab_size, n), draw.random(n) < 0.5) for n in draw.integers(0, 30, count)]


def add(writer: ShardWriter, rows: Sequence[Row], *, masks: Masks, metas: Sequence[dict[str, Any]] | None) -> None:
    ids, mask = (np.concatenate([row[i] for row in rows]) if rows else np.zeros(0, int) for i in (0, 1))
    writer.add_batch(
        ids,
        np.cumsum([0, *(len(row[0]) for row in rows)]),
        mask=mask if masks == "rows" else None,
        num_bytes=np.array([3 * len(row[0]) for row in rows], dtype=np.int64),
        meta=metas,
    )


def write_part(
    folder: Path,
    shards: Iterable[Sequence[Row]],
    *,
    vocab_size: int = 1000,
    masks: Masks = "rows",
    has_meta: bool = False,
    batch: int = 7,
) -> ShardIndex:
    """A part of these shards, written `batch` rows at a time; the meta of a row is its number in the part."""
    infos, written = [], 0
    for number, rows in enumerate(shards):
        writer = ShardWriter(folder, number, vocab_size=vocab_size, masks=masks, has_meta=has_meta)
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            metas = [{"row": written + i} for i in range(len(some))] if has_meta else None
            add(writer, some, masks=masks, metas=metas)
            written += len(some)
        infos.append(writer.close())
    return write_index(folder, infos, vocab_size=vocab_size, masks=masks, has_meta=has_meta)


def trained(mask: np.ndarray) -> np.ndarray:
    """The mask as it is read back: a row's first token is never trained."""
    return mask & (np.arange(len(mask)) > 0)


@pytest.mark.parametrize("vocab_size", [1000, 2**16, 2**16 + 1])
def test_rows_round_trip_over_several_shards(tmp_path: Path, vocab_size: int) -> None:
    rows = [*random_rows(99, vocab_size), (np.array([0, vocab_size - 1]), np.array([True, True]))]
    index = write_part(tmp_path, [rows[:40], rows[40:41], [], rows[41:]], vocab_size=vocab_size, has_meta=True)
    reader = ShardReader(tmp_path)
    assert index["dtype"] == ("uint16" if vocab_size <= 2**16 else "uint32")
    assert index["shards"] == [40, 1, 0, 59]
    assert index["rows"] == len(reader) == 100
    assert index["tokens"] == reader.lengths.sum() == sum(len(ids) for ids, _ in rows)
    assert index["bytes"] == reader.num_bytes.sum() == 3 * index["tokens"]
    assert index["targets"] == reader.num_targets.sum()
    assert reader.lengths.dtype == reader.num_targets.dtype == reader.num_bytes.dtype == np.int64
    assert reader.meta == [{"row": i} for i in range(100)]
    for i, (ids, mask) in enumerate(rows):
        assert np.array_equal(reader.tokens(i), ids)
        assert reader.tokens(i).dtype == np.int64
        assert np.array_equal(reader.mask(i), trained(mask))
        assert reader.num_targets[i] == trained(mask).sum()
        assert reader.num_bytes[i] == 3 * len(ids)


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(st.lists(st.lists(st.booleans(), max_size=19), max_size=12), min_size=1, max_size=3),
    batch=st.integers(1, 5),
    masks=st.sampled_from(["rows", "all", "none"]),
    data=st.data(),
)
def test_gather_is_the_rows_joined_for_any_lengths_offsets_and_order(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[list[bool]]], batch: int, masks: Masks, data: Any
) -> None:
    """Mask bits cross bytes, batches and shards at every offset."""
    written = [[(np.arange(len(mask)) + 7 * len(mask), np.array(mask, bool)) for mask in rows] for rows in shards]
    folder = tmp_path_factory.mktemp("part")
    write_part(folder, written, masks=masks, batch=batch)
    rows = [row for shard in written for row in shard]
    reader = ShardReader(folder)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)) if rows else []
    ids, mask, lengths = reader.gather(chosen)
    wanted = {
        "rows": lambda row: trained(row[1]),
        "all": lambda row: trained(np.ones(len(row[0]), bool)),
        "none": lambda row: np.zeros(len(row[0]), bool),
    }[masks]
    assert (ids.dtype, mask.dtype, lengths.dtype) == (np.int64, np.bool_, np.int64)
    assert ids.tolist() == [value for i in chosen for value in rows[i][0].tolist()]
    assert mask.tolist() == [value for i in chosen for value in wanted(rows[i]).tolist()]
    assert lengths.tolist() == [len(rows[i][0]) for i in chosen]
    assert reader.num_targets.tolist() == [int(wanted(row).sum()) for row in rows]


def test_gather_equals_single_reads_and_takes_arrays(tmp_path: Path) -> None:
    write_part(tmp_path, [random_rows(50, 1000), random_rows(50, 1000, seed=1)])
    reader = ShardReader(tmp_path)
    chosen = np.random.default_rng(0).permutation(100)
    ids, mask, lengths = reader.gather(chosen)
    assert np.array_equal(ids, np.concatenate([reader.tokens(row) for row in chosen]))
    assert np.array_equal(mask, np.concatenate([reader.mask(row) for row in chosen]))
    assert np.array_equal(lengths, reader.lengths[chosen])
    ids[:], mask[:] = 0, False  # copies, not the files
    assert reader.gather(chosen)[0].any()
    assert reader.gather(chosen)[1].any()


def test_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    write_part(tmp_path, [random_rows(20, 1000)], has_meta=True)
    reader = ShardReader(tmp_path)
    again = pickle.loads(pickle.dumps(reader))
    assert all(np.array_equal(a, b) for a, b in zip(again.gather(range(20)), reader.gather(range(20)), strict=True))
    assert again.meta == reader.meta


def test_a_mask_takes_one_bit_a_token(tmp_path: Path) -> None:
    write_part(tmp_path, [[(np.zeros(1001, int), np.ones(1001, bool))]])
    assert (tmp_path / "shard-00000.mask").stat().st_size == 126
    assert (tmp_path / "shard-00000.bin").stat().st_size == 2002


def test_all_tokens_but_the_first_are_targets_of_text(tmp_path: Path) -> None:
    index = write_part(tmp_path, [[(np.arange(5), np.zeros(5, bool))]], masks="all")
    assert index["targets"] == 4
    reader = ShardReader(tmp_path)
    assert reader.mask(0).tolist() == [False, True, True, True, True]
    assert reader.num_targets.tolist() == [4]
    assert reader.meta is None
    assert not (tmp_path / "shard-00000.mask").exists()


def test_prompts_have_no_targets_and_an_empty_part_has_no_rows(tmp_path: Path) -> None:
    write_part(tmp_path / "prompts", [[(np.arange(5), np.ones(5, bool))]], masks="none")
    assert not ShardReader(tmp_path / "prompts").mask(0).any()
    write_part(tmp_path / "no shard", [], has_meta=True)
    write_part(tmp_path / "no row", [[]], has_meta=True)
    for folder in (tmp_path / "no shard", tmp_path / "no row"):
        empty = ShardReader(folder)
        assert len(empty) == len(empty.lengths) == len(empty.num_targets) == 0
        assert empty.meta == []
        assert [len(part) for part in empty.gather([])] == [0, 0, 0]


def test_meta_is_parsed_when_asked_for(tmp_path: Path) -> None:
    write_part(tmp_path, [random_rows(6, 10), random_rows(6, 10)], has_meta=True)
    path = tmp_path / "shard-00001.meta"
    path.write_bytes(path.read_bytes().replace(b'{"row":7}', b'{"row"!7}'))
    meta = ShardReader(tmp_path).meta
    assert meta is not None
    assert (meta[6], meta[11], meta[2:4]) == ({"row": 6}, {"row": 11}, [{"row": 2}, {"row": 3}])
    assert len(meta) == 12
    with pytest.raises(IntegrityError, match=r"shard-00001\.meta"):
        meta[7]
    with pytest.raises(IndexError):
        meta[12]
    assert meta != [{"row": 0}]


def test_meta_keeps_line_separators_that_are_not_newlines(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("a\u2028b\r\nc", "你好\x85", "")]
    writer = ShardWriter(tmp_path, 0, vocab_size=10, masks="none", has_meta=True)
    add(writer, [(np.arange(1), np.zeros(1, bool))] * 3, masks="none", metas=rows)
    write_index(tmp_path, [writer.close()], vocab_size=10, masks="none", has_meta=True)
    assert ShardReader(tmp_path).meta == rows


# ── finished and unfinished shards ──────────────────────────────────────────────────────────────────────


def test_the_record_of_a_shard_is_read_back_and_says_what_its_files_are(tmp_path: Path) -> None:
    rows = random_rows(20, 1000)
    writer = ShardWriter(tmp_path, 3, vocab_size=1000, masks="rows")
    add(writer, rows, masks="rows", metas=None)
    assert read_info(tmp_path, 3) is None
    info = writer.close()
    assert (info.number, info.rows, info.tokens) == (3, 20, sum(len(ids) for ids, _ in rows))
    assert info.targets == sum(int(trained(mask).sum()) for _, mask in rows)
    assert sorted(info.files) == ["shard-00003.bin", "shard-00003.idx", "shard-00003.mask"]
    for name, entry in info.files.items():
        assert entry == {"size": (tmp_path / name).stat().st_size, "sha256": storage.sha256_file(tmp_path / name)}
    assert read_info(tmp_path, 3) == info
    assert check_shard(tmp_path, info) is None


@pytest.mark.parametrize("suffix", ["bin", "mask", "idx", "meta"])
def test_a_damaged_shard_is_told_from_a_good_one(tmp_path: Path, suffix: str) -> None:
    write_part(tmp_path, [random_rows(20, 1000)], has_meta=True)
    info = read_info(tmp_path, 0)
    assert info is not None
    path = tmp_path / f"shard-00000.{suffix}"
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "SHA-256" in (check_shard(tmp_path, info) or "")
    path.write_bytes(whole[:-1])
    assert f"{path.name} has {len(whole) - 1} bytes instead of {len(whole)}" == check_shard(tmp_path, info)
    path.unlink()
    assert check_shard(tmp_path, info) == f"{path.name} is missing"


@pytest.mark.parametrize("record", [b"", b"{", b"{}", b"[]", b"null", b'{"number": 0, "more": 1}'])
def test_a_damaged_record_is_an_unfinished_shard(tmp_path: Path, record: bytes) -> None:
    write_part(tmp_path, [random_rows(5, 1000)])
    assert read_info(tmp_path, 0) is not None
    (tmp_path / "shard-00000.json").write_bytes(record)
    assert read_info(tmp_path, 0) is None


def test_a_shard_begun_again_is_unfinished(tmp_path: Path) -> None:
    write_part(tmp_path, [random_rows(5, 1000)])
    ShardWriter(tmp_path, 0, vocab_size=1000, masks="rows")
    assert read_info(tmp_path, 0) is None


def test_the_same_rows_give_the_same_files_however_they_are_batched(tmp_path: Path) -> None:
    rows = random_rows(50, 1000)
    infos = []
    for batch in (1, 3, 50):
        write_part(tmp_path / str(batch), [rows], batch=batch)
        infos.append(read_info(tmp_path / str(batch), 0))
    assert infos[0] == infos[1] == infos[2]


def test_shards_may_be_finished_in_any_order(tmp_path: Path) -> None:
    first, second = random_rows(5, 1000), random_rows(6, 1000, seed=1)
    infos: list[ShardInfo] = []
    for number, rows in ((1, second), (0, first)):
        writer = ShardWriter(tmp_path, number, vocab_size=1000, masks="rows")
        add(writer, rows, masks="rows", metas=None)
        infos.append(writer.close())
    write_index(tmp_path, infos, vocab_size=1000, masks="rows", has_meta=False)
    assert (
        ShardReader(tmp_path).gather(range(11))[0].tolist() == np.concatenate([i for i, _ in first + second]).tolist()
    )


# ── damage met by the reader ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("suffix", ["bin", "mask", "idx", "meta"])
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    write_part(tmp_path, [random_rows(20, 1000)], has_meta=True)
    path = tmp_path / f"shard-00000.{suffix}"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=rf"shard-00000\.{suffix}") as caught:
            ShardReader(tmp_path)
        assert f"{len(damaged)} bytes instead of {len(whole)}" in caught.value.why
        assert "dschat verify" in caught.value.fix
    path.unlink()
    with pytest.raises(IntegrityError, match=rf"shard-00000\.{suffix}"):
        ShardReader(tmp_path)


def test_an_index_whose_offsets_fall_is_damaged(tmp_path: Path) -> None:
    write_part(tmp_path, [[(np.arange(5), np.ones(5, bool))] * 2])
    path = tmp_path / "shard-00000.idx"
    columns = np.frombuffer(path.read_bytes(), "<i8").copy()
    for place, value in ((0, 1), (1, 99), (2, -5)):
        damaged = columns.copy()
        damaged[place] = value
        path.write_bytes(damaged.tobytes())
        with pytest.raises(IntegrityError, match=r"shard-00000\."):
            ShardReader(tmp_path)


def test_a_missing_damaged_or_older_index_is_named(tmp_path: Path) -> None:
    write_part(tmp_path, [random_rows(5, 1000)])
    path = tmp_path / "index.json"
    index = json.loads(path.read_bytes())
    for damaged in (b"", b"[]", b"{}", json.dumps({**index, "rows": 6}).encode(), json.dumps({"version": 2}).encode()):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"index\.json"):
            ShardReader(tmp_path)
    path.write_text(json.dumps({**index, "version": 1}))
    with pytest.raises(IntegrityError, match="of format 1, this version reads 2"):
        ShardReader(tmp_path)
    path.unlink()
    with pytest.raises(IntegrityError, match=r"index\.json"):
        ShardReader(tmp_path)


def test_a_row_outside_is_an_index_error(tmp_path: Path) -> None:
    write_part(tmp_path, [[(np.arange(5), np.ones(5, bool))]])
    reader = ShardReader(tmp_path)
    for row in (-1, 1):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            reader.tokens(row)
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            reader.gather([0, row])


def test_more_shards_than_open_files_are_allowed_raise_the_soft_limit(tmp_path: Path) -> None:
    write_part(tmp_path, [[(np.arange(2), np.ones(2, bool))]] * 150)
    code = f"""
import resource
from dschat_core.data.shards import ShardReader
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
assert ShardReader({str(tmp_path)!r}).gather(range(150))[0].tolist() == [0, 1] * 150
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_shards_than_the_hard_limit_allows_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_part(tmp_path, [[]] * 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 100))
    with pytest.raises(ConfigError, match="the process may have 100") as caught:
        ShardReader(tmp_path)
    assert "ulimit -Hn" in caught.value.fix


# ── from S3 ─────────────────────────────────────────────────────────────────────────────────────────────


SECTION = TokenizationConfig()


def commit(root: str, rows: Sequence[Row]) -> Artifact:
    """An artifact whose part `dialogues` has two shards of these rows."""
    with Store(root).construct("tokenization", "k" * 64, this_process("run")) as held:
        assert isinstance(held, Workspace)
        folder = held.output / "dialogues"
        write_part(folder, [rows[:10], rows[10:]], has_meta=True)
        files = [f"dialogues/{path.name}" for path in folder.iterdir()]
        return held.commit(Product({"dialogues": files}), section=SECTION, inputs={})


@pytest.fixture
def remote(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Artifact, list[Row], list[str]]:
    """A part on S3 as another machine sees it: nothing in its cache; also the rows, and the names that get fetched."""
    rows = random_rows(25, 1000)
    monkeypatch.setenv("DSCHAT_CACHE", str(tmp_path / "writer"))
    uri = commit(f"{bucket}/store", rows).uri
    monkeypatch.setenv("DSCHAT_CACHE", str(tmp_path / "reader"))
    fetched: list[str] = []
    download = storage.download

    def noted(address: str, local: Path) -> None:
        fetched.append(local.name)
        download(address, local)

    monkeypatch.setattr(storage, "download", noted)
    return load_artifact(uri), rows, fetched


def test_shards_on_s3_are_fetched_whole_once_and_mapped(remote: tuple[Artifact, list[Row], list[str]]) -> None:
    artifact, rows, fetched = remote
    folder = artifact.part("dialogues").folder()
    assert sorted(fetched) == sorted(path.name for path in folder.iterdir())
    reader = ShardReader(folder)
    assert reader.gather(range(25))[0].tolist() == np.concatenate([ids for ids, _ in rows]).tolist()
    assert reader.meta == [{"row": i} for i in range(25)]
    fetched.clear()
    assert artifact.part("dialogues").folder() == folder
    assert fetched == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_in_the_cache_is_fetched_again(
    remote: tuple[Artifact, list[Row], list[str]], damage: str
) -> None:
    artifact, rows, fetched = remote
    folder = artifact.part("dialogues").folder()
    path = folder / "shard-00001.bin"
    whole = path.read_bytes()
    fetched.clear()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if damage == "cut" else bytes([whole[0] ^ 1]) + whole[1:])
    assert artifact.part("dialogues").folder() == folder
    assert fetched == ["shard-00001.bin"]
    assert path.read_bytes() == whole
    assert ShardReader(folder).gather(range(25))[0].tolist() == np.concatenate([ids for ids, _ in rows]).tolist()


def test_an_object_damaged_on_s3_is_refused_and_does_not_stay_in_the_cache(
    remote: tuple[Artifact, list[Row], list[str]],
) -> None:
    artifact, _, _ = remote
    name = "dialogues/shard-00000.bin"
    whole = storage.read_bytes(f"{artifact.uri}/{name}")
    storage.write(f"{artifact.uri}/{name}", bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(IntegrityError, match=r"shard-00000\.bin"):
        artifact.part("dialogues").folder()
    assert not (artifact.local_root / name).exists()


def test_a_download_cut_in_the_middle_leaves_nothing_under_the_name(
    remote: tuple[Artifact, list[Row], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, _, _ = remote

    class Cut:
        def get_file(self, _: str, local: str) -> None:
            Path(local).write_bytes(b"half")
            raise ConnectionResetError("reset by peer")

    monkeypatch.setattr(storage, "filesystem", lambda _: Cut())
    with pytest.raises(Exception, match="cannot read"):
        artifact.part("dialogues").folder()
    assert [path for path in artifact.local_root.rglob("shard-*") if path.is_file()] == []
