"""Where a stage's progress goes: the terminal (bars there, plain lines elsewhere) and Prefect (batched logs, progress)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LOG_EVERY_S = 5.0
LOG_LINES = 200

# Chatter of launcher, DeepSpeed and torch: it stays in the attempt's launcher.log.
NOISE = re.compile(
    r"^([\w.-]+: )?(\[\d{4}-\d\d-\d\d [\d:,]+\]|\[?[WI]\d{4} )|^\[Gloo\]|Setting ds_accelerator|^\s*$|FutureWarning|UserWarning"
    r"|^\s+warnings\.warn|^Loading weights:|^\*{5,}|^Writing model shards|FutureWarning|^\s+(return|ret|with|func)\b"
)
STEP_LINE = re.compile(r"^(Step|Iteration) \d+: ")

# The terminal of `dschat`; None in a worker, where Prefect's own handler prints.
_console: Console | None = None


def use_console(console: Console) -> None:
    """Print progress on this console (set once by the command line)."""
    global _console
    _console = console


class Reporter:
    """Takes a stage's lines and metrics; opened by `reporting`."""

    def __init__(self, stage: str, bar: Progress | None) -> None:
        self._stage, self._bar = stage, bar
        self._bar_task = bar.add_task(stage, total=None) if bar else None
        self._in_task = TaskRunContext.get() is not None
        self._pending: list[str] = []
        self._flushed_at = time.monotonic()
        self._artifact: UUID | None = None
        self._share = 0.0

    def line(self, text: str) -> None:
        """One line of a stage's output."""
        if NOISE.search(text):
            return
        self._pending.append(text)
        if self._bar and self._bar_task is not None and STEP_LINE.match(text):
            self._bar.update(self._bar_task, description=f"{self._stage}  {text}")
        elif _console:
            _console.print(f"[{self._stage}] {text}", markup=False, highlight=False, soft_wrap=True)
        if len(self._pending) >= LOG_LINES or time.monotonic() - self._flushed_at > LOG_EVERY_S:
            self.flush()

    def metrics(self, record: dict[str, Any]) -> None:
        """One metric line: moves the bar and Prefect's progress artifact."""
        step, total = record.get("step"), record.get("total_steps")
        if not step or not total:
            return
        self._share = min(1.0, step / total)
        if self._bar and self._bar_task is not None:
            self._bar.update(self._bar_task, completed=step, total=total)

    def flush(self) -> None:
        """Send what is pending to Prefect: one log record for many lines, since a record costs a request."""
        self._flushed_at = time.monotonic()
        if not self._in_task:
            return
        if self._pending:
            get_run_logger().info("\n".join(self._pending))
            self._pending.clear()
        if self._artifact is None:
            created = create_progress_artifact(
                progress=100 * self._share, key=f"{self._stage}-progress", description=f"Progress of {self._stage}"
            )
            assert isinstance(created, UUID)
            self._artifact = created
        else:
            update_progress_artifact(self._artifact, progress=100 * self._share)

    def close(self, *, finished: bool) -> None:
        if finished:
            self._share = 1.0
        self.flush()


@contextmanager
def reporting(stage: str) -> Iterator[Reporter]:
    """A reporter for one stage; a live bar where the console is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn())
    live = Progress(*columns, console=_console, transient=True) if _console and _console.is_terminal else None
    if live:
        live.start()
    reporter = Reporter(stage, live)
    finished = False
    try:
        yield reporter
        finished = True
    finally:
        if live:
            live.stop()
        reporter.close(finished=finished)


def announce(text: str) -> None:
    """One line about the run as a whole."""
    if _console:
        _console.print(text, markup=False, highlight=False, soft_wrap=True)
    if FlowRunContext.get() is not None:
        get_run_logger().info(text)
