"""`dschat` as a person meets it: validate, status, verify, chat; exit codes, JSON, and a quick start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny


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
