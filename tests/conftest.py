"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import tiny


@dataclass(frozen=True)
class TinyRun:
    """A finished run of the whole pipeline, made once a session."""

    root: Path
    tree: dict[str, Any]
    config: Path
    home: Path
    first: dict[str, Any]

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def folder(self) -> Path:
        return self.root / "runs" / "tiny"

    def run(self, *arguments: str, config: Path | None = None) -> dict[str, Any]:
        """`dschat run … --json`, parsed."""
        done = tiny.dschat("run", str(config or self.config), *arguments, "--json", home=self.home)
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """All eight stages through the real command line, the embedded Prefect and the real launcher on two ranks."""
    root = tmp_path_factory.mktemp("pipeline")
    tree = tiny.tiny_tree(root)
    config = tiny.write_config(root, tree)
    home = root / "prefect"
    done = tiny.dschat("run", str(config), "--json", home=home)
    yield TinyRun(root, tree, config, home, json.loads(done.stdout))
    assert tiny.processes_of(root / "store") == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket on a real S3 protocol server of the test's own."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    # fsspec remembers clients, and with them the address of an earlier test's server.
    S3FileSystem.clear_instance_cache()
    # moto keeps its buckets for the life of the process.
    name = f"dschat-{uuid.uuid4().hex[:8]}"
    S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    S3FileSystem.clear_instance_cache()
    server.stop()
