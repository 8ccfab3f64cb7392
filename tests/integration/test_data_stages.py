"""Validation on real files, and the demo's data from its real packages."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dschat_core.config import (
    DataConfig,
    DataRuntimeConfig,
    DataSource,
    DuplicatesGate,
    LengthGate,
    TokenizationConfig,
    ToxicityGate,
    ValidationConfig,
)
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError, GateError
from dschat_core.stages.tokenization import tokenization
from dschat_core.stages.validation import validate_files, validation

ROOT = Path(__file__).parents[2]
DEFAULTS = ValidationConfig()


def write(path: Path, rows: list[Any]) -> str:
    """JSON lines; bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def topics(count: int, start: int = 0) -> list[str]:
    """Texts that no gate takes for one another."""
    return [f"topic {i}: {i * 7919 % 1009} apples, {i * 104729 % 997} pears and {i * 31 % 101} plums" for i in
            range(start, start + count)]  # fmt: skip


def tree_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ── validation ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_line_is_accepted_quarantined_or_blank(tmp_path: Path) -> None:
    good = [{"input": text, "output": "yes"} for text in topics(40)]
    bad = [b'{"input": "cut', b'["a"]', b'{"input": "a\xff", "output": "b"}', {"input": "x", "output": ""}]
    train = write(tmp_path / "train.jsonl", [*good[:20], *bad, b"", *good[20:]])
    held = write(tmp_path / "held.jsonl", [{"input": text, "output": "no"} for text in topics(5, 100)])
    empty = write(tmp_path / "empty.jsonl", [])
    sources = DataConfig(dialogues=DataSource(train=(train, empty), heldout=(held,)))
    said: list[str] = []
    product = validation(DEFAULTS, sources, tmp_path / "out", progress=said.append)
    found = json.loads((tmp_path / "out" / "verdict.json").read_bytes())["datasets"]["dialogues"]
    assert (found["lines"], found["blank"], found["accepted"], found["quarantined"]) == (50, 1, 45, 4)
    assert found["reasons"] == {"json_truncated": 1, "json_array": 1, "invalid_utf8": 1, "empty_output": 1}
    assert found["rows"] == {"train": 40, "heldout": 5}
    assert found["empty_files"] == [empty]
    assert any("empty.jsonl is empty" in line for line in said)
    rejects = read(tmp_path / "out" / "quarantine" / "dialogues.jsonl")
    assert [(r["line"], r["reason"]) for r in rejects][:2] == [(21, "json_truncated"), (22, "json_array")]
    assert base64.b64decode(rejects[0]["raw_base64"]) == bad[0]
    raw = (tmp_path / "train.jsonl").read_bytes()
    assert raw[rejects[2]["offset"] :].startswith(b'{"input": "a\xff"')
    assert product.parts["dialogues"] == ["dialogues/rows.jsonl"]
    assert sorted(product.parts) == ["dialogues", "dialogues_heldout", "report"]
    on_disk = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert on_disk == {name for files in product.parts.values() for name in files}


def test_a_changed_prompt_changes_no_other_part(tmp_path: Path) -> None:
    def run(name: str, prompts: list[str]) -> dict[str, bytes]:
        folder = tmp_path / name
        sources = DataConfig(
            text=DataSource(train=(write(folder / "text.jsonl", [{"text": t} for t in topics(60)]),)),
            dialogues=DataSource(
                train=(write(folder / "d.jsonl", [{"input": t, "output": "yes"} for t in topics(60)]),)
            ),
            prompts=DataSource(train=(write(folder / "p.jsonl", [{"prompt": p} for p in prompts]),)),
        )
        product = validation(DEFAULTS, sources, folder / "out")
        return {name: (folder / "out" / files[0]).read_bytes() for name, files in product.parts.items()}

    once, again = run("once", topics(60)), run("again", [*topics(59), "topic 3 is toxic, fuck you"])
    assert {name for name in once if once[name] != again[name]} - {"report"} == {"prompts"} or {
        name for name in once if once[name] != again[name]
    } - {"report"} == {"prompts", "prompts_heldout"}


