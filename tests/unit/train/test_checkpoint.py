"""Checkpoints: exact, and whole or not there."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dschat_core.config import OptimizerConfig, RuntimeConfig
from dschat_core.errors import ConfigError, IntegrityError, StorageFullError
from dschat_core.train import checkpoint, engine
from tests.helpers_training import run_ranks

IDENTITY = {"stage": "sft", "key": "abc"}


def small_engine(zero_stage: int = 1) -> Any:
    torch.manual_seed(0)
    return engine.build_engine(
        torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)),
        OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
        RuntimeConfig(zero_stage=zero_stage),
        precision="fp32",
        micro_batch_size=1,
    )


def take_step(trained: Any, step: int) -> float:
    ids = torch.tensor([[step % 10, 1], [3, 9 - step % 10]])[engine.rank() :: engine.world_size()]
    engine.backward(trained, trained(ids).pow(3).sum(), count=2, is_last=True)
    return engine.optimizer_step(trained, 1e-2).grad_norm


def save(directory: Path, trained: Any, step: int, **more: Any) -> None:
    state = {"tokens": step, "window": 0.1 + step}
    checkpoint.save_checkpoint(directory, step, {"model": trained}, state, token="t", identity=IDENTITY, **more)


def _continues(directory: Path, zero_stage: int) -> tuple[Any, list[float], list[float]]:
    trained = small_engine(zero_stage)
    for step in range(1, 4):
        take_step(trained, step)
    save(directory, trained, 3)
    straight = [take_step(trained, step) for step in range(4, 8)]
    resumed = small_engine(zero_stage)
    found = checkpoint.load_newest(directory, {"model": resumed}, identity=IDENTITY)
    return found, straight, [take_step(resumed, step) for step in range(4, 8)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_resumed_engine_continues_bitwise(tmp_path: Path, zero_stage: int) -> None:
    for found, straight, resumed in run_ranks(2, _continues, tmp_path, zero_stage):
        assert found == (3, {"tokens": 3, "window": 3.1})
        assert straight == resumed
    names = {path.suffix for path in (tmp_path / "step-3").rglob("*") if path.is_file()}
    assert names == {".pt", ".json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["committed.json", "step-3"]


def _save_steps(directory: Path, steps: list[int]) -> None:
    trained = small_engine()
    for step in steps:
        take_step(trained, step)
        save(directory, trained, step)


def _load(directory: Path, identity: dict[str, str] = IDENTITY, zero_stage: int = 1) -> Any:
    return checkpoint.load_newest(directory, {"model": small_engine(zero_stage)}, identity=identity)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "made"
    run_ranks(1, _save_steps, folder, [2, 4])
    return folder


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def truncate(folder: Path) -> None:
    path = next(folder.rglob("*optim_states.pt"))
    path.write_bytes(path.read_bytes()[:-7])


def flip(folder: Path) -> None:
    path = next(folder.rglob("*model_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/dschat-test-payload-ran"),))


def poison(folder: Path) -> None:
    next(folder.rglob("*model_states.pt")).write_bytes(pickle.dumps(Payload()))


def link(folder: Path) -> None:
    path = next(folder.rglob("*model_states.pt"))
    outside = folder.parent.parent / "outside.pt"
    shutil.move(path, outside)
    path.symlink_to(outside)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "r5 a file truncated": truncate,
    "r5 a file missing": lambda folder: next(folder.rglob("*optim_states.pt")).unlink(),
    "r5 the manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "r5 one bit flipped": flip,
    "r14 a malicious pickle": poison,
    "r14 a file added": lambda folder: (folder / "model" / "more.pt").write_bytes(b"x"),
    "r4 a link that points outside": link,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_anything_is_loaded(name: str, directory: Path) -> None:
    """The one before is used, loudly; where none verifies, that is an error and never step 0."""
    DAMAGE[name](directory / "step-4")
    with pytest.raises(IntegrityError):
        checkpoint.verify(directory / "step-4")
    assert run_ranks(1, _load, directory) == [(2, {"tokens": 2, "window": 2.1})]
    shutil.rmtree(directory / "step-2")
    with pytest.raises(IntegrityError, match="none verifies"):
        run_ranks(1, _load, directory)
    assert not Path("/tmp/dschat-test-payload-ran").exists()


def test_r3_a_kill_between_data_and_commit_leaves_the_previous_one(directory: Path) -> None:
    (directory / "step-4").rename(directory / ".step-4.token")
    assert run_ranks(1, _load, directory) == [(2, {"tokens": 2, "window": 2.1})]


def test_r4_pointers_are_irrelevant_and_nothing_means_nothing(directory: Path, tmp_path: Path) -> None:
    for content in ("", "step-99", "../../outside"):
        (directory / "latest").write_text(content)
        assert run_ranks(1, _load, directory)[0][0] == 4
    (directory / "step-9").symlink_to(directory / "step-4")
    assert run_ranks(1, _load, directory)[0][0] == 4
    assert run_ranks(1, _load, tmp_path / "nowhere") == [None]


def test_r4_committed_steps_that_vanished_are_an_error(directory: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(directory / f"step-{step}")
    with pytest.raises(IntegrityError, match="none verifies"):
        run_ranks(1, _load, directory)


def test_another_job_world_size_or_stage_is_refused(directory: Path) -> None:
    with pytest.raises(IntegrityError, match="key is 'abc', not 'other'"):
        run_ranks(1, _load, directory, IDENTITY | {"key": "other"})
    with pytest.raises(ConfigError, match="world_size=1, this job has 2"):
        run_ranks(2, _load, directory)
    with pytest.raises(ConfigError, match="zero_stage=1, this job has 2"):
        run_ranks(1, _load, directory, IDENTITY, 2)


def test_prune_keeps_the_newest(directory: Path) -> None:
    (directory / ".step-6.dead").mkdir()
    checkpoint.prune(directory, 1)
    assert sorted(path.name for path in directory.iterdir()) == ["committed.json", "step-4"]
    checkpoint.prune(directory, 0)
    assert list(directory.iterdir()) == []
    checkpoint.prune(directory / "nowhere", 1)


def _save_without_room(directory: Path) -> str:
    trained = small_engine()
    free = shutil.disk_usage(directory)._replace(free=1000)
    checkpoint.shutil.disk_usage = lambda _: free  # type: ignore[assignment]
    try:
        save(directory, trained, 6)
    except StorageFullError as error:
        return str(error)
    return "saved"


def test_r6_no_room_is_noticed_before_writing(directory: Path) -> None:
    for message in run_ranks(2, _save_without_room, directory):
        assert "bytes and 1,000 are free" in message
    assert checkpoint.steps(directory) == [2, 4]
    assert json.loads((directory / "committed.json").read_text())["step"] == 4
    assert not list(directory.glob(".step-6*"))
