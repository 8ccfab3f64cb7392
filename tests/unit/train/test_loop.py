"""The training stages on real ranks: the same steps on any number of ranks, resumable bitwise, and what they leave."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_core.chat_template import load_tokenizer
from dschat_core.config import ModelConfig, PretrainingConfig, RewardConfig, RuntimeConfig, SftConfig
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError, NumericalError, PreemptedError
from dschat_core.train import engine, loop, next_token
from dschat_core.train.models import load_causal, new_llama
from dschat_core.train.objectives import next_token_loss, pack_targets
from dschat_core.train.reward_model import RewardModel
from tests.helpers_training import TINY_MODEL, make_job, make_parts, run_ranks

TIMES = {"step_s", "tokens_per_s", "phases"}
SHARED = {"max_length": 64, "global_batch_size": 4, "learning_rate": 3e-3, "eval_every": 3, "eval_rows": 12}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def base(parts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh model with its tokenizer, to start sft and reward from."""
    folder = tmp_path_factory.mktemp("base")
    new_llama(ModelConfig(**TINY_MODEL), load_tokenizer(parts["tokenizer"]), seed=1).save_pretrained(folder)
    engine.copy_tokenizer(parts["tokenizer"], folder)
    return folder


def sft_section(max_steps: int = 6, runtime: dict[str, Any] | None = None, **more: Any) -> SftConfig:
    where = RuntimeConfig(**{"log_every": 1, "checkpoint_every": 2, **(runtime or {})})
    return SftConfig(**{**SHARED, "max_steps": max_steps, "runtime": where, **more})


def _run(stage: str, job: Any) -> dict[str, Any]:
    import importlib

    product = getattr(importlib.import_module(f"dschat_core.stages.{stage}"), stage)(job)
    return {"parts": product.parts, "facts": product.facts}


def _run_stopped(stage: str, job: Any, at_step: int) -> str:
    """Rank 1 alone is asked to stop while it takes step `at_step`."""
    calls = []

    def stop_requested() -> bool:
        calls.append(1)
        return engine.rank() == 1 and len(calls) >= at_step

    engine.stop_requested = stop_requested  # type: ignore[assignment]
    try:
        _run(stage, job)
    except PreemptedError as error:
        return error.what
    return "finished"


def lines(job: Any) -> list[dict[str, Any]]:
    """The metric lines without the times in them."""
    rows = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def inputs_of(stage: str, parts: dict[str, Path], base: Path) -> dict[str, Path]:
    part = {"pretraining": "text", "sft": "dialogues", "reward": "preferences"}[stage]
    names = ["tokenizer", part, f"{part}_heldout"]
    return {name: parts[name] for name in names} | ({} if stage == "pretraining" else {"model": base})


def section_of(stage: str, **more: Any) -> Any:
    runtime = RuntimeConfig(log_every=1, checkpoint_every=2, **more)
    if stage == "pretraining":
        return PretrainingConfig(**SHARED, max_steps=5, model=ModelConfig(**TINY_MODEL), runtime=runtime)
    return {"sft": SftConfig, "reward": RewardConfig}[stage](**SHARED, max_steps=5, runtime=runtime)


