"""The pure part of validation: one block of lines → its rows, what every gate says of them, and their signatures.

Gates that change rows come first (masking, then length), those that judge see what is kept. Nothing here knows of other
blocks, so blocks can be checked in any order on any number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import orjson
import xxhash

from dschat_core.config import Dataset, LengthGate, RowFormat, ToxicityGate, ValidationConfig
from dschat_core.data.gates import length, pii
from dschat_core.data.gates.block import MAX_EXAMPLES, Block, Finding, GateShard, GateTally
from dschat_core.data.gates.contamination import NgramIndex, contamination
from dschat_core.data.gates.detectors import Detector, load_detector
from dschat_core.data.gates.duplicates import Signatures, comparable, signatures
from dschat_core.data.gates.language import language
from dschat_core.data.gates.length import Measure
from dschat_core.data.gates.replies import replies
from dschat_core.data.gates.toxicity import toxicity
from dschat_core.data.reading import KEPT_BYTES, LineBlock, Record, parse_block
from dschat_core.data.schemas import RejectedRowError, Row, normalise, row_texts, split_text

GateName = Literal["length", "duplicates", "toxicity", "language", "pii", "replies", "contamination"]
GATES: tuple[GateName, ...] = get_args(GateName)

EXCERPT_CHARACTERS = 120


@dataclass
class CheckedBlock:
    """A block's rows as bytes and columns, and what became of its lines.

    Attributes:
        rows: the rows' JSON, one a line; forms: the same rows as duplicates are compared, UTF-8 without separators.
        row_sizes, form_sizes: bytes of each, int64 (rows,).
        line_numbers: int64 (rows,); several rows have the same where a dialogue was split.
        dropped: bool (rows,), by any gate whose action takes rows out.
        split, question: what decides the held-out side, and the hash of all but the last reply; uint64 (rows,).
    """

    lines: int
    blank: int
    accepted: int
    quarantined: list[Record]
    columns: Counter[str]
    rows: bytes
    row_sizes: np.ndarray
    forms: bytes
    form_sizes: np.ndarray
    line_numbers: np.ndarray
    dropped: np.ndarray
    split: np.ndarray
    question: np.ndarray
    signatures: Signatures
    tallies: dict[GateName, GateTally]


def check_block(
    kind: Dataset, section: ValidationConfig, written: tuple[RowFormat, dict[str, str]], block: LineBlock
) -> CheckedBlock:
    """Parse, normalise and judge a block of lines.

    Args:
        written: the source's `format` and `columns`.
    """
    records: list[Record] = []
    rows: list[Row] = []
    quarantined: list[Record] = []
    columns: Counter[str] = Counter()
    lines = blank = 0
    for record in parse_block(block):
        lines += 1
        if record.value is None:
            if record.reason is None:
                blank += 1
            else:
                quarantined.append(record)
            continue
        try:
            rows.append(normalise(kind, record.value, *written))
            records.append(record)
        except RejectedRowError as rejection:
            # Rows of a table have no line of their own to show.
            raw = record.raw or orjson.dumps(record.value, default=repr)[:KEPT_BYTES]
            quarantined.append(Record(record.file, record.line, record.offset, raw, reason=rejection.reason))
            if rejection.reason == "unknown_columns" or rejection.reason.startswith(("missing_", "not_")):
                columns.update(record.value.keys())
    line_numbers = np.array([record.line for record in records], dtype=np.int64)
    kept, origin, tallies = _transformed(block.file, kind, rows, line_numbers, section)
    line_numbers = line_numbers[origin.rows]
    dropped = origin.dropped
    shards: dict[GateName, GateShard] = {
        "toxicity": toxicity(kept, section.toxicity, _detector(section.toxicity)),
        "language": language(kept, section.language),
        "replies": replies(kept, section.replies),
    }
    for name, shard in shards.items():
        tallies[name] = _tally(shard, kept, block.file, line_numbers)
        if getattr(section, name).action == "drop":
            dropped[[finding.row for finding in shard.findings]] = True
    encoded = [orjson.dumps(row) for row in kept.rows]
    forms = [form.encode("utf-8") for form in kept.forms]
    return CheckedBlock(
        lines=lines,
        blank=blank,
        accepted=len(rows),
        quarantined=quarantined,
        columns=columns,
        rows=b"".join(row + b"\n" for row in encoded),
        row_sizes=np.array([len(row) + 1 for row in encoded], dtype=np.int64),
        forms=b"".join(forms),
        form_sizes=np.array([len(form) for form in forms], dtype=np.int64),
        line_numbers=line_numbers,
        dropped=dropped,
        # Only a pair is split by less than all that it says.
        split=_hashes(comparable(split_text(kind, row)).encode() for row in kept.rows)
        if kind == "preferences"
        else _hashes(forms),
        question=_hashes(comparable(_question(kind, texts)).encode() for texts in kept.texts),
        signatures=signatures(kept.forms, near=section.duplicates.near_jaccard < 1.0),
        tallies=tallies,
    )


@dataclass
class _Origin:
    """Where the kept rows come from: indices into the rows read, int64 (rows,), and which are dropped, bool (rows,)."""

    rows: np.ndarray
    dropped: np.ndarray


def _transformed(
    file: str, kind: Dataset, rows: list[Row], line_numbers: np.ndarray, section: ValidationConfig
) -> tuple[Block, _Origin, dict[GateName, GateTally]]:
    """The rows masked and brought to length as configured, and the tallies of the two gates that do it."""
    block = Block(kind, rows)
    found = pii.pii(block, section.pii)
    tallies: dict[GateName, GateTally] = {"pii": _tally(found, block, file, line_numbers)}
    dropped = np.zeros(len(rows), dtype=bool)
    flagged = [finding.row for finding in found.findings]
    if section.pii.action == "drop":
        dropped[flagged] = True
    elif section.pii.action == "mask" and flagged:
        rows = list(rows)
        for index in flagged:
            rows[index] = pii.masked(kind, rows[index])
        block = Block(kind, rows)
    measure = _measure(section.length)
    found = length.length(block, section.length, measure(kind, block.rows))
    tallies["length"] = _tally(found, block, file, line_numbers)
    origin = _Origin(np.arange(len(rows)), dropped)
    flagged = [finding.row for finding in found.findings]
    action = section.length.action
    if action == "drop":
        dropped[flagged] = True
    elif action in ("truncate", "split") and flagged:
        block, origin = _shortened(block, dropped, set(flagged), section.length, measure)
    return block, origin, tallies


def _shortened(
    block: Block, dropped: np.ndarray, too_long: set[int], section: LengthGate, measure: Measure
) -> tuple[Block, _Origin]:
    rows: list[Row] = []
    origin: list[int] = []
    gone: list[bool] = []
    for index, row in enumerate(block.rows):
        parts = length.shortened(block.kind, row, section, measure) if index in too_long else [row]
        # A row of which nothing fits stays in the table, dropped, so that the counts add up.
        rows += parts or [row]
        origin += [index] * max(1, len(parts))
        gone += [bool(dropped[index]) or not parts] * max(1, len(parts))
    return Block(block.kind, rows), _Origin(np.array(origin, dtype=np.int64), np.array(gone, dtype=bool))


def _tally(shard: GateShard, block: Block, file: str, line_numbers: np.ndarray) -> GateTally:
    return GateTally(
        total=len(block),
        count=len(shard.findings),
        reasons=Counter(finding.reason for finding in shard.findings),
        stats=shard.stats,
        examples=[
            example(file, int(line_numbers[finding.row]), finding, block.joined[finding.row])
            for finding in shard.findings[:MAX_EXAMPLES]
        ],
    )


def example(file: str, line: int, finding: Finding, text: str) -> dict[str, Any]:
    """A finding as the report shows it, personal data masked."""
    detail = {key: pii.mask_text(value) if isinstance(value, str) else value for key, value in finding.detail.items()}
    return {"file": file, "line": line, "reason": finding.reason, **detail, "excerpt": excerpt(text)}


def excerpt(text: str) -> str:
    """The beginning of a text, personal data masked."""
    # Far more than is shown, so that no number cut in two is left unmasked in it.
    return pii.mask_text(text[: 32 * EXCERPT_CHARACTERS])[:EXCERPT_CHARACTERS]


def check_contamination(
    kind: Dataset, index: NgramIndex, rows: tuple[bytes, Sequence[int]]
) -> tuple[list[Finding], Counter[str]]:
    """The contamination gate over rows as `CheckedBlock` holds them: (their JSON lines, which of them are asked of)."""
    lines = rows[0].splitlines()
    block = Block(kind, [orjson.loads(lines[i]) for i in rows[1]])
    shard = contamination(block, index)
    return shard.findings, shard.stats


def _question(kind: Dataset, texts: list[str]) -> str:
    """What a row answers: the turns before the reply; of plain text and prompts, all of it."""
    ends = {"dialogues": 1, "preferences": 2}
    return "\n".join(texts[: len(texts) - ends.get(kind, 0)])


def _hashes(texts: Iterable[bytes]) -> np.ndarray:
    return np.fromiter((xxhash.xxh3_64_intdigest(text) for text in texts), dtype=np.uint64)


@lru_cache(maxsize=2)
def _detector(section: ToxicityGate) -> Detector:
    return load_detector(section)


@lru_cache(maxsize=2)
def _measure(section: LengthGate) -> Measure:
    return length.exact_measure(Path(section.tokenizer)) if section.tokenizer else length.estimated_tokens


def checked_texts(kind: Dataset, row: Row) -> list[str]:
    """The texts of an evaluation prompt that training rows must not share: its user turns."""
    if kind == "text":
        return row_texts(kind, row)
    return [message["content"] for message in row["messages"] if message["role"] == "user"]
