"""Raw files → normalised rows, a quarantine of what could not be read, and a verdict on the rest.

Every line is accepted, quarantined with a reason code or blank: the three add up to the lines read. The gates then
judge the accepted rows of each data set by themselves; what one data set holds never changes another's part. Where a
data set names no held-out files, conversations are held out by a hash of what was said. A text that stands on both
sides is removed from the training side.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import orjson
import xxhash

from dschat_core.artifacts import Product
from dschat_core.config import DataConfig, Dataset, ValidationConfig
from dschat_core.data.gates.duplicates import comparable, exact_key, find_duplicates
from dschat_core.data.gates.length import Measure, estimated_tokens, exact_measure
from dschat_core.data.gates.toxicity import toxic_span
from dschat_core.data.gates.verdict import GateResult, judge
from dschat_core.data.reading import Record, expand, input_files, missing_files, read_records, unique_files
from dschat_core.data.schemas import RejectedRowError, Row, detect_kind, normalise, row_texts, split_text
from dschat_core.errors import ConfigError, GateError

__all__ = ["input_files", "missing_files", "validate_files", "validation"]

ROWS = "rows.jsonl"
VERDICT = "verdict.json"
NUM_EXAMPLES = 5
EXCERPT_CHARACTERS = 120
DETECTION_RECORDS = 20

GateName = Literal["length", "duplicates", "toxicity"]
GATE_NAMES: tuple[GateName, ...] = ("length", "duplicates", "toxicity")


@dataclass
class Lines:
    """What became of a data set's lines."""

    lines: int = 0
    blank: int = 0
    accepted: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    empty_files: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For the verdict file."""
        counts = {key: getattr(self, key) for key in ("lines", "blank", "accepted", "quarantined")}
        return {**counts, "reasons": dict(self.reasons), "empty_files": self.empty_files}


@dataclass(slots=True)
class Accepted:
    """A row that was read, with what the gates ask of it. `data` is its JSON, `split` decides its side."""

    file: str
    line: int
    heldout: bool
    data: bytes
    form: str
    num_tokens: int
    toxic: str | None
    split: int


def validation(
    section: ValidationConfig,
    sources: DataConfig,
    out: Path,
    *,
    tokenizer: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Product:
    """Write the part of every data set and of its held-out half, `verdict.json` and the quarantine.

    Args:
        tokenizer: count lengths exactly with this folder's tokenizer; otherwise they are estimated from below.

    Raises:
        ConfigError: a file is missing or unreadable.
        GateError: a gate whose action is `fail` is over its threshold, or a data set has no usable row; `verdict.json`
            is written first.
    """
    measure = exact_measure(tokenizer) if tokenizer is not None else estimated_tokens
    parts: dict[str, list[str]] = {}
    verdicts: dict[str, Any] = {}
    refusals: list[GateError] = []
    (out / "quarantine").mkdir(parents=True, exist_ok=True)
    for name, files in input_files(sources).items():
        with (out / "quarantine" / f"{name}.jsonl").open("wb") as quarantine:
            rows, lines = _read(name, files, section, measure, quarantine)
        if not any(role == "heldout" for _, role in files):
            _hold_out(rows, section.heldout_share)
        keep, gates = apply_gates(rows, section)
        overlap = _overlap(rows, keep)
        keep &= ~overlap
        sides = _write_sides(name, rows, keep, out)
        parts.update({part: [f"{part}/{ROWS}"] for part in sides})
        counts = {"train": sides[name], "heldout": sides[f"{name}_heldout"]}
        verdicts[name] = {
            **lines.as_dict(),
            "files": [{"file": uri, "role": role} for uri, role in files],
            "gates": {gate: result.as_dict() for gate, result in gates.items()},
            "length_measure": "tokenizer" if tokenizer is not None else "estimate",
            "overlap_removed": int(overlap.sum()),
            "rows": counts,
        }
        refusals += _refusals(name, section, lines, gates, counts, int(overlap.sum()), out / VERDICT)
        progress(_summary(name, lines, gates, counts, int(overlap.sum())))
        for empty in lines.empty_files:
            progress(f"{name}: {empty} is empty")
    verdict = {"verdict": "fail" if refusals else "pass", "datasets": verdicts}
    (out / VERDICT).write_bytes(orjson.dumps(verdict, option=orjson.OPT_INDENT_2) + b"\n")
    if refusals:
        raise refusals[0]
    parts["report"] = [VERDICT, *(f"quarantine/{name}.jsonl" for name in verdicts)]
    facts = {
        name: {"rows": found["rows"], "quarantined": found["quarantined"], "overlap_removed": found["overlap_removed"]}
        for name, found in verdicts.items()
    }
    return Product(parts=parts, facts={"verdict": verdict["verdict"], "datasets": facts})


def validate_files(files: Sequence[str], section: ValidationConfig, kind: Dataset | None = None) -> dict[str, Any]:
    """Check files as one data set, without writing anything.

    Args:
        files: paths or globs, local or `s3://`.
        kind: the data set they are; None: found out from their first rows.

    Returns:
        {kind, lines, blank, accepted, quarantined, reasons, empty_files, gates, usable, quarantine, verdict, why}, with
        the first quarantined lines named in `quarantine`. `verdict` is `fail` where validation would refuse the files.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    for pattern in files:
        if not expand(pattern):
            raise ConfigError(f"missing input file: {pattern}", fix="correct the path")
    found = [(uri, "train") for uri in unique_files(files)]
    kind = kind or _detect(found, section)
    examples: list[dict[str, Any]] = []
    rows, lines = _read(kind, found, section, estimated_tokens, examples)
    keep, gates = apply_gates(rows, section)
    usable = int(keep.sum())
    counts = {"train": usable, "heldout": 1}
    refusals = _refusals(kind, section, lines, gates, counts, 0, None)
    return {
        "kind": kind,
        **lines.as_dict(),
        "gates": {name: result.as_dict() for name, result in gates.items()},
        "usable": usable,
        "quarantine": examples,
        "verdict": "fail" if refusals else "pass",
        "why": [refusal.what for refusal in refusals],
    }