@pytest.mark.parametrize("stage", ["pretraining", "sft", "reward"])
def test_r9_r1_stopped_and_resumed_is_bitwise_undisturbed(
    stage: str, parts: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    """Both ranks stop at the same step boundary, after a checkpoint; weights and loss log end up the same."""
    inputs = inputs_of(stage, parts, base)
    straight = make_job(tmp_path / "straight", stage, section_of(stage), inputs)
    stopped = make_job(tmp_path / "stopped", stage, section_of(stage), inputs)
    first = run_ranks(2, _run, stage, straight)[0]
    assert run_ranks(2, _run_stopped, stage, stopped, 3) == ["stopped after step 3 of 5, which was saved"] * 2
    second = run_ranks(2, _run, stage, stopped)[0]
    assert (first["facts"]["resumed_from"], second["facts"]["resumed_from"]) == (0, 3)
    assert {k: v for k, v in second["facts"].items() if k != "resumed_from"} == {
        k: v for k, v in first["facts"].items() if k != "resumed_from"
    }
    assert lines(stopped) == lines(straight)
    weights = [Path(job.output_dir) / "model" / "model.safetensors" for job in (straight, stopped)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [row["step"] for row in lines(straight)] == [1, 2, 3, 4, 5]
    assert lines(straight)[-1]["eval_loss"] == first["facts"]["eval_loss"]


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_m2_micro_batches_and_ranks_change_nothing(
    stage: str, parts: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    """One global batch, cut four ways: the same loss and gradient norm to 1e-6, and nearly the same run."""
    found = []
    for world_size, micro_batch_size in ((1, 4), (1, 1), (2, 2), (2, 1)):
        section = section_of(stage, micro_batch_size=micro_batch_size)
        job = make_job(tmp_path / f"{world_size}-{micro_batch_size}", stage, section, inputs_of(stage, parts, base))
        facts = run_ranks(world_size, _run, stage, job)[0]["facts"]
        assert (facts["world_size"], facts["micro_batch_size"]) == (world_size, micro_batch_size)
        found.append(lines(job))
    for other in found[1:]:
        for name in ("loss", "grad_norm"):
            assert other[0][name] == pytest.approx(found[0][0][name], rel=1e-6)
            assert other[-1][name] == pytest.approx(found[0][-1][name], rel=1e-3)
        assert [row["tokens"] for row in other] == [row["tokens"] for row in found[0]]


def test_d12_seven_rows_on_two_ranks(base: Path, tmp_path: Path) -> None:
    """Equal numbers of steps, no hang, and every row once in an epoch."""
    parts = make_parts(tmp_path / "seven", num_rows=7)
    section = RewardConfig(
        **{**SHARED, "global_batch_size": 3}, epochs=2, runtime=RuntimeConfig(micro_batch_size=1, log_every=1)
    )
    job = make_job(tmp_path, "reward", section, inputs_of("reward", parts, base))
    facts = [result["facts"] for result in run_ranks(2, _run, "reward", job)]
    assert facts[0] == facts[1]
    assert facts[0]["steps"] == 6
    assert facts[0]["tokens"] == 2 * ShardReader(parts["preferences"]).lengths.sum()
    assert facts[0]["padding_share"] > 0


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_exported_model_is_the_trained_one(
    zero_stage: int, parts: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    """It loads by itself, in Hugging Face's layout, and has the held-out loss that training reported."""
    job = make_job(tmp_path, "sft", sft_section(runtime={"zero_stage": zero_stage}), inputs_of("sft", parts, base))
    result = run_ranks(2, _run, "sft", job)[0]
    folder = Path(job.output_dir) / "model"
    assert {name.removeprefix("model/") for name in result["parts"]["model"]} == {p.name for p in folder.iterdir()}
    assert result["parts"]["metrics"] == ["metrics.jsonl"]
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.end_of_turn_id
    assert model.config.pad_token_id == tokenizer.pad_id
    heldout = ShardReader(parts["dialogues_heldout"])
    total, count = 0.0, 0
    for row in range(len(heldout)):
        inputs = pack_targets([[(heldout.tokens(row), heldout.mask(row))]], device=torch.device("cpu"))
        logits = model(inputs.input_ids_BT).logits[0][inputs.positions_N]
        total += float(next_token_loss(logits.detach(), inputs.targets_N))
        count += len(inputs.targets_N)
    assert result["facts"]["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert result["facts"]["train_loss"] < lines(job)[0]["loss"]
    assert result["facts"]["num_parameters"] == model.num_parameters()


def test_reward_learns_and_is_normalised(parts: dict[str, Path], base: Path, tmp_path: Path) -> None:
    section = RewardConfig(**{**SHARED, "global_batch_size": 16}, max_steps=25, runtime=RuntimeConfig())
    job = make_job(tmp_path, "reward", section, inputs_of("reward", parts, base))
    facts = run_ranks(1, _run, "reward", job)[0]["facts"]
    assert facts["accuracy"] > 0.8
    assert set(facts["accuracy_by_kind"]) == {"looped", "shuffled"}
    lengths = ShardReader(parts["preferences_heldout"]).lengths.reshape(-1, 2)
    longer = np.where(lengths[:, 0] == lengths[:, 1], 0.5, lengths[:, 0] > lengths[:, 1])
    assert facts["accuracy_length_only"] == pytest.approx(longer.mean())
    folder = Path(job.output_dir) / "model"
    assert AutoModelForSequenceClassification.from_pretrained(folder).num_labels == 1
    heldout = ShardReader(parts["preferences_heldout"])
    scores = []
    for row in range(0, len(heldout), 2):
        ids = torch.from_numpy(heldout.tokens(row))[None]
        scores.append(float(RewardModel.load(folder).score(ids, torch.ones_like(ids))))
    assert np.mean(scores) == pytest.approx(0.0, abs=1e-4)
    assert np.std(scores) == pytest.approx(1.0, abs=1e-4)


def _run_with_bad_steps(job: Any, bad: list[int]) -> dict[str, Any]:
    """The loss is NaN on the last rank in the steps named (counted from 1)."""
    calls = []

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = next_token_loss(logits, targets)
        if not logits.requires_grad:
            return value
        calls.append(1)
        return value * math.nan if len(calls) in bad and engine.rank() == engine.world_size() - 1 else value

    next_token.next_token_loss = loss  # type: ignore[attr-defined]
    return _run("sft", job)


def test_r7_nan_at_one_step_and_at_every_step(parts: dict[str, Path], base: Path, tmp_path: Path) -> None:
    inputs = inputs_of("sft", parts, base)
    section = sft_section(runtime={"micro_batch_size": 2})
    job = make_job(tmp_path / "once", "sft", section, inputs)
    facts = run_ranks(2, _run_with_bad_steps, job, [3])[0]["facts"]
    assert facts["skipped_steps"] == 1
    rows = lines(job)
    assert [row["loss"] is None for row in rows] == [False, False, True, False, False, False]
    assert math.isfinite(facts["eval_loss"])
    job = make_job(tmp_path / "always", "sft", sft_section(max_steps=20, runtime={"micro_batch_size": 2}), inputs)
    with pytest.raises(NumericalError, match="11 steps in a row"):
        run_ranks(2, _run_with_bad_steps, job, list(range(1, 21)))


def test_a_run_continues_from_its_last_step_to_the_export(parts: dict[str, Path], base: Path, tmp_path: Path) -> None:
    """Killed between the last step and the completion record: nothing is trained again."""
    job = make_job(tmp_path, "sft", sft_section(), inputs_of("sft", parts, base))
    first = run_ranks(1, _run, "sft", job)[0]["facts"]
    again = run_ranks(1, _run, "sft", job)[0]["facts"]
    assert (again["resumed_from"], again["steps"]) == (6, 6)
    assert (again["eval_loss"], again["train_loss"]) == (first["eval_loss"], first["train_loss"])


def test_runtime_cadences(parts: dict[str, Path], base: Path, tmp_path: Path) -> None:
    runtime = {"log_every": 4, "checkpoint_every": 3, "keep_checkpoints": 1}
    job = make_job(
        tmp_path, "sft", sft_section(max_steps=9, runtime=runtime, eval_every=5), inputs_of("sft", parts, base)
    )
    run_ranks(1, _run, "sft", job)
    assert [row["step"] for row in lines(job)] == [4, 5, 8, 9]
    assert ["eval_loss" in row for row in lines(job)] == [False, True, False, True]
    assert [path.name for path in Path(job.state_dir).glob("step-*")] == ["step-9"]
    phases = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    for row in phases:
        # Half a millisecond a step for what is between the timers: at real step times far below 2 %.
        assert sum(row["phases"].values()) >= 0.98 * row["step_s"] - 5e-4


def test_m9_a_vocabulary_extended_by_two_tokens(parts: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(parts["tokenizer"])
    smaller = new_llama(ModelConfig(**TINY_MODEL), tokenizer, seed=1)
    smaller.resize_token_embeddings(tokenizer.vocab_size - 2)
    smaller.save_pretrained(tmp_path / "smaller")
    extended = load_causal(tmp_path / "smaller", tokenizer, max_length=64, seed=0)
    assert extended.get_output_embeddings().weight is extended.get_input_embeddings().weight
    extended.save_pretrained(tmp_path / "extended")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "extended")
    ids = torch.tensor([[5, tokenizer.vocab_size - 1, 7]])
    assert again.config.vocab_size == tokenizer.vocab_size
    torch.testing.assert_close(again(ids).logits, extended(ids).logits, rtol=0, atol=0)
    torch.testing.assert_close(extended(ids[:, :1]).logits[..., :-2], smaller(ids[:, :1]).logits, rtol=1e-6, atol=1e-6)


def test_a_length_beyond_the_context_is_refused(parts: dict[str, Path], base: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_length=65 exceeds the model's context of 64"):
        load_causal(base, load_tokenizer(parts["tokenizer"]), max_length=65, seed=0)


def test_auto_micro_batch_is_bounded_by_the_share() -> None:
    sizes = [
        loop.resolve_micro_batch_size(sft_section(max_length=length, global_batch_size=6)) for length in (64, 256, 4096)
    ]
    assert sizes == [6, 4, 1]
    assert loop.resolve_micro_batch_size(sft_section(runtime={"micro_batch_size": 9}, global_batch_size=6)) == 6
