"""Shards give back what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dschat_core.data.shards import ShardReader, ShardWriter, trained_bytes
from dschat_core.errors import IntegrityError


def rows(count: int, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, count)
    return [(rng.integers(0, vocab_size, n), rng.random(n) < 0.5) for n in lengths]


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_rows_round_trip_over_several_shards(tmp_path: Path, vocab_size: int) -> None:
    written = rows(100, vocab_size)
    writer = ShardWriter(tmp_path, vocab_size=vocab_size, masks="rows", shard_bytes=500, has_meta=True)
    for i, (ids, mask) in enumerate(written):
        writer.add(ids, mask, num_bytes=i, meta={"row": i})
    index = writer.close()
    assert sorted(writer.files) == sorted(path.name for path in tmp_path.iterdir())
    reader = ShardReader(tmp_path)
    assert len(index["shards"]) > 3
    assert len(reader) == 100
    assert index["tokens"] == reader.lengths.sum()
    assert reader.num_bytes.tolist() == list(range(100))
    assert reader.meta is not None
    for i, (ids, mask) in enumerate(written):
        assert np.array_equal(reader.tokens(i), ids)
        assert reader.tokens(i).dtype == np.int64
        assert np.array_equal(reader.mask(i)[1:], mask[1:])
        assert not reader.mask(i)[0]
        assert reader.num_targets[i] == reader.mask(i).sum()
        assert reader.meta[i] == {"row": i}


def test_all_tokens_but_the_first_are_targets_of_text(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, vocab_size=10, masks="all", shard_bytes=1000)
    writer.add(np.arange(5), num_bytes=7)
    assert writer.close()["targets"] == 4
    reader = ShardReader(tmp_path)
    assert reader.mask(0).tolist() == [False, True, True, True, True]
    assert reader.num_targets.tolist() == [4]
    assert reader.meta is None


def test_prompts_have_no_targets_and_an_empty_part_has_no_rows(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "prompts", vocab_size=10, masks="none", shard_bytes=1000)
    writer.add(np.arange(5), num_bytes=0)
    writer.close()
    assert not ShardReader(tmp_path / "prompts").mask(0).any()
    ShardWriter(tmp_path / "empty", vocab_size=10, masks="rows", shard_bytes=1000, has_meta=True).close()
    empty = ShardReader(tmp_path / "empty")
    assert len(empty) == len(empty.lengths) == 0
    assert empty.meta == []


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, vocab_size=10, masks="all", shard_bytes=1000)
    writer.add(np.arange(5), num_bytes=7)
    writer.close()
    path = tmp_path / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"shard-00000\.bin"):
        ShardReader(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(IntegrityError, match=r"index\.json"):
        ShardReader(tmp_path)


def test_a_row_outside_is_an_index_error(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, vocab_size=10, masks="all", shard_bytes=1000)
    writer.add(np.arange(5), num_bytes=7)
    writer.close()
    for row in (-1, 1):
        with pytest.raises(IndexError):
            ShardReader(tmp_path).tokens(row)


def test_trained_bytes_leave_out_position_zero_and_what_is_not_masked() -> None:
    sizes = np.array([1, 10, 100])
    assert trained_bytes(np.array([2, 1, 0, 2]), np.array([True, True, False, True]), sizes) == 110
