"""Raw files → clean rows of each data set and its held-out half, with a verdict.

Blocks of lines are parsed and judged on all cores (`data.checking`), the rows wait on disk (`data.spool`), duplicates are
resolved over all of them, and what is kept is written in the order it was read. Memory stays bounded however large the
files are; the result does not depend on the number of processes.
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from dschat_core import storage
from dschat_core.artifacts import Product
from dschat_core.config import DATASETS, DataConfig, Dataset, DataSource, RowFormat, ValidationConfig
from dschat_core.data.checking import (
    GATES,
    CheckedBlock,
    GateName,
    check_block,
    check_contamination,
    checked_texts,
    example,
    excerpt,
)
from dschat_core.data.gates.block import MAX_EXAMPLES, GateTally
from dschat_core.data.gates.contamination import NgramIndex, prompt_index
from dschat_core.data.gates.duplicates import find_first
from dschat_core.data.gates.verdict import GateResult, judge
from dschat_core.data.reading import (
    Record,
    input_files,
    missing_files,
    read_blocks,
    read_records,
    unique_files,
)
from dschat_core.data.runner import resolve_workers, run_map
from dschat_core.data.schemas import RejectedRowError, detect_kind, expected_columns, normalise
from dschat_core.data.spool import Spool
from dschat_core.errors import ConfigError, GateError

__all__ = ["input_files", "missing_files", "validate_files", "validation"]

ROWS = "rows.jsonl"
VERDICT = "verdict.json"
DETECTION_RECORDS = 20
QUARANTINE_EXCERPT_CHARACTERS = 120
MAX_CLUSTERS = 5
MAX_CLUSTER_ROWS = 3
PROGRESS_S = 10.0

Files = Sequence[tuple[str, str]]
Progress = Callable[[str], None]


@dataclass
class Lines:
    """What became of a data set's lines."""

    lines: int = 0
    blank: int = 0
    accepted: int = 0
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)
    empty_files: list[str] = field(default_factory=list)

    def add(self, block: CheckedBlock) -> None:
        """Count the lines of a block."""
        self.lines += block.lines
        self.blank += block.blank
        self.accepted += block.accepted
        self.quarantined += len(block.quarantined)
        self.reasons.update(record.reason or "" for record in block.quarantined)
        self.columns.update(block.columns)

    def as_dict(self) -> dict[str, Any]:
        """For the verdict file."""
        counts = {key: getattr(self, key) for key in ("lines", "blank", "accepted", "quarantined")}
        assert self.accepted + self.quarantined + self.blank == self.lines
        return {
            **counts,
            "reasons": dict(self.reasons.most_common()),
            "empty_files": self.empty_files,
            "columns": dict(self.columns.most_common(20)),
        }


@dataclass
class Judged:
    """A data set after all gates; `keep` and `overlap` are bool (rows,), in the order of the spool."""

    spool: Spool
    lines: Lines
    keep: np.ndarray
    overlap: np.ndarray
    gates: dict[GateName, GateResult]
    clusters: list[dict[str, Any]]

    def as_dict(self, section: ValidationConfig) -> dict[str, Any]:
        """For the verdict file."""
        gates = {name: result.as_dict() for name, result in self.gates.items()}
        histogram = sorted((int(edge), count) for edge, count in gates["length"].pop("stats").items())
        return {
            **self.lines.as_dict(),
            "gates": {**gates, "length": {**gates["length"], "stats": {}}},
            "histogram": histogram,
            "length_measure": "tokenizer" if section.length.tokenizer else "estimate",
            "overlap_removed": int(self.overlap.sum()),
            "clusters": self.clusters,
        }


