"""The run's folder: state across processes, busy runs, errors that survive pickling."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dschat_core.config import RunConfig, parse_config
from dschat_core.errors import BY_EXIT_CODE, ConfigError, GateError
from dschat_core.leases import this_process
from dschat_core.runs import RunFolder, find_run, read_state, saved_config, status


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = {name: {"train": ["x.jsonl"]} for name in ("text", "dialogues", "preferences", "prompts")}
    tree = {"name": "demo", "data": data, "runs": str(tmp_path / "runs"), "store": str(tmp_path / "store")}
    return parse_config(tree, where="test")


def test_a_new_run_has_eight_pending_stages(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={"x.jsonl": "1"})
    shown = status(run.folder)
    assert shown["run"] == "demo"
    assert [row["state"] for row in shown["stages"]] == ["pending"] * 8
    assert set(shown["stages"][0]) == {"stage", "state", "key", "uri", "wall_s", "facts"}
    assert saved_config(run.folder) == config
    assert read_state(run.folder).inputs == {"x.jsonl": "1"}


def test_until_ends_the_run_early(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={}, until="sft")
    assert [stage for stage in config.stages() if run.wants(stage)] == [
        "validation",
        "tokenization",
        "pretraining",
        "sft",
    ]


def test_a_failed_run_keeps_its_error(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={})
    run.start("sft", key="k", uri="u")
    run.fail(GateError("toxic", fix="clean it").as_dict())
    shown = status(run.folder)
    assert shown["stages"][3]["state"] == "failed"
    assert shown["error"]["exit_code"] == 30


def test_a_stage_whose_process_died_is_shown_as_failed(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={})
    run.start("sft", key="k", uri="u")
    assert status(run.folder)["stages"][3]["state"] == "running"
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    run.state.owner = run.state.owner.model_copy(update={"pid": process.pid})
    run._save()
    assert status(run.folder)["stages"][3]["state"] == "failed"


def test_r11_a_run_that_another_process_executes_is_refused(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={})
    run.start("sft", key="k", uri="u")
    parent = os.getppid()
    run.state.owner = this_process("demo").model_copy(
        update={"pid": parent, "started": psutil.Process(parent).create_time()}
    )
    run._save()
    with pytest.raises(ConfigError, match=str(parent)):
        RunFolder.open(config, inputs={})


def test_runs_are_found_by_name_or_path(config: RunConfig) -> None:
    run = RunFolder.open(config, inputs={})
    assert find_run("demo", config.runs) == find_run(str(run.folder)) == run.folder
    with pytest.raises(ConfigError, match="no run 'demp'") as caught:
        find_run("demp", config.runs)
    assert "demo" in caught.value.why


@pytest.mark.parametrize("kind", BY_EXIT_CODE.values())
def test_errors_survive_pickling(kind: type[ConfigError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", where="where", why="why", fix="fix")))
    assert type(error) is kind
    assert error.as_dict() == kind("what", where="where", why="why", fix="fix").as_dict()
