"""Hugging Face data sets as input: a `save_to_disk` folder, or `hf:name[/config][:split]` from a hub.

`datasets` is imported only where one is read.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_core import storage
from dschat_core.errors import ConfigError

HUB = "hf:"
BATCH_ROWS = 2048
DEFAULT_SPLIT = "train"
# By preference; without any of them a held-out source must say which it means.
HELDOUT_SPLITS = ("test", "validation")
# What `save_to_disk` writes for one split, and for a dictionary of them.
SPLIT_MARK, DICT_MARK = "state.json", "dataset_dict.json"


def is_dataset(uri: str) -> bool:
    """Whether an address names a data set rather than a file: `hf:…`, or a folder that `save_to_disk` wrote."""
    return uri.startswith(HUB) or _saved(uri) is not None


def _saved(uri: str) -> tuple[str, str | None] | None:
    """(folder, split) of a saved data set; the split may follow the folder after a colon."""
    if storage.is_remote(uri):
        return None
    head, colon, tail = uri.rpartition(":")
    for folder, split in ((uri, None), (head, tail)) if colon else ((uri, None),):
        path = storage.local_path(folder)
        if any(os.path.isfile(path / mark) for mark in (SPLIT_MARK, DICT_MARK)):
            return folder, split
    return None


def heldout_split(uri: str) -> str:
    """A source of held-out rows: where a saved dictionary's split is not named, its `test` or `validation`."""
    if uri.startswith(HUB) or (saved := _saved(uri)) is None or saved[1] is not None:
        return uri
    mark = storage.local_path(uri) / DICT_MARK
    if not mark.is_file():
        return uri
    splits = json.loads(mark.read_text())["splits"]
    return f"{uri}:{next((name for name in HELDOUT_SPLITS if name in splits), HELDOUT_SPLITS[0])}"


def batches(uri: str) -> Iterator[Any]:
    """The rows of a data set as Arrow tables, streamed.

    Raises:
        ConfigError: the data set or its split does not exist, or cannot be reached.
    """
    with _explained(uri):
        yield from _opened(uri).with_format("arrow").iter(batch_size=BATCH_ROWS)


def source_digest(uri: str) -> str:
    """A digest that changes with the data set: of a saved one its files, of a hub's the files' names at their revision.

    Raises:
        ConfigError: as `batches`.
    """
    if saved := _saved(uri):
        root = storage.local_path(saved[0])
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return storage.sha256_json(
            [saved[1], [[str(path.relative_to(root)), storage.sha256_file(path)] for path in files]]
        )
    name, config, split = _hub_name(uri)
    with _explained(uri):
        found = _datasets().load_dataset_builder(name, config).config.data_files or {}
    names = [str(file) for group in found.values() for file in group]
    return storage.sha256_json(
        [
            name,
            config,
            split,
            [[file, storage.sha256_file(Path(file)) if Path(file).is_file() else None] for file in names],
        ]
    )


def _datasets() -> Any:
    # Half a second of imports, only where a data set is read.
    return importlib.import_module("datasets")


def _opened(uri: str) -> Any:
    datasets = _datasets()
    if (saved := _saved(uri)) is None:
        name, config, named = _hub_name(uri)
        return datasets.load_dataset(name, config, split=named, streaming=True)
    folder, split = saved
    found = datasets.load_from_disk(str(storage.local_path(folder)))
    if not isinstance(found, datasets.DatasetDict):
        if split is not None and split != str(found.split):
            raise ConfigError(
                f"{folder} has no split {split}",
                why="it is one data set, not a dictionary of them",
                fix=f"name it as {folder}",
            )
        return found
    if (split or DEFAULT_SPLIT) not in found:
        raise ConfigError(
            f"{folder} has no split {split or DEFAULT_SPLIT}",
            why=f"its splits are {', '.join(found)}",
            fix=f"name one of them, as {folder}:{next(iter(found), DEFAULT_SPLIT)}",
        )
    return found[split or DEFAULT_SPLIT]


def _hub_name(uri: str) -> tuple[str, str | None, str]:
    """(name, config, split): a hub's names have one slash, a folder in a name's place has any number."""
    name, _, split = uri.removeprefix(HUB).partition(":")
    if Path(name).is_dir():
        return name, None, split or DEFAULT_SPLIT
    if name.startswith(("/", ".", "~")):
        raise ConfigError(
            f"no folder {name} for {uri}", fix="correct the path, or name a data set of a hub: hf:owner/name"
        )
    parts = name.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None, split or DEFAULT_SPLIT


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn the errors of `datasets` into ours."""
    try:
        yield
    except ConfigError:
        raise
    # Its errors come from a dozen libraries: hub, http, fsspec, arrow, its own.
    except Exception as error:
        raise ConfigError(
            f"cannot read the data set {uri}",
            why=f"{type(error).__name__}: {error}".splitlines()[0][:300],
            fix="check its name and split; without a network save it first (`save_to_disk`) and name the folder",
        ) from error
