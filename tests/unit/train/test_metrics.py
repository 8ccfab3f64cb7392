"""Metric lines and phase times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dschat_core.train.metrics import MetricsLog, PhaseTimer, human_line


def test_human_line() -> None:
    line = {
        "step": 100,
        "loss": 3.2123,
        "lr": 3e-4,
        "step_s": 1.2,
        "phases": {"comm": 0.3, "forward": 0.4, "backward": 0.45, "optimizer": 0.05, "data": 0.01},
        "tokens_per_s": 12_412.0,
    }
    expected = "Step 100: loss=3.212 lr=3.0e-4 avg time per step=1.2s (comm=0.3s, comp=0.9s) 12.4k tok/s"
    assert human_line(line) == expected


def test_lines_beyond_the_checkpoint_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, "sft", 0, 9) as log:
        for step in (1, 2, 3):
            log.log(step, loss=float(step))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    with MetricsLog(path, "sft", 2, 9) as log:
        log.log(3, loss=math.nan)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, None)]
    assert all(row["stage"] == "sft" and row["total_steps"] == 9 for row in rows)
    assert "Step 3:" in capsys.readouterr().out


def test_a_first_attempt_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path, "sft", 0, 9).close()
    assert path.read_text() == ""


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLog(None, "sft", 0, 9) as log:
        log.log(1, loss=1.0)
    assert capsys.readouterr().out == ""


def test_each_second_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("dschat_core.train.metrics.time.perf_counter", lambda: now[0])
    timer = PhaseTimer()
    with timer.phase("backward"):
        now[0] += 2.0
        with timer.phase("comm"):
            now[0] += 3.0
        now[0] += 1.0
    now[0] += 0.5
    assert timer.take() == (6.5, {"backward": 3.0, "comm": 3.0})
    assert timer.take() == (0.0, {})
