"""The deployed pipeline: a real server, a process worker, the deployment of `deployments/prefect.yaml`, and Retry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dschat_core.cluster.launch import free_port
from dschat_core.config import STAGES
from tests import tiny
from tests.conftest import TinyRun

BIN = Path(sys.executable).parent


class Deployed:
    """A Prefect server with the pipeline deployed and a worker that runs it."""

    def __init__(self, home: Path, logs: Path) -> None:
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.logs = logs
        self.environment = tiny.environment(
            home,
            PREFECT_API_URL=self.api,
            PREFECT_SERVER_API_PORT=str(self.port),
            PREFECT_SERVER_UI_API_URL=self.api,
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            DO_NOT_TRACK="1",
            DSCHAT_HOME=str(tiny.REPOSITORY),
        )

    def prefect(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(BIN / "prefect"), *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=tiny.REPOSITORY,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def background(self, name: str, *arguments: str) -> Iterator[None]:
        with (self.logs / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [str(BIN / "prefect"), *arguments],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=tiny.REPOSITORY,
                start_new_session=True,
            )
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def is_up(self) -> bool:
        with suppress(OSError):
            return bool(self.call("/health"))
        return False

    def start_run(self, config: Path, overrides: list[str], until: str | None = None) -> str:
        found = self.call("/deployments/name/chat/demo")
        parameters = {"config": str(config), "overrides": overrides, "until": until}
        return str(self.call(f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, run: str) -> str:
        return str(self.call(f"/flow_runs/{run}")["state"]["type"])

    def wait_for(self, run: str, *states: str) -> None:
        tiny.wait_until(lambda: self.state(run) in states, what=f"the run to be {states}", timeout_s=400)

    def task_runs(self, run: str) -> list[dict[str, Any]]:
        return list(
            self.call("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_ASC"})
        )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    root = tmp_path_factory.mktemp("prefect")
    site = Deployed(root / "home", root)
    with site.background("server", "server", "start"):
        tiny.wait_until(site.is_up, what="the Prefect server")
        site.prefect("work-pool", "create", "dschat", "--type", "process")
        site.prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
        with site.background("worker", "worker", "start", "--pool", "dschat"):
            yield site


def test_a_deployed_run_shows_eight_stages_and_the_right_edges(deployed: Deployed, tiny_run: TinyRun) -> None:
    run = deployed.start_run(tiny_run.config, ["name=deployed", "ppo.seed=5"])
    deployed.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    assert deployed.state(run) == "COMPLETED"
    tasks = {task["name"]: task for task in deployed.task_runs(run)}
    assert list(tasks) == list(STAGES)
    made = [name for name, task in tasks.items() if task["state"]["name"] == "Completed"]
    assert made == ["ppo", "evaluation", "publishing"]
    assert {task["state"]["name"] for name, task in tasks.items() if name not in made} == {"Reused"}
    names = {task["id"]: name for name, task in tasks.items()}
    parents = {
        name: {names[source["id"]] for sources in task["task_inputs"].values() for source in sources if "id" in source}
        for name, task in tasks.items()
    }
    assert parents["reward"] == {"tokenization", "sft"}
    assert parents["ppo"] == {"tokenization", "sft", "reward"}
    assert parents["evaluation"] == {"tokenization", "pretraining", "sft", "reward", "ppo"}
    assert parents["publishing"] == {"ppo", "evaluation"}
    kinds = {(a["type"], a["key"]) for a in deployed.call("/artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})}
    assert {("progress", f"{stage}-progress") for stage in STAGES} <= kinds
    assert {("markdown", f"{stage}-report") for stage in STAGES} <= kinds


def test_the_nightly_schedule_is_declared_and_paused(deployed: Deployed) -> None:
    (schedule,) = deployed.call("/deployments/name/chat/demo")["schedules"]
    assert schedule["schedule"]["cron"] == "0 2 * * *"
    assert schedule["active"] is False


def test_retry_reuses_finished_stages_and_continues_the_failed_one(deployed: Deployed, tiny_run: TinyRun) -> None:
    overrides = ["name=retried", "sft.seed=21", "sft.max_steps=400", "sft.runtime.checkpoint_every=5"]
    run = deployed.start_run(tiny_run.config, overrides, until="sft")

    def running() -> list[Path]:
        attempts = [
            p.parent.parent for p in tiny_run.store.glob("sft/*/checkpoints/attempt-0001/job.json") if _seed(p) == 21
        ]
        return [
            path for state in attempts for path in state.glob("step-*/manifest.json") if tiny.ranks_of(tiny_run.store)
        ]

    (checkpoint, *_) = tiny.wait_until(running, what="a checkpoint of sft")
    for pid in tiny.ranks_of(tiny_run.store):
        os.kill(pid, signal.SIGKILL)
    deployed.wait_for(run, "FAILED", "CRASHED")
    deployed.prefect("flow-run", "retry", run)
    deployed.wait_for(run, "COMPLETED", "FAILED", "CRASHED")
    # The first attempt's Failed state may still be shown for a moment.
    tiny.wait_until(lambda: deployed.state(run) == "COMPLETED", what="the retried run to complete", timeout_s=300)
    latest = {task["name"]: task["state"]["name"] for task in deployed.task_runs(run)}
    assert latest["pretraining"] == "Reused"
    assert latest["sft"] == "Completed"
    attempts = checkpoint.parent.parent / "attempt-0002" / "launcher.log"
    assert "resumed from step" in attempts.read_text()


def _seed(job: Path) -> int:
    return int(json.loads(job.read_text())["section"]["seed"])
