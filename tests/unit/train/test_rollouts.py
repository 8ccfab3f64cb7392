"""Batches of rollouts: padding changes neither log-probabilities nor values, and empty rows weigh nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_core.train.rollouts import Prompt, Rollout, RolloutLog, collate, reply_log_probs
from dschat_core.train.value_model import ValueModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def rows() -> list[Rollout]:
    rng = np.random.default_rng(0)
    shapes = [(5, 4), (1, 9), (12, 1), (7, 6)]
    return [
        Rollout(slot, slot, rng.integers(0, 40, prompt), rng.integers(0, 40, reply), ended=True, score=float(slot))
        for slot, (prompt, reply) in enumerate(shapes)
    ]


def test_m4_a_row_alone_and_in_a_padded_batch(model: Any, rows: list[Rollout]) -> None:
    critic = ValueModel(model.base_model, weight=torch.randn(1, 32), bias=0.3)
    with torch.no_grad():
        batch = collate(rows, pad_id=0, device=CPU)
        logp_BT, entropy_BT = reply_log_probs(model, batch, 0.7)
        values_BT = critic(batch)
        for i, row in enumerate(rows):
            ids = torch.from_numpy(np.concatenate([row.prompt, row.reply]))[None]
            before = slice(len(row.prompt) - 1, -1)
            expected = torch.log_softmax(model(input_ids=ids).logits[0, before] / 0.7, -1)
            length = len(row.reply)
            found = logp_BT[i, :length]
            torch.testing.assert_close(
                found, expected[torch.arange(length), torch.from_numpy(row.reply)], atol=1e-5, rtol=0
            )
            torch.testing.assert_close(entropy_BT[i, :length], -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)
            hidden = model.base_model(input_ids=ids).last_hidden_state[0, before]
            torch.testing.assert_close(values_BT[i, :length], critic.head(hidden).squeeze(-1), atol=1e-5, rtol=0)


def test_gradients_are_finite_and_those_of_the_rows_alone(model: Any, rows: list[Rollout]) -> None:
    def gradient(part: list[Rollout]) -> torch.Tensor:
        model.zero_grad()
        batch = collate(part, pad_id=0, device=CPU)
        logp_BT, _ = reply_log_probs(model, batch, 1.0)
        torch.where(batch.reply_mask_BT, logp_BT, 0).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    together = gradient(rows)
    assert torch.isfinite(together).all()
    alone = sum(gradient([row]) for row in rows)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert not gradient([]).any(), "a batch without rows has no weight"


def test_the_critic_starts_at_zero_or_at_the_reward_models_score(model: Any, rows: list[Rollout]) -> None:
    batch = collate(rows, pad_id=0, device=CPU)
    assert not ValueModel(model.base_model)(batch).any()
    weight = torch.randn(1, 32)
    scaled = ValueModel(model.base_model, weight=weight / 2.0, bias=-3.0 / 2.0)(batch)
    raw = ValueModel(model.base_model, weight=weight)(batch)
    torch.testing.assert_close(scaled, (raw - 3.0) / 2.0)


def test_columns_are_zero_at_padding(rows: list[Rollout]) -> None:
    for row in rows:
        row.logp = np.full(len(row.reply), -1.5, np.float32)
    batch = collate(rows, pad_id=0, device=CPU)
    logp_BT = batch.column(rows, "logp")
    assert torch.equal(logp_BT == -1.5, batch.reply_mask_BT)
    assert not logp_BT[~batch.reply_mask_BT].any()


def test_the_log_keeps_best_worst_and_random_replies_and_is_cut_on_resume(tmp_path: Path, rows: list[Rollout]) -> None:
    prompts = [Prompt(row.prompt, [{"role": "user", "content": f"question {row.slot}"}]) for row in rows]
    for row in rows:
        row.logp = row.logp_ref = np.zeros(len(row.reply), np.float32)
    path = tmp_path / "rollouts.jsonl"

    def write(resume_iteration: int, iterations: list[int]) -> list[dict[str, Any]]:
        with RolloutLog(path, resume_iteration, lambda reply: f"{len(reply)} tokens") as log:
            for iteration in iterations:
                log.write(iteration, rows, prompts, count=1)
        return [json.loads(line) for line in path.read_text().splitlines()]

    undisturbed = write(0, [10, 20, 30])
    with path.open("a") as file:
        file.write('{"iteration": 40, "cut sh')
    assert write(20, [30]) == undisturbed
    best, worst, random = undisturbed[:3]
    assert (best["pick"], best["score"], best["reply"]) == ("best", 3.0, "6 tokens")
    assert (worst["pick"], worst["score"], worst["prompt"][0]["content"]) == ("worst", 0.0, "question 0")
    assert random["pick"] == "random"