def test_the_heldout_split_is_by_what_was_said_and_repeats(tmp_path: Path) -> None:
    rows = [{"prompt": t, "chosen": f"{t} is good", "rejected": f"{r} of {t}"} for t in topics(200) for r in ("a", "b")]
    sources = DataConfig(preferences=DataSource(train=(write(tmp_path / "p.jsonl", rows),)))
    section = ValidationConfig(heldout_share=0.2, duplicates=DuplicatesGate(action="warn"))
    for name in ("once", "again"):
        validation(section, sources, tmp_path / name)
    assert tree_bytes(tmp_path / "once") == tree_bytes(tmp_path / "again")
    train, held = (
        {row["messages"][0]["content"] for row in read(tmp_path / "once" / part / "rows.jsonl")}
        for part in ("preferences", "preferences_heldout")
    )
    assert not train & held
    assert 20 <= len(held) <= 60


def test_a_few_rows_still_give_a_heldout_row_and_one_row_does_not(tmp_path: Path) -> None:
    few = DataConfig(text=DataSource(train=(write(tmp_path / "few.jsonl", [{"text": t} for t in topics(3)]),)))
    validation(DEFAULTS, few, tmp_path / "few")
    assert len(read(tmp_path / "few" / "text_heldout" / "rows.jsonl")) == 1
    one = DataConfig(text=DataSource(train=(write(tmp_path / "one.jsonl", [{"text": "alone"}]),)))
    with pytest.raises(GateError, match="no usable held-out rows"):
        validation(DEFAULTS, one, tmp_path / "one")


def test_a_text_on_both_sides_is_removed_from_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"text": t.upper()} for t in topics(10)])
    held = write(tmp_path / "held.jsonl", [{"text": t} for t in topics(3)])
    product = validation(DEFAULTS, DataConfig(text=DataSource(train=(train,), heldout=(held,))), tmp_path / "out")
    facts = product.facts["datasets"]["text"]
    assert facts["rows"] == {"train": 7, "heldout": 3}
    assert (facts["quarantined"], facts["overlap_removed"]) == (0, 3)
    assert facts["gates"]["toxicity"] == {"count": 0, "rate": 0.0, "action": "drop", "verdict": "not_certifiable"}


@pytest.mark.parametrize("gate", ["length", "duplicates", "toxicity"])
@pytest.mark.parametrize("action", ["fail", "drop", "warn"])
def test_gates_fail_drop_or_warn(tmp_path: Path, gate: str, action: str) -> None:
    flagged = {"length": "long " * 400, "duplicates": topics(1)[0] + "!", "toxicity": "you are a stupid bitch"}[gate]
    rows = [{"input": text, "output": "yes"} for text in [*topics(30), flagged]]
    held = write(tmp_path / "held.jsonl", [{"input": t, "output": "yes"} for t in topics(5, 100)])
    sources = DataConfig(dialogues=DataSource(train=(write(tmp_path / "t.jsonl", rows),), heldout=(held,)))
    limits: dict[str, Any] = {"threshold": 0.001, "action": action}
    section = ValidationConfig.model_validate({gate: {**limits, **({"max_tokens": 400} if gate == "length" else {})}})
    if action == "fail":
        with pytest.raises(GateError, match=f"the {gate} gate failed: 2.78% of the rows"):
            validation(section, sources, tmp_path / "out")
    else:
        validation(section, sources, tmp_path / "out")
        assert len(read(tmp_path / "out" / "dialogues" / "rows.jsonl")) == (30 if action == "drop" else 31)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())
    result = verdict["datasets"]["dialogues"]["gates"][gate]
    assert verdict["verdict"] == ("fail" if action == "fail" else "pass")
    assert result["verdict"] == {"fail": "failed", "drop": "dropped", "warn": "warned"}[action]
    assert result["count"] == 1
    assert result["examples"][0]["line"] == 31


