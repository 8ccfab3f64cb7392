"""Fixtures shared by all tests."""

from __future__ import annotations

import json
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
