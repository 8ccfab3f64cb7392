"""Rows become token rows with their masks; shards are units of work, through an interruption or a damaged file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dschat_core.chat_template import ChatTokenizer, load_tokenizer
from dschat_core.config import DataRuntimeConfig, TokenizationConfig
from dschat_core.data.shards import ShardReader
from dschat_core.data.tokenizing import train_tokenizer
from dschat_core.errors import ConfigError, GateError
from dschat_core.stages.tokenization import tokenization
from tests.integration.test_data_stages import dialogue, part, topics, tree_bytes

SECTION = TokenizationConfig(vocab_size=300, max_length=128, shard_bytes=20_000, runtime=DataRuntimeConfig(workers=1))


def make_inputs(folder: Path, rows: int = 2000) -> dict[str, Path]:
    return {
        **part(folder, "text", [{"text": t} for t in topics(rows)]),
        **part(folder, "dialogues", [{"messages": dialogue(t, "yes", "well", t)} for t in topics(rows)]),
        **part(folder, "prompts", [{"messages": dialogue(t)} for t in topics(rows)]),
    }


def shown(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    return tokenizer.markup.decode(list(ids), skip_special_tokens=False)


def test_all_parts_are_tokenized_and_the_same_twice(tmp_path: Path) -> None:
    inputs = {
        **part(tmp_path, "text", [{"text": t} for t in topics(50)]),
        **part(tmp_path, "text_heldout", [{"text": t} for t in topics(5, 100)]),
        **part(tmp_path, "dialogues", [{"messages": dialogue("hi", "hello", "well", t)} for t in topics(9)]),
        **part(tmp_path, "preferences", [
            {"messages": dialogue("hi"), "chosen": t, "rejected": t[::-1], "kind": "reversed"} for t in topics(9)
        ]),
        **part(tmp_path, "prompts", [{"messages": dialogue("hi", "hello", t)} for t in topics(9)]),
    }  # fmt: skip
    section = TokenizationConfig(vocab_size=300, max_length=128, shard_bytes=1000)
    product = tokenization(section, inputs, tmp_path / "once")
    tokenization(section, inputs, tmp_path / "again")
    assert tree_bytes(tmp_path / "once") == tree_bytes(tmp_path / "again")
    assert set(tree_bytes(tmp_path / "once")) == {name for files in product.parts.values() for name in files}
    assert product.facts["vocab_size"] == 300

    tokenizer = load_tokenizer(tmp_path / "once" / "tokenizer")
    reader = ShardReader(tmp_path / "once" / "dialogues")
    assert len(reader) == 9
    assert shown(tokenizer, reader.tokens(3)[reader.mask(3)]) == f"hello<|im_end|>{topics(9)[3]}<|im_end|>"
    assert reader.num_bytes[3] == len("hello" + topics(9)[3])

    pairs = ShardReader(tmp_path / "once" / "preferences")
    assert len(pairs) == 18
    assert pairs.meta == [{"kind": "reversed"}] * 18
    assert shown(tokenizer, pairs.tokens(4)[pairs.mask(4)]) == topics(9)[2] + "<|im_end|>"
    assert shown(tokenizer, pairs.tokens(5)[pairs.mask(5)]) == topics(9)[2][::-1] + "<|im_end|>"

    prompts = ShardReader(tmp_path / "once" / "prompts")
    assert prompts.meta is not None
    assert prompts.meta[0] == {"messages": dialogue("hi", "hello", topics(1)[0])}
    assert shown(tokenizer, prompts.tokens(0)).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert not prompts.num_targets.any()


def test_every_byte_of_a_split_document_is_predicted_once(tmp_path: Path) -> None:
    texts = ["".join(topics(20)), "short", "a"]
    inputs = part(tmp_path, "text", [{"text": text} for text in texts])
    tokenization(TokenizationConfig(vocab_size=300, max_length=32), inputs, tmp_path / "out")
    reader = ShardReader(tmp_path / "out" / "text")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert reader.num_bytes.sum() == sum(len(text.encode()) for text in texts)
    assert reader.lengths.max() == 32
    assert (reader.num_targets > 0).all()
    predicted = "".join(shown(tokenizer, reader.tokens(i)[reader.mask(i)]) for i in range(len(reader)))
    assert predicted == "".join(f"{text}<|endoftext|>" for text in texts)


def test_d10_d11_long_dialogues_lose_whole_exchanges_and_what_cannot_fit_is_counted(tmp_path: Path) -> None:
    long = "blah " * 60
    rows = [
        {"messages": dialogue("first", "one", "second", "two", "third", "three")},
        {"messages": dialogue("first", "one", long, "two")},  # D11: the last user turn does not fit
        {"messages": dialogue("first", long)},  # D10: the whole answer would be cut away
        {"messages": [{"role": "system", "content": "sys"}, *dialogue(long, "one", "second", "two")]},
    ]
    inputs = {**part(tmp_path, "dialogues", rows), **part(tmp_path, "text", [{"text": long}])}
    product = tokenization(TokenizationConfig(vocab_size=270 + 30, max_length=48), inputs, tmp_path / "out")
    reader = ShardReader(tmp_path / "out" / "dialogues")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    texts = [shown(tokenizer, reader.tokens(i)) for i in range(len(reader))]
    assert product.facts["data"]["dialogues"]["dropped"] == {"no_exchange_fits": 1}
    assert len(texts) == 3
    assert texts[0].endswith("three<|im_end|>")
    assert "first" not in texts[0]
    assert texts[1].endswith("first<|im_end|>\n<|im_start|>assistant\none<|im_end|>")
    assert texts[2].startswith("<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nsecond")
    assert (reader.num_targets > 0).all()
    assert reader.lengths.max() <= 48


def test_no_row_that_fits_is_a_refusal(tmp_path: Path) -> None:
    inputs = part(tmp_path, "dialogues", [{"messages": dialogue("a " * 100, "b")}])
    with pytest.raises(GateError, match="no row of dialogues is left") as caught:
        tokenization(TokenizationConfig(vocab_size=300, max_length=16), inputs, tmp_path / "out")
    assert "no_exchange_fits: 1" in caught.value.why


def test_d15_pairs_keep_a_common_prompt_and_pairs_too_long_are_counted(tmp_path: Path) -> None:
    shared = "the same long beginning of a reply"
    rows = [
        {"messages": dialogue("old " * 30, "reply", "new"), "chosen": shared, "rejected": shared + " x", "kind": None},
        {"messages": dialogue("q"), "chosen": "word " * 300, "rejected": "b", "kind": None},
    ]
    inputs = {**part(tmp_path, "preferences", rows), **part(tmp_path, "text", [{"text": shared}])}
    product = tokenization(TokenizationConfig(vocab_size=300, max_length=64), inputs, tmp_path / "out")
    reader = ShardReader(tmp_path / "out" / "preferences")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert product.facts["data"]["preferences"]["dropped"] == {"pair_too_long": 1}
    prompts = [shown(tokenizer, reader.tokens(i)[~reader.mask(i)]) for i in range(2)]
    assert prompts == ["<|im_start|>user\nnew<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_a_base_models_tokenizer_and_template_are_taken(tmp_path: Path) -> None:
    made = part(tmp_path, "text", [{"text": t} for t in topics(30)])
    tokenization(TokenizationConfig(vocab_size=320, max_length=64), made, tmp_path / "base")
    base = tmp_path / "base" / "tokenizer"
    template = "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}" + (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").write_text(template)
    inputs = part(tmp_path, "dialogues", [{"messages": dialogue("hi", t)} for t in topics(3)])
    section = TokenizationConfig(base_model=str(base), max_length=128)
    product = tokenization(section, {**inputs, "base_model": base}, tmp_path / "out")
    assert set(product.parts) == {"tokenizer", "dialogues"}
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    reader = ShardReader(tmp_path / "out" / "dialogues")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert shown(tokenizer, reader.tokens(0)).startswith("<|im_start|>system\nYou help.")
    assert shown(tokenizer, reader.tokens(0)[reader.mask(0)]) == topics(1)[0] + "<|im_end|>"
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        tokenization(TokenizationConfig(base_model=str(tmp_path)), inputs, tmp_path / "none")


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


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_kill_only_the_unfinished_shards_are_made_again(tmp_path: Path, workers: int) -> None:
    """Killed in the middle: with two workers they go with their parent, before anything is counted here."""
    inputs = make_inputs(tmp_path, 6000)
    program = (
        "import sys, json\nfrom pathlib import Path\nfrom dschat_core.config import TokenizationConfig\n"
        "from dschat_core.stages.tokenization import tokenization\n"
        "section, inputs, out, state = json.loads(sys.argv[1])\n"
        "tokenization(TokenizationConfig(**section), {k: Path(v) for k, v in inputs.items()}, Path(out),"
        " state=Path(state), progress=lambda line: print(line, flush=True))\n"
    )
    section = SECTION.model_copy(update={"runtime": DataRuntimeConfig(workers=workers)})
    given = [
        section.model_dump(),
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
    # Its pipe ends when the last process that holds it is gone.
    process.stdout.read()
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


def test_a_damaged_tokenizer_is_made_again_and_the_shards_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path, 300)
    state = tmp_path / "state"
    with monkeypatch.context() as patched:
        patched.setattr("dschat_core.stages.tokenization.write_index", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenization(SECTION, inputs, tmp_path / "out", state=state)
    (next(state.glob("shards-*")) / "tokenizer" / "tokenizer.json").write_text("{")
    said: list[str] = []
    tokenization(SECTION, inputs, tmp_path / "out", state=state, progress=said.append)
    assert "tokenizer trained: 300 entries" in said
    assert not any(" made, " in line for line in said)
    tokenization(SECTION, inputs, tmp_path / "whole")
    assert tree_bytes(tmp_path / "out") == tree_bytes(tmp_path / "whole")


def test_a_part_without_rows_and_batches_of_any_size_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(tmp_path, 200) | part(tmp_path, "text_heldout", []) | part(tmp_path, "prompts_heldout", [])
    tokenization(SECTION, inputs, tmp_path / "once")
    assert len(ShardReader(tmp_path / "once" / "text_heldout")) == 0
    monkeypatch.setattr("dschat_core.stages.tokenization.BATCH_BYTES", 500)
    # The sample that shards are planned on is a batch too; only the rows have to be the same.
    tokenization(SECTION, inputs, tmp_path / "again")
    for name in inputs:
        once, again = (ShardReader(tmp_path / run / name) for run in ("once", "again"))
        assert [once.tokens(i).tolist() for i in range(len(once))] == [
            again.tokens(i).tolist() for i in range(len(again))
        ]


def test_of_more_text_than_enough_every_nth_row_trains_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = part(tmp_path, "text", [{"text": f"row {i:04d}"} for i in range(1000)])
    size = (tmp_path / "text" / "rows.jsonl").stat().st_size
    trained: list[str] = []

    def train(texts: Any, *, vocab_size: int) -> Any:
        trained.extend(texts)
        return train_tokenizer(trained, vocab_size=vocab_size)

    monkeypatch.setattr("dschat_core.stages.tokenization.train_tokenizer", train)
    monkeypatch.setattr("dschat_core.stages.tokenization.MAX_TRAINING_BYTES", size // 4)
    tokenization(SECTION, inputs, tmp_path / "out")
    assert len(trained) in (200, 250)
    assert trained[:2] == ["row 0000", f"row {1000 // len(trained):04d}"]
