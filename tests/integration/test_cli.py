"""`dschat` as a person meets it: validate, status, verify, chat; exit codes, JSON, and a quick start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import TinyRun


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "prefect"


def good_file(folder: Path) -> str:
    rows = [
        {"input": f"question {i} about {tiny.WORDS[i]}", "output": f"answer {i * 7} on {tiny.WORDS[-i]}"}
        for i in range(20)
    ]
    return tiny.write_jsonl(folder / "good.jsonl", rows)


def test_validate_counts_every_line(tmp_path: Path, home: Path) -> None:
    path = Path(good_file(tmp_path))
    path.write_text(path.read_text() + "\n{broken\n[]\n", encoding="utf-8")
    shown = json.loads(tiny.dschat("validate", str(path), "--json", home=home).stdout)
    assert (shown["lines"], shown["blank"], shown["accepted"], shown["quarantined"]) == (23, 1, 20, 2)
    assert sum(shown["reasons"].values()) == 2
    for gate in ("length", "duplicates", "toxicity"):
        assert {"rate", "upper", "threshold", "action", "verdict", "count"} <= set(shown["gates"][gate])
    plain = tiny.dschat("validate", str(path), home=home).stdout
    assert "23 lines: 20 accepted, 2 quarantined, 1 blank" in plain


def test_validate_fails_with_30_when_a_gate_says_no(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": 1}\n')
    done = tiny.dschat("validate", str(path), "--json", home=home, check=30)
    assert json.loads(done.stdout)["verdict"] != "pass"


def test_a_missing_file_is_20_and_named(tmp_path: Path, home: Path) -> None:
    done = tiny.dschat("validate", str(tmp_path / "none.jsonl"), home=home, check=20)
    assert "none.jsonl" in done.stderr


def test_validate_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['dschat', 'validate', sys.argv[1]]\n"
        "from flows import cli\n"
        "try: cli.main()\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "print(sorted({'torch', 'prefect', 'pandas', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, good_file(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", "none.yaml"), "none.yaml"),
        (("run",), "Missing argument"),
        (("walk",), "No such command"),
        (("status", "nowhere"), "nowhere"),
        (("resume", "nowhere"), "nowhere"),
        (("report", "nowhere"), "nowhere"),
        (("chat", "nowhere", "--prompt", "x"), "nowhere"),
        (("verify", "nowhere"), "nowhere"),
    ],
)
def test_usage_errors_are_20_and_say_what_next(home: Path, arguments: tuple[str, ...], named: str) -> None:
    done = tiny.dschat(*arguments, home=home, check=20)
    assert named in done.stderr
    assert "next:" in done.stderr


def test_errors_are_json_for_a_program(home: Path) -> None:
    done = tiny.dschat("run", "none.yaml", "--json", home=home, check=20)
    shown = json.loads(done.stdout)
    assert shown["exit_code"] == 20
    assert set(shown) == {"error", "where", "why", "next", "exit_code"}


def test_an_unknown_stage_is_refused(tmp_path: Path, home: Path) -> None:
    config = tiny.write_config(tmp_path, tiny.tiny_tree(tmp_path))
    done = tiny.dschat("run", str(config), "--until", "sftt", home=home, check=20)
    assert "one of validation, tokenization" in done.stderr


def test_a_prefect_server_that_does_not_answer_is_named(tmp_path: Path, home: Path) -> None:
    config = tiny.write_config(tmp_path, tiny.tiny_tree(tmp_path))
    api = "http://127.0.0.1:9/api"
    done = tiny.dschat("run", str(config), home=home, check=20, PREFECT_API_URL=api)
    assert f"{api} does not answer" in done.stderr


def test_validate_maps_columns_and_changes_gates_once(tmp_path: Path, home: Path) -> None:
    rows = [
        {"ask": f"question {i} about {tiny.WORDS[i]}", "reply": f"answer {i * 7} on {tiny.WORDS[-i]}"}
        for i in range(20)
    ]
    path = tiny.write_jsonl(tmp_path / "mapped.jsonl", [*rows, {"ask": "mail a@example.org", "reply": "done"}])
    refused = json.loads(tiny.dschat("validate", path, "--kind", "dialogues", "--json", home=home, check=30).stdout)
    assert "columns found: ask, reply" in refused["why"][0]
    mapped = ("validate", path, "--kind", "dialogues", "--column", "input=ask", "--column", "output=reply", "--json")
    shown = json.loads(tiny.dschat(*mapped, home=home).stdout)
    assert (shown["accepted"], shown["gates"]["pii"]["stats"]) == (21, {"email": 1})
    strict = ("--set", "pii.action=fail", "--set", "pii.threshold=0.01")
    failed = json.loads(tiny.dschat(*mapped, *strict, home=home, check=30).stdout)
    assert failed["gates"]["pii"]["verdict"] == "failed"
    done = tiny.dschat("validate", path, "--set", "pii.akshun=fail", home=home, check=20)
    assert "akshun" in done.stderr


def test_inspect_shows_rows_of_every_kind(tiny_run: TinyRun) -> None:
    for what in ("sft", "preferences", "ppo", "text", "dialogues"):
        done = tiny.dschat("inspect", what, str(tiny_run.folder), "--row", "1", "--json", home=tiny_run.home)
        shown = json.loads(done.stdout)
        assert len(shown["rows"]) == (2 if what == "preferences" else 1)
        assert all(row["num_tokens"] == sum(len(token["ids"]) for token in row["tokens"]) for row in shown["rows"])
        assert (shown["rows"][0]["num_trained"] > 0) == (what != "ppo")
    plain = tiny.dschat("inspect", "sft", str(tiny_run.folder), "--heldout", home=tiny_run.home).stdout
    assert "<|im_start|>user" in plain
    assert "⟦" in plain
    packed = tiny.dschat("inspect", "text", str(tiny_run.folder), "--packed", "--json", home=tiny_run.home)
    assert json.loads(packed.stdout)["rows"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("sft", "--row", "100000"), "its rows are 0 …"),
        (("nothing",), "one of sft, preferences, ppo, text"),
        (("preferences", "--packed"), "is not packed"),
    ],
)
def test_what_cannot_be_inspected_is_named(tiny_run: TinyRun, arguments: tuple[str, ...], named: str) -> None:
    what, *rest = arguments
    assert named in tiny.dschat("inspect", what, str(tiny_run.folder), *rest, home=tiny_run.home, check=20).stderr


def test_a_saved_data_set_is_an_input_like_any_other(tmp_path: Path, home: Path) -> None:
    import datasets

    rows = [
        {"text": f"line {i} about {tiny.WORDS[i % 20]}: {i * 7919 % 1009} and {i * 104729 % 997}"} for i in range(60)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    tree = {
        "name": "saved",
        "store": str(tmp_path / "store"),
        "runs": str(tmp_path / "runs"),
        "data": {"text": {"train": [str(tmp_path / "saved")]}},
        "tokenization": {"vocab_size": 300},
        **dict.fromkeys(("pretraining", "sft", "reward", "ppo", "evaluation", "publishing")),
    }
    config = tiny.write_config(tmp_path, tree)
    shown = json.loads(tiny.dschat("run", str(config), "--until", "tokenization", "--json", home=home).stdout)
    assert [stage["state"] for stage in shown["stages"][:2]] == ["done", "done"]
    datasets.Dataset.from_list(rows[:50]).save_to_disk(str(tmp_path / "saved"))
    done = tiny.dschat("resume", "saved", "--runs", str(tmp_path / "runs"), home=home, check=22)
    assert "saved was edited" in done.stderr


def test_a_damaged_shard_is_taken_back_and_made_again_alone(tmp_path: Path, home: Path) -> None:
    rows = [
        {"text": f"line {i} about {tiny.WORDS[i % 30]} {i * 7919 % 1009} and {i * 104729 % 997}"} for i in range(3000)
    ]
    path = tiny.write_jsonl(tmp_path / "t.jsonl", rows)
    tree = {
        "name": "r",
        "store": str(tmp_path / "store"),
        "runs": str(tmp_path / "runs"),
        "data": {"text": {"train": [path]}},
        "tokenization": {"vocab_size": 300, "shard_bytes": 20_000},
        **dict.fromkeys(("pretraining", "sft", "reward", "ppo", "evaluation", "publishing")),
    }
    config = tiny.write_config(tmp_path, tree)
    run = ("run", str(config), "--until", "tokenization")
    shown = json.loads(tiny.dschat(*run, "--json", home=home).stdout)
    folder = Path(shown["stages"][1]["uri"])
    before = {p.name: p.read_bytes() for p in (folder / "text").iterdir()}
    shard = folder / "text" / "shard-00002.bin"
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    assert "shard-00002.bin" in tiny.dschat("verify", str(folder), home=home, check=22).stderr
    assert "taken back" in tiny.dschat("verify", str(folder), "--repair", home=home).stdout
    again = tiny.dschat(*run, home=home).stdout
    assert again.count(" made, ") == 1
    assert "text: shard 2 made" in again
    assert {p.name: p.read_bytes() for p in (folder / "text").iterdir()} == before
    tiny.dschat("verify", str(folder), home=home)