def _detect(files: Sequence[tuple[str, str]], section: ValidationConfig) -> Dataset:
    """The kind of the first readable rows; `.txt` is text. Undecidable files count as dialogues."""
    for uri, _ in files:
        if uri.lower().removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
            return "text"
        values = (r.value for r in read_records(uri, max_line_bytes=section.max_line_bytes) if r.value is not None)
        if kind := detect_kind(islice(values, DETECTION_RECORDS)):
            return kind
    return "dialogues"


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────


def _read(
    name: Dataset,
    files: Sequence[tuple[str, str]],
    section: ValidationConfig,
    measure: Measure,
    quarantine: BinaryIO | list[dict[str, Any]],
) -> tuple[list[Accepted], Lines]:
    rows: list[Accepted] = []
    lines = Lines()
    for uri, role in files:
        before = lines.lines
        for record in read_records(uri, max_line_bytes=section.max_line_bytes):
            lines.lines += 1
            if record.value is None and record.reason is None:
                lines.blank += 1
                continue
            try:
                rows.append(_accept(name, record, section, measure, heldout=role == "heldout"))
            except RejectedRowError as rejection:
                lines.quarantined += 1
                lines.reasons[rejection.reason] += 1
                _quarantine(record, rejection.reason, quarantine)
        if lines.lines == before:
            lines.empty_files.append(uri)
    lines.accepted = len(rows)
    return rows, lines


def _accept(name: Dataset, record: Record, section: ValidationConfig, measure: Measure, *, heldout: bool) -> Accepted:
    if record.reason is not None:
        raise RejectedRowError(record.reason)
    row: Row = normalise(name, record.value)
    texts = row_texts(name, row)
    checked = row_texts(name, row, with_rejected=section.toxicity.check_rejected)
    return Accepted(
        file=record.file,
        line=record.line,
        heldout=heldout,
        data=orjson.dumps(row),
        form=comparable("\n".join(texts)),
        num_tokens=measure(name, row),
        toxic=next((span for text in checked if (span := toxic_span(text))), None),
        split=xxhash.xxh3_64_intdigest(comparable(split_text(name, row)).encode()),
    )


def _quarantine(record: Record, reason: str, into: BinaryIO | list[dict[str, Any]]) -> None:
    entry: dict[str, Any] = {
        "file": record.file,
        "line": record.line,
        "offset": record.offset,
        "reason": reason,
    }
    if isinstance(into, list):
        if len(into) < NUM_EXAMPLES:
            into.append({**entry, "raw": record.raw[:EXCERPT_CHARACTERS].decode("utf-8", "replace")})
        return
    into.write(orjson.dumps({**entry, "raw_base64": base64.b64encode(record.raw).decode()}) + b"\n")


# ── gates ───────────────────────────────────────────────────────────────────────────────────────────────


def apply_gates(rows: Sequence[Accepted], section: ValidationConfig) -> tuple[np.ndarray, dict[GateName, GateResult]]:
    """Which rows stay, bool (rows,), and each gate's result. Every gate sees all rows, whatever another drops."""
    keep = np.ones(len(rows), dtype=bool)
    first = _first_of_side(rows, section.duplicates.near_jaccard)
    flagged: dict[GateName, np.ndarray] = {
        "length": np.array([row.num_tokens > section.length.max_tokens for row in rows], dtype=bool),
        "duplicates": first != np.arange(len(rows)),
        "toxicity": np.array([row.toxic is not None for row in rows], dtype=bool),
    }

    def example(name: GateName, i: int) -> dict[str, Any]:
        row = rows[i]
        found: dict[str, Any] = {"file": row.file, "line": row.line}
        if name == "length":
            found["tokens"] = row.num_tokens
        elif name == "duplicates":
            found["first"] = f"{rows[first[i]].file}:{rows[first[i]].line}"
        else:
            found["span"] = row.toxic
        return {**found, "excerpt": row.data[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "ignore")[:EXCERPT_CHARACTERS]}

    results: dict[GateName, GateResult] = {}
    for name in GATE_NAMES:
        gate = getattr(section, name)
        hits = np.flatnonzero(flagged[name])
        results[name] = judge(
            len(hits),
            len(rows),
            threshold=gate.threshold,
            action=gate.action,
            examples=[example(name, int(i)) for i in hits[:NUM_EXAMPLES]],
        )
        if gate.action == "drop":
            keep &= ~flagged[name]
    return keep, results


