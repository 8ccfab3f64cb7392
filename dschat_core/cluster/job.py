"""The job file: everything that crosses from the orchestrator to the ranks of one attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dschat_core.config import EvaluationConfig, PpoConfig, PretrainingConfig, RewardConfig, Section, SftConfig, Stage
from dschat_core.errors import ConfigError

JOB_SECTIONS: dict[str, type[Section]] = {
    "pretraining": PretrainingConfig,
    "sft": SftConfig,
    "reward": RewardConfig,
    "ppo": PpoConfig,
    "evaluation": EvaluationConfig,
}


class Supervisor(BaseModel):
    """The process that launched the job; its ranks end when it is gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str
    pid: int
    started: float


class Job(BaseModel):
    """One attempt at one stage. Holds no secrets; `section` is checked again when the ranks load it.

    `inputs` maps a name to the local folder of the part read (`tokenizer`, `dialogues`, `sft_model`, …),
    `output_dir` takes the product, `state_dir` outlives the attempt (checkpoints, metrics), `attempt_dir` is this
    attempt's own (logs, completion record).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = 1
    run: str
    stage: Stage
    key: str
    attempt: int
    token: str
    section: dict[str, Any]
    inputs: dict[str, str]
    output_dir: str
    state_dir: str
    attempt_dir: str
    supervisor: Supervisor

    def config(self) -> Any:
        """The stage's section, validated. Raises ConfigError if the file was tampered with."""
        return JOB_SECTIONS[self.stage].model_validate(self.section)

    def input(self, name: str) -> Path:
        """The folder of a part this job reads."""
        return Path(self.inputs[name])

    @property
    def metrics_path(self) -> Path:
        """The metrics of all attempts, one JSON line per logged step."""
        return Path(self.state_dir) / "metrics.jsonl"

    @property
    def completion_path(self) -> Path:
        """Written by rank 0 as its last act; the only proof that the job succeeded."""
        return Path(self.attempt_dir) / "completion.json"

    def save(self, path: Path) -> None:
        """Write the job file."""
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")


def load_job(path: str | Path) -> Job:
    """Read and check a job file. Raises ConfigError naming the file."""
    try:
        return Job.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise ConfigError(f"cannot use the job file {path}", why=str(error), fix="start the run again") from None


class Completion(BaseModel):
    """How an attempt ended, as its rank 0 says."""

    model_config = ConfigDict(extra="forbid")
    exit_code: int
    token: str
    facts: dict[str, Any] = {}
    parts: dict[str, list[str]] = {}
    error: dict[str, str] | None = None
