"""Training under the real launcher on two ranks, with a rank killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Completion, Job
from dschat_core.config import ModelConfig, RuntimeConfig, SftConfig
from dschat_core.train import engine
from dschat_core.train.models import new_llama
from tests.helpers_training import TINY_MODEL, make_job, make_parts, start_launcher

TIMES = {"step_s", "tokens_per_s", "phases"}
DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    parts = make_parts(folder)
    base = folder / "base"
    new_llama(ModelConfig(**TINY_MODEL), load_tokenizer(parts["tokenizer"]), seed=1).save_pretrained(base)
    engine.copy_tokenizer(parts["tokenizer"], base)
    return {name: parts[name] for name in ("tokenizer", "dialogues", "dialogues_heldout")} | {"model": base}


def job_in(folder: Path, inputs: dict[str, Path], attempt: int = 1) -> Job:
    section = SftConfig(
        max_steps=40,
        max_length=64,
        global_batch_size=4,
        learning_rate=3e-3,
        eval_every=20,
        runtime=RuntimeConfig(log_every=1, checkpoint_every=4),
    )
    return make_job(folder, "sft", section, inputs, attempt=attempt)


def lines(job: Job) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def ranks_of(job: Job) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "dschat_core.worker" in command and command[-1].startswith(job.attempt_dir) and "-m" in command:
            found.append(process)
    return [process for process in found if "launch" not in " ".join(process.info["cmdline"])]


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {DEADLINE_S} s"
        time.sleep(0.02)


def test_r1_a_killed_rank_is_resumed_bitwise(inputs: dict[str, Path], tmp_path: Path) -> None:
    """SIGKILL of rank 1 in the middle; all ranks are gone; the next attempt ends where an undisturbed run does."""
    straight = job_in(tmp_path / "straight", inputs)
    assert start_launcher(straight).wait(DEADLINE_S) == 0

    killed = job_in(tmp_path / "killed", inputs)
    launcher = start_launcher(killed)
    wait_for(lambda: list(Path(killed.state_dir).glob("step-[48]")), "a checkpoint")
    os.kill(max(process.pid for process in ranks_of(killed)), signal.SIGKILL)
    launcher.wait(DEADLINE_S)
    wait_for(lambda: not ranks_of(killed), "the end of all ranks")
    assert not killed.completion_path.exists()

    resumed = job_in(tmp_path / "killed", inputs, attempt=2)
    assert start_launcher(resumed).wait(DEADLINE_S) == 0
    completion = Completion.model_validate_json(resumed.completion_path.read_text())
    resumed_from = completion.facts["resumed_from"]
    assert resumed_from >= 4
    assert resumed_from % 4 == 0
    assert f"resumed from step {resumed_from}" in (Path(resumed.attempt_dir) / "launcher.log").read_text()
    assert lines(resumed) == lines(straight)
    weights = [Path(job.output_dir) / "model" / "model.safetensors" for job in (straight, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
