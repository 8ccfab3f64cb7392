"""Shards as units of work: any number of processes, an interruption, a damaged file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dschat_core.config import DataRuntimeConfig, TokenizationConfig
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError
from dschat_core.stages.tokenization import tokenization
from tests.integration.test_data_stages import dialogue, part, topics, tree_bytes

SECTION = TokenizationConfig(vocab_size=300, max_length=128, shard_bytes=20_000, runtime=DataRuntimeConfig(workers=1))


def make_inputs(folder: Path, rows: int = 2000) -> dict[str, Path]:
    return {
        **part(folder, "text", [{"text": t} for t in topics(rows)]),
        **part(folder, "dialogues", [{"messages": dialogue(t, "yes", "well", t)} for t in topics(rows)]),
        **part(folder, "prompts", [{"messages": dialogue(t)} for t in topics(rows)]),
    }


def test_the_shards_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    for workers in (1, 2):
        section = SECTION.model_copy(update={"runtime": DataRuntimeConfig(workers=workers)})
        tokenization(section, inputs, tmp_path / f"out{workers}")
    assert tree_bytes(tmp_path / "out1") == tree_bytes(tmp_path / "out2")
    reader = ShardReader(tmp_path / "out1" / "dialogues")
    assert len(reader) == 2000
    assert len(reader.index["shards"]) > 5
    sizes = [(tmp_path / "out1" / "text" / f"shard-{i:05d}.bin").stat().st_size for i in range(3)]
    assert all(15_000 < size < 25_000 for size in sizes)


def test_after_a_kill_only_the_unfinished_shards_are_made_again(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, 20_000)
    program = (
        "import sys, json\nfrom pathlib import Path\nfrom dschat_core.config import TokenizationConfig\n"
        "from dschat_core.stages.tokenization import tokenization\n"
        "section, inputs, out, state = json.loads(sys.argv[1])\n"
        "tokenization(TokenizationConfig(**section), {k: Path(v) for k, v in inputs.items()}, Path(out),"
        " state=Path(state), progress=lambda line: print(line, flush=True))\n"
    )
    given = [
        SECTION.model_dump(),
        {k: str(v) for k, v in inputs.items()},
        str(tmp_path / "killed"),
        str(tmp_path / "state"),
    ]
    process = subprocess.Popen([sys.executable, "-c", program, json.dumps(given)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = 0
    for line in process.stdout:
        made += " made, " in line
        if made == 5:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    pieces = next((tmp_path / "state").glob("shards-*"))
    finished = {path.name: path.stat().st_mtime_ns for path in (pieces / "text").glob("*.json")}
    assert len(finished) >= 5
    said: list[str] = []
    (tmp_path / "resumed").mkdir()
    tokenization(SECTION, inputs, tmp_path / "resumed", state=tmp_path / "state", progress=said.append)
    total = sum(len(ShardReader(tmp_path / "resumed" / name).index["shards"]) for name in inputs)
    assert f"{len(finished)} of {total} shards were finished before and are kept" in said
    assert sum(" made, " in line for line in said) == total - len(finished)
    assert not any("tokenizer trained" in line for line in said)
    kept = {name: (tmp_path / "resumed" / "text" / name).stat().st_mtime_ns for name in finished}
    assert kept == finished
    assert list((tmp_path / "state").iterdir()) == []
    tokenization(SECTION, inputs, tmp_path / "whole")
    assert tree_bytes(tmp_path / "resumed") == tree_bytes(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_shard_is_made_again_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    inputs = make_inputs(tmp_path)
    state, out = tmp_path / "state", tmp_path / "out"
    out.mkdir()
    # Interrupted after the last shard, before anything was moved into place.
    with monkeypatch.context() as patched:
        patched.setattr("dschat_core.stages.tokenization.write_index", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenization(SECTION, inputs, out, state=state)
    shard = next(state.glob("shards-*")) / "dialogues" / "shard-00001.mask"
    if damage == "flipped":
        data = bytearray(shard.read_bytes())
        data[3] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        shard.unlink()
    said: list[str] = []
    tokenization(SECTION, inputs, out, state=state, progress=said.append)
    assert [line for line in said if " made, " in line] == [
        line for line in said if line.startswith("dialogues: shard 1 made")
    ]
    assert any(line.startswith("dialogues: shard 1 is damaged and made again: shard-00001.mask") for line in said)
    tokenization(SECTION, inputs, tmp_path / "whole")
    assert tree_bytes(out) == tree_bytes(tmp_path / "whole")


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_what_was_made_with_another_setting_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tmp_path, 300)
    state = tmp_path / "state"
    with monkeypatch.context() as patched:
        patched.setattr("dschat_core.stages.tokenization.write_index", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenization(SECTION, inputs, tmp_path / "out", state=state)
    said: list[str] = []
    other = SECTION.model_copy(update={"max_length": 64})
    tokenization(other, inputs, tmp_path / "out", state=state, progress=said.append)
    assert not any("finished before" in line for line in said)
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(("action", "rows"), [("truncate", 1), ("split", 3), ("drop", 0)])
def test_dialogues_over_the_limit(tmp_path: Path, action: str, rows: int) -> None:
    long = dialogue(*(f"{i} " * 9 for i in "abcdef"))
    inputs = part(tmp_path, "dialogues", [{"messages": long}, {"messages": dialogue("hi", "hello")}])
    section = TokenizationConfig(vocab_size=300, max_length=60, long_rows=action)  # type: ignore[arg-type]
    product = tokenization(section, inputs, tmp_path / "out")
    assert len(ShardReader(tmp_path / "out" / "dialogues")) == rows + 1
    assert product.facts["data"]["dialogues"]["dropped"] == ({"too_long": 1} if action == "drop" else {})


def test_without_the_fast_library_the_shards_are_the_same_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path, 200)
    tokenization(SECTION, inputs, tmp_path / "fast")
    monkeypatch.setattr("dschat_core.stages.tokenization.fast_problem", lambda *_: "ImportError: no fastokens here")
    said: list[str] = []
    product = tokenization(SECTION, inputs, tmp_path / "slow", progress=said.append)
    assert any("fastokens is not used" in line and "no fastokens here" in line for line in said)
    assert product.facts["fast_encoder"] is False
    assert tree_bytes(tmp_path / "fast") == tree_bytes(tmp_path / "slow")


def test_nothing_to_train_a_tokenizer_on_is_a_config_error(tmp_path: Path) -> None:
    inputs = part(tmp_path, "prompts", [{"messages": dialogue("hi")}])
    with pytest.raises(ConfigError, match="no text to train a tokenizer on"):
        tokenization(SECTION, inputs, tmp_path / "out")
