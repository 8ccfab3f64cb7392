"""Evaluation: what each stage gained, on held-out data, beside baselines that need no training.

One language model is in memory at a time: pretraining, then ppo, then sft, which also judges ppo's replies for the
KL; the reward model comes last. The product is `samples.jsonl` (every sampled reply) and `evaluation.json`:

    schema_version  1
    text            rows, tokens, bytes, unigram, bigram and models.{stage}: {loss, bits_per_byte}
    dialogues       rows, tokens, models.{stage}: {loss, gain}; the gain is a share of pretraining's loss
    reward          pairs, accuracy, length_only, by_kind.{kind} and other_reply: {pairs, accuracy, length_only};
                    other_reply sets the chosen reply against another conversation's, without a target
    detectors       {loops|parroting|shuffled}: {recall, num_known, false_positive_rate, num_human}
    replies         prompts, models.{sft|ppo}: {reward_mean, reward_std, length_mean, finished_share, distinct_2,
                    loops, parroting, shuffled, toxic_share}
    change          sft to ppo: reward_gain, kl, kl_std, length_change, distinct_share, and by flaw
                    flaw_increase and flaw_increase_error, the standard error over the prompts
    fixed_prompts   [{prompt, replies: {stage: text}}]
    headline        the figures that publishing's limits and the run's status read

Losses are nats per target token, lengths tokens with the end of the turn, KL nats per reply, rates shares of the
replies; `reward_gain` is in standard deviations of sft's rewards. Where the run lacks a model or a data set, the
section is null and the figure is absent from the headline.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dschat_core.artifacts import Product
from dschat_core.chat_template import ChatTokenizer, Message, fit_prompt, load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import EvaluationConfig
from dschat_core.data import flaws
from dschat_core.data.gates import toxicity
from dschat_core.data.ngrams import token_baselines
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError
from dschat_core.train import measures
from dschat_core.train.engine import device, is_main
from dschat_core.train.measures import HeldOut, Pair, Reply
from dschat_core.train.reward_model import RewardModel

Prompt = tuple[np.ndarray, list[Message]]

# sft last: it judges ppo's replies.
CAUSAL_STAGES = ("pretraining", "ppo", "sft")
# The baselines and the word-order model need no more than this of the training text.
MAX_BASELINE_TOKENS = 20_000_000
MAX_WORD_ORDER_TOKENS = 1_500_000


def evaluation(job: Job) -> Product:
    """Measure what the run has made; returns part `evaluation` and the headline figures as facts."""
    section: EvaluationConfig = job.config()
    tokenizer = load_tokenizer(job.input("tokenizer"))
    stages = [stage for stage in CAUSAL_STAGES if stage in job.inputs]
    progress = _Progress(job, total=len(stages) + 3)

    text, dialogues = (_read(job, name, section.max_rows) for name in ("text_heldout", "dialogues_heldout"))
    pairs = Pair.read(job.input("preferences_heldout"), section.max_rows) if "preferences_heldout" in job.inputs else []
    prompts = _prompts(job, section, tokenizer)
    result: dict[str, Any] = {
        "schema_version": 1,
        "text": _baselines(job, text) if text else None,
        "dialogues": dialogues.sizes() if dialogues else None,
    }
    progress.done("baselines")

    fixed: dict[str, list[str]] = {}
    replies: dict[str, list[Reply]] = {}
    for stage in stages:
        model = _load(job.input(stage))
        if text:
            result["text"]["models"][stage] = text.per_byte(measures.total_nats(model, text))
        if dialogues:
            loss = measures.total_nats(model, dialogues) / dialogues.num_targets
            result["dialogues"]["models"][stage] = {"loss": loss}
        fixed[stage] = _fixed_replies(model, stage, section, tokenizer)
        if stage != "pretraining" and prompts:
            replies[stage] = _sample(model, stage, prompts, section, tokenizer)
            _judge(model, stage, replies, section.temperature)
        progress.done(stage)
        del model
    everything = [reply for rows in replies.values() for reply in rows]

    result["reward"] = _reward(job, pairs, everything, tokenizer)
    progress.done("reward")
    result["detectors"] = _find_flaws(job, pairs, everything, tokenizer)
    result["replies"] = {
        "prompts": len(prompts),
        "models": _in_order({s: _summary(rows) for s, rows in replies.items()}),
    }
    result["change"] = _change(replies) if {"sft", "ppo"} <= replies.keys() else None
    result["fixed_prompts"] = [
        {"prompt": prompt, "replies": {stage: texts[index] for stage, texts in _in_order(fixed).items()}}
        for index, prompt in enumerate(section.fixed_prompts)
    ]
    _add_gains(result)
    result["headline"] = headline(result)
    progress.done("flaws")
    if is_main():
        _write(Path(job.output_dir), result, everything)
        shutil.copyfile(job.metrics_path, Path(job.output_dir) / "metrics.jsonl")
    parts = {"evaluation": ["evaluation.json", "samples.jsonl"], "metrics": ["metrics.jsonl"]}
    return Product(parts, result["headline"])


def _in_order(by_stage: dict[str, Any]) -> dict[str, Any]:
    return {stage: by_stage[stage] for stage in ("pretraining", "sft", "ppo") if stage in by_stage}


def _read(job: Job, name: str, max_rows: int) -> HeldOut | None:
    return HeldOut.read(job.input(name), max_rows) if name in job.inputs else None


def _prompts(job: Job, section: EvaluationConfig, tokenizer: ChatTokenizer) -> list[Prompt]:
    if "prompts_heldout" not in job.inputs:
        return []
    reader = ShardReader(job.input("prompts_heldout"))
    rows: Sequence[dict[str, Any]] = reader.meta or []
    fitted = [
        fit_prompt(tokenizer, rows[index]["messages"], section.max_prompt_tokens)
        for index in measures.spread(len(rows), section.num_prompts)
    ]
    return [prompt for prompt in fitted if prompt is not None]


def _load(folder: Path) -> Any:
    # On a CPU bf16 is many times slower than fp32, whatever the weights were saved in.
    dtype: Any = "auto" if torch.cuda.is_available() else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device()).eval()


def _baselines(job: Job, text: HeldOut) -> dict[str, Any]:
    vocab_size = 1 + max(int(row.max()) for row in text.rows)
    train = [row for row in measures.training_rows(job.input("text"), MAX_BASELINE_TOKENS) if len(row)]
    vocab_size = max([vocab_size, *(1 + int(row.max()) for row in train)])
    found = token_baselines(train, text.rows, vocab_size=vocab_size)
    return {
        **text.sizes(),
        "bytes": text.num_bytes,
        "unigram": text.per_byte(found.unigram_nats),
        "bigram": text.per_byte(found.bigram_nats),
    }


def _fixed_replies(model: Any, stage: str, section: EvaluationConfig, tokenizer: ChatTokenizer) -> list[str]:
    """Every stage reads the same rendered prompt, pretraining too, which has not learned the template."""
    prompts: list[Prompt] = []
    for text in section.fixed_prompts:
        fitted = fit_prompt(tokenizer, [{"role": "user", "content": text}], section.max_prompt_tokens)
        if fitted is None:
            raise ConfigError(
                f"the fixed prompt {text[:40]!r} is longer than max_prompt_tokens={section.max_prompt_tokens}",
                where="evaluation.fixed_prompts",
                fix="shorten it or raise evaluation.max_prompt_tokens",
            )
        prompts.append(fitted)
    return [reply.text for reply in _sample(model, stage, prompts, section, tokenizer, stream=1)]


def _sample(
    model: Any,
    stage: str,
    prompts: list[Prompt],
    section: EvaluationConfig,
    tokenizer: ChatTokenizer,
    stream: int = 0,
) -> list[Reply]:
    return measures.sample(
        model,
        prompts,
        stage=stage,
        tokenizer=tokenizer,
        reply_limit=section.reply_limit,
        temperature=section.temperature,
        seed=(section.seed, stream),
    )


def _judge(model: Any, stage: str, replies: dict[str, list[Reply]], temperature: float) -> None:
    """Fill in each reply's log-probability under its own model; sft judges those of ppo as well."""
    judged = [reply for rows in replies.values() for reply in rows] if stage == "sft" else replies[stage]
    for reply, nats in zip(judged, measures.reply_nats(model, judged, temperature), strict=True):
        if reply.stage == stage:
            reply.own_nats = nats
        if stage == "sft":
            reply.sft_nats = nats


