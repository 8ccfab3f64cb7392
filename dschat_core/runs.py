"""A run's own folder `{runs}/{name}`: the resolved config, the state of each stage, the report, links to artifacts.

Artifacts live in the store and are shared; nothing here is needed to reuse them.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from dschat_core import storage
from dschat_core.artifacts import Artifact, Store, load_artifact
from dschat_core.config import STAGES, RunConfig, Stage, dump_config, load_config
from dschat_core.errors import ConfigError
from dschat_core.leases import Owner, this_process

CONFIG_FILE = "config.yaml"
STATE_FILE = "run.json"
REPORT_FILE = "report.html"

State = Literal["done", "reused", "running", "failed", "pending"]


class StageState(BaseModel):
    """Where one stage of a run stands. `wall_s` is the time this run spent on it."""

    model_config = ConfigDict(extra="forbid")
    stage: Stage
    state: State = "pending"
    key: str | None = None
    uri: str | None = None
    wall_s: float = 0.0
    facts: dict[str, Any] = {}
    started_at: float | None = None


class RunState(BaseModel):
    """The content of `run.json`."""

    model_config = ConfigDict(extra="forbid")
    run: str
    store: str
    owner: Owner
    started_at: float
    wall_s: float = 0.0
    inputs: dict[str, str] = {}
    stages: list[StageState]
    error: dict[str, Any] | None = None


class RunFolder:
    """One run while it executes: the only writer of its folder."""

    def __init__(self, config: RunConfig, state: RunState, *, until: Stage | None) -> None:
        self.config = config
        self.state = state
        self.until = until
        self.store = Store(config.store)

    @classmethod
    def open(cls, config: RunConfig, *, inputs: dict[str, str], until: Stage | None = None) -> RunFolder:
        """Create or take up the run's folder; finished stages are found again by their keys, not from here.

        Args:
            inputs: {address: SHA-256} of the input files, so that `resume` can refuse changed ones by name.
            until: the last stage to run.

        Raises:
            ConfigError: the folder can't be written, or another living process runs under this name.
        """
        folder = config.folder
        storage.ensure_writable(str(folder))
        owner = this_process(config.name)
        previous = _read_state(folder)
        if previous and previous.owner != owner and previous.owner.alive() and _unfinished(previous):
            raise ConfigError(
                f"run {config.name!r} is running already: {previous.owner}",
                where=str(folder),
                fix="wait for it, stop it, or use another `name`",
            )
        state = RunState(
            run=config.name,
            store=config.store,
            owner=owner,
            started_at=time.time(),
            inputs=inputs,
            stages=[StageState(stage=stage) for stage in config.stages()],
        )
        run = cls(config, state, until=until)
        storage.write(str(folder / CONFIG_FILE), dump_config(config).encode())
        run._save()
        return run

    @property
    def folder(self) -> Path:
        return self.config.folder

    def start(self, stage: Stage, *, key: str, uri: str) -> None:
        """A stage begins."""
        entry = self._entry(stage)
        entry.state, entry.key, entry.uri, entry.started_at = "running", key, uri, time.time()
        self._save()

    def finish(self, stage: Stage, artifact: Artifact, *, state: Literal["done", "reused"]) -> None:
        """A stage has its artifact: link it and record its facts."""
        entry = self._entry(stage)
        entry.state, entry.key, entry.uri = state, artifact.manifest.key, artifact.uri
        entry.facts = artifact.manifest.facts
        entry.wall_s = round(time.time() - (entry.started_at or time.time()), 3)
        link = self.folder / "links" / stage
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        if not storage.is_remote(artifact.uri):
            link.symlink_to(os.path.relpath(artifact.uri, link.parent.resolve()))
        self._save()

    def lineage(self) -> list[dict[str, str]]:
        """`{stage, key, uri}` of each artifact this run has so far, in pipeline order."""
        return [
            {"stage": entry.stage, "key": entry.key or "", "uri": entry.uri or ""}
            for entry in self.state.stages
            if entry.state in ("done", "reused")
        ]

    def wants(self, stage: Stage) -> bool:
        """Whether the stage is configured and not after `--until`."""
        last = STAGES.index(self.until) if self.until else len(STAGES)
        return getattr(self.config, stage) is not None and STAGES.index(stage) <= last

    def fail(self, error: dict[str, Any]) -> None:
        """The run ends on an error; the running stage is the one that failed."""
        for entry in self.state.stages:
            if entry.state == "running":
                entry.state = "failed"
                entry.wall_s = round(time.time() - (entry.started_at or time.time()), 3)
        self.state.error = error
        self._save()

    def _entry(self, stage: Stage) -> StageState:
        return next(entry for entry in self.state.stages if entry.stage == stage)

    def _save(self) -> None:
        self.state.wall_s = round(time.time() - self.state.started_at, 3)
        storage.write(str(self.folder / STATE_FILE), (self.state.model_dump_json(indent=1) + "\n").encode())


def _unfinished(state: RunState) -> bool:
    return state.error is None and any(entry.state == "running" for entry in state.stages)


def _read_state(folder: Path) -> RunState | None:
    with suppress(OSError, ValueError):
        return RunState.model_validate_json((folder / STATE_FILE).read_text(encoding="utf-8"))
    return None


def read_state(folder: Path) -> RunState:
    """The state of a run, with stages of a dead process shown as failed.

    Raises:
        ConfigError: the folder is not a run's.
    """
    state = _read_state(folder)
    if state is None:
        raise ConfigError(
            f"{folder} is not the folder of a run",
            why=f"there is no readable {STATE_FILE} in it",
            fix="dschat run CONFIG makes one; dschat status lists those there are",
        )
    if state.owner.alive() is False:
        for entry in state.stages:
            if entry.state == "running":
                entry.state = "failed"
    return state


def status(folder: Path) -> dict[str, Any]:
    """`{run, stages: [{stage, state, key, uri, wall_s, facts}]}`, and the error of a failed run."""
    state = read_state(folder)
    shown: dict[str, Any] = {
        "run": state.run,
        "stages": [entry.model_dump(mode="json", exclude={"started_at"}) for entry in state.stages],
    }
    if state.error:
        shown["error"] = state.error
    return shown


def find_run(name: str, runs: str = "runs") -> Path:
    """A run's folder by path or by name below `runs`. Raises ConfigError."""
    for candidate in (Path(name), Path(runs) / name):
        if os.path.isfile(candidate / STATE_FILE):
            return candidate
    known = ", ".join(sorted(p.parent.name for p in Path(runs).glob(f"*/{STATE_FILE}"))) or "none"
    raise ConfigError(
        f"there is no run {name!r}", why=f"runs known below {runs}/: {known}", fix="dschat run CONFIG starts one"
    )


def saved_config(folder: Path) -> RunConfig:
    """The resolved config of a run. Raises ConfigError."""
    return load_config(folder / CONFIG_FILE)


def artifacts_of(folder: Path) -> dict[Stage, Artifact]:
    """The committed artifacts of a run's stages, in pipeline order."""
    found: dict[Stage, Artifact] = {}
    for entry in sorted(read_state(folder).stages, key=lambda e: STAGES.index(e.stage)):
        if entry.uri and entry.state in ("done", "reused"):
            with suppress(ConfigError):
                found[entry.stage] = load_artifact(entry.uri)
    return found


def read_json(path: Path) -> Any:
    """A JSON file of a run or artifact."""
    return json.loads(path.read_text(encoding="utf-8"))
