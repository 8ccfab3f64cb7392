"""The digests of the raw input files: what the key of validation is made of."""

from __future__ import annotations

from pathlib import Path

from dschat_core import storage
from dschat_core.artifacts import InputEntry
from dschat_core.config import DataConfig, RunConfig
from dschat_core.errors import IntegrityError
from dschat_core.stages.validation import input_files


def file_digests(config: RunConfig) -> dict[str, str]:
    """{address: SHA-256} of every input file, from memory where a file has not changed."""
    memory = storage.DigestMemory(Path(config.runs) / ".digests.json")
    return {uri: memory.sha256(uri) for files in input_files(config.data).values() for uri, _ in files}


def input_entries(sources: DataConfig, digests: dict[str, str]) -> dict[str, InputEntry]:
    """One entry a data set: its digest covers roles, order, formats and contents, but not where the files lie."""
    return {
        dataset: InputEntry(
            digest=storage.sha256_json([[role, "".join(Path(uri).suffixes), digests[uri]] for uri, role in files]),
            uri=", ".join(uri for uri, _ in files),
        )
        for dataset, files in input_files(sources).items()
    }


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """A line for each file that was edited, added or removed since the last run."""
    rows = [f"{uri} was edited" for uri in now if uri in before and before[uri] != now[uri]]
    rows += [f"{uri} is new" for uri in now if uri not in before]
    return rows + [f"{uri} is gone" for uri in before if uri not in now]


def refuse_changed_files(config: RunConfig, before: dict[str, str]) -> None:
    """Raises IntegrityError naming each input file that is not what the run read."""
    if rows := changed_files(before, file_digests(config)):
        raise IntegrityError(
            "the input changed since this run began: " + "; ".join(rows),
            where=str(config.folder),
            why="resume continues a run with exactly what it began with",
            fix="restore the file, or start a new run of it: dschat run CONFIG",
        )