def test_d4_a_file_without_a_usable_row_names_what_took_them(tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [{"text": "fine"}])
    cases = {
        "quarantined 2 (json_truncated 1, empty_text 1)": [b'{"text": "cut', {"text": ""}],
        "toxicity dropped 1": [{"text": "you are a stupid bitch"}],
        "empty: ": [],
        "1 are held out too": [{"text": "Fine!"}],
    }
    for i, (why, rows) in enumerate(cases.items()):
        sources = DataConfig(text=DataSource(train=(write(tmp_path / f"{i}.jsonl", rows),), heldout=(held,)))
        with pytest.raises(GateError) as caught:
            validation(DEFAULTS, sources, tmp_path / f"out{i}")
        assert why in caught.value.what
        assert caught.value.exit_code == 30
        assert "data.text" in caught.value.where


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    rows = [
        {"input": text, "output": "yes" if i % 3 else "as an AI language model, I can't"}
        for i, text in enumerate(topics(3000))
    ]
    rows[1000:1010] = rows[:10]
    sources = DataConfig(
        dialogues=DataSource(train=(write(tmp_path / "d.jsonl", [*rows, b"{cut"]),)),
        prompts=DataSource(train=(write(tmp_path / "p.jsonl", [{"prompt": t} for t in topics(300, 5000)]),)),
    )
    for workers in (1, 2):
        validation(ValidationConfig(runtime=DataRuntimeConfig(workers=workers)), sources, tmp_path / f"out{workers}")
    assert tree_bytes(tmp_path / "out1") == tree_bytes(tmp_path / "out2")


@pytest.mark.parametrize("memory_bytes", [2**20, 2**30])
def test_near_duplicates_of_held_out_rows_leave_the_training_side(tmp_path: Path, memory_bytes: int) -> None:
    held = [f"{text}, and some more words about it" for text in topics(5)]
    rows = [*topics(50, 100), held[2].replace("words", "word"), held[3].upper() + "!!"]
    sources = DataConfig(
        text=DataSource(
            train=(write(tmp_path / "t.jsonl", [{"text": t} for t in rows]),),
            heldout=(write(tmp_path / "h.jsonl", [{"text": t} for t in held]),),
        )
    )
    section = ValidationConfig(runtime=DataRuntimeConfig(memory_bytes=memory_bytes))
    product = validation(section, sources, tmp_path / "out")
    assert product.facts["datasets"]["text"]["overlap_removed"] == 2
    assert [row["text"] for row in read(tmp_path / "out" / "text" / "rows.jsonl")] == topics(50, 100)
    found = json.loads((tmp_path / "out" / "verdict.json").read_bytes())["datasets"]["text"]
    assert found["gates"]["duplicates"]["count"] == 0
    assert sorted(cluster["size"] for cluster in found["clusters"]) == [2, 2]


def test_duplicates_are_told_apart_as_exact_near_and_same_question(tmp_path: Path) -> None:
    question = "what is the best way to learn a language"
    rows = [
        {"input": question, "output": "read a lot of books and speak with people every day"},
        {"input": question.upper() + "?", "output": "Read a lot of books, and speak with people every day!"},
        {"input": question, "output": "read a lot of books and speak with people every week"},
        {"input": question, "output": "move abroad"},
        *({"input": t, "output": "yes"} for t in topics(40)),
    ]
    found = validate_files([write(tmp_path / "d.jsonl", rows)], DEFAULTS)
    gate = found["gates"]["duplicates"]
    assert gate["reasons"] == {"exact": 1, "near": 1}
    assert gate["stats"]["same_question"] == 3
    assert [example["line"] for example in gate["examples"]] == [2, 3]
    assert gate["examples"][0]["first"].endswith("d.jsonl:1")
    assert found["clusters"] == [{"size": 3, "rows": found["clusters"][0]["rows"]}]
    assert found["usable"] == 42


