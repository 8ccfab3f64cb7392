"""What the ranks of a job run: `python -m dschat_core.worker JOB.json`, started by the `deepspeed` launcher."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import psutil

from dschat_core.cluster.job import Completion, Job, Supervisor, load_job
from dschat_core.errors import DschatError, ExitCode, OutOfMemoryError, StorageFullError

WATCH_S = 1.0


def main(job_path: str) -> int:
    """Run this rank's share of the job; returns its exit code."""
    rank = int(os.environ.get("RANK", "0"))
    job = load_job(job_path)
    threading.Thread(target=_watch, args=(job.supervisor, os.getppid()), daemon=True).start()
    try:
        _run(job, rank)
    except DschatError as error:
        _record_error(job, rank, error, traceback.format_exc())
        return int(error.exit_code)
    except Exception as error:
        found = _translate(error)
        _record_error(job, rank, found, traceback.format_exc())
        return int(found.exit_code)
    return int(ExitCode.DONE)


def _run(job: Job, rank: int) -> None:
    # Imported late: a rank that cannot even import torch still leaves an error record.
    from dschat_core.train import engine

    engine.init_distributed()
    stage = getattr(importlib.import_module(f"dschat_core.stages.{job.stage}"), job.stage)
    product = stage(job)
    engine.barrier()
    if rank == 0:
        completion = Completion(exit_code=0, token=job.token, facts=product.facts, parts=product.parts)
        temporary = job.completion_path.with_suffix(".tmp")
        temporary.write_text(completion.model_dump_json(), encoding="utf-8")
        os.replace(temporary, job.completion_path)
    engine.barrier()
    engine.shutdown()


def _translate(error: Exception) -> DschatError:
    """An unforeseen exception as one of ours."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text:
        return OutOfMemoryError(text[:500], fix="lower runtime.micro_batch_size; the run continues from its checkpoint")
    if isinstance(error, OSError) and error.errno in (28, 122):
        return StorageFullError(text[:500], fix="free space, then run the same command again")
    return DschatError(text[:2000], why="an unexpected error in a rank; the log has its stack")


def _record_error(job: Job, rank: int, error: DschatError, stack: str) -> None:
    print(stack, file=sys.stderr, flush=True)
    with suppress(OSError):
        path = Path(job.attempt_dir) / f"error-rank{rank:05d}.json"
        path.write_text(json.dumps({**error.as_dict(), "rank": rank}), encoding="utf-8")


def _watch(supervisor: Supervisor, parent: int) -> None:
    """End this rank when its launcher or the process that supervises the job is gone: nobody would notice it."""
    same_host = supervisor.host == socket.gethostname()
    while True:
        time.sleep(WATCH_S)
        if os.getppid() != parent or (same_host and not _alive(supervisor)):
            print(f"rank {os.environ.get('RANK')}: the launcher or the supervisor is gone; ending", file=sys.stderr)
            os._exit(ExitCode.TERMINATED)


def _alive(supervisor: Supervisor) -> bool:
    try:
        return abs(psutil.Process(supervisor.pid).create_time() - supervisor.started) < 1.0
    except psutil.Error:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
