"""Artifacts: keys, the manifest as the only proof, leases, verification."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dschat_core import artifacts
from dschat_core.artifacts import Artifact, InputEntry, Product, Store, Workspace, artifact_key, take_back
from dschat_core.config import SftConfig, TokenizationConfig
from dschat_core.errors import ConfigError, IntegrityError, TransientError
from dschat_core.leases import Lease, Owner, this_process

SECTION = SftConfig()
INPUTS = {"dialogues": InputEntry(digest="d1"), "tokenizer": InputEntry(digest="t1")}
KEY = artifact_key("sft", SECTION, INPUTS)


def make(root: Path, *, content: bytes = b"weights") -> Artifact:
    store = Store(str(root))
    with store.construct("sft", KEY, this_process("run")) as held:
        assert isinstance(held, Workspace)
        (held.output / "model").mkdir()
        (held.output / "model" / "model.bin").write_bytes(content)
        (held.output / "log.txt").write_text("log")
        product = Product(parts={"model": ["model/model.bin"], "metrics": ["log.txt"]}, facts={"loss": 1.5})
        return held.commit(product, section=SECTION, inputs=INPUTS)


def dead_owner(run: str = "other") -> Owner:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return this_process(run).model_copy(update={"pid": process.pid})


def test_the_key_depends_on_recipe_and_inputs_and_not_on_runtime() -> None:
    moved = SECTION.model_copy(update={"runtime": SECTION.runtime.model_copy(update={"zero_stage": 3})})
    assert artifact_key("sft", moved, INPUTS) == KEY
    changed = SECTION.model_copy(update={"learning_rate": 2e-5})
    assert artifact_key("sft", changed, INPUTS) != KEY
    assert artifact_key("sft", SECTION, {**INPUTS, "dialogues": InputEntry(digest="d2")}) != KEY
    assert artifact_key("sft", SECTION, {**INPUTS, "dialogues": InputEntry(digest="d1", uri="moved")}) == KEY


def test_a_committed_artifact_is_found_and_verifies(tmp_path: Path) -> None:
    made = make(tmp_path)
    found = Store(str(tmp_path)).find("sft", KEY)
    assert found is not None
    assert found.manifest == made.manifest
    assert found.part("model").folder() == Path(made.uri) / "model"
    assert found.manifest.inputs["dialogues"].digest == "d1"
    assert artifacts.verify(made.uri) == []


def test_without_a_manifest_there_is_no_artifact(tmp_path: Path) -> None:
    made = make(tmp_path)
    (Path(made.uri) / "manifest.json").unlink()
    assert Store(str(tmp_path)).find("sft", KEY) is None
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        artifacts.load_artifact(made.uri)


@pytest.mark.parametrize("name", ["model/model.bin", "log.txt", "manifest.json"])
def test_one_changed_byte_is_named(tmp_path: Path, name: str) -> None:
    made = make(tmp_path)
    path = Path(made.uri) / name
    data = bytearray(path.read_bytes())
    place = data.index(b"1.5") if name == "manifest.json" else 0
    data[place] ^= 1
    path.write_bytes(bytes(data))
    problems = artifacts.verify(made.uri)
    assert len(problems) == 1
    assert problems[0].startswith(name)


def test_a_consumer_hashes_what_it_reads(tmp_path: Path) -> None:
    made = make(tmp_path)
    (Path(made.uri) / "model/model.bin").write_bytes(b"weightz")
    with pytest.raises(IntegrityError, match=r"model\.bin"):
        made.part("model").folder()
    assert made.part("metrics").folder() == Path(made.uri)


def test_reuse_checks_sizes(tmp_path: Path) -> None:
    made = make(tmp_path)
    (Path(made.uri) / "log.txt").write_text("longer log")
    with pytest.raises(IntegrityError, match=r"log\.txt"):
        Store(str(tmp_path)).find("sft", KEY)


def test_equal_parts_have_equal_digests(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    assert first.part("model").digest == second.part("model").digest
    other = make(tmp_path / "c", content=b"other")
    assert first.part("model").digest != other.part("model").digest
    assert first.part("metrics").digest == other.part("metrics").digest


def test_state_survives_a_failed_attempt_and_leftovers_do_not(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(RuntimeError), store.construct("sft", KEY, this_process("run")) as held:
        assert isinstance(held, Workspace)
        (held.state / "step-1").mkdir()
        (held.output / "half").write_text("half")
        raise RuntimeError("killed")
    folder = Path(store.uri("sft", KEY))
    (folder / "model").mkdir()  # as if killed between the moves and the manifest
    made = make(tmp_path)
    assert sorted(p.name for p in Path(made.uri).iterdir()) == [
        ".lock",
        "checkpoints",
        "log.txt",
        "manifest.json",
        "model",
    ]
    assert (Path(made.uri) / "checkpoints" / "step-1").is_dir()


def test_a_dead_owner_is_taken_over_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store._try_take(store.uri("sft", KEY), dead_owner(), "old") is None
    assert make(tmp_path).manifest.run == "run"


def test_r11_the_second_run_waits_names_the_owner_and_reuses(tmp_path: Path) -> None:
    holding, told = threading.Event(), threading.Event()
    notes: list[str] = []

    def first() -> None:
        store = Store(str(tmp_path))
        with store.construct("sft", KEY, this_process("first")) as held:
            assert isinstance(held, Workspace)
            holding.set()
            assert told.wait(30)
            (held.output / "x").write_text("x")
            held.commit(Product(parts={"model": ["x"]}), section=SECTION, inputs=INPUTS)

    def note(text: str) -> None:
        notes.append(text)
        told.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert holding.wait(30)
    other = this_process("second").model_copy(update={"pid": os.getppid(), "started": _started(os.getppid())})
    with Store(str(tmp_path)).construct("sft", KEY, other, on_wait=note) as held:
        assert isinstance(held, Artifact)
    thread.join(30)
    assert "run 'first'" in notes[0]
    assert str(os.getpid()) in notes[0]


def _started(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()


def test_a_lease_lost_meanwhile_forbids_the_commit(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with store.construct("sft", KEY, dead_owner("slow")) as held:
        assert isinstance(held, Workspace)
        (held.output / "x").write_text("x")
        assert store._try_take(held.uri, this_process("thief"), "new") is None
        with pytest.raises(TransientError, match="lost"):
            held.commit(Product(parts={"model": ["x"]}), section=SECTION, inputs=INPUTS)
    assert store.find("sft", KEY) is None


def test_another_host_waits_for_expiry_and_the_same_run_does_not() -> None:
    far = this_process("far").model_copy(update={"host": "elsewhere"})
    lease = Lease(owner=far, token="t", expires_at=time.time() + 60)
    assert not lease.free_for(this_process("near"))
    assert lease.free_for(this_process("far"))
    assert lease.model_copy(update={"expires_at": time.time() - 1}).free_for(this_process("near"))


def test_an_unwritable_root_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Store(str(tmp_path / "file" / "store"))
    assert str(tmp_path / "file" / "store") in caught.value.what


def test_r15_paths_with_spaces_and_chinese_characters_work(tmp_path: Path) -> None:
    made = make(tmp_path / "a b" / "数据")
    assert artifacts.verify(made.uri) == []


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "model/../../outside"])
def test_r14_a_manifest_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    made = make(tmp_path)
    path = Path(made.uri) / "manifest.json"
    path.write_text(path.read_text().replace('"log.txt": {', f'"{name}": {{'))
    with pytest.raises(IntegrityError, match="damaged") as caught:
        artifacts.verify(made.uri)
    assert "points outside" in caught.value.why


@pytest.mark.parametrize("pieces", ["shards-abc", None, "../outside"])
def test_a_damaged_artifact_is_taken_back_and_only_what_is_whole_is_kept(tmp_path: Path, pieces: str | None) -> None:
    store = Store(str(tmp_path / "store"))
    with store.construct("tokenization", "k" * 64, this_process("run")) as held:
        assert isinstance(held, Workspace)
        for name in ("a", "b"):
            (held.output / "text").mkdir(exist_ok=True)
            (held.output / "text" / name).write_text(name)
        facts = {"pieces": pieces} if pieces else {}
        artifact = held.commit(
            Product(parts={"text": ["text/a", "text/b"]}, facts=facts), section=TokenizationConfig(), inputs={}
        )
    (artifact.local_root / "text" / "a").write_text("damaged")
    kept = take_back(artifact.uri)
    assert store.find("tokenization", "k" * 64) is None
    whole = artifact.local_root / "checkpoints" / "shards-abc" / "text"
    if pieces == "shards-abc":
        assert (kept, [path.name for path in whole.iterdir()]) == (1, ["b"])
    else:
        assert kept == 0
        assert not list(artifact.local_root.rglob("b"))
    assert not (tmp_path / "outside").exists()