def test_no_training_row_contains_a_held_out_prompt(tmp_path: Path) -> None:
    asked = "could you tell me in which year the old stone bridge over the river near our town was built"
    sources = DataConfig(
        text=DataSource(
            train=(
                write(
                    tmp_path / "t.jsonl",
                    [{"text": f"He said: {asked}, {t}"} for t in topics(1)] + [{"text": t} for t in topics(60)],
                ),
            )
        ),
        prompts=DataSource(
            train=(
                write(
                    tmp_path / "p.jsonl", [{"prompt": t} for t in [*topics(9), "Listen, " + asked.upper() + " please?"]]
                ),
            ),
            heldout=(write(tmp_path / "h.jsonl", [{"prompt": asked}]),),
        ),
    )
    validation(DEFAULTS, sources, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "verdict.json").read_bytes())["datasets"]
    assert found["text"]["gates"]["contamination"]["count"] == 1
    assert found["prompts"]["gates"]["contamination"]["count"] == 1
    assert asked not in (tmp_path / "out" / "text" / "rows.jsonl").read_text()
    assert len(read(tmp_path / "out" / "prompts_heldout" / "rows.jsonl")) == 1
    against = ValidationConfig.model_validate({"contamination": {"against": [str(tmp_path / "h.jsonl")]}})
    assert validate_files([str(tmp_path / "t.jsonl")], against)["gates"]["contamination"]["count"] == 1


@pytest.mark.parametrize("action", ["truncate", "split"])
def test_long_dialogues_are_shortened_by_whole_turns(tmp_path: Path, action: str) -> None:
    turns = [f"{word} " * 100 for word in ("one", "two", "three", "four", "five", "six")]
    rows = [
        {"messages": dialogue(*turns)},
        {"messages": dialogue("x " * 3000, "y")},
        *({"input": t, "output": "yes"} for t in topics(20)),
    ]
    held = write(tmp_path / "held.jsonl", [{"input": t, "output": "yes"} for t in topics(5, 100)])
    sources = DataConfig(dialogues=DataSource(train=(write(tmp_path / "t.jsonl", rows),), heldout=(held,)))
    validation(
        ValidationConfig.model_validate({"length": {"max_tokens": 400, "action": action}}), sources, tmp_path / "out"
    )
    kept = [
        [m["content"].split()[0] for m in row["messages"]]
        for row in read(tmp_path / "out" / "dialogues" / "rows.jsonl")
    ]
    assert kept[:-20] == (
        [["five", "six"]] if action == "truncate" else [["one", "two"], ["three", "four"], ["five", "six"]]
    )
    gate = json.loads((tmp_path / "out" / "verdict.json").read_bytes())["datasets"]["dialogues"]["gates"]["length"]
    assert (gate["count"], gate["total"]) == (2, 27)


def test_personal_data_is_counted_or_masked_and_never_shown(tmp_path: Path) -> None:
    rows = [{"input": f"write to anna.smith@example.org about {t}", "output": "yes"} for t in topics(1)]
    path = write(tmp_path / "d.jsonl", rows + [{"input": t, "output": "yes"} for t in topics(30, 5)])
    found = validate_files([path], DEFAULTS)
    assert found["gates"]["pii"]["stats"]["email"] == 1
    assert "anna.smith" not in json.dumps(found)
    sources = DataConfig(dialogues=DataSource(train=(path,)))
    validation(ValidationConfig.model_validate({"pii": {"action": "mask"}}), sources, tmp_path / "out")
    text = "".join((tmp_path / "out" / part / "rows.jsonl").read_text() for part in ("dialogues", "dialogues_heldout"))
    assert "anna.smith" not in text
    assert "write to <EMAIL> about topic 0" in text


def test_unknown_columns_are_named_with_those_expected_and_can_be_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"ask": t, "answer": "yes"} for t in topics(30)])
    found = validate_files([path], DEFAULTS, "dialogues")
    assert found["reasons"] == {"unknown_columns": 30}
    assert found["verdict"] == "fail"
    assert "columns found: ask, answer; expected: " in found["why"][0]
    assert "messages" in found["why"][0]
    sources = DataConfig(dialogues=DataSource(train=(path,), columns={"input": "ask", "output": "answer"}))
    validation(DEFAULTS, sources, tmp_path / "out")
    assert read(tmp_path / "out" / "dialogues" / "rows.jsonl")[0]["messages"] == dialogue(topics(1)[0], "yes")


