"""Starts a job with the `deepspeed` launcher, watches it, and says how it really ended.

The launcher's exit code is never believed (it is 0 after a `kill -9` of the per-node launcher): success is the
completion record that rank 0 writes as its last act. No process of the job outlives this call.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from pydantic import ValidationError

from dschat_core.cluster.job import Completion, Job
from dschat_core.config import RuntimeConfig
from dschat_core.errors import BY_EXIT_CODE, ConfigError, DschatError, ExitCode, TransientError

STOP_GRACE_S = 45.0
POLL_S = 0.2

# What the ranks may see of our environment. Credentials are not in it: ranks read and write local files only.
ENVIRONMENT = re.compile(
    r"(PATH|HOME|USER|LANG|LC_.*|TZ|TMPDIR|TERM|SHELL|VIRTUAL_ENV|LD_LIBRARY_PATH|CUDA_.*|NVIDIA_.*|NCCL_.*|GLOO_.*"
    r"|OMP_.*|MKL_.*|OPENBLAS_.*|KMP_.*|TORCH.*|PYTHON.*|HF_HOME|HF_HUB_OFFLINE|TRITON_.*|XDG_CACHE_HOME|DSCHAT_TEST_.*)"
)


@dataclass(frozen=True)
class Layout:
    """How many ranks run where. `nodes` is empty for this machine alone."""

    ranks_per_node: int
    threads_per_rank: int
    accelerator: str
    nodes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.ranks_per_node * max(1, len(self.nodes))


def resolve_layout(runtime: RuntimeConfig) -> Layout:
    """Turn `auto` into numbers for this machine and check the hostfile.

    Raises:
        ConfigError: the hostfile is missing, malformed or has too few nodes or slots.
    """
    gpus = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    accelerator = "cuda" if gpus else "cpu"
    ranks = runtime.ranks_per_node if runtime.ranks_per_node != "auto" else (gpus or 2)
    cores = len(os.sched_getaffinity(0))
    threads = runtime.threads_per_rank if runtime.threads_per_rank != "auto" else max(1, cores // ranks)
    nodes: tuple[str, ...] = ()
    if runtime.num_nodes > 1:
        if not runtime.hostfile:
            raise ConfigError(
                f"runtime.num_nodes={runtime.num_nodes} needs runtime.hostfile",
                fix="name a file of `host slots=N` lines",
            )
        hosts = parse_hostfile(Path(runtime.hostfile))
        if len(hosts) < runtime.num_nodes:
            raise ConfigError(
                f"runtime.num_nodes={runtime.num_nodes}, but the hostfile lists {len(hosts)}",
                where=runtime.hostfile,
                fix="add nodes or lower runtime.num_nodes",
            )
        for name, slots in hosts[: runtime.num_nodes]:
            if slots < ranks:
                raise ConfigError(
                    f"node {name} has {slots} slots, runtime.ranks_per_node is {ranks}", where=runtime.hostfile
                )
        nodes = tuple(name for name, _ in hosts[: runtime.num_nodes])
    return Layout(ranks, threads, accelerator, nodes)


def parse_hostfile(path: Path) -> list[tuple[str, int]]:
    """(name, slots) of each node. Raises ConfigError with the line number on anything unsafe or contradictory."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the hostfile {path}", why=error.strerror or str(error)) from None
    hosts: list[tuple[str, int]] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252})\s+slots=(\d{1,4})", text)
        problem = None
        if match is None:
            problem = f"{text!r} is not of the form `host slots=N`"
        elif int(match[2]) == 0:
            problem = f"node {match[1]} has 0 slots"
        elif match[1] in {name for name, _ in hosts}:
            problem = f"node {match[1]} is listed twice"
        if problem or match is None:
            raise ConfigError(problem or "", where=f"{path}:{number}", fix="correct that line")
        hosts.append((match[1], int(match[2])))
    if not hosts:
        raise ConfigError(f"the hostfile {path} lists no node", fix="add lines `host slots=N`")
    return hosts


def build_command(layout: Layout, job_path: Path, *, port: int) -> list[str]:
    """The `deepspeed` command line. Nothing of the user's is on it but the path of the job file."""
    command = [str(Path(sys.executable).parent / "deepspeed")]
    if layout.nodes:
        if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(job_path)):
            raise ConfigError(
                f"{job_path} can't cross to other nodes",
                why="pdsh does not quote paths safely",
                fix="use a store path of letters, digits, `_ . / + -` for multi-node runs",
            )
        hostfile = job_path.with_name("hostfile")
        hostfile.write_text("".join(f"{name} slots={layout.ranks_per_node}\n" for name in layout.nodes))
        command += ["--hostfile", str(hostfile), "--master_addr", layout.nodes[0]]
    else:
        # Without it a hostfile in /job/hostfile would be picked up.
        command += ["--hostfile", str(job_path.with_name("no-hostfile"))]
    command += ["--num_gpus", str(layout.ranks_per_node), "--master_port", str(port), "--no_local_rank"]
    return [*command, "--module", "dschat_core.worker", str(job_path)]


