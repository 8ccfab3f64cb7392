"""Pure functions mapped over pieces of data, on the processes of this machine.

The one place that knows of processes: the stages hand it a function and its tasks, so that another engine can take its
place. Results come in the order of the tasks, and do not depend on the number of workers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, TypeVar

from dschat_core.errors import TransientError

T = TypeVar("T")
R = TypeVar("R")

# A worker costs about half a second to start: less data than this is done sooner without.
MIN_BYTES_PER_WORKER = 16 * 2**20
# Tasks under way per worker; what is ahead of the slowest one waits in memory.
TASKS_AHEAD = 2
PR_SET_PDEATHSIG = 1


def resolve_workers(workers: int | Literal["auto"], total_bytes: int) -> int:
    """Processes for this much data: what is asked for, or as many as there are cores and the data is worth."""
    if workers != "auto":
        return workers
    return max(1, min(len(os.sched_getaffinity(0)), total_bytes // MIN_BYTES_PER_WORKER))


def run_map(function: Callable[[T], R], tasks: Iterable[T], *, workers: int) -> Iterator[R]:
    """`map(function, tasks)` on so many processes; with one, in this process.

    The function crosses to each worker once, with whatever it carries (`functools.partial`); a task is taken from the
    iterable only when a worker will soon be free for it, so memory is bounded.

    Raises:
        TransientError: a worker died.
        Exception: what `function` raised, as it raised it; the remaining tasks are dropped.
    """
    if workers <= 1:
        yield from map(function, tasks)
        return
    pending: deque[Future[R]] = deque()
    executor = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin_worker, (function, os.getpid())
    )
    try:
        for task in tasks:
            pending.append(executor.submit(_apply, task))
            if len(pending) >= TASKS_AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TransientError(
            "a data worker process died",
            why="it was killed, or the machine ran out of memory (see dmesg)",
            fix="run the same command again; with less memory: --set validation.runtime.workers=1 "
            "--set tokenization.runtime.workers=1",
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any]


def _begin_worker(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    # The libraries' own threads would only get in the way of the other workers.
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # The parent alone answers Ctrl-C; should it be killed, the workers must not stay.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _apply(task: Any) -> Any:
    return _function(task)
