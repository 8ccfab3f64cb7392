"""Exit codes and the errors people meet: what, where, why, and the next command."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `dschat` and of a job's ranks; Prefect's retry condition reads them too."""

    DONE = 0
    PREEMPTED = 10
    TRANSIENT = 11
    STORAGE_FULL = 12
    OUT_OF_MEMORY = 13
    CONFIG = 20
    NUMERICAL = 21
    INTEGRITY = 22
    GATE = 30
    NO_PROGRESS = 93
    INTERRUPTED = 130
    TERMINATED = 143


RETRYABLE = frozenset({ExitCode.PREEMPTED, ExitCode.TRANSIENT, ExitCode.OUT_OF_MEMORY})


class DschatError(Exception):
    """An error meant for a person.

    Args:
        what: what is wrong, with both values where two disagree.
        where: file:line, config path, stage, rank or step.
        why: the likely cause.
        fix: the exact command or change that mends it.
    """

    exit_code = ExitCode.TRANSIENT

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix

    def __str__(self) -> str:
        rows = [self.what]
        rows += [f"{label}: {text}" for label, text in self.details() if text]
        return "\n  ".join(rows)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive BaseException's own pickling (Prefect, process pools).
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)

    def details(self) -> list[tuple[str, str]]:
        """(label, text) rows below the headline, in the order a tired reader wants them."""
        return [("where", self.where), ("why", self.why), ("next", self.fix)]

    def as_dict(self) -> dict[str, object]:
        """The error for `--json`."""
        return {
            "error": self.what,
            "where": self.where,
            "why": self.why,
            "next": self.fix,
            "exit_code": int(self.exit_code),
        }


def _rebuild(kind: type[DschatError], what: str, where: str, why: str, fix: str) -> DschatError:
    return kind(what, where=where, why=why, fix=fix)


class ConfigError(DschatError):
    """Config, usage or set-up is wrong; no retry helps."""

    exit_code = ExitCode.CONFIG


class TransientError(DschatError):
    """A job died or hung; another attempt may succeed."""

    exit_code = ExitCode.TRANSIENT


class PreemptedError(DschatError):
    """The job was asked to stop and left a checkpoint behind."""

    exit_code = ExitCode.PREEMPTED


class StorageFullError(DschatError):
    """No space left where an artifact or checkpoint is written."""

    exit_code = ExitCode.STORAGE_FULL


class OutOfMemoryError(DschatError):
    """A rank ran out of memory; a smaller micro-batch may fit."""

    exit_code = ExitCode.OUT_OF_MEMORY


class NumericalError(DschatError):
    """Loss or rewards are not finite and the rollback budget is spent."""

    exit_code = ExitCode.NUMERICAL


class IntegrityError(DschatError):
    """A file is not what its manifest says, or a file was refused for safety."""

    exit_code = ExitCode.INTEGRITY


class GateError(DschatError):
    """A gate said no: the data verdict, or evaluation against the publishing limits."""

    exit_code = ExitCode.GATE


class NoProgressError(DschatError):
    """Three attempts in a row ended without a new checkpoint."""

    exit_code = ExitCode.NO_PROGRESS


class InterruptedRunError(DschatError):
    """The user stopped the run; `dschat resume` continues it."""

    exit_code = ExitCode.INTERRUPTED


BY_EXIT_CODE: dict[int, type[DschatError]] = {
    int(kind.exit_code): kind
    for kind in (
        ConfigError,
        TransientError,
        PreemptedError,
        StorageFullError,
        OutOfMemoryError,
        NumericalError,
        IntegrityError,
        GateError,
        NoProgressError,
        InterruptedRunError,
    )
}
