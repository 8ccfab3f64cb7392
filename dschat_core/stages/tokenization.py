"""Normalised rows → a tokenizer and shards of token ids with their masks.

The tokenizer is trained on `text` (on `dialogues` where there is no text), or taken from a base model with its
template. The rows of a part are cut into ranges of about a shard each; a shard is a pure function of its range, made on
all cores, and finished when its record is written. So an interrupted run makes only the unfinished shards again, and a
damaged one alone. Limits are exact here: text is split, dialogues and prompts lose their oldest turns whole, and a row
of which nothing can be trained is dropped and counted by reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import orjson

from dschat_core import storage
from dschat_core.artifacts import Product
from dschat_core.chat_template import load_tokenizer
from dschat_core.config import TokenizationConfig, result_section
from dschat_core.data.encoding import Encoder, LongRows, Rows, encode_rows, fast_problem
from dschat_core.data.runner import resolve_workers, run_map
from dschat_core.data.shards import Masks, ShardInfo, ShardWriter, check_shard, info_name, read_info, write_index
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer
from dschat_core.errors import ConfigError, GateError

ROWS = "rows.jsonl"
BATCH_ROWS = 1000
# A batch takes about ten times its bytes in memory while it is laid out.
BATCH_BYTES = 4 * 2**20
# More text than this does not change which pairs are common.
MAX_TRAINING_BYTES = 256 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MASKS: dict[Rows, Masks] = {"text": "all", "dialogues": "rows", "preferences": "rows", "prompts": "none"}
WITH_META = ("preferences", "prompts")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ShardTask:
    """One shard to be made: bytes start … end of a part's rows, with this tokenizer, into this folder."""

    part: str
    number: int
    source: str
    start: int
    end: int
    folder: str
    tokenizer: str
    fast: bool
    max_length: int
    long_rows: LongRows

    @property
    def kind(self) -> Rows:
        """The data set whose rows these are."""
        return _kind(self.part)


