"""Hugging Face data sets as input: folders of `save_to_disk`, and names of a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dschat_core.config import DataConfig, DataSource
from dschat_core.data import hub
from dschat_core.data.reading import expand, input_files, missing_files, parse_block, read_blocks, read_records
from dschat_core.errors import ConfigError

datasets = pytest.importorskip("datasets")
ROWS = [{"input": f"u{i}", "output": f"a{i}"} for i in range(5000)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: a data set; `dict`: train and validation; `odd`: a dictionary without a split of a known name."""
    folder = tmp_path_factory.mktemp("saved")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(folder / "one"))
    splits = {"train": whole.select(range(7)), "validation": whole.select(range(7, 10))}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "dict"))
    datasets.DatasetDict({"first": whole.select([0])}).save_to_disk(str(folder / "odd"))
    return folder


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A folder as a hub's repository is laid out: one file a split."""
    for name, rows in (("train", ROWS[:5]), ("test", ROWS[5:7])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values(uri: str | Path) -> list[Any]:
    return [record.value for record in read_records(str(uri), max_line_bytes=1000)]


def test_a_saved_data_set_gives_its_rows_numbered_in_blocks(saved: Path) -> None:
    blocks = list(read_blocks(str(saved / "one"), max_line_bytes=10**6))
    records = [record for block in blocks for record in parse_block(block)]
    assert len(blocks) > 1
    assert [record.value for record in records] == ROWS
    assert [record.line for record in records] == list(range(1, 5001))
    assert {(record.file, record.offset, record.reason) for record in records} == {(str(saved / "one"), None, None)}


def test_a_split_is_named_after_a_colon_and_is_train_unless_named(saved: Path) -> None:
    assert values(saved / "dict") == values(saved / "dict:train") == ROWS[:7]
    assert values(saved / "dict:validation") == ROWS[7:10]


@pytest.mark.parametrize(
    ("name", "splits"), [("dict:nope", "train, validation"), ("odd", "first"), ("one:test", "one data set")]
)
def test_a_split_that_is_not_there_is_an_error_that_lists_those_that_are(saved: Path, name: str, splits: str) -> None:
    with pytest.raises(ConfigError, match="has no split") as caught:
        values(saved / name)
    assert splits in caught.value.why


def test_saved_folders_are_input_files_and_held_out_ones_take_the_split_of_their_role(saved: Path) -> None:
    folder = str(saved / "dict")
    assert expand(folder) == [folder]
    assert expand(f"{folder}:train") == [f"{folder}:train"]
    sources = DataConfig(dialogues=DataSource(train=(folder, str(saved / "one")), heldout=(folder,)))
    assert missing_files(sources) == []
    assert input_files(sources) == {
        "dialogues": [(folder, "train"), (str(saved / "one"), "train"), (f"{folder}:validation", "heldout")]
    }


@pytest.mark.parametrize(
    "uri", ["hf:owner/name", "rows.jsonl", "s3://bucket/rows", "{saved}/one", "{saved}/dict:train"]
)
def test_a_source_that_has_no_role_to_choose_by_stays_as_it_is(saved: Path, uri: str) -> None:
    uri = uri.format(saved=saved)
    assert hub.heldout_split(uri) == uri


def test_an_ordinary_folder_is_no_data_set(tmp_path: Path) -> None:
    assert not hub.is_dataset(str(tmp_path))
    assert expand(str(tmp_path)) == []


def test_a_name_is_read_through_the_library_with_its_split(named: Path) -> None:
    assert expand(f"hf:{named}") == [f"hf:{named}"]
    assert values(f"hf:{named}") == ROWS[:5]
    assert values(f"hf:{named}:test") == ROWS[5:7]


def test_the_errors_of_a_name_say_what_is_wrong(named: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        values(f"hf:{named}:nope")
    assert "'train', 'test'" in caught.value.why
    with pytest.raises(ConfigError, match="no folder /nowhere/at/all"):
        values("hf:/nowhere/at/all")


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("hf:owner/name", ("owner/name", None, "train")),
        ("hf:owner/name:test", ("owner/name", None, "test")),
        ("hf:owner/name/main", ("owner/name", "main", "train")),
        ("hf:owner/name/main:train[:5%]", ("owner/name", "main", "train[:5%]")),
    ],
)
def test_a_name_has_a_configuration_and_a_split(uri: str, parts: tuple[str, str | None, str]) -> None:
    assert hub._hub_name(uri) == parts


def test_a_hub_that_cannot_be_reached_is_an_error_with_the_way_out() -> None:
    program = (
        "from dschat_core.data import hub\n"
        "from dschat_core.errors import ConfigError\n"
        "for call in (lambda: list(hub.batches('hf:owner/name')), lambda: hub.source_digest('hf:owner/name')):\n"
        "    try:\n"
        "        call()\n"
        "    except ConfigError as error:\n"
        "        print(error.what, '|', error.why, '|', error.fix)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("cannot read the data set hf:owner/name")
        assert "Offline" in line
        assert "save_to_disk" in line


def test_the_library_is_only_imported_where_a_data_set_is_read() -> None:
    program = "import sys, dschat_core.data.reading; print('datasets' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_digest_of_a_saved_data_set_is_of_its_contents(saved: Path, tmp_path: Path) -> None:
    uri = str(saved / "dict")
    assert hub.source_digest(uri) == hub.source_digest(uri)
    assert hub.source_digest(uri) != hub.source_digest(f"{uri}:validation")
    copy = tmp_path / "moved"
    subprocess.run(["cp", "-r", uri, str(copy)], check=True)
    assert hub.source_digest(str(copy)) == hub.source_digest(uri)
    table = next(copy.rglob("*.arrow"))
    table.write_bytes(table.read_bytes() + b"\0")
    assert hub.source_digest(str(copy)) != hub.source_digest(uri)


def test_the_digest_of_a_name_changes_with_its_files(named: Path) -> None:
    before = hub.source_digest(f"hf:{named}")
    assert before == hub.source_digest(f"hf:{named}")
    (named / "train.jsonl").write_text(json.dumps(ROWS[9]) + "\n")
    assert hub.source_digest(f"hf:{named}") != before


def test_a_damaged_data_set_is_an_error_that_names_it(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(saved / "one"), str(copy)], check=True)
    for table in copy.rglob("*.arrow"):
        table.write_bytes(b"not arrow")
    with pytest.raises(ConfigError, match="cannot read the data set") as caught:
        values(copy)
    assert str(copy) in caught.value.what