def test_files_of_several_kinds_are_judged_apart_and_added_up(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "d.jsonl", [*({"input": t, "output": "yes"} for t in topics(20)), b"", b"nul"]),
        write(tmp_path / "t.jsonl", [*({"text": t} for t in topics(20)), {"text": "you are a stupid bitch"}]),
    ]
    found = validate_files(paths, DEFAULTS)
    assert found["kind"] == "mixed"
    assert (found["lines"], found["blank"], found["accepted"], found["quarantined"]) == (43, 1, 41, 1)
    assert found["gates"]["toxicity"]["count"] == 1
    assert found["gates"]["toxicity"]["total"] == 41
    assert sorted(found["datasets"]) == ["dialogues", "text"]


def test_a_missing_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    sources = DataConfig(text=DataSource(train=(str(tmp_path / "gone.jsonl"),)))
    with pytest.raises(ConfigError, match=r"data\.text\.train: .*gone\.jsonl"):
        validation(DEFAULTS, sources, tmp_path / "out")


def test_rejected_replies_are_checked_only_where_asked(tmp_path: Path) -> None:
    rows = [{"prompt": t, "chosen": "hello there", "rejected": f"fuck you and {t}"} for t in topics(4)]
    sources = DataConfig(preferences=DataSource(train=(write(tmp_path / "p.jsonl", rows),)))
    validation(DEFAULTS, sources, tmp_path / "out")
    section = ValidationConfig(toxicity=ToxicityGate(check_rejected=True))
    with pytest.raises(GateError, match="toxicity dropped 4"):
        validation(section, sources, tmp_path / "strict")


def test_validate_files_says_what_validation_would(tmp_path: Path) -> None:
    good = [{"input": text, "output": "yes"} for text in topics(20)]
    path = write(tmp_path / "a.jsonl", [*good, b"null", b"", {"input": "fuck you", "output": "no"}])
    found = validate_files([path], DEFAULTS)
    assert found["kind"] == "dialogues"
    assert found["lines"] == found["accepted"] + found["quarantined"] + found["blank"] == 23
    assert found["reasons"] == {"json_null": 1}
    assert found["quarantine"][0] | {"file": ""} == {"file": "", "line": 21, "offset": found["quarantine"][0]["offset"],
                                                     "reason": "json_null", "raw": "null"}  # fmt: skip
    assert found["gates"]["toxicity"]["verdict"] == "dropped"
    assert (found["usable"], found["verdict"]) == (20, "pass")
    strict = validate_files([path], ValidationConfig(toxicity=ToxicityGate(action="fail")))
    assert strict["verdict"] == "fail"
    assert "toxicity gate failed" in strict["why"][0]
    assert validate_files([write(tmp_path / "none.jsonl", [b"null"])], DEFAULTS)["verdict"] == "fail"
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        validate_files([str(tmp_path / "gone.jsonl")], DEFAULTS)


def test_validating_starts_without_heavy_imports() -> None:
    program = (
        "import sys, dschat_core.stages.validation\n"
        "print(sorted({'torch', 'transformers', 'pandas', 'datasets', 'pyarrow', 'prefect'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_globs_and_packed_files_on_s3(bucket: str, tmp_path: Path) -> None:
    import gzip

    from dschat_core import storage

    rows = [json.dumps({"text": text}).encode() + b"\n" for text in topics(40)]
    storage.write(f"{bucket}/text/b.jsonl", b"".join(rows[:20]))
    storage.write(f"{bucket}/text/a.jsonl.gz", gzip.compress(b"".join(rows[20:])))
    sources = DataConfig(text=DataSource(train=(f"{bucket}/text/*.jsonl*",)))
    validation(DEFAULTS, sources, tmp_path / "out")
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())["datasets"]["text"]
    assert [entry["file"] for entry in verdict["files"]] == [f"{bucket}/text/a.jsonl.gz", f"{bucket}/text/b.jsonl"]
    assert verdict["lines"] == verdict["accepted"] == 40
    with pytest.raises(ConfigError, match=rf"{bucket}/none\.jsonl"):
        validation(DEFAULTS, DataConfig(text=DataSource(train=(f"{bucket}/none.jsonl",))), tmp_path / "none")