def validation(
    section: ValidationConfig, sources: DataConfig, out: Path, *, progress: Progress = lambda _: None
) -> Product:
    """Write the part of every data set and of its held-out half, `verdict.json` and the quarantine.

    Raises:
        ConfigError: a file is missing or unreadable.
        GateError: a gate whose action is `fail` is over its threshold, or a data set has no usable row; `verdict.json`
            is written first.
    """
    parts: dict[str, list[str]] = {}
    verdicts: dict[str, Any] = {}
    refusals: list[GateError] = []
    (out / "quarantine").mkdir(parents=True, exist_ok=True)
    files_of = input_files(sources)
    evaluation_prompts = list(_given_prompts(section))
    index = prompt_index(evaluation_prompts, section.contamination.ngram)
    # Prompts come first: no training row of any data set may contain one that is held out.
    for name in sorted(files_of, key=lambda name: name != "prompts"):
        files = files_of[name]
        with tempfile.TemporaryDirectory(dir=out, prefix=".spool-") as folder:
            with (out / "quarantine" / f"{name}.jsonl").open("wb") as quarantine:
                spool, lines, tallies = _read(
                    name,
                    files,
                    section,
                    sources.sources()[name],
                    Path(folder),
                    partial(_quarantine, quarantine),
                    progress,
                )
            if not any(role == "heldout" for _, role in files):
                _hold_out(spool, section.heldout_share)
            if name == "prompts":
                evaluation_prompts += _rows_said(spool, spool.heldout & ~spool.dropped)
                index = prompt_index(evaluation_prompts, section.contamination.ngram)
            judged = _judge(name, spool, lines, tallies, section, index)
            sides = _write_sides(name, judged, out)
            spool.discard()
        parts.update({part: [f"{part}/{ROWS}"] for part in sides})
        counts = {"train": sides[name], "heldout": sides[f"{name}_heldout"]}
        verdicts[name] = {
            **judged.as_dict(section),
            "files": [{"file": uri, "role": role} for uri, role in files],
            "rows": counts,
        }
        refusals += _refusals(name, section, judged, counts, out / VERDICT)
        progress(_summary(name, judged, counts))
        for empty in lines.empty_files:
            progress(f"{name}: {empty} is empty")
    verdicts = {name: verdicts[name] for name in DATASETS if name in verdicts}
    verdict = {"verdict": "fail" if refusals else "pass", "datasets": verdicts}
    (out / VERDICT).write_bytes(orjson.dumps(verdict, option=orjson.OPT_INDENT_2) + b"\n")
    if refusals:
        raise refusals[0]
    parts["report"] = [VERDICT, *(f"quarantine/{name}.jsonl" for name in verdicts)]
    facts = {
        name: {
            **{key: found[key] for key in ("rows", "quarantined", "overlap_removed")},
            "gates": {
                gate: {key: result[key] for key in ("count", "rate", "action", "verdict")}
                for gate, result in found["gates"].items()
            },
        }
        for name, found in verdicts.items()
    }
    return Product(parts=parts, facts={"verdict": verdict["verdict"], "datasets": facts})


