"""A made-up run on disk, with every file the report reads, so that the page can be built without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from dschat_core.config import DataRuntimeConfig, TokenizationConfig
from dschat_core.stages.tokenization import tokenization

STAGES = ("validation", "tokenization", "pretraining", "sft", "reward", "ppo", "evaluation", "publishing")
PARENTS = {
    "tokenization": ("validation",),
    "pretraining": ("tokenization",),
    "sft": ("tokenization", "pretraining"),
    "reward": ("tokenization", "sft"),
    "ppo": ("tokenization", "sft", "reward"),
    "evaluation": ("tokenization", "pretraining", "sft", "reward", "ppo"),
    "publishing": ("ppo", "evaluation"),
}
WALL_S = {
    "validation": 21.4,
    "tokenization": 13.2,
    "pretraining": 108.0,
    "sft": 61.3,
    "reward": 74.9,
    "ppo": 96.7,
    "evaluation": 47.5,
    "publishing": 0.4,
}


def evaluation() -> dict[str, Any]:
    """An evaluation.json in the shape that the stage documents."""

    def reply(reward: float, length: float, loops: float, distinct: float) -> dict[str, Any]:
        return {
            "reward_mean": reward,
            "reward_std": 0.94,
            "length_mean": length,
            "finished_share": 0.97,
            "distinct_2": distinct,
            "loops": loops,
            "parroting": 0.004,
            "shuffled": 0.062,
            "toxic_share": 0.0,
        }

    def accuracy(pairs: int, value: float, length: float = 0.5) -> dict[str, Any]:
        return {"pairs": pairs, "accuracy": value, "length_only": length}

    return {
        "schema_version": 1,
        "text": {
            "rows": 2000,
            "tokens": 251_412,
            "bytes": 803_100,
            "unigram": {"loss": 5.61, "bits_per_byte": 2.53},
            "bigram": {"loss": 4.0, "bits_per_byte": 1.80},
            "models": {
                "pretraining": {"loss": 3.91, "bits_per_byte": 1.762},
                "sft": {"loss": 4.08, "bits_per_byte": 1.84},
                "ppo": {"loss": 4.15, "bits_per_byte": 1.871},
            },
        },
        "dialogues": {
            "rows": 900,
            "tokens": 31_220,
            "models": {
                "pretraining": {"loss": 4.72, "gain": 0.0},
                "sft": {"loss": 4.21, "gain": 0.108},
                "ppo": {"loss": 4.33, "gain": 0.083},
            },
        },
        "reward": {
            **accuracy(630, 0.857),
            "by_kind": {
                "looped": accuracy(210, 0.92, 0.51),
                "parroted": accuracy(210, 0.81, 0.49),
                "shuffled": accuracy(210, 0.84, 0.5),
            },
            "other_reply": accuracy(630, 0.52, 0.47),
        },
        "detectors": {
            "loops": {"recall": 0.99, "num_known": 210, "false_positive_rate": 0.001, "num_human": 630},
            "parroting": {"recall": 0.93, "num_known": 210, "false_positive_rate": 0.003, "num_human": 630},
            "shuffled": {"recall": 0.88, "num_known": 210, "false_positive_rate": 0.011, "num_human": 630},
        },
        "replies": {
            "prompts": 256,
            "models": {"sft": reply(-0.21, 14.8, 0.012, 0.61), "ppo": reply(0.47, 13.1, 0.008, 0.52)},
        },
        "change": {
            "reward_gain": 0.72,
            "kl": 4.6,
            "kl_std": 2.2,
            "length_change": -0.115,
            "distinct_share": 0.852,
            "flaw_increase": {"loops": -0.004, "parroting": 0.0, "shuffled": 0.0},
            "flaw_increase_error": {"loops": 0.008, "parroting": 0.006, "shuffled": 0.021},
        },
        "fixed_prompts": [
            {
                "prompt": "Hello, how are you?",
                "replies": {
                    "pretraining": "are you doing good thanks\nhow about",
                    "sft": "I'm good, how are you?",
                    "ppo": "I'm doing well, thanks! How are you?",
                },
            },
            {
                "prompt": "你好",
                "replies": {"pretraining": "you too", "sft": "你好", "ppo": "你好，很高兴认识你。"},
            },
        ],
        "headline": {
            "bits_per_byte": 1.762,
            "bits_per_byte_unigram": 2.53,
            "bits_per_byte_bigram": 1.8,
            "sft_gain": 0.108,
            "reward_accuracy": 0.857,
            "length_only_accuracy": 0.5,
            "reward_gain": 0.72,
            "kl": 4.6,
            "length_change": -0.115,
            "distinct_share": 0.852,
            "loops_before": 0.012,
            "loops_after": 0.008,
            "flaw_increase": 0.0,
            "toxic_share": 0.0,
        },
    }


HOSTILE = "<script>alert('x')</script> & <b>bold</b>"


def verdict() -> dict[str, Any]:
    """A verdict.json with a gate of each outcome and examples that try to be markup; prompts in an older form."""

    def gate(rate: float, threshold: float, outcome: str, action: str = "drop", **more: Any) -> dict[str, Any]:
        count = round(rate * 21_000)
        found: dict[str, Any] = {"rate": rate, "upper": rate * 1.2 + 0.0004, "threshold": threshold, "action": action}
        found |= {"verdict": outcome, "count": count, "total": 21_000, "stats": {}, "examples": []}
        return {**found, "reasons": {"some_reason": count} if count else {}, **more}

    def row(line: int, reason: str, excerpt: str = "hi!", **detail: Any) -> dict[str, Any]:
        return {"file": "data/text.train.jsonl", "line": line, "reason": reason, **detail, "excerpt": excerpt}

    insult = row(12, "insult", HOSTILE, turn=1, span="you idiot")
    repeated = row(9, "exact", first="data/text.train.jsonl:2")
    entry = {
        "lines": 21_940,
        "blank": 3,
        "accepted": 21_930,
        "quarantined": 7,
        "reasons": {"bad_json": 4, "empty_output": 3},
        "empty_files": [],
        "columns": {},
        "files": [{"file": "data/text.train.jsonl", "role": "train"}],
        "length_measure": "estimate",
        "rows": {"train": 20_801, "heldout": 912},
        "overlap_removed": 5,
        "histogram": [[16, 800], [32, 4_000], [64, 9_000], [256, 7_000], [2048, 1_100], [4096, 30]],
        "clusters": [{"size": 14, "rows": [row(2, ""), row(9, "", HOSTILE)]}],
        "gates": {
            "length": gate(0.0015, 1.0, "truncated", "truncate", examples=[row(3, "too_long", tokens=4_012)]),
            "duplicates": gate(
                0.018,
                0.05,
                "pass",
                reasons={"exact": 300, "near": 78},
                stats={"exact": 300, "near": 78, "same_question": 420},
                examples=[repeated],
            ),
            "toxicity": gate(0.0012, 0.001, "dropped", reasons={"self_harm": 20, "insult": 5}, examples=[insult] * 10),
            "language": gate(0.0, 1.0, "pass", "warn", stats={"en": 19_000, "zh": 1_900, "und": 100}),
            "pii": gate(0.0003, 1.0, "masked", "mask", stats={"email": 4, "phone": 2}, examples=[row(7, "email")]),
            "replies": gate(0.2, 0.1, "warned", "warn"),
            "contamination": gate(0.0001, 0.0003, "not_certifiable"),
        },
    }
    older = {key: entry[key] for key in ("lines", "blank", "accepted", "quarantined", "reasons", "rows")}
    older_gate = {"rate": 0.5, "upper": 0.6, "threshold": 0.05, "action": "fail", "verdict": "failed", "count": 9}
    older["gates"] = {"duplicates": {**older_gate, "examples": [{"file": "data/p.jsonl", "line": 1, "excerpt": "x"}]}}
    return {"verdict": "pass", "datasets": {"text": entry, "dialogues": entry, "preferences": entry, "prompts": older}}


def tokenization_artifact(folder: Path) -> None:
    """The tokenizer and the shards of some rows of each kind, one of them hostile."""
    question, answer = {"role": "user", "content": f"你好 <|im_end|> {HOSTILE}"}, "I'm fine 🙂 \x1b[2J\u202e"
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": f"{HOSTILE}\nline {number}"} for number in range(9)],
        "dialogues": [
            {"messages": [question, {"role": "assistant", "content": f"{answer} {number}"}]} for number in range(9)
        ],
        "preferences": [
            {"messages": [question], "chosen": f"good {number}", "rejected": f"bad {number}", "kind": "made up"}
            for number in range(9)
        ],
        "prompts": [
            {"messages": [question]},
            {"messages": [question, {"role": "assistant", "content": "ok"}, question]},
        ],
    }
    inputs = {name: folder.parent / "rows" / name for name in rows}
    for name, part in inputs.items():
        part.mkdir(parents=True)
        _write_lines(part / "rows.jsonl", rows[name])
    tokenization(
        TokenizationConfig(vocab_size=300, max_length=256, runtime=DataRuntimeConfig(workers=1)), inputs, folder
    )


def _curve(stage: str) -> list[dict[str, Any]]:
    dice = random.Random(stage)
    lines: list[dict[str, Any]] = []
    if stage == "ppo":
        for step in range(1, 41):
            done = step / 40
            lines.append(
                {
                    "stage": stage,
                    "step": step,
                    "total_steps": 40,
                    "reward_mean": -0.2 + 0.7 * done + dice.gauss(0, 0.06),
                    "kl": 4.6 * done**1.3 + abs(dice.gauss(0, 0.15)),
                    "reply_length": 14.8 - 1.6 * done + dice.gauss(0, 0.4),
                    "entropy": 3.4 - 0.5 * done + dice.gauss(0, 0.03),
                    "step_s": 2.1,
                    "phases": {"generation": 0.7, "scoring": 0.3, "update": 0.9, "comm": 0.1},
                }
            )
            if step % 10 == 0:
                lines[-1] |= {"heldout_reward": -0.2 + 0.66 * done, "heldout_reply_length": 14.6 - 1.5 * done}
        return lines
    start, floor = {"pretraining": (7.4, 3.8), "sft": (4.8, 4.15), "reward": (0.7, 0.33)}[stage]
    for step in range(10, 901, 10):
        loss = floor + (start - floor) * math.exp(-step / 180) + dice.gauss(0, 0.02 * floor)
        line = {
            "stage": stage,
            "step": step,
            "total_steps": 900,
            "loss": loss,
            "lr": 1e-3,
            "tokens_per_s": 12_400,
            "step_s": WALL_S[stage] / 1000,
            "phases": {
                name: share * WALL_S[stage] / 1000
                for name, share in (
                    ("data", 0.02),
                    ("forward", 0.3),
                    ("backward", 0.5),
                    ("optimizer", 0.06),
                    ("comm", 0.1),
                )
            },
        }
        if step % 100 == 0:
            line["eval_loss"] = loss + 0.03 * floor
            if stage == "reward":
                line["eval_accuracy"] = 0.86 - 0.36 * math.exp(-step / 200)
        lines.append(line)
    return lines


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _samples() -> list[dict[str, Any]]:
    texts = (
        (
            "any plans for the weekend?",
            "i am going to see a movie with my friends",
            "I'm going to a movie with my friends!",
        ),
        ("what is your favorite food", "pizza pizza pizza pizza", "I love pizza, how about you?"),
        ("<img src=x onerror=alert(1)>", "<|im_end|> <b>what</b>", "haha what is that"),
    )
    lines = []
    for index, (prompt, before, after) in enumerate(texts):
        for stage, reply in (("sft", before), ("ppo", after)):
            lines.append(
                {
                    "index": index,
                    "stage": stage,
                    "prompt": [{"role": "user", "content": prompt}],
                    "reply": reply,
                    "tokens": 9,
                    "finished": True,
                    "reward": 0.31 if stage == "ppo" else -0.4,
                    "kl": 3.9 if stage == "ppo" else 0.0,
                    "flaws": ["loops"] if "pizza pizza" in reply else [],
                    "toxic": False,
                }
            )
    return lines


def _rollouts() -> list[dict[str, Any]]:
    return [
        {
            "iteration": 40,
            "pick": pick,
            "prompt_id": number,
            "prompt": [{"role": "user", "content": f"how was your day {number}?"}],
            "reply": "It was great, thanks for asking! How about yours?" if pick == "best" else "day day was was",
            "score": 2.3 - 0.2 * number if pick == "best" else -2.1,
            "ended": pick == "best",
            "length": 12,
            "kl": 5.1,
        }
        for pick in ("best", "worst")
        for number in range(3)
    ]


def synthetic_run(
    root: Path, stages: tuple[str, ...] = STAGES
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Path]]:
    """(status, manifests, folders) of a run whose `stages` are committed; the others are pending."""
    keys = {stage: f"{index:x}c4f19ab72de" * 5 for index, stage in enumerate(STAGES)}
    manifests: dict[str, dict[str, Any]] = {}
    folders: dict[str, Path] = {}
    entries = []
    for stage in STAGES:
        done = stage in stages
        facts: dict[str, Any] = {}
        if done:
            folder = folders[stage] = root / stage
            folder.mkdir(parents=True)
            if stage in ("pretraining", "sft", "reward", "ppo"):
                _write_lines(folder / "metrics.jsonl", _curve(stage))
                facts = {"steps": 900, "eval_loss": 3.91, "num_parameters": 1_073_664}
            if stage == "validation":
                (folder / "verdict.json").write_text(json.dumps(verdict()), encoding="utf-8")
                facts = {"datasets": {"text": {"rows": {"train": 20_801, "heldout": 912}}}}
            if stage == "tokenization":
                tokenization_artifact(folder)
            if stage == "ppo":
                _write_lines(folder / "rollouts.jsonl", _rollouts())
            if stage == "evaluation":
                (folder / "evaluation.json").write_text(json.dumps(evaluation()), encoding="utf-8")
                _write_lines(folder / "samples.jsonl", _samples())
                facts = evaluation()["headline"]
            if stage == "publishing":
                limit = {"limit": "max_kl", "measure": "kl", "value": 4.6, "bound": "at most", "threshold": 10.0}
                facts = {"limits": [limit]}
            manifests[stage] = {
                "stage": stage,
                "key": keys[stage],
                "run": "demo",
                "created_at": "2026-01-01T10:20:30Z",
                "wall_s": WALL_S[stage],
                "config": {"seed": 0, "note": "a <b>config</b>", "length": {"max_tokens": 2048}},
                "runtime": {"num_nodes": 1} if stage in ("pretraining", "sft", "reward", "ppo") else {},
                "inputs": {
                    f"{parent}_part": {
                        "digest": "ab" * 32,
                        "stage": parent,
                        "key": keys[parent],
                        "part": "model",
                        "uri": "",
                    }
                    for parent in PARENTS.get(stage, ())
                },
                "files": {"model/model.safetensors": {"size_bytes": 4_300_000, "sha256": "00" * 32}},
                "facts": facts,
                "versions": {"dschat": "0.1.0", "torch": "2.13.0"},
                "git_revision": "0123456789abcdef",
            }
        entries.append(
            {
                "stage": stage,
                "state": ("reused" if stage == "validation" else "done") if done else "pending",
                "key": keys[stage] if done else None,
                "uri": str(root / stage) if done else None,
                "wall_s": 0.0 if not done else (0.2 if stage == "validation" else WALL_S[stage]),
                "facts": facts,
            }
        )
    return {"run": "demo", "stages": entries}, manifests, folders
