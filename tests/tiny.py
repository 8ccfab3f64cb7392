"""A tiny pipeline for integration tests: some hundred made-up conversations and a two-layer model."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

DSCHAT = str(Path(sys.executable).parent / "dschat")
REPOSITORY = Path(__file__).resolve().parent.parent

# A secret in every process's environment; a test looks for it in all that a run leaves behind.
CANARY = "canary-7d1f0c"

WORDS = re.findall(
    r"\w+",
    """
    river stone garden winter coffee music travel summer window morning paper market doctor friend school movie yellow
    quiet bread mountain letter station orange walking cooking reading painting running thinking singing
    """,
)


def sentence(random_: random.Random, num_words: int) -> str:
    return " ".join(random_.choice(WORDS) for _ in range(num_words))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_data(folder: Path, *, num_rows: int = 240, num_heldout: int = 24) -> dict[str, dict[str, list[str]]]:
    """Write the four data sets; returns the config's `data` section."""
    folder.mkdir(parents=True, exist_ok=True)
    random_ = random.Random(0)

    def rows(dataset: str) -> dict[str, Any]:
        question, answer = sentence(random_, 9), sentence(random_, 10)
        if dataset == "text":
            return {"text": f"{question}\n{answer}\n{sentence(random_, 12)}"}
        if dataset == "dialogues":
            return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        if dataset == "preferences":
            shuffled = answer.split()
            random_.shuffle(shuffled)
            kind = random_.choice(["shuffled", "looped", "parroted"])
            return {"prompt": question, "chosen": answer, "rejected": " ".join(shuffled), "kind": kind}
        return {"prompt": question}

    data: dict[str, dict[str, list[str]]] = {}
    for dataset in ("text", "dialogues", "preferences", "prompts"):
        made = [rows(dataset) for _ in range(num_rows + num_heldout)]
        data[dataset] = {
            "train": [write_jsonl(folder / f"{dataset}.train.jsonl", made[:num_rows])],
            "heldout": [write_jsonl(folder / f"{dataset}.heldout.jsonl", made[num_rows:])],
        }
    return data


def tiny_tree(root: Path) -> dict[str, Any]:
    """The config tree of a tiny run below `root`, its data written."""
    runtime = {"ranks_per_node": 2, "threads_per_rank": 1, "checkpoint_every": 2, "log_every": 1}
    training = {
        "max_steps": 6,
        "global_batch_size": 8,
        "max_length": 64,
        "eval_every": 3,
        "eval_rows": 16,
        "runtime": runtime,
    }
    return {
        "name": "tiny",
        "store": str(root / "store"),
        "runs": str(root / "runs"),
        "data": make_data(root / "data"),
        "tokenization": {"vocab_size": 400, "max_length": 64},
        "pretraining": {
            **training,
            "model": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_layers": 2,
                "num_heads": 4,
                "context_length": 96,
            },
        },
        "sft": training,
        "reward": training,
        "ppo": {
            "num_iterations": 4,
            "rollout_batch_size": 8,
            "minibatch_size": 4,
            "ppo_epochs": 2,
            "max_prompt_tokens": 48,
            "reply_limit": 12,
            "gamma": 1.0,
            "runtime": runtime | {"checkpoint_every": 1},
        },
        "evaluation": {
            "max_rows": 24,
            "num_prompts": 12,
            "reply_limit": 12,
            "max_prompt_tokens": 48,
            "runtime": runtime,
        },
    }


def write_config(root: Path, tree: dict[str, Any], name: str = "tiny.yaml") -> Path:
    path = root / name
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a `dschat` process with a Prefect of its own and no server configured."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**kept, "PREFECT_HOME": str(home), "NO_COLOR": "1", "WANDB_API_KEY": CANARY, "DB_PASSWORD": CANARY, **more}


def dschat(*arguments: str, home: Path, check: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the real command line; asserts its exit code unless `check` is None."""
    done = subprocess.run(
        [DSCHAT, *arguments], capture_output=True, text=True, env=environment(home, **more), timeout=580, check=False
    )
    assert check is None or done.returncode == check, (
        f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


def ranks_of(store: Path) -> list[int]:
    """Pids of living ranks whose job file lies in this store."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "dschat_core.worker" in command and "--module" not in command and command[-1].startswith(str(store)):
            found.append(process.pid)
    return found


def processes_of(store: Path) -> list[int]:
    """Pids of every process (launchers too) whose command line names this store."""
    import psutil

    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(store) in part for part in process.info["cmdline"] or [])
    ]


def wait_until(condition: Callable[[], Any], *, what: str, timeout_s: float = 240.0) -> Any:
    """Poll until `condition` is truthy and return its value; fails with `what` after the timeout."""
    import time

    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"timed out waiting for {what}")