def _reward(job: Job, pairs: list[Pair], replies: list[Reply], tokenizer: ChatTokenizer) -> dict[str, Any] | None:
    """Score the replies in place; returns the accuracy on the pairs, None without a reward model."""
    if "reward" not in job.inputs:
        return None
    model = RewardModel.load(job.input("reward")).to(device())
    for reply, score in zip(
        replies, measures.reward_scores(model, [r.row for r in replies], tokenizer.pad_id), strict=True
    ):
        reply.reward = score
    return measures.reward_accuracy(model, pairs, tokenizer.pad_id) if pairs else None


def _find_flaws(job: Job, pairs: list[Pair], replies: list[Reply], tokenizer: ChatTokenizer) -> dict[str, Any] | None:
    """Mark flawed and toxic replies in place; returns the detectors' quality, None without known pairs."""
    order = (
        measures.word_order(job.input("text"), tokenizer, MAX_WORD_ORDER_TOKENS)
        if "text" in job.inputs
        else flaws.WordOrder(measures.reply_text(tokenizer, pair.chosen) for pair in pairs)
    )
    found = measures.shared(
        replies, lambda mine: [flaws.find_flaws(r.text, r.messages[-1]["content"], order) for r in mine]
    )
    for reply, named in zip(replies, found, strict=True):
        reply.flaws = list(named)
        reply.toxic = toxicity.lexicon_hits([reply.text])[0] is not None
    return measures.detector_quality(pairs, order, tokenizer) if pairs else None


