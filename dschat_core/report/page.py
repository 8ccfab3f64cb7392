"""One run as one offline HTML page: no script, no address outside the file, every text escaped.

`build_report(status, manifests, folders, out)` works on any part of a run: what is not there yet is left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dschat_core.chat_template import ChatTokenizer, load_tokenizer
from dschat_core.config import DATASETS, STAGES
from dschat_core.data.inspecting import (
    Piece,
    inspect_row,
    num_tokens,
    num_trained,
    runs_of,
    split_pair,
    spread,
    visible,
)
from dschat_core.data.shards import ShardReader
from dschat_core.errors import DschatError
from dschat_core.report.curves import charts, phase_seconds, read_lines
from dschat_core.report.plots import Histogram
from dschat_core.report.tables import (
    Table,
    evaluation_tables,
    example_parts,
    limits_table,
    number,
    percent,
    place,
    seconds,
)

PHASES = (
    "data",
    "forward",
    "backward",
    "generation",
    "scoring",
    "advantages",
    "update",
    "optimizer",
    "comm",
    "evaluation",
    "checkpoint",
)
PARENTS: dict[str, tuple[str, ...]] = {
    "validation": (),
    "tokenization": ("validation",),
    "pretraining": ("tokenization",),
    "sft": ("pretraining",),
    "reward": ("sft",),
    "ppo": ("sft", "reward"),
    "evaluation": ("ppo",),
    "publishing": ("evaluation",),
}
HALVES = {"train": "training", "heldout": "held-out"}
MAX_EXAMPLES = 10
SHOWN_ROWS = 5
MAX_ROW_CHARACTERS = 700
MAX_SAMPLES = 6
MAX_TEXT = 400


def build_report(
    status: Mapping[str, Any],
    manifests: Mapping[str, Mapping[str, Any]],
    folders: Mapping[str, Path],
    out: Path,
) -> Path:
    """Write the page and return its path.

    Args:
        status: `{run, stages: [{stage, state, key, uri, wall_s, facts}]}` and, for a failed run, `error`.
        manifests: the manifest of each committed stage, as a dict.
        folders: the local artifact folder of each committed stage.
        out: the HTML file, replaced as a whole.
    """
    view = _Run(status, manifests, folders)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "seconds": seconds, "short": _short}
    html = environment.get_template("page.html").render(
        run=status["run"],
        error=status.get("error"),
        stages=view.stages(),
        graph=view.graph(),
        tiles=view.tiles(),
        times=view.times(),
        phases=PHASES,
        curves=view.curves(),
        gates=view.gates(),
        rows=view.rows(),
        tables=view.tables(),
        fixed_prompts=view.evaluation.get("fixed_prompts") or [],
        samples=view.samples(),
        rollouts=view.rollouts(),
        lineage=view.lineage(),
        configs=view.configs(),
        made=view.made(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, out)
    return out


def _short(text: Any, limit: int = MAX_TEXT) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True)
class _Bar:
    """A stage's time: (phase, seconds, share of the longest stage in per cent), the untimed rest last."""

    stage: str
    total_s: float
    reused: bool
    pieces: tuple[tuple[str, float, float], ...]