def validate_files(
    files: Sequence[str],
    section: ValidationConfig,
    kind: Dataset | None = None,
    *,
    form: RowFormat = "auto",
    columns: Mapping[str, str] | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Check files as one data set, without keeping anything.

    Args:
        files: paths or globs, local or `s3://`, or data sets as `DataSource` takes them.
        kind: the data set they are; None: found out from each file's first rows.
        form, columns: how the rows are written, see `config.DataSource`.

    Returns:
        {kind, lines, blank, accepted, quarantined, reasons, columns, empty_files, gates, clusters, usable, quarantine,
        verdict, why}, with the first quarantined lines in `quarantine`. `verdict` is `fail` where validation would
        refuse the files. Files of several kinds are judged apart: `kind` is `mixed`, the counts are sums, `gates` are
        over all rows, and `datasets` has each kind's own result.

    Raises:
        ConfigError: a file is missing or unreadable.
    """
    for pattern in files:
        if not unique_files([pattern]):
            raise ConfigError(f"missing input file: {pattern}", fix="correct the path")
    groups: dict[Dataset, list[tuple[str, str]]] = {}
    for uri in unique_files(files):
        groups.setdefault(kind or _detect(uri, section), []).append((uri, "train"))
    index = prompt_index(_given_prompts(section), section.contamination.ngram)
    found = {
        name: _validate_group(
            name,
            group,
            section,
            index,
            DataSource(train=tuple(files), format=form, columns=dict(columns or {})),
            progress,
        )
        for name, group in groups.items()
    }
    return next(iter(found.values())) if len(found) == 1 else _merged(found)


def _validate_group(
    name: Dataset,
    files: Files,
    section: ValidationConfig,
    index: NgramIndex,
    source: DataSource,
    progress: Progress,
) -> dict[str, Any]:
    rejected: list[dict[str, Any]] = []

    def keep_some(records: Sequence[Record]) -> None:
        for record in records[: MAX_EXAMPLES - len(rejected)]:
            raw = record.raw[:QUARANTINE_EXCERPT_CHARACTERS].decode("utf-8", "replace")
            rejected.append({**_place(record), "raw": raw})

    with tempfile.TemporaryDirectory(prefix="dschat-validate-") as folder:
        spool, lines, tallies = _read(name, files, section, source, Path(folder), keep_some, progress)
        judged = _judge(name, spool, lines, tallies, section, index)
    usable = int(judged.keep.sum())
    refusals = _refusals(name, section, judged, {"train": usable, "heldout": 1}, None)
    return {
        "kind": name,
        **judged.as_dict(section),
        "usable": usable,
        "quarantine": rejected,
        "verdict": "fail" if refusals else "pass",
        "why": [refusal.what for refusal in refusals],
    }


def _merged(found: dict[Dataset, dict[str, Any]]) -> dict[str, Any]:
    results = list(found.values())
    gates = {}
    for name in GATES:
        parts = [result["gates"][name] for result in results]
        gates[name] = judge(
            GateTally(
                total=sum(part["total"] for part in parts),
                count=sum(part["count"] for part in parts),
                reasons=sum((Counter(part["reasons"]) for part in parts), Counter()),
                stats=sum((Counter(part["stats"]) for part in parts), Counter()),
                examples=[example for part in parts for example in part["examples"]][:MAX_EXAMPLES],
            ),
            threshold=parts[0]["threshold"],
            action=parts[0]["action"],
        ).as_dict()
    failed = [result for result in results if result["verdict"] == "fail"]
    return {
        "kind": "mixed",
        **{key: sum(result[key] for result in results) for key in ("lines", "blank", "accepted", "quarantined")},
        "reasons": dict(sum((Counter(result["reasons"]) for result in results), Counter())),
        "empty_files": [uri for result in results for uri in result["empty_files"]],
        "gates": gates,
        "usable": sum(result["usable"] for result in results),
        "quarantine": [entry for result in results for entry in result["quarantine"]][:MAX_EXAMPLES],
        "verdict": "fail" if failed else "pass",
        "why": [why for result in failed for why in result["why"]],
        "datasets": found,
    }


def _detect(uri: str, section: ValidationConfig) -> Dataset:
    """The kind of a file's first readable rows; `.txt` is text. An undecidable file counts as dialogues."""
    if uri.lower().removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
        return "text"
    values = (
        r.value
        for r in read_records(uri, max_line_bytes=section.max_line_bytes, max_file_bytes=section.max_file_bytes)
        if r.value is not None
    )
    return detect_kind(islice(values, DETECTION_RECORDS)) or "dialogues"


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────


def _read(
    name: Dataset,
    files: Files,
    section: ValidationConfig,
    source: DataSource,
    folder: Path,
    quarantine: Callable[[Sequence[Record]], None],
    progress: Progress,
) -> tuple[Spool, Lines, dict[GateName, GateTally]]:
    """Every line of the files, checked, in order."""
    spool, lines = Spool(folder, name), Lines()
    tallies: dict[GateName, GateTally] = {gate: GateTally() for gate in GATES}
    checks = partial(check_block, name, section, (source.format, source.columns))
    started = told = time.monotonic()
    for uri, role in files:
        before = lines.lines
        blocks = read_blocks(uri, max_line_bytes=section.max_line_bytes, max_file_bytes=section.max_file_bytes)
        for checked in run_map(checks, blocks, workers=_workers(uri, section)):
            lines.add(checked)
            quarantine(checked.quarantined)
            spool.add(checked, uri, heldout=role == "heldout")
            for gate, tally in checked.tallies.items():
                tallies[gate].add(tally)
            if (now := time.monotonic()) - told > PROGRESS_S:
                told = now
                progress(f"{name}: {lines.lines:,} lines, {lines.lines / (now - started):,.0f} a second, at {uri}")
        if lines.lines == before:
            lines.empty_files.append(uri)
    spool.close()
    return spool, lines, tallies


def _workers(uri: str, section: ValidationConfig) -> int:
    # A classifier keeps all cores busy by itself, and an endpoint is not asked faster by several processes.
    if section.toxicity.detector != "lexicon":
        return 1
    return resolve_workers(section.runtime.workers, storage.size(uri))


def _quarantine(file: BinaryIO, records: Sequence[Record]) -> None:
    for record in records:
        entry = {**_place(record), "raw_base64": base64.b64encode(record.raw).decode()}
        file.write(orjson.dumps(entry) + b"\n")


def _place(record: Record) -> dict[str, Any]:
    return {"file": record.file, "line": record.line, "offset": record.offset, "reason": record.reason}


def _given_prompts(section: ValidationConfig) -> Iterator[str]:
    """What is said in the evaluation prompts of `validation.contamination.against`, in whatever form they come."""
    for pattern in section.contamination.against:
        if not (matches := unique_files([pattern])):
            raise ConfigError(
                f"validation.contamination.against: no file {pattern}", fix="correct the path, or leave the list empty"
            )
        for uri in matches:
            kind = _detect(uri, section)
            for record in read_records(
                uri, max_line_bytes=section.max_line_bytes, max_file_bytes=section.max_file_bytes
            ):
                if record.value is not None:
                    try:
                        yield from checked_texts(kind, normalise(kind, record.value))
                    except RejectedRowError:
                        continue


def _rows_said(spool: Spool, chosen: np.ndarray) -> list[str]:
    """The texts of the chosen rows that no training row may contain."""
    return [text for row in np.flatnonzero(chosen).tolist() for text in checked_texts(spool.kind, spool.row(row))]


# ── over all rows ───────────────────────────────────────────────────────────────────────────────────────


def _hold_out(spool: Spool, share: float) -> None:
    """Hold out rows by their split hash; where so few rows leave none, those with the smallest."""
    if not len(spool):
        return
    limit = np.uint64(min(int(share * 2**64), 2**64 - 1))
    chosen = spool.split < limit
    if not chosen.any() and len(spool) > 1:
        chosen = spool.split == spool.split.min()
    if not chosen.all():
        spool.heldout = chosen


def _judge(
    name: Dataset,
    spool: Spool,
    lines: Lines,
    tallies: dict[GateName, GateTally],
    section: ValidationConfig,
    index: NgramIndex,
) -> Judged:
    """The gates that need all rows, and with them the verdict. Every gate sees all rows, whatever another drops."""
    first = find_first(
        spool.keys,
        spool.bands,
        spool.widths,
        spool.forms,
        near_jaccard=section.duplicates.near_jaccard,
        memory_bytes=section.runtime.memory_bytes,
        folder=spool.folder,
    )
    first_of_side = _first_of_side(first, spool.heldout)
    duplicate = first_of_side != np.arange(len(spool))
    tallies["duplicates"] = _duplicates_tally(spool, first_of_side, duplicate)
    contaminated = np.zeros(len(spool), dtype=bool)
    tallies["contamination"] = _contamination(name, spool, section, index, contaminated)
    keep = ~spool.dropped
    if section.duplicates.action == "drop":
        keep &= ~duplicate
    if section.contamination.action == "drop":
        keep &= ~contaminated
    # A training row goes where its cluster has a row that stays held out.
    overlap = keep & ~spool.heldout & np.isin(first, first[keep & spool.heldout])
    results = {
        gate: judge(tallies[gate], threshold=(part := getattr(section, gate)).threshold, action=part.action)
        for gate in GATES
    }
    return Judged(spool, lines, keep & ~overlap, overlap, results, _clusters(spool, first))


def _first_of_side(first: np.ndarray, heldout: np.ndarray) -> np.ndarray:
    """For each row the first of its cluster on its own side of the held-out split, int64 (rows,)."""
    found = np.arange(len(first))
    for side in (heldout, ~heldout):
        rows = np.flatnonzero(side)
        _, at, inverse = np.unique(first[rows], return_index=True, return_inverse=True)
        found[rows] = rows[at[inverse]]
    return found


def _duplicates_tally(spool: Spool, first: np.ndarray, duplicate: np.ndarray) -> GateTally:
    hits = np.flatnonzero(duplicate)
    exact = (spool.keys[hits] == spool.keys[first[hits]]).all(axis=1)
    _, counts = np.unique(spool.question, return_counts=True)
    reasons = Counter(exact=int(exact.sum()), near=int((~exact).sum()))
    examples = []
    for row, is_exact in zip(hits[:MAX_EXAMPLES].tolist(), exact.tolist(), strict=False):
        place = spool.place(int(first[row]))
        found = {
            **spool.place(row),
            "reason": "exact" if is_exact else "near",
            "first": f"{place['file']}:{place['line']}",
        }
        examples.append({**found, "excerpt": excerpt(spool.text(row))})
    return GateTally(
        total=len(spool),
        count=len(hits),
        reasons=+reasons,
        stats=reasons + Counter(same_question=int((counts - 1).sum())),
        examples=examples,
    )


def _clusters(spool: Spool, first: np.ndarray) -> list[dict[str, Any]]:
    """The largest clusters of duplicates with their first rows."""
    sizes = np.bincount(first, minlength=len(spool))
    largest = [row for row in np.argsort(-sizes, kind="stable")[:MAX_CLUSTERS].tolist() if sizes[row] > 1]
    return [
        {
            "size": int(sizes[row]),
            "rows": [
                {**spool.place(member), "excerpt": excerpt(spool.text(member))}
                for member in np.flatnonzero(first == row)[:MAX_CLUSTER_ROWS].tolist()
            ],
        }
        for row in largest
    ]


def _contamination(
    name: Dataset, spool: Spool, section: ValidationConfig, index: NgramIndex, contaminated: np.ndarray
) -> GateTally:
    """The tally over the training rows; marks those that share an n-gram with an evaluation prompt."""
    asked = ~spool.heldout
    tally = GateTally(total=int(asked.sum()))
    if not len(index):
        return tally
    chunks = list(spool.chunks())
    tasks = ((spool.data(start, end), np.flatnonzero(asked[start:end]).tolist()) for start, end in chunks)
    workers = resolve_workers(section.runtime.workers, sum(len(spool.data(start, end)) for start, end in chunks))
    for (start, end), (findings, stats) in zip(
        chunks, run_map(partial(check_contamination, name, index), tasks, workers=workers), strict=True
    ):
        rows = (start + np.flatnonzero(asked[start:end])).tolist()
        tally.count += len(findings)
        tally.stats.update(stats)
        for finding in findings:
            row = rows[finding.row]
            contaminated[row] = True
            tally.reasons[finding.reason] += 1
            if len(tally.examples) < MAX_EXAMPLES:
                place = spool.place(row)
                tally.examples.append(example(place["file"], place["line"], finding, spool.text(row)))
    return tally


def _write_sides(name: Dataset, judged: Judged, out: Path) -> dict[str, int]:
    """Write the kept rows of both sides; returns part → rows."""
    counts = {}
    for part, side in ((name, ~judged.spool.heldout), (f"{name}_heldout", judged.spool.heldout)):
        (out / part).mkdir(exist_ok=True)
        with (out / part / ROWS).open("wb") as file:
            counts[part] = judged.spool.write(judged.keep & side, file)
    return counts


# ── verdict ─────────────────────────────────────────────────────────────────────────────────────────────


def _refusals(
    name: Dataset, section: ValidationConfig, judged: Judged, counts: dict[str, int], verdict: Path | None
) -> list[GateError]:
    """Why the data set can't be used; the zero-row refusal first, naming what took the rows."""
    found: list[GateError] = []
    lines = judged.lines
    where = f"data.{name}" + (f", {verdict}" if verdict else "")
    if counts["train"] < section.min_usable_rows or not counts["heldout"]:
        why = "; ".join(_taken(name, judged)) or "there are too few rows to split"
        side, count = ("training", counts["train"]) if counts["train"] < section.min_usable_rows else ("held-out", 0)
        found.append(
            GateError(
                f"{name}: {count or 'no'} usable {side} rows ({why})",
                where=where,
                why=f"{lines.lines} lines read, {lines.accepted} accepted; {why}",
                fix=f"mend data.{name}, or relax the gate named here in the section validation",
            )
        )
    for gate, result in judged.gates.items():
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


def _taken(name: Dataset, judged: Judged) -> list[str]:
    """What became of the rows that are not there."""
    lines = judged.lines
    taken = []
    if lines.quarantined:
        reasons = ", ".join(f"{reason} {count}" for reason, count in lines.reasons.most_common(5))
        taken.append(f"the line reader quarantined {lines.quarantined} ({reasons})")
    if lines.columns:
        taken.append(
            f"columns found: {', '.join(column for column, _ in lines.columns.most_common(10))}; expected: "
            f"{', '.join(expected_columns(name))} (data.{name}.columns maps one to the other)"
        )
    taken += [f"{gate} dropped {r.count}" for gate, r in judged.gates.items() if r.count and r.action == "drop"]
    if overlap := int(judged.overlap.sum()):
        taken.append(f"{overlap} are held out too")
    if lines.blank and lines.blank == lines.lines:
        taken.append(f"all {lines.blank} lines are blank")
    if lines.empty_files:
        taken.append(f"empty: {', '.join(lines.empty_files)}")
    return taken


def _summary(name: Dataset, judged: Judged, counts: dict[str, int]) -> str:
    lines, overlap = judged.lines, int(judged.overlap.sum())
    found = [
        f"{gate} {result.count} ({result.rate:.2%}) {result.verdict.replace('_', ' ')}"
        for gate, result in judged.gates.items()
    ]
    removed = f"; {overlap} removed as held out" if overlap else ""
    return (
        f"{name}: {lines.lines:,} lines, {lines.quarantined:,} quarantined; {'; '.join(found)}{removed}; "
        f"{counts['train']:,} rows to train on, {counts['heldout']:,} held out"
    )
