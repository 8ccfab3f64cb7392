"""Pure functions over processes: order, errors, deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from dschat_core.data.runner import MIN_BYTES_PER_WORKER, resolve_workers, run_map
from dschat_core.errors import GateError, TransientError


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == 3:
        raise GateError("three", where="here", fix="leave it out")
    return number


def die(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    assert list(run_map(square, range(50), workers=workers)) == [n * n for n in range(50)]


def test_tasks_are_taken_only_when_a_worker_will_be_free() -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = run_map(square, tasks(), workers=2)
    assert next(results) == 0
    assert len(taken) <= 5
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_a_worker_arrives_whole(workers: int) -> None:
    with pytest.raises(GateError) as caught:
        list(run_map(refuse, range(5), workers=workers))
    assert (caught.value.where, caught.value.fix) == ("here", "leave it out")


def test_a_killed_worker_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TransientError, match="worker process died"):
        list(run_map(die, range(5), workers=2))


def test_workers_die_with_their_parent() -> None:
    program = (
        "import os, sys, time\n"
        "from dschat_core.data.runner import run_map\n"
        "from tests.unit.data.test_runner import slow\n"
        "for pid in run_map(slow, range(100), workers=2): print(pid, flush=True)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    worker.wait(timeout=30)


def slow(_: int) -> int:
    time.sleep(0.05)
    return os.getpid()


def test_auto_is_one_process_for_little_data() -> None:
    assert resolve_workers("auto", 0) == 1
    assert resolve_workers("auto", MIN_BYTES_PER_WORKER) == 1
    assert resolve_workers("auto", 10**12) == len(os.sched_getaffinity(0))
    assert resolve_workers(5, 0) == 5