class _Run:
    """What the template shows, gathered from the run's files."""

    def __init__(
        self, status: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]], folders: Mapping[str, Path]
    ) -> None:
        self.entries = {entry["stage"]: entry for entry in status["stages"]}
        self.manifests, self.folders = manifests, folders
        self.evaluation: dict[str, Any] = self._json("evaluation", "evaluation.json")
        self.lines = {stage: read_lines(folder / "metrics.jsonl") for stage, folder in folders.items()}

    def _json(self, stage: str, name: str) -> dict[str, Any]:
        path = self.folders[stage] / name if stage in self.folders else None
        found = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
        return found if isinstance(found, dict) else {}

    def _time(self, stage: str) -> float:
        """Seconds the stage took; for a reused one those of the run that made it."""
        entry = self.entries[stage]
        if entry["state"] == "reused" and stage in self.manifests:
            return float(self.manifests[stage].get("wall_s") or 0.0)
        return float(entry.get("wall_s") or 0.0)

    def stages(self) -> list[dict[str, Any]]:
        """The stages in order, with the key's first digits, the time and the plain facts."""
        rows = []
        for stage in (s for s in STAGES if s in self.entries):
            entry = self.entries[stage]
            facts = {k: v for k, v in (entry.get("facts") or {}).items() if isinstance(v, int | float | str)}
            shown = [f"{k.replace('_', ' ')} {number(v, 4) if not isinstance(v, str) else v}" for k, v in facts.items()]
            rows.append(
                {
                    "stage": stage,
                    "state": entry["state"],
                    "key": (entry.get("key") or "")[:12],
                    "uri": entry.get("uri") or "",
                    "time": seconds(self._time(stage)) if self._time(stage) else "–",
                    "facts": shown,
                }
            )
        return rows

    def graph(self) -> dict[str, Any]:
        """Boxes and arrows of the pipeline, in a picture 1120 wide; a stage left out is bridged."""
        present = [stage for stage in STAGES if stage in self.entries]
        step = 1120 / max(len(present), 1)
        has_branch = {"sft", "reward", "ppo"} <= set(present)
        centre: dict[str, tuple[float, float]] = {
            stage: (step * (index + 0.5), 36.0 if stage == "reward" and has_branch else 66.0)
            for index, stage in enumerate(present)
        }
        width = min(step - 22, 130)
        arrows = []
        for stage in present:
            for parent in _parents(stage, present):
                (x1, y1), (x2, y2) = centre[parent], centre[stage]
                start, end = x1 + width / 2, x2 - width / 2 - 2
                if parent == "sft" and stage == "ppo" and has_branch:
                    y1, y2 = y1 + 16, y2 + 16
                    arrows.append(
                        f"M{start:.0f} {y1:.0f} C{start + 70:.0f} {y1 + 14:.0f} {end - 70:.0f} {y2 + 14:.0f} {end:.0f} {y2:.0f}"
                    )
                else:
                    middle = (start + end) / 2
                    arrows.append(
                        f"M{start:.0f} {y1:.0f} C{middle:.0f} {y1:.0f} {middle:.0f} {y2:.0f} {end:.0f} {y2:.0f}"
                    )
        boxes = [
            {
                "stage": row["stage"],
                "state": row["state"],
                "time": row["time"],
                "x": centre[row["stage"]][0],
                "y": centre[row["stage"]][1],
            }
            for row in self.stages()
        ]
        return {"boxes": boxes, "arrows": arrows, "width": width}

    def tiles(self) -> list[tuple[str, str, str]]:
        """(name, figure, what it compares with) of the headline."""
        line = self.evaluation.get("headline") or {}
        candidates: tuple[tuple[str, str, Any, str], ...] = (
            (
                "bits_per_byte",
                "bits per byte",
                lambda v: number(v, 3),
                self._beside("bigram", "bits_per_byte_bigram", 3),
            ),
            ("sft_gain", "sft below pretraining", percent, "loss on the assistant's tokens"),
            ("reward_accuracy", "reward accuracy", percent, self._beside("guess by length", "length_only_accuracy", 2)),
            ("reward_gain", "reward, sft to ppo", lambda v: _signed(v, 2) + " σ", "deviations of sft's rewards"),
            ("kl", "KL from sft", lambda v: number(v, 1), "nats per reply"),
            ("length_change", "reply length", lambda v: _signed(100 * v, 0) + " %", "sft to ppo"),
            (
                "flaw_increase",
                "flaws, sft to ppo",
                lambda v: _signed(100 * v, 1) + " pt",
                "largest rise of loops, parroting, shuffled",
            ),
        )
        tiles = [(name, show(line[key]), note) for key, name, show, note in candidates if key in line]
        total = sum(self._time(stage) for stage in self.entries)
        return [*tiles, ("all stages", seconds(total), "wall time")]

    def _beside(self, words: str, key: str, digits: int) -> str:
        value = (self.evaluation.get("headline") or {}).get(key)
        return f"{words} {number(value, digits)}" if value is not None else ""

    def times(self) -> list[_Bar]:
        """A bar per stage, cut into its phases."""
        longest = max((self._time(stage) for stage in self.entries), default=0.0) or 1.0
        bars = []
        for stage in (s for s in STAGES if s in self.entries and self._time(s)):
            total = self._time(stage)
            spent = phase_seconds(self.lines.get(stage, []))
            if stage == "evaluation":
                spent = {"evaluation": sum(spent.values())}
            known = [(name, min(spent[name], total)) for name in PHASES if spent.get(name)]
            rest = total - sum(value for _, value in known)
            pieces = [*known, *([("other", rest)] if rest > 0 else [])]
            bars.append(
                _Bar(
                    stage,
                    total,
                    self.entries[stage]["state"] == "reused",
                    tuple((name, value, 100 * value / longest) for name, value in pieces),
                )
            )
        return bars

    def curves(self) -> list[tuple[str, list[tuple[str, Markup]]]]:
        """(stage, [(title, svg)]) of the stages with curves."""
        found: list[tuple[str, list[tuple[str, Markup]]]] = []
        for stage in STAGES:
            drawn = charts(stage, self.lines.get(stage, []), self.evaluation)
            if drawn:
                found.append((stage, [(chart.title.partition(": ")[2], Markup(chart.svg())) for chart in drawn]))
        return found

    def gates(self) -> list[dict[str, Any]]:
        """The data verdict, per data set."""
        verdict = self._json("validation", "verdict.json")
        config = self.manifests.get("validation", {}).get("config") or {}
        limit = (config.get("length") or {}).get("max_tokens")
        return [_data_set(name, entry, limit) for name, entry in (verdict.get("datasets") or {}).items()]

    def rows(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """(data set, a few of its training rows as the model is given them: {title, tokens, trained, runs})."""
        folder = self.folders.get("tokenization")
        if folder is None or not (folder / "tokenizer" / "tokenizer.json").is_file():
            return []
        found: list[tuple[str, list[dict[str, Any]]]] = []
        # On a remote store only the parts that were read are here, and another version's shards cannot be read.
        with suppress(DschatError):
            tokenizer = load_tokenizer(folder / "tokenizer")
            for name in DATASETS:
                with suppress(DschatError):
                    if (folder / name / "index.json").is_file():
                        found.append((name, _shown_rows(name, ShardReader(folder / name), tokenizer)))
        return found

    def tables(self) -> list[Table]:
        """The evaluation and, for a published run, its limits."""
        limits = limits_table((self.entries.get("publishing", {}).get("facts") or {}).get("limits") or [])
        return [*evaluation_tables(self.evaluation), *([limits] if limits else [])]

    def samples(self) -> list[dict[str, Any]]:
        """The first held-out prompts with the reply of each stage."""
        folder = self.folders.get("evaluation")
        by_prompt: dict[int, dict[str, Any]] = {}
        for line in read_lines(folder / "samples.jsonl") if folder else []:
            row = by_prompt.setdefault(line["index"], {"prompt": line["prompt"], "replies": {}})
            row["replies"][line["stage"]] = line
        rows = list(by_prompt.values())
        chosen = rows[:: max(1, len(rows) // MAX_SAMPLES)][:MAX_SAMPLES]
        for row in chosen:
            row["replies"] = {stage: row["replies"][stage] for stage in ("sft", "ppo") if stage in row["replies"]}
        return chosen

    def rollouts(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Best and worst replies of ppo's last recorded iteration."""
        folder = self.folders.get("ppo")
        lines = read_lines(folder / "rollouts.jsonl") if folder else []
        last = max((line["iteration"] for line in lines), default=0)
        kept = [line for line in lines if line["iteration"] == last]
        groups = [(pick, [line for line in kept if line.get("pick") == pick]) for pick in ("best", "worst")]
        return [(f"{pick} of iteration {last}", rows) for pick, rows in groups if rows]

    def lineage(self) -> list[dict[str, Any]]:
        """Each artifact and the parts it was made from."""
        rows = []
        for stage in (s for s in STAGES if s in self.manifests):
            manifest = self.manifests[stage]
            parents = [
                f"{entry.get('stage')}/{entry.get('part')} {str(entry.get('key') or entry.get('digest') or '')[:12]}"
                if entry.get("stage")
                else f"{name} {str(entry.get('digest') or '')[:12]}"
                for name, entry in (manifest.get("inputs") or {}).items()
            ]
            files = manifest.get("files") or {}
            num_bytes = sum(entry.get("size_bytes", 0) for entry in files.values())
            rows.append(
                {
                    "stage": stage,
                    "key": str(manifest.get("key", ""))[:12],
                    "parents": parents,
                    "created": manifest.get("created_at", ""),
                    "run": manifest.get("run", ""),
                    "files": f"{len(files)} file{'' if len(files) == 1 else 's'}, {_size(num_bytes)}",
                }
            )
        return rows

    def configs(self) -> list[tuple[str, str]]:
        """(stage, YAML) of what defined each artifact, and where it ran."""
        rows: list[tuple[str, str]] = []
        for stage in (s for s in STAGES if s in self.manifests):
            manifest = self.manifests[stage]
            shown = dict(manifest.get("config") or {})
            if manifest.get("runtime"):
                shown["runtime"] = manifest["runtime"]
            rows.append((stage, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)))
        return rows

    def made(self) -> str:
        """When, and with which versions."""
        last = next((self.manifests[stage] for stage in reversed(STAGES) if stage in self.manifests), None)
        if last is None:
            return ""
        words = [f"{name} {version}" for name, version in (last.get("versions") or {}).items()]
        if last.get("git_revision"):
            words.append(f"revision {last['git_revision'][:12]}")
        return ", ".join([str(last.get("created_at", "")), *words])


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _parents(stage: str, present: Sequence[str]) -> list[str]:
    """The stages an arrow comes from, through those left out."""
    found: list[str] = []
    for parent in PARENTS[stage]:
        found += [parent] if parent in present else _parents(parent, present)
    return list(dict.fromkeys(found))


def _data_set(name: str, entry: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    """What the page shows of a data set's verdict; older verdicts lack some of it."""
    counts = [(key, number(entry[key])) for key in ("lines", "blank", "accepted", "quarantined") if key in entry]
    counts += [(f"{HALVES.get(half, half)} rows", number(count)) for half, count in (entry.get("rows") or {}).items()]
    if entry.get("overlap_removed"):
        counts.append(("removed as held out", number(entry["overlap_removed"])))
    gates = entry.get("gates") or {}
    duplicates = gates.get("duplicates") or {}
    total = duplicates.get("total")
    if total and "same_question" in (duplicates.get("stats") or {}):
        counts.append(("same question", percent(duplicates["stats"]["same_question"] / total, 2)))
    bins = [(edge, count) for edge, count in entry.get("histogram") or []]
    # Plain text has no limit: tokenization splits it.
    histogram = Histogram(f"lengths of {name}", bins, None if name == "text" else limit)
    return {
        "name": name,
        "counts": counts,
        "reasons": sorted((entry.get("reasons") or {}).items(), key=lambda item: -item[1]),
        "columns": list(entry.get("columns") or {}),
        "gates": [_gate(gate, facts) for gate, facts in gates.items()],
        "shares": [
            (
                title,
                [(code, number(count)) for code, count in list((gates.get(gate) or {}).get("stats", {}).items())[:8]],
            )
            for gate, title in (("language", "languages"), ("pii", "personal data"))
            if (gates.get(gate) or {}).get("stats")
        ],
        "histogram": Markup(histogram.svg()) if bins else "",
        "measure": "counted by a tokenizer" if entry.get("length_measure") == "tokenizer" else "estimated from bytes",
        "clusters": [
            {
                "size": number(cluster["size"]),
                "rows": [(place(row), _short(row.get("excerpt", ""))) for row in cluster["rows"]],
            }
            for cluster in entry.get("clusters") or []
        ],
    }


def _gate(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "rate": percent(facts.get("rate"), 2),
        "upper": percent(facts.get("upper"), 2),
        "threshold": "–" if facts.get("threshold") == 1.0 else percent(facts.get("threshold"), 2),
        "count": number(facts.get("count")),
        "action": facts.get("action", ""),
        "verdict": str(facts.get("verdict", "")),
        "reasons": list((facts.get("reasons") or {}).items()),
        "examples": [tuple(map(_short, example_parts(e))) for e in (facts.get("examples") or [])[:MAX_EXAMPLES]],
    }


def _shown_rows(name: str, reader: ShardReader, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    if name != "preferences":
        return [
            _shown_row(f"row {row}", inspect_row(reader, tokenizer, row)) for row in spread(len(reader), SHOWN_ROWS)
        ]
    shown = []
    for pair in spread(len(reader) // 2, SHOWN_ROWS):
        prompt, chosen, rejected = split_pair(*(inspect_row(reader, tokenizer, 2 * pair + side) for side in (0, 1)))
        shown += [
            _shown_row(f"pair {pair}, prompt", prompt),
            _shown_row("chosen", chosen),
            _shown_row("rejected", rejected),
        ]
    return shown


def _shown_row(title: str, found: Sequence[Piece]) -> dict[str, Any]:
    """A row as runs of text of one kind, cut where it is long."""
    runs: list[tuple[str, str]] = []
    left = MAX_ROW_CHARACTERS
    for piece in runs_of(found):
        kinds = ["control"] * piece.control + ["trained"] * piece.trained
        runs.append((" ".join(kinds), visible(piece.text[:left])))
        left -= len(piece.text)
        if left <= 0:
            runs.append(("", " …"))
            break
    return {"title": title, "tokens": num_tokens(found), "trained": num_trained(found), "runs": runs}


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
