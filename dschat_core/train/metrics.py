"""What a training job tells while it runs: one JSON line per logged step, one line for people, and phase times.

The JSON lines have fixed names and outlive the attempt; a resumed attempt cuts off those beyond its checkpoint, so
that the log of an interrupted run equals that of an undisturbed one (but for the times in it).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class PhaseTimer:
    """Wall time by phase. Phases may nest; each second is charged to the innermost phase alone.

    Every phase has a timer of its own: time outside all phases shows up as the difference to `wall_s`.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._mark = self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            name = self._stack[-1]
            self._spent[name] = self._spent.get(name, 0.0) + now - self._mark
        self._mark = now

    def take(self) -> tuple[float, dict[str, float]]:
        """(wall seconds, seconds by phase) since the last `take`; starts over."""
        self._charge()
        wall, spent = self._mark - self._start, self._spent
        self._start, self._spent = self._mark, {}
        return wall, spent


COMPUTE_PHASES = ("forward", "backward", "optimizer", "generation", "scoring", "update")


class MetricsLog:
    """The stage's `metrics.jsonl`, written by rank 0 (`path=None` on the others: every call is a no-op there).

    Args:
        path: the file, continued if it exists.
        stage: name in every line.
        resume_step: the step of the checkpoint continued from; later lines are cut off. 0 starts afresh.
        total_steps: steps of the whole stage, in every line, so that a watcher can show progress.
    """

    def __init__(self, path: Path | None, stage: str, resume_step: int, total_steps: int) -> None:
        self.stage, self.total_steps = stage, total_steps
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut(path, resume_step)
            self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, **fields: Any) -> None:
        """Append one line (flushed) and print its human form. Numbers that are not finite are written as null."""
        if self._file is None:
            return
        line = {"stage": self.stage, "step": step, "total_steps": self.total_steps, **fields}
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()
        print(human_line(line), flush=True)

    def close(self) -> None:
        """Flush to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def human_line(line: dict[str, Any]) -> str:
    """`Step 100: loss=3.21 lr=3.0e-4 avg time per step=1.2s (comm=0.3s, comp=0.9s) 12.4k tok/s`."""
    words = [f"Step {line['step']}:"]
    for name in ("loss", "eval_loss", "reward_mean", "heldout_reward", "kl", "reply_length"):
        if isinstance(line.get(name), int | float):
            words.append(f"{name}={line[name]:.4g}")
    if "lr" in line:
        words.append(f"lr={_short(line['lr'])}")
    if "step_s" in line:
        phases = line.get("phases", {})
        comp = sum(phases.get(name, 0.0) for name in COMPUTE_PHASES)
        words.append(f"avg time per step={line['step_s']:.3g}s (comm={phases.get('comm', 0.0):.2g}s, comp={comp:.2g}s)")
    if "tokens_per_s" in line:
        rate = line["tokens_per_s"]
        words.append(f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s")
    return " ".join(words)


def _short(value: float) -> str:
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _cut(path: Path, resume_step: int) -> None:
    """Keep the whole lines up to `resume_step`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the line a kill cut short
        if line.endswith(b"\n") and step <= resume_step:
            kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)
