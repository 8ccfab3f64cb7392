"""The whole pipeline, tiny, through the real command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from dschat_core.config import STAGES
from tests import tiny
from tests.conftest import TinyRun


def states(shown: dict[str, object]) -> dict[str, str]:
    rows = shown["stages"]
    assert isinstance(rows, list)
    return {row["stage"]: row["state"] for row in rows}


def made(shown: dict[str, object]) -> list[str]:
    return [stage for stage, state in states(shown).items() if state == "done"]


def test_all_eight_stages_run_and_verify(tiny_run: TinyRun) -> None:
    assert states(tiny_run.first) == dict.fromkeys(STAGES, "done")
    shown = json.loads(tiny.dschat("status", str(tiny_run.folder), "--json", home=tiny_run.home).stdout)
    assert shown == tiny_run.first
    for row in shown["stages"]:
        assert row["key"]
        assert row["wall_s"] > 0
        tiny.dschat("verify", row["uri"], home=tiny_run.home)


def test_the_run_folder_holds_config_report_and_links(tiny_run: TinyRun) -> None:
    assert yaml.safe_load((tiny_run.folder / "config.yaml").read_text())["name"] == "tiny"
    report = (tiny_run.folder / "report.html").read_text(encoding="utf-8")
    for stage in STAGES:
        assert stage in report
        assert (tiny_run.folder / "links" / stage / "manifest.json").is_file()


def test_lineage_names_the_parents(tiny_run: TinyRun) -> None:
    links = tiny_run.folder / "links"
    inputs = {stage: json.loads((links / stage / "manifest.json").read_text())["inputs"] for stage in STAGES}
    parents = {stage: {entry["stage"] for entry in inputs[stage].values()} - {""} for stage in STAGES}
    assert parents["sft"] == {"tokenization", "pretraining"}
    assert parents["ppo"] == {"tokenization", "sft", "reward"}
    assert parents["evaluation"] == {"tokenization", "pretraining", "sft", "reward", "ppo"}
    assert parents["publishing"] == {"ppo", "evaluation"}


def test_a_second_run_reuses_everything_and_launches_nothing(tiny_run: TinyRun) -> None:
    attempts = sorted(tiny_run.store.glob("*/*/checkpoints/attempt-*"))
    assert states(tiny_run.run()) == dict.fromkeys(STAGES, "reused")
    assert sorted(tiny_run.store.glob("*/*/checkpoints/attempt-*")) == attempts


def test_a_changed_ppo_setting_runs_three_stages(tiny_run: TinyRun) -> None:
    shown = tiny_run.run("--set", "ppo.kl_coef=0.2", "--set", "name=other")
    assert made(shown) == ["ppo", "evaluation", "publishing"]


def test_a_changed_line_of_prompts_runs_what_depends_on_it(tiny_run: TinyRun, tmp_path: Path) -> None:
    shutil.copytree(tiny_run.root / "data", tmp_path / "data")
    prompts = tmp_path / "data" / "prompts.train.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    lines[7] = json.dumps({"prompt": "another garden question about winter bread and music"}) + "\n"
    prompts.write_text("".join(lines))
    text = tiny_run.config.read_text().replace(str(tiny_run.root / "data"), str(tmp_path / "data"))
    config = tmp_path / "tiny.yaml"
    config.write_text(text)
    shown = tiny_run.run("--set", "name=other", config=config)
    assert made(shown) == ["validation", "tokenization", "ppo", "evaluation", "publishing"]


def test_hugging_face_loads_every_model(tiny_run: TinyRun) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    for stage in ("pretraining", "sft", "ppo", "publishing"):
        folder = tiny_run.folder / "links" / stage / "model"
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template
        assert len(tokenizer) <= model.config.vocab_size
    folder = tiny_run.folder / "links" / "reward" / "model"
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.num_labels == 1


def test_chat_answers(tiny_run: TinyRun) -> None:
    arguments = ("--prompt", "river stone", "--reply-limit", "8", "--json")
    first, second = (tiny.dschat("chat", str(tiny_run.folder), *arguments, home=tiny_run.home).stdout for _ in range(2))
    assert json.loads(first)["reply"] == json.loads(second)["reply"]


def test_verify_names_the_changed_file(tiny_run: TinyRun, tmp_path: Path) -> None:
    copy = tmp_path / "artifact"
    shutil.copytree((tiny_run.folder / "links" / "sft").resolve(), copy)
    weights = copy / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    done = tiny.dschat("verify", str(copy), home=tiny_run.home, check=22)
    assert "model/model.safetensors" in done.stderr


def test_resume_runs_the_saved_config(tiny_run: TinyRun) -> None:
    done = tiny.dschat("resume", str(tiny_run.folder), "--json", home=tiny_run.home)
    assert set(states(json.loads(done.stdout)).values()) == {"reused"}


def test_r16_no_secret_is_left_behind(tiny_run: TinyRun) -> None:
    files = [path for path in tiny_run.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.name == "prefect.db" for path in files)
    assert [path for path in files if tiny.CANARY.encode() in path.read_bytes()] == []


def test_resume_refuses_a_changed_input_by_name(tiny_run: TinyRun) -> None:
    path = tiny_run.root / "data" / "dialogues.train.jsonl"
    before = path.read_bytes()
    try:
        path.write_bytes(before + b'{"input": "new", "output": "line"}\n')
        done = tiny.dschat("resume", str(tiny_run.folder), home=tiny_run.home, check=22)
    finally:
        path.write_bytes(before)
    assert "dialogues.train.jsonl was edited" in done.stderr


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        (["sft.learning_rat=1"], 20, "sft.learning_rat"),
        (["data.text.train=[missing.jsonl]"], 20, "missing.jsonl"),
        (["store=/dev/null/store"], 20, "/dev/null/store"),
        (["name='a b'"], 20, "name"),
        (["sft.max_length=999"], 20, "sft.max_length=999"),
    ],
)
def test_bad_config_is_refused_before_anything_runs(
    tiny_run: TinyRun, tmp_path: Path, changes: list[str], code: int, named: str
) -> None:
    sets = [argument for change in [*changes, f"runs={tmp_path}"] for argument in ("--set", change)]
    done = tiny.dschat("run", str(tiny_run.config), *sets, home=tiny_run.home, check=code)
    assert named in done.stderr
    assert "next:" in done.stderr


def test_d4_a_file_without_a_usable_row_names_the_gate(tiny_run: TinyRun, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input": 1}\nnot json\n')
    sets = ("--set", f"data.dialogues.train=[{bad}]", "--set", f"runs={tmp_path}", "--set", f"store={tmp_path}/store")
    done = tiny.dschat("run", str(tiny_run.config), *sets, home=tiny_run.home, check=30)
    assert "dialogues" in done.stderr


def start_sft(tiny_run: TinyRun, name: str, seed: int) -> tuple[subprocess.Popen[bytes], list[str], Path]:
    """A run of its own that reaches sft with a new seed and enough steps to be killed in."""
    sets = [f"name={name}", f"sft.seed={seed}", "sft.max_steps=400", "sft.runtime.checkpoint_every=5"]
    command = [tiny.DSCHAT, "run", str(tiny_run.config), "--until", "sft"]
    command += [argument for change in sets for argument in ("--set", change)]
    # A file, not a pipe: Prefect's embedded server outlives a killed flow and would hold a pipe open.
    with (tiny_run.root / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=tiny.environment(tiny_run.home))

    def committed() -> list[Path]:
        return [
            path
            for path in tiny_run.store.glob("sft/*/checkpoints/step-*/manifest.json")
            if len(tiny.ranks_of(tiny_run.store)) == 2 and path.stat().st_mtime > started
        ]

    started = time.time() - 1
    (checkpoint, *_) = tiny.wait_until(committed, what="a checkpoint of sft")
    return process, command, checkpoint.parent.parent


def test_r1_killed_ranks_fail_the_run_and_the_same_command_resumes(tiny_run: TinyRun) -> None:
    process, command, _ = start_sft(tiny_run, "killed-ranks", 11)
    for pid in tiny.ranks_of(tiny_run.store):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=120)
    output = (tiny_run.root / "killed-ranks.log").read_text()
    assert process.returncode == 11, output
    assert "next:" in output
    assert tiny.processes_of(tiny_run.store / "sft") == []
    shown = json.loads(
        tiny.dschat("status", str(tiny_run.root / "runs/killed-ranks"), "--json", home=tiny_run.home).stdout
    )
    assert states(shown)["sft"] == "failed"
    again = subprocess.run(
        command, capture_output=True, text=True, env=tiny.environment(tiny_run.home), timeout=300, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from step" in again.stdout


def test_r2_a_killed_flow_leaves_no_rank_and_resumes(tiny_run: TinyRun) -> None:
    import psutil

    process, command, _ = start_sft(tiny_run, "killed-flow", 12)
    server = [c for c in psutil.Process(process.pid).children(recursive=True) if "uvicorn" in c.cmdline()]
    process.kill()
    process.wait(timeout=60)
    for child in server:  # Prefect's embedded server, no process of the job
        child.kill()
    tiny.wait_until(lambda: not tiny.processes_of(tiny_run.store / "sft"), what="the job's processes to end")
    shown = json.loads(
        tiny.dschat("status", str(tiny_run.root / "runs/killed-flow"), "--json", home=tiny_run.home).stdout
    )
    assert states(shown)["sft"] == "failed"
    again = subprocess.run(
        command, capture_output=True, text=True, env=tiny.environment(tiny_run.home), timeout=300, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed from step" in again.stdout


def test_r2_a_killed_launcher_is_never_success(tiny_run: TinyRun) -> None:
    import psutil

    process, _, state = start_sft(tiny_run, "killed-launcher", 13)
    for child in psutil.process_iter(["cmdline"]):
        command = child.info["cmdline"] or []
        if "deepspeed.launcher.launch" in command and command[-1].startswith(str(tiny_run.store)):
            child.kill()
    process.wait(timeout=120)
    assert process.returncode == 11, (tiny_run.root / "killed-launcher.log").read_text()
    assert not (state.parent / "manifest.json").exists()
    assert tiny.processes_of(tiny_run.store / "sft") == []


def test_r9_sigterm_leaves_a_checkpoint_at_the_step_boundary(tiny_run: TinyRun) -> None:
    process, _, state = start_sft(tiny_run, "stopped", 14)
    before = {path.name for path in state.glob("step-*")}
    process.terminate()
    process.wait(timeout=120)
    assert process.returncode in (10, 143)
    assert {path.name for path in state.glob("step-*/")} - before
    assert tiny.processes_of(tiny_run.store / "sft") == []
