"""The record of a stage's attempts and of the checkpoints they committed; knows nothing of torch."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dschat_core import storage
from dschat_core.errors import IntegrityError, NoProgressError

ATTEMPTS_FILE = "attempts.jsonl"
MAX_WITHOUT_PROGRESS = 3


def committed_steps(state: Path) -> list[int]:
    """Steps with a committed checkpoint (`step-N/manifest.json`), ascending."""
    found = []
    for path in state.glob("step-*/manifest.json"):
        if match := re.fullmatch(r"step-(\d+)", path.parent.name):
            found.append(int(match[1]))
    return sorted(found)


def last_step(state: Path) -> int:
    """The newest committed step, 0 if there is none."""
    return max(committed_steps(state), default=0)


def read_attempts(state: Path) -> list[dict[str, Any]]:
    """All attempts so far, oldest first; a half-written last line is left out."""
    records = []
    with suppress(FileNotFoundError):
        for line in (state / ATTEMPTS_FILE).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


def begin_attempt(state: Path) -> int:
    """The number of the next attempt.

    Raises:
        IntegrityError: an earlier attempt committed a checkpoint and none is left: starting over at step 0 would
            silently lose that work.
        NoProgressError: the last three attempts died without a new checkpoint.
    """
    records = read_attempts(state)
    lost = max((int(record["last_step"]) for record in records), default=0)
    if lost and not committed_steps(state):
        raise IntegrityError(
            f"an earlier attempt committed step {lost}, but no checkpoint is left",
            where=str(state),
            why="the checkpoints were removed or damaged",
            fix=f"restore them, or remove {state} to start this stage over",
        )
    recent = records[-MAX_WITHOUT_PROGRESS:]
    if len(recent) == MAX_WITHOUT_PROGRESS and all(r["counted"] and r["last_step"] <= r["first_step"] for r in recent):
        raise NoProgressError(
            f"{MAX_WITHOUT_PROGRESS} attempts in a row ended without a new checkpoint (all at step {lost})",
            where=str(state),
            why=str(recent[-1]["error"]),
            fix=f"mend the cause, remove {state / ATTEMPTS_FILE}, then run the same command again",
        )
    return len(records) + 1


def end_attempt(state: Path, *, number: int, first_step: int, error: str | None, counted: bool, **more: Any) -> None:
    """Append how an attempt ended. `counted`: whether it counts against progress."""
    record = {
        "attempt": number,
        "ended_at": round(time.time(), 3),
        "first_step": first_step,
        "last_step": last_step(state),
        "error": error,
        "counted": counted,
        **more,
    }
    path = state / ATTEMPTS_FILE
    with storage.explained("write", str(path)), path.open("ab") as file:
        # A line that a full disk cut short must not swallow this one.
        broken = file.tell() and not path.read_bytes().endswith(b"\n")
        file.write(b"\n" * bool(broken) + json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def prune_after_commit(state: Path, keep: str) -> None:
    """Once the artifact is committed: keep the newest checkpoint (`last`) or none."""
    steps = committed_steps(state)
    for step in steps if keep == "none" else steps[:-1]:
        shutil.rmtree(state / f"step-{step}", ignore_errors=True)
