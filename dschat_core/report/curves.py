"""Which curves belong to which stage, from its `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_core.report.plots import Chart, Series

Line = Mapping[str, Any]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none if it is missing, and a line cut short by a kill is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    found = []
    for row in text.split("\n"):
        try:
            line = json.loads(row) if row else None
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def charts(stage: str, lines: Sequence[Line], evaluation: Mapping[str, Any] | None = None) -> list[Chart]:
    """The stage's charts that have at least one point.

    Args:
        stage: a training stage; others have no curves.
        lines: its metrics, in step order.
        evaluation: the run's `evaluation.json`, for pretraining's baselines.
    """
    if stage == "ppo":
        found = [
            _chart(stage, "reward", "score", lines, {"sampled": "reward_mean", "held-out": "heldout_reward"}),
            _chart(stage, "KL from sft", "nats per reply", lines, {"KL": "kl"}),
            _chart(
                stage, "reply length", "tokens", lines, {"sampled": "reply_length", "held-out": "heldout_reply_length"}
            ),
            _chart(stage, "entropy", "nats per token", lines, {"entropy": "entropy"}),
        ]
    elif stage in ("pretraining", "sft", "reward"):
        unit = "nats per pair" if stage == "reward" else "nats per token"
        references = _baselines(evaluation) if stage == "pretraining" else []
        found = [
            _chart(stage, "loss", unit, lines, {"training": "loss", "held-out": "eval_loss"}, references),
            _chart(stage, "accuracy", "share of pairs", lines, {"held-out": "eval_accuracy"}),
        ]
    else:
        return []
    return [chart for chart in found if any(len(series.x) for series in chart.series)]


def _chart(
    stage: str,
    name: str,
    unit: str,
    lines: Sequence[Line],
    fields: Mapping[str, str],
    references: Sequence[tuple[str, float]] = (),
) -> Chart:
    series = []
    for label, key in fields.items():
        points = [(line["step"], line[key]) for line in lines if _is_number(line.get(key)) and "step" in line]
        series.append(Series(label, [x for x, _ in points], [y for _, y in points], marked=label == "held-out"))
    return Chart(f"{stage}: {name}", "iteration" if stage == "ppo" else "step", unit, series, references)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _baselines(evaluation: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    text = (evaluation or {}).get("text") or {}
    return [(name, text[name]["loss"]) for name in ("unigram", "bigram") if name in text]


def phase_seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Seconds by phase over all steps; each line holds the means per step since the line before."""
    totals: dict[str, float] = {}
    before = 0
    for line in lines:
        step = line.get("step")
        if not isinstance(step, int):
            continue
        for name, value in (line.get("phases") or {}).items():
            totals[name] = totals.get(name, 0.0) + value * (step - before)
        before = step
    return totals
