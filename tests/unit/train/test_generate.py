"""Sampling with a cache against sampling without one, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_core.train.generate import left_pad, pick, positions, sample_replies, uniforms

EOS, PAD, LIMIT = 3, 0, 12


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
        attention_dropout=0.1,
        initializer_range=0.2,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 40, size=length) for length in (5, 1, 17, 8, 8, 3, 30)]


def reference(model: Any, prompt: np.ndarray, choose: Callable[[torch.Tensor, int], int]) -> list[int]:
    """One row, no padding, no cache, the whole sequence at every step."""
    model.eval()
    ids = list(prompt)
    reply: list[int] = []
    with torch.no_grad():
        while len(reply) < LIMIT and EOS not in reply:
            logits = model(input_ids=torch.tensor([ids + reply]), use_cache=False).logits[0, -1]
            reply.append(choose(logits, len(reply)))
    return reply


def sample(model: Any, prompts: list[np.ndarray], **changes: Any) -> list[list[int]]:
    options = {
        "reply_limit": LIMIT,
        "temperature": 0.8,
        "eos_id": EOS,
        "pad_id": PAD,
        "seeds": [(7, i) for i in range(len(prompts))],
    } | changes
    return [reply.tolist() for reply in sample_replies(model, prompts, **options)]


def test_greedy_equals_the_uncached_row_alone(model: Any, prompts: list[np.ndarray]) -> None:
    expected = [reference(model, prompt, lambda logits, _: int(logits.argmax())) for prompt in prompts]
    assert sample(model, prompts, temperature=0) == expected


def test_sampling_equals_the_uncached_row_alone(model: Any, prompts: list[np.ndarray]) -> None:
    expected = []
    for i, prompt in enumerate(prompts):
        stream = uniforms((7, i), LIMIT)

        def choose(logits: torch.Tensor, position: int, stream: np.ndarray = stream) -> int:
            cdf = np.cumsum(torch.softmax(logits.double() / 0.8, -1).numpy())
            return int(np.searchsorted(cdf, stream[position] * cdf[-1], side="right"))

        expected.append(reference(model, prompt, choose))
    replies = sample(model, prompts)
    assert replies == expected
    assert any(reply[-1] == EOS for reply in replies), "the fixture should show a finished reply"
    assert any(len(reply) == LIMIT for reply in replies), "and an unfinished one"


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_replies_do_not_depend_on_the_batch(model: Any, prompts: list[np.ndarray], batch_size: int) -> None:
    assert sample(model, prompts, batch_size=batch_size) == sample(model, prompts)


def test_m5_dropout_is_off_and_the_mode_is_restored(model: Any, prompts: list[np.ndarray]) -> None:
    expected = sample(model, prompts)
    model.train()
    try:
        assert sample(model, prompts) == expected
        assert model.training
    finally:
        model.eval()


def test_m3_eos_inside_the_prompt_does_not_end_the_reply(model: Any) -> None:
    prompt = np.array([5, EOS, 6, EOS])
    reply = sample(model, [prompt])[0]
    stream = uniforms((7, 0), LIMIT)

    def choose(logits: torch.Tensor, position: int) -> int:
        return int(pick(logits[None], torch.tensor([stream[position]], dtype=torch.float64), 0.8))

    assert reply == reference(model, prompt, choose)


def test_a_limit_of_one_gives_the_first_token_of_a_longer_reply(model: Any, prompts: list[np.ndarray]) -> None:
    assert sample(model, prompts, reply_limit=1) == [reply[:1] for reply in sample(model, prompts)]


def test_d7_pad_id_does_not_matter(model: Any, prompts: list[np.ndarray]) -> None:
    assert sample(model, prompts, pad_id=EOS) == sample(model, prompts)


def test_seeds_are_independent_of_the_limit_and_of_each_other() -> None:
    assert uniforms((1, 2), 4).tolist() == uniforms((1, 2), 9)[:4].tolist()
    assert not np.array_equal(uniforms((1, 2), 4), uniforms((2, 1), 4))


def test_pick_follows_the_distribution_and_never_takes_an_impossible_token() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0, -torch.inf])
    uniform = torch.arange(0, 1, 1 / 4000, dtype=torch.float64)
    tokens = pick(logits.expand(len(uniform), -1), uniform, 0.5)
    shares = torch.bincount(tokens, minlength=5) / len(uniform)
    torch.testing.assert_close(shares, torch.softmax(logits / 0.5, -1), atol=1e-3, rtol=0)
    assert shares[1] == 0
    assert shares[4] == 0


def test_left_padding_counts_positions_from_the_first_real_token() -> None:
    ids, mask = left_pad([np.array([4, 5]), np.array([6, 7, 8])], pad_id=9)
    assert ids.tolist() == [[9, 4, 5], [6, 7, 8]]
    assert positions(mask).tolist() == [[0, 0, 1], [0, 1, 2]]