# ── with a tokenizer ────────────────────────────────────────────────────────────────────────────────────


def part(folder: Path, name: str, rows: list[dict[str, Any]]) -> dict[str, Path]:
    write(folder / name / "rows.jsonl", rows)
    return {name: folder / name}


def dialogue(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def test_validation_counts_exactly_with_a_tokenizer(tmp_path: Path) -> None:
    tokenization(
        TokenizationConfig(vocab_size=300), part(tmp_path, "text", [{"text": t} for t in topics(30)]), tmp_path / "tok"
    )
    texts = [
        "zq" * 60,
        *topics(10),
    ]  # 120 characters: 30 tokens by the estimate, about 120 by a tokenizer that knows none
    sources = DataConfig(
        dialogues=DataSource(train=(write(tmp_path / "d.jsonl", [{"input": t, "output": "yes"} for t in texts]),))
    )
    for name, folder, dropped in (("estimate", None, 0), ("tokenizer", str(tmp_path / "tok" / "tokenizer"), 1)):
        section = ValidationConfig(length=LengthGate(max_tokens=90, tokenizer=folder))
        validation(section, sources, tmp_path / name)
        found = json.loads((tmp_path / name / "verdict.json").read_bytes())["datasets"]["dialogues"]
        assert found["length_measure"] == name
        assert found["gates"]["length"]["count"] == dropped


# ── the demo's data ─────────────────────────────────────────────────────────────────────────────────────


def make_demo_data(folder: Path, hash_seed: str) -> str:
    return subprocess.run(
        [sys.executable, "deployments/demo_data.py", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("chitchat_dataset", reason="the demo's packages are not installed")
    folder = tmp_path_factory.mktemp("demo") / "data"
    make_demo_data(folder, "1")
    return folder


def test_demo_data_is_the_same_again_and_made_only_once(demo: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path / "again", "2")
    assert tree_bytes(tmp_path / "again") == tree_bytes(demo)
    before = {path: path.stat().st_mtime_ns for path in demo.iterdir()}
    assert "up to date" in make_demo_data(demo, "3")
    assert {path: path.stat().st_mtime_ns for path in demo.iterdir()} == before


def test_demo_data_holds_out_whole_conversations_from_all_sets(demo: Path) -> None:
    rows = {path.name.removesuffix(".jsonl"): read(path) for path in demo.glob("*.jsonl")}
    for half, other in (("train", "heldout"), ("heldout", "train")):
        lines = {line for row in rows[f"text.{half}"] for line in row["text"].splitlines()}
        foreign = {line for row in rows[f"text.{other}"] for line in row["text"].splitlines()} - lines
        for name in ("dialogues", "prompts"):
            said = {m["content"] for row in rows[f"{name}.{half}"] for m in row["messages"]}
            assert len(said) > 300
            assert not {turn for turn in said if len(turn) > 40} & foreign
    kinds = [row["kind"] for row in rows["preferences.heldout"]]
    assert all(kinds.count(kind) >= 200 for kind in ("shuffled", "looped", "parroted"))
    assert len(rows["preferences.train"]) >= 8000
    assert any("你" in row["text"] for row in rows["text.train"])


def test_in_the_demos_pairs_length_tells_nothing(demo: Path, tmp_path: Path) -> None:
    inputs = {}
    for name, source in (("text", "text.train"), ("preferences", "preferences.heldout")):
        rows = read(demo / f"{source}.jsonl")
        inputs |= part(tmp_path, name, [{"messages": r.pop("prompt", None), **r} if "kind" in r else r for r in rows])
    tokenization(TokenizationConfig(vocab_size=2048, max_length=256), inputs, tmp_path / "out")
    reader = ShardReader(tmp_path / "out" / "preferences")
    assert reader.meta is not None
    longer = np.sign(reader.num_targets[0::2] - reader.num_targets[1::2])
    kinds = np.array([meta["kind"] for meta in reader.meta[::2]])
    for kind in ("shuffled", "looped", "parroted"):
        assert 0.45 <= (longer[kinds == kind] / 2 + 0.5).mean() <= 0.55