def rank_environment(layout: Layout) -> dict[str, str]:
    """The environment of launcher and ranks: an allow-list of ours, plus what DeepSpeed and torch need."""
    environment = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": str(layout.threads_per_rank),
        "DS_ACCELERATOR": layout.accelerator,
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
    }
    return environment


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def launch(
    job: Job,
    layout: Layout,
    *,
    on_line: Callable[[str], None],
    on_metrics: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Completion:
    """Run the job to its end.

    Args:
        on_line: called with each line the launcher and the ranks print.
        on_metrics: called with each metric line of this attempt, as it is logged.

    Raises:
        DschatError: of the kind the failing rank reported; TransientError if processes just died.
    """
    attempt = Path(job.attempt_dir)
    attempt.mkdir(parents=True, exist_ok=True)
    job_path = attempt / "job.json"
    job.save(job_path)
    environment = rank_environment(layout)
    if layout.nodes:
        environment["DS_ENV_FILE"] = str(_write_env_file(attempt / "deepspeed_env", environment))
    tail: deque[str] = deque(maxlen=40)
    metrics = _MetricsTail(job.metrics_path)
    with (
        (attempt / "launcher.log").open("w", encoding="utf-8") as log,
        _running(build_command(layout, job_path, port=free_port()), environment) as process,
    ):
        lines = _lines_of(process)
        ended_at: float | None = None
        while True:
            drained = _drain(lines)
            for line in drained:
                log.write(line + "\n")
                log.flush()
                tail.append(line)
                on_line(line)
            for record in metrics.new():
                on_metrics(record)
            if process.poll() is not None:
                # An orphan may hold the pipe open: read on for a moment only.
                ended_at = ended_at or time.monotonic()
                if lines.closed or time.monotonic() - ended_at > 2.0:
                    break
            if not drained:
                time.sleep(POLL_S)
    for record in metrics.new():
        on_metrics(record)
    return _judge(job, process.returncode, tail)


def _write_env_file(path: Path, environment: dict[str, str]) -> Path:
    """pdsh forwards almost nothing: the rest crosses in this file, strict `K=V` lines without blanks."""
    wanted = re.compile(r"OMP_.*|DS_ACCELERATOR|TORCH.*|HF_.*|GLOO_.*|NCCL_.*|PATH|TOKENIZERS_.*|TRANSFORMERS_.*")
    rows = [
        f"{name}={value}\n"
        for name, value in sorted(environment.items())
        if wanted.fullmatch(name) and re.fullmatch(r"[A-Za-z0-9_./:,+=-]*", value)
    ]
    path.write_text("".join(rows), encoding="utf-8")
    return path


@contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The process in a session of its own; on any way out the whole group is ended, politely first."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]}", why=str(error), fix="make install") from None
    try:
        yield process
    finally:
        # Ranks checkpoint at the next step boundary on SIGTERM; the launcher itself dies at once, so its group is watched.
        if _group(process):
            _signal_group(process, signal.SIGTERM)
            deadline = time.monotonic() + STOP_GRACE_S
            while _group(process) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            _signal_group(process, signal.SIGKILL)
        process.wait()


def _group(process: subprocess.Popen[str]) -> list[int]:
    """Pids of the living members of the launcher's process group."""
    process.poll()
    members = []
    for candidate in psutil.process_iter(["status"]):
        with suppress(OSError):
            if os.getpgid(candidate.pid) == process.pid and candidate.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(candidate.pid)
    return members


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class _Lines(queue.SimpleQueue[str]):
    closed = False


def _lines_of(process: subprocess.Popen[str]) -> _Lines:
    lines = _Lines()
    stream = process.stdout
    assert stream is not None

    def read(stream: IO[str]) -> None:
        with suppress(ValueError):
            for line in stream:
                lines.put(line.rstrip("\n"))
        lines.closed = True

    threading.Thread(target=read, args=(stream,), daemon=True).start()
    return lines


def _drain(lines: _Lines) -> list[str]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(lines.get_nowait())
    return found


class _MetricsTail:
    """New whole lines of a JSONL file that this attempt appends to (and may truncate first, on resume)."""

    def __init__(self, path: Path) -> None:
        self._path, self._last_step = path, -1
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        try:
            size = self._path.stat().st_size
        except OSError:
            return []
        if size < self._offset:
            self._offset = 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = []
        for line in whole.splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records


def _judge(job: Job, exit_code: int, tail: deque[str]) -> Completion:
    """The completion record if the job succeeded, else the error that says why not."""
    with suppress(OSError, ValidationError):
        completion = Completion.model_validate_json(job.completion_path.read_text(encoding="utf-8"))
        if completion.token == job.token and completion.exit_code == 0:
            return completion
    log = Path(job.attempt_dir) / "launcher.log"
    if records := _error_records(Path(job.attempt_dir)):
        raise _with_log(records[0], job, log)
    how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    raise TransientError(
        f"the {job.stage} job ended without its completion record ({how})",
        where=f"stage {job.stage}, attempt {job.attempt}, log {log}",
        why=_cause(tail) or "a rank or a launcher was killed from outside",
        fix="run the same command again: it continues from the last checkpoint",
    )


def _error_records(attempt: Path) -> list[dict[str, Any]]:
    """What the ranks reported, the likeliest cause first: one that no retry mends, then the earliest."""
    found = []
    for path in attempt.glob("error-rank*.json"):
        with suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            found.append((record["exit_code"] == ExitCode.TRANSIENT, path.stat().st_mtime_ns, record))
    return [record for *_, record in sorted(found, key=lambda row: row[:2])]


def _with_log(record: dict[str, Any], job: Job, log: Path) -> DschatError:
    return BY_EXIT_CODE.get(int(record["exit_code"]), TransientError)(
        record["error"],
        where=record.get("where") or f"stage {job.stage}, rank {record.get('rank')}, log {log}",
        why=record.get("why", ""),
        fix=record.get("next") or "run the same command again: it continues from the last checkpoint",
    )


def _cause(tail: deque[str]) -> str:
    """The last line that looks like an error."""
    for line in reversed(tail):
        if re.search(r"\b\w*(Error|Exception|Killed)\b", line):
            return line.strip()[:500]
    return ""
