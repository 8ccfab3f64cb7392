"""A stage in a few lines of markdown, with its curves as embedded pictures, for Prefect's run page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat_core.report.curves import charts, read_lines
from dschat_core.report.tables import Table, evaluation_tables, example_parts, gate_tables, markdown_text, number

# Reward and KL tell the most; every picture costs about 40 kB of the server's data base.
MAX_CHARTS = 3


def stage_markdown(stage: str, folder: Path, facts: Mapping[str, Any]) -> str:
    """Curves and facts of a committed stage.

    Args:
        stage: its name.
        folder: the artifact's local folder.
        facts: the manifest's.
    """
    parts = [f"## {stage}"]
    lines = read_lines(folder / "metrics.jsonl")
    parts += [f"![{chart.title}]({chart.png_uri()})" for chart in charts(stage, lines)[:MAX_CHARTS]]
    if stage == "evaluation":
        parts += [f"### {table.title}\n\n{table.markdown()}" for table in _evaluation(folder)]
    if stage == "validation":
        parts += _verdict(folder)
    rows = tuple((name, _shown(value)) for name, value in facts.items() if not isinstance(value, dict | list))
    if rows:
        parts.append(Table("", ("fact", "value"), rows).markdown())
    return "\n\n".join(parts) + "\n"


def _evaluation(folder: Path) -> list[Table]:
    path = folder / "evaluation.json"
    return evaluation_tables(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _verdict(folder: Path) -> list[str]:
    """Per data set the table of its gates, and the first row that each flagged."""
    path = folder / "verdict.json"
    verdict = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    parts = []
    for table in gate_tables(verdict):
        gates = verdict["datasets"][table.title].get("gates") or {}
        examples = [
            f"- {gate}: {markdown_text(' '.join(example_parts(facts['examples'][0])))}"
            for gate, facts in gates.items()
            if facts.get("examples")
        ]
        parts.append("\n\n".join(part for part in (f"### {table.title}", table.note, table.markdown()) if part))
        parts += ["First row that each gate flagged:\n\n" + "\n".join(examples)] if examples else []
    return parts


def _shown(value: Any) -> str:
    return number(value, 4) if value is None or isinstance(value, bool | int | float) else str(value)
