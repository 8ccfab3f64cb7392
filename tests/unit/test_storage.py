"""Storage: atomic writes, conditional creation and digests, on disk and on an S3 protocol server."""

from __future__ import annotations

from pathlib import Path

import pytest

from dschat_core import storage
from dschat_core.artifacts import Artifact, InputEntry, Product, Store, Workspace, artifact_key, verify
from dschat_core.config import SftConfig
from dschat_core.errors import ConfigError
from dschat_core.leases import this_process


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"


def test_write_new_creates_once(root: str) -> None:
    address = storage.join(root, "folder", "x")
    assert storage.write_new(address, b"first")
    assert not storage.write_new(address, b"second")
    assert storage.read_bytes(address) == b"first"
    storage.write(address, b"third")
    assert storage.read_bytes(address) == b"third"
    assert storage.sizes(root) == {"folder/x": 5}
    storage.delete(address)
    assert not storage.exists(address)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(address)


def test_digests_are_remembered_and_noticed_when_stale(root: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    memory = storage.DigestMemory(tmp_path_factory.mktemp("memory") / "digests.json")
    address = storage.join(root, "data.jsonl")
    storage.write(address, b"one")
    first = memory.sha256(address)
    assert memory.sha256(address) == first
    storage.write(address, b"two")
    assert memory.sha256(address) == storage.sha256_stream([b"two"]) != first


def test_an_artifact_is_made_found_and_verified(
    root: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSCHAT_CACHE", str(tmp_path_factory.mktemp("cache")))
    section, inputs = SftConfig(), {"data": InputEntry(digest="d")}
    key = artifact_key("sft", section, inputs)
    store = Store(root)
    with store.construct("sft", key, this_process("run")) as held:
        assert isinstance(held, Workspace)
        (held.output / "model").mkdir()
        (held.output / "model" / "a").write_bytes(b"abc")
        held.commit(Product(parts={"model": ["model/a"]}), section=section, inputs=inputs)
    monkeypatch.setenv("DSCHAT_CACHE", str(tmp_path_factory.mktemp("another-machine")))
    found = Store(root).find("sft", key)
    assert isinstance(found, Artifact)
    assert (found.part("model").folder() / "a").read_bytes() == b"abc"
    assert verify(found.uri) == []
    storage.write(storage.join(found.uri, "model", "a"), b"abd")
    assert verify(found.uri)[0].startswith("model/a")


def test_r13_a_missing_bucket_is_refused_at_once(bucket: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Store("s3://nowhere/store")


def test_r6_a_full_disk_says_what_is_free(tmp_path: Path) -> None:
    import errno

    from dschat_core.errors import StorageFullError

    with pytest.raises(StorageFullError, match="GiB free"), storage.explained("write", str(tmp_path / "x")):
        raise OSError(errno.ENOSPC, "No space left on device")
