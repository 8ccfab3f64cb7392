"""The evaluation as tables of plain strings, shared by the report page, the model card and Prefect's markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLAWS = ("loops", "parroting", "shuffled")
CAUSAL_STAGES = ("pretraining", "sft", "ppo")


@dataclass(frozen=True)
class Table:
    """A titled table; the first column names the row, the others are figures. `note` says how to read it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """GitHub's table syntax, with pipes escaped."""
        head = [self.header, ("---", *("---:" for _ in self.header[1:]))]
        lines = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in (*head, *self.rows)]
        return "\n".join(lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def markdown_text(text: str) -> str:
    """A user's or a model's text inside markdown: one line, no markup or HTML of its own."""
    flat = " ".join(text.split())
    for sign in "\\`*_[]<>#|":
        flat = flat.replace(sign, "\\" + sign)
    return flat


def number(value: Any, digits: int = 2) -> str:
    """A figure for a table; a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def percent(value: Any, digits: int = 1) -> str:
    """A share as a percentage; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: Any) -> str:
    """A duration as `8.4 s`, `3 min 05 s` or `2 h 07 min`."""
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def gate_tables(verdict: Mapping[str, Any]) -> list[Table]:
    """One table per data set of a `verdict.json`."""
    header = ("gate", "rows", "rate", "upper 95 %", "threshold", "action", "verdict", "reasons")
    found = []
    for name, entry in (verdict.get("datasets") or {}).items():
        rows = tuple(
            (
                gate,
                number(facts.get("count")),
                percent(facts.get("rate"), 3),
                percent(facts.get("upper"), 3),
                percent(facts.get("threshold"), 3),
                str(facts.get("action", "")),
                str(facts.get("verdict", "")).replace("_", " "),
                ", ".join(f"{reason} {count:,}" for reason, count in (facts.get("reasons") or {}).items()),
            )
            for gate, facts in (entry.get("gates") or {}).items()
        )
        counts = [
            f"{number(entry[key])} {key}" for key in ("lines", "accepted", "quarantined", "blank") if key in entry
        ]
        found.append(Table(str(name), header, rows, ", ".join(counts)))
    return found