def tokenization(
    section: TokenizationConfig,
    inputs: Mapping[str, Path],
    out: Path,
    *,
    state: Path | None = None,
    progress: Progress = lambda _: None,
) -> Product:
    """Write `tokenizer` and the shards of every part given.

    Args:
        inputs: validation's part (`text`, `text_heldout`, …) → its folder; `base_model` → the folder that stands for
            `section.base_model`, if it is elsewhere than that says.
        state: a folder that outlives an interrupted run; finished shards wait there.

    Raises:
        ConfigError: no data to train a tokenizer on, or a base model whose tokenizer or template can't be used.
        GateError: no row of a training part fits into `max_length`.
    """
    sources = {name: folder / ROWS for name, folder in inputs.items() if name != "base_model"}
    pieces = (state or out) / f"shards-{_plan_digest(section, sources)}"
    pieces.mkdir(parents=True, exist_ok=True)
    for stale in pieces.parent.glob("shards-*"):
        if stale != pieces:
            shutil.rmtree(stale)
    folder = pieces / "tokenizer"
    files = _kept_tokenizer(pieces) or _make_tokenizer(section, inputs, pieces, progress)
    tokenizer = load_tokenizer(folder)
    problem = fast_problem(tokenizer, _sample_texts(sources))
    if problem:
        progress(f"fastokens is not used, tokenization takes several times as long: {problem}")
    encoder = Encoder(tokenizer, fast=problem is None)
    tasks = [
        ShardTask(
            name, number, str(source), start, end, str(pieces / name), str(folder), problem is None, section.max_length,
            section.long_rows,
        )
        for name, source in sources.items()
        for number, (start, end) in enumerate(_ranges(_kind(name), source, section, encoder))
    ]  # fmt: skip
    shards = _made(
        tasks, resolve_workers(section.runtime.workers, sum(s.stat().st_size for s in sources.values())), progress
    )
    parts = {"tokenizer": [f"tokenizer/{name}" for name in files]}
    data: dict[str, Any] = {}
    for name, infos in shards.items():
        kind = _kind(name)
        index = write_index(
            pieces / name, infos, vocab_size=tokenizer.vocab_size, masks=MASKS[kind], has_meta=kind in WITH_META
        )
        dropped = sum((Counter(info.dropped) for info in infos), Counter[str]())
        if name == kind and not index["rows"]:
            raise GateError(
                f"no row of {name} is left after tokenization",
                where=f"tokenization.max_length={section.max_length}",
                why=", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or f"{name} is empty",
                fix="raise tokenization.max_length or shorten the rows",
            )
        names = [file for info in infos for file in (*info.files, info_name(info.number))]
        parts[name] = [f"{name}/{file}" for file in (*names, "index.json")]
        data[name] = {key: index[key] for key in ("rows", "tokens", "targets", "bytes")} | {"dropped": dict(dropped)}
        lost = f", dropped {dict(dropped)}" if dropped else ""
        progress(f"{name}: {index['rows']:,} rows, {index['tokens']:,} tokens, {index['targets']:,} trained{lost}")
    out.mkdir(parents=True, exist_ok=True)
    for name in parts:
        os.replace(pieces / name, out / name)
    shutil.rmtree(pieces)
    facts = {
        "vocab_size": tokenizer.vocab_size,
        "own_template": tokenizer.is_own_template,
        "fast_encoder": problem is None,
        "pieces": pieces.name,
        "data": data,
    }
    return Product(parts=parts, facts=facts)


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The normalised rows of a validation part, in order."""
    with (folder / ROWS).open("rb") as file:
        for line in file:
            yield orjson.loads(line)


def _kind(part: str) -> Rows:
    kind = part.removesuffix("_heldout")
    assert kind in MASKS
    return kind


# ── the tokenizer ───────────────────────────────────────────────────────────────────────────────────────


def _plan_digest(section: TokenizationConfig, sources: Mapping[str, Path]) -> str:
    """What finished shards must have been made with: another library may give another tokenizer or other ids."""
    versions = {}
    for package in ("tokenizers", "fastokens"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    sizes = {name: source.stat().st_size for name, source in sources.items()}
    return storage.sha256_json([section.version, result_section(section), versions, sizes])[:12]


def _kept_tokenizer(pieces: Path) -> list[str] | None:
    """The files of a tokenizer that an earlier attempt finished, if they are whole."""
    with suppress(OSError, ValueError):
        files: dict[str, str] = orjson.loads((pieces / "tokenizer.json").read_bytes())
        if all(storage.sha256_file(pieces / "tokenizer" / name) == digest for name, digest in files.items()):
            return list(files)
    return None


def _make_tokenizer(
    section: TokenizationConfig, inputs: Mapping[str, Path], pieces: Path, progress: Progress
) -> list[str]:
    folder = pieces / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if section.base_model is not None:
        source = inputs.get("base_model", Path(section.base_model))
        load_tokenizer(source)
        names = [name for name in TOKENIZER_FILES if (source / name).exists()]
        for name in names:
            shutil.copyfile(source / name, folder / name)
        progress(f"tokenizer of {source}")
    else:
        tokenizer = train_tokenizer(_training_texts(inputs), vocab_size=section.vocab_size)
        progress(f"tokenizer trained: {tokenizer.get_vocab_size():,} entries")
        names = save_tokenizer(tokenizer, folder, max_length=section.max_length)
    record = {name: storage.sha256_file(folder / name) for name in names}
    storage.write(str(pieces / "tokenizer.json"), orjson.dumps(record))
    return names


def _training_texts(inputs: Mapping[str, Path]) -> Iterator[str]:
    """The texts a tokenizer is trained on; of much more than enough every n-th row."""
    kind = next((kind for kind in ("text", "dialogues") if kind in inputs), None)
    if kind is None:
        raise ConfigError(
            "there is no text to train a tokenizer on",
            fix="set data.text or data.dialogues, or tokenization.base_model to a Hugging Face folder",
        )
    every = -(-(inputs[kind] / ROWS).stat().st_size // MAX_TRAINING_BYTES) or 1
    rows = islice(read_rows(inputs[kind]), 0, None, every)
    if kind == "text":
        return (row["text"] for row in rows)
    return (message["content"] for row in rows for message in row["messages"])


def _sample_texts(sources: Mapping[str, Path]) -> list[str]:
    """Some texts of every part, on which the fast encoder has to agree."""
    found: list[str] = []
    for name, source in sources.items():
        for row in islice(read_rows(source.parent), 100):
            found += [row["text"]] if _kind(name) == "text" else [message["content"] for message in row["messages"]]
    return found


# ── shards ──────────────────────────────────────────────────────────────────────────────────────────────


def _ranges(kind: Rows, source: Path, section: TokenizationConfig, encoder: Encoder) -> list[tuple[int, int]]:
    """The rows of a file in ranges of bytes, each of whole lines, that give shards of about `shard_bytes`."""
    size = source.stat().st_size
    sample = next(_line_batches(source, 0, size), [])
    encoded = encode_rows(kind, encoder, [orjson.loads(line) for line in sample], section.max_length, section.long_rows)
    token_bytes = (2 if encoder.tokenizer.vocab_size <= 2**16 else 4) * len(encoded.values)
    sampled = sum(map(len, sample))
    step = max(1, section.shard_bytes * sampled // token_bytes) if token_bytes else max(1, size)
    edges = [0]
    with source.open("rb") as file:
        while edges[-1] + step < size:
            file.seek(edges[-1] + step)
            file.readline()
            edges.append(file.tell())
    if edges[-1] < size or len(edges) == 1:
        edges.append(size)
    return list(pairwise(edges))


def _made(tasks: Sequence[ShardTask], workers: int, progress: Progress) -> dict[str, list[ShardInfo]]:
    """The shards of every part: those finished before are kept, the others are made."""
    infos: dict[tuple[str, int], ShardInfo] = {}
    missing: list[ShardTask] = []
    for task in tasks:
        info = read_info(Path(task.folder), task.number)
        if info is None:
            missing.append(task)
        elif problem := check_shard(Path(task.folder), info):
            progress(f"{task.part}: shard {task.number} is damaged and made again: {problem}")
            missing.append(task)
        else:
            infos[task.part, task.number] = info
    if infos:
        progress(f"{len(infos)} of {len(tasks)} shards were finished before and are kept")
    for task, info in zip(missing, run_map(make_shard, missing, workers=workers), strict=True):
        infos[task.part, task.number] = info
        progress(f"{task.part}: shard {task.number} made, {info.tokens:,} tokens ({len(infos)} of {len(tasks)})")
    found: dict[str, list[ShardInfo]] = {}
    for task in tasks:
        found.setdefault(task.part, []).append(infos[task.part, task.number])
    return found


def make_shard(task: ShardTask) -> ShardInfo:
    """Encode a range of rows into one shard; a pure function of the task and the files that it names."""
    encoder = _encoder(task.tokenizer, task.fast)
    writer = ShardWriter(
        Path(task.folder),
        task.number,
        vocab_size=encoder.tokenizer.vocab_size,
        masks=MASKS[task.kind],
        has_meta=task.kind in WITH_META,
    )
    dropped: Counter[str] = Counter()
    for lines in _line_batches(Path(task.source), task.start, task.end):
        rows = [orjson.loads(line) for line in lines]
        found = encode_rows(task.kind, encoder, rows, task.max_length, task.long_rows)
        writer.add_batch(found.values, found.offsets, mask=found.mask, num_bytes=found.num_bytes, meta=found.meta)
        dropped.update(found.dropped)
    return writer.close(dropped)


@lru_cache(maxsize=1)
def _encoder(tokenizer: str, fast: bool) -> Encoder:
    return Encoder(load_tokenizer(tokenizer), fast=fast)


def _line_batches(source: Path, start: int, end: int) -> Iterator[list[bytes]]:
    with source.open("rb") as file:
        file.seek(start)
        at = start
        while at < end:
            lines: list[bytes] = []
            last = min(end, at + BATCH_BYTES)
            while at < last and len(lines) < BATCH_ROWS:
                lines.append(file.readline())
                at += len(lines[-1])
            yield lines
