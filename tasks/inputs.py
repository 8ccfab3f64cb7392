"""The digests of the raw input files: what the key of validation is made of."""

from __future__ import annotations

from pathlib import Path

from dschat_core import storage
from dschat_core.artifacts import InputEntry
from dschat_core.config import DataConfig, RunConfig, ValidationConfig
from dschat_core.data import hub
from dschat_core.data.reading import input_files, unique_files
from dschat_core.errors import IntegrityError
from tasks.produce import GivenFolder


def file_digests(config: RunConfig) -> dict[str, str]:
    """{address: SHA-256} of every input file, from memory where a file has not changed."""
    memory = storage.DigestMemory(Path(config.runs) / ".digests.json")
    named = [uri for files in input_files(config.data).values() for uri, _ in files]
    named += unique_files(config.validation.contamination.against)
    return {uri: hub.source_digest(uri) if hub.is_dataset(uri) else memory.sha256(uri) for uri in named}


def input_entries(sources: DataConfig, digests: dict[str, str]) -> dict[str, InputEntry]:
    """One entry a data set: its digest covers roles, order, formats and contents, but not where the files lie."""
    entries: dict[str, InputEntry] = {}
    for dataset, files in input_files(sources).items():
        source = sources.sources()[dataset]
        contents = [[role, "".join(Path(uri).suffixes), digests[uri]] for uri, role in files]
        entries[dataset] = InputEntry(
            digest=storage.sha256_json([source.format, source.columns, contents]),
            uri=", ".join(uri for uri, _ in files),
        )
    return entries


def checking_entries(section: ValidationConfig, digests: dict[str, str]) -> dict[str, InputEntry]:
    """What the gates read beside the data: evaluation prompts, a tokenizer, a classifier in a local folder."""
    entries = {}
    if against := unique_files(section.contamination.against):
        contents = [["".join(Path(uri).suffixes), digests[uri]] for uri in against]
        entries["against"] = InputEntry(digest=storage.sha256_json(contents), uri=", ".join(against))
    if section.length.tokenizer:
        entries["tokenizer"] = GivenFolder(section.length.tokenizer).entry()
    detector = section.toxicity.detector.removeprefix("hf:")
    if detector != section.toxicity.detector and Path(detector).is_dir():
        entries["detector"] = GivenFolder(detector).entry()
    return entries


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
