"""Leases: who may make an artifact. One living process at a time; a dead one is taken over at once."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from dschat_core import storage


class Owner(BaseModel):
    """Who makes an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str
    host: str
    boot_id: str
    pid: int = Field(gt=0, lt=2**31)
    started: float

    def __str__(self) -> str:
        return f"run {self.run!r} (pid {self.pid} on {self.host})"

    def alive(self) -> bool | None:
        """Whether the process lives; None where that can't be known (another host)."""
        if self.host != socket.gethostname():
            return None
        if self.boot_id != _boot_id():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.Error:
            return False


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def this_process(run: str) -> Owner:
    """The current process as an owner."""
    pid = os.getpid()
    return Owner(
        run=run,
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid=pid,
        started=psutil.Process(pid).create_time(),
    )


class Lease(BaseModel):
    """The right to make one artifact. The fencing token is in every temporary name and checked at commit."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    owner: Owner
    token: str
    expires_at: float

    def free_for(self, claimant: Owner) -> bool:
        """Whether `claimant` may take over: the owner is dead, or the lease has run out.

        On the same host the process table decides; the same run on another host (a retry elsewhere) takes over
        at once; any other waits for the lease to expire.
        """
        alive = self.owner.alive()
        if alive is not None:
            return not alive or self.owner == claimant
        return self.owner.run == claimant.run or time.time() > self.expires_at


@contextmanager
def local_lock(folder: Path) -> Iterator[None]:
    """Mutual exclusion of this machine's processes while a lease changes hands."""
    with storage.explained("write to", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
