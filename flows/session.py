"""What stands around the stages of a run: checks before, the run's record and report after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dschat_core.artifacts import Artifact
from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.launch import resolve_layout
from dschat_core.config import (
    RunConfig,
    RuntimeConfig,
    Section,
    Stage,
    TokenizationConfig,
    ValidationConfig,
    differing_keys,
    load_config,
)
from dschat_core.data.reading import missing_files, unique_files
from dschat_core.errors import ConfigError, DschatError, ExitCode
from dschat_core.model_folder import check_reward_folder, model_config
from dschat_core.report.page import build_report
from dschat_core.runs import REPORT_FILE, RunFolder, artifacts_of, read_state, saved_config, status
from tasks.inputs import changed_files, file_digests
from tasks.progress import announce


def check_before_start(config: RunConfig) -> None:
    """What can be found wrong before anything is spent. Raises ConfigError naming the section and what it names."""
    if missing := missing_files(config.data):
        raise ConfigError(
            f"no such input file: {', '.join(missing)}",
            where="the config's `data`",
            why="a path is mistyped, or the data was not prepared",
            fix="correct the path; for the demo: python deployments/demo_data.py runs/data",
        )
    for stage in config.stages():
        _check_stage(stage, getattr(config, stage))


def _check_stage(stage: Stage, section: Section) -> None:
    """The nodes and the model folders that a stage's section names. Raises the library's own error, with the stage."""
    try:
        if isinstance(runtime := getattr(section, "runtime", None), RuntimeConfig):
            resolve_layout(runtime)
        if isinstance(section, ValidationConfig):
            if missing := [pattern for pattern in section.contamination.against if not unique_files([pattern])]:
                raise ConfigError(f"contamination.against: no such file: {', '.join(missing)}", fix="correct the path")
            if section.length.tokenizer:
                load_tokenizer(section.length.tokenizer)
        elif isinstance(section, TokenizationConfig):
            if section.base_model:
                load_tokenizer(section.base_model)
        elif base_model := getattr(section, "base_model", None):
            model_config(Path(base_model))
        if reward_model := getattr(section, "reward_model", None):
            check_reward_folder(Path(reward_model))
    except DschatError as error:
        raise type(error)(f"{stage}: {error.what}", where=error.where, why=error.why, fix=error.fix) from None


@contextmanager
def run_session(path: str, overrides: list[str], until: Stage | None) -> Iterator[RunFolder]:
    """Open the run's folder, say what changed since its last run, and leave record and report whatever happens."""
    config = load_config(path, overrides)
    check_before_start(config)
    digests = file_digests(config)
    changes = _changes(config, digests)
    run = RunFolder.open(config, inputs=digests, until=until)
    for text in [*config.warnings(), *changes]:
        announce(text)
    try:
        yield run
    except BaseException as error:
        run.fail(error_record(error))
        raise
    finally:
        # A report that cannot be drawn must not hide the run's own error.
        with suppress(Exception):
            write_report(run.folder)
    announce(f"report: {run.folder / REPORT_FILE}")


def error_record(error: BaseException) -> dict[str, object]:
    """An error for `run.json` and `--json`."""
    if isinstance(error, DschatError):
        return error.as_dict()
    interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
    return {
        "error": "interrupted" if interrupted else f"{type(error).__name__}: {error}",
        "where": "",
        "why": "",
        "next": "run the same command again: finished stages are reused",
        "exit_code": int(ExitCode.INTERRUPTED if interrupted else ExitCode.TRANSIENT),
    }


def write_report(folder: Path) -> None:
    """Draw the report of the run in this folder from what its artifacts hold."""
    artifacts: dict[Stage, Artifact] = artifacts_of(folder)
    build_report(
        status(folder) | {"wall_s": read_state(folder).wall_s},
        {stage: artifact.manifest.model_dump(mode="json") for stage, artifact in artifacts.items()},
        {stage: artifact.local() for stage, artifact in artifacts.items()},
        folder / REPORT_FILE,
    )


def _changes(config: RunConfig, digests: dict[str, str]) -> list[str]:
    """How config and input differ from the last run of this name."""
    try:
        before, previous = saved_config(config.folder), read_state(config.folder)
    except ConfigError:
        return []
    keys = differing_keys(before.model_dump(mode="json"), config.model_dump(mode="json"))
    rows = [f"changed since the last run of {config.name!r}: {key}" for key in keys]
    return rows + [f"changed since the last run: {row}" for row in changed_files(previous.inputs, digests)]
