"""Log-likelihoods of given tokens: equal to a plain forward of one row, whatever the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_core.train import likelihood
from dschat_core.train.likelihood import length_batches, token_nats


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config).train()


def made_rows() -> tuple[list[np.ndarray], list[np.ndarray]]:
    dice = np.random.default_rng(0)
    rows = [dice.integers(0, 50, size) for size in (7, 3, 12, 1, 5)]
    return rows, [dice.random(len(row)) < 0.6 for row in rows]


def plain(model: Any, row: np.ndarray, mask: np.ndarray, temperature: float) -> np.ndarray:
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(row)[None]).logits[0] / temperature
    model.train()
    nats = -torch.log_softmax(logits, -1)
    return np.array([float(nats[t - 1, row[t]]) for t in range(1, len(row)) if mask[t]])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_one_row_at_a_time(model: Any, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, targets = made_rows()
    expected = [plain(model, row, mask, temperature) for row, mask in zip(rows, targets, strict=True)]
    for max_logits in (likelihood.MAX_LOGITS, 50 * 8):
        monkeypatch.setattr(likelihood, "MAX_LOGITS", max_logits)
        found = token_nats(model, rows, targets, temperature=temperature)
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert model.training


def test_position_0_is_no_target_and_a_row_without_targets_gives_none(model: Any) -> None:
    found = token_nats(model, [np.array([1, 2]), np.array([3, 4])], [np.array([True, True]), np.array([True, False])])
    assert [len(nats) for nats in found] == [1, 0]


def test_batches_hold_every_row_once_within_the_limit() -> None:
    lengths = [5, 1, 9, 3, 3, 20, 2]
    batches = length_batches(lengths, 10)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 10 for batch in batches)