def _first_of_side(rows: Sequence[Accepted], near_jaccard: float) -> np.ndarray:
    """For each row the first one it duplicates on its own side of the held-out split, int64 (rows,)."""
    first = np.arange(len(rows))
    for heldout in (False, True):
        side = np.array([i for i, row in enumerate(rows) if row.heldout == heldout], dtype=np.int64)
        if len(side):
            first[side] = side[find_duplicates([rows[i].form for i in side], near_jaccard=near_jaccard)]
    return first


def _hold_out(rows: Sequence[Accepted], share: float) -> None:
    """Hold out rows by their split hash; where so few rows leave none, those with the smallest."""
    limit = share * 2**64
    if len(rows) > 1 and not any(row.split < limit for row in rows):
        limit = min(row.split for row in rows) + 1
    if all(row.split < limit for row in rows):
        return
    for row in rows:
        row.heldout = row.split < limit


def _overlap(rows: Sequence[Accepted], keep: np.ndarray) -> np.ndarray:
    """Training rows whose text is also held out, bool (rows,)."""
    heldout = {exact_key(row.form) for row, kept in zip(rows, keep, strict=True) if kept and row.heldout}
    return np.array(
        [kept and not row.heldout and exact_key(row.form) in heldout for row, kept in zip(rows, keep, strict=True)],
        dtype=bool,
    )


def _write_sides(name: Dataset, rows: Sequence[Accepted], keep: np.ndarray, out: Path) -> dict[str, int]:
    """Write the kept rows of both sides; returns part → rows."""
    counts = {name: 0, f"{name}_heldout": 0}
    with ExitStack() as stack:
        files = {}
        for part in counts:
            (out / part).mkdir(exist_ok=True)
            files[part] = stack.enter_context((out / part / ROWS).open("wb"))
        for i in np.flatnonzero(keep).tolist():
            part = f"{name}_heldout" if rows[i].heldout else name
            files[part].write(rows[i].data + b"\n")
            counts[part] += 1
    return dict(counts)


# ── verdict ─────────────────────────────────────────────────────────────────────────────────────────────


def _refusals(
    name: Dataset,
    section: ValidationConfig,
    lines: Lines,
    gates: dict[GateName, GateResult],
    counts: dict[str, int],
    overlap: int,
    verdict: Path | None,
) -> list[GateError]:
    """Why the data set can't be used; the zero-row refusal first, naming what took the rows."""
    found: list[GateError] = []
    where = f"data.{name}" + (f", {verdict}" if verdict else "")
    if counts["train"] < section.min_usable_rows or not counts["heldout"]:
        taken = [f"{gate} dropped {r.count}" for gate, r in gates.items() if r.count and r.action == "drop"]
        if lines.quarantined:
            reasons = ", ".join(f"{reason} {count}" for reason, count in lines.reasons.most_common(5))
            taken.insert(0, f"the line reader quarantined {lines.quarantined} ({reasons})")
        if overlap:
            taken.append(f"{overlap} are held out too")
        if lines.empty_files:
            taken.append(f"empty: {', '.join(lines.empty_files)}")
        side, count = ("training", counts["train"]) if counts["train"] < section.min_usable_rows else ("held-out", 0)
        why = "; ".join(taken) or "there are too few rows to split"
        found.append(
            GateError(
                f"{name}: {count or 'no'} usable {side} rows ({why})",
                where=where,
                why=f"{lines.lines} lines read, {lines.accepted} accepted; {why}",
                fix=f"mend data.{name}, or relax the gate named here in the section validation",
            )
        )
    for gate, result in gates.items():
        if result.verdict == "failed":
            first = result.examples[0] if result.examples else {}
            found.append(
                GateError(
                    f"{name}: the {gate} gate failed: {result.rate:.2%} of the rows ({result.count}), the threshold is"
                    f" {result.threshold:.2%}",
                    where=where,
                    why=f"first: {first.get('file')}:{first.get('line')}",
                    fix=f"clean the data, or set validation.{gate}.action: drop",
                )
            )
    return found


def _summary(
    name: Dataset, lines: Lines, gates: dict[GateName, GateResult], counts: dict[str, int], overlap: int
) -> str:
    found = [f"{gate} {result.count} ({result.rate:.2%}) {result.verdict}" for gate, result in gates.items()]
    removed = f"; {overlap} removed as held out" if overlap else ""
    return (
        f"{name}: {lines.lines:,} lines, {lines.quarantined:,} quarantined; {'; '.join(found)}{removed}; "
        f"{counts['train']:,} rows to train on, {counts['heldout']:,} held out"
    )
