"""The launcher's edges: hostfiles, the command line, what the ranks see, attempts that make no progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from dschat_core.cluster import attempts
from dschat_core.cluster.launch import Layout, build_command, parse_hostfile, rank_environment, resolve_layout
from dschat_core.config import RuntimeConfig
from dschat_core.errors import ConfigError, IntegrityError, NoProgressError


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("a slots=2\na slots=2\n", 2, "listed twice"),
        ("# nodes\na slots=0\n", 2, "0 slots"),
        ("-oProxyCommand=x slots=1\n", 1, "not of the form"),
        ("a slots=2\nb $(id) slots=2\n", 2, "not of the form"),
        ("a\n", 1, "not of the form"),
    ],
)
def test_r12_a_bad_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, line: int, named: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named) as caught:
        parse_hostfile(path)
    assert caught.value.where == f"{path}:{line}"


def test_a_good_hostfile_gives_the_layout(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two nodes\nnode0 slots=2\n\nnode1 slots=4  # more\n")
    assert parse_hostfile(path) == [("node0", 2), ("node1", 4)]
    layout = resolve_layout(RuntimeConfig(num_nodes=2, hostfile=str(path), ranks_per_node=2))
    assert (layout.nodes, layout.world_size) == (("node0", "node1"), 4)
    for refused in (
        RuntimeConfig(num_nodes=2, hostfile=str(path), ranks_per_node=3),
        RuntimeConfig(num_nodes=3, hostfile=str(path)),
        RuntimeConfig(num_nodes=2),
        RuntimeConfig(num_nodes=2, hostfile=str(tmp_path / "none")),
    ):
        with pytest.raises(ConfigError):
            resolve_layout(refused)


def test_nothing_of_the_users_is_on_the_command_line(tmp_path: Path) -> None:
    command = build_command(Layout(2, 1, "cpu"), tmp_path / "job.json", port=1234)
    assert Path(command[0]).name == "deepspeed"
    assert command[-3:] == ["--module", "dschat_core.worker", str(tmp_path / "job.json")]
    with pytest.raises(ConfigError, match="other nodes"):
        build_command(Layout(1, 1, "cpu", ("a", "b")), tmp_path / "a b" / "job.json", port=1234)


def test_r16_the_ranks_see_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "PREFECT_API_AUTH_STRING", "HF_TOKEN", "DB_PASSWORD"):
        monkeypatch.setenv(name, "s3cr3t")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    environment = rank_environment(Layout(2, 3, "cpu"))
    assert "s3cr3t" not in environment.values()
    assert (environment["OMP_NUM_THREADS"], environment["NCCL_SOCKET_IFNAME"]) == ("3", "eth0")


def commit_step(state: Path, step: int) -> None:
    (state / f"step-{step}").mkdir()
    (state / f"step-{step}" / "manifest.json").write_text("{}")


def test_attempts_are_numbered_and_know_their_checkpoints(tmp_path: Path) -> None:
    assert (attempts.begin_attempt(tmp_path), attempts.last_step(tmp_path)) == (1, 0)
    commit_step(tmp_path, 100)
    commit_step(tmp_path, 20)
    (tmp_path / "step-300").mkdir()  # killed before its manifest
    attempts.end_attempt(tmp_path, number=1, first_step=0, error="killed", counted=True)
    assert (attempts.begin_attempt(tmp_path), attempts.committed_steps(tmp_path)) == (2, [20, 100])
    attempts.prune_after_commit(tmp_path, "last")
    assert attempts.committed_steps(tmp_path) == [100]


def test_r4_lost_checkpoints_are_an_error_and_never_a_restart(tmp_path: Path) -> None:
    commit_step(tmp_path, 20)
    attempts.end_attempt(tmp_path, number=1, first_step=0, error="killed", counted=True)
    (tmp_path / "step-20" / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match="step 20"):
        attempts.begin_attempt(tmp_path)


def test_three_attempts_without_progress_end_the_stage(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        assert attempts.begin_attempt(tmp_path) == number
        attempts.end_attempt(tmp_path, number=number, first_step=0, error="boom", counted=True)
    with pytest.raises(NoProgressError) as caught:
        attempts.begin_attempt(tmp_path)
    assert caught.value.why == "boom"


def test_interruptions_do_not_count_against_progress(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        attempts.end_attempt(tmp_path, number=number, first_step=0, error="preempted", counted=False)
    assert attempts.begin_attempt(tmp_path) == 5