def _summary(replies: list[Reply]) -> dict[str, Any]:
    rewards = [reply.reward for reply in replies if reply.reward is not None]
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "length_mean": float(np.mean([len(reply.ids) for reply in replies])),
        "finished_share": _share([reply.finished for reply in replies]),
        "distinct_2": flaws.distinct_2(reply.text for reply in replies),
        **{flaw: _share([flaw in reply.flaws for reply in replies]) for flaw in flaws.FLAWS},
        "toxic_share": _share([reply.toxic for reply in replies]),
    }


def _share(marks: list[bool]) -> float:
    return sum(marks) / len(marks)


def _change(replies: dict[str, list[Reply]]) -> dict[str, Any]:
    """What ppo changed on the same prompts and the same dice."""
    before, after = _summary(replies["sft"]), _summary(replies["ppo"])
    kl = [reply.kl for reply in replies["ppo"] if reply.kl is not None]
    found: dict[str, Any] = {
        "kl": float(np.mean(kl)),
        "kl_std": float(np.std(kl)),
        "length_change": after["length_mean"] / before["length_mean"] - 1,
        "flaw_increase": {flaw: after[flaw] - before[flaw] for flaw in flaws.FLAWS},
        "flaw_increase_error": {flaw: _paired_error(replies, flaw) for flaw in flaws.FLAWS},
    }
    if before["distinct_2"]:
        found["distinct_share"] = after["distinct_2"] / before["distinct_2"]
    if before["reward_std"]:
        found["reward_gain"] = (after["reward_mean"] - before["reward_mean"]) / before["reward_std"]
    return found


def _paired_error(replies: dict[str, list[Reply]], flaw: str) -> float:
    """Standard error of a rate's rise over the same prompts: a smaller rise says nothing."""
    pairs = zip(replies["sft"], replies["ppo"], strict=True)
    rises = [float(flaw in after.flaws) - float(flaw in before.flaws) for before, after in pairs]
    return float(np.std(rises) / np.sqrt(len(rises)))


def _add_gains(result: dict[str, Any]) -> None:
    """Each model's loss on assistant tokens as a share below pretraining's."""
    models = (result["dialogues"] or {}).get("models", {})
    if "pretraining" in models:
        base = models["pretraining"]["loss"]
        for entry in models.values():
            entry["gain"] = 1 - entry["loss"] / base


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """The figures publishing's limits are about, flat; those the run does not have are left out."""
    text, reward, change = result["text"] or {}, result["reward"] or {}, result["change"] or {}
    models = result["replies"]["models"]
    last = models.get("ppo") or models.get("sft") or {}
    found: dict[str, Any] = {
        "bits_per_byte": text.get("models", {}).get("pretraining", {}).get("bits_per_byte"),
        "bits_per_byte_unigram": text.get("unigram", {}).get("bits_per_byte"),
        "bits_per_byte_bigram": text.get("bigram", {}).get("bits_per_byte"),
        "sft_gain": (result["dialogues"] or {}).get("models", {}).get("sft", {}).get("gain"),
        "reward_accuracy": reward.get("accuracy"),
        **{f"reward_accuracy_{kind}": entry["accuracy"] for kind, entry in reward.get("by_kind", {}).items()},
        "length_only_accuracy": reward.get("length_only"),
        **{name: change.get(name) for name in ("reward_gain", "kl", "length_change", "distinct_share")},
    }
    for flaw in flaws.FLAWS:
        for moment, stage in (("before", "sft"), ("after", "ppo")):
            found[f"{flaw}_{moment}"] = models.get(stage, {}).get(flaw)
    if change:
        found["flaw_increase"] = max(change["flaw_increase"].values())
    found["toxic_share"] = last.get("toxic_share")
    return {name: round(value, 6) for name, value in found.items() if value is not None}


def _write(out: Path, result: dict[str, Any], replies: list[Reply]) -> None:
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    (out / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    with (out / "samples.jsonl").open("w", encoding="utf-8") as file:
        for reply in sorted(replies, key=lambda r: (r.index, r.stage)):
            file.write(json.dumps(reply.as_dict(), ensure_ascii=False, allow_nan=False) + "\n")


class _Progress:
    """One line on the terminal and one in metrics.jsonl per part of the evaluation, from rank 0."""

    def __init__(self, job: Job, *, total: int) -> None:
        self._path, self._total, self._step, self._mark = job.metrics_path, total, 0, time.perf_counter()
        if is_main():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")

    def done(self, phase: str) -> None:
        """A part is measured; its wall time is that since the part before."""
        now = time.perf_counter()
        self._step, self._mark, spent = self._step + 1, now, now - self._mark
        if is_main():
            line = {"step": self._step, "total_steps": self._total, "step_s": spent, "phases": {phase: spent}}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"stage": "evaluation", **line}) + "\n")
            print(f"Step {self._step}: {phase} measured in {spent:.1f}s", flush=True)
