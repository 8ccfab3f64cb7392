"""One job over two nodes (network namespaces with sshd of their own), started over pdsh by the real launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import TinyRun

pytestmark = pytest.mark.multinode

SCRIPT = tiny.REPOSITORY / "tests" / "netns" / "nodes.sh"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hostfile of two running nodes, and an `ssh` on PATH that reaches them."""
    missing = [
        name
        for name in ("pdsh", "sshd", "ip", "unshare")
        if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    ]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    environment = {**os.environ, "BASE": str(tmp_path / "nodes")}
    subprocess.run(["bash", str(SCRIPT), "down"], env=environment, capture_output=True, timeout=60, check=False)
    up = subprocess.run(
        ["bash", str(SCRIPT), "up", "2"], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    try:
        if up.returncode:
            pytest.skip(f"no network namespaces here: {up.stderr[-200:]}")
        wrapper = tmp_path / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/nodes/ssh/config "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        yield tmp_path / "nodes" / "hostfile"
    finally:
        subprocess.run(["bash", str(SCRIPT), "down"], env=environment, capture_output=True, timeout=60, check=False)


def test_two_nodes_train_like_two_ranks_on_one(nodes: Path, tiny_run: TinyRun, tmp_path: Path) -> None:
    sets = {
        "name": "nodes",
        "store": f"{tmp_path}/store",
        "pretraining.runtime.num_nodes": 2,
        "pretraining.runtime.ranks_per_node": 1,
        "pretraining.runtime.hostfile": nodes,
    }
    arguments = [argument for key, value in sets.items() for argument in ("--set", f"{key}={value}")]
    done = tiny.dschat("run", str(tiny_run.config), "--until", "pretraining", *arguments, "--json", home=tiny_run.home)
    (uri,) = (row["uri"] for row in json.loads(done.stdout)["stages"] if row["stage"] == "pretraining")
    one_node = tiny_run.folder / "links" / "pretraining"
    losses = [_losses(folder / "metrics.jsonl") for folder in (Path(uri), one_node)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]