def example_parts(example: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row that a gate flagged, as text: where it stands, what gave it away, how it begins."""
    words = [str(example["reason"]).replace("_", " ")] if "reason" in example else []
    words += [f"“{example[key]}”" for key in ("span", "shared") if key in example]
    words += [f"{example['tokens']:,} tokens"] if "tokens" in example else []
    words += [f"repeats {base_name(example['first'])}"] if "first" in example else []
    return place(example), " ".join(words), str(example.get("excerpt", ""))


def place(row: Mapping[str, Any]) -> str:
    """`file:line` of a row, the file without its folders."""
    return f"{base_name(row.get('file', ''))}:{row.get('line', '')}"


def base_name(path: Any) -> str:
    """The last part of a path or address."""
    return str(path).rstrip("/").rpartition("/")[2]


def evaluation_tables(evaluation: Mapping[str, Any]) -> list[Table]:
    """The tables of an `evaluation.json`; a section the run does not have gives no table."""
    found = [
        _text(evaluation),
        _dialogues(evaluation),
        _reward(evaluation),
        _replies(evaluation),
        _detectors(evaluation),
    ]
    return [table for table in found if table is not None]


def _text(evaluation: Mapping[str, Any]) -> Table | None:
    text = evaluation.get("text")
    if not text:
        return None
    entries = [("unigram baseline", text["unigram"]), ("bigram baseline", text["bigram"])]
    entries += [(stage, text["models"][stage]) for stage in CAUSAL_STAGES if stage in text["models"]]
    return Table(
        "Held-out text",
        ("model", "bits per byte", "loss (nats/token)"),
        tuple((name, number(entry["bits_per_byte"], 3), number(entry["loss"], 3)) for name, entry in entries),
        f"{text['rows']:,} rows, {text['tokens']:,} tokens; lower is better. The baselines are counted on the training "
        "text; sft and ppo no longer aim at plain text.",
    )


def _dialogues(evaluation: Mapping[str, Any]) -> Table | None:
    dialogues = evaluation.get("dialogues")
    if not dialogues:
        return None
    entries = [(stage, dialogues["models"][stage]) for stage in CAUSAL_STAGES if stage in dialogues["models"]]
    return Table(
        "Held-out replies",
        ("model", "loss (nats/token)", "below pretraining"),
        tuple((name, number(entry["loss"], 3), percent(entry.get("gain"))) for name, entry in entries),
        f"Loss on the assistant's tokens of {dialogues['rows']:,} dialogues.",
    )


def _reward(evaluation: Mapping[str, Any]) -> Table | None:
    reward = evaluation.get("reward")
    if not reward:
        return None
    entries = [
        ("all kinds", reward),
        *reward["by_kind"].items(),
        ("another conversation's reply", reward["other_reply"]),
    ]
    return Table(
        "Reward model",
        ("rejected reply", "pairs", "accuracy", "guess by length"),
        tuple(
            (name, number(entry["pairs"]), percent(entry["accuracy"]), percent(entry["length_only"]))
            for name, entry in entries
        ),
        "Share of held-out pairs in which the human reply scores higher. A guess by length picks the longer reply; "
        "the last row has no target.",
    )


def _replies(evaluation: Mapping[str, Any]) -> Table | None:
    replies = evaluation.get("replies") or {}
    models = {stage: replies["models"][stage] for stage in ("sft", "ppo") if stage in replies.get("models", {})}
    if not models:
        return None
    change = evaluation.get("change") or {}
    figures: tuple[tuple[str, str, Any], ...] = (
        ("mean reward", "reward_mean", number),
        ("standard deviation of the reward", "reward_std", number),
        ("reply length (tokens)", "length_mean", lambda value: number(value, 1)),
        ("replies that ended by themselves", "finished_share", percent),
        ("distinct word pairs", "distinct_2", percent),
        *((name, name, percent) for name in FLAWS),
        ("toxic replies", "toxic_share", lambda value: percent(value, 2)),
    )
    rows = [(name, *(show(entry.get(key)) for entry in models.values())) for name, key, show in figures]
    if change:
        rows.append(
            ("KL from sft (nats per reply)", *("–" if s == "sft" else number(change.get("kl")) for s in models))
        )
    gain, errors = change.get("reward_gain"), change.get("flaw_increase_error")
    notes = [f"{replies['prompts']:,} prompts, sampled with the same random numbers for each stage."]
    if gain is not None:
        notes.append(f"Reward gain: {gain:+.2f} standard deviations of sft's.")
    if errors:
        sizes = ", ".join(f"{name} {100 * error:.1f}" for name, error in errors.items())
        notes.append(f"Standard error of a rate's rise, in points: {sizes}.")
    return Table(
        "Replies to held-out prompts",
        ("", *models),
        tuple(rows),
        " ".join(notes),
    )


def _detectors(evaluation: Mapping[str, Any]) -> Table | None:
    detectors = evaluation.get("detectors")
    if not detectors:
        return None
    return Table(
        "Flaw detectors",
        ("flaw", "recall", "known cases", "false positives", "human replies"),
        tuple(
            (
                name,
                percent(entry["recall"]),
                number(entry["num_known"]),
                percent(entry["false_positive_rate"]),
                number(entry["num_human"]),
            )
            for name, entry in detectors.items()
        ),
        "The rules that count loops, parroting and shuffled text, tried on held-out replies of known kind and on "
        "human ones; they know nothing of the reward model.",
    )


def limits_table(limits: Sequence[Mapping[str, Any]]) -> Table | None:
    """The publishing gate: what was measured against what was asked."""
    if not limits:
        return None
    return Table(
        "Publishing limits",
        ("measure", "measured", "limit"),
        tuple((row["measure"], f"{row['value']:.4g}", f"{row['bound']} {row['threshold']:g}") for row in limits),
        "The model was published because every limit holds.",
    )
