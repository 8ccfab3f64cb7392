"""A stage in a few lines of markdown, with its curves as embedded pictures, for Prefect's run page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat_core.report.curves import charts, read_lines
from dschat_core.report.tables import Table, evaluation_tables, gate_tables, number

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
        parts += [f"### {table.title}\n\n{table.note}\n\n{table.markdown()}" for table in _verdict(folder)]
    rows = tuple((name, _shown(value)) for name, value in facts.items() if not isinstance(value, dict | list))
    if rows:
        parts.append(Table("", ("fact", "value"), rows).markdown())
    return "\n\n".join(parts) + "\n"


def _evaluation(folder: Path) -> list[Table]:
    path = folder / "evaluation.json"
    return evaluation_tables(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _verdict(folder: Path) -> list[Table]:
    path = folder / "verdict.json"
    return gate_tables(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _shown(value: Any) -> str:
    return number(value, 4) if value is None or isinstance(value, bool | int | float) else str(value)
